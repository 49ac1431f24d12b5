"""What the methods share that learn from episodes that the policy itself has played (`pipelines/online.py`).

The loop (training/online.py) plays episodes, asks the method for the advantage of each decision
(`advantages`, from methods/advantages.py), and makes steps on

    L = sum_t w_t [ l(log pi_t) + c k(log pi_t - log p_t) - entropy_weight H_t ] / episodes

over the decisions t of all episodes of the step; l is the method's own (`surrogate`), p the frozen prior.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.advantages import Experience
from rl_dialog.methods.method import Loss, Method, Outputs, check_ranges
from rl_dialog.methods.scores import Scores, entropy

FAR = 20.0  # nats: where an action was drawn that the prior finds exp(20) times likelier than the policy


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x, elementwise, and below -FAR the straight line that goes on from there: of latents, two
    Gaussians that lie apart differ by thousands of nats, and one would make the whole loss infinite."""
    inside = (-x).clamp(max=FAR)
    return torch.expm1(inside) * (1 + (-x - inside)) - inside


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    # of x = log pi - log p at what was drawn; Schulman's names (Approximating KL Divergence, 2020)
    "k2": lambda x: 0.5 * x.square(),
    "k3": k3,
}


@dataclass(frozen=True)
class OnlineMethod(Method):
    """A method that learns from what the policy itself said."""

    c: float = 0.1
    """weight of the divergence from the prior, in spreads of the first round's returns (in units of reward
    with value_unit 1): the optimum is p exp(R / c) / Z"""
    kl: Literal["reward", "k2", "k3"] = "reward"
    """where the divergence is charged: reward takes c (log pi - log p) off what each token earned (k1); k2
    and k3 are terms of the loss, which look at no later token. k3 pulls by KL(p || pi)"""
    entropy_weight: float = 0.0
    """bonus on the entropy of every token's distribution, in the unit of c"""
    max_weight: float = 2.0
    """largest importance weight of a token: how much likelier the policy finds it than it was where it was
    drawn (older weights, top-k and top-p)"""

    online: ClassVar[bool] = True
    needs_latents: ClassVar[bool] = False  # of each message, in the model that learns
    learning_rate_share: ClassVar[float] = 0.25
    iterations: ClassVar[int] = 1  # passes over the episodes of one step of the run ...
    mini_batches: ClassVar[int] = 1  # ... each in so many steps of the optimizer

    def __post_init__(self) -> None:
        check_ranges(self, above_0=("max_weight",), at_least_0=("c", "entropy_weight"))

    @property
    def uses_prior(self) -> bool:
        return True

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {"c": self.c * unit}

    @property
    def compares_groups(self) -> bool:
        """Does an episode that is alone in its group teach nothing?"""
        return False

    @property
    def chooses_latents(self) -> bool:
        """Does it learn how a model draws the latents of its messages (`latent_advantages`)?"""
        return False

    @property
    def holds_latents(self) -> bool:
        """Are the latents that were drawn given to policy and prior alike, or does each draw its own with the
        same noise?"""
        return False

    def earned(self, experience: Experience) -> np.ndarray:
        """(n,) the rewards, less the divergence where it is charged there."""
        return experience.charged(self.c) if self.kl == "reward" else experience.rewards

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        """For each episode (n,), from all scored episodes of a step of the run."""
        raise TypeError(f"{type(self).__name__} has no advantages")

    def latent_advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        """For each episode (R,) those of its replies' latents, for methods that choose them."""
        raise TypeError(f"{type(self).__name__} chooses no latents")

    def value_targets(self, experience: Experience) -> np.ndarray:
        """(n,) what V is fitted to, for methods with a value head."""
        return np.zeros(len(experience.rewards))

    def weights(self, experience: Experience) -> np.ndarray:
        """(n,) of the decisions of one episode in the loss."""
        return np.ones(len(experience.rewards))

    def surrogate(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(N,) l, whose gradient in log pi (N,) moves the policy, and metrics (N,)."""
        raise TypeError(f"{type(self).__name__} has no surrogate")

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        metrics: dict[str, Tensor] = {}

        def of_tokens(logp: Tensor) -> Tensor:
            terms, more = self.surrogate(logp, batch)
            ratio = logp - batch.prior_logp
            metrics.update({"kl": ratio, "entropy": -logp} | more)
            if self.kl in DIVERGENCES and self.c:
                terms = terms + self.c * DIVERGENCES[self.kl](ratio)
            return (batch.weights * terms).sum()

        known = batch.old_logp if batch.unchanged else None
        total, logp = by_log_probability(out.lm, batch.actions, of_tokens, known)
        metrics["behaviour_gap"] = (logp - batch.behaviour_logp).abs()
        if self.entropy_weight:
            total = total - self.entropy_weight * entropy(out.lm, batch.weights)
        return Loss(total, {name: value.detach().sum() for name, value in metrics.items()})

    def importance(self, logp: Tensor, batch: Batch) -> Tensor:
        """(N,) min(exp(logp) / mu, max_weight), mu the probability that the action was drawn with; no
        gradient."""
        return (logp.detach() - batch.behaviour_logp).exp().clamp(max=self.max_weight)


def by_log_probability(
    lm: Scores, actions: Tensor, loss: Callable[[Tensor], Tensor], known: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """() loss(log pi) with its gradient, log pi (N,) that of the actions; and (N,) log pi without gradient.

    The scores are gone over twice: first for log pi, which says what each token weighs in the gradient, then
    with these weights. So no (N, V) tensor is kept, whatever the loss. Where log pi is known already, once.
    """
    with torch.no_grad():
        logp = -lm.nll(actions)[1] if known is None else known.clone()
    logp.requires_grad_()
    with torch.enable_grad():
        value = loss(logp)
        (slope,) = torch.autograd.grad(value, logp)
    weighted, nll = lm.nll(actions, -slope)
    return value.detach() + weighted - weighted.detach(), -nll


def clipped(logp: Tensor, batch: Batch, epsilon: float) -> tuple[Tensor, dict[str, Tensor]]:
    """(N,) -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) with r = exp(log pi - log pi_old), and where the
    clip holds."""
    ratio = (logp - batch.old_logp).exp()
    free, held = ratio * batch.advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * batch.advantages
    return -torch.minimum(free, held), {"clipped": (held < free).float()}


def totals(method: OnlineMethod, experiences: Sequence[Experience]) -> tuple[np.ndarray, np.ndarray]:
    """(E,) what each episode earned in all, and (E,) its group."""
    earned = np.array([float(method.earned(each).sum()) for each in experiences])
    return earned, np.array([each.group for each in experiences])
