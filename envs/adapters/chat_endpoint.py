"""An OpenAI-compatible chat endpoint, asked within bounds.

A request has a time limit. What may pass (nobody answers, 408, 429, 5xx, an answer that is empty or no chat
completion) is asked again, after a pause that the endpoint may name (`Retry-After`); what will not (another
key, another model) is not. An endpoint that refuses the connection to the last try, too, is asked once for
each later answer until it is there again, or every episode would wait for it. OPENAI_API_KEY in the
environment is the key, where the endpoint asks for one: it stands in no message and in no log.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from envs.text_world import Message
from rl_dialog.errors import UserError

SECONDS = 60.0  # for an answer
PAUSES = (0.5, 3.0)  # seconds before it is asked again; so it is asked three times in all
LONGEST_PAUSE = 30.0  # of those that an endpoint names
LARGEST = 1 << 22  # bytes of an answer
PASSING = (408, 409, 425, 429)  # and all from 500 on
GONE: set[str] = set()  # addresses that refused the connection to the last try


class EndpointError(Exception):
    """The endpoint gave no answer; the message says what was asked for and what came."""


class _Passing(Exception):
    """What may be better the next time."""

    def __init__(self, what: str, pause: float = 0.0, *, refused: bool = False) -> None:
        super().__init__(what)
        self.pause, self.refused = pause, refused


@dataclass(frozen=True)
class Answer:
    """What an endpoint said."""

    text: str
    finish_reason: str | None = None
    tries: int = 1


@dataclass(frozen=True)
class ChatEndpoint:
    """POST `address`/chat/completions."""

    address: str  # http://host:port/v1
    model: str = ""  # by default the first one that the endpoint lists
    seconds: float = SECONDS
    request: Mapping[str, Any] = field(default_factory=dict)  # more fields of every request

    def answer(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        request: Mapping[str, Any] | None = None,
        may_be_empty: bool = False,
    ) -> Answer:
        """The reply to `messages`, with `seed` and the fields of `request` (temperature, max_tokens, ...).
        Raises EndpointError."""
        extra = {**self.request, **(request or {})}

        def once(number: int) -> Answer:
            model = self.model or _first_model(self.address.rstrip("/"), self.seconds)
            asked = {"model": model, "messages": list(messages), "seed": (seed + number) % 2**31} | extra
            return Answer(*_said(self._ask("/chat/completions", asked), may_be_empty), number + 1)

        try:
            return self._tried(once, "a reply")
        except EndpointError:
            _first_model.cache_clear()  # it may have another one by now
            raise

    def listed_model(self) -> str:
        """The first model that the endpoint lists. Raises EndpointError where it lists none."""
        return self._tried(lambda _: _first_model(self.address.rstrip("/"), self.seconds), "a list of models")

    def _tried(self, once: Callable[[int], Any], what: str) -> Any:
        """What `once` gives, which is told the number of the try. Raises EndpointError after the last."""
        pauses = () if self.address in GONE else PAUSES
        for number in range(len(pauses) + 1):
            try:
                return once(number)
            except _Passing as error:
                problem = error
            if number < len(pauses):
                time.sleep(min(max(problem.pause, pauses[number]), LONGEST_PAUSE))
        if problem.refused:
            GONE.add(self.address)
        tries = (
            f"within {len(pauses) + 1} tries" if pauses else "at once from an endpoint that was gone before"
        )
        raise EndpointError(f"{self.address}: expected {what} {tries}, got {problem}") from problem

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that came. Raises _Passing or EndpointError."""
        url = self.address.rstrip("/") + path
        try:
            status, headers, raw = _exchange(url, body, self.seconds)
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.ConnectError)
            raise _Passing(_shown(f"{type(error).__name__}: {error}"), refused=refused) from error
        GONE.discard(self.address)
        said = _shown(raw.decode("utf-8", "replace"))
        if status >= 500 or status in PASSING:
            raise _Passing(f"status {status}: {said}", _named_pause(headers.get("retry-after", "")))
        if status != 200:
            hint = "" if status != 404 or "/v1" in url else ". Most addresses end in /v1"
            raise EndpointError(f"{url}: expected status 200, got {status}: {said}{hint}")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _Passing(f"no JSON: {said}") from error


def checked_address(flag: str, address: str) -> str:
    """The address of an endpoint. Raises UserError for what is none, and for one with a password or a key in
    it, which would be logged."""
    try:
        parts, known = urlsplit(address), httpx.URL(address)
        good = parts.scheme in ("http", "https") and bool(known.host) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good:
        raise UserError(f"{flag}: expected the address of an endpoint, http://host:port/v1, got {address!r}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            f"{flag}: expected an address without password, `?` and `#`, because it is logged (the key of "
            f"the endpoint goes into OPENAI_API_KEY), got one of {parts.hostname}"
        )
    return address


@cache
def _client() -> httpx.Client:
    """One per process, so that connections stay open between turns."""
    return httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))


@cache
def _first_model(address: str, seconds: float) -> str:
    listed = ChatEndpoint(address, seconds=seconds)._ask("/models")
    try:
        name = listed["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        name = None
    if not isinstance(name, str):
        raise EndpointError(f"{address}/models: expected a list of models, got {_shown(str(listed))}")
    return name


def _exchange(
    url: str, body: Mapping[str, Any] | None, seconds: float
) -> tuple[int, Mapping[str, str], bytes]:
    """(status, headers, what came). Raises httpx.HTTPError, and _Passing for what takes too long or has no
    end: the limits of httpx are between two pieces."""
    ends, raw = time.monotonic() + seconds, bytearray()
    how = {"headers": _authorization(), "timeout": seconds}
    with _client().stream("GET" if body is None else "POST", url, json=body, **how) as response:
        for piece in response.iter_bytes():
            raw += piece
            if time.monotonic() > ends:
                raise _Passing(f"an answer that was not complete after {seconds:g} s")
            if len(raw) > LARGEST:
                raise _Passing(f"an answer of more than {LARGEST} bytes")
    return response.status_code, response.headers, bytes(raw)


def _said(answer: Any, may_be_empty: bool) -> tuple[str, str | None]:
    """The text of a chat completion and why it ended. Raises _Passing for anything else."""
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _Passing(f"no chat completion: {_shown(str(answer))}") from None
    text = "" if text is None else text
    if not isinstance(text, str) or not _encodable(text):
        raise _Passing(f"a message that is no text: {_shown(ascii(text))}")
    reason = reason if isinstance(reason, str) and _encodable(reason) else None
    if not text.strip() and not may_be_empty:
        raise _Passing(f"an empty message (finish_reason {reason})")
    return text, reason


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        return False
    return True


def _named_pause(retry_after: str) -> float:
    """Seconds; 0 for a date or nothing."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 0.0


def _key() -> str:
    """Raises UserError for a key that no header can carry, without showing it."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError("OPENAI_API_KEY: expected printable ASCII, got something else")
    return key


def _authorization() -> dict[str, str]:
    key = _key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _shown(text: str) -> str:
    """The beginning of what came, in one line; the key, should it be repeated there, is not."""
    key = _key()
    text = text.replace(key, "***") if key else text
    return " ".join(text.split())[:200]
