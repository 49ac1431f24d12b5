"""The mathematics that methods share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Scores


def discounts(batch: Batch, gamma: float, per: str) -> Tensor:
    """(N,) discount of the value after each decision: 0 where the conversation ended, else `gamma` per token,
    or per turn only."""
    if per not in ("token", "turn"):
        raise UserError(f"expected discount 'token' or 'turn', got {per!r}")
    if not 0 <= gamma <= 1:
        raise UserError(f"expected --method.gamma from 0 to 1, got {gamma:g}")
    factor = torch.full_like(batch.rewards, gamma)
    if per == "turn":
        factor = torch.where(batch.turn_end, factor, torch.ones_like(factor))
    return factor.masked_fill(batch.dones, 0.0)


def following(batch: Batch, values: Tensor, gamma: float, per: str) -> Tensor:
    """(N,) the discounted value after each decision, of `values` (S,) in its next state; 0 where the
    conversation ended."""
    return discounts(batch, gamma, per) * values[batch.next_state]


def earned_beyond(batch: Batch, values: Tensor, gamma: float, per: str) -> Tensor:
    """`following`, and where a row was cut because it was too long what the conversation went on to earn, if
    that is known."""
    if batch.later_known is None:
        return following(batch, values, gamma, per)
    cut = (batch.next_state >= batch.decisions) & batch.later_known[batch.rows]
    beyond = discounts(batch, gamma, per) * beyond_cuts(batch, gamma, per)[batch.rows].to(values.dtype)
    return torch.where(cut, beyond, following(batch, values, gamma, per))


def beyond_cuts(batch: Batch, gamma: float, per: str) -> Tensor:
    """(B,) the discounted sum of the rewards behind each row's last state, where `batch.later_known`."""
    total = batch.later_rewards.new_zeros(len(batch.later_rewards))
    for rewards, tokens in zip(
        batch.later_rewards.flip(1).unbind(1), batch.later_tokens.flip(1).unbind(1), strict=True
    ):
        steps = tokens if per == "token" else tokens.clamp(max=1)  # a place without a reply is no step
        total = rewards * gamma ** (steps - 1).clamp(min=0) + total * gamma**steps
    return total


def to_reply_end(batch: Batch, values: Tensor, gamma: float, per: str) -> Tensor:
    """(N,) what follows each decision inside its reply: rewards before the reply's last decision, then
    `values` (N,) of that one.

    Inside a reply nobody else acts, so what a whole reply is worth is what its beginning was worth in this
    conversation: no step by step.
    """
    last = batch.last
    place = torch.arange(batch.decisions, device=last.device)
    if per == "turn":
        gamma = 1.0
    earned = torch.zeros_like(values)
    for steps in range(1, int((last - place).max()) + 1 if batch.rewards[~batch.turn_end].any() else 1):
        inside = place + steps <= last  # only `reward_spread` every_token pays inside a reply
        earned += torch.where(
            inside,
            gamma ** (steps - 1) * batch.rewards[(place + steps - 1).clamp(max=batch.decisions - 1)],
            0.0,
        )
    return earned + values[last] * gamma ** (last - place)


@torch.no_grad()
def best_of_reply(out: Outputs, batch: Batch, y: Tensor, gamma: float, per: str) -> Tensor:
    """(N,) the larger of `y` and, inside a reply, what Q' says of the whole reply that was logged: a maximum
    over all continuations is no less."""
    reply_value = to_reply_end(batch, minimum(tuple(q.at(batch.actions) for q in out.q_target)), gamma, per)
    return torch.where(batch.turn_end, y, torch.maximum(y, reply_value))


def returns(batch: Batch, gamma: float, per: str, *, bootstrap: Tensor | None = None) -> Tensor:
    """(N,) discounted sum of rewards from each decision to the end of its row, plus what the conversation
    earned behind it, or `bootstrap` (S,) of the state that a truncated row leads to where nobody knows.

    Where the next reply has no known reward the sum ends too, with the value of the state before it: what it
    earned is not 0 but unknown.
    """
    factor = discounts(batch, gamma, per)
    earned = batch.rewards.clone()
    cut = batch.next_state >= batch.decisions  # the next state is one without a decision
    cut |= ~batch.dones & ~batch.rated[batch.next_state.clamp(max=batch.decisions - 1)]
    if bootstrap is not None:
        earned += torch.where(cut, earned_beyond(batch, bootstrap, gamma, per), torch.zeros_like(factor))
    lengths = torch.bincount(batch.rows)
    column = torch.arange(batch.decisions, device=factor.device) - (lengths.cumsum(0) - lengths)[batch.rows]
    sums = factor.new_zeros(len(lengths), int(lengths.max()) + 1)
    keep = torch.zeros_like(sums)
    sums[batch.rows, column], keep[batch.rows, column] = earned, factor.masked_fill(cut, 0.0)
    for t in range(sums.shape[1] - 2, -1, -1):
        sums[:, t] += keep[:, t] * sums[:, t + 1]
    return sums[batch.rows, column]


def started_from_returns(
    target: Tensor, batch: Batch, warmup: float, gamma: float, per: str, *, bootstrap: Tensor
) -> Tensor:
    """(N,) `target`, mixed with the returns that followed while a run is young: all returns at its start,
    none after the share `warmup` of it.

    A reward at the end of a conversation reaches its first reply through one target lag per reply; what
    followed says at once how conversations go. In the end nothing of it is left, so a policy can still be
    better than every conversation of the logs.
    """
    share = 1 - batch.progress / warmup if warmup else 0.0
    return (
        target
        if share <= 0
        else share * returns(batch, gamma, per, bootstrap=bootstrap) + (1 - share) * target
    )


def expectile(error: Tensor, tau: float) -> Tensor:
    """|tau - 1[error < 0]| * error^2, elementwise: 0.5 fits the mean (halved squared error), 1 the
    maximum. Raises UserError for a tau with which one side would be pushed away."""
    if not 0 <= tau <= 1:
        raise UserError(f"expected --method.tau from 0 to 1, got {tau:g}")
    return torch.where(error < 0, 1 - tau, tau) * error.square()


def gumbel(error: Tensor, c: float, limit: float = 2.0) -> Tensor:
    """c^2 (exp z - z - 1) with z = error / c, elementwise: fits the soft maximum, c log E exp(x / c) (Gumbel
    regression, Garg et al. 2023, eq. 11).

    Near 0 it is half the squared error. Beyond z = `limit` it goes on as a straight line, so that one sample
    pulls as much as exp(limit) - 1 others at most. Otherwise errors of Q would be taken for choices: the soft
    maximum over errors of deviation s is s^2 / 2c too high, and where a conversation comes back to the same
    state that adds up, to s^2 / 2c (1 - gamma). A reply that lifts the value of the state before it has to be
    one of seven or so there.
    """
    z = error / c
    inside = z.clamp(max=limit)
    return c * c * (inside.exp() * (1 + z - inside) - z - 1)


def rate_of_targets(alpha: float | None, updates: int, progress: float) -> float:
    """`alpha`, or where it is None what lets targets follow in a hundredth of the run, and at its end in a
    tenth.

    Values pass some twenty replies while they are learned; at last the targets, which policies act on, are a
    mean over many updates.
    """
    return min(1.0, 100 / max(1, updates) * max(0.1, 1 - progress)) if alpha is None else alpha


def minimum(scores: tuple[Tensor, ...]) -> Tensor:
    """Elementwise minimum over the heads: the pessimistic estimate of clipped double Q-learning."""
    return reduce(torch.minimum, scores)


@torch.no_grad()
def lift(nll_q: Tensor, nll: Tensor, pull: float, support: float) -> Tensor:
    """(N,) what a conservative term adds to Q of logged tokens that the logs say often, to be taken off y.

    sum_a p_a (Q_a - y_a)^2 - w p_a log softmax(Q)_a is least at Q_a = y_a + w/2 (1 - s_a / p_a), s =
    softmax(Q): where replies are worth the same, what is said often is lifted over what is said less, and
    steering by that would say it still oftener, though no reward says so. What is seldom said stays held
    down, because its mean is one of few samples. So this is the lift where p, the clone, is twice `support`
    or more, and less and less of it down to `support`.

    Args:
        nll_q: -log s of the logged tokens.
        nll: -log p of the same.
        pull: w/2.
    """
    often = ((-nll).exp() / support - 1).clamp(0, 1)
    return pull * often * (1 - (nll.clamp(max=-math.log(support)) - nll_q).exp())


def lifted_error(q: Tensor, y: Tensor, lifts: Tensor | float, rated: Tensor) -> Tensor:
    """(N,) squared errors of Q to y without its `lift`; where there is no y, because a reply was not rated,
    nothing but the gradient that takes the lift off, which the conservative term gives to that reply too."""
    return torch.where(rated, (y - lifts - q).square(), 2 * lifts * (q - q.detach()))


@torch.no_grad()
def row_log_ratios(lm: Scores, batch: Batch) -> Tensor:
    """(B,) log pi - log p of each row, summed over its decisions; p is batch.prior_logp."""
    ratios = -lm.nll(batch.actions)[1] - batch.prior_logp
    return ratios.new_zeros(len(batch.input_ids)).index_add(0, batch.rows, ratios)


def log_ratios(lm: Scores, batch: Batch, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """() loss(g) with its gradient, g (B,) the log-ratio log pi - log p of each row, summed over its
    decisions; p is batch.prior_logp.

    The scores are gone over twice: first for g, which says what each token's log-probability weighs in the
    gradient, then with these weights. So no (N, V) tensor is kept, whatever the loss.
    """
    ratio = row_log_ratios(lm, batch).requires_grad_()
    with torch.enable_grad():
        value = loss(ratio)
        (slope,) = torch.autograd.grad(value, ratio)
    weighted, _ = lm.nll(batch.actions, -slope[batch.rows])
    return value.detach() + weighted - weighted.detach()
