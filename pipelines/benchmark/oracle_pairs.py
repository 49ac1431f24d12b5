"""Pairs of replies in small talk with the answers of an oracle that errs: a file of prompts with a chosen and
a rejected reply, as TRL and `fit_reward --logs` read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from envs.small_talk import expected_reward
from envs.small_talk_policies import MixedPolicy
from envs.small_talk_world import conversation_seed, play
from rl_dialog.data.files import write_text_atomically
from rl_dialog.preferences.replies import ReplyPair, as_dialog
from rl_dialog.preferences.segments import Reply


def worth(reply: Reply) -> float:
    """What the world pays for it on average: the oracle's opinion."""
    return expected_reward(as_dialog(reply))[-1]


def oracle_pairs(seed: int, flipped: float) -> Iterator[ReplyPair]:
    """Endlessly two replies of the logs' policy at one place of a conversation, each pair of a conversation
    of its own. The first is preferred: the one that is worth more, but in a share `flipped` of the pairs the
    other. What is worth the same is left out."""
    rng = np.random.default_rng(seed)
    for index in count():
        messages = play(MixedPolicy, seed=seed, index=index)[0].messages
        place = 2 * int(rng.integers(len(messages) // 2)) + 1
        prompt = [{name: message[name] for name in ("role", "content")} for message in messages[:place]]
        another = MixedPolicy(conversation_seed(seed + 1, index))(prompt)
        sides = [Reply(prompt, text) for text in (messages[place]["content"], another)]
        better, worse = sorted(sides, key=worth, reverse=True)
        is_flipped = rng.random() < flipped
        if worth(better) > worth(worse):
            yield ReplyPair(worse, better) if is_flipped else ReplyPair(better, worse)


def write_oracle_pairs(path: Path, pairs: int, *, seed: int, flipped: float) -> Path:
    """So many of them, a line each; the path."""
    write_rows(path, list(islice(oracle_pairs(seed, flipped), pairs)))
    return path


def write_rows(path: Path, pairs: Sequence[ReplyPair]) -> None:
    """prompt, chosen and rejected of pairs without ties."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, "".join(json.dumps(_row(pair)) + "\n" for pair in pairs))


def _row(pair: ReplyPair) -> dict[str, Any]:
    sides = (pair.first, pair.second) if pair.preference > 0.5 else (pair.second, pair.first)
    chosen, rejected = ([{"role": "assistant", "content": side.text}] for side in sides)
    return {
        "prompt": [dict(message) for message in pair.first.context],
        "chosen": chosen,
        "rejected": rejected,
    }
