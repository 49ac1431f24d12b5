"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290): of two replies to one context,
make the better one likelier."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.data.missing import judged_by
from rl_dialog.data.pairs import widest_pairs
from rl_dialog.data.tokenize import Row, rewards_of_dialogs
from rl_dialog.errors import UserError
from rl_dialog.methods.backup import log_ratios
from rl_dialog.methods.method import Loss, Method, Outputs, check_ranges


@dataclass(frozen=True)
class DPO(Method):
    """Direct preference optimisation (Rafailov et al. 2023), from pairs of replies.

    L = -(1 - eps) log sigmoid(h) - eps log sigmoid(-h), averaged over pairs,

    h = beta [(log pi(y+|s) - log p(y+|s)) - (log pi(y-|s) - log p(y-|s))], p the frozen prior,
    log-probabilities summed over a reply's tokens. The pairs (y+, y-) are made of the data: different replies
    to the same messages with different rewards, which are means where a reply was said more than once.
    Replies without a reward are in none.
    """

    beta: float = 0.1
    """how strongly the prior holds"""
    label_smoothing: float = 0.0
    """eps, the share of pairs that are taken to be labelled the wrong way round"""
    by: Literal["auto", "reply", "to_go"] = "auto"
    """what makes a reply the better one: its own reward, or the sum of the known rewards from it to the end
    of its dialog; auto: to_go, unless most replies are unrated"""
    margin: float = 0.0
    """a pair's rewards differ by more than this"""
    pairs_per_context: int = 8
    """most pairs of one context, those with the largest difference first"""

    rows_per_unit: ClassVar[int] = 2
    learning_rate_share: ClassVar[float] = 0.2
    least_updates: ClassVar[int] = 0  # pairs are few, and more passes take mass from all that was said

    def __post_init__(self) -> None:
        check_ranges(
            self,
            above_0=("beta",),
            at_least_0=("margin",),
            at_least_1=("pairs_per_context",),
            shares=("label_smoothing",),
        )

    @property
    def uses_prior(self) -> bool:
        return True

    def prepare(
        self, train: Sequence[Row], validation: Sequence[Row], tokenizer: Any
    ) -> tuple[list[Row], list[Row]]:
        """Pairs as neighbours, the better one first. Raises UserError when the training split has none."""
        by = judged_by(self.by, "to_go", rewards_of_dialogs(train), who="dpo")
        pairs = list(self._pairs(train, by))
        if not pairs:
            raise UserError(
                "dpo: expected contexts with two different replies of different reward, found none in the "
                "training split: make some with `pipelines.candidates`, or train kto, which needs no pairs"
            )
        return pairs, list(self._pairs(validation, by))

    def terms(self, batch: Batch) -> int:
        return len(batch.input_ids) // 2

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        metrics: dict[str, Tensor] = {}

        def of_rows(ratio: Tensor) -> Tensor:
            better, worse = self.beta * ratio[0::2], self.beta * ratio[1::2]  # (pairs,)
            h = better - worse
            metrics.update(
                accuracy=(h > 0).float().sum(),
                margin=h.sum(),
                reward_better=better.sum(),
                reward_worse=worse.sum(),
            )
            return -(
                (1 - self.label_smoothing) * F.logsigmoid(h) + self.label_smoothing * F.logsigmoid(-h)
            ).sum()

        total = log_ratios(out.lm, batch, of_rows)
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def _pairs(self, rows: Sequence[Row], by: str) -> Iterator[Row]:
        by_context: dict[bytes, dict[bytes, list[float]]] = defaultdict(lambda: defaultdict(list))
        for start, reward, row in replies(rows, by=by):
            by_context[row.input_ids[:start].tobytes()][row.input_ids[start:].tobytes()].append(reward)
        for context, earned in by_context.items():
            candidates = [(fmean(rewards), reply) for reply, rewards in earned.items()]
            for pair in widest_pairs(candidates, margin=self.margin, most=self.pairs_per_context):
                for reward, reply in pair:
                    tokens = (np.frombuffer(side, np.int32) for side in (context, reply))
                    yield Row.of_reply(*tokens, reward=reward)


def replies(rows: Sequence[Row], *, by: str) -> Iterator[tuple[int, float, Row]]:
    """(first token, reward, the row cut behind it, with nothing else to learn from) of every rated reply."""
    for row in rows:
        rewards = row.rewards if by == "reply" else row.returns
        for start, end, reward in zip(row.reply_starts, row.reply_ends, rewards.tolist(), strict=True):
            if not math.isnan(reward):
                context, reply = row.input_ids[:start], row.input_ids[start : end + 1]
                yield int(start), reward, Row.of_reply(context, reply, reward=reward)
