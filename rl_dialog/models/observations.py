"""Observations whose units nobody knows, as networks take them: centred, in their own deviations, and large
ones compressed.

    z = asinh((o - mean) / deviation)      # about itself below 1, a logarithm above

Means and deviations run: they are those of all observations that came so far. A robot that falls and slides
off for hundreds of metres hides no other number by it, because what is rare and large is compressed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST = 1e-4  # deviation: what never varies is no noise to be amplified


class RunningScale(nn.Module):
    """Of (..., S) numbers. Before the first ones it leaves them as they are, compressed."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, observations: Tensor) -> Tensor:
        return torch.asinh((observations.float() - self.mean) / self.variance.sqrt().clamp(min=LEAST))

    @torch.no_grad()
    def add(self, observations: Tensor) -> None:
        """Means and variances become those of the observations so far and these, on whatever device they are
        # (N, S); Chan et al. 1979"""
        observations = observations.to(self.mean.device, torch.float32)
        n, mean = len(observations), observations.mean(0)
        variance, total = observations.var(0, unbiased=False), self.count + len(observations)
        self.variance.masked_fill_(self.count == 0, 0.0)
        share, apart = n / total, mean - self.mean
        self.variance.lerp_(variance, share).add_(apart**2 * share * (1 - share))
        self.mean.add_(apart * share)
        self.count.copy_(total)

    def replace(self, observations: Tensor) -> None:
        """Those of these alone # (N, S)"""
        self.mean.zero_()
        self.count.zero_()
        self.add(observations)
