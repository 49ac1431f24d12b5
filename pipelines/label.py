"""Compare clips or replies of a run: in this terminal, or on a page for browsers.

    python -m pipelines.label --run runs/dot                                   L, R, E or blank; U takes back, P is a break, Q leaves
    python -m pipelines.label --run runs/dot --new_token ann                   a labeller's access token, shown once
    python -m pipelines.label --run runs/dot --page --host 0.0.0.0             the page, for everybody with a token
    python -m pipelines.label --run runs/dot --page --open                     the page for yourself: this machine only, without tokens

The run may be under way (`prefer` writes the pairs) or over. Any number of people label at once, nobody gets a pair that another one has.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.moving_dot import MovingDotVector
from rl_dialog.config import read_yaml, run
from rl_dialog.preferences.frames import Draw, draw_pixels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Segments


@dataclass(frozen=True)
class LabelConfig:
    """Whose labels, of what, and where."""

    run: str = ""
    """folder of the run: clips/ and, where they are there, prefer.yaml, status.json and metrics.jsonl"""
    labels: str = ""
    """URL of the label log; by default what the run's prefer.yaml says, else labels.db in the run's folder"""
    labeller: str = ""
    """your name in the log, in the terminal and with --open; by default your name on this machine"""
    token: str = ""
    """in place of a name: label in the terminal as the labeller whose token this is; RL_DIALOG_TOKEN says the same unseen by others"""
    page: bool = False
    """serve the page until Ctrl-C"""
    host: str = "127.0.0.1"
    """address of the page"""
    port: int = 8001
    """port of the page"""
    open: bool = False
    """the page asks for no token; for one person at this machine"""
    new_token: str = ""
    """make a token for this labeller, print it and return"""
    revoke: str = ""
    """revoke a labeller: their token and all their labels, whose pairs others get; then return"""
    lease: float = 60.0
    """seconds that a pair is kept for somebody after the last sign of life"""
    idle: float = 180.0
    """seconds without a key or a touch after which somebody counts as away and the pair goes back"""
    title: str = "Which is better?"
    """heading of the page"""
    quiet: bool = False
    """print only the JSON lines; the terminal's pairs are shown nevertheless"""


def main(config: LabelConfig) -> dict[str, Any]:
    """Labels, or serves, until it is told to end; what was done. Raises ValueError for a run that is not there and for a page open to everybody."""
    folder = Path(config.run)
    if not config.run or not folder.is_dir():
        raise ValueError(f"--run: expected the folder of a run, got {config.run!r}")
    if config.lease < 1 or config.idle < 1:
        raise ValueError(f"expected at least 1 second as --lease and --idle, got {config.lease:g} and {config.idle:g}")
    settings = read_yaml(str(folder / "prefer.yaml")) if (folder / "prefer.yaml").is_file() else {}
    log = LabelLog(config.labels or settings.get("labels") or f"sqlite:///{folder / 'labels.db'}")
    try:
        if config.new_token:
            return {"labeller": config.new_token, "token": log.add_labeller(config.new_token)}
        if config.revoke:
            return {"labeller": config.revoke, "revoked": log.revoke_labeller(config.revoke)}
        segments, draw = Segments(folder / "clips"), drawing(settings)
        return _serve(config, log, segments, draw) if config.page else _label(config, log, segments, draw)
    except (KeyError, PermissionError) as error:
        raise ValueError(error.args[0]) from None
    finally:
        log.close()


def drawing(settings: dict[str, Any]) -> Draw:
    """How observations of a run look, by its prefer.yaml: those of MovingDot may be positions, all others are pictures."""
    env = settings.get("env", "")
    name = env.get("name", "") if isinstance(env, dict) else env
    return MovingDotVector.draw if str(name).startswith("moving_dot") else draw_pixels


def _label(config: LabelConfig, log: LabelLog, segments: Segments, draw: Draw) -> dict[str, Any]:
    from rl_dialog.preferences.terminal import TerminalLabeller

    token = config.token or os.environ.get("RL_DIALOG_TOKEN", "")
    labeller = log.labeller_of(token) if token else _name(config)
    if labeller is None:
        raise ValueError("--token: expected the token of a labeller, got one that nobody has or that was revoked")
    with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
        terminal = TerminalLabeller(log, segments, labeller, draw=draw, files=RunFiles(config.run), lease=config.lease, idle=config.idle)
        return terminal.run()


def _serve(config: LabelConfig, log: LabelLog, segments: Segments, draw: Draw) -> dict[str, Any]:
    from rl_dialog.preferences.page.app import create_page
    from rl_dialog.preferences.page.server import PageServer

    if config.open and not _is_loopback(config.host):
        raise ValueError(f"--open: expected --host 127.0.0.1, got {config.host}: who is not at this machine needs a token (--new_token NAME)")
    if not config.open and not any(one["active"] for one in log.labellers().values()):
        raise ValueError("expected somebody with a token: make one with --new_token NAME, or serve this machine alone with --open")
    name = _name(config) if config.open else None
    app = create_page(log, segments, draw=draw, labeller=name, run=config.run, title=config.title, lease=config.lease, idle=config.idle)
    end = threading.Event()
    before = {number: signal.signal(number, lambda *_: end.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    server = PageServer(app, host=config.host, port=config.port)
    try:
        print(json.dumps({"ready": server.url, "run": f"{server.url}/run", "needs_token": name is None}), flush=True)
        say = Console(quiet=config.quiet, stderr=True, highlight=False).print
        say(f"labels   {server.url}/{'#token=YOUR_TOKEN' if name is None else ''}\nthe run  {server.url}/run")
        while server.alive() and not end.wait(0.5):
            pass
    finally:
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if not end.is_set():
        raise OSError("the page's server ended by itself; what it said before has the reason")
    return {"page": server.url, **log.counts()}


def _name(config: LabelConfig) -> str:
    return config.labeller or getpass.getuser()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """These signals end the block as Ctrl-C does."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    run(LabelConfig, main)
