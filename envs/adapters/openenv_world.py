"""Worlds behind a server that speaks OpenEnv's WebSocket protocol: `openenv:ws://localhost:8000`.

    {"type": "reset", "data": {"seed": 1}}        -> {"type": "observation",
                                                      "data": {observation, reward, done}}
    {"type": "step", "data": {"message": "[4]"}}  -> the same
    {"type": "close"}
    whatever goes wrong                           -> {"type": "error", "data": {message, code}}

Options of the name, for servers other than ours (`python -m pipelines.serve_env`):

    action     the field of an action that takes the reply; by default what the server's /schema says, else
               `message`
    text       the field of an observation that is the text; by default its `messages`, `prompt`, `text`,
               `content`, ..., else the whole observation as JSON
    seconds    how long to wait for the server, by default 60

A server of ours answers with the whole conversation. What any other says is added to it as the user's words,
unless it sends the conversation so far and more.
A server that cannot be reached when a process makes its first world is an error. One that goes away later,
answers with an error, with what is no observation or not in time makes episodes failed ones until it is back:
each `reset` connects anew.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from envs.adapters.textarena_game import fresh_seed
from envs.text_world import MAX_TURNS, Message
from rl_dialog.data.schema import failure_of
from rl_dialog.errors import UserError

SECONDS, CONNECT_SECONDS = 60.0, 10.0
LARGEST = 16 * 2**20  # bytes of an answer
ROLES = ("system", "user", "assistant", "tool")
TEXTS = ("prompt", "text", "content", "message", "response", "echoed_message", "result", "output")
Stepped = tuple[list[Message], Any, bool, bool, dict[str, Any]]
SCHEMAS: dict[str, dict[str, Any]] = {}  # what servers said to this process, by address


class Gone(Exception):
    """The server did not answer as it should."""


class OpenEnvWorld:
    """A session with a server, opened by the first `reset`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Raises UserError for an address that is none, for unknown options, and where nobody answers."""
        given = dict(options or {})
        self.url = _address(url)
        self.seconds = given.pop("seconds", SECONDS)
        self.text, action = (given.pop(field, None) for field in ("text", "action"))
        if given:
            wrong = ", ".join(given)
            raise UserError(f"env 'openenv:{url}': expected options action, text, seconds; got {wrong}")
        _check_options(url, self.seconds, text=self.text, action=action)
        _library()
        schema = _schema(self.url, self.seconds)
        self.action = action or _action_field(schema)
        most = schema.get("max_turns")
        self.max_turns = most if isinstance(most, int) and most > 0 else MAX_TURNS
        self.messages: list[Message] = []
        self.seed, self.replies = 0, []
        self._socket: Any = None

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The episode of a seed."""
        self.seed, self.replies, self.messages = fresh_seed() if seed is None else seed, [], []
        told: dict[str, Any] = {}
        try:
            answer = self._ask({"type": "reset", "data": {"seed": self.seed}})
            self._hear(answer)
            told, failed = _metadata(answer), _failure(answer)
            if answer.get("done") and failed is None:
                failed = f"{self.url}: expected an episode, got one that is over before anything was said"
        except Gone as gone:
            failed = str(gone)
        if not self.messages:
            self.messages = [{"role": "user", "content": "There is no conversation."}]
        return list(self.messages), _metadata_info(failed, told)

    def step(self, reply: str) -> Stepped:
        """What the server says to a reply."""
        self.messages.append({"role": "assistant", "content": reply})
        try:
            answer = self._ask({"type": "step", "data": {self.action: reply}})
            reward = _reward(answer)
        except Gone as gone:
            self.close()
            return list(self.messages), None, False, True, {"failed": str(gone)}
        self.replies.append(reply)
        self._hear(answer)
        told, failed = _metadata(answer), _failure(answer)
        truncated = bool(told.get("truncated")) or failed is not None
        done = told["terminated"] if _is_ours(answer) else bool(answer.get("done")) and not truncated
        if reward is None and not _is_ours(answer) and not done and not truncated:
            reward = 0.0  # another's server may leave it out until the end
        return list(self.messages), reward, done, truncated, _metadata_info(failed, told)

    def close(self) -> None:
        """Ends the session."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_socket": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A session of one's own, in which the same was said."""
        vars(self).update(state)
        if not self.messages:
            return
        try:
            self._ask({"type": "reset", "data": {"seed": self.seed}})
            for reply in self.replies:
                self._ask({"type": "step", "data": {self.action: reply}})
        except Gone:
            self.close()  # the next step says so

    def snapshot(self) -> dict[str, Any]:
        """The seed and what was said, from which `restore` gets there again."""
        messages = [dict(each) for each in self.messages]
        return {"seed": self.seed, "replies": list(self.replies), "messages": messages}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Says everything again."""
        kept = {key: list(value) if isinstance(value, list) else value for key, value in saved.items()}
        self.__setstate__(vars(self) | kept)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        """Adds what the server said."""
        observed = answer.get("observation")
        whole = observed.get("messages") if isinstance(observed, dict) else None
        if _is_conversation(whole) and (_is_ours(answer) or whole[: len(self.messages)] == self.messages):
            self.messages = [dict(message) for message in whole]
            return
        self.messages.append({"role": "user", "content": _words(observed, self.text)})

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer. Raises Gone where there is none in time, or an error."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        if self._socket is None and message["type"] != "reset":
            raise Gone(f"{self.url}: the session is over")
        try:
            self._socket = self._socket or self._connected()
            with suppress(ConnectionClosed):  # what the server said before it closed can still be read
                self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self.seconds))
        except (OSError, TimeoutError, WebSocketException, ValueError, RecursionError) as error:
            self.close()
            why = f"no answer in {self.seconds:g} s" if isinstance(error, TimeoutError) else str(error)
            raise Gone(f"{self.url}: {type(error).__name__}: {why}") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or answer.get("type") != "observation":
            self.close()
            raise Gone(f"{self.url}: expected an observation, got {str(answer)[:300]}")
        if data.get("done") not in (None, True, False):
            self.close()
            raise Gone(f"{self.url}: expected true or false as done, got {str(data['done'])[:100]}")
        return data

    def _connected(self) -> Any:
        from websockets.sync.client import connect

        waits = min(CONNECT_SECONDS, self.seconds)
        limits = {"open_timeout": waits, "close_timeout": 1.0, "max_size": LARGEST}
        try:
            return connect(f"{self.url}/ws", proxy=None, **limits)
        except AssertionError as error:  # websockets', where a server closes before it is asked
            raise ConnectionRefusedError("the server closed the connection") from error


def _library() -> None:
    """Raises UserError where the WebSocket library is not installed."""
    try:
        import websockets  # noqa: F401
    except ImportError as error:
        what = f"expected websockets for worlds named openenv:..., got {error}"
        raise UserError(f"{what}; pip install websockets") from error


def _check_options(url: str, seconds: Any, **fields: Any) -> None:
    """Raises UserError for a time that is none, and for fields that are no names."""
    if not _finite(seconds) or seconds <= 0 or isinstance(seconds, bool):
        raise UserError(f"env 'openenv:{url}': expected seconds to be a number above 0, got {seconds!r}")
    for name, field in fields.items():
        if not isinstance(field, str | None):
            raise UserError(f"env 'openenv:{url}': expected {name} to be the name of a field, got {field!r}")


def _address(url: str) -> str:
    """ws:// or wss:// with host and port. Raises UserError for anything else."""
    try:
        parts = urlsplit(url if "://" in url else f"ws://{url}")
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        known = scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or half of an IPv6 address
        known = False
    if not known:
        expected = "an address such as openenv:ws://localhost:8000"
        raise UserError(f"env 'openenv:{url}': expected {expected}, got {url!r}")
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}"


def _schema(url: str, seconds: float) -> dict[str, Any]:
    """What the server says of its world, if anything; of one that went away, what it said before: verbs make
    a world for each episode, and those that were played are not lost. Raises UserError where nobody ever
    answered."""
    page = f"http{url[2:]}/schema"  # ws -> http, wss -> https
    waits = min(CONNECT_SECONDS, seconds)
    try:
        with httpx.stream("GET", page, timeout=waits, trust_env=False) as answer:
            text = _body(answer, waits)
        schema = json.loads(text) if answer.is_success else {}
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        if url in SCHEMAS:
            return SCHEMAS[url]
        got = f"got {type(error).__name__}: {error}"
        raise UserError(f"env 'openenv:{url}': expected a server that answers at {page}, {got}") from error
    except (ValueError, RecursionError):
        schema = {}
    SCHEMAS[url] = schema if isinstance(schema, dict) else {}
    return SCHEMAS[url]


def _body(answer: httpx.Response, seconds: float) -> bytes:
    """All of the body. Raises TimeoutError where that takes longer, as with a byte now and then for ever."""
    found, deadline = b"", time.monotonic() + seconds
    for piece in answer.iter_bytes():
        found += piece
        if time.monotonic() > deadline or len(found) > LARGEST:
            raise TimeoutError(f"{len(found)} bytes and no end of the answer")
    return found


def _action_field(schema: Mapping[str, Any]) -> str:
    """The field of the server's actions that takes a text."""
    action = schema.get("action")
    fields = action.get("properties") if isinstance(action, dict) else None
    if not isinstance(fields, dict):
        return "message"
    described = {name: about for name, about in fields.items() if isinstance(about, dict)}
    texts = [name for name, about in described.items() if about.get("type") == "string"]
    required = action.get("required")
    needed = [name for name in texts if isinstance(required, list) and name in required]
    return next(iter([*needed, *texts]), "message")


def _metadata(answer: Mapping[str, Any]) -> dict[str, Any]:
    told = answer.get("metadata")
    return told if isinstance(told, dict) else {}


def _is_ours(answer: Mapping[str, Any]) -> bool:
    """Whether a server of ours says it (`rl_dialog/serving/worlds.py`). Of another's metadata only
    `truncated` and `info` are known to mean the same."""
    return {"terminated", "truncated", "info"} <= _metadata(answer).keys()


def _failure(answer: Mapping[str, Any]) -> str | None:
    return failure_of(_metadata(answer)) if _is_ours(answer) else None


def _reward(answer: Mapping[str, Any]) -> Any:
    """The reward, by role in a world of several of ours. Raises Gone for one that is no number."""
    by_role = _metadata(answer).get("rewards") if _is_ours(answer) else None
    reward = answer.get("reward") if by_role is None else by_role
    if reward is None:
        return None
    numbers = [reward] if by_role is None else by_role.values() if isinstance(by_role, dict) else [by_role]
    if not all(number is None or _finite(number) for number in numbers):
        raise Gone(f"expected a finite number as reward, got {str(reward)[:100]}")
    return reward


def _finite(number: Any) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:
        return False


def _metadata_info(failed: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    info = told.get("info")
    info = dict(info) if isinstance(info, dict) else {}
    return info | ({} if failed is None else {"failed": str(failed)})


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(each, dict) and each.get("role") in ROLES for each in messages)
        and all(isinstance(each.get("content", 0), str | None) for each in messages)
    )


def _words(observed: Any, field: str | None) -> str:
    """What an observation says, in words."""
    if isinstance(observed, dict):
        told = observed.get("messages")
        if field is None and isinstance(told, list) and told and all(isinstance(each, dict) for each in told):
            return "\n".join(str(each.get("content", each)) for each in told)
        for name in TEXTS if field is None else (field,):
            if isinstance(observed.get(name), str) and observed[name]:
                return observed[name]
    return observed if isinstance(observed, str) else json.dumps(observed, ensure_ascii=False)
