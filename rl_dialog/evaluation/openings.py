"""Openings of logged conversations as a world of two roles, for self-play: a logged user's first words stand,
and from there on two policies talk.

    assistant   sees  user: hi                       says  hello        sees  user: what is new?      says ...
    user        sees  assistant: hi  user: hello     says  what is new?
                      (the log's words: context)

Nobody pays in this world; `RewardMix` judges the whole conversation when it is over, from each side (Jaques
et al. 2019, Saleh et al. 2019: bot sentiment, question, conversation repetition and their mix).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import read_dialogs
from rl_dialog.data.tokenize import TEMPLATE_KEYS
from rl_dialog.errors import UserError
from rl_dialog.rewards import Reward, apply_rewards

ROLES = ("assistant", "user")  # who answers the opening, and who is taken to have said it
WORLD = "world"  # the component of what the world itself paid, where other rewards take its place

Message = dict[str, Any]


@dataclass(frozen=True)
class RewardMix:
    """Rewards of conversations that are over, by name and with weights."""

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]
    world_pays: bool = True  # is there a reward of the world's own, to be kept beside?

    def __call__(self, dialog: Dialog) -> None:
        """Gives each reply its components and their weighted sum. What the world paid stays as a component.

        A reply that no reward applies to (nobody answered it, say) earned 0 where another reply of the
        conversation earned something; where there is none, nobody knows what any of them earned. Raises
        UserError for a reward that fails.
        """
        replies = [dialog.messages[i] for i in dialog.replies]
        for reply in replies if self.world_pays else ():
            if reply.get("reward") is not None:
                reply["rewards"] = {**reply.get("rewards", {}), WORLD: reply["reward"]}
        apply_rewards(dialog, self.rewards, self.weights)
        if any(reply["reward"] is not None for reply in replies):
            for reply in replies:
                reply["reward"] = 0.0 if reply["reward"] is None else reply["reward"]


class Openings:
    """Makes worlds over the openings of a split: what stands before the first reply, each once.

    Raises UserError where there are none.
    """

    __name__ = "openings"

    def __init__(self, data: str, split: str, turns: int) -> None:
        """turns: replies of each side."""
        self.turns = turns
        found: dict[str, list[Message]] = {}
        for dialog in read_dialogs(data, split):
            opening = _opening(dialog)
            if opening:
                found.setdefault(json.dumps(opening), opening)
        if not found:
            raise UserError(
                f"--contexts {data}: expected conversations that a user opens, got none in {split}"
            )
        self.openings = list(found.values())

    def __call__(self) -> Talk:
        return Talk(self)


class Talk:
    """A conversation of two roles that goes on for so many turns."""

    def __init__(self, source: Openings) -> None:
        self.source, self.max_turns = source, 2 * source.turns

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The opening that the seed stands for, as the assistant sees it."""
        openings = self.source.openings
        opening = openings[int(np.random.default_rng(seed).integers(len(openings)))]
        self.said = 0
        self.views = {"assistant": list(opening), "user": [_turned(message) for message in opening]}
        return list(opening), {"role": "assistant"}

    def step(self, reply: str) -> tuple[list[Message], dict[str, float], bool, bool, dict[str, Any]]:
        """Says the reply to the other side."""
        speaker, hearer = ROLES[self.said % 2], ROLES[1 - self.said % 2]
        self.said += 1
        self.views[speaker].append({"role": "assistant", "content": reply})
        self.views[hearer].append({"role": "user", "content": reply})
        return list(self.views[hearer]), {}, self.said == self.max_turns, False, {"role": hearer}


def _opening(dialog: Dialog) -> list[Message]:
    """System messages and the user's words before the first reply; empty where the assistant began."""
    opening: list[Message] = []
    for message in dialog.messages:
        if message["role"] not in ("system", "user") or message["content"] is None:
            break
        opening.append({key: message[key] for key in TEMPLATE_KEYS if message.get(key) is not None})
    return opening if any(message["role"] == "user" for message in opening) else []


def _turned(message: Message) -> Message:
    """As the one who said it sees it; a system message stays what it is."""
    return {**message, "role": "assistant"} if message["role"] == "user" else dict(message)
