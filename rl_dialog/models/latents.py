"""Latent variables of messages and conversations: their normal distributions, and what the bound on the
likelihood takes off for them.

    log p(x | context) >= E_q[log p(x | context, z)] - KL(q(z | x, context) || p(z | context))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_dialog.models.seeded_noise import derived, standard_normal

LEAST_VARIANCE = 1e-8  # added: a logarithm is taken of it
AT_MEAN = -1  # instead of a seed: the row's latents are their means


def latent_seeds(numbers: Tensor) -> Tensor:
    """Any int64 as seeds."""
    return numbers & (2**63 - 1)


def latent_seed(seed: int) -> int:
    """Any whole number as a seed: 63 bits, none of them a sign."""
    return seed & (2**63 - 1)


@dataclass
class Normal:
    """A normal distribution with independent parts, of any shape (..., Z)."""

    mean: Tensor
    variance: Tensor

    def at(self, noise: Tensor | None) -> Tensor:
        """mean + standard deviation x noise, in the mean's format; without noise the mean."""
        return self.mean if noise is None else self.mean + self.variance.sqrt() * noise.to(self.mean)

    def kl(self, other: Normal) -> Tensor:
        """(...,) KL(self || other) in nats."""
        distance = (self.variance + (self.mean - other.mean).square()) / other.variance
        return 0.5 * (distance - 1 + other.variance.log() - self.variance.log()).sum(-1)

    def logp(self, z: Tensor) -> Tensor:
        """(...,) the log-density of z."""
        parts = (
            (z - self.mean).square() / self.variance
            + self.variance.log()
            + torch.log(self.variance.new_tensor(2 * torch.pi))
        )
        return -0.5 * parts.sum(-1)


class Gaussian(nn.Module):
    """Features (..., F) to a Normal over Z numbers: two layers with tanh, a mean, and a softplus variance."""

    def __init__(self, features: int, hidden: int, size: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.mean = nn.Linear(hidden, size)
        self.spread = nn.Linear(hidden, size)

    def forward(self, *features: Tensor) -> Normal:
        inner = self.inner(torch.cat(features, -1))
        return Normal(self.mean(inner), F.softplus(self.spread(inner)) + LEAST_VARIANCE)


def noise_of(seeds: Tensor | None, numbers: Tensor, size: int) -> Tensor | None:
    """seeds (B,), numbers (B, M) of messages -> (B, M, size) standard normal, zeros for the seed AT_MEAN;
    None without seeds."""
    if seeds is None:
        return None
    return standard_normal(derived(seeds[:, None], numbers), size) * (seeds != AT_MEAN)[:, None, None]


@dataclass
class LatentTerms:
    """What a pass with latents from the posterior adds to a loss, of the messages that are learned from."""

    kl: Tensor  # (M,) nats of each message's latent
    means: Tensor | None = None  # (M, Z) of their posteriors
    rows: Tensor | None = None  # (M,) int64: which row each is of
    conversation_kl: Tensor | None = None  # (B,) nats of each conversation's latent
    words: Tensor | None = None  # (B, T, H) what the bag of words is predicted from
    # log p(z) - log q(z | x) of each message (M,), and of each conversation (B,):
    importance: Tensor | None = None
    conversation_importance: Tensor | None = None
    contexts: Tensor | None = None  # (M', H) behind the messages that teachers speak of

    @property
    def every_kl(self) -> Tensor:
        """Of all latents."""
        return self.kl if self.conversation_kl is None else torch.cat([self.kl, self.conversation_kl])

    def penalty(self, free_bits: float) -> Tensor:
        """(): the sum of the KL, at least `free_bits` for each latent."""
        return self.every_kl.clamp(min=free_bits).sum()
