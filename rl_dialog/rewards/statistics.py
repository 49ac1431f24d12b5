"""How reward components spread and correlate over replies, gathered chunk by chunk and merged exactly.

Two components are compared over the replies that both apply to, so the sums are kept per pair (i, j):
`mean[i, j]` is the mean of i where j applies too. The diagonal holds the components' own figures. Merging
follows Chan, Golub and LeVeque (1983), so large means do not eat small spreads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDING = 1e-13  # of a number: by less differ sums and means of equal ones
SUM = "sum"  # the weighted sum's name among the columns


@dataclass
class Statistics:
    """Moments of K columns over R replies."""

    replies: int
    count: np.ndarray  # (K, K) replies that i and j apply to
    mean: np.ndarray  # (K, K) mean of i over them
    square: np.ndarray  # (K, K) sum of squared deviations of i over them
    product: np.ndarray  # (K, K) sum of products of the deviations of i and j
    low: np.ndarray  # (K,)
    high: np.ndarray  # (K,)

    @classmethod
    def of(cls, values: np.ndarray) -> Statistics:
        """Of an (R, K) table with NaN where a column does not apply."""
        applies = ~np.isnan(values)
        weight = applies.astype(float)
        x = np.where(applies, values, 0.0)
        count = weight.T @ weight
        mean = np.divide(x.T @ weight, count, out=np.zeros_like(count), where=count > 0)
        square, product = np.zeros_like(count), np.zeros_like(count)
        for i in range(values.shape[1]):
            both = applies & applies[:, i : i + 1]  # (R, K)
            mine, theirs = x[:, i : i + 1] - mean[i], x - mean[:, i]
            square[i] = np.where(both, mine**2, 0.0).sum(axis=0)
            product[i] = np.where(both, mine * theirs, 0.0).sum(axis=0)
        low = np.where(applies, values, np.inf).min(axis=0, initial=np.inf)
        high = np.where(applies, values, -np.inf).max(axis=0, initial=-np.inf)
        return cls(len(values), count, mean, square, product, low, high)

    def merge(self, other: Statistics) -> Statistics:
        """Of the replies of both."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)
        delta = other.mean - self.mean
        between = self.count * share
        return Statistics(
            self.replies + other.replies,
            count,
            self.mean + delta * share,
            self.square + other.square + delta**2 * between,
            self.product + other.product + delta * delta.T * between,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    def summary(self, weights: dict[str, float]) -> dict[str, Any]:
        """For the manifest. Mean, std (population), min and max are over the replies a component applies to;
        coverage is their share of all replies.

        The last column is the weighted sum, whose coverage is the share of the replies that have a reward.
        A correlation is null where either side is constant.
        """
        names = [*weights, SUM]
        rows = [self._column(k) for k in range(len(names))]
        components = {
            name: {"weight": weights[name], **row} for name, row in zip(weights, rows[:-1], strict=True)
        }
        return {"components": components, "sum": rows[-1], "correlation": self._correlation(names)}

    def _column(self, k: int) -> dict[str, float | None]:
        n = self.count[k, k]
        if n == 0:
            return {"mean": None, "std": None, "min": None, "max": None, "coverage": 0.0}
        varies = not np.isclose(self.low[k], self.high[k], rtol=ROUNDING, atol=0)
        std = np.sqrt(self.square[k, k] / n) if varies else 0.0  # and not the rounding of sums
        mean = self.mean[k, k]
        finer = min(max(int(np.log10(abs(mean) / std)), 0), 4) if mean and std else 0  # a small spread shows
        return {
            "mean": _rounded(mean, 9 + finer),
            "std": _rounded(std),
            "min": _rounded(self.low[k], 15),
            "max": _rounded(self.high[k], 15),
            "coverage": _rounded(n / self.replies),
        }

    def _correlation(self, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
        spread = np.sqrt(self.square * self.square.T)
        limits = np.where(self.low <= self.high, np.maximum(np.abs(self.low), np.abs(self.high)), 0.0)
        varies = self.square > self.count * (ROUNDING * limits[:, None]) ** 2  # [i, j]: i, where j applies
        is_defined = varies & varies.T
        values = np.divide(self.product, spread, out=np.zeros_like(spread), where=is_defined).clip(-1, 1)
        return {
            a: {b: _rounded(values[i, j]) if is_defined[i, j] else None for j, b in enumerate(names)}
            for i, a in enumerate(names)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON holds exactly; infinities of an empty column become null."""
        arrays = {name: getattr(self, name).tolist() for name in ("count", "mean", "square", "product")}
        limits = {
            name: [float(v) if np.isfinite(v) else None for v in getattr(self, name)]
            for name in ("low", "high")
        }
        return {"replies": self.replies, **arrays, **limits}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Statistics:
        """The inverse of `to_dict`."""
        arrays = {
            name: np.array(values[name], dtype=float) for name in ("count", "mean", "square", "product")
        }
        low = np.array([np.inf if v is None else v for v in values["low"]])
        high = np.array([-np.inf if v is None else v for v in values["high"]])
        return cls(values["replies"], **arrays, low=low, high=high)


def _rounded(value: float, digits: int = 9) -> float:
    """With so many digits: more would show in which order sums were taken."""
    return float(f"{value:.{digits}g}")
