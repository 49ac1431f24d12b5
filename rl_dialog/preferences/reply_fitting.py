"""How a reward model learns from preferences over replies, and judges beside it that learn next to nothing.

    pairs      two replies to one context, P(first preferred)    Bradley and Terry with noise, on both scores
    ratings    a reply and whether it is good                    -log sigmoid(score), of a bad one
                                                                 -log sigmoid(-score)

Pairs fix differences between replies to one context; ratings compare replies of all contexts, and so teach
from contexts with one reply, too."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_dialog.data.by_length import shuffled_batches
from rl_dialog.errors import UserError
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.reward_model import preference_loss
from rl_dialog.models.text_reward import Reads, TextReward
from rl_dialog.preferences.replies import Preferences, ReplyPair, conversation_of
from rl_dialog.preferences.segments import Reply
from rl_dialog.rewards.fitted import ReplyReward
from rl_dialog.rewards.tfidf import TfidfClassifier, TfidfSettings
from rl_dialog.rewards.words import words
from rl_dialog.training.fitting import Progress, minimise

Objective = Literal["pairs", "ratings", "both"]
Scores = dict[str, float]  # reply id -> score


@dataclass(frozen=True)
class Fitting:
    """How a reward model over text is fitted. Raises UserError for a number out of its range."""

    learning_rate: float = 1e-3
    """AdamW's learning rate at its highest, after a tenth of the steps; it falls to 0. 1e-5 is usual for a
    large pretrained model"""
    batch_size: int = 16
    """pairs, and as many ratings, that a step learns from"""
    epochs: float = 4.0
    """how often every pair and rating is seen"""
    noise: float = 0.1
    """share of preferences that are taken to be random: they bound what one label can do"""
    weight_decay: float = 0.01
    """weight decay of all matrices"""

    def __post_init__(self) -> None:
        if (
            self.batch_size < 1
            or not self.learning_rate > 0
            or not self.epochs > 0
            or not 0 <= self.noise < 1
            or self.weight_decay < 0
        ):
            raise UserError(
                "expected a batch of at least 1, learning rate and epochs above 0, noise in [0, 1) and "
                f"weight decay of at least 0, got {self}"
            )


def fit(
    reward: TextReward,
    pairs: Sequence[ReplyPair],
    ratings: Sequence[tuple[Reply, bool]] = (),
    *,
    settings: Fitting | None = None,
    seed: int = 0,
    progress: Progress = lambda step, steps, loss: None,
) -> None:
    """Trains all weights on pairs, on ratings (reply, is it good), or on both: the mean losses of a batch of
    each are added.

    Raises UserError where there is nothing to learn from.
    """
    settings = settings or Fitting()
    if not pairs and not ratings:
        raise UserError("expected preferences to learn from, got none but incomparable ones")
    torch.manual_seed(seed)  # dropout
    rows = _Rows(reward)
    compared = [(rows.of(pair.first), rows.of(pair.second), pair.preference) for pair in pairs]
    rated = [(rows.of(reply), bool(good)) for reply, good in ratings]
    steps = max(1, round(settings.epochs * max(len(compared), len(rated)) / settings.batch_size))
    compared_next = _batches(
        [max(len(first), len(second)) for first, second, _ in compared], settings.batch_size, seed
    )
    rated_next = _batches([len(row) for row, _ in rated], settings.batch_size, seed + 1)

    def batch_loss() -> Tensor:
        loss = (
            _pair_loss(reward, [compared[i] for i in next(compared_next)], settings.noise)
            if compared
            else 0.0
        )
        return loss + (_rating_loss(reward, [rated[i] for i in next(rated_next)]) if rated else 0.0)

    rate = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
    minimise(reward.model, batch_loss, steps=steps, **rate, progress=progress)
    reward.model.config.rated = bool(rated)


def new_reward(
    labels: Preferences, base: str, shape: Mapping[str, int], max_length: int, reads: Reads, *, seed: int = 0
) -> TextReward:
    """A model with a new head on a pretrained `base`, a folder or hub name, or a new encoder of this shape,
    whose tokenizer knows the words of the labels. Raises UserError for a base that cannot be loaded."""
    torch.manual_seed(seed)  # of the new weights
    if base:
        return TextReward.from_base(
            resolve(base) if Path(base).is_dir() else base, max_length=max_length, reads=reads
        )
    texts = (message["content"] for reply in labels.replies for message in conversation_of(reply))
    return TextReward.new(texts, **shape, max_length=max_length, reads=reads)


def fit_labels(
    reward: TextReward, labels: Preferences, *, objective: Objective, **arguments: Any
) -> TextReward:
    """Trains it on what the objective is about; itself. `arguments`: those of `fit`."""
    pairs = labels.pairs if objective != "ratings" else []
    ratings = [(rating.reply, rating.good) for rating in labels.ratings] if objective != "pairs" else []
    fit(reward, pairs, ratings, **arguments)
    return reward


def fit_words(labels: Preferences, settings: TfidfSettings | None = None) -> TfidfClassifier:
    """Word counts of rated replies or, where there are none, of those that were preferred or not.

    Raises UserError for too few texts to count words in.
    """
    rated = [(rating.reply.text, rating.good) for rating in labels.ratings]
    decided = [pair for pair in labels.pairs if pair.preference != 0.5]
    sides = ((reply, pair) for pair in decided for reply in (pair.first, pair.second))
    rated = rated or [(reply.text, (pair.preference > 0.5) == (reply is pair.first)) for reply, pair in sides]
    return TfidfClassifier.fit([text for text, _ in rated], [good for _, good in rated], settings)


def plain_judges(train: Preferences, test: Preferences) -> dict[str, Scores]:
    """Judge -> what it says of every reply of `test`, where it takes no more than a word count of `train`."""
    replies = {reply.id: reply for reply in test.replies}
    scores = {"longer reply": {id: float(len(words(reply.text))) for id, reply in replies.items()}}
    with suppress(UserError):  # too few texts to count words in: one judge less
        scores["words of the reply"] = score(fit_words(train), list(replies.values()))
    return scores


def score(reward: ReplyReward, replies: Sequence[Reply]) -> Scores:
    """Reply id -> its score."""
    different = {reply.id: reply for reply in replies}
    return dict(
        zip(different, reward.score(conversation_of(reply) for reply in different.values()), strict=True)
    )


def _pair_loss(
    reward: TextReward, batch: Sequence[tuple[list[int], list[int], float]], noise: float
) -> Tensor:
    first, second, preferred = zip(*batch, strict=True)
    scores = reward([*first, *second])  # both sides in one pass; dropout has a mask of its own for each
    first_scores, second_scores = scores[: len(first)], scores[len(first) :]
    return preference_loss(
        first_scores, second_scores, torch.tensor(preferred, device=scores.device), noise=noise
    ).mean()


def _rating_loss(reward: TextReward, batch: Sequence[tuple[list[int], bool]]) -> Tensor:
    rows, good = zip(*batch, strict=True)
    scores = reward(rows)
    return F.binary_cross_entropy_with_logits(
        scores, torch.tensor(good, dtype=scores.dtype, device=scores.device)
    )


class _Rows:
    """Every reply as tokens, once."""

    def __init__(self, reward: TextReward) -> None:
        self.reward, self.encoded = reward, {}

    def of(self, reply: Reply) -> list[int]:
        if reply.id not in self.encoded:
            self.encoded[reply.id] = self.reward.encode(conversation_of(reply))
        return self.encoded[reply.id]


def _batches(lengths: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """All places in random batches of similar length, over and over."""
    rng = random.Random(seed)
    while lengths:
        yield from shuffled_batches(lengths, size, rng)
