"""Preferences over replies: where they come from, and how a reward model learns from them.

    pairs    two replies to one context and P(first preferred)    loss: Bradley and Terry with noise (`preference_loss`), of the two scores
    ratings  a reply and whether it is good                        loss: -log sigmoid(score) of a good one, -log sigmoid(-score) of a bad one

Pairs fix differences between replies to one context; ratings compare replies of all contexts, and so teach from contexts with one reply, too.
What is said in one conversation stays on one side of a split: `group_of` names it, as `data/splits.py` does for dialogs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_dialog.data.pairs import widest_pairs
from rl_dialog.data.schema import Dialog, said
from rl_dialog.data.splits import assign_split, split_key
from rl_dialog.errors import UserError
from rl_dialog.models.reward_model import preference_loss
from rl_dialog.models.text_reward import Conversation, TextReward
from rl_dialog.preferences.segments import Reply, Segment
from rl_dialog.training.optim import learning_rate_at, make_optimizer

WARMUP = 0.1  # share of the steps
JUDGED = ("reward", "rewards", "feedback")  # what a message says of its reply


class Labelled(Protocol):
    """What is needed of a label: two segments, and P(first preferred)."""

    first: str
    second: str
    preference: float | None  # None: incomparable; such labels are left out


@dataclass(frozen=True)
class ReplyPair:
    """Two replies to one context, and P(first preferred): 1, 0, or .5 for a tie. Raises UserError for anything else."""

    first: Reply
    second: Reply
    preference: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.preference <= 1:
            raise UserError(f"expected a preference from 0 to 1, got {self.preference}")
        if list(_turns(self.first.context)) != list(_turns(self.second.context)):
            raise UserError(f"expected two replies to one context, got other messages before {self.first.text!r} than before {self.second.text!r}")


@dataclass(frozen=True)
class Rating:
    """A reply and what it earned."""

    reply: Reply
    value: float


@dataclass(frozen=True)
class Preferences:
    """What people said: pairs, and ratings, which pairs may have been made of."""

    pairs: list[ReplyPair]
    ratings: list[Rating]

    def where(self, keep: Callable[[Reply], bool]) -> Preferences:
        """Those of replies that `keep` says yes to."""
        return Preferences([pair for pair in self.pairs if keep(pair.first)], [rating for rating in self.ratings if keep(rating.reply)])

    @property
    def replies(self) -> list[Reply]:
        return [*(reply for pair in self.pairs for reply in (pair.first, pair.second)), *(rating.reply for rating in self.ratings)]


@dataclass(frozen=True)
class Fitting:
    """How a reward model over text is fitted. Raises UserError for a number out of its range."""

    learning_rate: float = 1e-3
    """of AdamW at its highest, after a tenth of the steps; it falls to 0. 1e-5 is usual for a large pretrained model"""
    batch_size: int = 16
    """pairs, and as many ratings, of a step"""
    epochs: float = 4.0
    """how often every pair and rating is seen"""
    noise: float = 0.1
    """share of preferences that are taken to be random: they bound what one label can do"""
    weight_decay: float = 0.01
    """of all matrices"""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not self.learning_rate > 0 or not self.epochs > 0 or not 0 <= self.noise < 1 or self.weight_decay < 0:
            raise UserError(
                f"expected a batch of at least 1, learning rate and epochs above 0, noise in [0, 1) and weight decay of at least 0, got {self}"
            )


def replies_of(dialog: Dialog) -> Iterator[tuple[int, Reply]]:
    """(message, reply) of all replies that have something before them. A message without text is the JSON of its tool calls.

    What the dialog says of a reply (reward, feedback) stays in `source`, beside where it is from.
    """
    plain = [{"role": message["role"], "content": said(message)} for message in dialog.messages]
    for i in dialog.replies:
        if i:
            given = {name: dialog.messages[i].get(name) for name in JUDGED}
            judged = {name: value for name, value in given.items() if value is not None}  # null says nothing
            source = {"dialog": dialog.id, "message": i, **judged} | ({"split": dialog.split} if dialog.split else {})
            if "generator" in dialog.meta:
                source["model"] = dialog.meta["generator"]
            yield i, Reply(plain[:i], plain[i]["content"], source)


def as_dialog(reply: Reply) -> Dialog:
    """The reply as a Dialog that rewards can judge: its context counts for nothing, and what was said of the reply stands in its message."""
    context = [{**message, "weight": 0} if message["role"] == "assistant" else dict(message) for message in reply.context]
    judged = {name: reply.source[name] for name in JUDGED if name in reply.source}
    return Dialog(reply.id, [*context, {"role": "assistant", "content": reply.text, **judged}])


def group_of(reply: Reply) -> str:
    """What must stay on one side of a split: the conversation's first user turn."""
    return split_key(Dialog("reply", [dict(message) for message in reply.context]))


def split_of(reply: Reply, *, validation: float, test: float = 0.0, seed: int = 0) -> str:
    """The split that its data directory put it into, else that of its group."""
    return reply.source.get("split") or assign_split(Dialog("reply", [dict(m) for m in reply.context]), validation, test, seed=seed)


def pairs_of_labels(labels: Iterable[Labelled], segments: Mapping[str, Segment]) -> list[ReplyPair]:
    """The comparable ones, with their replies from `segments`. Raises UserError for labels of clips, and of replies to different contexts."""
    found = []
    for label in labels:
        if label.preference is None:
            continue
        first, second = segments[label.first], segments[label.second]
        if not (isinstance(first, Reply) and isinstance(second, Reply)):
            raise UserError(f"expected labels of replies, got one of clips of an environment: {label.first}, {label.second}")
        found.append(ReplyPair(first, second, label.preference))
    return found


def pairs_of_ratings(ratings: Iterable[Rating], *, most_per_context: int = 8) -> list[ReplyPair]:
    """Pairs of different texts in one context of which the first earned more, the widest first; of equal texts the first one counts."""
    return [ReplyPair(better.reply, worse.reply) for found in by_context(ratings) for better, worse in _widest(found, most_per_context)]


def by_context(ratings: Iterable[Rating]) -> list[list[Rating]]:
    """The ratings of each context, one for each text: the first."""
    at: dict[str, dict[str, Rating]] = {}
    for rating in ratings:
        at.setdefault(json.dumps(list(_turns(rating.reply.context))), {}).setdefault(rating.reply.text, rating)
    return [list(found.values()) for found in at.values()]


def fit(
    reward: TextReward,
    pairs: Sequence[ReplyPair],
    ratings: Sequence[tuple[Reply, bool]] = (),
    *,
    settings: Fitting | None = None,
    seed: int = 0,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> None:
    """Trains all weights on pairs, on ratings (reply, is it good), or on both: the mean losses of a batch of each are added.

    `progress` hears the step, how many there are, and the loss. Raises UserError where there is nothing to learn from.
    """
    settings = settings or Fitting()
    if not pairs and not ratings:
        raise UserError("expected preferences to learn from, got none but incomparable ones")
    torch.manual_seed(seed)  # dropout
    rows = _Rows(reward)
    compared = [(rows.of(pair.first), rows.of(pair.second), pair.preference) for pair in pairs]
    rated = [(rows.of(reply), bool(good)) for reply, good in ratings]
    steps = max(1, round(settings.epochs * max(len(compared), len(rated)) / settings.batch_size))
    optimizer = make_optimizer(reward.model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)
    compared_next = _batches([max(len(first), len(second)) for first, second, _ in compared], settings.batch_size, seed)
    rated_next = _batches([len(row) for row, _ in rated], settings.batch_size, seed + 1)
    reward.model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, peak=settings.learning_rate, warmup=round(WARMUP * steps), total=steps, schedule="linear")
        loss = _pair_loss(reward, [compared[i] for i in next(compared_next)], settings.noise) if compared else 0.0
        loss = loss + (_rating_loss(reward, [rated[i] for i in next(rated_next)]) if rated else 0.0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reward.model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, steps, loss.item())
    reward.eval()


def conversation_of(reply: Reply) -> Conversation:
    """The reply behind its context, as a reward model reads it."""
    return [*reply.context, {"role": "assistant", "content": reply.text}]


def score(reward: TextReward, replies: Sequence[Reply]) -> dict[str, float]:
    """Reply id -> its score."""
    different = {reply.id: reply for reply in replies}
    return dict(zip(different, reward.score(conversation_of(reply) for reply in different.values()), strict=True))


def _pair_loss(reward: TextReward, batch: Sequence[tuple[list[int], list[int], float]], noise: float) -> Tensor:
    first, second, preferred = zip(*batch, strict=True)
    scores = reward([*first, *second])  # both sides in one pass; dropout has a mask of its own for each
    ones, others = scores[: len(first)], scores[len(first) :]
    return preference_loss(ones, others, torch.tensor(preferred, device=scores.device), noise=noise).mean()


def _rating_loss(reward: TextReward, batch: Sequence[tuple[list[int], bool]]) -> Tensor:
    rows, good = zip(*batch, strict=True)
    scores = reward(rows)
    return F.binary_cross_entropy_with_logits(scores, torch.tensor(good, dtype=scores.dtype, device=scores.device))


class _Rows:
    """Every reply as tokens, once."""

    def __init__(self, reward: TextReward) -> None:
        self.reward, self.known = reward, {}

    def of(self, reply: Reply) -> list[int]:
        if reply.id not in self.known:
            self.known[reply.id] = self.reward.encode(conversation_of(reply))
        return self.known[reply.id]


def _batches(lengths: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """All places in random batches of similar length, over and over."""
    rng = random.Random(seed)
    while lengths:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        pools = [sorted(order[start : start + 16 * size], key=lambda i: lengths[i]) for start in range(0, len(order), 16 * size)]
        found = [pool[start : start + size] for pool in pools for start in range(0, len(pool), size)]
        rng.shuffle(found)
        yield from found


def _widest(found: Sequence[Rating], most: int) -> list[tuple[Rating, Rating]]:
    numbered = [(rating.value, n) for n, rating in enumerate(found)]
    return [(found[better], found[worse]) for (_, better), (_, worse) in widest_pairs(numbered, margin=0.0, most=most)]


def _turns(context: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    return ((message["role"], message["content"]) for message in context)
