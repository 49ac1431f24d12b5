"""A score for every token of the vocabulary in each of S states, computed only as far as a loss needs it.

Token logits and Q values have the shape (S, V), and V is large: one vocabulary-wide tensor costs more than
the transformer below it. A TD error needs the taken token's row alone (`at`); a cross-entropy needs all of V
for a moment (`nll`, in chunks, gradients included); only decoding needs `dense`.

The first N states are the decisions of a batch (data/batch.py), so `at` and `nll` take the N actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Numbers in one chunk of scores, 64 MB in float32: enough rows for fast matrix products (with an eighth of it
# they take a sixth longer).
CHUNK_ELEMENTS = 1 << 24


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
    def scaled(self, factor: float) -> Scores:
        """factor times the scores; itself for a factor of 1."""

    @abstractmethod
    def rows(self, part: slice) -> Scores:
        """The same scores in some of the states."""

    @abstractmethod
    def parts(self) -> list[slice]:
        """The states in runs whose dense scores fit a chunk."""

    @abstractmethod
    def reduce(self, how: str) -> Tensor:
        """(S,) without gradient: `max` or `logsumexp` over the vocabulary."""

    @abstractmethod
    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(sum of weight * -log softmax(scores)[action] over the first N states, the N unweighted terms
        without gradient)."""


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

    def scaled(self, factor: float) -> Dense:
        return self if factor == 1 else Dense(self.scores * factor)

    def rows(self, part: slice) -> Dense:
        return Dense(self.scores[part])

    def parts(self) -> list[slice]:
        return [slice(None)]

    def reduce(self, how: str) -> Tensor:
        scores = self.scores.detach()
        return scores.amax(1) if how == "max" else scores.logsumexp(1)

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(self.scores[: len(actions)], actions, reduction="none")
        return (each if weight is None else each * weight).sum(), each.detach()


class Linear(Scores):
    """scores = features @ weight.T + bias + level, never built for more than a chunk of states.

    features (S, F), weight (V, F), bias (V,) or None, level (S,) of each state or None. With a cap c, what
    the level is added to is c tanh(x / c) of the rest x.
    """

    def __init__(
        self,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        level: Tensor | None = None,
        cap: float | None = None,
    ) -> None:
        self.features, self.weight, self.bias, self.level, self.cap = features, weight, bias, level, cap
        self._lse: Tensor | None = None  # of the first states, without their level, once something needed it
        self._dense: Tensor | None = (
            None  # decoding asks for logits several times: once for the LM, once for each low-rank head
        )

    def at(self, actions: Tensor) -> Tensor:
        rows = F.embedding(actions, self.weight)  # (N, F)
        score = (self.features[: len(actions)].float() * rows).sum(1)
        score = _capped(score if self.bias is None else score + self.bias[actions], self.cap)
        return score if self.level is None else score + self.level[: len(actions)]

    def at_each(self, tokens: Tensor) -> Tensor:
        if self._dense is not None and not torch.is_grad_enabled():
            return self._dense.gather(1, tokens)
        rows = F.embedding(tokens, self.weight)  # (S, K, F)
        scores = torch.einsum("skf,sf->sk", rows, self.features.to(rows.dtype))
        scores = _capped(scores if self.bias is None else scores + self.bias[tokens], self.cap)
        return scores if self.level is None else scores + self.level[:, None]

    def scaled(self, factor: float) -> Linear:
        bias, level, cap = (
            None if part is None else part * factor for part in (self.bias, self.level, self.cap)
        )
        return self if factor == 1 else Linear(self.features * factor, self.weight, bias, level, cap)

    def capped(self, cap: float) -> Linear:
        """These scores, softly held within +-cap."""
        return Linear(self.features, self.weight, self.bias, self.level, cap)

    def rows(self, part: slice) -> Linear:
        level = None if self.level is None else self.level[part]
        return Linear(self.features[part], self.weight, self.bias, level, self.cap)

    def parts(self) -> list[slice]:
        step = _chunk(len(self.weight))
        return [slice(start, start + step) for start in range(0, len(self.features), step)]

    def dense(self) -> Tensor:
        if not torch.is_grad_enabled() and self._dense is not None:
            return self._dense
        scores = _capped(F.linear(self.features, self.weight, self.bias).float(), self.cap)
        scores = scores if self.level is None else scores + self.level[:, None]
        if not torch.is_grad_enabled():
            self._dense = scores
        return scores

    @torch.no_grad()
    def reduce(self, how: str) -> Tensor:
        if how == "logsumexp" and self._lse is not None and len(self._lse) == len(self.features):
            return self._raised(self._lse)
        if self._dense is not None:
            parts = self._dense.split(_chunk(len(self.weight)))
            return torch.cat([part.amax(1) if how == "max" else _logsumexp(part) for part in parts])
        parts = []
        for part in self.features.split(_chunk(len(self.weight))):
            scores = _capped(F.linear(part, self.weight, self.bias).float(), self.cap)
            parts.append(scores.amax(1) if how == "max" else _logsumexp(scores))
        reduced = torch.cat(parts)
        if how == "logsumexp":
            self._lse = reduced
        return self._raised(reduced)

    def lse(self, count: int) -> Tensor:
        """(count,) the log-sum-exp of the first states, without gradient; free after `nll`."""
        if self._lse is None or len(self._lse) < count:
            unlevelled = Linear(self.features[:count].detach(), self.weight, self.bias, cap=self.cap)
            self._lse = unlevelled.reduce("logsumexp")
        return self._raised(self._lse[:count])

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return nll_together(self, (), actions, weight)[0]

    def _raised(self, reduced: Tensor) -> Tensor:
        """Maxima or log-sum-exps of the first states, raised by their level."""
        return reduced if self.level is None else reduced + self.level[: len(reduced)].detach()


class LowRank(Scores):
    """scores = scale * log softmax(base) + features @ weight.T + offset: an LM head, without gradient into
    it, plus a low-rank correction.

    base: the LM's Linear scores; scale (); features (S, R) with R << H; weight (V, R); offset (S,), which
    carries the state's value.
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
        return (
            self.scale * log_p
            + torch.einsum("skr,sr->sk", rows, self.features.to(rows.dtype))
            + self.offset[:, None]
        )

    def scaled(self, factor: float) -> LowRank:
        return (
            self
            if factor == 1
            else LowRank(
                self.base, self.scale * factor, self.features * factor, self.weight, self.offset * factor
            )
        )

    def rows(self, part: slice) -> LowRank:
        return LowRank(self.base.rows(part), self.scale, self.features[part], self.weight, self.offset[part])

    def parts(self) -> list[slice]:
        return self.base.parts()

    def dense(self) -> Tensor:
        with torch.no_grad():
            log_p = self.base.dense().log_softmax(1)
        return self.scale * log_p + F.linear(self.features, self.weight).float() + self.offset[:, None]

    def reduce(self, how: str) -> Tensor:
        dense = self.dense().detach()
        return dense.amax(1) if how == "max" else dense.logsumexp(1)

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights = _ones(actions) if weight is None else weight.detach().float()
        return _fused(self.base, (self,), actions, None, weights)[1]


class Mixture(Scores):
    """The log-probabilities of a weighted average of distributions, log sum_i w_i softmax(scores_i), plus
    `level` (S,). Without gradient."""

    def __init__(self, members: Sequence[Scores], log_weights: Tensor, level: Tensor | None = None) -> None:
        self.members, self.log_weights, self.level = (
            tuple(members),
            log_weights,
            level,
        )  # log_weights (members,)

    @torch.no_grad()
    def at(self, actions: Tensor) -> Tensor:
        return self._logp(actions) if self.level is None else self._logp(actions) + self.level[: len(actions)]

    def at_each(self, tokens: Tensor) -> Tensor:
        return self.dense().gather(1, tokens)

    @torch.no_grad()
    def dense(self) -> Tensor:
        average = self._average([member.dense().log_softmax(1) for member in self.members])
        return average if self.level is None else average + self.level[:, None]

    def scaled(self, factor: float) -> Scores:
        return self if factor == 1 else Dense(self.dense() * factor)

    def rows(self, part: slice) -> Mixture:
        return Mixture(
            [member.rows(part) for member in self.members],
            self.log_weights,
            None if self.level is None else self.level[part],
        )

    def parts(self) -> list[slice]:
        return self.members[0].parts()

    def reduce(self, how: str) -> Tensor:
        return torch.cat([Dense(self.rows(part).dense()).reduce(how) for part in self.parts()])

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        each = -self._logp(actions)
        return (each if weight is None else each * weight).sum(), each

    @torch.no_grad()
    def _logp(self, actions: Tensor) -> Tensor:
        return self._average([-member.nll(actions)[1] for member in self.members])

    def _average(self, log_p: list[Tensor]) -> Tensor:
        return torch.stack(
            [each + weight for each, weight in zip(log_p, self.log_weights, strict=True)]
        ).logsumexp(0)


def kl_divergence(log_pi: Tensor, log_p: Tensor) -> Tensor:
    """KL(pi || p) = sum_a pi(a) (log pi(a) - log p(a)) per row of two (S, V) tables of log-probabilities;
    actions with pi = 0 count 0."""
    pi = log_pi.exp()
    return torch.where(pi > 0, pi * (log_pi - log_p), 0.0).sum(1)


@torch.no_grad()
def kl_divergences(pi: Scores, p: Scores) -> Tensor:
    """(S,) KL(softmax(pi) || softmax(p)), a chunk of states at a time."""
    return torch.cat(
        [
            kl_divergence(pi.rows(part).dense().log_softmax(1), p.rows(part).dense().log_softmax(1))
            for part in pi.parts()
        ]
    )


def cross_entropy(scores: Scores, target: Scores) -> Tensor:
    """() -sum_a p(a) log softmax(scores)[a], summed over the states; p = softmax(target) gets no gradient.

    Chunks of states are computed again in the backward pass, so no (S, V) tensor is kept.
    """

    def part_of_it(part: slice) -> Tensor:
        with torch.no_grad():
            p = target.rows(part).dense().softmax(1)
        return -(p * scores.rows(part).dense().log_softmax(1)).sum()

    return sum(checkpoint(part_of_it, part, use_reentrant=False) for part in scores.parts())


def entropy(scores: Scores, weight: Tensor) -> Tensor:
    """() sum of weight * -sum_a pi(a) log pi(a) over the first states, pi = softmax(scores); weight (N,).

    Chunks of states are computed again in the backward pass, so no (S, V) tensor is kept.
    """

    def part_of_it(part: slice) -> Tensor:
        log_pi = first.rows(part).dense().log_softmax(1)
        nats = log_pi.masked_fill(log_pi.isneginf(), 0.0)  # a token that is never said adds 0, not 0 inf
        return -(weight[part] * (log_pi.exp() * nats).sum(1)).sum()

    first = scores.rows(slice(0, len(weight)))
    return sum(checkpoint(part_of_it, part, use_reentrant=False) for part in first.parts())


def nll_together(
    lm: Scores, q: Sequence[Scores], actions: Tensor, weight: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]:
    """`lm.nll(actions, weight)` and the unweighted `nll` of each of `q`. Low-rank corrections of `lm` share
    the pass that computes its logits."""
    if not isinstance(lm, Linear):
        return lm.nll(actions, weight), [scores.nll(actions) for scores in q]
    on_lm = [scores for scores in q if isinstance(scores, LowRank) and scores.base is lm]
    weights = _ones(actions) if weight is None else weight.detach().float()
    lm_terms, *q_terms = _fused(lm, on_lm, actions, weights, _ones(actions))
    shared = dict(zip(map(id, on_lm), q_terms, strict=True))
    return lm_terms, [shared[id(scores)] if id(scores) in shared else scores.nll(actions) for scores in q]


@torch.no_grad()
def reduce_minimum(heads: Sequence[Scores], how: str) -> Tensor:
    """(S,) `max` or `logsumexp` over the vocabulary of the minimum over several scores of each token, a chunk
    of states at a time."""
    if len(heads) == 1:
        return heads[0].reduce(how)
    reduced = []
    for chunk in heads[0].parts():
        lowest = reduce(torch.minimum, [scores.rows(chunk).dense() for scores in heads])
        reduced.append(lowest.amax(1) if how == "max" else _logsumexp(lowest))
    return torch.cat(reduced)


def _fused(
    base: Linear,
    corrections: Sequence[LowRank],
    actions: Tensor,
    base_weights: Tensor | None,
    weights: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """[(sum, terms) of base, (sum, terms) of each correction]; base_weights None leaves out base's own."""
    count = len(actions)
    inputs = [base.features[:count], base.weight, base.bias]
    for scores in corrections:
        inputs += [scores.scale, scores.features[:count], scores.weight]
    if (
        not torch.is_grad_enabled()
    ):  # an autograd.Function cannot see this, and would work out gradients for nothing
        inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
    lse, *terms = _NLL.apply(actions, base_weights, weights, base.cap, *inputs)
    if base_weights is not None:
        base._lse = lse
    return list(zip(terms[::2], terms[1::2], strict=True))


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _chunk(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocabulary)


def _ones(actions: Tensor) -> Tensor:
    return torch.ones(len(actions), device=actions.device)


def _logsumexp(scores: Tensor) -> Tensor:
    """(C,) of (C, V): measured several times as fast on a CPU as Tensor.logsumexp."""
    top = scores.amax(1, keepdim=True)
    return (top + (scores - top).exp_().sum(1, keepdim=True).log()).squeeze(1)


def _softmax_(scores: Tensor, actions: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Turns scores (C, V) into d(weight * nll)/d(scores) in place; returns (nll, log-sum-exp), each (C,)."""
    action_scores = scores.gather(1, actions[:, None]).squeeze(1)
    top = scores.amax(1, keepdim=True)
    total = scores.sub_(top).exp_().sum(1, keepdim=True)
    lse = (top + total.log()).squeeze(1)
    scores.mul_(weight[:, None] / total)
    scores.scatter_add_(1, actions[:, None], -weight[:, None])
    return lse - action_scores, lse


class _NLL(torch.autograd.Function):
    """Weighted cross-entropies of base = features @ weight.T + bias (softly held within +-cap, where there is
    one), and of corrections of it, scale * base + features @ weight.T.

    Gradients are taken in the same pass over a chunk, so no (N, V) tensor is kept and base is computed once
    for all. A correction sends no gradient into base; its state's offset cancels in a softmax. Returns base's
    log-sum-exp, then (sum, terms) of base and of each correction.
    """

    @staticmethod
    def forward(ctx, actions, base_weights, weights, cap, features, weight, bias, *corrections):  # noqa: ANN001, ANN205
        needed = [
            need and (base_weights is not None or i > 6) for i, need in enumerate(ctx.needs_input_grad)
        ][4:]
        inputs = (features, weight, bias, *corrections)
        matrices = torch.empty_like if len(actions) else torch.zeros_like  # the first chunk writes them whole
        gradients = [
            (matrices(tensor) if tensor.dim() == 2 else torch.zeros_like(tensor)) if needs_gradient else None
            for tensor, needs_gradient in zip(inputs, needed, strict=True)
        ]
        losses = [torch.zeros_like(weights) for _ in range(1 + len(corrections) // 3)]
        lse = torch.empty_like(weights)
        table = weight.detach().to(features.dtype)
        step = _chunk(len(weight))
        for start in range(0, len(actions), step):
            part = slice(start, start + step)
            base = torch.mm(features[part], table.t())
            base = (
                base if bias is None else base.add_(bias.to(base.dtype))
            ).float()  # faster than a product that starts from the bias
            base = _capped(base, cap)
            for i in range(0, len(corrections), 3):
                scale, low_features, rows = corrections[i : i + 3]
                grad_scale, grad_own, grad_rows = gradients[3 + i : 6 + i]
                scores = torch.addmm(
                    base, low_features[part].float(), rows.float().t(), beta=float(scale)
                ).float()  # autocast makes bfloat16
                losses[1 + i // 3][part], _ = _softmax_(scores, actions[part], weights[part])
                if grad_scale is not None:
                    grad_scale += torch.dot(scores.flatten(), base.flatten())
                _add_gradients(scores, low_features, rows, grad_own, grad_rows, part)
                del scores  # so that the next one gets the same memory, which is in cache
            if base_weights is not None:  # last, because it overwrites base
                slope = None if cap is None else 1 - (base / cap) ** 2  # d(cap tanh(x / cap)) / dx
                losses[0][part], lse[part] = _softmax_(base, actions[part], base_weights[part])
                base = base if slope is None else base.mul_(slope)
                _add_gradients(base, features, table, gradients[0], gradients[1], part)
                if gradients[2] is not None:
                    gradients[2] += base.sum(0)
            del base
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(lse, *losses)
        outputs = [lse]
        for i, terms in enumerate(losses):
            outputs += [(terms * (weights if i or base_weights is None else base_weights)).sum(), terms]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, _, *outer):  # noqa: ANN001, ANN205
        saved = ctx.saved_tensors  # three for each sum
        return (
            None,
            None,
            None,
            None,
            *(None if g is None else g.mul_(outer[2 * (i // 3)]) for i, g in enumerate(saved)),
        )


def _add_gradients(
    scores: Tensor,
    features: Tensor,
    table: Tensor,
    grad_features: Tensor | None,
    grad_table: Tensor | None,
    part: slice,
) -> None:
    """What d(loss)/d(scores) of a chunk is for the two factors of scores[part] = features[part] @ table.T."""
    if grad_features is not None:
        torch.mm(scores.to(features.dtype), table.to(features.dtype), out=grad_features[part])
    if grad_table is not None:
        product = scores.t().to(grad_table.dtype), features[part].to(grad_table.dtype)
        torch.addmm(grad_table, *product, beta=0 if part.start == 0 else 1, out=grad_table)
