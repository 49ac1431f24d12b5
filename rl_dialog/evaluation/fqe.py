"""Fitted Q evaluation (Le et al. 2019; Paine et al. 2020): learn Q of a given policy from logs, with the
policy's language model as it is.

    y(s,a) = r + gamma sum_a' pi(a'|s') Q'(s',a')      0 after `done`; a truncated row bootstraps from its
                                                       last state
    L      = (Q(s,a) - y)^2                            at logged tokens; Q' is a Polyak average of Q

Where r is missing (the last token of a reply that nobody rated) there is no y: L is over the other tokens,
and Q knows what such a reply earns from those that were rated.

Q is a small head on frozen hidden states, so the language model runs once over the data. It is learned in
spreads of the logged returns, from their mean on, so that nothing depends on the unit of rewards. The sum
over a' is exact, over the whole vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import trange

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods.backup import discounts, returns
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Linear, Scores
from rl_dialog.models.heads import LowRankHead, MLPHead
from rl_dialog.models.policy import Policy

Decode = Callable[[Outputs], Tensor]  # a policy: (S, V) logits
Table = Callable[[Outputs], Tensor]  # (S, V) Q values of some states


@dataclass(frozen=True)
class FQE:
    """How Q of a policy is fitted."""

    steps: int = 1000
    """updates; values travel backwards one token per averaging time 1/alpha, so long dialogs need more"""
    batch_size: int = 32
    """rows per update"""
    learning_rate: float = 3e-3
    """learning rate of Adam, which falls linearly to zero"""
    alpha: float = 0.1
    """Polyak rate of the target, once per update"""
    heads: Literal["lowrank", "mlp"] = "lowrank"
    """shape of the Q head; lowrank gives tokens that the logs never took the value of their state, mlp starts
    them at the mean return"""
    rank: int = 64
    """rank of a lowrank head"""
    dialogs: int = 2000
    """most training dialogs; 0 takes all. Hidden states and critic features of their replies are held in
    memory"""

    def check(self) -> None:
        """Raises UserError for settings that make no sense."""
        if (
            min(self.steps, self.batch_size, self.rank) < 1
            or self.dialogs < 0
            or self.learning_rate <= 0
            or not 0 < self.alpha <= 1
        ):
            raise UserError(
                "--fqe: expected steps, batch_size, rank >= 1, dialogs >= 0, learning_rate > 0 and 0 < alpha "
                f"<= 1, got {self}"
            )


@dataclass(frozen=True)
class Piece:
    """Some rows and what the frozen policy says about them."""

    batch: Batch
    out: Outputs  # out.lm is Linear: its features are the hidden states


@dataclass(frozen=True)
class FittedQ:
    """What a fit says about rows that it did not learn from."""

    first: np.ndarray  # (B,) E_pi Q in the first decision state of each row
    td_error: np.ndarray  # (B,) sum of squared TD errors over the row's decisions
    decisions: np.ndarray  # (B,) those with a TD error: where the reward is known


@torch.no_grad()
def read_pieces(policy: Policy, rows: Sequence[Row], *, batch_size: int) -> list[Piece]:
    """`rows` in their order, `batch_size` at a time, through the frozen policy once. Online Q heads, which no
    policy acts by, are dropped."""
    pieces = []
    for start in range(0, len(rows), batch_size):
        batch = collate(rows[start : start + batch_size], bootstraps=True).to(policy.device)
        out = policy.outputs(batch)
        pieces.append(Piece(batch, Outputs(out.lm, q_target=out.q_target or out.q, v=out.v)))
    return pieces


def fit(
    pieces: Sequence[Piece],
    decode: Decode,
    settings: FQE,
    *,
    gamma: float = 1.0,
    discount: str = "token",
    seed: int = 0,
    quiet: bool = True,
) -> nn.Module:
    """The averaged Q head of the policy that samples from softmax(decode). Deterministic given `seed`; global
    random state stays as it was."""
    settings.check()
    unit, level = spread_of_returns(pieces)
    q = new_head(pieces[0].out, settings, seed=seed, unit=unit, level=level)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=settings.learning_rate)
    order = np.random.default_rng([seed, 1])
    waiting: list[int] = []
    # A constant, so that a decision weighs the same in a piece of few rows, such as the last one.
    usual = sum(int(has_target(piece.batch).sum()) for piece in pieces) / len(pieces)
    for step in trange(
        settings.steps, desc="fqe", unit=" updates", disable=True if quiet else None, leave=False
    ):
        waiting = waiting or order.permutation(len(pieces)).tolist()
        piece = pieces[waiting.pop()]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / settings.steps)
        error = td_errors(q, target, piece, decode, gamma=gamma, discount=discount) / unit
        optimizer.zero_grad(set_to_none=True)
        (error.square().sum() / max(1.0, usual)).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(q.parameters()), settings.alpha)
    return target


class InUnits(nn.Module):
    """A head that learns in a unit of its own and speaks in units of reward."""

    def __init__(self, head: nn.Module, unit: float) -> None:
        super().__init__()
        self.head, self.unit = head, unit

    def forward(self, hidden: Tensor, lm: Linear) -> Scores:
        """hidden (S, H), the LM's scores -> Scores (S, V)."""
        return self.head(hidden, lm).scaled(self.unit)


def spread_of_returns(pieces: Sequence[Piece]) -> tuple[float, float]:
    """(standard deviation, mean) of what followed each rated reply as far as it is known, behind the cut of a
    long conversation too, undiscounted; where all are equal their size, or 1, for the spread."""
    followed = torch.cat([_followed(piece.batch) for piece in pieces]).double()
    if not len(followed):
        return 1.0, 0.0
    spread, level = float(followed.std(correction=0)), float(followed.mean())
    return spread if spread > 1e-6 * abs(level) else abs(level) or 1.0, level


def _followed(batch: Batch) -> Tensor:
    nothing = batch.rewards.new_zeros(len(batch.states))  # of what nobody knows
    return returns(batch, 1.0, "turn", bootstrap=nothing)[batch.turn_end & batch.rated]


def new_head(out: Outputs, settings: FQE, *, seed: int, unit: float, level: float) -> nn.Module:
    """A Q head over the features of `out.lm`, in units of `unit`, which begins at `level`."""
    vocabulary, hidden = out.lm.weight.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = (
            MLPHead(hidden, vocabulary)
            if settings.heads == "mlp"
            else LowRankHead(hidden, vocabulary, settings.rank)
        )
    head.start.data.fill_(level / unit)
    return InUnits(head, unit).to(out.lm.weight.device)


def td_errors(
    q: nn.Module, target: nn.Module, piece: Piece, decode: Decode, *, gamma: float, discount: str
) -> Tensor:
    """(N,) Q(s,a) - r - gamma E_pi Q'(s',.) of the logged decisions, 0 where r is missing.

    The gradient goes into Q(s,a) only.
    """
    batch, out = piece.batch, piece.out
    next_value = expected(table_of(target), piece.out, decode)[batch.next_state]
    y = batch.rewards + discounts(batch, gamma, discount) * next_value
    return (q(out.lm.features, out.lm).at(batch.actions) - y).masked_fill(~has_target(batch), 0.0)


def has_target(batch: Batch) -> Tensor:
    """(N,) bool: what the decision earned is known. Inside a reply that is nothing, rated or not."""
    return batch.rated | ~batch.turn_end


def table_of(head: nn.Module) -> Table:
    """The Q values that a head gives some states."""
    return lambda out: head(out.lm.features, out.lm).dense()


@torch.no_grad()
def expected(table: Table, out: Outputs, decode: Decode) -> Tensor:
    """(S,) sum_a pi(a|s) Q(s,a), exact over the vocabulary, a chunk of states at a time."""
    values = []
    for chunk in out.lm.parts():
        states = Outputs(
            out.lm.rows(chunk),
            q_target=tuple(head.rows(chunk) for head in out.q_target),
            v=None if out.v is None else out.v[chunk],
        )
        values.append((decode(states).float().softmax(1) * table(states)).sum(1))
    return torch.cat(values)


@torch.no_grad()
def evaluate_q(
    q: nn.Module, pieces: Sequence[Piece], decode: Decode, *, gamma: float = 1.0, discount: str = "token"
) -> FittedQ:
    """The value of first states, and the TD errors, of rows that were left out of the fit."""
    first_values, squares, counts = [], [], []
    for piece in pieces:
        rows = piece.batch.rows
        count = torch.bincount(rows[has_target(piece.batch)], minlength=piece.batch.dialogs)
        error = td_errors(q, q, piece, decode, gamma=gamma, discount=discount)
        first_values.append(at_first(piece, expected(table_of(q), piece.out, decode)))
        squares.append(torch.bincount(rows, error.square().double(), minlength=len(count)))
        counts.append(count)
    return FittedQ(*(torch.cat(values).double().cpu().numpy() for values in (first_values, squares, counts)))


def at_first(piece: Piece, values: Tensor) -> Tensor:
    """(B,) those of `values` (S,) that belong to the first decision of each row."""
    count = torch.bincount(piece.batch.rows, minlength=piece.batch.dialogs)
    return values[count.cumsum(0) - count]
