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
from rl_dialog.methods.online import OnlineMethod, clipped, totals


@dataclass(frozen=True)
class GRPO(OnlineMethod):
    """Group relative policy optimisation (Shao et al. 2024).

    l = -i min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), r = pi / pi_old, A = (R - mean) / deviation of the
    returns of the group; the tokens of an episode weigh 1 / their number.
    """

    c: float = 0.04
    """weight of the divergence from the prior, in units of A"""
    kl: Literal["reward", "k2", "k3"] = "k3"
    """where the divergence is charged: in the reward of each token, or in the loss (k2, k3)"""
    epsilon: float = 0.2
    """how far pi / pi_old may pull a token"""
    divide_by_deviation: bool = True
    """divide by the group's standard deviation; off: A is in units of reward (Dr. GRPO)"""
    divide_by_length: bool = True
    """divide by the number of tokens of the episode; off: all tokens weigh the same (Dr. GRPO)"""

    @property
    def compares_groups(self) -> bool:
        return True

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        scores = group_scores(*totals(self, experiences), by_deviation=self.divide_by_deviation)
        return [np.full(len(each.rewards), a) for each, a in zip(experiences, scores, strict=True)]

    def weights(self, experience: Experience) -> np.ndarray:
        count = len(experience.rewards)
        return np.full(count, 1 / count if self.divide_by_length else 1.0)

    def surrogate(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        terms, metrics = clipped(logp, batch, self.epsilon)
        return self.importance(batch.old_logp, batch) * terms, metrics
