"""Observations whose units nobody knows, as networks take them: centred, in their own deviations, and large
ones compressed.

    z = asinh((o - mean) / deviation)      # about itself below 1, a logarithm above
    asinh(o)                               # beside it, as the second of two scales

Means and deviations run: they are those of all observations that came so far. A robot that falls and slides
off for hundreds of metres hides no other number by it, because what is rare and large is compressed. But
where it slides most of the time, the deviation is hundreds of metres, of which all that matters before the
fall is a thousandth. So each number is there also as it comes: whoever chose its unit meant 1 to be some
amount.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST = 1e-4  # deviation: what never varies is no noise to be amplified
MOST = 1e17  # larger ones, of sensors that see nothing, are taken for it: a variance holds its square


class RunningScale(nn.Module):
    """Of (..., S) numbers # (..., scales S). Before the first ones it leaves them as they are, compressed.

    `scales`: 1 in their deviations, 2 also as they come.
    """

    def __init__(self, size: int, *, scales: int = 1) -> None:
        super().__init__()
        self.scales = scales
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, observations: Tensor) -> Tensor:
        observations = observations.float().clamp(-MOST, MOST)
        z = torch.asinh((observations - self.mean) / self.variance.sqrt().clamp(min=LEAST))
        return z if self.scales == 1 else torch.cat([z, torch.asinh(observations)], -1)

    @torch.no_grad()
    def add(self, observations: Tensor) -> None:
        """Means and variances become those of the observations so far and these, on whatever device they are
        # (N, S); Chan et al. 1979"""
        observations = observations.to(self.mean.device, torch.float32).clamp(-MOST, MOST)
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
