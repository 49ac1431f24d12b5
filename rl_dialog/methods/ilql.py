"""Implicit language Q-learning (Snell et al. 2022, arXiv 2206.11871): learn what in-data tokens are worth, then steer the LM towards them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.backup import discounts, expectile, minimum
from rl_dialog.methods.method import Heads, Loss, Method, Outputs
from rl_dialog.methods.scores import nll_together


@dataclass(frozen=True)
class ILQL(Method):
    """Expectile V, TD Q, a CQL term and a (weighted) cloning term; acts on log p + beta (min Q - V).

    L_Q   = sum_i (Q_i(s,a) - y)^2,  y = r + gamma V(s')            V' online, no gradient; 0 after the end
    L_V   = |tau - 1[u<0]| u^2,      u = min_i Q'_i(s,a) - V(s)     Q' are the Polyak targets
    L_CQL = sum_i -log softmax(Q_i(s,.))[a]
    L_LM  = -w log p(a|s),           w = min(exp(awac_beta u), awac_clip)
    L     = L_Q + L_V + cql_weight L_CQL + awac_weight L_LM         each averaged over decisions
    """

    tau: float = 0.7
    """expectile: 0.5 values the average logged behaviour (SARSA), towards 1 the best the logs contain"""
    beta: float = 4.0
    """strength of the advantage when decoding; it has units of 1/reward"""
    gamma: float = 0.99
    """discount"""
    discount: Literal["token", "turn"] = "token"
    """apply gamma at every token (as in the papers) or only at the end of a reply"""
    cql_weight: float = 0.1
    """weight of the conservative term that keeps Q low on tokens the logs never took"""
    awac_weight: float = 1.0
    """weight of the cloning term; 0 leaves the LM as it was loaded"""
    awac_beta: float = 0.0
    """inverse temperature of the cloning weights; 0 is plain behaviour cloning"""
    awac_clip: float = 20.0
    """largest cloning weight"""
    top_k: int = 0
    """decode only among the LM's top-k tokens, chosen before the advantage is added; 0 keeps the whole vocabulary"""
    alpha: float = 0.005
    """Polyak rate of the target network, once per optimizer step"""

    heads: ClassVar[Heads] = Heads(q=2, v=True, target=True)
    plain_lm: ClassVar[bool] = False

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        actions, count = batch.actions, batch.decisions
        v = out.v[:count]
        # Unless its weights need the advantage, the pass over the vocabulary comes first: it leaves the LM's log-sum-exp behind, which `at` may need.
        entropies = None if self.awac_beta else self._cross_entropies(out, actions)
        q_target = minimum(tuple(q.at(actions).detach() for q in out.q_target))
        advantage = q_target - v
        v_loss = expectile(advantage, self.tau).sum()

        y = batch.rewards + discounts(batch, self.gamma, self.discount) * out.v.detach()[batch.next_state]
        q = tuple(q.at(actions) for q in out.q)
        q_loss = sum((y - q_i).square().sum() for q_i in q)

        if entropies is None:
            entropies = self._cross_entropies(out, actions, (self.awac_beta * advantage.detach()).exp().clamp(max=self.awac_clip))
        lm, nll, cql = entropies
        total = q_loss + v_loss + self.cql_weight * cql + self.awac_weight * lm
        metrics = {"q_loss": q_loss, "v_loss": v_loss, "cql_loss": cql, "nll": nll.sum(), "q": q[0].sum(), "v": v.sum(), "advantage": advantage.sum()}
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def _cross_entropies(self, out: Outputs, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(L_LM, its unweighted terms, L_CQL) as sums; zeros for terms of weight 0."""
        zero = out.v.new_zeros(())
        q = out.q if self.cql_weight else ()
        if self.awac_weight:
            (lm, nll), cql = nll_together(out.lm, q, actions, weight)
        else:
            (lm, nll), cql = (zero, zero), [q_i.nll(actions) for q_i in q]
        return lm, nll, sum((total for total, _ in cql), zero)

    def decode(self, out: Outputs) -> Tensor:
        logits = out.lm.dense()  # (S, V)
        if not self.beta:
            return logits.log_softmax(-1)
        if not self.top_k:
            return logits.log_softmax(-1) + self.beta * (minimum(tuple(q.dense() for q in out.q_target)) - out.v[:, None])
        top = logits.topk(min(self.top_k, logits.shape[1]), dim=-1)
        log_p = top.values - out.lm.reduce("logsumexp")[:, None]  # (S, K): only these are normalised
        q = minimum(tuple(q.at_each(top.indices) for q in out.q_target))  # V is the same for every token of a state: left out
        return torch.full_like(logits, -torch.inf).scatter_(1, top.indices, log_p + self.beta * q)
