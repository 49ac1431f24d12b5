"""Discrete batch-constrained Q-learning (Fujimoto et al. 2019): only tokens that the behaviour might have
said count, in learning and in acting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.backup import best_of_reply, following, minimum, rate_of_targets, started_from_returns
from rl_dialog.methods.method import STRENGTH, Heads, Loss, Method, Outputs, check_ranges


@dataclass(frozen=True)
class BCQ(Method):
    """Q-learning with the maximum over what the clone finds likely.

    Two Q heads by TD with a maximum inside the support of the LM, which goes on cloning the logs beside them.

    support(s) = {a: p(a|s) >= threshold max_b p(b|s)}
    L_Q  = sum_i (Q_i(s,a) - y)^2,  y = r + gamma max_{a' in support(s')} min_i Q'_i(s',a')
           Q' are the Polyak targets
    L_LM = -log p(a|s)
    L    = L_Q + clone_weight L_LM                         each averaged over decisions
    pi   = p exp(beta min_i Q'_i) / Z inside the support, 0 outside
           p is 1 without include_logits, as published
    """

    threshold: float = 0.1
    """smallest share of the likeliest token's probability that belongs to the support; 0 is plain double
    Q-learning, 1 the greedy LM"""
    beta: float | None = None
    """inverse temperature of Q when decoding, per spread of returns in the training split (per unit of reward
    with value_unit 1); by default half of that of ilql"""
    gamma: float = 0.99
    """discount"""
    discount: Literal["token", "turn"] = "turn"
    """apply gamma only at the end of a reply, or at every token (as in the papers), which favours short
    replies"""
    backup: Literal["reply", "token"] = "reply"
    """inside a reply y is at least the value of the whole reply as logged; token: step by step, as
    published"""
    warmup: float = 0.3
    """share of the run in which the target of Q goes over from the returns that followed to y; 0 begins with
    y, as published"""
    include_logits: bool = True
    """act on p exp(beta Q), which is p where Q knows nothing yet; off: on exp(beta Q) alone, as published"""
    clone_weight: float = 1.0
    """weight of the cloning term; 0 leaves the LM, and so the support, as it was loaded"""
    alpha: float | None = None
    """Polyak rate of the target network, once per optimizer step; by default 100 over the number of updates,
    at the end 10"""

    heads: ClassVar[Heads] = Heads(q=2, target=True)
    plain_lm: ClassVar[bool] = False
    acts_with_beta: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self, at_least_0=("clone_weight",), shares=("threshold", "warmup", "alpha"))

    @property
    def skips_parameters(self) -> bool:
        return self.clone_weight == 0

    def suited(self, strength: float) -> BCQ:
        return replace(self, beta=strength / 2) if self.beta is None else self

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {"beta": self.suited(STRENGTH).beta / unit}

    def target_rate(self, updates: int, progress: float) -> float:
        return rate_of_targets(self.alpha, updates, progress)

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        lm, nll = out.lm.nll(batch.actions) if self.clone_weight else (0.0, None)
        best = self.best_supported(out)
        y = batch.rewards + following(batch, best, self.gamma, self.discount)
        y = best_of_reply(out, batch, y, self.gamma, self.discount) if self.backup == "reply" else y
        y = started_from_returns(y, batch, self.warmup, self.gamma, self.discount, bootstrap=best)
        q = tuple(q.at(batch.actions) for q in out.q)
        q_loss = sum(((y - q_i).square() * batch.rated).sum() for q_i in q)
        metrics = {"q_loss": q_loss, "q": q[0].sum(), "target": y.sum()}
        if nll is not None:
            metrics["nll"] = nll.sum()
        return Loss(
            q_loss + self.clone_weight * lm, {name: value.detach() for name, value in metrics.items()}
        )

    @torch.no_grad()
    def best_supported(self, out: Outputs) -> Tensor:
        """(S,) the largest min Q' inside the support, a chunk of states at a time."""
        best_values = []
        for chunk in out.lm.parts():
            q = minimum(tuple(head.rows(chunk).dense() for head in out.q_target))
            best_values.append(q.masked_fill(~self._support(out.lm.rows(chunk).dense()), -torch.inf).amax(1))
        return torch.cat(best_values)

    def _support(self, logits: Tensor) -> Tensor:
        floor = log(self.threshold) if self.threshold else -torch.inf
        return logits >= logits.amax(1, keepdim=True) + floor

    def decode(self, out: Outputs) -> Tensor:
        if self.beta is None:
            return self.suited(STRENGTH).decode(out)
        logits = out.lm.dense()
        q = self.beta * minimum(tuple(q.dense() for q in out.q_target))
        return (logits.log_softmax(1) + q if self.include_logits else q).masked_fill(
            ~self._support(logits), -torch.inf
        )
