"""The HTTP application: its routes (routes.py), and what holds for every request.

Plain FastAPI, with or without Ray around it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from rl_dialog.data.database import UNAVAILABLE
from rl_dialog.data.store import Store
from rl_dialog.serving.completions import Completions, unavailable
from rl_dialog.serving.limits import BodyLimit, KeyBeforeBody, RateLimit
from rl_dialog.serving.metrics import Metrics
from rl_dialog.serving.protocol import ApiError, Error, explain
from rl_dialog.serving.routes import (
    PAGE,
    PageFiles,
    Server,
    Take,
    bearer,
    chats,
    key_of,
    openai,
    operation,
    server_of,
)
from rl_dialog.serving.served import Models

ERRORS = {status: {"model": Error, "description": "what is wrong"} for status in ("4XX", "5XX")}


def create_app(models: Models, store: Store, *, take: Take | None = None) -> FastAPI:
    """The application. `take` counts requests against a key's rate where several processes serve."""
    metrics = Metrics(models)
    here = {"redirect_slashes": False, "responses": ERRORS, "strict_content_type": True}
    app = FastAPI(title="rl_dialog", lifespan=_lifespan, docs_url=None, redoc_url=None, **here)
    app.state.server = Server(
        models, store, metrics, Completions(models, store, metrics), take or _taking_alone()
    )
    for routes in (openai, chats, operation):
        app.include_router(routes)
    app.mount("/page", PageFiles(directory=PAGE))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _other)
    for kind in UNAVAILABLE:
        app.add_exception_handler(kind, _not_stored)
    app.add_exception_handler(Exception, _broken)
    app.add_middleware(BodyLimit, most=models.settings.max_body_bytes)
    app.add_middleware(KeyBeforeBody, knows=_known, refuse=_refused)
    app.add_middleware(_Counted, metrics=metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await asyncio.to_thread(app.state.server.models.close)


def _taking_alone() -> Take:
    """Requests counted by this process."""
    buckets = RateLimit()

    async def take(key: str, per_minute: int) -> float:
        return buckets.take(key, per_minute)

    return take


async def _known(request: Request) -> None:
    """Raises ApiError for strangers; whose key it is stays with the request."""
    if request.url.path == "/load_model":  # `transformers chat` asks without its key; its body is never read
        return
    request.state.key = await key_of(request, await server_of(request), await bearer(request))


# Errors in OpenAI's form.


async def _refused(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    body = getattr(request.scope.get("route"), "body_field", None)
    refusal = explain(error.errors(), *([body.field_info.annotation] if body else []))
    return JSONResponse(refusal.body, refusal.status)


async def _other(request: Request, error: HTTPException) -> Response:
    if isinstance(error.__cause__, ValueError | RecursionError):  # raised where the body was read
        message = f"the body is not JSON in UTF-8 that can be read: {error.__cause__}"
        return await _refused(request, ApiError(error.status_code, message, code="invalid_value"))
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code, error.headers)


async def _not_stored(request: Request, error: SQLAlchemyError) -> Response:
    return await _refused(request, unavailable(error, request.app.state.server.store.name))


async def _broken(request: Request, error: Exception) -> Response:
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    # it is sent from outside of _Counted
    request.app.state.server.metrics.responses.labels(_route(request.scope), 500).inc()
    message = "the server failed on this request; its log has the reason"
    return JSONResponse(ApiError(500, message, code="internal_error").body, 500)


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
