"""Self-play: worlds of several roles, all of which policies of ours play, and the copy of the learner that it
plays against.

A role sees the conversation its own way (envs/text_world.py): what it said is the assistant's. So an episode
becomes one Dialog per role, and each role that the learner played is an episode of its own to learn from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_dialog.data.schema import Dialog, end_of
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Episode, Table
from rl_dialog.evaluation.generation import Reply
from rl_dialog.methods import BC
from rl_dialog.models.policy import Policy
from rl_dialog.training.versions import take_weights

LEARNER, COPY = "learner", "copy"  # who played a role, in the `player` of its Dialog's meta

Message = dict[str, Any]


@dataclass
class View:
    """What one role saw, said and earned."""

    messages: list[Message] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    rewards: dict[int, float | None] = field(default_factory=dict)  # index of a reply -> what it earned
    early: float | None = 0.0  # earned before the role said anything

    def see(self, messages: Sequence[Message], name: str) -> None:
        """Takes a newer view. Raises UserError for one that rewrites what was seen or said."""
        if messages[: len(self.messages)] != self.messages:
            got = str(messages[-2:])[:200]
            raise UserError(f"{name}: expected messages that begin with those before, got {got}")
        self.messages = list(messages)

    def say(self, reply: Reply, messages: Sequence[Message], name: str) -> None:
        """Takes the view that its reply led to."""
        place = len(self.messages)
        if len(messages) <= place or messages[place]["role"] != "assistant":
            got = str(messages[-2:])[:200]
            raise UserError(
                f"{name}: expected step to return the conversation so far with the reply added, got {got}"
            )
        self.see(messages, name)
        self.replies.append(reply)
        self.rewards[place], self.early = self.early, 0.0

    def earn(self, reward: float | None) -> None:
        """Adds to what the last reply earned; once it is unknown it stays so."""
        last = max(self.rewards, default=None)
        before = self.early if last is None else self.rewards[last]
        total = None if reward is None or before is None else before + float(reward)
        if last is None:
            self.early = total
        else:
            self.rewards[last] = total

    def marked(self) -> list[Message]:
        """The messages with rewards; of the assistant's those that are the world's own have weight 0."""
        marked = []
        for i, message in enumerate(self.messages):
            own = message["role"] == "assistant" and i not in self.rewards
            more = {"weight": 0} if own else {"reward": self.rewards[i]} if i in self.rewards else {}
            marked.append({**message, **more})
        return marked


class SharedTable(Table):
    """One running conversation of several roles, of which the learner plays some.

    Without a copy of other weights the learner plays all of them. Against one it plays who speaks first in
    every other group of episodes, and all others in the rest. Either way it plays `learner_role` alone where
    that is named.
    """

    def __init__(self, *given: Any, against_copy: bool, learner_role: str, **more: Any) -> None:
        super().__init__(*given, **more)
        if self.role is None and self.failed is None:
            raise UserError(
                f"{self.name}: expected a world of several roles for self-play, whose info names the one "
                "that speaks (envs/text_world.py), got one of a single player; "
                "textarena:NAME?opponent=self is a world of several"
            )
        self.against_copy, self.learner_role = against_copy, learner_role
        self.first = self.role or "assistant"
        self.views = {self.first: View(list(self.messages))}

    def player_of(self, role: str) -> str:
        """LEARNER or COPY."""
        if self.learner_role:
            return LEARNER if role == self.learner_role else COPY
        mine = not self.against_copy or (role == self.first) == (self.partner % 2 == 0)
        return LEARNER if mine else COPY

    def step(self, reply: Reply) -> None:
        """Says the reply of whose turn it is."""
        messages, reward, self.terminated, truncated, info = self.env.step(reply.text)
        speaker, heard = self.views[self.role], info.get("role", self.role)
        said = {"role": "assistant", "content": reply.text}
        speaker.say(reply, messages if heard == self.role else [*speaker.messages, said], self.name)
        if heard != self.role:
            self.views.setdefault(heard, View()).see(messages, self.name)
        self.failed, self.told = info.get("failed"), self.told | info.get("meta", {})
        earned = reward if isinstance(reward, Mapping) else {self.role: reward}
        for role, value in earned.items():
            self.views.setdefault(role, View()).earn(None if self.failed is not None else value)
        self.role, self.messages = heard, self.views[heard].messages
        self.replies.append(reply)
        last = len(self.replies) >= self.max_turns
        self.finished = self.terminated or truncated or last or self.failed is not None

    def episodes(self) -> list[Episode]:
        """What became of it, as each role saw it that spoke, in the order of their names."""
        spoke = {role: view for role, view in sorted(self.views.items()) if view.rewards}
        if self.learner_role and self.learner_role not in self.views and self.failed is None:
            got = ", ".join(sorted(self.views))
            raise UserError(
                f"--learner_role {self.learner_role}: expected a role of {self.name}, which has {got}"
            )
        earned = [value for view in self.views.values() for value in (*view.rewards.values(), view.early)]
        end = end_of(earned, terminated=bool(self.terminated), failed=self.failed is not None)
        seen = spoke or {self.first: self.views[self.first]}
        return [self._episode(role, view, end) for role, view in seen.items()]

    def _episode(self, role: str, view: View, end: str) -> Episode:
        meta = self.told | {"episode": self.index, "seed": self.seed, "end": end, "role": role}
        meta |= {"player": self.player_of(role)} | ({} if self.failed is None else {"failed": self.failed})
        dialog = Dialog(
            id=f"{self.name}-{self.index:06d}-{role}",
            messages=view.marked(),
            source=self.name,
            truncated=not self.terminated,
            meta=meta,
        )
        return Episode(self.index, dialog, view.replies, end, opens=role == self.first)


class Opponent:
    """A frozen copy of the learner that takes the weights of any of its versions."""

    def __init__(self, policy: Policy) -> None:
        """policy: the learner, as it is at the start."""
        with torch.no_grad():
            self.policy = Policy(copy.deepcopy(policy.lm).requires_grad_(False), BC(), policy.model_config)
            self.policy.steering = policy.steering
        self.policy.to(policy.device).eval()
        self.version: int | None = None

    def at(self, version: int, weights: Mapping[str, Tensor]) -> Policy:
        """The policy with these weights, which are those of `version`."""
        if self.version != version:
            take_weights(self.policy, weights)
            self.version = version
        return self.policy
