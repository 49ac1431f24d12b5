"""Which replies are compared: pairs of those to one context, in a log for labellers, or answered by a reward.

What is drawn depends on the seed and on what is compared alone, so that the same replies give the same pairs
again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from rl_dialog.config import at_least
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.labels import NewQuery, pair_id
from rl_dialog.preferences.replies import Rating, as_dialog, by_context, replies_of, split_of
from rl_dialog.preferences.reply_fitting import score
from rl_dialog.preferences.segments import Clip, Reply, Segment, Segments, Spoken
from rl_dialog.rewards import Reward, choose_rewards
from rl_dialog.rewards.fitted import ReplyReward, load_reward_model
from rl_dialog.rewards.scorers import make_scorers

TOGETHER = 500  # answers of the oracle in one transaction
TASK = "Which reply is better?"
Pair = tuple[Spoken, Spoken]


@dataclass(frozen=True)
class ReplyQuestions:
    """Which of the replies are compared, and what answers in place of people."""

    validation: float = 0.1
    """share of the conversations whose labels are for validation, where the replies have no split yet"""
    human: bool = True
    """candidates: also ask about the human's own replies"""
    contexts: int = 0
    """most contexts that are asked about, a random choice; 0 takes all"""
    pairs_per_context: int = 1
    """most pairs of one context, a random choice"""
    reward_model: str = ""
    """a model of `fit_reward`: first asked are the pairs that it is least sure of; without it the order is
    random"""
    task: str = TASK
    """what the labellers are told"""
    oracle: str = ""
    """a reward that answers in place of people: logged, vote, or any other (rl_dialog/rewards/README.md);
    what it cannot judge it skips"""
    scorers: tuple[str, ...] = ()
    """models behind the oracle's reward: sentiment=PATH, reward_model=PATH, ..."""
    oracle_labels: int = 0
    """most answers of the oracle; 0 for all questions"""
    oracle_temperature: float = 0.0
    """0: the reply with the larger reward is preferred; above: with the probability sigmoid(difference /
    temperature)"""
    oracle_noise: float = 0.0
    """share of its answers that are a coin's"""
    oracle_ties: float = 0.0
    """how far the rewards of two replies that are called equally good may lie apart"""
    seed: int = 0
    """seed of the choice of contexts and pairs, of their order, the oracle's coins, and the sampling of
    --checkpoints"""

    def check_questions(self) -> None:
        """Raises UserError for numbers that cannot be."""
        at_least(self, pairs_per_context=1, contexts=0, oracle_labels=0, seed=0)
        if not 0 <= self.validation < 1:
            raise UserError(f"expected --validation of at least 0 and below 1, got {self.validation}")


@dataclass(frozen=True)
class AskedContext:
    """A context to which replies are generated, and the logged reply to it."""

    dialog: Dialog
    message: int
    reply: Reply

    def answered(self, text: str, model: str) -> Reply:
        """The reply of a model to it."""
        source = {"dialog": self.dialog.id, "model": model}
        source |= {"split": self.dialog.split} if self.dialog.split else {}
        return Reply(self.reply.context, text, source)


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
    log.release(name)
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


def ask_about(replies: Iterable[Reply], questions: ReplyQuestions, log: LabelLog, segments: Segments) -> int:
    """Pairs of these replies into the log; how many are new."""
    kept = (reply for reply in replies if questions.human or reply.source.get("model") != "human")
    sizes = {"per_context": questions.pairs_per_context, "most": questions.contexts}
    pairs = choose_pairs(several(kept), **sizes, seed=questions.seed)
    model = load_reward_model(questions.reward_model) if questions.reward_model else None
    settings = {name: getattr(questions, name) for name in ("task", "validation", "seed")}
    return add_queries(log, segments, pairs, **settings, reward_model=model)


def answer_by_reward(questions: ReplyQuestions, log: LabelLog, segments: Segments) -> int:
    """The oracle's answers to what is open; how many. Raises UserError for a reward that there is not."""
    scorers = make_scorers(questions.scorers)
    [reward] = choose_rewards([questions.oracle], scorers=scorers).values()
    settings = {name: getattr(questions, f"oracle_{name}") for name in ("temperature", "noise", "ties")}
    oracle, name = Oracle(**settings, seed=questions.seed), f"oracle:{questions.oracle}"
    return answer_queries(log, segments, oracle, reward, name=name, most=questions.oracle_labels)


def value_of(spoken: Segment, reward: Reward) -> float | None:
    """What a reward gives the reply, or all replies of a conversation together, which it sees as a whole;
    None where it does not apply."""
    if isinstance(spoken, Clip):
        raise UserError(f"expected replies to answer for, got a clip of an environment, {spoken.id}")
    known = [value for value in reward(as_dialog(spoken)) if value is not None]
    return sum(known) if known else None


def _sureness(reward_model: ReplyReward | None, pairs: Sequence[Pair]) -> list[float]:
    """|difference of the scores| of each pair; 0 without a model."""
    if reward_model is None:
        return [0.0] * len(pairs)
    scores = score(reward_model, [reply for pair in pairs for reply in pair])
    return [abs(scores[first.id] - scores[second.id]) for first, second in pairs]


def _draw(seed: int, first: Spoken, second: Spoken) -> str:
    return hashlib.sha256(f"{seed}\0{pair_id(first.id, second.id)}".encode()).hexdigest()
