"""Pairs of what was played in a round of online learning: conversations of one group, or a reply and another
one that the policy might have given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from rl_dialog.data.schema import said
from rl_dialog.evaluation.candidates import candidate_replies
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.self_play import COPY
from rl_dialog.preferences.replies import replies_of
from rl_dialog.preferences.segments import Conversation, Reply, Spoken

TOGETHER = 128  # replies that are generated side by side
Pair = tuple[Spoken, Spoken]


def pairs_of_groups(
    played: Sequence[Episode], group_size: int, rng: np.random.Generator, *, scored: bool
) -> list[Pair]:
    """Pairs of conversations of one group and role, which begin alike, in an order in which each conversation
    comes once before any comes twice.

    What they have in common before the first reply is their context. Who does not speak first in self-play
    has heard something else in each of them: that is a part of the conversation.

    scored: only those that the world has paid for.
    """
    groups: dict[tuple[int, str], list[Episode]] = {}
    for episode in played:
        if _is_learned(episode) and not (scored and episode.total is None):
            key = episode.index // group_size, episode.dialog.meta.get("role", "")
            groups.setdefault(key, []).append(episode)
    turns: dict[int, list[Pair]] = {}
    for group in map(_conversations, groups.values()):
        shuffled = [group[i] for i in rng.permutation(len(group))]
        for turn, pairs in enumerate(_tournament(len(shuffled))):
            turns.setdefault(turn, []).extend((shuffled[a], shuffled[b]) for a, b in pairs)
    return [turns[turn][i] for turn in sorted(turns) for i in rng.permutation(len(turns[turn]))]


def pairs_with_another_reply(
    played: Sequence[Episode],
    policy: Any,
    tokenizer: Any,
    decoding: Decoding,
    rng: np.random.Generator,
    *,
    most: int,
    seed: int,
) -> list[Pair]:
    """What was said at so many places of the conversations, and what the policy says there when it is asked
    again."""
    replies = [
        Reply(reply.context, reply.text, _source(episode))
        for episode in played
        if _is_learned(episode)
        for _, reply in replies_of(episode.dialog)
    ]
    chosen = [replies[i] for i in rng.permutation(len(replies))[:most]]
    contexts = [list(reply.context) for reply in chosen]
    how = {"count": 1, "seed": seed, "batch_size": TOGETHER}
    again = candidate_replies(policy, tokenizer, contexts, decoding, **how)
    return [
        (reply, Reply(reply.context, other.text, reply.source))
        for reply, [other] in zip(chosen, again, strict=True)
    ]


def _conversations(group: Sequence[Episode]) -> list[Conversation]:
    """What comes behind what all of them have in common before the first reply, with the true returns for
    oracles and reports."""
    told = [
        [{"role": message["role"], "content": said(message)} for message in episode.dialog.messages]
        for episode in group
    ]
    before = [plain[: episode.dialog.replies[0]] for plain, episode in zip(told, group, strict=True)]
    alike = sum(
        1 for _ in takewhile(lambda those: all(one == those[0] for one in those), zip(*before, strict=False))
    )
    return [
        Conversation(plain[:alike], plain[alike:], {**_source(episode), "return": episode.total})
        for plain, episode in zip(told, group, strict=True)
    ]


def _is_learned(episode: Episode) -> bool:
    """Did the policy say something in it, and not a copy of it?"""
    dialog = episode.dialog
    return episode.end != "failed" and bool(dialog.replies) and dialog.meta.get("player") != COPY


def _source(episode: Episode) -> dict[str, Any]:
    """Where it is from, and whose words they are where a world has several roles; conversations with one
    partner stay on one side of a split."""
    dialog = episode.dialog
    source = {"dialog": dialog.id, "conversation": f"{dialog.source}-{dialog.meta.get('seed', dialog.id)}"}
    return source | {name: dialog.meta[name] for name in ("role",) if name in dialog.meta}


def _tournament(players: int) -> list[list[tuple[int, int]]]:
    """All pairs of so many players, in turns in which each plays once, or rests where they are odd."""
    if players < 2:
        return []
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    half, turns = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        turns.append([(a, b) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns
