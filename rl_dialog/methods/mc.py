"""Monte-Carlo returns instead of bootstrapping."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.backup import returns
from rl_dialog.methods.ilql import ILQL
from rl_dialog.methods.method import Outputs


@dataclass(frozen=True)
class MCReturns(ILQL):
    """ILQL whose values are the returns that followed.

    ILQL whose Q is fitted to what followed: y = G_t = r_t + gamma r_(t+1) + ... to the end of the
    conversation (or of its row, then + gamma V).

    Exact for the behaviour policy where data is plenty, noisy where it is not. Luck averages out in Q, so tau
    > 1/2 does not take it for skill; with ILQL's `mc_returns`, which fits V itself to returns, it does.
    """

    tau: float = 0.5
    """expectile of V"""

    def target(self, out: Outputs, batch: Batch) -> Tensor:
        return returns(batch, self.gamma, self.discount, bootstrap=out.v.detach())
