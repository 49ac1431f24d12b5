"""Which replies are compared: pairs of those to one context, in a log for labellers, or answered by a reward.

What is drawn depends on the seed and on what is compared alone, so that the same replies give the same pairs
again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.labels import NewQuery, pair_id
from rl_dialog.preferences.replies import Rating, as_dialog, by_context, replies_of, split_of
from rl_dialog.preferences.reply_fitting import score
from rl_dialog.preferences.segments import Reply, Segment, Segments
from rl_dialog.rewards import Reward
from rl_dialog.rewards.fitted import ReplyReward

TOGETHER = 500  # answers of the oracle in one transaction
Pair = tuple[Reply, Reply]


@dataclass(frozen=True)
class AskedContext:
    """A context to which replies are generated, and the logged reply to it."""

    dialog: Dialog
    message: int
    reply: Reply


def several(replies: Iterable[Reply]) -> list[list[Reply]]:
    """The different replies to each context that has two or more."""
    contexts = by_context(Rating(reply, 0.0) for reply in replies)
    return [[rating.reply for rating in ratings] for ratings in contexts if len(ratings) > 1]


def asked_contexts(dialogs: Iterable[Dialog], *, most: int, seed: int) -> list[AskedContext]:
    """The different contexts of dialogs, a random choice of `most`; 0 takes all."""
    contexts: dict[str, AskedContext] = {}
    for dialog in dialogs:
        for i, reply in replies_of(dialog):
            contexts.setdefault(json.dumps(reply.context), AskedContext(dialog, i, reply))
    return sorted(contexts.values(), key=lambda context: _draw(seed, context.reply, context.reply))[
        : most or None
    ]


def choose_pairs(
    contexts: Sequence[Sequence[Reply]], *, per_context: int, most: int, seed: int
) -> list[Pair]:
    """Which pairs to ask about, in which order: `per_context` of each of `most` contexts, 0 for all."""
    pairs = []
    for replies in contexts:
        shuffled = sorted(combinations(replies, 2), key=lambda pair: _draw(seed, *pair))
        pairs.append(shuffled[:per_context])
    pairs.sort(key=lambda group: _draw(seed, *group[0]))
    return [pair for group in pairs[: most or None] for pair in group]


def add_queries(
    log: LabelLog,
    segments: Segments,
    pairs: Sequence[Pair],
    *,
    task: str,
    validation: float,
    seed: int,
    reward_model: ReplyReward | None = None,
) -> int:
    """Writes the replies, then offers the queries, first those that the reward model is least sure of; how
    many are new."""
    before = len(log.pairs())
    queries = []
    for pair, sure in zip(pairs, _sureness(reward_model, pairs), strict=True):
        split = split_of(pair[0], validation=validation, seed=seed)
        first, second = (
            segments.add(replace(reply, source={**reply.source, "split": split})) for reply in pair
        )
        queries.append(NewQuery(first, second, task=task, priority=-sure, validation=split != "train"))
    log.add_queries(queries)
    return len(log.pairs()) - before


def answer_queries(
    log: LabelLog, segments: Segments, oracle: Oracle, reward: Reward, *, name: str, most: int = 0
) -> int:
    """Lets an oracle whose truth is the reward answer what is open, at most `most`, 0 for all; how many.

    It skips what the reward does not apply to. Raises UserError for clips of an environment.
    """
    oracle = replace(oracle, truth=lambda reply: value_of(reply, reward))
    answered = 0
    while queries := log.lease_many(name, min(TOGETHER, most - answered) if most else TOGETHER):
        choices = []
        for query in queries:
            sides = segments[query.left], segments[query.right]
            applies = all(value_of(side, reward) is not None for side in sides)
            choices.append((query, oracle.choice(*sides) if applies else "skip"))
        answered += len(log.answer_many(choices, name))
        if answered == most:
            break
    return answered


def value_of(reply: Segment, reward: Reward) -> float | None:
    """What a reward gives the reply; None where it does not apply."""
    if not isinstance(reply, Reply):
        raise UserError(f"expected replies to answer for, got a clip of an environment, {reply.id}")
    return list(reward(as_dialog(reply)))[-1]


def _sureness(reward_model: ReplyReward | None, pairs: Sequence[Pair]) -> list[float]:
    """|difference of the scores| of each pair; 0 without a model."""
    if reward_model is None:
        return [0.0] * len(pairs)
    scores = score(reward_model, [reply for pair in pairs for reply in pair])
    return [abs(scores[first.id] - scores[second.id]) for first, second in pairs]


def _draw(seed: int, first: Reply, second: Reply) -> str:
    return hashlib.sha256(f"{seed}\0{pair_id(first.id, second.id)}".encode()).hexdigest()
