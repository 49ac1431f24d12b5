"""The chat server on Ray Serve: replicas of the application, one rate per API key for all of them, models
replaced in place.

A replica holds the whole application (serving/api.py) and an engine per model. Models and split are Serve's
`user_config`: deploying another one reaches running replicas through `reconfigure`, which loads the new
models beside the old, switches, and lets the old finish; no request is dropped. Everything else (store,
limits, sizes) belongs to the replica: changing it makes Serve start a new replica before it stops an old one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml
from ray import serve
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from rl_dialog.errors import UserError
from rl_dialog.serving.limits import RateLimit
from rl_dialog.serving.settings import ServeSettings
from rl_dialog.web_server import listening

if TYPE_CHECKING:
    from fastapi import FastAPI

APP = "rl_dialog"
BOARD = "rl_dialog_serve"  # the name of the actor that all replicas share
PROXY = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rl_dialog.cluster.serve:proxy_errors"
}  # Serve reads it when a node of the cluster starts
SLACK = 30.0  # seconds that Serve waits longer than a server, which says better what was late
IN_PLACE = ("models", "split")  # settings that running replicas take over
ASKED = "asked"  # beside them: when they were asked for, or Serve would not ask of the same folders again


@serve.deployment(
    name="chat", health_check_period_s=5, health_check_timeout_s=30, max_constructor_retry_count=2
)
@serve.ingress()
class Replica:
    """One process that answers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Here, and not in the proxies and the board, which would import all of transformers for it.
        from rl_dialog.data.store import Store
        from rl_dialog.serving.served import Models

        # A replica whose engine died goes too: it would answer before all others, with errors, and so get
        # most requests.
        self.models = Models(ServeSettings(**settings | {"apart": True}), died=lambda: os._exit(1))
        self.store = Store(settings["store"])
        self.name = serve.get_replica_context().replica_tag
        self.local = RateLimit()
        self.state: tuple[dict[str, Any], str] = (
            {},
            "",
        )  # the models it was told to have, and why it does not have them
        self.replacing, self.replacements = asyncio.Lock(), set[asyncio.Task[None]]()
        self.board = _board()

    def __serve_build_asgi_app__(self) -> FastAPI:
        from rl_dialog.serving.api import create_app

        return create_app(self.models, self.store, take=self.take)

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Takes over other models and another split. Returns at once in a replica that serves: until it
        returns, Serve sends it no requests."""
        if not self.models.served:
            await self._replace(config)
            return
        task = asyncio.create_task(self._replace(config))
        self.replacements.add(task)  # else it may be collected under way
        task.add_done_callback(self.replacements.discard)

    async def _replace(self, config: dict[str, Any]) -> None:
        """What cannot be loaded is told to the board, and a replica that serves goes on as it was."""
        async with self.replacing:  # in the order they came
            problem, serves = "", bool(self.models.served)
            try:
                told = {name: value for name, value in config.items() if name != ASKED}
                await asyncio.to_thread(self.models.update, replace(self.models.settings, **told))
            except Exception as error:
                logging.getLogger(__name__).exception("the models could not be replaced")
                problem = str(error)
                if not serves:
                    raise
            finally:
                self.state = config, problem
                self.board.note.remote(self.name, *self.state)

    def check_health(self) -> None:
        self.board.note.remote(self.name, *self.state)  # again and again: a board that died knows nothing
        if not self.models.healthy():
            raise RuntimeError("an engine does not step any more")

    async def take(self, key: str, per_minute: int) -> float:
        """A request of this key, counted for all replicas together; for this one alone while the board is
        away."""
        try:
            return await asyncio.wait_for(self.board.take.remote(key, per_minute), timeout=2.0)
        except (ray.exceptions.RayError, TimeoutError):
            return self.local.take(key, per_minute)


@ray.remote(num_cpus=0, max_restarts=-1)
class Board:
    """What replicas share: the rates of the keys, and which models each of them has.

    Its methods are coroutines because Ray then runs calls in any order. In order, each call waits for the one
    before, and a call that was cancelled on its way (its client left) never comes: no later one would be
    answered.
    """

    def __init__(self) -> None:
        self.rates = RateLimit()
        self.replicas: dict[str, tuple[dict[str, Any], str]] = {}

    async def take(self, key: str, per_minute: int) -> float:
        return self.rates.take(key, per_minute)

    async def note(self, replica: str, config: dict[str, Any], problem: str) -> None:
        self.replicas[replica] = config, problem

    async def forget(self) -> None:
        self.replicas = {}

    async def noted(self) -> dict[str, tuple[dict[str, Any], str]]:
        return self.replicas


def _board() -> Any:
    return Board.options(name=BOARD, namespace="serve", lifetime="detached", get_if_exists=True).remote()


def build(args: dict[str, Any]) -> serve.Application:
    """The Serve application. args: the fields of ServeSettings, `replicas` (a number, or "1-4" to follow the
    load) and `cpus_per_replica`.

    This is what a Serve config names (`import_path: rl_dialog.cluster.serve:build`); there the models stand
    in the deployment's user_config.
    """
    args = dict(args)
    replicas, cpus = str(args.pop("replicas", 1)), args.pop("cpus_per_replica", 1)
    asked = {ASKED: args.pop(ASKED)} if ASKED in args else {}
    settings = vars(ServeSettings(**args))
    ongoing = settings["slots"] + settings["queue"]
    least, _, most = replicas.partition("-")
    if not (least.isdigit() and int(least) and (not most or most.isdigit() and int(most) >= int(least))):
        raise UserError(f"replicas: expected a number or a range such as 1-4, got {replicas!r}")
    scale = (
        {"min_replicas": int(least), "max_replicas": int(most), "target_ongoing_requests": settings["slots"]}
        if most
        else None
    )
    gpus = 1 if settings["device"].startswith("cuda") else 0
    own = {name: value for name, value in settings.items() if name not in IN_PLACE}
    chat = Replica.options(
        num_replicas=None if scale else int(least),
        autoscaling_config=scale,
        max_ongoing_requests=2 * ongoing
        + 100,  # the engine says 429 itself; votes and health checks need room beside the chats
        graceful_shutdown_timeout_s=settings["drain"] + 5,
        # a replica of other settings takes over from one that serves until then; needs room for one more
        max_surge_percent=25,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        # /metrics counts requests; a line for each drowns the rest
        logging_config={"enable_access_log": False},
        user_config={name: settings[name] for name in IN_PLACE} | asked if settings["models"] else None,
        version=hashlib.sha256(json.dumps([own, cpus, gpus], sort_keys=True).encode()).hexdigest()[
            :16
        ],  # else each deployment means new replicas
        # for `version`: Serve has no public way to say that replicas stay and take over a new user_config
        _internal=True,
    )
    return chat.bind(own)


def write_serve_config(path: str, args: dict[str, Any], *, host: str, port: int) -> None:
    """A file for `serve deploy`: `build` with these arguments behind HTTP proxies on every node."""
    build(args)
    http = {
        "host": host,
        "port": port,
        "request_timeout_s": args.get("request_timeout", ServeSettings.request_timeout) + SLACK,
    }
    chat = {"name": "chat", "user_config": {name: args.get(name, {}) for name in IN_PLACE}}
    own = {name: value for name, value in args.items() if name not in IN_PLACE}
    application = {
        "name": APP,
        "route_prefix": "/",
        "import_path": "rl_dialog.cluster.serve:build",
        "args": own,
        "deployments": [chat],
    }
    config = {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}
    Path(path).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def address() -> str:
    """Of the cluster, for --address of other commands."""
    return ray.get_runtime_context().gcs_address


def running() -> bool:
    """Does the application run on this cluster?"""
    return APP in serve.status().applications


def deploy(args: dict[str, Any], *, host: str, port: int, patience: float = 300.0) -> None:
    """Starts the application, or takes the one that runs over to these arguments. Returns when every replica
    has the models.

    Raises UserError with what a replica said of a model it could not load (what ran before is put back),
    RuntimeError when it takes too long.
    """
    settings = ServeSettings(
        **{name: value for name, value in args.items() if name in ServeSettings.__dataclass_fields__}
    )
    start(host, port, settings.request_timeout)
    before = _config()
    try:
        _deploy(args, patience)
    except ValueError:
        if before:
            _deploy(args | before, patience)
        else:
            stop()
        raise


def start(host: str, port: int, request_timeout: float) -> None:
    """Starts Serve where it does not run yet; its proxies may come a while later (`listens`)."""
    http = {"host": host, "port": port, "request_timeout_s": request_timeout + SLACK}
    try:
        with quiet():
            serve.start(proxy_location="EveryNode", http_options=http)
    except ray.exceptions.RayActorError:  # one was slow to start, on a busy machine; Serve starts another
        logging.getLogger("ray.serve").warning("an HTTP proxy did not start in time; waiting for the next")


def _deploy(args: dict[str, Any], patience: float) -> None:
    config = {name: args.get(name, {}) for name in IN_PLACE} | {ASKED: time.time()}
    board, noted = _board(), {}
    # What was said of the same models before; replicas say every few seconds what they have. The board may be
    # a process that is just being made.
    ray.get(board.forget.remote(), timeout=patience)
    with quiet():
        target = serve.RunTarget(build(args | config), name=APP, route_prefix="/")
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        noted = ray.get(board.noted.remote(), timeout=patience)
        if problems := [problem for had, problem in noted.values() if problem and had == config]:
            raise UserError(f"a replica could not load the models: {problems[-1]}")
        replicas = _replicas()
        if (
            replicas
            and _settled()
            and listens()
            and all(noted.get(replica) == (config, "") for replica in replicas)
        ):
            return
        time.sleep(0.2)
    raise UserError(
        f"waited {patience:g} s for replicas with the new models: {', '.join(_replicas()) or 'none'} run, "
        f"Serve says: {_message() or 'nothing'}; the cluster has {ray.available_resources().get('CPU', 0):g} "
        "CPUs left (--cpus_per_replica)"
    )


def proxy_errors() -> list[Middleware]:
    """What Serve's HTTP proxies put around every application, where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
    names this function."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """ASGI middleware of the HTTP proxies: what Serve itself answers when a replica dies, is not there yet
    (404 until the application is deployed) or says nothing (408) becomes an error in OpenAI's form, which
    clients take as a reason to try again. A stream that has begun just ends, without its last event."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        started = replaced = False
        error = {
            "message": "no replica could answer; try again",
            "type": "server_error",
            "param": None,
            "code": "replica_failed",
        }
        ours = JSONResponse({"error": error}, 503, {"Retry-After": "1"})

        async def in_form(message: dict[str, Any]) -> None:
            nonlocal started, replaced
            if message["type"] == "http.response.start":
                headers, status = dict(message["headers"]), message["status"]
                started, replaced = True, status >= 500 or status == 408
                # Serve's own 404, of a path that no application has yet: those of applications say a length
                replaced |= status == 404 and b"content-length" not in headers
                replaced &= not headers.get(b"content-type", b"").startswith(b"application/json")
                if replaced:
                    await ours(scope, receive, send)
            if not replaced:
                await send(message)

        await self.app(scope, receive, in_form)
        if (
            not started and scope["type"] == "http"
        ):  # the replica died before its first byte: Serve says nothing at all
            await ours(scope, receive, send)


def stop() -> None:
    """Ends the application once its running requests are answered. Serve itself goes on, as it may carry
    others; `serve shutdown` ends it."""
    with quiet():
        serve.delete(APP)
    with suppress(ValueError):
        ray.kill(ray.get_actor(BOARD, namespace="serve"))


def stop_at(address: str | None) -> None:
    """Ends the application on the cluster at this address. Raises UserError where there is none."""
    from rl_dialog.cluster.data import connect  # brings Ray Data along, which proxies do not need

    with connect(address):
        if not running():
            raise UserError(
                "expected a server on this cluster, there is none; --address names another cluster"
            )
        stop()


def place() -> tuple[str, int] | None:
    """Where Serve listens on this cluster; None where it does not run."""
    try:
        options = _details()["http_options"]
    except ray.serve.exceptions.RayServeException:
        return None
    return (options["host"], options["port"]) if options else None


def _details() -> dict[str, Any]:
    """What Serve knows of itself: its public status names no replicas."""
    from ray.serve.context import _get_global_client

    return _get_global_client().get_serve_details()


def _chat() -> dict[str, Any]:
    """The deployment, as Serve describes it; {} where there is none."""
    return _details()["applications"].get(APP, {}).get("deployments", {}).get("chat", {})


def _config() -> dict[str, Any]:
    """The models and the split that the application has; {} where there is none."""
    return _chat().get("deployment_config", {}).get("user_config") or {}


def _replicas() -> list[str]:
    """The names of the replicas that run."""
    return [replica["replica_id"] for replica in _chat().get("replicas", ()) if replica["state"] == "RUNNING"]


def _settled() -> bool:
    """Are there as many replicas as there should be?"""
    return _chat().get("status") == "HEALTHY"


def listens() -> bool:
    """Are the HTTP proxies of all nodes there?"""
    proxies = _details()["proxies"].values()
    return bool(proxies) and all(proxy["status"] == "HEALTHY" for proxy in proxies)


def _message() -> str:
    return _chat().get("message", "")


@contextmanager
def quiet() -> Iterator[None]:
    """Serve logs every step of a deployment at INFO."""
    logger = logging.getLogger("ray.serve")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def prepare_proxies() -> None:
    """Before Ray is started here: its HTTP proxies answer in OpenAI's form."""
    os.environ |= {name: value for name, value in PROXY.items() if name not in os.environ}


def stop_when(end: threading.Event) -> None:
    """Waits for `end`, or until somebody else ended the application, and ends it."""
    while not end.wait(2.0) and running():
        pass
    if running():
        stop()


def require_place(host: str, port: int) -> None:
    """Raises UserError where the address is not free, or where Serve listens at another one: it stays where
    it began."""
    here = place()
    if here is None:
        listening(host, port).close()
    elif here != (host, port):
        expected = f"--host {here[0]} --port {here[1]}"
        got = f"got {host}:{port} (`serve shutdown` would end that)"
        raise UserError(f"expected {expected}, where this cluster serves already, {got}")


def require_shared_store(url: str) -> None:
    """Raises UserError for a database in a file when replicas may run on several machines."""
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if url.startswith("sqlite") and len(machines) > 1:
        raise UserError(
            f"store: expected postgresql://..., which all {len(machines)} machines of the cluster can reach, "
            "got an SQLite file"
        )
