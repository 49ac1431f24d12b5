"""The HTTP application on which people compare segments, and the live page of the run. Plain FastAPI, with or without Ray around it.

GET  /, /run                the two pages; /page/... their files, /page.json their settings
POST /v1/lease              the next pair for this labeller, leased; {"query": null} while there is none
POST /v1/renew, /v1/release leases go on while somebody is there, and end when the page is left
POST /v1/answers, /v1/undo  acknowledged after the log has committed; with an Idempotency-Key a request may be sent again
GET  /v1/segments/ID.png    all frames of a clip on one sheet
GET  /v1/status, /v1/labellers, /v1/run, /v1/metrics, /health
"""

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, Depends, FastAPI, Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import Draw, Sheet, sheet
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.label_log import Query as Pair
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Clip, Segment, Segments

LOOPBACK = ("localhost", "127.0.0.1", "::1")
STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LONGEST_BODY = 1 << 16  # bytes
MOST_LEASES = 8  # of one labeller at a time: two in each of four windows
REMEMBERED = 10_000  # answers to requests that may be sent again
SHEETS = 64  # kept in memory, the latest

QueryId = Annotated[str, Field(min_length=1, max_length=200)]
SegmentId = Annotated[str, InPath(pattern="^[0-9a-f]{64}$")]
Key = Annotated[str, Header(max_length=100)]


class _Asked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Answer(_Asked):
    query: QueryId
    choice: Literal["left", "right", "tie", "skip"]


class Held(_Asked):
    queries: Annotated[list[QueryId], Field(max_length=MOST_LEASES)]


def create_page(
    log: LabelLog,
    segments: Segments,
    *,
    draw: Draw | None = None,
    labeller: str | None = None,
    run: str | Path | None = None,
    title: str = "Which is better?",
    lease: float = 60.0,
    idle: float = 180.0,
) -> FastAPI:
    """The application.

    draw: how observations of clips look; needed for clips. labeller: whoever sits at this machine needs no token and is called so; by default
    everybody needs one of `log.add_labeller`. run: the folder with status.json and metrics.jsonl. lease: seconds that a pair is kept for somebody
    after the last sign of life. idle: seconds without a key or a touch after which nobody counts as there.
    """
    files = RunFiles(run) if run is not None else None
    desk = _Desk(log, lease)
    sheets = lru_cache(SHEETS)(lambda id: _sheet(segments[id], draw))
    app = FastAPI(title="rl_dialog labels", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, strict_content_type=True)
    bearer = HTTPBearer(auto_error=False)

    def somebody(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> str:
        """The labeller who asks."""
        if labeller is not None:
            if request.url.hostname not in LOOPBACK:  # a web page whose name was pointed to this machine
                raise HTTPException(403, f"without tokens this page answers to {', '.join(LOOPBACK)} only, not to {request.url.hostname}")
            return labeller
        found = log.labeller_of(credentials.credentials) if credentials else None
        if found is None:
            wrong = "this token is not known or was revoked" if credentials else "expected a token: Authorization: Bearer rl-..."
            raise HTTPException(401, wrong, {"WWW-Authenticate": "Bearer"})
        return found

    Labeller = Annotated[str, Depends(somebody)]  # noqa: N806

    def shown(segment: Segment) -> dict[str, Any]:
        if not isinstance(segment, Clip):
            return {"kind": "reply", "id": segment.id, "context": [dict(message) for message in segment.context], "text": segment.text}
        picture = sheets(segment.id)
        ended = segment.steps < len(segment.actions)
        size = {name: getattr(picture, name) for name in ("frames", "columns", "width", "height")}
        return {"kind": "clip", "id": segment.id, "ended": ended, **size}

    def described(pair: Pair | None) -> dict[str, Any]:
        if pair is None:
            return {"query": None}
        try:
            sides = {"left": shown(segments[pair.left]), "right": shown(segments[pair.right])}
        except (KeyError, ValueError) as error:  # it stays leased, so that the next request gets another pair
            raise HTTPException(500, f"the pair {pair.id} cannot be shown: {error.args[0]}") from error
        return {"query": {"id": pair.id, "task": pair.task, **sides}}

    @app.post("/v1/lease")
    def lease_next(who: Labeller) -> dict[str, Any]:
        return described(desk.lease(who))

    @app.post("/v1/renew")
    def renew(body: Annotated[Held, Body()], who: Labeller) -> dict[str, Any]:
        return {"held": desk.renew(who, body.queries)}

    @app.post("/v1/release")
    def release(body: Annotated[Held, Body()], who: Labeller) -> dict[str, Any]:
        desk.release(who, body.queries)
        return {"held": []}

    @app.post("/v1/answers")
    def answer(body: Annotated[Answer, Body()], who: Labeller, idempotency_key: Key = "") -> dict[str, Any]:
        return desk.once(who, idempotency_key, body.model_dump(), lambda: desk.answer(who, body.query, body.choice))

    @app.post("/v1/undo")
    def undo(who: Labeller, idempotency_key: Key = "") -> dict[str, Any]:
        return desk.once(who, idempotency_key, "undo", lambda: described(desk.undo(who)))

    @app.get("/v1/segments/{id}.png", response_class=Response)
    def picture(id: SegmentId, _: Labeller) -> Response:
        try:
            return Response(sheets(id).png, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})
        except KeyError:
            raise HTTPException(404, f"there is no segment {id}") from None

    # How it goes.

    @app.get("/v1/status")
    def status(who: Labeller) -> dict[str, Any]:
        told = files.status() if files else {}
        return {"labeller": who, "counts": log.counts(), **{name: told.get(name) for name in ("labels_wanted", "label_budget")}}

    @app.get("/v1/labellers")
    def labellers(_: Labeller) -> dict[str, Any]:
        return {"labellers": log.labellers()}

    @app.get("/v1/run")
    def run_status(_: Labeller) -> dict[str, Any]:
        return {"name": files.folder.absolute().name if files else "", "status": files.status() if files else {}, "counts": log.counts()}

    @app.get("/v1/metrics")
    def metrics(_: Labeller, cursor: Annotated[str, Query(max_length=40)] = "") -> dict[str, Any]:
        return files.metrics(cursor) if files else {"lines": [], "cursor": "", "more": False, "reset": False}

    @app.get("/health", response_model=None)
    def health() -> Response:
        try:
            log.state()
        except Exception:
            logging.getLogger(__name__).exception("the label log cannot be read")
            return JSONResponse({"status": "failing"}, 503)
        return JSONResponse({"status": "ok"})

    # The pages.

    @app.get("/page.json")
    def settings() -> dict[str, Any]:
        return {"title": title, "needs_token": labeller is None, "lease": lease, "idle": idle, "run": files is not None}

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/run", include_in_schema=False)
    def run_page() -> Response:
        return FileResponse(STATIC / "run.html")

    app.mount("/page", StaticFiles(directory=STATIC))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": {"message": str(error.detail)}}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        told = "; ".join(f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()[:5])
        return JSONResponse({"error": {"message": told[:1000]}}, 400)

    @app.exception_handler(PermissionError)
    async def revoked(_: Request, error: PermissionError) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, 403)

    @app.exception_handler(UserError)
    async def wrong(_: Request, error: UserError) -> Response:
        """A file of the run, or a clip, is not what it should be: it says which."""
        logging.getLogger(__name__).error("%s", error)
        return JSONResponse({"error": {"message": str(error)}}, 500)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        return JSONResponse({"error": {"message": "the server failed on this request; its log has the reason"}}, 500, HEADERS)

    app.add_middleware(_Guard)
    return app


def _sheet(segment: Segment, draw: Draw | None) -> Sheet:
    if not isinstance(segment, Clip):
        raise KeyError(segment.id)
    if draw is None:
        raise UserError("expected a function that draws observations, create_page(draw=...), to show clips")
    return sheet(segment, draw)


class _Desk:
    """What labellers do with the log: at most so many leases each, and nothing twice."""

    def __init__(self, log: LabelLog, seconds: float) -> None:
        self.log, self.seconds = log, seconds
        self.leases: defaultdict[str, dict[str, float]] = defaultdict(dict)  # labeller -> query -> when the lease ends
        self.done: OrderedDict[tuple[str, str], tuple[Any, dict[str, Any]]] = OrderedDict()  # (labeller, key) -> what was asked, what was answered
        self.turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # of each labeller, one request after the other

    def lease(self, who: str) -> Pair | None:
        with self.turns[who]:
            now = time.monotonic()
            held = self.leases[who] = {query: end for query, end in self.leases[who].items() if end > now}
            if len(held) >= MOST_LEASES:
                raise HTTPException(429, f"{len(held)} pairs are open in your windows: answer one or close a window")
            pair = self.log.lease(who, self.seconds)
            if pair is not None:
                held[pair.id] = now + self.seconds
            return pair

    def renew(self, who: str, queries: list[str]) -> list[str]:
        """Which of them are still the labeller's."""
        with self.turns[who]:
            kept = [query for query in queries if self.log.renew(query, who, self.seconds)]
            self._drop(who, queries)
            self.leases[who] |= dict.fromkeys(kept, time.monotonic() + self.seconds)
            return kept

    def release(self, who: str, queries: list[str]) -> None:
        with self.turns[who]:
            for query in queries:
                self.log.renew(query, who, 0.0)
            self._drop(who, queries)

    def answer(self, who: str, query: str, choice: str) -> dict[str, Any]:
        try:
            label = self.log.answer(query, who, choice)
        except KeyError as error:
            raise HTTPException(404, str(error.args[0])) from None
        except ValueError as error:
            raise HTTPException(409, str(error)) from None
        self._drop(who, [query])
        return {"label": label.number, "query": label.query}

    def undo(self, who: str) -> Pair | None:
        pair = self.log.undo(who, self.seconds)
        if pair is not None:
            self.leases[who][pair.id] = time.monotonic() + self.seconds
        return pair

    def once(self, who: str, key: str, asked: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `act` returns, or returned when the same labeller sent the same key before."""
        with self.turns[who]:
            if key and (who, key) in self.done:
                before, answered = self.done[who, key]
                if before != asked:
                    raise HTTPException(422, "this Idempotency-Key was sent with another request before")
                return answered
            answered = act()
            if key:
                self.done[who, key] = asked, answered
                if len(self.done) > REMEMBERED:
                    self.done.popitem(last=False)
            return answered

    def _drop(self, who: str, queries: list[str]) -> None:
        for query in queries:
            self.leases[who].pop(query, None)


class _Guard:
    """ASGI middleware: bodies of bounded size; every response with our headers."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        read = 0

        async def limited() -> dict[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LONGEST_BODY:
                raise HTTPException(413, f"expected at most {LONGEST_BODY} bytes in a request")
            return message

        async def with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                usual = HEADERS | {"Cache-Control": "no-cache"}
                added = [(name.lower().encode(), value.encode()) for name, value in usual.items() if name.lower().encode() not in own]
                message = message | {"headers": [*message["headers"], *added]}
            await send(message)

        http = scope["type"] == "http"
        await self.app(scope, limited if http else receive, with_headers if http else send)
