"""KL-control Q-learning and Psi-learning on tokens (Jaques et al. 2019, arXiv 1907.00456): maximise reward,
stay near the prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods.backup import discounts, minimum, rate_of_targets
from rl_dialog.methods.method import Heads, Loss, Method, Outputs, check_ranges
from rl_dialog.methods.scores import kl_divergences, reduce_minimum


@dataclass(frozen=True)
class WayOffPolicy(Method):
    """Psi and KL-control as published in 2019, in the language model's own logits.

    Q(s,a) = l(s,a) - b(s) + v(s): l the LM's logits, b the log-sum-exp of the prior's, v a value head;
    pi = softmax(Q) = softmax(l); p the prior.

    max:  Q(s,a) = r/c + log p(a|s) - log pi(a|s) + gamma max_a' Q'(s',a')
    psi:  Q(s,a) = r/c + log p(a|s)               + gamma log sum_a' exp Q'(s',a')
                   (eq. 8; entropy comes with the logsumexp)

    Q' is a Polyak copy of the whole LM, log p - log pi is sampled at the logged token and has no gradient,
    the loss is Huber's. `coefficient="kl"` scales the prior term instead: r + c (log p - log pi), as the 2019
    code does (not the same trade-off). With `target_passes` M > 1, Q' is the lowest of M passes with dropout
    (eq. 2): a lower bound against overestimation. Training starts from the prior, so b makes Q start as log
    p, which is right where nothing is earned, and v carries what a state is worth; without them (as
    published) a TD error has to move every logit of a state, and only the logged token's is told to. `kl`
    puts minus a divergence over the whole vocabulary in the place of log p - log pi; the prior then runs at
    every step.
    """

    backup: Literal["max", "psi"] = "max"
    """max: KL-control Q-learning; psi: soft (logsumexp) backup"""
    c: float = 0.5
    """how strongly the prior holds: a larger c stays closer to it"""
    coefficient: Literal["reward", "kl"] = "reward"
    """reward: r/c + k as in the paper's objective; kl: r + c*k as in the 2019 code"""
    kl: Literal["sampled", "exact", "reverse"] = "sampled"
    """sampled: log p - log pi of the logged token; exact: -KL(pi||p), which is the mean of that over tokens
    drawn from pi; reverse: -KL(p||pi), the 2019 code's `integral`"""
    clip_prior: bool = False
    """count min(0, k) only, as the 2019 code does with averaged priors: nothing is earned by saying what the
    prior likes better than pi does"""
    keep_log_pi: bool | None = None
    """subtract log pi; by default in max only. With it psi counts entropy twice (the 2019 code does), without
    it max is Snell et al.'s "BCQ" """
    origin: Literal["prior", "logits"] = "prior"
    """prior: take b off the logits, as above; logits: Q is the raw logits (the 2019 code), whose level in a
    state means nothing at the start"""
    state_value: bool = True
    """give Q the value head v; off: the logits alone are Q (the 2019 code)"""
    target_passes: int = 1
    """passes of the target LM with dropout, whose lowest value counts; 1 is one pass without dropout"""
    lowest: Literal["before", "after"] = "before"
    """take the lowest of the passes for each token, before the max or logsumexp (eq. 2), or after it (as the
    2019 code does: a higher bound)"""
    gamma: float = 0.99
    """discount"""
    discount: Literal["token", "turn"] = "token"
    """apply gamma at every token (as in the papers) or only at the end of a reply"""
    alpha: float | None = None
    """Polyak rate of the target network, once per optimizer step; by default 100 over the number of updates,
    10 at the end (0.005 in 2019)"""

    def __post_init__(self) -> None:
        divides = ("c",) if self.coefficient == "reward" else ()
        check_ranges(
            self, above_0=divides, at_least_0=("c",), at_least_1=("target_passes",), shares=("alpha",)
        )
        if self.kl != "sampled" and not self._subtracts_log_pi:
            raise UserError(
                f"kl {self.kl!r}: expected a target with log p - log pi in it, but {self.backup} has log p "
                "alone: set keep_log_pi (as the 2019 code)"
            )

    @property
    def heads(self) -> Heads:
        return Heads(v=self.state_value, lm_target=True)

    @property
    def _subtracts_log_pi(self) -> bool:
        return self.backup == "max" if self.keep_log_pi is None else self.keep_log_pi

    @property
    def uses_prior(self) -> bool:
        return True

    @property
    def has_critic(self) -> bool:
        return self.origin == "logits"

    @property
    def about_q(self) -> str:
        if not self.has_critic:
            return "The level of its Q is told by the prior's logits, which only training reads."
        return "Its Q holds the terms of the prior beside the reward (in units of reward): not a return."

    @property
    def prior_every_step(self) -> bool:
        return self.kl != "sampled"

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        actions, count = batch.actions, batch.decisions
        logits = out.lm.at(actions)
        level = self.level(out, batch)  # (S,)
        q = logits + level[:count]
        log_pi = logits.detach() - out.lm.reduce("logsumexp")[:count]
        k = self._nearness(out, batch, log_pi)
        how = "max" if self.backup == "max" else "logsumexp"
        values = (
            reduce_minimum(out.lm_target, how)
            if self.lowest == "before"
            else minimum(tuple(target.reduce(how) for target in out.lm_target))
        )
        earned = batch.rewards / self.c + k if self.coefficient == "reward" else batch.rewards + self.c * k
        y = earned + discounts(batch, self.gamma, self.discount) * (values + level.detach())[batch.next_state]
        q_loss = (F.smooth_l1_loss(q, y, reduction="none") * batch.rated).sum()
        metrics = {
            "q_loss": q_loss,
            "q": q.sum(),
            "nll": -log_pi.sum(),
            "log_p_minus_log_pi": (batch.prior_logp - log_pi).sum(),
        }
        return Loss(q_loss, {name: value.detach() for name, value in metrics.items()})

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {"c": self.c * unit}

    def reach(self, returns: float, reward: float) -> float:
        """Twice the largest return: other ways through the logs may earn more than any conversation of theirs
        did."""
        if self.discount == "token" and self.gamma < 1:
            returns = min(returns, reward / (1 - self.gamma))
        return 2 * returns / (self.c if self.coefficient == "reward" else 1)

    def target_rate(self, updates: int, progress: float) -> float:
        return rate_of_targets(self.alpha, updates, progress)

    def critic(self, out: Outputs) -> Tensor:
        """The logits, as `origin` logits takes them; they are in units of r / c where `coefficient` is
        reward."""
        unit = self.c if self.coefficient == "reward" else 1.0
        return (out.lm.dense() + (0.0 if out.v is None else out.v[:, None])) * unit

    def level(self, out: Outputs, batch: Batch) -> Tensor:
        """(S,) v - b, what all of a state's logits are raised by."""
        level = torch.zeros(len(batch.states), device=batch.rewards.device) if out.v is None else out.v
        return level if self.origin == "logits" else level - batch.prior_lse

    def _nearness(self, out: Outputs, batch: Batch, log_pi: Tensor) -> Tensor:
        """(N,) k, what staying near the prior earns."""
        if self.kl == "sampled":
            k = batch.prior_logp - log_pi if self._subtracts_log_pi else batch.prior_logp
        else:
            pi, p = (scores.rows(slice(0, batch.decisions)) for scores in (out.lm, out.prior))
            k = -(kl_divergences(pi, p) if self.kl == "exact" else kl_divergences(p, pi))
        return k.clamp(max=0) if self.clip_prior else k
