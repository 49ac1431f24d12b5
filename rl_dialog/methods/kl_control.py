"""KL-control Q-learning (Jaques et al. 2019, arXiv 1907.00456): maximise reward, pay for leaving the prior,
with values of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_dialog.methods.backup import expectile
from rl_dialog.methods.psi import Psi


@dataclass(frozen=True)
class KLControl(Psi):
    """The best logged value near a prior, which charges for leaving it (Jaques et al. 2019), learned in
    heads.

    Psi with the maximum for the soft maximum, and the divergence charged to the reward: pi = p exp((Q - V) /
    c), V the largest Q in the logs.

    L_Q = sum_i (Q_i(s,a) - y)^2,    y = r - c log(pi(a|s) / p(a|s)) + gamma V(s'),
                                     c log(pi / p) = min_i Q'_i(s,a) - V(s)
    L_V = |tau - 1[u<0]| u^2,        u = min_i Q'_i - V(s)

    Charged at the logged token, Q settles half way: Q - V = (r + gamma V(s') - V(s)) / 2, so c holds as 2 c
    does in psi.
    """

    tau: float = 0.9
    """expectile that stands for the maximum of what the logs say: towards 1 the best reply of a state,
    however rare"""

    def value_loss(self, error: Tensor) -> Tensor:
        return expectile(error, self.tau)

    def charge(self, advantage: Tensor) -> Tensor:
        return advantage
