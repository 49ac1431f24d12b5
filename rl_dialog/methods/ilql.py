"""Implicit language Q-learning (Snell et al. 2022, arXiv 2206.11871): learn what in-data tokens are worth,
then steer the LM towards them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods.backup import (
    expectile,
    following,
    lift,
    lifted_error,
    minimum,
    rate_of_targets,
    returns,
    started_from_returns,
    to_reply_end,
)
from rl_dialog.methods.method import STRENGTH, Heads, Loss, Method, Outputs, check_ranges
from rl_dialog.methods.scores import Scores, cross_entropy, nll_together


@dataclass(frozen=True)
class ILQL(Method):
    """Implicit Language Q-Learning (Snell et al. 2022): values from the logs alone, and a policy that leans
    towards them.

    Expectile V, TD Q, a CQL term and a (weighted) cloning term; acts on log p + beta (min Q - V).

    L_Q   = sum_i (Q_i(s,a) - y + l_i)^2,  y = r + gamma V(s')      V' online, no gradient; 0 after the end
    L_V   = |tau - 1[u<0]| u^2,      u = x - V(s)                   x = min_i Q'_i of the whole reply, Q' the
                                                                    Polyak targets
    L_CQL = sum_i -log softmax(Q_i(s,.))[a]
    L_DM  = sum_i sum_b max(Q_i(s,b) - Q_i(s,a) + dm_margin, 0)^2   with Q_i(s,.) / cql_temperature in L_CQL
    L_LM  = -w log p(a|s),           w = min(exp(awac_beta (min_i Q'_i(s,a) - V(s))), awac_clip)
    l_i   = what L_CQL adds to Q_i(s,a) where p(a|s) is large (`lift` of backup.py)
    L     = q_weight L_Q + v_weight L_V + cql_weight L_CQL + dm_weight L_DM + awac_weight L_LM
            each averaged over decisions

    x and y are those of the reply's last token: inside a reply nobody else acts, so its first token knows
    after one step what followed it. With `backup="token"`, as published, they are those of the token itself,
    and what a reply earns reaches its beginning one token per target lag. A reply without a known reward is
    cloned and held by L_CQL, and left out of L_Q and L_V.

    `reg_to="base_policy"` holds L_CQL and L_LM to the distribution p_0 of the model as loaded instead of the
    logged token: -sum_b p_0(b|s) log ...
    """

    tau: float = 0.7
    """expectile: 0.5 values the average logged behaviour (SARSA), towards 1 the best the logs contain"""
    beta: float | None = None
    """strength of the advantage when decoding, per spread of returns in the training split (per unit of
    reward with value_unit 1); by default 5 times the root of how many replies follow on average"""
    target_kl: float | None = None
    """instead of a beta: how far to lean, in nats of KL(policy || p) per reply; beta is solved on held-out
    replies at each checkpoint (with extraction exp, and include_logits)"""
    gamma: float = 0.99
    """discount"""
    discount: Literal["token", "turn"] = "turn"
    """apply gamma only at the end of a reply, or at every token (as in the papers), which favours short
    replies"""
    backup: Literal["reply", "token"] = "reply"
    """fit Q and V to what followed the whole reply, or the token (as in the papers)"""
    q_weight: float = 1.0
    """weight of the TD error of Q"""
    v_weight: float = 1.0
    """weight of the expectile loss of V"""
    double_q: bool = True
    """two Q heads and the minimum of their targets; off: one"""
    mc_returns: bool = False
    """fit V to the returns that followed instead of to Q'"""
    cql_weight: float = 0.3
    """weight of the conservative term that keeps Q low on tokens the logs never, or seldom, took"""
    cql_temperature: float = 1.0
    """temperature of the softmax in the conservative term"""
    cql_support: float = 0.1
    """the conservative term moves no Q of a token that p says at least twice as often as this, and fully
    those that it says less than this; 1 moves all, as published"""
    dm_weight: float = 0.0
    """weight of the margin term: the taken token's Q above all others by dm_margin. It builds all of Q: for
    small vocabularies"""
    dm_margin: float = 0.0
    """margin of the margin term"""
    value_min: float | None = None
    """lower bound of the target Q that V is fitted to"""
    value_max: float | None = None
    """upper bound of the target Q that V is fitted to"""
    awac_weight: float = 1.0
    """weight of the cloning term; 0 leaves the LM as it was loaded"""
    awac_beta: float | None = 0.0
    """inverse temperature of the cloning weights; 0 is plain behaviour cloning"""
    awac_clip: float = 20.0
    """largest cloning weight"""
    awac_weights: Literal["exp", "sign"] = "exp"
    """exp: as above; sign: awac_beta where the advantage is positive, 1 - awac_beta elsewhere"""
    transition_weight: float = 0.0
    """cloning weight of the context's tokens (the user's and the template's), which are no decisions"""
    reg_to: Literal["dataset", "base_policy"] = "dataset"
    """what the conservative and the cloning term hold to: logged tokens, or the distribution of the model as
    loaded (a second forward pass)"""
    top_k: int = 0
    """decode only among the LM's top-k tokens; 0 keeps the whole vocabulary"""
    top_k_after: bool = False
    """choose the top-k after the advantage is added (as trlx does), so that a token the LM would not say can
    win by its Q alone"""
    lm_temperature: float = 1.0
    """temperature of the LM's term alone when decoding"""
    extraction: Literal["exp", "sign"] = "exp"
    """exp: add beta times the advantage; sign: add log beta where it is positive and log(1 - beta) elsewhere,
    0 < beta < 1"""
    advantage_clip: float | None = None
    """upper bound of what the advantage adds when decoding; 0 lets it only veto"""
    include_logits: bool = True
    """off: decode by the advantage alone"""
    warmup: float = 0.3
    """share of the run in which the target of Q goes over from the returns that followed to y; 0 begins with
    y, as published"""
    alpha: float | None = None
    """Polyak rate of the target network, once per optimizer step; by default 100 over the number of updates,
    at the end 10 (0.005 in the papers)"""

    plain_lm: ClassVar[bool] = False
    acts_with_beta: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(
            self,
            above_0=("cql_temperature", "lm_temperature", "awac_clip"),
            at_least_0=("q_weight", "v_weight", "cql_weight", "dm_weight", "awac_weight", "transition_weight")
            + ("top_k", "target_kl"),
            shares=("warmup", "alpha", "cql_support"),
        )
        if self.extraction == "sign" and not 0 < (self.beta or 0) < 1:
            raise UserError(
                "extraction sign: expected a beta between 0 and 1, the share of tokens with a positive "
                f"advantage, got {self.beta}"
            )
        if self.target_kl is not None and (self.extraction == "sign" or not self.include_logits):
            raise UserError(
                f"--method.target_kl {self.target_kl:g}: expected extraction exp and include_logits, with "
                f"which a smaller beta is nearer to p, got extraction {self.extraction} and include_logits "
                f"{self.include_logits}: set a beta instead"
            )
        if self.reg_to == "base_policy" and (self.awac_beta or self.awac_weights == "sign"):
            raise UserError(
                "reg_to base_policy: expected no cloning weights, the base policy's tokens have no advantage:"
                " set awac_beta 0 and exp"
            )
        if self.awac_weights == "sign" and self.awac_weight and not 0 < (self.awac_beta or 0) <= 1:
            raise UserError(
                "awac_weights sign: expected an awac_beta above 0 and at most 1, the weight of tokens with a "
                f"positive advantage, got {self.awac_beta}"
            )

    @property
    def heads(self) -> Heads:
        return Heads(q=2 if self.double_q else 1, v=True, target=True)

    @property
    def decodes_with_v(self) -> bool:
        return (
            not self.top_k or self.top_k_after or self.advantage_clip is not None or self.extraction == "sign"
        )

    @property
    def learns_context(self) -> bool:
        return self.transition_weight > 0

    @property
    def skips_parameters(self) -> bool:
        return 0 in (self.q_weight, self.v_weight, self.cql_weight, self.awac_weight)

    @property
    def reads_lm(self) -> bool:
        return bool(self.awac_weight or self.transition_weight or self._lifts) or self.uses_prior

    @property
    def _lifts(self) -> bool:
        """Is what the conservative term does taken off y?"""
        return bool(self.q_weight and self.cql_weight) and self.cql_support < 1 and not self.uses_prior

    @property
    def uses_prior(self) -> bool:
        return self.reg_to == "base_policy"

    @property
    def prior_every_step(self) -> bool:
        return self.reg_to == "base_policy"

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        if self.awac_beta is None:
            return self.suited(STRENGTH).loss(out, batch)
        actions, count = batch.actions, batch.decisions
        v = out.v[:count]
        # Unless its weights need the advantage, the pass over the vocabulary comes first: it leaves the LM's
        # log-sum-exp behind, which `at` may need.
        weighted = bool(self.awac_beta) or self.awac_weights == "sign"
        entropies = None if weighted else self._cross_entropies(out, actions)
        q_target = minimum(tuple(q.at(actions).detach() for q in out.q_target))
        if (self.value_min, self.value_max) != (None, None):
            q_target = q_target.clamp(self.value_min, self.value_max)
        advantage, rated = q_target - v, batch.rated
        v_loss = (expectile(self.aim(out, batch, q_target) - v, self.tau) * rated).sum()

        y = started_from_returns(
            self.target(out, batch), batch, self.warmup, self.gamma, self.discount, bootstrap=out.v.detach()
        )
        lm, nll, conservative = entropies or self._cross_entropies(
            out, actions, self._cloning_weights(advantage.detach())
        )
        cql = sum((total for total, _ in conservative), out.v.new_zeros(()))
        q, lifts = tuple(q.at(actions) for q in out.q), [0.0] * len(out.q)
        if self._lifts:
            pull = self.cql_weight / (2 * self.q_weight * self.cql_temperature)
            lifts = [lift(nll_q, nll, pull, self.cql_support) for _, nll_q in conservative]
        q_loss = sum(lifted_error(q_i, y, l_i, rated).sum() for q_i, l_i in zip(q, lifts, strict=True))
        total = (
            self.q_weight * q_loss + self.v_weight * v_loss + self.cql_weight * cql + self.awac_weight * lm
        )
        metrics = {
            "q_loss": q_loss,
            "v_loss": v_loss,
            "cql_loss": cql,
            "q": q[0].sum(),
            "v": v.sum(),
            "advantage": advantage.sum(),
        }
        if self.awac_weight or self.reg_to == "base_policy":  # else nobody asked the language model
            metrics["nll"] = nll.sum()
        if self.dm_weight:
            metrics["dm_loss"] = self._margins(out, q)
            total = total + self.dm_weight * metrics["dm_loss"]
        if self.transition_weight:
            metrics["context_nll"], _ = out.context.nll(batch.input_ids.flatten()[batch.context + 1])
            total = total + self.transition_weight * metrics["context_nll"]
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def suited(self, strength: float) -> ILQL:
        beta = strength if self.beta is None else self.beta
        return replace(self, beta=beta, awac_beta=strength / 2 if self.awac_beta is None else self.awac_beta)

    def with_strength(self, strength: float) -> ILQL:
        return replace(self, beta=strength)

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {"beta": self.suited(STRENGTH).beta / unit}

    def target_rate(self, updates: int, progress: float) -> float:
        return rate_of_targets(self.alpha, updates, progress)

    def aim(self, out: Outputs, batch: Batch, q_target: Tensor) -> Tensor:
        """(N,) x, what V is fitted to; q_target (N,) is min Q' of the logged tokens."""
        if self.mc_returns:
            return returns(batch, self.gamma, self.discount, bootstrap=out.v.detach())
        return (
            to_reply_end(batch, q_target, self.gamma, self.discount) if self.backup == "reply" else q_target
        )

    def target(self, out: Outputs, batch: Batch) -> Tensor:
        """(N,) y, what both Q heads are fitted to; without gradient."""
        y = batch.rewards + following(batch, out.v.detach(), self.gamma, self.discount)
        return to_reply_end(batch, y, self.gamma, self.discount) if self.backup == "reply" else y

    def _margins(self, out: Outputs, action_scores: tuple[Tensor, ...]) -> Tensor:
        """() L_DM."""
        gaps = (
            q_i.dense()[: len(a)] - a[:, None] + self.dm_margin
            for q_i, a in zip(out.q, action_scores, strict=True)
        )
        return sum(gap.relu().square().sum() for gap in gaps)

    def _cross_entropies(
        self, out: Outputs, actions: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """(L_LM as a sum, -log p of the logged tokens, [(L_CQL of a head as a sum, -log softmax(Q) of the
        logged tokens)]); zeros for terms of weight 0."""
        zero = out.v.new_zeros(())
        q = tuple(q_i.scaled(1 / self.cql_temperature) for q_i in out.q) if self.cql_weight else ()
        if self.reg_to == "base_policy":
            lm, base, *q = (scores.rows(slice(0, len(actions))) for scores in (out.lm, out.prior, *q))
            lm_loss = cross_entropy(lm, base) if self.awac_weight else zero
            return lm_loss, _without_gradient(lm, actions), [(cross_entropy(q_i, base), zero) for q_i in q]
        if self.awac_weight:
            (lm, nll), cql = nll_together(out.lm, q, actions, weight)
        else:
            cql, lm = [q_i.nll(actions) for q_i in q], zero
            nll = _without_gradient(out.lm, actions) if self._lifts else zero
        return lm, nll, cql

    def _cloning_weights(self, advantage: Tensor) -> Tensor:
        if self.awac_weights == "sign":
            return torch.where(advantage > 0, self.awac_beta, 1 - self.awac_beta)
        return (self.awac_beta * advantage).exp().clamp(max=self.awac_clip)

    def decode(self, out: Outputs) -> Tensor:
        if self.beta is None:
            return self.suited(STRENGTH).decode(out)
        lm = out.lm.scaled(1 / self.lm_temperature)
        logits = lm.dense()  # (S, V)
        if not (self.beta or self.top_k) and self.include_logits:
            return logits.log_softmax(-1)
        if not self.top_k or self.top_k_after:
            steered = self._steered(
                logits.log_softmax(-1), minimum(tuple(q.dense() for q in out.q_target)), out
            )
            return (
                steered
                if not self.top_k
                else steered.where(
                    steered >= steered.topk(min(self.top_k, logits.shape[1])).values[:, -1:], -torch.inf
                )
            )
        top = logits.topk(min(self.top_k, logits.shape[1]), dim=-1)
        log_p = top.values - lm.reduce("logsumexp")[:, None]  # (S, K): only these are normalised
        q = minimum(tuple(q.at_each(top.indices) for q in out.q_target))
        return torch.full_like(logits, -torch.inf).scatter_(1, top.indices, self._steered(log_p, q, out))

    def _steered(self, log_p: Tensor, q: Tensor, out: Outputs) -> Tensor:
        """log p + beta (min Q' - V); V, the same for all tokens of a state, matters only where the advantage
        is clipped or stands for itself."""
        advantage = q if out.v is None else q - out.v[:, None]
        advantage = (
            self.beta * advantage
            if self.extraction == "exp"
            else torch.where(advantage > 0, self.beta, 1 - self.beta).log()
        )
        if self.advantage_clip is not None:
            advantage = advantage.clamp(max=self.advantage_clip)
        return log_p + advantage if self.include_logits else advantage


@torch.no_grad()
def _without_gradient(scores: Scores, actions: Tensor) -> Tensor:
    return scores.nll(actions)[1]
