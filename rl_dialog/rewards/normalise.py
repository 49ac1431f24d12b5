"""Normalisers of reward components: fitted on the training split, kept in the manifest, and the same for
every reply afterwards.

    zscore   (x - mean) / std             std of the population, as numpy
    min_max  (x - min) / (max - min)      new data may leave 0..1
    rank     the share of training replies below x, those equal to it counted half; between known values by a
             straight line

A component that never varies becomes 0 by the first two and 0.5 by the last. What does not apply to a reply
stays out of its sum; a sum of nothing is missing, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rl_dialog.errors import UserError
from rl_dialog.rewards.statistics import ROUNDING

KINDS = ("none", "zscore", "min_max", "rank")
KNOTS = 1001  # a rank keeps at most so many values


@dataclass(frozen=True)
class Normaliser:
    """(x - shift) / scale, or for ranks a line through (values, ranks)."""

    kind: str
    shift: float = 0.0
    scale: float = 1.0
    values: tuple[float, ...] = ()  # rising
    ranks: tuple[float, ...] = ()

    def __call__(self, x: float) -> float:
        if self.kind == "rank":
            return float(np.interp(x, self.values, self.ranks))
        return (x - self.shift) / self.scale

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {name: value for name, value in asdict(self).items() if value != ()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Normaliser:
        """The inverse of `to_dict`. Raises UserError for what no normaliser looks like."""
        try:
            normaliser = cls(
                **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            )
        except TypeError as error:
            raise UserError(
                f"expected a normaliser with kind, shift, scale, values and ranks, got {dict(values)}"
            ) from error
        if (
            normaliser.kind not in KINDS
            or not normaliser.scale
            or len(normaliser.values) != len(normaliser.ranks)
            or (normaliser.kind == "rank" and not normaliser.values)
        ):
            raise UserError(
                f"expected a normaliser of the kinds {', '.join(KINDS)} with a scale and as many values as "
                f"ranks, got {dict(values)}"
            )
        return normaliser


def read_kinds(entries: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """{reward: kind} of `zscore` for all or `sentiment=rank` for one; a later entry wins, `none` is left out.
    Raises UserError."""
    reward_kinds: dict[str, str] = {}
    for entry in entries:
        name, equals, kind = entry.rpartition("=")
        if kind not in KINDS:
            raise UserError(
                f"--normalise {entry}: expected one of {', '.join(KINDS)} for all rewards, or NAME=KIND "
                "for one"
            )
        if equals and name not in names:
            raise UserError(
                f"--normalise {entry}: expected one of the rewards of this run, {', '.join(names)}, got "
                f"{name!r}"
            )
        reward_kinds |= dict.fromkeys([name] if equals else names, kind)
    return {name: kind for name, kind in reward_kinds.items() if kind != "none"}


def fit_moments(kind: str, *, mean: float, std: float, low: float, high: float) -> Normaliser:
    """`zscore` or `min_max` from figures of the training replies that the component applies to. What never
    varies, but for the rounding of sums, becomes 0."""
    if math.isclose(low, high, rel_tol=ROUNDING):
        return Normaliser(kind, low, 1.0)
    shift, scale = (mean, std) if kind == "zscore" else (low, high - low)
    return Normaliser(kind, shift, scale or 1.0)


def fit_rank(values: np.ndarray) -> Normaliser:
    """`rank` from the training replies' values (R,); with more than KNOTS different values the line goes
    through evenly spaced quantiles."""
    distinct, counts = np.unique(values, return_counts=True)
    below = np.cumsum(counts) - counts
    ranks = (below + counts / 2) / counts.sum()
    if len(distinct) > KNOTS:
        knots = np.unique(np.searchsorted(ranks, np.linspace(ranks[0], ranks[-1], KNOTS)))
        distinct, ranks = distinct[knots], ranks[knots]
    return Normaliser("rank", values=tuple(distinct.tolist()), ranks=tuple(ranks.tolist()))


def fit_normalisers(
    kinds: Mapping[str, str], components: Mapping[str, Mapping[str, float]], ranked: Mapping[str, np.ndarray]
) -> dict[str, Normaliser]:
    """One for each reward in `kinds`, from the figures of its component and, for ranks, from its values.

    Raises UserError for a component that applies to no reply.
    """
    fitted = {}
    for name, kind in kinds.items():
        row = components[name]
        if not row["coverage"]:
            problem = f"the reward {name} applies to no reply of the training split"
            raise UserError(f"--normalise: {problem}, so there is nothing to fit: leave it out")
        moments = {"mean": row["mean"], "std": row["std"], "low": row["min"], "high": row["max"]}
        fitted[name] = fit_rank(ranked[name]) if kind == "rank" else fit_moments(kind, **moments)
    return fitted


def weighted_sum(
    components: Mapping[str, float], weights: Mapping[str, float], normalisers: Mapping[str, Normaliser]
) -> float | None:
    """A reply's reward: the sum of weight * normalised component over the `components` that apply to it.

    None where none of them has a weight other than 0: a reward that nobody gave is not one of 0. Infinite
    where it is too large for a float.
    """
    weighted = {name: value for name, value in components.items() if weights[name]}
    if not weighted:
        return None
    weighted |= {name: normalisers[name](value) for name, value in weighted.items() if name in normalisers}
    try:
        return math.fsum(weights[name] * value for name, value in weighted.items())
    except (OverflowError, ValueError):  # a sum that no float holds, inf - inf among them
        return math.inf
