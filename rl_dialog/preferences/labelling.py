"""What `pipelines.label` does: tokens of labellers, answers in this terminal, the page from this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import Draw
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Segments


def log_url(labels: str, folder: Path, settings: dict[str, Any]) -> str:
    """The label log of a run: the one that is named, else what its settings say, else labels.db in its
    folder."""
    return labels or settings.get("labels") or f"sqlite:///{folder / 'labels.db'}"


def new_token(log: LabelLog, name: str, *, scopes: Sequence[str], page: str) -> dict[str, Any]:
    """A token of this name, with its link to the page at the address `page`: both are shown only now."""
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
