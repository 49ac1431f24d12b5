"""Compare clips or replies of a run: in this terminal, or on a page for browsers.

    python -m pipelines.label --run runs/dot                          # in this terminal
    python -m pipelines.label --run runs/dot --new_token ann          # a labeller's access token, shown once
    python -m pipelines.label --run runs/dot --page --host 0.0.0.0    # the page, for everybody with a token
    python -m pipelines.label --run runs/dot --page --open            # the page for yourself, without tokens
    python -m pipelines.label --run runs/dot --page --backend ray     # on Ray Serve, which restarts it
    python -m pipelines.label --run runs/dot --overlap 2 --gold gold.jsonl --gold_share 0.1 --session 50
        # two people see each pair, a tenth of the showings have known answers, and fifty are a session
    python -m pipelines.label --run runs/dot --report runs/labels   # who can be trusted, and what is disputed

In the terminal the keys are L, R, E (equal) and the space bar (cannot say); U takes back, F flags a pair, P
is a break, Q leaves. What the plan asks beside that it says, as the page does.

The run may be under way (`prefer` writes the pairs) or over. Any number of people label at once, nobody gets
a pair that another one has."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envs import control_env
from rl_dialog.data.database import database_url
from rl_dialog.errors import UserError
from rl_dialog.preferences import labelling
from rl_dialog.preferences.disagreement_report import disagreement_report
from rl_dialog.preferences.frames import Draw, draw_pixels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelling import PlanOptions, TokenOptions
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Segments
from rl_dialog.run import OnCluster, Quiet, interrupted_once, is_loopback, run, told_to_end
from rl_dialog.web_server import url_of

OF_A_RUN = ("clips", "labels.db")  # besides its settings


@dataclass(frozen=True)
class LabelConfig(TokenOptions, PlanOptions, Quiet, OnCluster):
    """Whose labels, of what, and where."""

    run: str = ""
    """folder of the run: clips/ and, where they are there, prefer.yaml, status.json and metrics.jsonl"""
    labels: str = ""
    """URL of the label log; by default what the run's prefer.yaml says, which keeps no password (PGPASSWORD
    and ~/.pgpass do), else labels.db in the run's folder"""
    labeller: str = ""
    """your name in the log, in the terminal and with --open; by default your name on this machine"""
    token: str = ""
    """in place of a name: label in the terminal as the labeller whose token this is; RL_DIALOG_TOKEN says the
    same unseen by others"""
    report: str = ""
    """write the report on agreement into this folder (agreement.html, agreement.md) and return: who can be
    trusted, and every pair that they dispute, with its clips or replies"""
    page: bool = False
    """serve the page until Ctrl-C"""
    backend: Literal["local", "ray"] = "local"
    """local: one plain process serves the page; ray: Ray Serve on a cluster, where the page's address ends in
    /labels/"""
    host: str = "127.0.0.1"
    """address of the page"""
    port: int = 8001
    """port of the page"""
    open: bool = False
    """the page asks for no token; for one person at this machine"""
    lease: float = 60.0
    """seconds that a pair is kept for somebody after the last sign of life"""
    idle: float = 180.0
    """seconds without a key or a touch after which somebody counts as away and the pair goes back"""
    title: str = "Which is better?"
    """heading of the page"""


def main(config: LabelConfig) -> dict[str, Any]:
    """Labels, or serves, until it is told to end; what was done.

    Raises UserError for a run that is not there and for a page open to everybody.
    """
    folder = Path(config.run)
    if not config.run or not folder.is_dir():
        raise UserError(f"--run: expected the folder of a run, got {config.run!r}")
    if not any((folder / name).exists() for name in OF_A_RUN) and not any(folder.glob("*.yaml")):
        raise UserError(
            f"--run: expected the folder of a run, found in {config.run!r} no settings (prefer.yaml), no "
            f"{' and no '.join(OF_A_RUN)}: name the run's own folder"
        )
    if config.lease < 1 or config.idle < 1:
        got = f"got {config.lease:g} and {config.idle:g}"
        raise UserError(f"expected at least 1 second as --lease and --idle, {got}")
    settings = RunFiles(folder).settings()
    url = labelling.log_url(config.labels, folder, settings)
    file = database_url(url).database if url.startswith("sqlite") else ""
    if config.report and file and not Path(file).is_file():
        raise UserError(f"--report: expected a run with a log of labels, found nothing at {file}")
    log = LabelLog(url)
    try:
        if config.new_token or config.revoke:
            prefix = "/labels" if config.backend == "ray" else ""
            return labelling.change_tokens(config, log, page=url_of(config.host, config.port) + prefix)
        draw, segments = drawing(settings), Segments(folder / "clips")
        changed = labelling.change_plan(config, log, segments) if config.plans else {}
        if config.report:
            return changed | disagreement_report(log, segments, draw, config.report)
        if changed and not config.page:
            return changed
        return _serve(config, log, url, draw) if config.page else _label(config, log, draw)
    except (KeyError, PermissionError) as error:
        raise UserError(error.args[0]) from None
    finally:
        log.close()


def drawing(settings: dict[str, Any]) -> Draw:
    """How observations of a run look: as the environment of its prefer.yaml says; without one they are
    pictures."""
    return control_env(settings["env"]).draw if "env" in settings else draw_pixels


def _label(config: LabelConfig, log: LabelLog, draw: Draw) -> dict[str, Any]:
    token = config.token or os.environ.get("RL_DIALOG_TOKEN", "")
    labeller = labelling.whose_token(log, token) if token else _name(config)
    with interrupted_once():
        patience = {"lease": config.lease, "idle": config.idle}
        return labelling.label_here(log, config.run, labeller, draw=draw, **patience)


def _serve(config: LabelConfig, log: LabelLog, url: str, draw: Draw) -> dict[str, Any]:
    labelling.check_who_comes(log, config.host, is_open=config.open, is_local=is_loopback(config.host))
    options = {name: getattr(config, name) for name in ("title", "lease", "idle")}
    options |= {"host": config.host, "port": config.port, "draw": draw}
    options["labeller"] = _name(config) if config.open else None
    # In this order: Ray has a handler of its own for termination signals.
    with _page(config, log, url, options) as (address, alive), told_to_end() as end:
        labelling.say_where(address, needs_token=not config.open, quiet=config.quiet)
        labelling.wait_for(end, alive)
    return {"page": address, **log.counts()}


def _page(
    config: LabelConfig, log: LabelLog, url: str, options: dict[str, Any]
) -> AbstractContextManager[tuple[str, Callable[[], bool]]]:
    """The page here or on Ray Serve: its address, and whether it is still there."""
    if config.backend == "local":
        return labelling.page_here(log, config.run, **options)
    from rl_dialog.cluster.label_page import page_on_ray

    return page_on_ray(config.address, url, config.run, **options)


def _name(config: LabelConfig) -> str:
    return config.labeller or getpass.getuser()


if __name__ == "__main__":
    run(LabelConfig, main)
