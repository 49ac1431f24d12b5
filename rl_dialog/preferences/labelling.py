"""What `pipelines.label` does: tokens of labellers, the plan, answers in this terminal, the page from this
process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_dialog.errors import UserError
from rl_dialog.preferences.earlier_runs import named_labels
from rl_dialog.preferences.frames import Draw
from rl_dialog.preferences.gold_pairs import gold_of, read_gold
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import NewQuery
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Segments

GOLD_SHARE = 0.1  # of what is shown, once there are gold pairs


def log_url(labels: str, folder: Path, settings: dict[str, Any]) -> str:
    """The label log of a run: the one that is named, else what its settings say, else labels.db in its
    folder."""
    return labels or named_labels(settings, folder) or RunFiles(folder).own_labels


@dataclass(frozen=True)
class TokenOptions:
    """Tokens of labellers to make or to take away, in place of labelling."""

    new_token: str = ""
    """make a token of this name, print it with a link to the page (they are shown only now) and return"""
    scopes: tuple[str, ...] = ("labeller",)
    """what a new token may do: labeller, operator (the run's page, everybody's statistics), metrics (the
    run's page), or several of them"""
    revoke: str = ""
    """revoke a labeller: their token and all their labels, whose pairs others get; or an operator's or
    metrics token; then return"""


@dataclass(frozen=True)
class PlanOptions:
    """How the run is labelled; what is not given stays as it is. Without --page these change it and return,
    also while the run is under way."""

    overlap: float | None = None
    """people who see each pair, each of them once and none what the others said; 1.2 is two for a fifth of
    the pairs. It holds for the pairs that are there, answered or not, and for those to come"""
    gold: str = ""
    """file of pairs with known answers, a JSON line each: prompt, chosen, rejected, or first, second (ids of
    segments) and preference. They are shown among the others, are no labels, and measure the labellers"""
    gold_of: str = ""
    """the pairs that this labeller has answered become gold pairs, with the answers taken to be right; those
    that are gold already keep their known answer"""
    gold_share: float | None = None
    """share of what a labeller is shown that are gold pairs, each once; by default 0.1 once there are some"""
    goal: int | None = None
    """answers that each labeller is asked for, whose progress the page shows; 0: as many as there are"""
    session: int | None = None
    """answers after which the page proposes a break; 0: never"""
    strength: bool | None = None
    """ask how much better: slightly or much"""
    reasons: tuple[str, ...] | None = None
    """tags that a labeller may give with an answer, such as correct polite short"""
    guideline: str = ""
    """Markdown file that labellers read first and have one tap away; a block ```example with lines prompt:,
    left:, right:, answer: and why: is shown as a pair"""

    @property
    def plans(self) -> bool:
        """Is something of the plan given?"""
        values = (getattr(self, field.name) for field in fields(PlanOptions))
        return any(value is not None and value != "" for value in values)


def change_plan(options: PlanOptions, log: LabelLog, segments: Segments) -> dict[str, Any]:
    """Changes the plan of a run; the plan and how many gold pairs there are. Raises UserError for what cannot
    be, before anything is changed."""
    gold = _gold(options, log, segments)
    share = options.gold_share
    if gold and share is None and not log.plan.gold_share:
        share = GOLD_SHARE
    names = ("overlap", "goal", "session", "strength", "reasons")
    values = {name: getattr(options, name) for name in names} | {"gold_share": share}
    if options.guideline:
        values["guideline"] = _text(options.guideline)
    log.plan.changed(**values)  # raises for what cannot be
    number = log.add_gold(gold) if gold else len(log.gold())
    if share and not number:
        raise UserError("--gold_share: expected gold pairs, from --gold or --gold_of, found none in the log")
    plan = asdict(log.set_plan(**values))
    return plan | {"guideline": len(plan["guideline"]), "reasons": list(plan["reasons"]), "gold": number}


def _gold(options: PlanOptions, log: LabelLog, segments: Segments) -> list[NewQuery]:
    task = log.usual_task()
    pairs = read_gold(options.gold, segments, task=task) if options.gold else []
    return pairs + (gold_of(options.gold_of, log.answers(), task=task) if options.gold_of else [])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--guideline: expected a file of Markdown, got {path}: {error}") from None


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
