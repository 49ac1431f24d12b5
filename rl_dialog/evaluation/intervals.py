"""Figures with intervals: every figure of a report is a ratio of sums over units (episodes, dialogs,
contexts), so one bootstrap serves them all.

All runs of all policies meet the same units, so runs (seeds) and units are crossed, not nested: a lucky
conversation is lucky for every run. A bootstrap replicate therefore draws units once for everybody and runs
within each policy. Out of n, n - 1 are drawn with replacement (Rao and Wu 1988): drawing n would make the
intervals of three runs a fifth too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_dialog.errors import UserError

REPLICATES = 2000
ROUNDING = 1e-12  # of two figures: what they differ by at most because their sums were rounded


def rounded(value: float | None) -> float | None:
    """To six digits, whatever the unit of rewards."""
    return None if value is None else float(f"{value:.6g}")


@dataclass(frozen=True)
class Measure:
    """One run's figure: sum(numerator) / sum(denominator) over U units, through exp for a perplexity."""

    numerator: np.ndarray  # (U,)
    denominator: np.ndarray  # (U,)
    exponential: bool = False
    interval: bool = True  # off where units are so unequal that a bootstrap over them would claim too much

    @classmethod
    def mean(cls, values: Sequence[float | None] | np.ndarray) -> Measure:
        """The mean over units; None and NaN count as absent."""
        array = np.array([np.nan if value is None else value for value in values], dtype=float)
        return cls(np.nan_to_num(array, posinf=np.inf, neginf=-np.inf), (~np.isnan(array)).astype(float))

    @classmethod
    def whole(cls, value: float) -> Measure:
        """A figure that is not a mean over units (distinct-n): only runs are drawn again."""
        return cls.mean([value])

    @property
    def value(self) -> float:
        """The figure; NaN without a single unit that it applies to."""
        return float(_ratio(self.numerator.sum(), self.denominator.sum(), self.exponential))


@dataclass(frozen=True)
class Estimate:
    """A figure of a group of runs (or a difference of two groups) with its 95 % interval; both ends are None
    where nothing varies."""

    value: float
    low: float | None
    high: float | None
    runs: int
    units: int

    @property
    def triple(self) -> list[float | None]:
        """The figure and both ends of its interval."""
        return [self.value, self.low, self.high]


def estimate(runs: Sequence[Measure], *, replicates: int = REPLICATES, seed: int = 0) -> Estimate | None:
    """The figure over all runs with the interval over runs and units; None when it applies to nothing. One
    run: the interval covers units only."""
    numerator, denominator, exponential = _stack(runs)
    value = float(_ratio(numerator.sum(), denominator.sum(), exponential))
    if np.isnan(value):
        return None
    if not all(run.interval for run in runs):
        return Estimate(value, None, None, len(runs), numerator.shape[1])
    units = _draws(numerator.shape[1], replicates, _stream(seed, 0))
    draws = _replicate(numerator, denominator, exponential, units, _stream(seed, 1))
    return _with_interval(value, draws, len(runs), numerator.shape[1])


def difference(
    runs: Sequence[Measure], baseline: Sequence[Measure], *, replicates: int = REPLICATES, seed: int = 0
) -> Estimate | None:
    """`runs` minus `baseline`, paired by unit. Raises UserError when the two did not meet the same number of
    units."""
    ours, theirs = _stack(runs), _stack(baseline)
    if ours[0].shape[1] != theirs[0].shape[1]:
        raise UserError(
            f"expected two policies that met the same units, got {ours[0].shape[1]} and {theirs[0].shape[1]}"
        )
    value = float(
        _minus(
            _ratio(ours[0].sum(), ours[1].sum(), ours[2]),
            _ratio(theirs[0].sum(), theirs[1].sum(), theirs[2]),
        )
    )
    if np.isnan(value):
        return None
    if not all(run.interval for run in (*runs, *baseline)):
        return Estimate(value, None, None, min(len(runs), len(baseline)), ours[0].shape[1])
    units = _draws(ours[0].shape[1], replicates, _stream(seed, 0))
    draws = _minus(_replicate(*ours, units, _stream(seed, 1)), _replicate(*theirs, units, _stream(seed, 2)))
    return _with_interval(value, draws, min(len(runs), len(baseline)), ours[0].shape[1])


def unpaired_difference(
    ours: Measure, theirs: Measure, *, replicates: int = REPLICATES, seed: int = 0
) -> Estimate | None:
    """`ours` minus `theirs` where each met units of its own, which are therefore drawn by themselves; one
    unit has no spread, so no interval."""
    value = float(_minus(ours.value, theirs.value))
    if np.isnan(value):
        return None
    units = [int((measure.denominator > 0).sum()) for measure in (ours, theirs)]
    if min(units) < 2 or not (ours.interval and theirs.interval):
        return Estimate(value, None, None, 1, min(units))
    replicated = []
    for number, measure in enumerate((ours, theirs)):
        numerator, denominator, exponential = _stack([measure])
        times = _draws(numerator.shape[1], replicates, _stream(seed, 3 + number))
        replicated.append(_replicate(numerator, denominator, exponential, times, _stream(seed, 1)))
    return _with_interval(value, _minus(*replicated), 1, min(units))


def _stack(runs: Sequence[Measure]) -> tuple[np.ndarray, np.ndarray, bool]:
    """(R, U) numerators and denominators of R runs."""
    if not runs:
        raise UserError("expected the measures of at least one run, got none")
    sizes = sorted({len(run.numerator) for run in runs})
    if len(sizes) > 1:
        raise UserError(f"expected runs that met the same units, got {sizes} units")
    return (
        np.stack([run.numerator for run in runs]),
        np.stack([run.denominator for run in runs]),
        runs[0].exponential,
    )


def _replicate(
    numerator: np.ndarray,
    denominator: np.ndarray,
    exponential: bool,
    units: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """(replicates,) figures; `units` (replicates, U) says how often each unit was drawn."""
    runs = _draws(len(numerator), len(units), rng)  # (replicates, R)
    with np.errstate(invalid="ignore"):  # an infinite numerator that was not drawn
        return _ratio(((runs @ numerator) * units).sum(1), ((runs @ denominator) * units).sum(1), exponential)


def _draws(count: int, replicates: int, rng: np.random.Generator) -> np.ndarray:
    return rng.multinomial(max(1, count - 1), np.full(count, 1 / count), size=replicates).astype(float)


def _ratio(numerator: np.ndarray, denominator: np.ndarray, exponential: bool) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(denominator > 0, np.divide(numerator, denominator), np.nan)
        return np.exp(ratio) if exponential else ratio


def _minus(ours: np.ndarray | float, theirs: np.ndarray | float) -> np.ndarray:
    """`ours` minus `theirs`; 0 where they differ by rounding only, which no interval may take for certain."""
    with np.errstate(invalid="ignore"):
        change = np.subtract(ours, theirs)
    same = np.abs(change) <= ROUNDING * np.minimum(np.abs(ours), np.abs(theirs))
    return np.where(same, 0.0, change)


def _with_interval(value: float, draws: np.ndarray, runs: int, units: int) -> Estimate:
    finite = draws[np.isfinite(draws)]
    if len(finite) < len(draws) / 2 or not np.isfinite(value) or finite.min() == finite.max():
        return Estimate(value, None, None, runs, units)
    low, high = np.percentile(finite, [2.5, 97.5])
    return Estimate(value, float(low), float(high), runs, units)


def _stream(seed: int, number: int) -> np.random.Generator:
    """Units have a stream of their own, so that every figure over the same units is drawn alike."""
    return np.random.default_rng([seed, number])
