"""Self-play: worlds of several roles (roles.py), all of which policies of ours play, and the copy of the
learner that it plays against.

Each role that the learner played is an episode of its own to learn from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.roles import SharedTable
from rl_dialog.methods import BC
from rl_dialog.models.policy import Policy
from rl_dialog.training.versions import take_weights

LEARNER, COPY = "learner", "copy"  # who played a role, in the `player` of its Dialog's meta


@dataclass(frozen=True)
class Sides:
    """Who plays a role in self-play.

    Without a copy of other weights the learner plays all of them. Against one it plays who speaks first in
    every other group of episodes, and all others in the rest. Either way it plays `learner_role` alone where
    that is named.
    """

    against_copy: bool
    learner_role: str

    def __call__(self, table: SharedTable, role: str) -> str:
        """LEARNER or COPY."""
        if self.learner_role:
            return LEARNER if role == self.learner_role else COPY
        mine = not self.against_copy or (role == table.first) == (table.partner % 2 == 0)
        return LEARNER if mine else COPY

    def episodes(self, table: SharedTable) -> list[Episode]:
        """What became of a table. Raises UserError where its world does not have the learner's role."""
        if self.learner_role and self.learner_role not in table.views and table.failed is None:
            got = ", ".join(sorted(table.views))
            raise UserError(
                f"--learner_role {self.learner_role}: expected a role of {table.name}, which has {got}"
            )
        return table.episodes()


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
