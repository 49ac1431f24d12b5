"""How many labels are wanted as training goes on: the annotation rate, and the budget at which asking
stops."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import log1p
from typing import Literal

from rl_dialog.errors import UserError


@dataclass(frozen=True)
class AnnotationSchedule:
    """`initial` labels before training begins, and the rest of the `budget` over `total_steps` environment
    steps T, at a rate proportional to

        constant    1
        hyperbolic  a / (T + a)      a = `scale`

    (Christiano et al. 2017, appendix A: a = 5e6 frames and 500 labels first for Atari, 2e6 steps and a
    quarter first for MuJoCo.) Later labels are fewer, for the reward is known better by then.

    `iterations` n asks in rounds instead, at n + 1 equally long phases of training: `initial` before the
    first one, then in proportion to the rate at n equally spaced T from 0 to the end, as `imitation` does
    (its hyperbolic schedule has a = total_steps).

    Raises UserError for numbers that are no schedule.
    """

    budget: int
    """labels in all"""
    total_steps: int
    """environment steps in all"""
    initial: int = 0
    """labels before the policy is trained"""
    kind: Literal["constant", "hyperbolic"] = "hyperbolic"
    scale: float | None = None
    """steps after which the hyperbolic rate has halved; by default total_steps"""
    iterations: int = 0
    """rounds after the initial one; 0: labels are wanted one by one"""

    def __post_init__(self) -> None:
        if not 0 <= self.initial <= self.budget or self.total_steps < 1 or self.iterations < 0:
            raise UserError(
                f"expected 0 <= initial <= budget, at least one step and no negative iterations, got {self}"
            )
        if self.kind not in ("constant", "hyperbolic") or not (self.scale is None or self.scale > 0):
            raise UserError(
                f"expected constant or hyperbolic, and a scale above 0, got {self.kind!r}, {self.scale}"
            )

    def rate(self, steps: float) -> float:
        """Relative to the rate at step 0."""
        if self.kind == "constant":
            return 1.0
        scale = self.scale or self.total_steps
        return scale / (steps + scale)

    def labels_wanted(self, steps: int) -> int:
        """How many labels there should be when so many steps were made: never fewer than before, the budget
        at the end, never more."""
        steps = min(max(steps, 0), self.total_steps)
        remaining = self.budget - self.initial
        if self.iterations:
            return self.initial + round(
                remaining * self._rounds()[steps * (self.iterations + 1) // self.total_steps]
            )
        return self.initial + int(remaining * (self._integral(steps) / self._integral(self.total_steps)))

    def _integral(self, steps: int) -> float:
        """Of the rate, up to a factor."""
        return steps if self.kind == "constant" else log1p(steps / (self.scale or self.total_steps))

    def _rounds(self) -> list[float]:
        """The share of the rest that is wanted in each phase; the end belongs to the last one."""
        last_round = max(1, self.iterations - 1)
        sums = list(accumulate(self.rate(self.total_steps * i / last_round) for i in range(self.iterations)))
        return [0.0, *(partial_sum / sums[-1] for partial_sum in sums), 1.0]
