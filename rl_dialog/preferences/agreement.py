"""How far labellers agree: Krippendorff's alpha, over a whole log and of one person with the others, and how
sure it can be that somebody is careless.

Alpha is 1 - (disagreement observed) / (disagreement expected by chance): 1 is perfect, 0 is what coins give,
and below 0 people contradict each other (Krippendorff 2018, Content Analysis, chapter 12). A pair that one
person answered says nothing about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import comb, exp, lgamma, log
from typing import Literal

import numpy as np

from rl_dialog.preferences.labels import Answer

VALUES = (0.0, 0.5, 1.0)  # P(first preferred) of an answer
Distance = Literal["nominal", "ordinal", "interval"]
RESAMPLES, TOGETHER = 1000, 50
EXPECTED_RIGHT = 0.8  # of an attentive labeller's answers to gold pairs, at least
UNLIKELY = 0.01
QUICK = 1.0  # seconds from showing to answer, the median, in which nobody has looked at a pair


@dataclass(frozen=True)
class Alpha:
    """Krippendorff's alpha with its 95 % interval over pairs, from so many pairs with two or more answers."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def opinions(answers: Iterable[Answer]) -> list[Answer]:
    """The answers that stand, prefer something and are about pairs whose answer nobody knows."""
    return [answer for answer in answers if answer.counts and answer.gold is None]


def by_query(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Query -> its answers."""
    groups = defaultdict(list)
    for answer in answers:
        groups[answer.query].append(answer)
    return dict(groups)


def alpha(
    units: Iterable[Sequence[float]],
    *,
    distance: Distance = "ordinal",
    symmetric: bool = False,
    seed: int = 0,
) -> Alpha | None:
    """Of what several people said of each unit, values among 0, .5 and 1. None where no unit has two answers,
    or all answers are the same, so that chance would agree as well.

    Which segment of a pair is first means nothing: in logs it may always be the better one, and then chance
    seems to agree as often as people do. `symmetric` counts each unit in both orders, so that only ties can
    be had by chance like that.

    The interval is a percentile bootstrap over units. Ordinal: a tie is nearer to a preference than the
    opposite preference is, by how often each is said. Interval: it is half of the way. Nominal: it is as far.
    """
    counts = np.array([[unit.count(value) for value in VALUES] for unit in map(list, units) if len(unit) > 1])
    if not len(counts):
        return None
    pairs = _coincidences(counts)
    if symmetric:
        counts, pairs = counts + counts[:, ::-1], pairs + pairs[:, ::-1, ::-1]
    value = _alphas(counts[None].sum(1), pairs.sum(0)[None], distance)[0]
    if np.isnan(value):
        return None
    low, high = np.nanquantile(_resampled(counts, pairs, distance, seed), [0.025, 0.975])
    return Alpha(float(value), float(low), float(high), len(counts))


def alpha_of_each(
    groups: Mapping[str, Sequence[Answer]], *, distance: Distance = "ordinal"
) -> dict[str, Alpha | None]:
    """Labeller -> alpha with each of the others in turn: a unit is what the two said of one pair."""
    units = defaultdict(list)
    for answers in groups.values():
        for mine, other in permutations(answers, 2):
            units[mine.labeller].append([mine.preference, other.preference])
    return {name: alpha(of, distance=distance) for name, of in units.items()}


def disagreement(preferences: Sequence[float]) -> float:
    """Share of the pairs of people who did not say the same of one pair; 0 of a single answer."""
    n = len(preferences)
    same = sum(comb(list(preferences).count(value), 2) for value in VALUES)
    return 1 - same / comb(n, 2) if n > 1 else 0.0


def doubts(figures: Mapping[str, float | int | None]) -> list[str]:
    """Reasons to look at what somebody does, of their figures in `LabelLog.labellers()`: too few gold pairs
    right for someone who is right on 80 %, nearly always the same side, or answers faster than anybody can
    look. Each would be seen of fewer than one attentive labeller in a hundred."""
    found = []
    gold, right = figures.get("gold") or 0, figures.get("gold_right") or 0
    if gold and at_most(right, gold, EXPECTED_RIGHT) < UNLIKELY:
        found.append(f"right on {right} of {gold} gold pairs")
    sides, left = (
        figures.get("sides") or 0,
        round((figures.get("left_share") or 0) * (figures.get("sides") or 0)),
    )
    if sides and 2 * at_most(min(left, sides - left), sides, 0.5) < UNLIKELY:
        side, often = ("left", left) if 2 * left > sides else ("right", sides - left)
        found.append(f"{side} in {often} of {sides} answers, where half is expected")
    seconds = figures.get("seconds")
    if seconds is not None and seconds < QUICK and (figures.get("labels") or 0) >= 10:
        found.append(f"{seconds:.1f} seconds from pair to answer")
    return found


def at_most(successes: int, trials: int, probability: float) -> float:
    """P(that many successes or fewer) of a binomial, by logarithms: of some thousand trials the number of
    ways is no float any more."""
    ways = (lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1) for k in range(successes + 1))
    p, q = log(probability), log(1 - probability)
    return min(1.0, sum(exp(way + k * p + (trials - k) * q) for k, way in enumerate(ways)))


def _coincidences(counts: np.ndarray) -> np.ndarray:
    """(U, K) answers of each value -> (U, K, K): how often two values meet in a unit, each answer weighing
    one."""
    meeting = counts[:, :, None] * (counts[:, None, :] - np.eye(counts.shape[1]))
    return meeting / (counts.sum(1) - 1)[:, None, None]


def _resampled(counts: np.ndarray, pairs: np.ndarray, distance: Distance, seed: int) -> np.ndarray:
    """(RESAMPLES,) alphas of as many units drawn with replacement, a few samples at a time: those of a large
    log have no room side by side."""
    rng, equally = np.random.default_rng(seed), np.full(len(counts), 1 / len(counts))
    found = []
    for _ in range(0, RESAMPLES, TOGETHER):
        drawn = rng.multinomial(len(counts), equally, TOGETHER).astype(float)
        met = (drawn @ pairs.reshape(len(counts), -1)).reshape(-1, len(VALUES), len(VALUES))
        found.append(_alphas(drawn @ counts, met, distance))
    return np.concatenate(found)


def _alphas(totals: np.ndarray, pairs: np.ndarray, distance: Distance) -> np.ndarray:
    """(R, K) and (R, K, K) -> alpha (R,): NaN where all answers are the same."""
    far = DISTANCES[distance](totals.astype(float))
    n = totals.sum(1)
    expected = (far * totals[:, :, None] * totals[:, None, :]).sum((1, 2)) / (n - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(expected > 0, 1 - (far * pairs).sum((1, 2)) / expected, np.nan)


def _ordinal(totals: np.ndarray) -> np.ndarray:
    """(answers between two values, half of the two themselves counted) squared."""
    ranks = np.cumsum(totals, 1) - totals / 2
    return (ranks[:, :, None] - ranks[:, None, :]) ** 2


def _interval(totals: np.ndarray) -> np.ndarray:
    values = np.array(VALUES)
    return np.broadcast_to((values[:, None] - values) ** 2, (len(totals), 3, 3))


def _nominal(totals: np.ndarray) -> np.ndarray:
    return np.broadcast_to(1 - np.eye(len(VALUES)), (len(totals), 3, 3))


DISTANCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nominal": _nominal,
    "ordinal": _ordinal,
    "interval": _interval,
}
