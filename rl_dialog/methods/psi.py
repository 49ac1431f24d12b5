"""Psi-learning (Jaques et al. 2019, arXiv 1907.00456) with values of their own: the soft optimum near a
prior, its soft maximum in sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.backup import (
    following,
    gumbel,
    lift,
    lifted_error,
    minimum,
    rate_of_targets,
    started_from_returns,
    to_reply_end,
)
from rl_dialog.methods.method import STRENGTH, Heads, Loss, Method, Outputs, check_ranges

LEAST_C = 0.1  # to learn V with: the sharper a soft maximum, the more it takes errors of Q for choices


@dataclass(frozen=True)
class Psi(Method):
    """The soft optimum near a prior (Jaques et al. 2019), learned in heads.

    pi = p exp((Q - V) / c), p the language model as it was loaded, which stays as it is.

    L_Q = sum_i (Q_i(s,a) - y + l_i)^2,
                                     y = r + gamma V(s')            V' online, no gradient; 0 after the end
                                     l_i what L_CQL adds to Q_i(s,a) where p(a|s) is large (`lift` of
                                     backup.py)
    L_V = c^2 (exp z - z - 1),       z = (min_i Q'_i - V(s)) / c    Q' of the whole reply, Polyak targets:
                                                                    V = c log E_p exp(Q / c); a straight line
                                                                    beyond z = 2, and with 0.1
                                                                    where c is less
    L_CQL = sum_i -log softmax(Q_i(s,.))[a]                         keeps Q low on what nobody said in this
                                                                    state
    L   = L_Q + L_V + cql_weight L_CQL                              each averaged over decisions

    y and Q' in L_V are those of the reply's last token; with `backup="token"` of the token itself.

    The paper's soft backup c log sum_a p(a|s) exp(Q(s,a) / c) is a mean over what p says, and the logs are
    such a sample (Gumbel regression, Garg et al. 2023). So no value is ever asked of a token that nobody
    said, which is what ruins the published form on text (`way_off_policy`).
    """

    c: float | None = None
    """how strongly the prior holds, in spreads of returns in the training split (in units of reward with
    value_unit 1): a larger c stays closer; by default 0.2 over the root of how many replies follow on
    average"""
    target_kl: float | None = None
    """instead of the c to act with: nats of KL(policy || p) per reply; it is solved on held-out replies at
    each checkpoint. V is learned with c"""
    gamma: float = 0.99
    """discount"""
    discount: Literal["token", "turn"] = "turn"
    """apply gamma only at the end of a reply, or at every token"""
    backup: Literal["reply", "token"] = "reply"
    """fit Q and V to what followed the whole reply, or the token"""
    warmup: float = 0.3
    """share of the run in which the target of Q goes over from the returns that followed to y; 0 begins with
    y"""
    cql_weight: float = 0.3
    """weight of the conservative term that keeps Q low on tokens the logs never, or seldom, took"""
    cql_support: float = 0.1
    """the conservative term moves no Q of a token that p says at least twice as often as this, and fully
    those that it says less than this; 1 moves all"""
    alpha: float | None = None
    """Polyak rate of the targets, once per optimizer step; by default 100 over the number of updates, at the
    end 10"""

    heads: ClassVar[Heads] = Heads(q=2, v=True, target=True)
    trains_lm: ClassVar[bool] = False
    plain_lm: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(
            self,
            above_0=("c",),
            at_least_0=("target_kl", "cql_weight"),
            shares=("warmup", "alpha", "cql_support"),
        )

    @property
    def reads_lm(self) -> bool:
        return self.cql_weight > 0 and self.cql_support < 1

    def suited(self, strength: float) -> Psi:
        return self.with_strength(strength) if self.c is None else self

    def with_strength(self, strength: float) -> Psi:
        return replace(self, c=1 / strength)

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {"c": self.suited(STRENGTH).c * unit}

    def target_rate(self, updates: int, progress: float) -> float:
        return rate_of_targets(self.alpha, updates, progress)

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        if self.c is None:
            return self.suited(STRENGTH).loss(out, batch)
        v, rated = out.v[: batch.decisions], batch.rated
        q_target = minimum(tuple(q.at(batch.actions).detach() for q in out.q_target))
        aim = to_reply_end(batch, q_target, self.gamma, self.discount) if self.backup == "reply" else q_target
        v_loss = (self.value_loss(aim - v) * rated).sum()
        y = batch.rewards + following(batch, out.v.detach(), self.gamma, self.discount)
        y = to_reply_end(batch, y, self.gamma, self.discount) if self.backup == "reply" else y
        y = started_from_returns(y, batch, self.warmup, self.gamma, self.discount, bootstrap=out.v.detach())
        y = y - self.charge(q_target - v.detach())
        q = tuple(q.at(batch.actions) for q in out.q)
        conservative = [q.nll(batch.actions) for q in out.q] if self.cql_weight else []
        cql, lifts = sum((total for total, _ in conservative), v.new_zeros(())), [0.0] * len(q)
        if self.reads_lm:
            nll = out.lm.nll(batch.actions)[1]
            lifts = [lift(nll_q, nll, self.cql_weight / 2, self.cql_support) for _, nll_q in conservative]
        q_loss = sum(lifted_error(q_i, y, l_i, rated).sum() for q_i, l_i in zip(q, lifts, strict=True))
        metrics = {
            "q_loss": q_loss,
            "v_loss": v_loss,
            "cql_loss": cql,
            "q": q[0].sum(),
            "v": v.sum(),
            "advantage": (q_target - v).sum(),
        }
        return Loss(
            q_loss + v_loss + self.cql_weight * cql, {name: value.detach() for name, value in metrics.items()}
        )

    def value_loss(self, error: Tensor) -> Tensor:
        """(N,) L_V of min Q' - V."""
        return gumbel(error, max(self.c, LEAST_C))

    def charge(self, advantage: Tensor) -> Tensor:
        """(N,) c log(pi / p) of the logged token where the target charges it: here the soft maximum has it
        already."""
        return 0 * advantage

    def decode(self, out: Outputs) -> Tensor:
        if self.c is None:
            return self.suited(STRENGTH).decode(out)
        q = minimum(tuple(q.dense() for q in out.q_target))
        return out.lm.dense().log_softmax(-1) + (q if out.v is None else q - out.v[:, None]) / self.c
