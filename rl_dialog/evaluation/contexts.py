"""Logged contexts as a world of one reply: a reply is drawn, rewards judge it, and the episode is over.

With a learned reward (`pipelines.fit_reward`) this is learning from human feedback in its usual form. The
world keeps the contract of envs/text_world.py; its seed says which context it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import read_dialogs
from rl_dialog.data.tokenize import TEMPLATE_KEYS
from rl_dialog.errors import UserError
from rl_dialog.rewards import Reward, apply_rewards

PROBED = 16  # logged replies that are judged beforehand, to see which rewards have something to say

Message = dict[str, Any]


class Contexts:
    """Makes worlds over the contexts of a split: everything before a logged reply, each context once.

    Raises UserError where there are none, and for a reward that never says anything of a reply by itself
    (votes, what the user answered, rewards of the log).
    """

    __name__ = "contexts"

    def __init__(
        self, data: str, split: str, rewards: Mapping[str, Reward], weights: Mapping[str, float]
    ) -> None:
        self.rewards, self.weights = rewards, weights
        found: dict[str, tuple[list[Message], str]] = {}
        for dialog in read_dialogs(data, split):
            for i in dialog.replies:
                context = [_plain(message) for message in dialog.messages[:i]]
                reply = dialog.messages[i]
                if context and (reply["content"] or not reply.get("tool_calls")):
                    found.setdefault(json.dumps(context), (context, reply["content"]))
        if not found:
            raise UserError(
                f"--contexts {data}: expected replies with something before them, got none in {split}"
            )
        self.contexts = [context for context, _ in found.values()]
        self._expect_rewards_that_judge(
            [pair for pair, _ in zip(found.values(), range(PROBED), strict=False)]
        )

    def __call__(self) -> ContextWorld:
        return ContextWorld(self)

    def components(self, context: Sequence[Message], reply: str) -> np.ndarray:
        """(K + 1,) what each reward says of the reply, and their weighted sum; NaN where one does not
        apply."""
        messages = [*map(dict, context), {"role": "assistant", "content": reply}]
        return apply_rewards(Dialog("context", messages), self.rewards, self.weights)[-1]

    def _expect_rewards_that_judge(self, logged: Sequence[tuple[list[Message], str]]) -> None:
        columns = np.array([self.components(context, reply) for context, reply in logged])
        for name, column in zip(self.rewards, columns.T, strict=False):
            if self.weights[name] and np.isnan(column).all():
                raise UserError(
                    f"--rewards.{name}: expected a reward that judges a new reply by itself (learned, "
                    f"question, repetition, reply_sentiment, ...), got one that says nothing of {len(logged)}"
                    " replies: it needs what people said to them"
                )


class ContextWorld:
    """One context and the reply to it."""

    max_turns = 1

    def __init__(self, contexts: Contexts) -> None:
        self.source = contexts

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The context that the seed stands for."""
        contexts = self.source.contexts
        self.context = contexts[int(np.random.default_rng(seed).integers(len(contexts)))]
        return list(self.context), {}

    def step(self, reply: str) -> tuple[list[Message], float | None, bool, bool, dict[str, Any]]:
        """What the rewards say of the reply."""
        *parts, total = self.source.components(self.context, reply).tolist()
        said = {"role": "assistant", "content": reply}
        named = {
            name: value
            for name, value in zip(self.source.rewards, parts, strict=True)
            if not math.isnan(value)
        }
        return [*self.context, said], None if math.isnan(total) else total, True, False, {"rewards": named}


def _plain(message: Message) -> Message:
    """Without what anyone said of it."""
    return {key: message[key] for key in (*TEMPLATE_KEYS, "weight") if message.get(key) is not None}
