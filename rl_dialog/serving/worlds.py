"""A world to talk in, served by OpenEnv's WebSocket protocol to any trainer.

    /ws        {"type": "reset", "data": {"seed": 1}}            begins the episode of a seed
               {"type": "step", "data": {"message": "hello"}}    says something
               both answer {"type": "observation", "data": {"observation": {...}, "reward": 0, "done": false}}
               {"type": "state"}, {"type": "close"}
    /schema    what actions, observations and the state look like
    /health

An observation has `messages`, the conversation so far, and `text`, what the world said last. `metadata`
keeps apart what `done` joins: terminated, truncated and failed, and has the world's `info`. A connection is a
session with a world of its own; sessions are limited in number, in the size of a message and in how long they
may be silent. Its world is made and stepped by a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from rl_dialog.data.schema import failure_of
from rl_dialog.web_server import LOOPBACK

MAX_TURNS = 64  # replies after which an episode is cut off whose world does not say
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class WorldLimits:
    """What clients may ask of the server."""

    sessions: int = 64  # at a time
    idle: float = 600.0  # seconds of silence after which a session is ended
    largest: int = 2**20  # bytes of a message


class Refused(Exception):
    """What the client asked cannot be done; `code` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One client's world."""

    def __init__(self, world: Any) -> None:
        self.world, self.most = world, getattr(world, "max_turns", MAX_TURNS)
        self.episode, self.turns, self.running = "", 0, False
        self.role = "assistant"

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a message; None to `close`. Raises Refused."""
        kind, data = asked.get("type"), asked.get("data") or {}
        if not isinstance(data, Mapping):
            raise Refused("VALIDATION_ERROR", f"expected an object as data, got {str(data)[:100]}")
        if kind == "reset":
            return {"type": "observation", "data": self._reset(data)}
        if kind == "step":
            return {"type": "observation", "data": self._step(data)}
        if kind == "state":
            return {"type": "state", "data": {"episode_id": self.episode, "step_count": self.turns}}
        if kind == "close":
            return None
        raise Refused("UNKNOWN_TYPE", f"expected reset, step, state or close as type, got {str(kind)[:100]}")

    def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        seed = data.get("seed")
        if seed is not None and not (type(seed) is int and 0 <= seed <= LARGEST_SEED):
            got = str(seed)[:100]
            expected = "a whole number from 0 to 2**63 - 1 as seed"
            raise Refused("VALIDATION_ERROR", f"expected {expected}, got {got}")
        self.running = False
        messages, info = self.world.reset(seed=seed)
        self.episode, self.turns = str(data.get("episode_id") or uuid.uuid4()), 0
        self.role = info.get("role", "assistant")
        self.running = failure_of(info) is None
        return _observation(messages, 0.0, {}, info, truncated=not self.running)

    def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        reply = data.get("message")
        if not isinstance(reply, str):
            got = str(reply) if "message" in data else f"the fields {', '.join(data) or '(none)'}"
            raise Refused("VALIDATION_ERROR", f"expected the reply as message, a text, got {got[:100]}")
        if not self.running:
            raise Refused("EXECUTION_ERROR", "expected a reset first: no episode is under way")
        self.running = False  # if the world raises an error
        messages, reward, terminated, truncated, info = self.world.step(reply)
        self.turns += 1
        failed = failure_of(info) is not None
        truncated = bool(truncated or failed or (self.turns >= self.most and not terminated))
        self.running = not (terminated or truncated)
        rewards = reward if isinstance(reward, Mapping) else {}
        mine = rewards.get(self.role, 0.0) if isinstance(reward, Mapping) else reward
        self.role = info.get("role", self.role)
        return _observation(messages, mine, rewards, info, terminated=bool(terminated), truncated=truncated)


def _observation(
    messages: list[dict[str, Any]],
    reward: float | None,
    rewards: Mapping[str, Any],
    info: Mapping[str, Any],
    *,
    terminated: bool = False,
    truncated: bool = False,
) -> dict[str, Any]:
    told = {"terminated": terminated, "truncated": truncated, "info": _plain(info)}
    failed = failure_of(info)
    by_role = {role: None if one is None else float(one) for role, one in rewards.items()}
    told |= {"rewards": by_role} if rewards else {}
    told |= {} if failed is None else {"failed": failed}
    said = [each["content"] for each in messages if each["role"] != "assistant"]
    return {
        "observation": {"messages": messages, "text": said[-1] if said else ""},
        "reward": None if reward is None else float(reward),
        "done": terminated or truncated,
        "metadata": told,
    }


def create_world_app(
    make_world: Callable[[], Any],
    name: str,
    limits: WorldLimits | None = None,
    *,
    hosts: Collection[str] | None = LOOPBACK,
) -> FastAPI:
    """The application that serves worlds of one class to who asks it by one of these host names, and to web
    pages that came from one of them; None: to everybody."""
    limits = limits or WorldLimits()
    app = FastAPI(title=f"rl_dialog: {name}", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.sessions = 0

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "healthy", "sessions": app.state.sessions, "max_sessions": limits.sessions}

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        most = getattr(make_world(), "max_turns", MAX_TURNS)
        return {**SCHEMA, "name": name, "max_turns": most}

    @app.websocket("/ws")
    async def talk(socket: WebSocket) -> None:
        if hosts is not None and not _asked_by(socket, hosts):
            await socket.close(code=1008)
            return
        await socket.accept()
        if app.state.sessions >= limits.sessions:
            await _say_error(socket, Refused("CAPACITY_REACHED", f"{limits.sessions} sessions are under way"))
            await socket.close(code=1013)
            return
        app.state.sessions += 1
        try:
            await _converse(socket, make_world, limits)
        except (WebSocketDisconnect, asyncio.CancelledError):  # the server ends, and a world is still busy
            pass
        finally:
            app.state.sessions -= 1

    return app


def _asked_by(socket: WebSocket, hosts: Collection[str]) -> bool:
    """Neither a web page from elsewhere, nor one whose name was pointed to this machine."""
    origin = socket.headers.get("origin")
    try:
        asked = {socket.url.hostname} | ({urlsplit(origin).hostname} if origin is not None else set())
    except ValueError:  # half of an IPv6 address
        return False
    return asked <= set(hosts)


class OwnThread:
    """Calls functions one after the other. A world that waits keeps no other session waiting, nor the process
    from its end; what it holds may belong to the thread that made it, as a connection of sqlite3 does."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            call()

    async def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        """What the function returns. One that raises gives the Refused to tell."""
        told: Future[Any] = Future()
        told.set_running_or_notify_cancel()  # from here on nobody's loss of patience cancels it

        def call() -> None:
            try:
                result = function(*given)
            except Refused as refused:
                result = refused
            except BaseException as error:  # also of a world that exits
                result = Refused("EXECUTION_ERROR", f"{type(error).__name__}: {error}")
            told.set_result(result)

        self._calls.put(call)
        return await asyncio.wrap_future(told)

    def end(self) -> None:
        """After the calls so far."""
        self._calls.put(None)


async def _converse(socket: WebSocket, make_world: Callable[[], Any], limits: WorldLimits) -> None:
    """Answers until the client closes or is silent for too long."""
    in_thread = OwnThread()
    try:
        session = await in_thread(lambda: Session(make_world()))
        if isinstance(session, Refused):
            await _say_error(socket, session)
            await socket.close(code=1011)
            return
        while True:
            try:
                text = await asyncio.wait_for(socket.receive_text(), limits.idle)
            except TimeoutError:
                silent = f"nothing came for {limits.idle:g} s"
                await _say_error(socket, Refused("SESSION_ERROR", silent))
                break
            except KeyError:  # bytes instead of text
                await _say_error(socket, Refused("INVALID_JSON", "expected JSON as text"))
                continue
            said = await in_thread(_answered, session, text)
            if said is None:
                break
            if isinstance(said, Refused):
                await _say_error(socket, said)
            else:
                await socket.send_text(said)
        await socket.close()
    finally:
        in_thread.end()


def _answered(session: Session, text: str) -> str | None:
    """The answer as JSON; None to `close`. Raises Refused."""
    answer = session.answer(_parsed(text))
    return None if answer is None else json.dumps(answer, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    """What JSON has for a value of a world's info: NumPy's numbers are numbers too, and what it has no number
    for is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, bool | int | str | None) else str(value)


def _parsed(text: str) -> dict[str, Any]:
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("INVALID_JSON", f"expected JSON, got {text[:100]!r}") from error
    if not isinstance(asked, dict):
        raise Refused("VALIDATION_ERROR", f"expected an object with type and data, got {text[:100]!r}")
    return asked


async def _say_error(socket: WebSocket, refused: Refused) -> None:
    data = {"message": str(refused), "code": refused.code}
    await socket.send_text(json.dumps({"type": "error", "data": data}))


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


MESSAGE = _object({"role": {"type": "string"}, "content": {"type": "string"}}, ["role", "content"])
SCHEMA = {
    "action": _object({"message": {"type": "string"}}, ["message"]),
    "observation": _object(
        {"messages": {"type": "array", "items": MESSAGE}, "text": {"type": "string"}}, ["messages", "text"]
    ),
    "state": _object({"episode_id": {"type": "string"}, "step_count": {"type": "integer"}}, ["step_count"]),
}
