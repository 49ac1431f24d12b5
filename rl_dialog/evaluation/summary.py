"""From runs to groups: which figures there are, what a group of runs says with its intervals, and how it
differs from the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import Estimate, Measure, difference, estimate
from rl_dialog.evaluation.metrics import CLICK, reward_measures, text_measures
from rl_dialog.rewards import REWARDS, numbers_of

if TYPE_CHECKING:  # `ab` and `analyse` load no language model, and start in a second
    from rl_dialog.evaluation.candidates import Candidates
    from rl_dialog.evaluation.episodes import Episode
    from rl_dialog.evaluation.generation import Reply


@dataclass(frozen=True)
class Figure:
    """How a figure is shown."""

    title: str
    digits: int = 2
    percent: bool = False
    pays: bool = False
    """in the unit of the rewards, which may be a thousandth: then it has as many digits as that takes"""


FIGURES: dict[str, Figure] = {
    "return": Figure("return per dialog", pays=True),
    "return_greedy": Figure("greedy return", pays=True),
    "return_best_of": Figure("return, best by Q", pays=True),
    "failed": Figure("failed episodes", percent=True),
    "unscored": Figure("unscored episodes", percent=True),
    "replies": Figure("replies per dialog"),
    "perplexity": Figure("perplexity (policy)"),
    "lm_perplexity": Figure("perplexity (plain LM)"),
    "kl": Figure("KL to prior per token", 4),
    "kl_per_reply": Figure("KL to prior per reply", 3),
    "kl_per_message": Figure("KL of latents per message"),
    "active_units": Figure("active units", 0),
    "critic": Figure("pairwise accuracy", percent=True),
    "distinct_1": Figure("distinct-1", 3),
    "distinct_2": Figure("distinct-2", 3),
    "words": Figure("words per reply", 1),
    "tokens": Figure("tokens per reply", 1),
    "repeated": Figure("repeated replies", percent=True),
    "rep_3": Figure("repeated 3-grams inside", percent=True),
    "empty": Figure("empty replies", percent=True),
    "unfinished": Figure("cut replies", percent=True),
    "candidates_different": Figure("different candidates", percent=True),
    "success": Figure("success", percent=True),
    "success_strict": Figure("strict success", percent=True),
    "complete": Figure("complete", percent=True),
    "book_rate": Figure("book rate", percent=True),
    "inform_precision_all_slots": Figure("inform precision", percent=True),
    "inform_recall": Figure("inform recall", percent=True),
    "inform_f1_all_slots": Figure("inform F1", percent=True),
    "turns": Figure("turns"),
    "loops": Figure("dialogs with loops", percent=True),
    "vote": Figure("mean vote"),
    "up": Figure("thumbs up", percent=True),
    "down": Figure("thumbs down", percent=True),
    "voted": Figure("replies voted on", percent=True),
    "seconds": Figure("seconds per reply", 3),
    "ope/logged": Figure("return of the logs", pays=True),
    "ope/fqe": Figure("fitted Q evaluation", pays=True),
    "ope/fqe_td": Figure("its TD error (mean square)", 4, pays=True),
    "ope/dm": Figure("direct method", pays=True),
    "ope/wis": Figure("weighted importance sampling", pays=True),
    "ope/pdwis": Figure("the same per decision", pays=True),
    "ope/n_eff": Figure("effective dialogs", 1),
    "ope/weight": Figure("mean weight"),
    "ope/outside": Figure("mass outside the logs", percent=True),
}
ANSWERS = {
    "average": "embedding average",
    "extrema": "vector extrema",
    "greedy": "greedy matching",
    "emotion": "cosine of emotions",
    "embedding": "cosine of sentence embeddings",
}  # figures of answers against the log
NOT_COMPARED = (
    "critic/",
    "gain/",
    "ope/logged",
    "ope/fqe_td",
    "ope/n_eff",
    "ope/weight",
    "ope/outside",
)  # figures whose difference to a baseline says nothing


@dataclass
class Answer:
    """A generated reply to a held-out context: the dialog that ends with it, and what the log has in its
    place."""

    context: str  # id of the held-out dialog
    dialog: Dialog
    reply: Reply
    logged: str


@dataclass
class RunResult:
    """One evaluated checkpoint."""

    run: str
    directory: str
    method: str
    measures: dict[str, Measure] = field(default_factory=dict)
    episodes: list[Episode] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    candidates: Candidates | None = None
    rewards: dict[str, list[list[float | None]]] = field(
        default_factory=dict
    )  # name -> dialog (episodes, then answers) -> one number per reply
    notes: dict[str, str] = field(
        default_factory=dict
    )  # figure -> why it is missing, or what to know about it

    def score(self, rewards: Mapping[str, Callable[[Dialog], list[float | None]]]) -> None:
        """Fills `rewards`, and the figures of the generated text and its rewards: of the episodes where there
        are some, else of the answers. A reward of the user's own that fails is noted and left out."""
        episodes, answers = (
            [episode.dialog for episode in self.episodes],
            [answer.dialog for answer in self.answers],
        )
        self.rewards = {}
        for name, function in rewards.items():
            try:
                self.rewards[name] = [numbers_of(name, function, dialog) for dialog in episodes + answers]
            except UserError as error:
                if name in REWARDS:
                    raise
                self.notes[f"reward/{name}"] = str(error)
        dialogs = episodes or answers
        if not dialogs:
            return
        replies = [episode.replies for episode in self.episodes] or [
            [answer.reply] for answer in self.answers
        ]
        lengths, ends = (
            [[len(r.tokens) for r in dialog_replies] for dialog_replies in replies],
            [[r.finished for r in dialog_replies] for dialog_replies in replies],
        )
        self.measures |= text_measures(dialogs, lengths, ends)
        self.measures |= reward_measures(
            {name: values[: len(dialogs)] for name, values in self.rewards.items()}
        )


@dataclass
class Group:
    """Runs that differ by seed, at the same kind of checkpoint."""

    name: str
    which: str  # best, last, checkpoint-<step>, or nothing
    runs: list[RunResult]
    estimates: dict[str, Estimate] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.which})" if self.which else self.name

    @property
    def method(self) -> str:
        return self.runs[0].method

    def note(self, figure: str) -> str:
        """Why the figure is missing, in the words of the first run that says so."""
        return next((run.notes[figure] for run in self.runs if figure in run.notes), "")

    def measures(self, figure: str) -> list[Measure]:
        """One per run, where every run has the figure."""
        measures = [run.measures[figure] for run in self.runs if figure in run.measures]
        return measures if len(measures) == len(self.runs) else []

    def summarise(self, *, replicates: int, seed: int) -> None:
        """Fills `estimates`."""
        for figure in dict.fromkeys(name for run in self.runs for name in run.measures):
            measures = self.measures(figure)
            interval = estimate(measures, replicates=replicates, seed=seed) if measures else None
            if interval is not None:
                self.estimates[figure] = interval


def figure_of(name: str) -> Figure:
    """How the figure is shown; rewards, the critic's ways to rank and the figures of candidates are named
    after a slash."""
    if name in FIGURES:
        return FIGURES[name]
    kind, _, rest = name.partition("/")
    if kind == "answer":
        return Figure(ANSWERS.get(rest, rest), 3)
    if kind in ("top", "ranked", "gain"):  # kind/[way/]metric@k
        way, _, metric = rest.rpartition("/")
        metric, _, k = metric.partition("@")
        return Figure(f"{metric} top-{k}" + (f" by {way}" if way else ""), 3, percent=metric == CLICK)
    if kind == "reward":
        return Figure(rest, 3, pays=True)
    return Figure(rest, percent=kind != "rating")


def baseline_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """What to compare with: behaviour cloning where it was evaluated, else the first group; at the same kind
    of checkpoint where there is one."""
    name = next((other.name for other in groups if other.method == "bc"), groups[0].name)
    candidates = [other for other in groups if other.name == name]
    baseline = next((other for other in candidates if other.which == group.which), candidates[0])
    return None if baseline is group or group.name == name else baseline


def compare(group: Group, baseline: Group, *, replicates: int, seed: int) -> dict[str, Estimate]:
    """Differences to the baseline in every figure that both have."""
    changes = {}
    for figure in group.estimates:
        if figure.startswith(NOT_COMPARED) or figure not in baseline.estimates:
            continue
        change = difference(
            group.measures(figure), baseline.measures(figure), replicates=replicates, seed=seed
        )
        if change is not None:
            changes[figure] = change
    return changes


def shown(value: Estimate | None, figure: Figure, *, signed: bool = False) -> str:
    """`1.23 [1.10, 1.35]`, `50.0 % [45.1, 54.9]`, or `-`."""
    if value is None:
        return "-"
    unit = "" if not figure.percent else " points" if signed else " %"
    ends = [] if value.low is None or value.high is None else [value.low, value.high]
    texts = _numbers([value.value, *ends], figure, signed=signed)
    return texts[0] + unit + (f" [{texts[1]}, {texts[2]}]" if ends else "")


def _numbers(values: Sequence[float], figure: Figure, *, signed: bool) -> list[str]:
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    small = figure.pays and 1e-12 < largest < 10**-figure.digits * 10
    digits = 1 - math.floor(math.log10(largest)) if small else figure.digits
    return [_number(value, figure, digits, signed=signed) for value in values]


def _number(value: float, figure: Figure, digits: int, *, signed: bool) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    sign = "+" if signed else ""
    if figure.percent:
        return f"{100 * value:{sign}z.1f}"  # z: no minus before a zero
    if digits > 7 or abs(value) >= 1e5:
        return f"{value:{sign}.2e}"
    digits = digits if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:{sign}z.{digits}f}"


def as_json(value: Estimate) -> dict[str, Any]:
    """Plain values; infinities become null when written."""
    return {
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "runs": value.runs,
        "units": value.units,
    }
