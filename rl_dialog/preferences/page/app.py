"""The HTTP application on which people compare segments, and the live page of the run. Plain FastAPI, with or
without Ray around it.

GET  /, /run                the two pages; /page/... their files, /page.json their settings
POST /v1/lease              the next pair for this labeller, leased; {"query": null} while there is none
POST /v1/renew, /v1/release leases go on while somebody is there, and end when the page is left
POST /v1/answers, /v1/undo  acknowledged after the log has committed; with an Idempotency-Key a request may be
                            sent again
GET  /v1/segments/ID.png    all frames of a clip on one sheet
GET  /v1/guideline          what labellers read first
GET  /v1/status, /v1/labellers, /v1/run, /v1/metrics, /health
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from rl_dialog.data.database import UNAVAILABLE, plain_reason
from rl_dialog.data.keys import ANYBODY, Key
from rl_dialog.errors import UserError
from rl_dialog.preferences.agreement import doubts
from rl_dialog.preferences.frames import Draw, Sheet, sheet
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.label_log import Query as Pair
from rl_dialog.preferences.labels import Remarks
from rl_dialog.preferences.page.desk import MOST_LEASES, Desk
from rl_dialog.preferences.plan import LONGEST_REASON, MOST_REASONS, Plan
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Clip, Reply, Segment, Segments
from rl_dialog.web_server import LOOPBACK

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LONGEST_BODY = 1 << 16  # bytes
SHEETS = 64  # kept in memory, the latest
bearer, routes = HTTPBearer(auto_error=False), APIRouter()

QueryId = Annotated[str, Field(min_length=1, max_length=200)]
Reason = Annotated[str, Field(min_length=1, max_length=LONGEST_REASON)]
SegmentId = Annotated[str, InPath(pattern="^[0-9a-f]{64}$")]
Idempotency = Annotated[str, Header(max_length=100)]


class _Asked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Answer(_Asked):
    query: QueryId
    choice: Literal["left", "right", "tie", "skip"]
    strength: Literal[1, 2] | None = None
    reasons: Annotated[list[Reason], Field(max_length=MOST_REASONS)] = []
    flag: Annotated[str, Field(max_length=500)] | None = None

    @property
    def remarks(self) -> Remarks:
        try:
            return Remarks(self.strength, tuple(self.reasons), self.flag)
        except UserError as error:  # a text that no database holds
            raise HTTPException(400, str(error)) from None


class Undo(_Asked):
    query: QueryId | None = None  # whose answer is taken back


LAST = Undo()


class Held(_Asked):
    queries: Annotated[list[QueryId], Field(max_length=MOST_LEASES)]


@dataclass(frozen=True)
class Page:
    """What the routes work with; the application has it as `state.page`."""

    desk: Desk
    segments: Segments
    sheets: Callable[[str], Sheet]  # id of a segment -> its frames; KeyError for one that is no clip
    files: RunFiles | None
    labeller: str | None  # who sits at this machine; None where everybody needs a token
    settings: dict[str, Any]

    def shown(self, segment: Segment) -> dict[str, Any]:
        """A segment as the page draws it."""
        if not isinstance(segment, Clip):
            shown = {"id": segment.id, "context": [dict(message) for message in segment.context]}
            if isinstance(segment, Reply):
                return {"kind": "reply", **shown, "text": segment.text}
            return {"kind": "conversation", **shown, "messages": [dict(each) for each in segment.messages]}
        picture = self.sheets(segment.id)
        ended = segment.steps < len(segment.actions)
        size = {name: getattr(picture, name) for name in ("frames", "columns", "width", "height")}
        return {"kind": "clip", "id": segment.id, "ended": ended, **size}

    def described(self, pair: Pair | None) -> dict[str, Any]:
        """A pair as the page shows it."""
        if pair is None:
            return {"query": None}
        try:
            sides = {
                "left": self.shown(self.segments[pair.left]),
                "right": self.shown(self.segments[pair.right]),
            }
        except ValueError as error:  # it stays leased, so that the next request gets another pair
            raise HTTPException(500, f"the pair {pair.id} cannot be shown: {error.args[0]}") from error
        return {"query": {"id": pair.id, "task": pair.task, **sides}}


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

    draw: how observations of clips look; needed for clips. labeller: whoever sits at this machine needs no
    token and is called so; by default everybody needs one of `log.keys`. run: the folder with
    status.json and metrics.jsonl. lease: seconds that a pair is kept for somebody after the last sign of
    life. idle: seconds without a key or a touch after which nobody counts as there.
    """
    app = FastAPI(
        title="rl_dialog labels",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        strict_content_type=True,
    )
    settings = {
        "title": title,
        "needs_token": labeller is None,
        "lease": lease,
        "idle": idle,
        "run": run is not None,
    }
    sheets = lru_cache(SHEETS)(lambda id: _sheet(segments[id], draw))
    files = RunFiles(run) if run is not None else None
    app.state.page = Page(Desk(log, lease), segments, sheets, files, labeller, settings)
    app.include_router(routes)
    app.mount("/page", StaticFiles(directory=STATIC))
    for kind, answer in ERRORS.items():
        app.add_exception_handler(kind, answer)
    app.add_middleware(_Guard)
    return app


def _sheet(segment: Segment, draw: Draw | None) -> Sheet:
    if not isinstance(segment, Clip):
        raise KeyError(segment.id)
    if draw is None:
        raise UserError("expected a function that draws observations, create_page(draw=...), to show clips")
    return sheet(segment, draw)


async def page_of(request: Request) -> Page:
    """The page that the request came to."""
    return request.app.state.page


Here = Annotated[Page, Depends(page_of)]


def somebody(
    request: Request, page: Here, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Key:
    """Who asks."""
    if page.labeller is not None:
        if request.url.hostname not in LOOPBACK:  # a web page whose name was pointed to this machine
            hosts = ", ".join(LOOPBACK)
            raise HTTPException(
                403, f"without tokens this page answers to {hosts} only, not to {request.url.hostname}"
            )
        return replace(ANYBODY, name=page.labeller)
    key = page.desk.log.keys.find(credentials.credentials) if credentials else None
    if key is None:
        unknown, missing = (
            "this token is not known or was revoked",
            "expected a token: Authorization: Bearer sk-rl-...",
        )
        raise HTTPException(401, unknown if credentials else missing, {"WWW-Authenticate": "Bearer"})
    return key


Somebody = Annotated[Key, Depends(somebody)]


def having(*scopes: str) -> Callable[[Key], Key]:
    """The dependency that lets keys with one of these scopes in."""

    def key_with_scope(key: Somebody) -> Key:
        if not key.may(*scopes):
            has, wanted = " and ".join(key.scopes), " or ".join(scopes)
            raise HTTPException(403, f"expected a token of scope {wanted}, got one of scope {has}")
        return key

    return key_with_scope


def labeller_name(key: Annotated[Key, Depends(having("labeller"))]) -> str:
    """The labeller who asks."""
    return key.name


Labeller = Annotated[str, Depends(labeller_name)]
LabellerOrOperator = Annotated[Key, Depends(having("labeller", "operator"))]
Watcher = Annotated[Key, Depends(having("operator", "metrics"))]

# Pairs and answers.


@routes.post("/v1/lease")
def lease_next(page: Here, who: Labeller) -> dict[str, Any]:
    return page.described(page.desk.lease(who))


@routes.post("/v1/renew")
def renew(body: Annotated[Held, Body()], page: Here, who: Labeller) -> dict[str, list[str]]:
    return page.desk.renew(who, body.queries)


@routes.post("/v1/release")
def release(body: Annotated[Held, Body()], page: Here, who: Labeller) -> dict[str, Any]:
    page.desk.release(who, body.queries)
    return {"held": []}


@routes.post("/v1/answers")
def answer(
    body: Annotated[Answer, Body()], page: Here, who: Labeller, idempotency_key: Idempotency = ""
) -> dict[str, Any]:
    desk = page.desk
    act = lambda: desk.answer(who, body.query, body.choice, body.remarks)  # noqa: E731
    return desk.once(who, idempotency_key, body.model_dump(), act)


@routes.post("/v1/undo")
def undo(
    page: Here, who: Labeller, body: Annotated[Undo, Body()] = LAST, idempotency_key: Idempotency = ""
) -> dict[str, Any]:
    def act() -> dict[str, Any]:
        return page.described(page.desk.undo(who, body.query, idempotency_key))

    return page.desk.once(who, idempotency_key, body.model_dump(), act)


@routes.get("/v1/segments/{id}.png", response_class=Response)
def picture(id: SegmentId, page: Here, _: Labeller) -> Response:
    headers = {"Cache-Control": "private, max-age=3600"}
    try:
        if id not in page.segments:
            raise KeyError(id)
        return Response(page.sheets(id).png, media_type="image/png", headers=headers)
    except KeyError:
        raise HTTPException(404, f"there is no segment {id}") from None


# How it goes.


@routes.get("/v1/status")
def status(page: Here, key: Annotated[Key, Depends(having("labeller"))]) -> dict[str, Any]:
    """Where the run stands, for who may see it; to others only what they gave themselves: a count that an
    answer to a gold pair leaves as it is would tell which pairs these are."""
    log, run = page.desk.log, page.files.status() if page.files else {}
    labels = {name: run.get(name) for name in ("labels_wanted", "label_budget")}
    sees_run = page.files is not None and key.may("operator", "metrics")
    own = log.own_counts(key.name)
    counts = log.counts() if key.may("operator", "metrics") else own
    if counts is own and labels["labels_wanted"]:  # some are, which the page need not say
        labels["labels_wanted"] = None
    who = {"labeller": key.name, "sees_run": sees_run, "sees_all": counts is not own}
    how = {"plan": _plan(log.plan), "over": run.get("over") is True}
    return who | {"counts": counts, "own": own, **how, **labels}


def _plan(plan: Plan) -> dict[str, Any]:
    """What the page needs of it; how often a pair is gold is nothing for labellers."""
    shown = {name: getattr(plan, name) for name in ("goal", "session", "strength", "reasons")}
    guideline = hashlib.sha256(plan.guideline.encode()).hexdigest()[:16] if plan.guideline else ""
    return shown | {"guideline": guideline}


@routes.get("/v1/guideline")
def guideline(page: Here, _: Labeller) -> dict[str, str]:
    return {"text": page.desk.log.plan.guideline}


OWN = ("active", "labels", "ties", "skips", "revoked", "seconds", "left_share", "flags")


@routes.get("/v1/labellers")
def labellers(page: Here, key: LabellerOrOperator) -> dict[str, Any]:
    """Everybody's figures for operators; a labeller's own without what others, or gold pairs, say of them."""
    everybody = page.desk.log.labellers()
    if key.may("operator"):
        return {"labellers": {name: of | {"doubts": doubts(of)} for name, of in everybody.items()}}
    own = everybody.get(key.name)
    return {"labellers": {key.name: {name: own[name] for name in OWN}} if own else {}}


@routes.get("/v1/run")
def run_status(page: Here, _: Watcher) -> dict[str, Any]:
    files = page.files
    run = (
        {"name": files.folder.absolute().name, "status": files.status()}
        if files
        else {"name": "", "status": {}}
    )
    return run | {"counts": page.desk.log.counts()}


@routes.get("/v1/metrics")
def metrics(page: Here, _: Watcher, cursor: Annotated[str, Query(max_length=40)] = "") -> dict[str, Any]:
    return (
        page.files.metrics(cursor)
        if page.files
        else {"lines": [], "cursor": "", "more": False, "reset": False}
    )


@routes.get("/health", response_model=None)
def health(page: Here) -> Response:
    try:
        page.desk.log.state()
    except Exception:
        logging.getLogger(__name__).exception("the label log cannot be read")
        return JSONResponse({"status": "failing"}, 503)
    return JSONResponse({"status": "ok"})


# The pages.


@routes.get("/page.json")
def settings(page: Here) -> dict[str, Any]:
    return page.settings


@routes.get("/", include_in_schema=False)
def labelling_page() -> Response:
    return FileResponse(STATIC / "index.html")


@routes.get("/run", include_in_schema=False)
def run_page() -> Response:
    return FileResponse(STATIC / "run.html")


# What goes wrong.


async def _refused(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": {"message": str(error.detail)}}, error.status_code, error.headers)


async def _invalid(_: Request, error: RequestValidationError) -> Response:
    parts = (f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()[:5])
    return JSONResponse({"error": {"message": "; ".join(parts)[:1000]}}, 400)


async def _revoked(_: Request, error: PermissionError) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, 403)


async def _wrong(_: Request, error: UserError) -> Response:
    """A file of the run, or a clip, is not what it should be: it says which."""
    logging.getLogger(__name__).error("%s", error)
    return JSONResponse({"error": {"message": str(error)}}, 500)


async def _not_stored(request: Request, error: SQLAlchemyError) -> Response:
    """The page sends it again."""
    log = request.app.state.page.desk.log.name
    logging.getLogger(__name__).error("%s does not take what it is given: %s", log, plain_reason(error))
    message = "the log of labels takes nothing for now, so nothing of this request is kept: try again later"
    return JSONResponse({"error": {"message": message}}, 503, {"Retry-After": "10"})


async def _broken(_: Request, error: Exception) -> Response:
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    message = "the server failed on this request; its log has the reason"
    return JSONResponse({"error": {"message": message}}, 500, HEADERS)


ERRORS: dict[type[Exception], Any] = {
    HTTPException: _refused,
    RequestValidationError: _invalid,
    PermissionError: _revoked,
    UserError: _wrong,
    **dict.fromkeys(UNAVAILABLE, _not_stored),
    Exception: _broken,
}


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
                added = [
                    (name.lower().encode(), value.encode())
                    for name, value in usual.items()
                    if name.lower().encode() not in own
                ]
                message = message | {"headers": [*message["headers"], *added]}
            await send(message)

        http = scope["type"] == "http"
        await self.app(scope, limited if http else receive, with_headers if http else send)
