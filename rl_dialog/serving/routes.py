"""The routes of the chat server: OpenAI's, the chat page's, and those for whoever runs the server."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from rl_dialog.data.keys import ANYBODY, Key
from rl_dialog.data.store import Store
from rl_dialog.serving.completions import Completions, participant
from rl_dialog.serving.metrics import Metrics
from rl_dialog.serving.protocol import RATINGS, ApiError, ChatRequest, ChatStart, Feedback, Ratings
from rl_dialog.serving.served import ASSIGNED, Models, Served
from rl_dialog.web_server import LOOPBACK

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action "
        "'self'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
STORE_PATIENCE = 5.0  # seconds that the store has to answer
EVENTS = {200: {"content": {"text/event-stream": {}}}}
Take = Callable[[str, int], Awaitable[float]]  # (key, requests per minute) -> seconds to wait, 0 for go on
bearer = HTTPBearer(auto_error=False)


@dataclass(frozen=True)
class Server:
    """What the routes work with; the application has it as `state.server`."""

    models: Models
    store: Store
    metrics: Metrics
    completions: Completions
    take: Take


async def server_of(request: Request) -> Server:
    """The server that the request came to."""
    return request.app.state.server


Here = Annotated[Server, Depends(server_of)]


async def key_of(
    request: Request,
    server: Here,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> Key:
    """Who is asking; anybody where the server is open. Raises ApiError for nobody known."""
    if hasattr(request.state, "key"):  # asked before its body was read
        return request.state.key
    needs_key = server.models.settings.needs_key
    if (
        not needs_key and request.url.hostname not in LOOPBACK
    ):  # a web page whose name was pointed to this machine
        hosts = ", ".join(LOOPBACK)
        message = f"without keys this server answers to {hosts} only, not to {request.url.hostname}"
        raise ApiError(403, message, code="wrong_host")
    key = await asyncio.to_thread(server.store.keys.find, credentials.credentials) if credentials else None
    if key is None and needs_key:
        unknown, missing = (
            "this API key is not known or was revoked",
            "expected an API key: Authorization: Bearer sk-rl-...",
        )
        message = unknown if credentials else missing
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return key or ANYBODY


def having(*scopes: str) -> Callable[..., Awaitable[Key]]:
    """The dependency that lets keys with one of these scopes in, once their rate allows another request."""

    async def key_with_scope(server: Here, key: Annotated[Key, Depends(key_of)]) -> Key:
        if not key.may(*scopes):
            has, wanted = " and ".join(key.scopes), " or ".join(scopes)
            message = f"expected an API key of scope {wanted}, got one of scope {has}"
            raise ApiError(403, message, code="missing_scope")
        wait = await server.take(key.name, key.requests_per_minute) if key is not ANYBODY else 0
        if wait:
            rate = f"this key may send {key.requests_per_minute} requests per minute"
            headers = {"Retry-After": f"{wait:g}"}
            message = f"{rate}; try again in {wait:g} s"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        return key

    return key_with_scope


Talker = Annotated[Key, Depends(having("chat", "participant"))]
Owner = Annotated[Key, Depends(having("participant", "operator"))]
Watcher = Annotated[Key, Depends(having("operator", "metrics"))]

# OpenAI's routes.

openai = APIRouter()


@openai.get("/v1/models")
async def list_models(server: Here, key: Talker) -> dict[str, Any]:
    named = [] if key.blind else [_described(model) for model in server.models.served.values()]
    return {"object": "list", "data": [*named, _DRAWN]}


@openai.get("/v1/models/{name:path}")
async def one_model(name: str, server: Here, key: Talker) -> dict[str, Any]:
    if name == ASSIGNED:
        return _DRAWN
    _require_model(name, server.models, key)
    return _described(server.models.served[name])


@openai.post("/v1/chat/completions", response_model=None, responses=EVENTS)
async def chat_completions(
    body: Annotated[ChatRequest, Body()], request: Request, server: Here, key: Talker
) -> Response:
    completions = server.completions
    exchange = await completions.begin(body, key)
    if not body.stream:
        return JSONResponse(await _unless_gone(request, completions.whole(exchange)))
    pieces = completions.pieces(exchange)
    first = await _unless_gone(
        request, anext(pieces)
    )  # what is refused is refused with a status, not with an event
    return _Events(
        completions.stream(exchange, _with_first(first, pieces)), server.models.settings.request_timeout
    )


@openai.post("/load_model", response_model=None, responses=EVENTS)
async def load_model() -> Response:
    """`transformers chat` asks for this before it starts, without its key; the models are loaded already."""
    return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")


# The chat page and what it needs.

chats = APIRouter()


@chats.post("/v1/chats")
async def start_chat(body: Annotated[ChatStart, Body()], server: Here, key: Talker) -> dict[str, Any]:
    models, name = server.models, body.model or ASSIGNED
    assigned = name == ASSIGNED
    if not assigned:
        _require_model(name, models, key)
    somebody = participant(key, body.user) or secrets.token_hex(16)
    model, propensity = models.draw(somebody) if assigned else (name, None)
    about = {"user": body.user or "", "model": model, "propensity": propensity, "consent": body.consent}
    with _bad_values():
        chat = await asyncio.to_thread(server.store.start_chat, key=key.name, **about)
    created, has_values = int(time.time()), models.shows_values(model, assigned=assigned)
    return {"id": chat, "object": "chat", "created": created, "model": name, "has_values": has_values}


@chats.get("/v1/chats/{chat}")
async def read_chat(chat: str, server: Here, key: Talker) -> dict[str, Any]:
    with _bad_values():
        stored = await asyncio.to_thread(server.store.chat, chat, key=key.name)
    shown = {name: stored[name] for name in ("id", "ratings", "comments")}
    model, has_values = (
        ASSIGNED if stored["assigned"] else stored["model"],
        server.models.shows_values(stored["model"], assigned=stored["assigned"]),
    )
    about = {"object": "chat", "created": int(stored["created"]), "model": model, "has_values": has_values}
    return shown | about | {"messages": [_message(message) for message in stored["messages"]]}


@chats.post("/v1/chats/{chat}/ratings")
async def rate_chat(chat: str, body: Annotated[Ratings, Body()], server: Here, key: Talker) -> dict[str, Any]:
    given = {name: value for name in RATINGS if (value := getattr(body, name)) is not None}
    with _bad_values():
        stored = await asyncio.to_thread(server.store.rate, chat, given, body.comments, key=key.name)
    return {"id": chat, **stored}


@chats.post("/v1/feedback")
async def feedback(body: Annotated[Feedback, Body()], server: Here, key: Talker) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("vote", "edit") if name in body.model_fields_set}
    if not given:
        raise ApiError(400, "expected a vote, an edit or both", code="invalid_value")
    with _bad_values():
        await asyncio.to_thread(server.store.feedback, body.completion_id, body.index, key=key.name, **given)
    return {"completion_id": body.completion_id, "index": body.index, **given}


@chats.delete("/v1/users/{user:path}")
async def delete_user(
    user: str, server: Here, owner: Owner, key: Annotated[str | None, Query(max_length=256)] = None
) -> dict[str, Any]:
    """An operator deletes everything of a user, or of one key's user; a participant all that is theirs."""
    own = user if owner.may("chat") else None
    whose = (user, key) if owner.may("operator") else (own, owner.name)
    with _bad_values():
        return {"deleted": await asyncio.to_thread(server.store.delete_user, whose[0], key=whose[1])}


@chats.get("/page.json")
async def page_settings(server: Here) -> dict[str, Any]:
    settings = server.models.settings
    shown = {
        name: getattr(settings, name)
        for name in ("title", "consent", "needs_key", "min_messages", "max_tokens")
    }
    compared = server.models.compared()
    longest = settings.max_prompt_length or min(model.engine.context for model in compared)
    return shown | {"bots": len(compared), "max_message_characters": 4 * longest}


@chats.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


# For whoever runs the server.

operation = APIRouter()


@operation.get("/health", response_model=None)
async def health(server: Here) -> Response:
    """Do the engines step, and does the store answer?"""
    parts = {"models": server.models.healthy(), "store": await _answers(server.store)}
    told = {name: "ok" if well else "failing" for name, well in parts.items()}
    status = 200 if all(parts.values()) else 503
    return JSONResponse({"status": "ok" if status == 200 else "failing", **told}, status)


async def _answers(store: Store) -> bool:
    try:
        await asyncio.wait_for(asyncio.to_thread(store.ping), STORE_PATIENCE)
    except (TimeoutError, SQLAlchemyError):
        return False
    return True


@operation.get("/metrics", response_class=PlainTextResponse)
async def prometheus(server: Here, _: Watcher) -> Response:
    return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)


_DRAWN = {"id": ASSIGNED, "object": "model", "created": 0, "owned_by": "rl_dialog"}


def _require_model(name: str, models: Models, key: Key) -> None:
    if name not in models.served or key.blind:
        raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")


def _described(model: Served) -> dict[str, Any]:
    known = {"id": model.name, "object": "model", "created": int(model.loaded), "owned_by": "rl_dialog"}
    return known | {"method": model.method, "has_values": model.has_values, "context": model.engine.context}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a stored chat, with OpenAI's names."""
    names = {"completion": "completion_id", "choice": "index"}
    return {names.get(name, name): value for name, value in message.items()}


@contextmanager
def _bad_values() -> Iterator[None]:
    """What the store refuses, as answers."""
    try:
        yield
    except KeyError as error:
        raise ApiError(404, str(error.args[0]), code="not_found") from None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the client closes its connection first."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def result() -> Any:
        return await work

    answer, gone = asyncio.create_task(result()), asyncio.create_task(until_gone())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ApiError(499, "the client closed its connection", code="client_closed_request")
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _with_first(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        yield first
        async for each in rest:
            yield each
    finally:
        await rest.aclose()


class PageFiles(StaticFiles):
    """Files that a browser asks for anew: after an update it must not mix old ones with new ones."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


class _Events(StreamingResponse):
    """Server-sent events, for at most so many seconds: a client that reads nothing must not hold a connection
    for ever."""

    def __init__(self, events: AsyncIterator[str], seconds: float) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self.seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logging.getLogger(__name__).warning("a client read too slowly: its connection is closed")
        finally:
            await self.body_iterator.aclose()  # cancels what the engine still works on
