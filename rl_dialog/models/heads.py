"""Q and V heads on the hidden states of a language model."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from rl_dialog.errors import UserError
from rl_dialog.methods.method import Heads
from rl_dialog.methods.scores import Linear, LowRank, Scores


class MLPHead(nn.Module):
    """Q as published: H -> 2H -> V with a ReLU between. The output layer starts at zero, so that Q does."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, 2 * hidden)
        self.out = nn.Linear(2 * hidden, vocabulary)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, lm: Linear) -> Scores:
        """hidden (S, H) -> Scores (S, V)."""
        return Linear(self.inner(hidden).relu_(), self.out.weight, self.out.bias)

    @property
    def start(self) -> Tensor:
        """What every value is before anything is learned."""
        return self.out.bias


class DuelingHead(MLPHead):
    """An MLPHead whose state has a level of its own: Q(s, a) = level(s) + A(s, a).

    What a state is worth is learned once, not once for every token, and a token that the logs never took is
    worth what the state is.
    """

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__(hidden, vocabulary)
        self.level = nn.Linear(2 * hidden, 1)
        nn.init.zeros_(self.level.weight)
        nn.init.zeros_(self.level.bias)

    def forward(self, hidden: Tensor, lm: Linear) -> Scores:
        """hidden (S, H) -> Scores (S, V)."""
        features = self.inner(hidden).relu_()
        return Linear(features, self.out.weight, self.out.bias, self.level(features).squeeze(1).float())

    @property
    def start(self) -> Tensor:
        return self.level.bias


class AdvancedMLPHead(nn.Module):
    """Q from the MLP half of a transformer block, as Snell et al. name it: H -> 4H -> H with a GELU, added to
    its input, normalised, then H -> V."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * hidden, hidden),
        )
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, vocabulary)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, lm: Linear) -> Scores:
        """hidden (S, H) -> Scores (S, V)."""
        return Linear(self.norm(hidden + self.inner(hidden)), self.out.weight, self.out.bias)

    @property
    def start(self) -> Tensor:
        return self.out.bias


class LowRankHead(nn.Module):
    """Q = scale * log pi_LM + a rank-R correction + an offset of the state: V x R numbers instead of V x 2H.
    Starts at zero."""

    def __init__(self, hidden: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, rank)
        self.out = nn.Parameter(torch.zeros(vocabulary, rank))
        self.offset = nn.Linear(rank, 1)
        self.scale = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.offset.weight)
        nn.init.zeros_(self.offset.bias)

    def forward(self, hidden: Tensor, lm: Linear) -> Scores:
        """hidden (S, H), the LM's scores -> Scores (S, V)."""
        features = torch.nn.functional.gelu(self.inner(hidden))
        return LowRank(lm, self.scale, features, self.out, self.offset(features).squeeze(1).float())

    @property
    def start(self) -> Tensor:
        return self.offset.bias


class ValueHead(nn.Module):
    """V of a state, or Q of a whole reply in the state it leads to: H -> 2H -> 1."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, 2 * hidden)
        self.out = nn.Linear(2 * hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., H) -> (...)."""
        return self.out(self.inner(hidden).relu_()).squeeze(-1).float()

    @property
    def start(self) -> Tensor:
        return self.out.bias


class ValueHeads(nn.Module):
    """The Q heads, their targets and the V head that a method asks for."""

    def __init__(self, heads: Heads, hidden: int, vocabulary: int, *, kind: str, rank: int) -> None:
        super().__init__()
        new = {
            "dueling": DuelingHead,
            "mlp": MLPHead,
            "advanced_mlp": AdvancedMLPHead,
            "lowrank": partial(LowRankHead, rank=rank),
        }
        if kind not in new:
            raise UserError(f"expected heads {', '.join(map(repr, new))}, got {kind!r}")
        self.q = nn.ModuleList(new[kind](hidden, vocabulary) for _ in range(heads.q))
        self.q_target = copy.deepcopy(self.q).requires_grad_(False) if heads.target else nn.ModuleList()
        self.v = ValueHead(hidden) if heads.v else None
        self.utterance_q = nn.ModuleList(ValueHead(hidden) for _ in range(heads.utterance_q))
        self.utterance_q_target = copy.deepcopy(self.utterance_q).requires_grad_(False)

    @torch.no_grad()
    def start_at(self, value: float) -> None:
        """Every value begins as this number, so that what is learned first is not how high returns are."""
        for head in (
            *self.q,
            *self.q_target,
            *([self.v] if self.v else []),
            *self.utterance_q,
            *self.utterance_q_target,
        ):
            head.start.fill_(value)
