"""How a reward model learns from preferences over replies, and judges beside it that learn next to nothing.

    pairs      two replies to one context, P(first preferred)    Bradley and Terry with noise, on both scores
    ratings    a reply and whether it is good                    -log sigmoid(score), of a bad one
                                                                 -log sigmoid(-score)

Pairs fix differences between replies to one context; ratings compare replies of all contexts, and so teach
from contexts with one reply, too."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rl_dialog.errors import UserError
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.reward_model import preference_loss
from rl_dialog.models.text_reward import Chain, Reads, TextReward, adapters, half_precision
from rl_dialog.preferences.replies import (
    Preferences,
    Rating,
    ReplyPair,
    conversation_of,
    group_of,
    judged_in,
)
from rl_dialog.preferences.reply_batches import (
    ALONE,
    Compared,
    Rated,
    Rows,
    Worker,
    pair_losses,
    rating_losses,
    sums,
    updates,
)
from rl_dialog.preferences.segments import Reply, Spoken
from rl_dialog.rewards.fitted import ReplyReward
from rl_dialog.rewards.tfidf import TfidfClassifier, TfidfSettings
from rl_dialog.rewards.words import words
from rl_dialog.training.fitting import Progress, minimise_in_parts

Objective = Literal["pairs", "ratings", "both"]
Scores = dict[str, float]  # reply id -> score
TOGETHER = 32  # held-out rows in a pass


@dataclass(frozen=True)
class Fitting:
    """How a reward model over text is fitted. Raises UserError for a number out of its range."""

    learning_rate: float | None = None
    """AdamW's learning rate at its highest, after a tenth of the steps; it falls to 0. By default 1e-3 for a
    model that was made here, and 1e-5 for a pretrained one (1e-4 for its adapters)"""
    batch_size: int = 16
    """pairs, and as many ratings, that a step learns from"""
    epochs: float = 4.0
    """how often every pair and rating is seen"""
    noise: float = 0.1
    """share of preferences that are taken to be random: they bound what one label can do"""
    weight_decay: float = 0.01
    """weight decay of all matrices"""
    margin: float = 0.0
    """by how much more a reply that people called much better must score than one that is slightly better"""
    centre: float = 0.0
    """coefficient of the mean of (first score + second score)^2, which keeps the scores of pairs around zero
    (Eisenstein et al. 2023); 0.01 is usual"""

    gradient_accumulation_steps: int = 1
    """parts in which a batch is computed, one after the other, where memory does not hold it at once; what is
    learned stays the same"""
    bf16: bool = False
    """compute in bfloat16; weights stay in float32"""
    use_peft: bool = False
    """learn LoRA adapters of all linear layers, and the head, instead of all weights; they are added to the
    weights in the end, so that the model is an ordinary one"""
    lora_r: int = 16
    """rank of the adapters"""
    lora_alpha: int = 32
    """how strongly the adapters count: lora_alpha / lora_r"""
    calibration: float = 0.0
    """share of the conversations that is set aside: its loss says when to stop, and the scores are divided by
    the temperature that suits it best. 0.1 is usual; 0 learns from all, for a fixed number of passes"""
    patience: int = 0
    """with calibration: passes without a smaller loss on what was set aside before the fitting ends; the best
    weights are kept; 0 takes all passes"""

    @property
    def noise_of_labels(self) -> float:
        """The share of random answers beside sigmoid(difference of scores), where that is to say what labels
        will be: a temperature has it in the scores already."""
        return 0.0 if self.calibration else self.noise

    def __post_init__(self) -> None:
        self._check_large()
        if (
            self.batch_size < 1
            or (self.learning_rate is not None and not 0 < self.learning_rate < math.inf)
            or not 0 < self.epochs < math.inf
            or not 0 <= self.noise < 1
            or not all(0 <= each < math.inf for each in (self.weight_decay, self.margin, self.centre))
        ):
            raise UserError(
                "expected a batch of at least 1, learning rate and epochs above 0, noise in [0, 1), "
                f"and weight decay, margin and centre of at least 0, got {self}"
            )

    def _check_large(self) -> None:
        if min(self.gradient_accumulation_steps, self.lora_r, self.lora_alpha) < 1 or self.patience < 0:
            raise UserError(
                "expected gradient_accumulation_steps, lora_r and lora_alpha of at least 1, and patience of "
                f"at least 0, got {self}"
            )
        if not 0 <= self.calibration < 1:
            raise UserError(f"--fitting.calibration: expected at least 0 and below 1, got {self.calibration}")
        if self.patience and not self.calibration:
            raise UserError(
                "--fitting.patience: expected --fitting.calibration, the share of conversations whose loss "
                "says when to stop"
            )


def fit(
    reward: TextReward,
    pairs: Sequence[ReplyPair],
    ratings: Sequence[tuple[Reply, bool]] = (),
    *,
    settings: Fitting | None = None,
    seed: int = 0,
    progress: Progress = lambda step, steps, loss: None,
    worker: Worker = ALONE,
) -> None:
    """Trains all weights, or adapters that are then added to them, on pairs, on ratings (reply, is it good),
    or on both: the mean losses of a batch of each are added. A share `calibration` of the conversations is
    set aside: it says when to stop, and by which temperature the scores are divided in the end.

    worker: which part of each update this process computes. Raises UserError where there is nothing to learn
    from.
    """
    settings = settings or Fitting()
    if not pairs and not ratings:
        raise UserError("expected preferences to learn from, got none but incomparable ones")
    torch.manual_seed(seed)  # adapters, which are the same for all workers
    rows = Rows(reward)
    learned, aside = _set_aside(pairs, ratings, settings.calibration, seed)
    compared, rated = rows.compared(learned.pairs), rows.rated(_said(learned))
    held_out = rows.compared(aside.pairs), rows.rated(_said(aside))
    with adapters(reward, settings.lora_r if settings.use_peft else 0, settings.lora_alpha):
        torch.manual_seed(seed + worker.rank)  # dropout
        most = max(len(compared), len(rated))
        stopping = _Stopping(reward, held_out, settings, most, worker)
        minimise_in_parts(
            reward.model,
            _losses(reward, compared, rated, settings, seed, worker),
            steps=max(1, round(settings.epochs * most / min(settings.batch_size, most))),
            learning_rate=learning_rate_of(reward, settings),
            weight_decay=settings.weight_decay,
            progress=progress,
            together=worker.together,
            is_done=stopping,
        )
        stopping.take_the_best()
    if any(held_out):
        reward.divide(temperature(reward, *held_out))
    reward.model.config.rated = bool(rated)


def learning_rate_of(reward: TextReward, settings: Fitting) -> float:
    """The one that is given, or that suits the model."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    return (1e-4 if settings.use_peft else 1e-5) if reward.pretrained else 1e-3


def _set_aside(
    pairs: Sequence[ReplyPair], ratings: Sequence[tuple[Reply, bool]], share: float, seed: int
) -> tuple[Preferences, Preferences]:
    """(to learn from, to calibrate with), by conversation."""
    labels = Preferences([*pairs], [Rating(reply, float(good), bool(good)) for reply, good in ratings])
    if not share:
        return labels, Preferences([], [])
    groups = sorted({group_of(reply) for reply in labels.replies}, key=lambda name: _draw(seed, name))
    kept = set(groups[: round(share * len(groups))])
    learned, aside = (
        labels.where(lambda reply, is_in=is_in: (group_of(reply) in kept) == is_in) for is_in in (False, True)
    )
    if not (learned.pairs or learned.ratings) or not (aside.pairs or aside.ratings):
        raise UserError(
            f"--fitting.calibration {share:g}: expected conversations on both sides, got {len(groups)} in all"
        )
    return learned, aside


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"calibration {seed}\0{name}".encode()).digest()


def _said(labels: Preferences) -> list[tuple[Reply, bool]]:
    return [(rating.reply, rating.good) for rating in labels.ratings]


def _losses(
    reward: TextReward,
    compared: Sequence[Compared],
    rated: Sequence[Rated],
    settings: Fitting,
    seed: int,
    worker: Worker,
) -> Callable[[], Iterator[Tensor]]:
    """The parts of the next update's loss, of this worker."""
    size, parts = settings.batch_size, settings.gradient_accumulation_steps
    pairs_next, ratings_next = (
        updates(rows, size, parts, seed + n, worker) for n, rows in enumerate((compared, rated))
    )
    given = {"noise": settings.noise, "margin": settings.margin, "centre": settings.centre}

    of_pairs = lambda batch: pair_losses(reward, batch, **given)  # noqa: E731
    of_ratings = lambda batch: rating_losses(reward, batch)  # noqa: E731

    def next_parts() -> Iterator[Tensor]:
        drawn = [(next(pairs_next), of_pairs)] if compared else []
        drawn += [(next(ratings_next), of_ratings)] if rated else []
        for (batches, count), losses in drawn:
            for batch in batches:
                with half_precision(reward, on=settings.bf16):
                    loss = losses(batch).sum() / count
                yield loss

    return next_parts


class _Stopping:
    """Ends the fitting when the loss on what was set aside has not fallen for `patience` passes."""

    def __init__(
        self,
        reward: TextReward,
        held_out: tuple[Sequence[Compared], Sequence[Rated]],
        settings: Fitting,
        rows: int,
        worker: Worker,
    ) -> None:
        self.reward, self.held_out, self.settings, self.worker = reward, held_out, settings, worker
        self.every = max(1, round(rows / settings.batch_size))  # steps of a pass
        self.least, self.since, self.best = float("inf"), 0, {}

    def __call__(self, step: int) -> bool:
        if not self.settings.patience or step % self.every:
            return False
        # One that stopped while the others went on would be waited for.
        loss = self.worker.agreed(held_out_loss(self.reward, *self.held_out, noise=self.settings.noise))
        self.reward.model.train()
        if loss < self.least:
            self.least, self.since = loss, 0
            self.best = {name: value.detach().clone() for name, value in self._learned()}
        else:
            self.since += 1
        return self.since >= self.settings.patience

    def take_the_best(self) -> None:
        """The weights after the pass with the least loss."""
        with torch.no_grad():
            for name, value in self._learned():
                if name in self.best:
                    value.copy_(self.best[name])

    def _learned(self) -> list[tuple[str, Tensor]]:
        return [(name, one) for name, one in self.reward.model.named_parameters() if one.requires_grad]


@torch.no_grad()
def held_out_loss(
    reward: TextReward, compared: Sequence[Compared], rated: Sequence[Rated], *, noise: float
) -> float:
    """Mean loss of the pairs and of the ratings, added, in eval mode."""
    reward.model.eval()
    losses = [
        torch.cat([of(rows[start : start + TOGETHER]) for start in range(0, len(rows), TOGETHER)]).mean()
        for rows, of in (
            (compared, lambda part: pair_losses(reward, part, noise=noise)),
            (rated, lambda part: rating_losses(reward, part)),
        )
        if rows
    ]
    return float(sum(losses))


@torch.no_grad()
def temperature(reward: TextReward, compared: Sequence[Compared], rated: Sequence[Rated]) -> float:
    """By which all scores are divided so that what was set aside is most likely: sigmoid of a difference is
    then how often people agree with it (Guo et al. 2017). Ties are left out."""
    reward.model.eval()
    decided = [one for one in compared if one.pair.preference != 0.5]
    first, second = (_sums(reward, [getattr(one, side) for one in decided]) for side in ("first", "second"))
    told = lambda name: torch.tensor([getattr(one.pair, name) for one in decided])  # noqa: E731
    scores, good = (
        _sums(reward, [[(one.row, [len(one.row)])] for one in rated]),
        torch.tensor([float(one.good) for one in rated]),
    )
    noise, weight, preferred = told("noise"), told("weight"), told("preference")

    def loss(t: Tensor) -> Tensor:
        pairs = _smoothed((first - second) / t, preferred, noise=noise) * weight
        return pairs.sum() + _smoothed(scores / t, good).sum()

    if not decided and not rated:
        return 1.0
    # From 0.03 to 32 in steps of 1.2 %, those near 1 first: scores of which these labels say nothing stay.
    candidates = 10 ** torch.tensor(sorted(torch.linspace(-1.5, 1.5, 601).tolist(), key=abs))
    return float(candidates[torch.stack([loss(t) for t in candidates]).argmin()])


def _smoothed(difference: Tensor, labels: Tensor, *, noise: float | Tensor = 0.0) -> Tensor:
    """Losses of N labels, 0 or 1, and of one more of each kind that nobody erred in, shared out among them:
    scores that are right on all N are not made ever larger. Without noise a label counts as (N + 1) / (N + 2)
    instead of 1 (Platt 1999) # (N,)"""
    zero, n = torch.zeros_like(difference), len(labels)
    told = preference_loss(difference, zero, labels, noise=noise)
    more = sum(preference_loss(difference, zero, torch.full_like(zero, one), noise=0.0) for one in (0.0, 1.0))
    return (n * told + more) / (n + 2)


def _sums(reward: TextReward, sides: Sequence[list[Chain]]) -> Tensor:
    parts = [sums(reward, sides[start : start + TOGETHER]).cpu() for start in range(0, len(sides), TOGETHER)]
    return torch.cat(parts) if parts else torch.zeros(0)


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
    replies = (reply for spoken in labels.replies for reply in judged_in(spoken))
    texts = (message["content"] for reply in replies for message in conversation_of(reply))
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


def score(reward: ReplyReward, replies: Sequence[Spoken]) -> Scores:
    """Id -> its score; a conversation's is the sum over its replies."""
    different = {reply.id: judged_in(reply) for reply in replies}
    values = iter(reward.score(conversation_of(one) for judged in different.values() for one in judged))
    return {id: sum(next(values) for _ in judged) for id, judged in different.items()}
