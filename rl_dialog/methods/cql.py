"""Conservative Q-learning on tokens: the maximum over all tokens in the backup, and a penalty on those that
the logs never took."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.backup import best_of_reply, following
from rl_dialog.methods.ilql import ILQL
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import reduce_minimum


@dataclass(frozen=True)
class CQL(ILQL):
    """Q-learning with the maximum over all tokens, held down where the logs never went.

    y = r + gamma max_a min_i Q'_i(s', a), with L_CQL as in ILQL; V (tau = 1/2) only centres the advantage at
    decoding.

    Inside a reply, where nobody else acts, y is at least Q' of the whole reply as it was logged, so no value
    has to travel token by token.

    With cql_weight 0 it is double Q-learning, which offline overestimates what the logs never tried.
    """

    tau: float = 0.5
    """expectile of V"""
    cql_weight: float = 1.0
    """weight of the conservative term"""

    def target(self, out: Outputs, batch: Batch) -> Tensor:
        best = reduce_minimum(out.q_target, "max")
        y = batch.rewards + following(batch, best, self.gamma, self.discount)
        return best_of_reply(out, batch, y, self.gamma, self.discount) if self.backup == "reply" else y
