"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), and without its two divisions (Dr.
GRPO; Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.advantages import Experience, group_scores
from rl_dialog.methods.method import check_ranges
from rl_dialog.methods.online import OnlineMethod, clipped


@dataclass(frozen=True)
class GRPO(OnlineMethod):
    """Group relative policy optimisation (Shao et al. 2024).

    l = -i min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), r = pi / pi_old, A = (R - mean) / deviation of the
    returns of the group; the tokens of an episode weigh 1 / their number. With kl reward, A is less c times
    how far the episode's log-ratio to the prior lies above the group's mean.
    """

    c: float = 0.04
    """weight of the divergence from the prior, in units of A: with divide_by_deviation the group's
    deviation, else as in rloo"""
    kl: Literal["reward", "k2", "k3"] = "k3"
    """where the divergence is charged: in the reward of each token, or in the loss (k2, k3)"""
    epsilon: float = 0.2
    """how far pi / pi_old may pull a token"""
    divide_by_deviation: bool = True
    """divide by the group's standard deviation; off: A is in the unit of the returns (Dr. GRPO)"""
    divide_by_length: bool = True
    """divide by the number of tokens of the episode; off: all tokens weigh the same (Dr. GRPO)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, above_0=("epsilon",))

    @property
    def compares_groups(self) -> bool:
        return True

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {} if self.divide_by_deviation else super().in_rewards(unit)

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        groups = np.array([each.group for each in experiences])
        returns = np.array([each.rewards.sum() for each in experiences])
        scores = group_scores(returns, groups, by_deviation=self.divide_by_deviation)
        if self.kl == "reward":  # or a group that earned the same would be spread out by its divergences
            ratios = np.array([each.log_ratio.sum() for each in experiences])
            scores -= self.c * group_scores(ratios, groups, by_deviation=False)
        return [np.full(len(each.rewards), a) for each, a in zip(experiences, scores, strict=True)]

    def weights(self, experience: Experience) -> np.ndarray:
        count = len(experience.rewards)
        return np.full(count, 1 / count if self.divide_by_length else 1.0)

    def surrogate(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        terms, metrics = clipped(logp, batch, self.epsilon)
        return self.importance(batch.old_logp, batch) * terms, metrics
