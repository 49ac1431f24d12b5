"""What clients send and get: OpenAI's chat completions with a few fields of ours, and the routes around them
(chats, feedback, ratings).

Unknown fields are refused: a misspelt `temperature` must not be ignored. Fields of OpenAI's that would change
the reply and that we do not have are refused when they ask for something.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from rl_dialog.errors import UserError

MAX_CHOICES = 16
MAX_STOPS = 4
RATINGS = ("quality", "fluency", "diversity", "contingency", "empathy")
TOKEN_ID = re.compile("[0-9]{1,18}")  # no vocabulary is larger, and int() refuses thousands of digits
LONGEST_ERROR = 1000  # characters of an error's text; it may quote what was sent


def _storable(text: str) -> str:
    if "\0" in text:
        raise UserError("expected a text without NUL characters, which no database can hold")
    return text


Text = Annotated[str, Field(max_length=200_000)]
Name = Annotated[str, Field(max_length=256), AfterValidator(_storable)]
MetaKey = Annotated[str, Field(max_length=64), AfterValidator(_storable)]
MetaValue = Annotated[str, Field(max_length=512), AfterValidator(_storable)]
Stop = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_storable)]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        message = message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]}..."
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Error(BaseModel):
    """What an ApiError looks like, for /openapi.json."""

    class Told(BaseModel):
        message: str
        type: str
        param: str | None
        code: str | None

    error: Told


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Part(BaseModel):
    """A part of a message's content; only text."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message. What else OpenAI's messages may carry is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=1000, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    content: Text | Annotated[list[Part], Field(max_length=1000, fail_fast=True)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _reads_text(cls, content: Any) -> Any:
        """Says it in one sentence, where pydantic would name both of the forms that it is not."""
        if content is not None and not isinstance(content, str | list):
            raise UserError("expected a text or a list of parts")
        if isinstance(content, list):  # an assistant's refusal is what it said
            content = [
                {"type": "text", "text": part.get("refusal")}
                if isinstance(part, dict) and part.get("type") == "refusal"
                else part
                for part in content
            ]
        kinds = [part.get("type") if isinstance(part, dict) else part for part in content or () if part]
        other = next((kind for kind in kinds if kind != "text"), None) if isinstance(content, list) else None
        if other is not None:
            raise UserError(
                f'expected parts {{"type": "text", "text": ...}}, got {str(other)[:60]!r}: the '
                "models of this server read text only"
            )
        return content

    @property
    def plain(self) -> dict[str, Any]:
        """The message as a Dialog holds it, with the tools that it calls, or answers for."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content or ())
        )
        role = "system" if self.role == "developer" else self.role
        tools = {name: getattr(self, name) for name in ("name", "tool_calls", "tool_call_id")}
        return {"role": role, "content": content} | {name: told for name, told in tools.items() if told}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class Drawing(_Body):
    """How a reply is drawn, as far as a transformers GenerationConfig says it too."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """sample among the k likeliest tokens; 0 keeps all"""

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float | None) -> float | None:
        if value and value < 0.01:
            raise UserError("expected 0, which is the likeliest reply, or at least 0.01")
        return value


class ChatRequest(Drawing):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2000, fail_fast=True)]
    model: Name
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[Stop] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: Name | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """taken from the logit of a token for each time that the reply has said it"""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """taken once from the logits of all tokens that the reply has said"""
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1000)] | None
    ) = None
    """token id -> what is added to its logit"""
    metadata: dict[MetaKey, MetaValue] | None = None
    store: bool | None = None
    """false: this exchange is not stored, so it can be neither voted on nor trained on"""
    # ours
    chat_id: Name | None = None
    """the chat that this request continues: from POST /v1/chats, or from an earlier answer"""
    completion_id: Name | None = None
    """another way to say so: the `id` of any answer of the chat"""
    beta: Annotated[float, Field(ge=-1000, le=1000)] | None = None
    """another strength of the values than the checkpoint's, where its method has one"""
    decoder: Literal["method", "lm"] | None = None
    """lm: the language model alone, without values and without choosing among replies"""
    num_generations: Annotated[int, Field(ge=0, le=MAX_CHOICES)] | None = None
    """draw so many replies per choice and say the best; 0 is what the method wants"""
    return_values: bool | None = None
    """report Q, V and Q - V of every token"""
    generation_config: Annotated[str, Field(max_length=20_000)] | None = None
    """JSON of a transformers GenerationConfig (`transformers chat` sends one): what it sets counts where the
    fields above do not"""
    # what clients send by habit: accepted, without effect here, and reported in the answer's `unused`
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    verbosity: Any = None
    # refused when they ask for something
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: Any = None
    web_search_options: Any = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    audio: Any = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        found = [value] if isinstance(value, str) else value
        if found is not None and not isinstance(found, list):
            raise UserError("expected a text or a list of them")
        if found and len(found) > MAX_STOPS:
            raise UserError(f"expected at most {MAX_STOPS} texts, got {len(found)}")
        return found

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if wrong := next((name for name in value or {} if not TOKEN_ID.fullmatch(name)), None):
            raise UserError(f"expected ids of tokens as names, got {wrong[:40]!r}")
        return value

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        for name in ("tools", "functions", "audio", "web_search_options"):
            if getattr(self, name):
                raise UserError(f"{name} is not supported by this server: leave it out")
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise UserError(f"{name} is not supported by this server: leave it out")
        if self.response_format not in (None, {"type": "text"}):
            raise UserError("response_format: only text is supported by this server")
        if self.modalities not in (None, [], ["text"]):
            raise UserError("modalities: only text is supported by this server")
        if self.chat_id is not None and self.completion_id is not None:
            raise UserError("completion_id: expected it in place of chat_id, got both")
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs: expected logprobs true beside it")
        if not self.messages[-1].plain["content"] and self.messages[-1].role == "user":
            raise UserError("messages: expected text in the last message, got none")
        return self

    @property
    def unused(self) -> list[str]:
        """The fields that were sent and have no effect."""
        return [name for name in UNUSED if getattr(self, name) is not None]


UNUSED = (
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "verbosity",
)


class ChatStart(_Body):
    """POST /v1/chats."""

    model: Name | None = None
    user: Name | None = None
    consent: Text | None = None


class Feedback(_Body):
    """POST /v1/feedback. A field that is left out stays as it was; `edit: null` takes an edit back."""

    completion_id: Name
    index: Annotated[int, Field(ge=0, lt=MAX_CHOICES)] = 0
    vote: Literal[-1, 0, 1] | None = None
    edit: Annotated[str, Field(min_length=1, max_length=20_000)] | None = None


class Ratings(_Body):
    """POST /v1/chats/{id}/ratings."""

    quality: Annotated[int, Field(ge=1, le=7)] | None = None
    fluency: Annotated[int, Field(ge=1, le=7)] | None = None
    diversity: Annotated[int, Field(ge=1, le=7)] | None = None
    contingency: Annotated[int, Field(ge=1, le=7)] | None = None
    empathy: Annotated[int, Field(ge=1, le=7)] | None = None
    comments: Annotated[str, Field(max_length=20_000)] = ""


def explain(errors: list[dict[str, Any]], form: type[BaseModel] = ChatRequest) -> ApiError:
    """The first thing that is wrong with a request, which should have been a `form`."""
    # of the forms that a value may have and has not, the one that it was nearest to
    error = max(errors, key=lambda each: (each["loc"][:2] == errors[0]["loc"][:2], len(each["loc"])))
    if error["type"] == "json_invalid":
        return ApiError(
            400,
            f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}",
            code="invalid_value",
        )
    place = [str(part)[:100] for part in error["loc"] if part not in ("body", "query", "path")]
    if not place and error["type"] != "value_error":
        return ApiError(400, _no_object(error.get("input")), code="invalid_value")
    if (
        error["type"] != "extra_forbidden"
    ):  # pydantic's own names for the parts of a union say nothing to a client
        place = [part for part in place if part.isalnum() or part.isidentifier()]
    param = ".".join(place) or None
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(place[-1], form.model_fields, n=1)
        return ApiError(
            400,
            f"unknown field {param}" + (f"; did you mean {close[0]}?" if close else ""),
            param=param,
            code="unknown_parameter",
        )
    message = error["msg"].removeprefix("Value error, ")
    named = message.split()[0].rstrip(":")
    param = param or (named if named in ChatRequest.model_fields else None)
    where = "" if param is None or message.startswith((param, *place[:1])) else f"{param}: "
    return ApiError(400, f"{where}{message}", param=param, code="invalid_value")


def _no_object(body: Any) -> str:
    """What is wrong with a body that is no JSON object."""
    if isinstance(body, bytes | str):
        return (
            "expected a JSON object with the header Content-Type: application/json, got another type or none"
        )
    return f"expected a JSON object as the body, got {'none' if body is None else type(body).__name__}"


def generation_settings(text: str | None) -> dict[str, Any]:
    """Fields of a request from the JSON of a transformers GenerationConfig."""
    try:
        given = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ApiError(
            400, "generation_config: expected a JSON object", param="generation_config", code="invalid_value"
        )
    if given.get("num_beams") not in (None, 1):
        raise ApiError(
            400,
            "generation_config: expected num_beams 1, this server does not run beam searches",
            param="generation_config",
        )
    found = {name: given.get(name) for name in ("temperature", "top_p", "top_k")} | {
        "max_tokens": given.get("max_new_tokens")
    }
    if given.get("do_sample") is False:
        found["temperature"] = 0
    try:
        return Drawing.model_validate(found).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise explain([{**first, "loc": ("generation_config", *first["loc"])}]) from None
