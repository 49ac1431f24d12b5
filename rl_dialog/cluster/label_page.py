"""The labelling page on Ray Serve, for runs on a cluster: one replica, which Serve watches and starts anew
when it dies.

Leases and answers are in the label log, so a page that was open goes on with the new replica; an answer under
way is sent again by the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import serve

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.serve import listens, prepare_proxies, quiet, start
from rl_dialog.data.database import SECRET, database_url
from rl_dialog.errors import UserError
from rl_dialog.serving.settings import ServeSettings

APP = "rl_dialog_labels"
PREFIX = "/labels"
PATIENCE = 300.0  # seconds for the proxies to start


@serve.deployment(
    name="label_page",
    num_replicas=1,
    max_ongoing_requests=200,
    health_check_period_s=5,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress()
class LabelPage:
    """The process that answers."""

    def __init__(self, labels: str, folder: str, page: dict[str, Any]) -> None:
        from rl_dialog.preferences.label_log import LabelLog
        from rl_dialog.preferences.segments import Segments

        self.log, self.segments, self.page = (
            LabelLog(labels),
            Segments(Path(folder) / "clips"),
            page | {"run": folder},
        )

    def __serve_build_asgi_app__(self) -> Any:
        from rl_dialog.preferences.page.app import create_page

        return create_page(self.log, self.segments, **self.page)

    def check_health(self) -> None:
        self.log.state()


def serve_page(labels: str, folder: str | Path, *, host: str, port: int, **page: Any) -> str:
    """Starts the page for a run's folder, which every node must be able to read; its address, once it
    answers. `page`: arguments of `create_page`.

    Raises UserError for a label log whose URL has a password: Ray shows a deployment's arguments on its
    dashboard.
    """
    url = database_url(labels)
    if url.password or set(SECRET) & set(url.query):
        raise UserError(
            "labels: expected the password in PGPASSWORD or ~/.pgpass on every machine, not in the URL, which"
            " Ray shows"
        )
    # Who asks while there is no replica waits for one, and not for ever. The limit is that of Serve, which
    # may carry chats as well: a page's own patience is shorter.
    start(host, port, ServeSettings.request_timeout)
    with quiet():
        application = LabelPage.bind(
            url.render_as_string(hide_password=False), str(Path(folder).absolute()), page
        )
        serve.run(application, name=APP, route_prefix=PREFIX)
    deadline = time.monotonic() + PATIENCE
    while not listens():
        if time.monotonic() > deadline:
            raise UserError(f"waited {PATIENCE:g} s for Serve's HTTP proxies, and they do not listen")
        time.sleep(0.2)
    return f"http://{host}:{port}{PREFIX}/"


@contextmanager
def page_on_ray(
    address: str, labels: str, folder: str | Path, *, host: str, port: int, **page: Any
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """`serve_page` on the cluster at `address` while the block lasts: where it is, and whether it is still
    there."""
    prepare_proxies()
    with connect(address or None):
        url = serve_page(labels, folder, host=host, port=port, **page)
        try:
            yield url, page_runs
        finally:
            if page_runs():
                stop_page()


def page_runs() -> bool:
    """Is the page on this cluster?"""
    return APP in serve.status().applications


def stop_page() -> None:
    """Ends the page. Serve itself goes on, as it may carry others."""
    with quiet():
        serve.delete(APP)
