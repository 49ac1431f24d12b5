"""The HTTP application: OpenAI's routes, the chat page and what it needs, health and metrics. Plain FastAPI, with or without Ray around it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from rl_dialog.data.store import Key, Store
from rl_dialog.serving.completions import Completions
from rl_dialog.serving.limits import BodyLimit, RateLimit
from rl_dialog.serving.metrics import Metrics
from rl_dialog.serving.protocol import RATINGS, ApiError, ChatRequest, ChatStart, Error, Feedback, Ratings, explain
from rl_dialog.serving.served import ASSIGNED, Models, Served

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
ERRORS = {status: {"model": Error, "description": "what is wrong"} for status in ("4XX", "5XX")}
EVENTS = {200: {"content": {"text/event-stream": {}}}}
Take = Callable[[str, int], Awaitable[float]]  # (key, requests per minute) -> seconds to wait, 0 for go on


def create_app(models: Models, store: Store, *, take: Take | None = None) -> FastAPI:
    """The application. `take` counts requests against a key's rate where several processes serve."""
    metrics = Metrics(models)
    completions = Completions(models, store, metrics)
    buckets = RateLimit()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(models.close)

    app = FastAPI(
        title="rl_dialog", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERRORS, strict_content_type=True
    )
    bearer = HTTPBearer(auto_error=False)

    async def key_of(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> Key | None:
        """Who is asking; None where the server is open to all. Raises ApiError for nobody known."""
        if not models.settings.needs_key and request.url.hostname not in LOOPBACK:  # a web page whose name was pointed to this machine
            raise ApiError(403, f"without keys this server answers to {', '.join(LOOPBACK)} only, not to {request.url.hostname}", code="wrong_host")
        key = await asyncio.to_thread(store.find_key, credentials.credentials) if credentials else None
        if key is None and models.settings.needs_key:
            wrong = "this API key is not known or was revoked" if credentials else "expected an API key: Authorization: Bearer sk-rl-..."
            raise ApiError(401, wrong, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return key

    async def caller(key: Annotated[Any, Depends(key_of)]) -> str:
        """The name of the key that asks, once its rate allows another request; "" where the server is open."""
        if key is None:
            return ""
        wait = await take(key.name, key.requests_per_minute) if take else buckets.take(key.name, key.requests_per_minute)
        if wait:
            message = f"this key may send {key.requests_per_minute} requests per minute; try again in {wait:g} s"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": f"{wait:g}"})
        return key.name

    Caller = Annotated[str, Depends(caller)]  # noqa: N806

    # OpenAI's routes.

    @app.get("/v1/models")
    async def list_models(_: Caller) -> dict[str, Any]:
        return {"object": "list", "data": [_described(model) for model in models.served.values()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, _: Caller) -> dict[str, Any]:
        if name not in models.served:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return _described(models.served[name])

    @app.post("/v1/chat/completions", response_model=None, responses=EVENTS)
    async def chat_completions(body: Annotated[ChatRequest, Body()], request: Request, key: Caller) -> Response:
        exchange = await completions.begin(body, key)
        if not body.stream:
            return JSONResponse(await _unless_gone(request, completions.whole(exchange)))
        pieces = completions.pieces(exchange)
        first = await _unless_gone(request, anext(pieces))  # what is refused is refused with a status, not with an event
        return _Events(completions.stream(exchange, _with_first(first, pieces)), models.settings.request_timeout)

    @app.post("/load_model", response_model=None, responses=EVENTS)
    async def load_model(_: Caller) -> Response:
        """`transformers chat` asks for this before it starts; the models are loaded already."""
        return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    # The chat page and what it needs.

    @app.post("/v1/chats")
    async def start_chat(body: Annotated[ChatStart, Body()], key: Caller) -> dict[str, Any]:
        name = body.model or ASSIGNED
        if name != ASSIGNED and name not in models.served:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        assigned = name == ASSIGNED
        model = models.draw() if assigned else name
        with _bad_values():
            chat = await asyncio.to_thread(store.start_chat, key=key, user=body.user or "", model=model, assigned=assigned, consent=body.consent)
        return {"id": chat, "object": "chat", "created": int(time.time()), "model": name, "has_values": models.has_values(model)}

    @app.get("/v1/chats/{chat}")
    async def read_chat(chat: str, key: Caller) -> dict[str, Any]:
        with _bad_values():
            found = await asyncio.to_thread(store.chat, chat, key=key)
        shown = {name: found[name] for name in ("id", "ratings", "comments")}
        messages = [_message(message) for message in found["messages"]]
        model = ASSIGNED if found["assigned"] else found["model"]
        told = {"object": "chat", "created": int(found["created"]), "model": model, "has_values": models.has_values(found["model"])}
        return shown | told | {"messages": messages}

    @app.post("/v1/chats/{chat}/ratings")
    async def rate_chat(chat: str, body: Annotated[Ratings, Body()], key: Caller) -> dict[str, Any]:
        given = {name: value for name in RATINGS if (value := getattr(body, name)) is not None}
        with _bad_values():
            stored = await asyncio.to_thread(store.rate, chat, given, body.comments, key=key)
        return {"id": chat, **stored}

    @app.post("/v1/feedback")
    async def feedback(body: Annotated[Feedback, Body()], key: Caller) -> dict[str, Any]:
        given = {name: getattr(body, name) for name in ("vote", "edit") if name in body.model_fields_set}
        if not given:
            raise ApiError(400, "expected a vote, an edit or both", code="invalid_value")
        with _bad_values():
            await asyncio.to_thread(store.feedback, body.completion_id, body.index, key=key, **given)
        return {"completion_id": body.completion_id, "index": body.index, **given}

    @app.delete("/v1/users/{user:path}")
    async def delete_user(user: str, key: Caller) -> dict[str, Any]:
        with _bad_values():
            return {"deleted": await asyncio.to_thread(store.delete_user, user, key=key)}

    @app.get("/page.json")
    async def page_settings() -> dict[str, Any]:
        settings = models.settings
        told = {name: getattr(settings, name) for name in ("title", "consent", "needs_key", "min_messages", "max_tokens")}
        return told | {"bots": len(models.compared()), "max_message_characters": 4 * settings.max_prompt_length}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", _Fresh(directory=PAGE))

    # For whoever runs the server.

    @app.get("/health", response_model=None)
    async def health() -> Response:
        healthy = models.healthy()
        return JSONResponse({"status": "ok" if healthy else "failing"}, 200 if healthy else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus(_: Caller) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # Every request: counted, of bounded size, its errors in OpenAI's form.

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        told = explain(error.errors())
        return JSONResponse(told.body, told.status)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        metrics.responses.labels(_route(request.scope), 500).inc()  # it is sent from outside of _Counted
        return JSONResponse(ApiError(500, "the server failed on this request; its log has the reason", code="internal_error").body, 500)

    app.add_middleware(BodyLimit, most=models.settings.max_body_bytes)
    app.add_middleware(_Counted, metrics=metrics)
    return app


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

    wanted, gone = asyncio.create_task(result()), asyncio.create_task(until_gone())
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ApiError(499, "the client closed its connection", code="client_closed_request")
        return wanted.result()
    finally:
        for task in (wanted, gone):
            task.cancel()
        await asyncio.gather(wanted, gone, return_exceptions=True)


async def _with_first(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        yield first
        async for each in rest:
            yield each
    finally:
        await rest.aclose()


class _Fresh(StaticFiles):
    """Files that a browser asks for anew: after an update it must not mix old ones with new ones."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


class _Events(StreamingResponse):
    """Server-sent events, for at most so many seconds: a client that reads nothing must not hold a connection for ever."""

    def __init__(self, events: AsyncIterator[str], seconds: float) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logging.getLogger(__name__).warning("a client read too slowly: its connection is closed")
        finally:
            await self.body_iterator.aclose()  # cancels what the engine still works on


def _route(scope: dict[str, Any]) -> str:
    return getattr(scope.get("route"), "path", "other")


class _Counted:
    """ASGI middleware: open requests, and responses by route and status."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.metrics.responses.labels(_route(scope), message["status"]).inc()
            await send(message)

        with self.metrics.open.track_inprogress():
            await self.app(scope, receive, counted)
