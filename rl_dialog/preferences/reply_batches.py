"""What an update of a reward model over replies learns from: which pairs and ratings, in which parts, and
their losses.

The rows of an update are drawn regardless of their lengths, and its loss is divided by their number, so that
short and long replies weigh the same whoever they meet. Inside it they are sorted by length and cut into
parts, each of which is padded to its own longest row: `gradient_accumulation_steps` parts for each worker,
and worker r of n takes parts r, r + n, ... So neither the number of parts nor that of workers changes what is
learned, but for rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl_dialog.models.reward_model import preference_loss
from rl_dialog.models.text_reward import Chain, TextReward
from rl_dialog.preferences.replies import ReplyPair, conversation_of, judged_in
from rl_dialog.preferences.segments import Reply, Spoken


@dataclass(frozen=True)
class Worker:
    """One of `count` processes that learn together. `together`: called with the model and the loss of this
    one's share once its gradients are there; adds up those of all, and returns the loss of all. `agreed`: a
    number that all computed, as the first one has it: what all go by may not differ in its last bit."""

    rank: int = 0
    count: int = 1
    together: Callable[[nn.Module, float], float] = lambda model, loss: loss
    agreed: Callable[[float], float] = lambda number: number


ALONE = Worker()


@dataclass(frozen=True)
class Compared:
    """A pair with both sides as tokens: a reply, or those of a conversation."""

    first: list[Chain]
    second: list[Chain]
    pair: ReplyPair

    @property
    def length(self) -> int:
        return max(len(row) for row, _ in self.first + self.second)


@dataclass(frozen=True)
class Rated:
    """A reply as tokens, and whether it is good."""

    row: list[int]
    good: bool

    @property
    def length(self) -> int:
        return len(self.row)


class Rows:
    """Every reply as tokens, once."""

    def __init__(self, reward: TextReward) -> None:
        self.reward, self.encoded = reward, {}

    def of(self, reply: Reply) -> list[int]:
        """The reply behind its context."""
        if reply.id not in self.encoded:
            self.encoded[reply.id] = self.reward.encode(conversation_of(reply))
        return self.encoded[reply.id]

    def compared(self, pairs: Sequence[ReplyPair]) -> list[Compared]:
        return [Compared(self.all_of(pair.first), self.all_of(pair.second), pair) for pair in pairs]

    def all_of(self, spoken: Spoken) -> list[Chain]:
        """Every reply that is judged."""
        return self.reward.chains([self.of(reply) for reply in judged_in(spoken)])

    def rated(self, ratings: Sequence[tuple[Reply, bool]]) -> list[Rated]:
        return [Rated(self.of(reply), bool(good)) for reply, good in ratings]


def updates(rows: Sequence[Any], size: int, parts: int, seed: int, worker: Worker = ALONE) -> Iterator[Any]:
    """Endlessly (the parts of this worker, rows of the whole update): pass after pass in an order of its own,
    `size` rows at a time, or all where there are fewer."""
    rng, order, size = random.Random(seed), [], min(size, len(rows))
    while rows:
        while len(order) < size:
            order += rng.sample(range(len(rows)), len(rows))
        drawn, order = sorted(order[:size], key=lambda i: (rows[i].length, i)), order[size:]
        yield (
            [
                [rows[i] for i in part]
                for part in _cut(drawn, parts * worker.count)[worker.rank :: worker.count]
            ],
            size,
        )


def _cut(drawn: Sequence[int], parts: int) -> list[Sequence[int]]:
    """In so many pieces of equal size, as far as that goes; empty ones are left out."""
    ends = [len(drawn) * n // parts for n in range(parts + 1)]
    return [drawn[begin:end] for begin, end in zip(ends, ends[1:], strict=False) if begin < end]


def pair_losses(
    reward: TextReward, batch: Sequence[Compared], *, noise: float, margin: float = 0.0, centre: float = 0.0
) -> Tensor:
    """The weighted loss of each pair, and what keeps its scores around zero # (B,)"""
    pairs = [one.pair for one in batch]
    # both sides in one pass; dropout has a mask of its own for each
    first, second = sums(reward, [one.first for one in batch] + [one.second for one in batch]).chunk(2)
    told = lambda values: torch.tensor(list(values), dtype=first.dtype, device=first.device)  # noqa: E731
    preferred = told(pair.preference for pair in pairs)
    noises = told(max(noise, pair.noise) for pair in pairs)
    ahead = margin * told(pair.much * (2 * pair.preference - 1) for pair in pairs)
    loss = preference_loss(first - ahead, second, preferred, noise=noises)
    return loss * told(pair.weight for pair in pairs) + centre * (first + second) ** 2


def sums(reward: TextReward, sides: Sequence[Sequence[Chain]]) -> Tensor:
    """What each side's replies are worth together # (S,)"""
    scores = reward.along([chain for side in sides for chain in side])
    owner = [number for number, side in enumerate(sides) for _, ends in side for _ in ends]
    index = torch.tensor(owner, device=scores.device)
    return scores.new_zeros(len(sides)).index_add(0, index, scores)


def rating_losses(reward: TextReward, batch: Sequence[Rated]) -> Tensor:
    """The loss of each rating # (B,)"""
    scores = reward([one.row for one in batch])
    good = torch.tensor([one.good for one in batch], dtype=scores.dtype, device=scores.device)
    return F.binary_cross_entropy_with_logits(scores, good, reduction="none")
