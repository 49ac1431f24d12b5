"""ILQL on whole replies: one action is one reply, and acting is choosing among several that the LM would say
(Snell et al. 2022, per-utterance)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.backup import expectile, following, minimum, rate_of_targets, started_from_returns
from rl_dialog.methods.method import Heads, Loss, Method, Outputs, check_ranges


@dataclass(frozen=True)
class UtteranceILQL(Method):
    """ILQL over whole replies: it says the best of several by Q.

    V of the state before a reply u, Q of the reply, read where it ends; gamma counts replies.

    L_Q  = sum_i (Q_i(s,u) - y)^2,   y = r + gamma V(s')           s' the state before the next reply; no
                                                                   gradient through y; 0 after the end
    L_V  = |tau - 1[x<0]| x^2,       x = min_i Q'_i(s,u) - V(s)    Q' are the Polyak targets
    L_LM = -w log p(u|s),            w = min(exp(awac_beta x), awac_clip), log p the sum over the reply's
                                     tokens
    L    = L_Q + L_V + awac_weight L_LM                            each averaged over replies
    Acting: of `num_generations` replies drawn from p, the one with the largest min_i Q'_i(s,u) +
            rerank_log_prob_weight log p(u|s).
    """

    tau: float = 0.7
    """expectile: 0.5 values the average logged behaviour, towards 1 the best the logs contain"""
    gamma: float = 0.99
    """discount per reply"""
    awac_weight: float = 0.1
    """weight of the cloning term, which sums over a reply's tokens; 0 leaves the LM as it was loaded"""
    awac_beta: float = 0.0
    """inverse temperature of the cloning weights; 0 is plain behaviour cloning"""
    awac_clip: float = 20.0
    """largest cloning weight"""
    num_generations: int = 8
    """replies to choose among when acting"""
    rerank_log_prob_weight: float | None = None
    """weight of a reply's log-probability beside its value when acting, in spreads of returns in the training
    split (in units of reward with value_unit 1): the largest of several values is often the most
    overestimated one; 0 goes by the value alone; by default 0.2 over the root of how many replies follow on
    average"""
    warmup: float = 0.3
    """share of the run in which the target of Q goes over from the returns that followed to y; 0 begins with
    y, as published"""
    alpha: float | None = None
    """Polyak rate of the target heads, once per optimizer step; by default 100 over the number of updates, at
    the end 10"""

    heads: ClassVar[Heads] = Heads(v=True, utterance_q=2)
    rank_by: ClassVar[str] = "utterance Q"

    def __post_init__(self) -> None:
        check_ranges(
            self,
            above_0=("awac_clip",),
            at_least_0=("awac_weight",),
            at_least_1=("num_generations",),
            shares=("warmup", "alpha"),
        )

    @property
    def skips_parameters(self) -> bool:
        return self.awac_weight == 0

    def suited(self, strength: float) -> UtteranceILQL:
        return (
            replace(self, rerank_log_prob_weight=1 / strength)
            if self.rerank_log_prob_weight is None
            else self
        )

    def terms(self, batch: Batch) -> int:
        return int(batch.turn_end.sum())

    def target_rate(self, updates: int, progress: float) -> float:
        return rate_of_targets(self.alpha, updates, progress)

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        v = out.v[batch.reply_starts]  # (R,)
        earned = torch.zeros_like(v).index_add(0, batch.reply, batch.rewards)
        y = earned + following(batch, out.v.detach(), self.gamma, "turn")[batch.turn_end]
        y = started_from_returns(
            y[batch.reply], batch, self.warmup, self.gamma, "turn", bootstrap=out.v.detach()
        )[batch.reply_starts]
        rated = batch.rated[batch.turn_end]
        q_loss = sum(((y - q).square() * rated).sum() for q in out.utterance_q)
        advantage = minimum(out.utterance_q_target) - v
        v_loss = (expectile(advantage, self.tau) * rated).sum()

        total, metrics = q_loss + v_loss, {"q_loss": q_loss, "v_loss": v_loss}
        metrics |= {"q": out.utterance_q[0].sum(), "v": v.sum(), "advantage": advantage.sum()}
        if self.awac_weight:
            weights = (self.awac_beta * advantage.detach()).exp().clamp(max=self.awac_clip)
            lm, nll = out.lm.nll(batch.actions, weights[batch.reply])
            total, metrics["reply_nll"] = total + self.awac_weight * lm, nll.sum()
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def decode(self, out: Outputs) -> Tensor:
        return out.lm.dense()
