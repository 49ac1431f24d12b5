"""Variational hierarchical reinforcement learning (VHRL; Saleh et al. 2019, arXiv 1909.07547): a manager
draws the latent of each message, a worker its words, and REINFORCE tells both what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods.advantages import SAME, Experience, discount_factors, rewards_to_go
from rl_dialog.methods.method import Loss, Outputs
from rl_dialog.methods.online import DIVERGENCES
from rl_dialog.methods.reinforce import Reinforce

Sums = tuple[
    np.ndarray, np.ndarray
]  # of an episode: (n,) of its words, and (R,) of the latents of its replies


@dataclass(frozen=True)
class VHRL(Reinforce):
    """REINFORCE on latents and words (Saleh et al. 2019), for models that draw a latent z for each message.

    L = -sum_k manager_weight A_k log N(z_k; mu, sigma^2) - sum_t worker_weight A_t log pi(w_t | z_k), where
    mu and sigma are those of the model's prior net in the context before reply k.
    """

    learns: Literal["joint", "decoupled", "manager", "worker"] = "joint"
    """who learns: both from the same rounds (joint), the manager in even rounds and the worker in odd ones
    (decoupled), or one of them. The worker alone is reinforce: it learns through the latents too"""
    manager_weight: float = 1.0
    """alpha, the weight of the latents' log-densities"""
    worker_weight: float = 1.0
    """beta, the weight of the words' log-probabilities"""
    words: Literal["sum", "mean"] = "sum"
    """log-probabilities of the words of a reply are added up or, as published, averaged"""
    dimensions: Literal["sum", "mean"] = "sum"
    """the numbers of a latent, likewise: the sum is the log-density, and published"""
    standardise: bool = False
    """returns to go from each reply get mean 0 and deviation 1 over the round, each of `rewards` by itself
    before it is weighed (as published); then there is no other baseline, and c is in this unit"""
    through_latents: bool = False
    """as published: what the worker learns goes on through the latents into the net that draws them, which
    then learns the same thing from both"""
    worker_rate: float = 1.0
    """share of the learning rate in the worker's rounds of decoupled (published: 0.01)"""

    needs_latents: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("manager_weight", "worker_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"expected --method.{name} of at least 0, got {getattr(self, name)}")
        if not self.worker_rate > 0:
            raise UserError(f"expected --method.worker_rate above 0, got {self.worker_rate}")
        if self.worker_rate != 1 and self.learns != "decoupled":
            raise UserError(f"--method.worker_rate: expected --method.learns decoupled, got {self.learns}")
        if self.through_latents and self.learns not in ("joint", "decoupled"):
            raise UserError(
                f"--method.through_latents: expected --method.learns joint or decoupled, got {self.learns}"
            )

    @property
    def chooses_latents(self) -> bool:
        return self.learns != "worker"

    @property
    def holds_latents(self) -> bool:
        return self.chooses_latents and not self.through_latents

    @property
    def compares_groups(self) -> bool:
        return not self.standardise and super().compares_groups

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {} if self.standardise else super().in_rewards(unit)

    def rate_share(self, step: int) -> float:
        return self.worker_rate if self.learner(step) == "worker" else 1.0

    def learner(self, step: int) -> str:
        """joint, manager or worker: who learns in round `step`."""
        return ("manager", "worker")[step % 2] if self.learns == "decoupled" else self.learns

    def weights(self, experience: Experience) -> np.ndarray:
        lengths = np.bincount(experience.turn)[experience.turn]
        return self.worker_weight / (lengths if self.words == "mean" else np.ones(len(lengths)))

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        return [of_words for of_words, _ in self._advantages(experiences)]

    def latent_advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        return [of_latents for _, of_latents in self._advantages(experiences)]

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        worker, learner = super().loss(out, batch), self.learner(batch.round)
        if learner == "worker":
            return worker
        logp = out.latent_logp
        importance = (logp.detach() - batch.latent_behaviour_logp).exp().clamp(max=self.max_weight)
        terms = -importance * batch.latent_advantages * logp
        if self.kl in DIVERGENCES and self.c:
            terms = terms + self.c * DIVERGENCES[self.kl](logp - batch.latent_prior_logp)
        numbers = batch.latents.shape[1] if self.dimensions == "mean" else 1
        manager = self.manager_weight / numbers * terms.sum()
        return Loss(manager if learner == "manager" else worker.total + manager, worker.metrics)

    def _advantages(self, experiences: Sequence[Experience]) -> list[Sums]:
        if self.standardise:
            return self._standardised(experiences)
        to_go = [self._to_go(each, self.earned(each), -self._charge * _ratio(each)) for each in experiences]
        turns = [each.turn for each in experiences], [np.arange(len(latents)) for _, latents in to_go]
        above = (
            self.above_baseline(list(sums), of, experiences)
            for sums, of in zip(zip(*to_go, strict=True), turns, strict=True)
        )
        return list(zip(*above, strict=True))

    def _standardised(self, experiences: Sequence[Experience]) -> list[Sums]:
        """The weighted sum of each reward's (G - mean) / deviation, less the divergence that follows, as far
        as it lies above the mean. Mean and deviation are those over all replies."""
        advantages = [(np.zeros(len(each.rewards)), np.zeros(each.replies)) for each in experiences]
        for name in sorted({name for each in experiences for name in each.parts}) or [""]:
            to_go = []
            for each in experiences:
                _, rewards = each.parts.get(name, (1.0, each.rewards))
                to_go.append(self._to_go(each, rewards, np.zeros(each.replies)))
            weight = next((each.parts[name][0] for each in experiences if name in each.parts), 1.0)
            _add(advantages, to_go, weight, scaled=True)
        if self._charge:
            charges = [self._to_go(each, each.log_ratio, _ratio(each)) for each in experiences]
            _add(advantages, charges, -self._charge, scaled=False)
        return advantages

    @property
    def _charge(self) -> float:
        return self.c if self.kl == "reward" else 0.0

    def _to_go(self, each: Experience, words: np.ndarray, latents: np.ndarray) -> Sums:
        """What follows each word of an episode and each latent, which is drawn before its reply's first word,
        where they bring in `words` (n,) and `latents` (R,)."""
        starts = np.flatnonzero(np.diff(each.turn, prepend=-1))
        factors = np.insert(discount_factors(each, self.gamma, self.discount), starts, 1.0)
        sums = rewards_to_go(np.insert(words, starts, latents), factors)
        places = starts + np.arange(len(starts))
        return np.delete(sums, places), sums[places]


def _ratio(each: Experience) -> np.ndarray:
    """(R,) log-ratios of latents; zeros where nobody chooses them."""
    return np.zeros(each.replies) if each.latent_log_ratio is None else each.latent_log_ratio


def _add(advantages: list[Sums], to_go: Sequence[Sums], weight: float, *, scaled: bool) -> None:
    """Adds weight x (to_go - mean), `scaled` divided by the deviation (N - 1), where there is any."""
    every = np.concatenate([latents for _, latents in to_go])
    spread = every.std(ddof=1) if len(every) > 1 else 0.0
    if scaled and not spread > SAME * np.abs(every).max(initial=0.0):
        return
    factor = weight / spread if scaled else weight
    for sums, follows in zip(advantages, to_go, strict=True):
        for total, own in zip(sums, follows, strict=True):
            total += factor * (own - every.mean())
