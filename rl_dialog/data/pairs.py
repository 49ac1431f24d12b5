"""Preference pairs out of rewarded dialogs: two different replies to the same messages, one of which earned
more. In TRL's format.

{"prompt": [messages], "chosen": [reply], "rejected": [reply], "chosen_reward": 1.0, "rejected_reward": 0.0,
"ids": [dialog of each]}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, TypeVar

import numpy as np

from rl_dialog.data.missing import to_go
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import TEMPLATE_KEYS

R = TypeVar("R", bound=tuple)


def mine_pairs(
    read: Callable[[], Iterable[Dialog]],
    *,
    by: Literal["reply", "to_go"] = "reply",
    margin: float = 0.0,
    most_per_context: int = 8,
) -> Iterator[dict[str, Any]]:
    """The pairs of the dialogs that `read` gives, largest differences first within a context; `read` is
    called twice, to hold only what recurs.

    `by` says what a reply earned: its own reward, or the sum of the known rewards from it to the end of its
    dialog; of a reply that was said more than once it is the mean. Replies whose reward (or all rewards from
    there on) is missing are left out.
    """
    count = Counter(keys[i] for dialog in read() for keys in (context_keys(dialog),) for i in dialog.replies)
    by_context: dict[bytes, dict[str, tuple[list[float], Dialog, int]]] = defaultdict(
        dict
    )  # context -> what was said -> what it earned each time, and where it was said first
    for dialog in read():
        keys = context_keys(dialog)
        for i, reward in _earned(dialog, by):
            if count[key := keys[i]] > 1:
                by_context[key].setdefault(said(dialog.messages[i]), ([], dialog, i))[0].append(reward)
    for of_context in by_context.values():
        replies = [(fmean(rewards), dialog, i) for rewards, dialog, i in of_context.values()]
        for better, worse in widest_pairs(replies, margin=margin, most=most_per_context):
            yield _as_trl(better, worse)


def widest_pairs(replies: Sequence[R], *, margin: float, most: int) -> list[tuple[R, R]]:
    """(better, worse) of tuples that begin with a reward: the `most` pairs that differ most, and by more than
    `margin` and the rounding of means, the widest first.

    They are among the `most` best and the `most` worst, so that a context with thousands of replies ("hi")
    does not make millions of pairs.
    """
    if len(replies) > 2 * most:
        order = sorted(replies, key=lambda reply: -reply[0])
        replies = order[:most] + order[-most:]
    pairs = ((one, other) if one[0] >= other[0] else (other, one) for one, other in combinations(replies, 2))
    wide_pairs = [pair for pair in pairs if pair[0][0] - pair[1][0] > margin + _rounding(pair)]
    return sorted(wide_pairs, key=lambda pair: pair[1][0] - pair[0][0])[:most]


def _rounding(pair: tuple[R, R]) -> float:
    """What float32 may add to the difference of two rewards."""
    return 2e-7 * max(abs(reply[0]) for reply in pair)


def context_keys(dialog: Dialog) -> dict[int, bytes]:
    """Reply -> the messages before it, as 16 bytes; the dialog's length stands for a reply that is still to
    come."""
    digest, keys = hashlib.sha256(), {}
    replies = {*dialog.replies, len(dialog.messages)}
    for i, message in enumerate([*dialog.messages, None]):
        if i in replies:
            keys[i] = digest.digest()[:16]
        if message is not None:
            digest.update(said(message).encode())
    return keys


def said(message: dict[str, Any]) -> str:
    """What tells a message from another: who says what, and which tools it calls, whatever the calls' ids."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        calls = [call | {"id": None} if isinstance(call, dict) else call for call in calls]
    return json.dumps((message["role"], message["content"], calls))


def rewards_of(dialog: Dialog) -> np.ndarray:
    """(R,) the reward of each reply, NaN where it is missing."""
    return np.array([dialog.messages[i].get("reward") for i in dialog.replies], float)  # None becomes NaN


def _earned(dialog: Dialog, by: str) -> Iterator[tuple[int, float]]:
    """(message, what it earned) of the replies of which that is known."""
    rewards = rewards_of(dialog)
    values = rewards if by == "reply" else to_go(rewards)
    for i, reward in zip(dialog.replies, values.tolist(), strict=True):
        if not math.isnan(reward):
            yield i, reward


def _as_trl(better: tuple[float, Dialog, int], worse: tuple[float, Dialog, int]) -> dict[str, Any]:
    (high, better_dialog, i), (low, worse_dialog, j) = better, worse
    prompt = [_plain(message) for message in better_dialog.messages[:i]]
    chosen, rejected = [_plain(better_dialog.messages[i])], [_plain(worse_dialog.messages[j])]
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "chosen_reward": high,
        "rejected_reward": low,
        "ids": [better_dialog.id, worse_dialog.id],
    }


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without what anyone said of it."""
    return {key: message[key] for key in TEMPLATE_KEYS if message.get(key) is not None} | {
        "content": message["content"] or ""
    }
