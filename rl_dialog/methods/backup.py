"""The mathematics that methods share."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch


def discounts(batch: Batch, gamma: float, per: str) -> Tensor:
    """(N,) discount of the value after each decision: 0 where the conversation ended, else `gamma` per token, or per turn only."""
    if per not in ("token", "turn"):
        raise ValueError(f"expected discount 'token' or 'turn', got {per!r}")
    factor = torch.full_like(batch.rewards, gamma)
    if per == "turn":
        factor = torch.where(batch.turn_end, factor, torch.ones_like(factor))
    return factor.masked_fill(batch.dones, 0.0)


def expectile(error: Tensor, tau: float) -> Tensor:
    """|tau - 1[error < 0]| * error^2, elementwise: 0.5 fits the mean (halved squared error), 1 the maximum."""
    return torch.where(error < 0, 1 - tau, tau) * error.square()


def minimum(scores: tuple[Tensor, ...]) -> Tensor:
    """Elementwise minimum over the heads: the pessimistic estimate of clipped double Q-learning."""
    return reduce(torch.minimum, scores)
