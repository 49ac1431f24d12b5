"""A score for every token of the vocabulary in each of S states, computed only as far as a loss needs it.

Token logits and Q values have the shape (S, V), and V is large: one vocabulary-wide tensor costs more than the transformer below it. A TD error needs
the taken token's row alone (`at`); a cross-entropy needs all of V for a moment (`nll`, in chunks, gradients included); only decoding needs `dense`.

The first N states are the decisions of a batch (data/batch.py), so `at` and `nll` take the N actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # numbers in one chunk of scores (4 MB in float32: it stays in cache between the passes of a softmax)


class Scores(ABC):
    """Scores of V tokens in S states."""

    @abstractmethod
    def at(self, actions: Tensor) -> Tensor:
        """(N,) the scores of `actions` (N,) in the first N states."""

    @abstractmethod
    def at_each(self, tokens: Tensor) -> Tensor:
        """(S, K) the scores of K tokens per state, `tokens` (S, K)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """(S, V)."""

    @abstractmethod
    def reduce(self, how: str) -> Tensor:
        """(S,) without gradient: `max` or `logsumexp` over the vocabulary."""

    @abstractmethod
    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(sum of weight * -log softmax(scores)[action] over the first N states, the N unweighted terms without gradient)."""


class Dense(Scores):
    """Scores that exist as a tensor (S, V): tables, tests, small vocabularies."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def at(self, actions: Tensor) -> Tensor:
        return self.scores[: len(actions)].gather(1, actions[:, None]).squeeze(1)

    def at_each(self, tokens: Tensor) -> Tensor:
        return self.scores.gather(1, tokens)

    def dense(self) -> Tensor:
        return self.scores

    def reduce(self, how: str) -> Tensor:
        scores = self.scores.detach()
        return scores.amax(1) if how == "max" else scores.logsumexp(1)

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(self.scores[: len(actions)], actions, reduction="none")
        return (each if weight is None else each * weight).sum(), each.detach()


class Linear(Scores):
    """scores = features @ weight.T + bias, never built for more than a chunk of states. features (S, F), weight (V, F), bias (V,) or None."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self.features, self.weight, self.bias = features, weight, bias
        self._lse: Tensor | None = None

    def at(self, actions: Tensor) -> Tensor:
        rows = F.embedding(actions, self.weight)  # (N, F)
        score = (self.features[: len(actions)].float() * rows).sum(1)
        return score if self.bias is None else score + self.bias[actions]

    def at_each(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.weight)  # (S, K, F)
        scores = torch.einsum("skf,sf->sk", rows, self.features.to(rows.dtype))
        return scores if self.bias is None else scores + self.bias[tokens]

    def dense(self) -> Tensor:
        return F.linear(self.features, self.weight, self.bias).float()

    @torch.no_grad()
    def reduce(self, how: str) -> Tensor:
        if how == "logsumexp" and self._lse is not None and len(self._lse) == len(self.features):
            return self._lse
        parts = []
        for features in self.features.split(_chunk(len(self.weight))):
            scores = F.linear(features, self.weight, self.bias).float()
            parts.append(scores.amax(1) if how == "max" else scores.logsumexp(1))
        reduced = torch.cat(parts)
        if how == "logsumexp":
            self._lse = reduced
        return reduced

    def lse(self, count: int) -> Tensor:
        """(count,) the log-sum-exp of the first states, without gradient; free after `nll`."""
        if self._lse is None or len(self._lse) < count:
            self._lse = Linear(self.features[:count].detach(), self.weight, self.bias).reduce("logsumexp")
        return self._lse[:count]

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(actions), device=actions.device) if weight is None else weight.detach().float()
        inputs = (self.features[: len(actions)], self.weight, self.bias)
        if not torch.is_grad_enabled():  # an autograd.Function cannot see this, and would work out gradients for nothing
            inputs = tuple(None if tensor is None else tensor.detach() for tensor in inputs)
        total, each, self._lse = _LinearNLL.apply(*inputs, actions, ones)
        return total, each


class LowRank(Scores):
    """scores = scale * log softmax(base) + features @ weight.T + offset: an LM head, without gradient into it, plus a low-rank correction.

    base: the LM's Linear scores; scale (); features (S, R) with R << H; weight (V, R); offset (S,), which carries the state's value.
    """

    def __init__(self, base: Linear, scale: Tensor, features: Tensor, weight: Tensor, offset: Tensor) -> None:
        self.base = base
        self.scale, self.features, self.weight, self.offset = scale, features, weight, offset

    def at(self, actions: Tensor) -> Tensor:
        count = len(actions)
        with torch.no_grad():
            log_p = self.base.at(actions) - self.base.lse(count)
        delta = (self.features[:count].float() * F.embedding(actions, self.weight)).sum(1)
        return self.scale * log_p + delta + self.offset[:count]

    def at_each(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = self.base.at_each(tokens) - self.base.reduce("logsumexp")[:, None]
        rows = F.embedding(tokens, self.weight)  # (S, K, R)
        return self.scale * log_p + torch.einsum("skr,sr->sk", rows, self.features.to(rows.dtype)) + self.offset[:, None]

    def dense(self) -> Tensor:
        with torch.no_grad():
            log_p = self.base.dense().log_softmax(1)
        return self.scale * log_p + F.linear(self.features, self.weight).float() + self.offset[:, None]

    def reduce(self, how: str) -> Tensor:
        dense = self.dense().detach()
        return dense.amax(1) if how == "max" else dense.logsumexp(1)

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(actions), device=actions.device) if weight is None else weight.detach().float()
        base, count = self.base, len(actions)
        return _LowRankNLL.apply(
            base.features[:count].detach(), base.weight.detach(), base.bias, self.scale, self.features[:count], self.weight, actions, ones
        )


def _chunk(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocabulary)


def _softmax_(scores: Tensor, actions: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Turns scores (C, V) into d(weight * nll)/d(scores) in place; returns (nll, log-sum-exp), each (C,)."""
    taken = scores.gather(1, actions[:, None]).squeeze(1)
    top = scores.amax(1, keepdim=True)
    total = scores.sub_(top).exp_().sum(1, keepdim=True)
    lse = (top + total.log()).squeeze(1)
    scores.mul_(weight[:, None] / total)
    scores.scatter_add_(1, actions[:, None], -weight[:, None])
    return lse - taken, lse


class _LinearNLL(torch.autograd.Function):
    """Weighted cross-entropy of a linear layer with its gradient taken in the same pass over the chunk, so no (N, V) tensor is kept."""

    @staticmethod
    def forward(ctx, features, weight, bias, actions, ones):  # noqa: ANN001, ANN205
        table = weight.detach().to(features.dtype)
        need_features, need_weight = ctx.needs_input_grad[:2]
        grad_features = torch.empty_like(features) if need_features else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        each, lse = torch.empty_like(ones), torch.empty_like(ones)
        step = _chunk(len(weight))
        for start in range(0, len(actions), step):
            part = slice(start, start + step)
            scores = F.linear(features[part], table, bias).float()
            each[part], lse[part] = _softmax_(scores, actions[part], ones[part])
            gradient = scores.to(features.dtype)
            if need_features:
                torch.mm(gradient, table, out=grad_features[part])
            if need_weight:
                grad_weight.addmm_(gradient.t().to(weight.dtype), features[part].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += scores.sum(0)
        ctx.save_for_backward(grad_features, grad_weight, grad_bias)
        ctx.mark_non_differentiable(each, lse)
        return (each * ones).sum(), each, lse

    @staticmethod
    def backward(ctx, gradient, *_):  # noqa: ANN001, ANN205
        return (*(None if g is None else g.mul_(gradient) for g in ctx.saved_tensors), None, None)


class _LowRankNLL(torch.autograd.Function):
    """The same for scores = scale * base + features @ weight.T; the state's offset cancels in a softmax, and the base gets no gradient."""

    @staticmethod
    def forward(ctx, base_features, base_weight, base_bias, scale, features, weight, actions, ones):  # noqa: ANN001, ANN205
        grad_scale, grad_features, grad_weight = torch.zeros_like(scale), torch.empty_like(features), torch.zeros_like(weight)
        table, each = weight.detach().to(features.dtype), torch.empty_like(ones)
        step = _chunk(len(weight))
        for start in range(0, len(actions), step):
            part = slice(start, start + step)
            base = F.linear(base_features[part], base_weight.to(base_features.dtype), base_bias).float()
            scores = torch.addmm(base, features[part].float(), table.float().t(), beta=float(scale)).float()  # autocast makes bfloat16
            each[part], _ = _softmax_(scores, actions[part], ones[part])
            grad_scale += torch.dot(scores.flatten(), base.flatten())
            grad_features[part] = scores.to(features.dtype) @ table
            grad_weight.addmm_(scores.t().to(weight.dtype), features[part].to(weight.dtype))
        ctx.save_for_backward(grad_scale, grad_features, grad_weight)
        ctx.mark_non_differentiable(each)
        return (each * ones).sum(), each

    @staticmethod
    def backward(ctx, gradient, *_):  # noqa: ANN001, ANN205
        scale, features, weight = (g.mul_(gradient) for g in ctx.saved_tensors)
        return None, None, None, scale, features, weight, None, None
