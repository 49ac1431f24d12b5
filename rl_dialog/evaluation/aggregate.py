"""Many worlds in one number: returns put on one scale, and their interquartile mean over worlds and seeds.

    score   (return - L) / (H - L), L the return of the policy behind the logs, H the optimum or, where nobody
            knows it, the best player: 0 is as good as the logs, 1 as good as can be known
    IQM     the mean of the middle half of all scores, one per world and seed; a run that went very well or
            very badly moves it as little as any other
    95 %    percentiles of a stratified bootstrap: each replicate draws the seeds of each world anew, with
            replacement and world by world, so that every world counts as often as it did

After Agarwal et al. 2021 (arXiv 2108.13264). The worlds are taken as they are: the interval says nothing
about others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from rl_dialog.evaluation import summary
from rl_dialog.evaluation.intervals import REPLICATES, Estimate

LOGS, OPTIMUM = "behaviour policy", "optimum"  # what worlds call them in `reference_returns`


@dataclass(frozen=True)
class Scale:
    """What returns in a world are measured by."""

    low: float  # the policy behind the logs
    high: float
    best: str  # whose return `high` is

    def score(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def scale_of(references: Mapping[str, float]) -> Scale | None:
    """The scale of a world by its reference returns; None where it does not tell what the logs return, or
    nobody is better than they are."""
    others = {name: value for name, value in references.items() if name != LOGS}
    if LOGS not in references or not others:
        return None
    best = OPTIMUM if OPTIMUM in others else max(others, key=others.__getitem__)
    low, high = references[LOGS], others[best]
    return Scale(low, high, best) if high > low else None


@dataclass(frozen=True)
class World:
    """What the methods scored in one world, and which of them its intervals tell from their clone."""

    title: str
    scale: Scale
    scores: dict[str, list[float]]  # method -> the score of each seed
    above: frozenset[str]  # methods whose difference to bc has its whole interval above 0
    below: frozenset[str]  # and below 0


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean over the last axis of what is left when a quarter (rounded down) is cut off at each end."""
    cut = scores.shape[-1] // 4
    return np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(axis=-1)


def aggregate(
    worlds: Sequence[Sequence[float]], *, replicates: int = REPLICATES, seed: int = 0
) -> Estimate | None:
    """The interquartile mean of scores, one list per world with one of each seed; None without any. No
    interval where no world has a second seed, or nothing varies."""
    worlds = [np.asarray(scores, dtype=float) for scores in worlds if len(scores)]
    if not worlds:
        return None
    rng = np.random.default_rng(seed)
    value = float(interquartile_mean(np.concatenate(worlds)))
    drawn = [scores[rng.integers(len(scores), size=(replicates, len(scores)))] for scores in worlds]
    means = interquartile_mean(np.concatenate(drawn, axis=1))  # (replicates,)
    low, high = np.percentile(means, [2.5, 97.5])
    units, runs = len(worlds), min(map(len, worlds))
    return (
        Estimate(value, float(low), float(high), runs, units)
        if low < high
        else Estimate(value, None, None, runs, units)
    )


def as_markdown(worlds: Sequence[World], methods: Sequence[str]) -> list[str]:
    """A table of scores, a row per method, and what its columns mean."""
    head = ["method", "all worlds", *(world.title for world in worlds), "above `bc`", "below `bc`"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for method in methods:
        overall = aggregate([world.scores.get(method, []) for world in worlds])
        if overall is None:
            continue
        means = [np.mean(found) if (found := world.scores.get(method)) else None for world in worlds]
        told = [sum(method in getattr(world, side) for world in worlds) for side in ("above", "below")]
        cells = [shown(overall), *("-" if mean is None else f"{mean:.2f}" for mean in means)]
        lines.append(f"| `{method}` | " + " | ".join([*cells, *map(str, told)]) + " |")
    ends = "; ".join(
        f"{w.title} {_end(w.scale.low)} to {_end(w.scale.high)} ({w.scale.best})" for w in worlds
    )
    return [
        *lines,
        "",
        "Scores: 0 is the return of the policy behind the logs, 1 that of the optimum or the best player, "
        "at the last checkpoint. All worlds: the interquartile mean over worlds and seeds, with the 95 % "
        "interval of a bootstrap over the seeds of each world; a world's own column is the mean over its "
        "seeds. Above and below: in how many worlds the interval of the difference to `bc` lies on that side "
        "of 0. "
        f"From and to: {ends}.",
    ]


def _end(value: float) -> str:
    return summary.shown(Estimate(value, None, None, 1, 1), summary.figure_of("return"))


def shown(estimate: Estimate) -> str:
    """`0.81 [0.72, 0.90]`."""
    value = f"{estimate.value:.2f}"
    return value if estimate.low is None else f"{value} [{estimate.low:.2f}, {estimate.high:.2f}]"


def as_record(worlds: Sequence[World], methods: Sequence[str]) -> dict[str, Any]:
    """The same as numbers: method -> its interquartile mean with interval, and the scores of each world."""
    found = {}
    for method in methods:
        scores = {world.title: world.scores[method] for world in worlds if world.scores.get(method)}
        if overall := aggregate(list(scores.values())):
            found[method] = {"interquartile_mean": overall.triple, "scores": scores}
    return found


def draw(axes: Axes, worlds: Sequence[World], methods: Sequence[str], colour: str) -> None:
    """A line per method: its interquartile mean with its interval, and faintly its mean in each world."""
    for y, method in enumerate(methods):
        overall = aggregate([world.scores.get(method, []) for world in worlds])
        if overall is None:
            continue
        means = [float(np.mean(world.scores[method])) for world in worlds if world.scores.get(method)]
        axes.plot(means, [y] * len(means), "|", color=colour, alpha=0.4, markersize=8)
        if overall.low is not None:
            axes.plot([overall.low, overall.high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(overall.value, y, "o", color=colour, markersize=5)
    for end in (0, 1):
        axes.axvline(end, color="#6b6b6b", linestyle=":", linewidth=1, zorder=1)
    axes.set_title("all worlds", loc="left", fontsize=10)
    axes.set_xlabel("score: 0 the logs, 1 the best", fontsize=9)
