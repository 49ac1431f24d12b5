"""What `pipelines.label` does: tokens of labellers, answers in this terminal, the page from this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import Draw
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Segments


def log_url(labels: str, folder: Path, settings: dict[str, Any]) -> str:
    """The label log of a run: the one that is named, else what its settings say, else labels.db in its
    folder."""
    return labels or settings.get("labels") or f"sqlite:///{folder / 'labels.db'}"


@dataclass(frozen=True)
class TokenOptions:
    """Tokens of labellers to make or to take away, in place of labelling."""

    new_token: str = ""
    """make a token of this name, print it with a link to the page (they are shown only now) and return"""
    scopes: tuple[str, ...] = ("labeller",)
    """what a new token may do: labeller, operator (the run's page, everybody's statistics), metrics (the
    run's page), or several of them"""
    revoke: str = ""
    """revoke a labeller: their token and all their labels, whose pairs others get; then return"""


def change_tokens(options: TokenOptions, log: LabelLog, *, page: str) -> dict[str, Any]:
    """A new token, with its link to the page at the address `page`: both are shown only now; or what was
    revoked."""
    name, scopes = options.new_token, options.scopes
    if not name:
        return {"labeller": options.revoke, "revoked": log.revoke_labeller(options.revoke)}
    labels = "labeller" in scopes
    token = log.add_labeller(name, scopes=scopes) if labels else log.keys.add(name, scopes=scopes)
    path = "/" if labels else "/run"
    return {"labeller": name, "token": token, "link": f"{page}{path}#token={token}"}


def whose_token(log: LabelLog, token: str) -> str:
    """The labeller with this token. Raises UserError where nobody has it."""
    labeller = log.labeller_of(token)
    if labeller is None:
        raise UserError(
            "--token: expected the token of a labeller, got one that nobody has or that was revoked"
        )
    return labeller


def label_here(
    log: LabelLog, run: str, labeller: str, *, draw: Draw, lease: float, idle: float
) -> dict[str, Any]:
    """Asks the labeller in this terminal; what was done."""
    from rl_dialog.preferences.terminal import TerminalLabeller

    more = {"draw": draw, "files": RunFiles(run), "lease": lease, "idle": idle}
    return TerminalLabeller(log, Segments(Path(run) / "clips"), labeller, **more).run()


@contextmanager
def page_here(
    log: LabelLog, run: str, *, host: str, port: int, **page: Any
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """The page from a thread of this process while the block lasts: its address, and whether it is still
    there. `page`: arguments of `create_page`."""
    from rl_dialog.preferences.page.app import create_page
    from rl_dialog.preferences.page.server import PageServer

    app = create_page(log, Segments(Path(run) / "clips"), run=run, **page)
    with PageServer(app, host=host, port=port) as server:
        yield f"{server.url}/", server.alive


def check_who_comes(log: LabelLog, host: str, *, is_open: bool, is_local: bool) -> None:
    """Raises UserError for a page that is open to others than who is at this machine, and for one that nobody
    could use."""
    if is_open and not is_local:
        others = "who is not at this machine needs a token (--new_token NAME)"
        raise UserError(f"--open: expected --host 127.0.0.1, got {host}: {others}")
    if not is_open and not any(one["active"] for one in log.labellers().values()):
        remedy = "make one with --new_token NAME, or serve this machine alone with --open"
        raise UserError(f"expected somebody with a token: {remedy}")


def wait_for(end: threading.Event, alive: Callable[[], bool]) -> None:
    """Returns at the end. Raises OSError where the page's server ended before."""
    while not end.wait(0.5):
        if not alive():
            raise OSError("the page's server ended by itself; what it said before has the reason")


def say_where(address: str, *, needs_token: bool, quiet: bool) -> None:
    """Where the page is, as a line of JSON for scripts and in words for people."""
    print(json.dumps({"ready": address, "run": f"{address}run", "needs_token": needs_token}), flush=True)
    say = Console(quiet=quiet, stderr=True, highlight=False).print
    say(f"labels   {address}{'#token=YOUR_TOKEN' if needs_token else ''}\nthe run  {address}run")
