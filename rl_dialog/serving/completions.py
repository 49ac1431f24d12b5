"""POST /v1/chat/completions: a request to an Ask, the engine's pieces to an answer, and the exchange into the
store before the answer is complete."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_dialog.data.database import UNAVAILABLE, plain_reason
from rl_dialog.data.storable import request_messages
from rl_dialog.data.tokenize import TemplateError, encode_prompt
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.serving.batch import Ask, Token
from rl_dialog.serving.engine import MOST_SCORED, Closed, Piece, QueueFull, Refused
from rl_dialog.serving.metrics import Metrics
from rl_dialog.serving.protocol import ApiError, ChatRequest, generation_settings
from rl_dialog.serving.served import ASSIGNED, Models, Served
from rl_dialog.serving.settings import ServeSettings

if TYPE_CHECKING:
    from sqlalchemy.exc import SQLAlchemyError

    from rl_dialog.data.keys import Key
    from rl_dialog.data.store import Store


STREAM_INTERVAL = 0.03  # seconds between two events of a stream, but for its first and last
# a second at most, of all streams together: on their way to the clients they take processor time from the
# engine
EVENTS = 200


REPLY_ROOM = 64  # tokens of a context that older messages of a prompt do not take from the reply
# What a request may not ask of a model that was drawn while several are compared: one has values or a beta
# and another has not, one draws several replies to say one.
TELLING = {
    "n": [1],
    "beta": [],
    "decoder": ["method"],
    "num_generations": [0],
    "return_values": [False],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
}  # -> what each may be all the same


@dataclass
class Exchange:
    """One request on its way: what was asked, by whom, and what came back so far."""

    request: ChatRequest
    key: str  # name of the API key
    model: Served
    chat: str | None
    ask: Ask
    propensity: float | None = None  # with which its model was drawn, where it begins a chat
    blind: bool = False  # nothing of the answer may tell which model it is
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)
    tokens: list[list[Token]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    reused: int = 0  # tokens of the prompt that the engine still had
    seen: bool = False  # its first token

    def __post_init__(self) -> None:
        self.texts, self.tokens, self.finish = (
            [make() for _ in range(self.ask.choices)] for make in (str, list, str)
        )

    @property
    def messages(self) -> list[dict[str, str]]:
        return [message.plain for message in self.request.messages]

    @property
    def done(self) -> bool:
        return all(self.finish)

    def take(self, piece: Piece) -> None:
        self.texts[piece.choice] += piece.text
        self.tokens[piece.choice] += piece.tokens
        self.finish[piece.choice] = piece.finish
        self.reused = piece.reused

    def settings(self) -> dict[str, Any]:
        """How the replies were drawn, for the store: with these and the checkpoint they can be drawn
        again."""
        ask, decoding = self.ask, self.ask.decoding
        drawn = (
            {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": decoding.top_k}
            if decoding.do_sample
            else {"temperature": 0}
        )
        given = {
            "seed": ask.seed,
            "max_tokens": decoding.max_new_tokens,
            "decoder": ask.decoder,
            "num_generations": decoding.num_generations,
        }
        leaning = ("metadata", "frequency_penalty", "presence_penalty", "logit_bias")
        given |= {name: value for name in leaning if (value := getattr(self.request, name))}
        return (
            drawn
            | given
            | ({} if ask.beta is None else {"beta": ask.beta})
            | ({"stop": list(ask.stop)} if ask.stop else {})
        )


class Mailbox:
    """What the engine's thread hands to a coroutine. What comes until there is text, an end and an error wake
    it at once; what comes between waits for its next look, as a wake-up per token and client would cost more
    than the tokens of a small model."""

    def __init__(self) -> None:
        self._loop, self._rings = asyncio.get_running_loop(), asyncio.Event()
        self._held: deque[Piece | Exception] = deque()
        self._silent = True  # no text yet

    def put(self, what: Piece | Exception) -> None:
        """From any thread."""
        self._held.append(what)
        if self._silent or isinstance(what, Exception) or what.finish:
            self._silent = isinstance(what, Exception) or not what.text
            self._loop.call_soon_threadsafe(self._rings.set)

    async def take(self, interval: float, deadline: float) -> list[Piece | Exception]:
        """What has arrived when woken, or after `interval` seconds; nothing when the deadline passes
        first."""
        with suppress(TimeoutError):
            await asyncio.wait_for(
                self._rings.wait(), timeout=min(interval, max(0.0, deadline - time.monotonic()))
            )
        self._rings.clear()
        return [self._held.popleft() for _ in range(len(self._held))]


class Completions:
    """Answers chat requests with the models of a server and stores the exchanges."""

    def __init__(self, models: Models, store: Store, metrics: Metrics) -> None:
        self.models, self.store, self.metrics = models, store, metrics
        self.streams = 0  # under way

    @property
    def _settings(self) -> ServeSettings:
        return self.models.settings

    async def begin(self, request: ChatRequest, key: Key) -> Exchange:
        """Checks a request and finds the model for it. Raises ApiError."""
        chat, model, propensity = await self._model(request, key)
        blind = self._blind(request)
        ask = await self._ask(request, key.name, model, blind)
        return Exchange(request, key.name, model, chat, ask, propensity, blind)

    def _blind(self, request: ChatRequest) -> bool:
        """May nothing tell which model answers? Raises ApiError where the request asks for what would."""
        if request.model != ASSIGNED or not self.models.blind():
            return False
        telling = next((n for n, may in TELLING.items() if getattr(request, n) not in (None, *may)), None)
        if telling:
            message = f"{telling}: models are compared, and this would tell which one answers"
            raise ApiError(400, message, param=telling, code="invalid_value")
        return True

    async def _ask(self, request: ChatRequest, key: str, model: Served, blind: bool) -> Ask:
        """What the engine is asked. Of models that are compared each must be able to answer: what one of them
        refuses is refused whoever was drawn."""
        models = self.models.compared() if blind else [model]
        decoding = self._decoding(request, generation_settings(request.generation_config), models)
        every = {each.name: each for each in (*models, model)}
        asked = await asyncio.to_thread(self._prompts, request, decoding, every)
        left = min(_left(m, decoding, request, prompt) for m, prompt in asked)
        return Ask(
            prompt=next(prompt for m, prompt in asked if m is model),
            decoding=replace(decoding, max_new_tokens=min(decoding.max_new_tokens, left)),
            seed=(secrets.randbits(63) if request.seed is None else request.seed) % 2**63,
            choices=request.n or 1,
            stop=tuple(request.stop or ()),
            beta=request.beta,
            decoder=request.decoder or "method",
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            values=bool(request.return_values),
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias=tuple((int(name), bias) for name, bias in (request.logit_bias or {}).items()),
            key=key,
            user=request.user or "",
        )

    async def pieces(self, exchange: Exchange) -> AsyncIterator[list[Piece]]:
        """What the engine says, as much as there is at a time, until every choice has ended. Leaving the
        iteration cancels the request.

        Raises ApiError.
        """
        mail = Mailbox()
        ticket = await self._submit(exchange, mail.put)
        deadline = exchange.began + self._settings.request_timeout
        self.streams += bool(exchange.request.stream)
        try:
            while not exchange.done:
                interval = (
                    max(STREAM_INTERVAL, self.streams / EVENTS) if exchange.request.stream else math.inf
                )
                found = await mail.take(interval, deadline)
                if not found and time.monotonic() >= deadline:
                    raise ApiError(
                        503,
                        f"no complete reply within {self._settings.request_timeout:g} seconds",
                        code="timeout",
                    )
                said = [what for what in found if not isinstance(what, Exception)]
                for piece in said:
                    exchange.take(piece)
                if said:  # also what came together with the error that ended it
                    self.metrics.first_token(exchange.model.name, exchange)
                    yield said
                for what in found:
                    if isinstance(what, Exception):
                        raise _refusal(what)
        finally:
            self.streams -= bool(exchange.request.stream)
            if not exchange.done:
                ticket.cancel()

    async def whole(self, exchange: Exchange) -> dict[str, Any]:
        """The answer in one piece, stored."""
        async for _ in self.pieces(exchange):
            pass
        chat = await self._store(exchange)
        choices = []
        for index, text in enumerate(exchange.texts):
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": exchange.finish[index],
            }
            choices.append(choice | self._about(exchange, exchange.tokens[index]))
        return self._head(exchange, "chat.completion", chat) | {
            "choices": choices,
            "usage": self._usage(exchange),
        }

    async def stream(self, exchange: Exchange, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[str]:
        """The answer as server-sent events, the reason why it ended only once the exchange is stored. Errors
        become an event: the status is sent."""
        options, chat = exchange.request.stream_options, exchange.chat
        wants_usage = bool(options and options.include_usage)

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            chunk = (
                self._head(exchange, "chat.completion.chunk", chat)
                | {"choices": choices}
                | ({"usage": None} if wants_usage else {})
                | more
            )
            # ASCII: some clients take U+2028 or U+0085 for the end of a line
            return f"data: {json.dumps(chunk)}\n\n"

        try:
            roles = [
                {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                for i in range(exchange.ask.choices)
            ]
            yield event(roles)
            last: list[dict[str, Any]] = []
            async for found in pieces:
                said, ended = self._choices(exchange, found)
                last += ended
                if said:
                    yield event(said)
            chat = await self._store(exchange)
            yield event(last)
            if wants_usage:
                yield event([], usage=self._usage(exchange))
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"

    def _choices(
        self, exchange: Exchange, found: list[Piece]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Of an event: what each choice says in these pieces, and why it ends with them."""
        said, ended = [], []
        for index in dict.fromkeys(piece.choice for piece in found):
            of_choice = [piece for piece in found if piece.choice == index]
            text = "".join(piece.text for piece in of_choice)
            tokens = [token for piece in of_choice for token in piece.tokens]
            about = self._about(exchange, tokens) if tokens else {}
            if text or about:
                said.append({"index": index, "delta": {"content": text}, "finish_reason": None} | about)
            if of_choice[-1].finish:
                ended.append({"index": index, "delta": {}, "finish_reason": of_choice[-1].finish})
        return said, ended

    # A request, checked.

    async def _model(self, request: ChatRequest, key: Key) -> tuple[str | None, Served, float | None]:
        """The chat that a request belongs to, if it says so, the model that answers, and the probability
        with which it was drawn just now."""
        chat, name, propensity, served = None, request.model, None, self.models.served
        if request.chat_id is not None or request.completion_id is not None:
            known = await asyncio.to_thread(self._chat, request, key.name)
            chat, name = known.id, known.model if name == ASSIGNED else name
        # Of nobody in particular a chat is its own.
        somebody = participant(key, request.user) or chat or secrets.token_hex(16)
        if name == ASSIGNED:
            name, propensity = self.models.draw(somebody)
        if name not in served and request.model == ASSIGNED:  # taken out of service: the chat goes on
            name, _ = self.models.draw(somebody)
        blind = key.blind and request.model != ASSIGNED
        if name not in served or blind:
            expected = ", ".join(map(repr, [*([] if key.blind else served), ASSIGNED]))
            raise ApiError(
                404,
                f"the model {request.model!r} does not exist; expected one of {expected}",
                param="model",
                code="model_not_found",
            )
        return chat, served[name], propensity

    def _chat(self, request: ChatRequest, key: str) -> Any:
        """The chat that a request names, by its id or by one of its completions."""
        try:
            chat = request.chat_id or self.store.chat_of(request.completion_id or "", key=key)
            return self.store.known(chat, key=key, user=request.user or "")
        except KeyError:
            param = "completion_id" if request.chat_id is None else "chat_id"
            whose = f"this API key{' and this user' if request.user else ''}"
            message = f"there is no chat {getattr(request, param)!r} for {whose}"
            raise ApiError(404, message, param=param, code="chat_not_found") from None

    def _decoding(self, request: ChatRequest, config: dict[str, Any], models: Sequence[Served]) -> Decoding:
        """How to draw the reply; a GenerationConfig counts where the request's own fields do not."""

        def given(name: str, default: Any) -> Any:
            value = getattr(request, name)
            return config.get(name, default) if value is None else value

        most = min(model.most_tokens(self._settings) for model in models)
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        wanted = getattr(request, name)
        if wanted is not None and wanted > most:
            message = f"{name}: expected at most {most}, got {wanted}"
            raise ApiError(400, message, param=name, code="invalid_value")
        try:
            wanted = wanted or min(most, int(config.get("max_tokens", self._settings.max_tokens or most)))
            temperature = float(given("temperature", Decoding.temperature))
            top_p = float(given("top_p", Decoding.top_p))
            decoding = Decoding(
                max_new_tokens=wanted,
                max_prompt_length=self._settings.max_prompt_length or most,
                do_sample=temperature > 0,
                temperature=temperature or Decoding.temperature,
                top_p=max(top_p, 1e-6),
                top_k=int(given("top_k", Decoding.top_k)),
                num_generations=request.num_generations or Decoding.num_generations,
            )
            decoding.check()
        except (ValueError, TypeError, OverflowError) as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        return decoding

    def _prompts(
        self, request: ChatRequest, decoding: Decoding, models: dict[str, Served]
    ) -> list[tuple[Served, list[int]]]:
        """The token ids that each model is to continue, and room for a reply behind them."""
        context = min(model.engine.context for model in models.values())
        reply = min(decoding.max_new_tokens, REPLY_ROOM, context // 2)
        room = min(decoding.max_prompt_length, context - reply)
        return [(model, _prompt(request, room, model)) for model in models.values()]

    async def _submit(self, exchange: Exchange, deliver: Any) -> Any:
        """The request in the engine of its model: something that can be cancelled."""
        try:
            return exchange.model.engine.submit(exchange.ask, deliver)
        except (QueueFull, Refused) as error:
            raise _refusal(error) from None
        except Closed as error:
            if (model := self.models.served.get(exchange.model.name)) not in (
                None,
                exchange.model,
            ):  # replaced a moment ago
                exchange.model, exchange.ask = (
                    model,
                    await self._ask(exchange.request, exchange.key, model, exchange.blind),
                )  # its tokens may be others
                return await self._submit(exchange, deliver)
            raise _refusal(error) from None

    # An answer, put together.

    async def _store(self, exchange: Exchange) -> str | None:
        """Writes the exchange; when this returns, it is safe on disk."""
        self.metrics.finished(exchange.model.name, exchange)
        if exchange.request.store is False:
            return exchange.chat
        tokens = [{"prompt": len(exchange.ask.prompt), "completion": len(said)} for said in exchange.tokens]
        try:
            return await asyncio.to_thread(
                self.store.add_turns,
                exchange.messages,
                list(zip(exchange.texts, exchange.finish, tokens, strict=True)),
                chat=exchange.chat,
                key=exchange.key,
                user=exchange.request.user or "",
                model=exchange.model.name,
                checkpoint=exchange.model.checkpoint,
                method=exchange.model.method,
                propensity=exchange.propensity,
                settings=exchange.settings(),
                completion=exchange.id,
                seconds=time.monotonic() - exchange.began,
            )
        except KeyError:
            raise ApiError(
                404,
                f"the chat {exchange.chat!r} was deleted meanwhile",
                param="chat_id",
                code="chat_not_found",
            ) from None
        except UNAVAILABLE as error:
            raise unavailable(error, self.store.name) from None
        except Exception as error:  # the client must not take for kept what is not
            logging.getLogger(__name__).error("an exchange could not be stored", exc_info=error)
            raise ApiError(
                500, "the reply could not be stored; the server's log has the reason", code="not_stored"
            ) from None

    def _usage(self, exchange: Exchange) -> dict[str, Any]:
        """Tokens read and said. Where they would tell which of the compared models it is, all are counted as
        the first of them counts."""
        first = self.models.compared()[0]
        cached, prompt, reply = exchange.reused, len(exchange.ask.prompt), sum(map(len, exchange.tokens))
        if exchange.blind and len({model.words for model in self.models.compared()}) > 1:
            count = first.tokenizer.encode
            cached, prompt = 0, sum(len(count(message["content"])) for message in exchange.messages)
            reply = sum(len(count(text)) for text in exchange.texts)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply} | details

    def _head(self, exchange: Exchange, kind: str, chat: str | None) -> dict[str, Any]:
        name = ASSIGNED if exchange.request.model == ASSIGNED else exchange.model.name
        return {
            "id": exchange.id,
            "object": kind,
            "created": exchange.created,
            "model": name,
            "chat_id": chat,
        } | ({"unused": unused} if (unused := exchange.request.unused) else {})

    def _about(self, exchange: Exchange, tokens: list[Token]) -> dict[str, Any]:
        """Log-probabilities and values of some tokens, as far as they were asked for."""
        found: dict[str, Any] = {}
        if exchange.request.logprobs:
            found["logprobs"] = {
                "content": [self._logprob(exchange, token) for token in tokens],
                "refusal": None,
            }
        if exchange.request.return_values:
            found["values"] = {"content": [_value(token) for token in tokens]}
        return found

    def _logprob(self, exchange: Exchange, token: Token) -> dict[str, Any]:
        text = partial(_token_text, exchange.model.tokenizer)
        top = [text(other) | {"logprob": logprob} for other, logprob in token.top]
        return text(token.id) | {"logprob": token.logprob, "top_logprobs": top}


def _prompt(request: ChatRequest, room: int, model: Served) -> list[int]:
    """The token ids to continue, at most `room`. Older messages are left out where they do not fit, or are
    more than the model has learned to read, as in training; the last one must fit."""
    try:
        messages = request_messages([message.plain for message in request.messages])
        lead = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
        # each message takes a token at least
        messages = messages[:lead] + messages[max(lead, len(messages) - room) :]
        usual = model.lengths.prompt if model.lengths else room
        prompt = encode_prompt(messages, model.tokenizer, max_length=room, usual=usual)
        if len(prompt) == room:
            kept = messages[:lead] + messages[max(lead, len(messages) - 1) :]
            length = len(encode_prompt(kept, model.tokenizer, max_length=2**31))
            if length > room:
                message = f"expected at most {room} tokens in the system prompt and the last message"
                message += f", got {length}"
                raise ApiError(400, message, param="messages", code="context_length_exceeded")
    except TemplateError as error:
        message = f"messages: the model's chat template refuses them: {error}"
        raise ApiError(400, message, param="messages", code="invalid_value") from None
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None
    return prompt


def _left(model: Served, decoding: Decoding, request: ChatRequest, prompt: list[int]) -> int:
    """The longest reply in tokens for which the model has room behind a prompt, where several are drawn to
    say the best in each of them."""
    own = model.engine.method.num_generations if request.decoder != "lm" else 1
    draws = (decoding.num_generations or own) if decoding.do_sample else 1
    room = model.engine.context if draws == 1 else min(model.engine.context, MOST_SCORED // draws)
    return max(1, room - len(prompt))


def participant(key: Key, user: str | None) -> str:
    """Whose chats are one person's, as far as the server can tell: those of a participant's key, else those
    of a key and user; "" for nobody it knows."""
    whose = key.name if key.blind else f"{key.name}\n{user or ''}"
    return whose.strip("\n")


def unavailable(error: SQLAlchemyError, store: str) -> ApiError:
    """The answer where the store takes nothing for now. The log has the reason, in a line."""
    logging.getLogger(__name__).error("%s does not take what it is given: %s", store, plain_reason(error))
    message = "the store takes nothing for now, so nothing of this request is kept: try again later"
    return ApiError(503, message, code="not_stored", headers={"Retry-After": "10"})


def _refusal(error: Exception) -> ApiError:
    """What ended a request, as an answer."""
    if isinstance(error, QueueFull):
        headers = {"Retry-After": f"{error.retry_after:.0f}"}
        return ApiError(
            429, f"the server is busy: {error}", kind="rate_limit_error", code="queue_full", headers=headers
        )
    if isinstance(error, Closed):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "1"})
    if isinstance(error, Refused):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(
        500, "the model failed on this batch of requests; the server's log has the reason", code="model_error"
    )


def _token_text(tokenizer: Any, token: int) -> dict[str, Any]:
    """As it stands in a text, behind another token: alone many tokenizers leave its space out."""
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    text = tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :]
    whole = "\ufffd" not in text  # a part of a character has no text of its own
    return {"token": text, "bytes": list(text.encode("utf-8")) if whole else None}


def _value(token: Token) -> dict[str, Any]:
    advantage = None if token.q is None or token.v is None else token.q - token.v
    return {"token": token.text, "q": token.q, "v": token.v, "advantage": advantage, "logprob": token.logprob}
