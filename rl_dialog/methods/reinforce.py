"""REINFORCE (Williams 1992): what followed a decision, less a baseline, weighs its log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.advantages import Experience, discount_factors, rewards_to_go, turn_baselines
from rl_dialog.methods.method import check_ranges
from rl_dialog.methods.online import OnlineMethod


@dataclass(frozen=True)
class Reinforce(OnlineMethod):
    """REINFORCE (Williams 1992) on the policy's own episodes.

    l = -i A log pi, A_t = G_t - b, G_t what the episode earned from decision t on (rewards count where they
    fall), i the importance weight of the token.
    """

    baseline: Literal["none", "batch", "leave_one_out"] = "leave_one_out"
    """b: nothing, or what other episodes earned on average from the same turn on: all others of the step
    (batch), or those of the same group"""
    gamma: float = 1.0
    """discount of what follows"""
    discount: Literal["turn", "token"] = "turn"
    """where it applies: at the end of a reply, or at every token"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, shares=("gamma",))

    @property
    def compares_groups(self) -> bool:
        return self.baseline == "leave_one_out"

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        to_go = [
            rewards_to_go(self.earned(each), discount_factors(each, self.gamma, self.discount))
            for each in experiences
        ]
        return self.above_baseline(to_go, [each.turn for each in experiences], experiences)

    def above_baseline(
        self, to_go: Sequence[np.ndarray], turns: Sequence[np.ndarray], experiences: Sequence[Experience]
    ) -> list[np.ndarray]:
        """G - b of decisions in the numbered `turns` of each episode."""
        if self.baseline == "none":
            return list(to_go)
        groups = np.array([each.group if self.baseline == "leave_one_out" else 0 for each in experiences])
        baselines = turn_baselines(to_go, turns, groups)
        return [np.nan_to_num(sums - b) for sums, b in zip(to_go, baselines, strict=True)]

    def surrogate(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -self.importance(logp, batch) * batch.advantages * logp, {}
