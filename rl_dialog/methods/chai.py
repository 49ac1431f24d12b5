"""Conservative Q-learning on replies that a frozen LM proposes (CHAI, Verma et al. 2022, arXiv
2204.08426)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods.backup import earned_beyond, minimum, rate_of_targets
from rl_dialog.methods.method import Heads, Loss, Method, Outputs, check_ranges


@dataclass(frozen=True)
class CHAI(Method):
    """Q of whole replies on a frozen language model (Verma et al. 2022); it chooses among what that proposes.

    Q of a reply u reads hidden states of a frozen LM, their mean over the dialog up to its end; the LM
    proposes n replies u_j to every context.

    L_Q = sum_i (Q_i(s,u) - y)^2,    y = r + gamma max_j min_i Q'_i(s',u'_j)
          s' the state before the next reply, Q' the Polyak targets
    L_C = sum_i log [1/(2n) (sum_j exp Q_i(s,u_j) / p(u_j|s) + sum_j exp Q_i(e_j) / q(e_j))] - Q_i(s,u)
          e_j random features, uniform in [-1, 1]^H
    L   = L_Q + cql_weight L_C       each averaged over replies
    Acting: of `num_generations` replies drawn from the LM, the one with the largest min_i Q'_i(s,u).
    """

    proposals: int = 5
    """n, replies that the LM proposes to each context, drawn once before training"""
    proposal_tokens: int = 32
    """longest proposed reply"""
    cql_weight: float = 0.1
    """weight of the conservative term"""
    density: Literal["exact", "original"] = "exact"
    """exact: log q = -H log 2, and the mean over 2n as above; original: log q = -log 2H, and every exponent
    divided by 2n, as the authors' code"""
    features: Literal["mean", "end"] = "mean"
    """what Q reads: mean: the mean hidden state over the dialog so far, as published, in which a reply counts
    less the longer the dialog is; end: the hidden state at the reply's end"""
    gamma: float = 0.99
    """discount per reply"""
    num_generations: int = 8
    """replies to choose among when acting"""
    alpha: float | None = None
    """Polyak rate of the target heads, once per optimizer step; by default 100 over the number of updates, at
    the end 10"""

    trains_lm: ClassVar[bool] = False
    rank_by: ClassVar[str] = "utterance Q"

    def __post_init__(self) -> None:
        if self.proposals < 1 or self.proposal_tokens < 1:
            raise UserError(
                f"chai: expected at least one proposal of at least one token, got {self.proposals} of "
                f"{self.proposal_tokens}"
            )

        check_ranges(self, at_least_0=("cql_weight",), at_least_1=("num_generations",), shares=("alpha",))

    @property
    def heads(self) -> Heads:
        return Heads(utterance_q=2, utterance_mean=self.features == "mean")

    def terms(self, batch: Batch) -> int:
        return int(batch.turn_end.sum())

    def target_rate(self, updates: int, progress: float) -> float:
        return rate_of_targets(self.alpha, updates, progress)

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        row, done = batch.rows[batch.turn_end], batch.dones[batch.turn_end]  # (R,)
        follows = torch.zeros_like(done)
        follows[:-1] = row[1:] == row[:-1]
        best = minimum(out.proposal_q_target).amax(1)  # (R,) of the context that each reply answered
        earned = torch.zeros_like(best).index_add(0, batch.reply, batch.rewards)
        # A truncated row's last reply leads to a context that nobody answered here. What the conversation
        # went on to earn is known where the row was cut because it was too long.
        known = follows | done if batch.later_known is None else follows | done | batch.later_known[row]
        beyond = earned_beyond(batch, best.new_zeros(len(batch.states)), self.gamma, "turn")[batch.turn_end]
        y = earned + torch.where(follows, self.gamma * best.roll(-1), beyond)
        has_target = known & batch.rated[batch.turn_end]
        q_loss = sum(((y - q).square() * has_target).sum() for q in out.utterance_q)
        cql = sum(
            self._conservative(*heads, batch)
            for heads in zip(out.utterance_q, out.proposal_q, out.random_q, strict=True)
        )
        metrics = {
            "q_loss": q_loss,
            "cql_loss": cql,
            "q": out.utterance_q[0].sum(),
            "target": (y * has_target).sum(),
            "best_proposal": best.sum(),
        }
        return Loss(q_loss + self.cql_weight * cql, {name: value.detach() for name, value in metrics.items()})

    def _conservative(self, q: Tensor, proposed: Tensor, random: Tensor, batch: Batch) -> Tensor:
        """() L_C of one head; q (R,), proposed and random (R, n)."""
        width, count = batch.proposals.shape[2], 2 * proposed.shape[1]
        uniform = width * log(2) if self.density == "exact" else log(2 * width)  # -log q
        exponents = torch.cat([proposed - batch.proposal_logp, random + uniform], 1)
        over = (
            exponents.logsumexp(1) - log(count)
            if self.density == "exact"
            else (exponents / count).logsumexp(1)
        )
        return (over - q).sum()
