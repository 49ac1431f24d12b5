"""The logits that a method acts on, as scores that can be learned through."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_dialog.methods.method import Method, Outputs
from rl_dialog.methods.scores import Dense, Scores

# Nats: log pi in `nll` of a token that the method never says (bcq outside its support, ilql behind its
# top_k). What it never says moves with the language model, so a policy that learns soon says what its prior
# never would; were that infinite, no episode would be better than another.
NEVER = -20.0


class Decoded(Scores):
    """`factor` times `method.decode(out)` (S, V), for methods that read `out.lm`, `out.q_target` and `out.v`
    to act. Gradients go where those of `out` go; `nll` works in chunks of states, as everywhere, and is
    finite (NEVER)."""

    def __init__(self, method: Method, out: Outputs, factor: float = 1.0) -> None:
        self.method, self.out, self.factor = method, out, factor

    @property
    def features(self) -> Tensor:
        """(S, H) the language model's states, which fitted values read (evaluation/fqe.py)."""
        return self.out.lm.features

    @property
    def weight(self) -> Tensor:
        """(V, H) its output layer."""
        return self.out.lm.weight

    def lse(self, count: int) -> Tensor:
        """(count,) the log-sum-exp in the first states, without gradient."""
        return self.rows(slice(0, count)).reduce("logsumexp")

    def at(self, actions: Tensor) -> Tensor:
        first = self.rows(slice(0, len(actions)))
        return first.dense().gather(1, actions[:, None]).squeeze(1)

    def at_each(self, tokens: Tensor) -> Tensor:
        return self.dense().gather(1, tokens)

    def dense(self) -> Tensor:
        logits = self.method.decode(self.out)
        return logits if self.factor == 1 else self.factor * logits

    def scaled(self, factor: float) -> Decoded:
        return self if factor == 1 else Decoded(self.method, self.out, self.factor * factor)

    def rows(self, part: slice) -> Decoded:
        out, v = self.out, self.out.v
        q = tuple(scores.rows(part) for scores in out.q_target)
        chosen = Outputs(out.lm.rows(part), q_target=q, v=None if v is None else v[part])
        return Decoded(self.method, chosen, self.factor)

    def parts(self) -> list[slice]:
        return self.out.lm.parts()

    @torch.no_grad()
    def reduce(self, how: str) -> Tensor:
        return torch.cat([Dense(self.rows(part).dense()).reduce(how) for part in self.parts()])

    def nll(self, actions: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        first = self.rows(slice(0, len(actions)))

        def of_part(part: slice) -> Tensor:
            log_pi = first.rows(part).dense().log_softmax(1)
            logp = log_pi.gather(1, actions[part, None]).squeeze(1)
            return -logp.masked_fill(logp.isneginf(), NEVER)

        each = [checkpoint(of_part, part, use_reentrant=False) for part in first.parts()]
        terms = torch.cat(each) if each else actions.new_zeros(0, dtype=torch.float32)
        return (terms if weight is None else weight.detach() * terms).sum(), terms.detach()
