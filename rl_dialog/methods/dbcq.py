"""Batch-constrained by sampling: of n words that the cloned LM would say, say the one of the highest value
(Jaques et al. 2019, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rl_dialog.errors import UserError
from rl_dialog.methods.backup import minimum
from rl_dialog.methods.bcq import BCQ
from rl_dialog.methods.method import Outputs


@dataclass(frozen=True)
class DBCQ(BCQ):
    """Double Q-learning over samples of the clone (Jaques et al. 2019); it says the best of them.

    Double Q-learning with the maximum over what the LM might say; acts on argmax of min_i Q'_i(s,a) over
    a_1..a_n ~ p(.|s), p the cloning LM.

    The token so chosen has a distribution of closed form: with tokens in order of their Q and F the cumulated
    p, pi(a) = F(a)^n - F(a-)^n. So nothing is drawn here, and `generate` samples from the exact pi; n = 1 is
    p itself, and without end it is the best token of p's support.
    """

    samples: int = 2
    """n, tokens drawn from the LM: more lean further on Q, also where it is wrong"""
    threshold: float = 0.1
    """smallest share of the likeliest token's probability that counts in the backup; 0, as published, counts
    every token"""

    acts_with_beta: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1 or self.beta not in (None, 4.0):  # 4 stands in older checkpoints, without effect
            raise UserError(
                "dbcq: expected samples of at least 1 and no beta (the best sample is taken), got "
                f"{self.samples} and {self.beta}"
            )
        if not self.include_logits:
            raise UserError("dbcq: expected include_logits, the tokens are drawn from the LM")

    def suited(self, strength: float) -> DBCQ:
        return self

    def in_rewards(self, unit: float) -> dict[str, float]:
        return {}

    def decode(self, out: Outputs) -> Tensor:
        p = out.lm.dense().double().softmax(1)
        order = minimum(tuple(q.dense() for q in out.q_target)).argsort(dim=1, stable=True)
        cumulated = p.gather(1, order).cumsum(1)
        cumulated = cumulated / cumulated[:, -1:]
        chances = cumulated**self.samples
        chances[:, 1:] -= cumulated[:, :-1] ** self.samples
        return p.scatter(1, order, chances).log().float()
