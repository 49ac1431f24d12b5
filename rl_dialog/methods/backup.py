"""The mathematics that methods share."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.scores import Scores


def discounts(batch: Batch, gamma: float, per: str) -> Tensor:
    """(N,) discount of the value after each decision: 0 where the conversation ended, else `gamma` per token, or per turn only."""
    if per not in ("token", "turn"):
        raise ValueError(f"expected discount 'token' or 'turn', got {per!r}")
    factor = torch.full_like(batch.rewards, gamma)
    if per == "turn":
        factor = torch.where(batch.turn_end, factor, torch.ones_like(factor))
    return factor.masked_fill(batch.dones, 0.0)


def returns(batch: Batch, gamma: float, per: str, *, bootstrap: Tensor | None = None) -> Tensor:
    """(N,) discounted sum of rewards from each decision to the end of its row, plus `bootstrap` (S,) of the state that a truncated row ends in."""
    factor = discounts(batch, gamma, per)
    earned = batch.rewards.clone()
    cut = batch.next_state >= batch.decisions  # the next state is one without a decision
    if bootstrap is not None:
        earned += torch.where(cut, factor * bootstrap[batch.next_state], torch.zeros_like(factor))
    lengths = torch.bincount(batch.rows)
    column = torch.arange(batch.decisions, device=factor.device) - (lengths.cumsum(0) - lengths)[batch.rows]
    sums = factor.new_zeros(len(lengths), int(lengths.max()) + 1)
    keep = torch.zeros_like(sums)
    sums[batch.rows, column], keep[batch.rows, column] = earned, factor.masked_fill(cut, 0.0)
    for t in range(sums.shape[1] - 2, -1, -1):
        sums[:, t] += keep[:, t] * sums[:, t + 1]
    return sums[batch.rows, column]


def expectile(error: Tensor, tau: float) -> Tensor:
    """|tau - 1[error < 0]| * error^2, elementwise: 0.5 fits the mean (halved squared error), 1 the maximum."""
    return torch.where(error < 0, 1 - tau, tau) * error.square()


def minimum(scores: tuple[Tensor, ...]) -> Tensor:
    """Elementwise minimum over the heads: the pessimistic estimate of clipped double Q-learning."""
    return reduce(torch.minimum, scores)


def log_ratios(lm: Scores, batch: Batch, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """() loss(g) with its gradient, g (B,) the log-ratio log pi - log p of each row, summed over its decisions; p is batch.prior_logp.

    The scores are gone over twice: first for g, which says what each token's log-probability weighs in the gradient, then with these weights. So no
    (N, V) tensor is kept, whatever the loss.
    """
    with torch.no_grad():
        each = -lm.nll(batch.actions)[1] - batch.prior_logp
    ratio = each.new_zeros(len(batch.input_ids)).index_add(0, batch.rows, each).requires_grad_()
    with torch.enable_grad():
        value = loss(ratio)
        (slope,) = torch.autograd.grad(value, ratio)
    weighted, _ = lm.nll(batch.actions, -slope[batch.rows])
    return value.detach() + weighted - weighted.detach()
