"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): good and bad replies, no pairs
needed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.data.missing import judged_by, unrated
from rl_dialog.data.tokenize import Row, rewards_of_dialogs
from rl_dialog.errors import UserError
from rl_dialog.methods.backup import log_ratios, row_log_ratios
from rl_dialog.methods.dpo import replies
from rl_dialog.methods.method import Loss, Method, Outputs, check_ranges


@dataclass(frozen=True)
class KTO(Method):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024), from good and bad replies.

    L = w (1 - sigmoid(beta (g - z))) - clone_weight log pi(y|s) for a good reply, w (1 - sigmoid(beta (z -
    g))) for a bad one, averaged over replies,

    g = log pi(y|s) - log p(y|s), p the frozen prior, z = max(0, mean over the update of the same for replies
    that belong to other contexts), an estimate of KL(pi||p) without gradient. Every reply stands beside such
    a stranger, so a batch holds twice as many rows. The mean is over the whole update, on all workers: that
    of a micro-batch would depend on which rows met, and rows of like length meet.
    """

    beta: float = 0.1
    """how strongly the prior holds"""
    threshold: float | None = None
    """a reply is good when its reward is above this; by default above the training split's mean, or where
    fewer than one reply in twenty are above or below that, above the reward that halves them best"""
    desirable_weight: float | None = None
    """w of good replies; by default both kinds weigh the same in all, and 1 on average"""
    undesirable_weight: float | None = None
    """w of bad replies; by default as above"""
    clone_weight: float = 0.1
    """weight of -log pi(y|s) of good replies: without it mass may go to what nobody said; 0 as published"""
    by: Literal["auto", "reply", "to_go"] = "auto"
    """a reply's reward: its own, or the sum of the known rewards from it to the end of its dialog; auto:
    to_go, unless most replies are unrated"""

    rows_per_unit: ClassVar[int] = 2
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        weights = ("desirable_weight", "undesirable_weight", "clone_weight")
        check_ranges(self, above_0=("beta",), at_least_0=weights)

    @property
    def uses_prior(self) -> bool:
        return True

    def prepare(
        self, train: Sequence[Row], validation: Sequence[Row], tokenizer: Any
    ) -> tuple[list[Row], list[Row]]:
        """Each reply, with 1 or -1 for good or bad in the place of its reward, beside its context with
        another reply, which has the weight w there.

        Replies without a reward are neither, and left out. Raises UserError when all are good or all bad.
        """
        by = judged_by(self.by, "to_go", rewards_of_dialogs(train), who="kto")
        all_rewards = np.concatenate([row.rewards if by == "reply" else row.returns for row in train])
        rewards = all_rewards[~np.isnan(all_rewards)].astype(float)
        if not len(rewards):
            problem = f"{len(all_rewards):,} without a reward: prepare with rewards, or train bc"
            raise UserError(f"kto: expected good and bad replies, got {problem}")
        threshold = _parting(rewards) if self.threshold is None else float(np.float32(self.threshold))
        good = int((rewards > threshold).sum())
        if good in (0, len(rewards)):
            raise UserError(
                f"kto: expected good and bad replies, got {good} of {len(rewards)} with a reward above "
                f"{threshold:g} (they are {rewards.min():g} to {rewards.max():g}){unrated(all_rewards)}: "
                "set --method.threshold, or prepare with rewards that differ"
            )
        # By weights that do not heed how many there are, good replies that are few would count as bad ones
        # where they are good less than every second time.
        shares = {1: good / len(rewards), -1: 1 - good / len(rewards)}
        given = {1: self.desirable_weight, -1: self.undesirable_weight}
        weights = {kind: 0.5 / shares[kind] if w is None else w for kind, w in given.items()}
        beside = partial(self._beside_strangers, threshold=threshold, by=by, weights=weights)
        return beside(train), beside(validation)

    def terms(self, batch: Batch) -> int:
        return len(batch.input_ids) // 2

    def measure(self, out: Outputs, batch: Batch) -> Tensor:
        """(2,) the sum of the strangers' log-ratios, and how many there are."""
        ratio = row_log_ratios(out.lm, batch)[1::2]
        return torch.stack([ratio.sum(), ratio.new_tensor(float(len(ratio)))])

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        metrics: dict[str, Tensor] = {}
        rewards = torch.zeros(len(batch.input_ids), device=batch.rewards.device).index_add(
            0,
            batch.rows,
            batch.rewards * batch.turn_end,  # once, also where each token has its reply's
        )
        label, weight = rewards[0::2], rewards[1::2]
        good, z = label > 0, (batch.measured[0] / batch.measured[1]).clamp(min=0)

        def of_rows(ratio: Tensor) -> Tensor:
            g = ratio[0::2]
            side = torch.where(good, g - z, z - g)
            metrics.update(
                kl=z * len(g),
                good=good.sum().float(),
                accuracy=(side > 0).float().sum(),
                reward_good=(self.beta * g * good).sum(),
            )
            metrics.update(reward_bad=(self.beta * g * ~good).sum())
            return (weight * (1 - torch.sigmoid(self.beta * side)) - self.clone_weight * g * good).sum()

        total = log_ratios(out.lm, batch, of_rows)
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def _beside_strangers(
        self, rows: Sequence[Row], threshold: float, by: str, weights: dict[int, float]
    ) -> list[Row]:
        all_replies = list(replies(rows, by=by))
        order = np.random.default_rng(0).permutation(len(all_replies))
        stranger = np.empty_like(order)
        stranger[order] = np.roll(order, 1)  # one round through all of them
        longest = max(
            (len(row.input_ids) for row in rows), default=0
        )  # where a stranger behind a long context is cut
        paired = []
        for (start, reward, row), place in zip(all_replies, stranger, strict=True):
            reply_start, _, theirs = all_replies[place]
            context, label = row.input_ids[:start], 1 if reward > threshold else -1
            stranger_ids = theirs.input_ids[reply_start:][: longest - start]
            paired.append(Row.of_reply(context, row.input_ids[start:], reward=label))
            paired.append(Row.of_reply(context, stranger_ids, reward=weights[label]))
        return paired


def _parting(rewards: np.ndarray) -> float:
    """Above which reward replies are good. A mean that a few outliers make leaves hardly any above it, and
    what is learned from three replies is no policy."""
    mean, fewest = float(rewards.mean()), 0.05
    if fewest <= (share := (rewards > mean).mean()) <= 1 - fewest:
        return mean
    lower = np.unique(rewards)[:-1]  # above the highest is none
    if not len(lower):
        return mean
    above = 1 - np.searchsorted(np.sort(rewards), lower, side="right") / len(rewards)
    best = int(np.abs(above - 0.5).argmin())
    if abs(above[best] - 0.5) < abs(share - 0.5):
        warnings.warn(
            f"kto: {share:.1%} of the replies earn more than the mean, {mean:g}, so good are those that earn "
            f"more than {lower[best]:g}, {above[best]:.0%}; --method.threshold says otherwise",
            stacklevel=3,
        )
        return float(lower[best])
    return mean
