"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) over the decisions of a dialog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.advantages import SAME, Experience, generalised_advantages
from rl_dialog.methods.method import Heads, Loss, Outputs, check_ranges
from rl_dialog.methods.online import OnlineMethod, clipped


@dataclass(frozen=True)
class PPO(OnlineMethod):
    """Proximal policy optimisation (Schulman et al. 2017).

    l = -i min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), r = pi / pi_old, A by GAE over the tokens that the
    policy drew (what the world says between replies is skipped); and value_weight (V - y)^2, y = A + V.
    """

    epsilon: float = 0.2
    """how far pi / pi_old may pull a token"""
    gamma: float = 1.0
    """discount of what follows"""
    lam: float = 0.95
    """lambda of GAE: 1 takes what followed, 0 the value of the next state"""
    discount: Literal["turn", "token"] = "turn"
    """where gamma and lambda apply: at the end of a reply, or at every token"""
    value_weight: float = 0.5
    """weight of the values' squared error"""
    whiten: bool = True
    """advantages of a step of the run get mean 0 and deviation 1"""

    heads: ClassVar[Heads] = Heads(v=True)
    iterations: ClassVar[int] = 2
    mini_batches: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, above_0=("epsilon",), at_least_0=("value_weight",), shares=("gamma", "lam"))

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        found = [self._advantages(each) for each in experiences]
        if not self.whiten:
            return found
        every = np.concatenate(found)
        size = max(np.abs(np.append(self.earned(each), each.values)).max() for each in experiences)
        deviation = every.std()
        if deviation <= SAME * size:  # rounding errors, which division would make as large as advantages
            return [0 * each for each in found]
        return [(each - every.mean()) / deviation for each in found]

    def value_targets(self, experience: Experience) -> np.ndarray:
        return self._advantages(experience) + experience.values[:-1]

    def surrogate(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        terms, metrics = clipped(logp, batch, self.epsilon)
        return self.importance(batch.old_logp, batch) * terms, metrics

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        loss = super().loss(out, batch)
        v = out.v[: batch.decisions]
        error = (v - batch.value_targets).square()
        values = {"v_loss": error.detach().sum(), "v": v.detach().sum()}
        return Loss(loss.total + self.value_weight * (batch.weights * error).sum(), loss.metrics | values)

    def _advantages(self, experience: Experience) -> np.ndarray:
        return generalised_advantages(
            experience, self.earned(experience), self.gamma, self.lam, self.discount
        )
