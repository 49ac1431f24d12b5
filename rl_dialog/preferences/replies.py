"""Preferences over replies and whole conversations: pairs and ratings, where they come from, and which of
them are held out.

What is said in one conversation stays on one side of a split: `group_of` names it, as `data/splits.py` does
for dialogs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_dialog.data.pairs import widest_pairs
from rl_dialog.data.schema import Dialog, said
from rl_dialog.data.splits import assign_split, split_key
from rl_dialog.errors import UserError
from rl_dialog.preferences.segments import Clip, Conversation, Reply, Segment, Spoken

LOGGED = "logged"  # the component that a log's own rewards are
JUDGED = ("reward", "rewards", "feedback")  # what a message says of its reply


class Labelled(Protocol):
    """What is needed of a label: two segments, and P(first preferred)."""

    first: str
    second: str
    preference: float | None  # None: incomparable; such labels are left out


@dataclass(frozen=True)
class ReplyPair:
    """Two replies to one context, or two conversations that go on from it, and P(first preferred): 1, 0, or
    .5 for a tie. Raises UserError for anything else."""

    first: Spoken
    second: Spoken
    preference: float = 1.0
    noise: float = 0.0  # share of random answers among labels as sure as this one
    weight: float = 1.0  # of its loss
    much: float = 0.0  # how far the preferred one is from slightly (0) to much (1) better

    def __post_init__(self) -> None:
        if not 0 <= self.preference <= 1:
            raise UserError(f"expected a preference from 0 to 1, got {self.preference}")
        if not all(0 <= share <= 1 for share in (self.noise, self.weight, self.much)):
            raise UserError(f"expected noise, weight and strength from 0 to 1, got {self}")
        if list(_turns(self.first.context)) != list(_turns(self.second.context)):
            raise UserError(
                f"expected two replies to one context, got other messages before {self.first.text!r} than "
                f"before {self.second.text!r}"
            )


@dataclass(frozen=True)
class Rating:
    """A reply, what it earned, and whether that is good."""

    reply: Reply
    value: float
    good: bool = False
    pair: str | None = None  # the preference whose side it is, where that is all that is known of it


@dataclass(frozen=True)
class Preferences:
    """What people said: pairs, and ratings, which pairs may have been made of."""

    pairs: list[ReplyPair]
    ratings: list[Rating]

    def where(self, keep: Callable[[Reply], bool]) -> Preferences:
        """Those of replies that `keep` says yes to."""
        return Preferences(
            [pair for pair in self.pairs if keep(pair.first)],
            [rating for rating in self.ratings if keep(rating.reply)],
        )

    def sizes(self) -> dict[str, int]:
        """How much there is of each kind."""
        conversations = len({group_of(reply) for reply in self.replies})
        good_count = sum(rating.good for rating in self.ratings)
        return {
            "pairs": len(self.pairs),
            "ratings": len(self.ratings),
            "good": good_count,
            "conversations": conversations,
        }

    def check(self, objective: str, *, where: str) -> None:
        """Raises UserError where there is nothing that `pairs`, `ratings` or `both` can learn from."""
        good_count = sum(rating.good for rating in self.ratings)
        mixed = 0 < good_count < len(self.ratings)
        if objective != "ratings" and not self.pairs:
            hint = ": try --objective ratings" if mixed else ""
            expected = "expected two replies to one context of which one is preferred"
            raise UserError(f"{where}: {expected}, found none among {len(self.ratings)} rated{hint}")
        if objective != "pairs" and not mixed:
            expected = f"--objective {objective}: expected good and bad replies"
            raise UserError(f"{where}: {expected}, got {good_count} good ones of {len(self.ratings)} rated")

    @property
    def replies(self) -> list[Spoken]:
        """All that was judged, as often as it was."""
        return [
            *(reply for pair in self.pairs for reply in (pair.first, pair.second)),
            *(rating.reply for rating in self.ratings),
        ]


def replies_of(dialog: Dialog, *, openings: bool = False) -> Iterator[tuple[int, Reply]]:
    """(message, reply) of all replies that have something before them; with `openings` also one that has not.

    The JSON of its tool calls stands behind a message's text. What the dialog says of a reply (reward,
    feedback) stays in `source`, beside where it is from."""
    plain = [{"role": message["role"], "content": said(message)} for message in dialog.messages]
    for i in dialog.replies:
        if i or openings:
            fields = {name: dialog.messages[i].get(name) for name in JUDGED}
            judged = {name: value for name, value in fields.items() if value is not None}  # null says nothing
            source = {"dialog": dialog.id, "message": i, **judged} | (
                {"split": dialog.split} if dialog.split else {}
            )
            if "generator" in dialog.meta:
                source["model"] = dialog.meta["generator"]
            if not i:  # its context does not tell which conversation it is of
                has_user = any(message["role"] == "user" for message in dialog.messages)
                source["conversation"] = split_key(dialog) if has_user else dialog.id
            yield i, Reply(plain[:i], plain[i]["content"], source)


def as_dialog(reply: Spoken) -> Dialog:
    """The reply, or the conversation, as a Dialog that rewards can judge: its context counts for nothing, and
    what was said of the reply stands in its message."""
    context = [
        {**message, "weight": 0} if message["role"] == "assistant" else dict(message)
        for message in reply.context
    ]
    if isinstance(reply, Conversation):
        return Dialog(reply.id, [*context, *map(dict, reply.messages)])
    judged = {name: reply.source[name] for name in JUDGED if name in reply.source}
    return Dialog(reply.id, [*context, {"role": "assistant", "content": reply.text, **judged}])


def group_of(reply: Spoken) -> str:
    """What must stay on one side of a split: the conversation's first user turn."""
    return split_key(_conversation_start(reply))


def split_of(reply: Spoken, *, validation: float, test: float = 0.0, seed: int = 0) -> str:
    """The split that its data directory put it into, else that of its group."""
    return reply.source.get("split") or assign_split(_conversation_start(reply), validation, test, seed=seed)


def ratings_of(
    dialogs: Iterable[Dialog],
    component: str,
    *,
    above: float = 0.0,
    below: bool = False,
    openings: bool = False,
) -> Iterator[Rating]:
    """The replies that a component of the rewards applies to, good where it is above a bound; `below` turns
    this round. What a log preferred was compared with one other reply, and keeps that pair.

    `openings`: also those that open their conversation.
    """
    for dialog in dialogs:
        pair = dialog.meta["pair"] if component == LOGGED and "preferred" in dialog.meta else None
        for i, reply in replies_of(dialog, openings=openings):
            value = dialog.messages[i].get("rewards", {}).get(component)
            if value is not None:
                yield Rating(reply, -value if below else value, (value > above) != below, pair)


def held_out(
    labels: Preferences, splits: Sequence[str], *, validation: float, seed: int
) -> tuple[Preferences, Preferences]:
    """(of the training split, of `splits`): the splits of a data directory hold, whatever it was split by;
    a reply that is from elsewhere goes with its conversation."""
    group, split = _groups(labels.replies), {}

    def place(reply: Spoken) -> tuple[str, str | None]:
        return group[_key(reply)], reply.source.get("dialog") if "split" in reply.source else None

    for reply in sorted(labels.replies, key=lambda reply: "split" not in reply.source):
        own = split_of(reply, validation=validation, seed=seed)
        split.setdefault(place(reply), own)  # a dialog may be in several directories: its first split holds
        split.setdefault((group[_key(reply)], None), own)
    train, test = (
        labels.where(lambda reply, of=of: split[place(reply)] in of) for of in (("train",), splits)
    )
    return train, test


def folds(labels: Preferences, count: int, *, seed: int) -> Iterator[tuple[Preferences, Preferences]]:
    """`count` times (the other conversations, a part of them): in the order of a hash they are dealt out in
    turn.

    Raises UserError for too few of them.
    """
    group = _groups(labels.replies)
    order = sorted(set(group.values()), key=lambda name: hashlib.sha256(f"{seed}\0{name}".encode()).digest())
    if len(order) < count:
        raise UserError(f"--folds {count}: expected at least as many conversations, got {len(order)}")
    part = {name: n % count for n, name in enumerate(order)}
    for number in range(count):
        yield (
            labels.where(lambda reply, n=number: part[group[_key(reply)]] != n),
            labels.where(lambda reply, n=number: part[group[_key(reply)]] == n),
        )


def pairs_of_labels(labels: Iterable[Labelled], segments: Mapping[str, Segment]) -> list[ReplyPair]:
    """The comparable ones, with what they compare from `segments`. Raises UserError for labels of clips, and
    of what has different contexts."""
    pairs = []
    for label in labels:
        if label.preference is None:
            continue
        first, second = segments[label.first], segments[label.second]
        if isinstance(first, Clip) or isinstance(second, Clip):
            raise UserError(
                f"expected labels of replies, got one of clips of an environment: {label.first}, "
                f"{label.second}"
            )
        strength = getattr(label, "strength", None)
        trust = {name: getattr(label, name) for name in ("noise", "weight") if hasattr(label, name)}
        much = {} if strength is None else {"much": strength - 1}
        pairs.append(ReplyPair(first, second, label.preference, **trust, **much))
    return pairs


def pairs_of_ratings(ratings: Iterable[Rating], *, most_per_context: int = 8) -> list[ReplyPair]:
    """Pairs of different texts in one context of which the first earned more, the widest first; of equal
    texts the first one counts. Preferences of a log stay the pairs that they are: whoever said that A is
    better than B, and C than D, said nothing of A and D. Where their sides part before their last replies
    they are pairs of conversations."""
    ratings = list(ratings)
    rated = by_context(rating for rating in ratings if rating.pair is None)
    stated: dict[str, list[Rating]] = {}
    for rating in ratings:
        if rating.pair is not None:
            stated.setdefault(rating.pair, []).append(rating)
    groups = [*rated, *(group for sides in stated.values() for group in by_context(sides))]
    pairs = [
        ReplyPair(better.reply, worse.reply)
        for group in groups
        for better, worse in _widest(group, most_per_context)
    ]
    return pairs + [pair for sides in stated.values() if (pair := _conversations(sides))]


def _conversations(sides: Sequence[Rating]) -> ReplyPair | None:
    """What a log preferred as the two conversations from where they part; None where they do so at their last
    replies, or begin with one."""
    better, worse = (choose(sides, key=lambda side: side.value) for choose in (max, min))
    contexts = [list(_turns(side.reply.context)) for side in (better, worse)]
    splits = {side.reply.source.get("split") for side in (better, worse)}
    if better.value == worse.value or contexts[0] == contexts[1] or not all(contexts) or len(splits) > 1:
        return None
    alike = len(os.path.commonprefix(contexts))
    return ReplyPair(*(_from(side.reply, alike) for side in (better, worse)))


def _from(reply: Reply, start: int) -> Conversation:
    """What was said from a message on, up to the reply."""
    said = conversation_of(reply)
    return Conversation(said[:start], said[start:], reply.source)


def by_context(ratings: Iterable[Rating]) -> list[list[Rating]]:
    """The ratings of each context, one for each text: the first. Replies that open a conversation share
    none, and those of other splits have one of their own, so that no pair has a side in each."""
    contexts: dict[str, dict[str, Rating]] = {}
    for rating in (rating for rating in ratings if rating.reply.context):
        context = [rating.reply.source.get("split"), *_turns(rating.reply.context)]
        contexts.setdefault(json.dumps(context), {}).setdefault(rating.reply.text, rating)
    return [list(by_text.values()) for by_text in contexts.values()]


def conversation_of(reply: Reply) -> list[Mapping[str, str]]:
    """The reply behind its context, as a reward model reads it."""
    return [*reply.context, {"role": "assistant", "content": reply.text}]


def judged_in(spoken: Spoken) -> list[Reply]:
    """The replies whose rewards add up to what it is worth: itself, or each of a conversation behind what was
    said before it."""
    if isinstance(spoken, Reply):
        return [spoken]
    said = [*spoken.context, *spoken.messages]
    first = len(spoken.context)
    return [
        Reply(said[:i], message["content"], spoken.source)
        for i, message in enumerate(said)
        if i >= first and message["role"] == "assistant"
    ]


def _widest(ratings: Sequence[Rating], most: int) -> list[tuple[Rating, Rating]]:
    numbered = [(rating.value, n) for n, rating in enumerate(ratings)]
    return [
        (ratings[better], ratings[worse])
        for (_, better), (_, worse) in widest_pairs(numbered, margin=0.0, most=most)
    ]


def _groups(replies: Iterable[Spoken]) -> dict[tuple[str, str | None], str]:
    return {_key(reply): group_of(reply) for reply in replies}


def _key(reply: Spoken) -> tuple[str, str | None]:
    """Replies of one key are of one group: an id does not tell the conversation of a reply that opens it."""
    return reply.id, reply.source.get("conversation")


def _conversation_start(reply: Spoken) -> Dialog:
    """Something of the reply's conversation from which its split can be told."""
    meta = {"group": reply.source["conversation"]} if "conversation" in reply.source else {}
    said = conversation_of(reply) if isinstance(reply, Reply) else [*reply.context, *reply.messages]
    return Dialog("reply", [{**message} for message in said], meta=meta)


def _turns(context: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    return ((message["role"], message["content"]) for message in context)
