"""The weights that rounds of online learning are played with. Version v is what the policy speaks with before
round v, so that round k is played by version k; by an older one where actors play ahead (`staleness`), or as
the copy that plays the other roles (`lag`).

Old versions are kept in main memory while a round to come needs them, and stand in a checkpoint beside the
optimizer's state: a run that goes on plays with the very same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_dialog.models.policy import Policy

FROZEN = -1  # a lag: the copy stays what the policy was at the start


class Versions:
    """Versions of one policy, from its start on.

    Args:
        policy: the learner as it is at the start, which is version 0.
        staleness: rounds between the weights that a round is played with and those that learn from it.
        lag: rounds that the copy falls behind before it is renewed; 0 without a copy, FROZEN for good.
    """

    def __init__(self, policy: Policy, *, staleness: int = 0, lag: int = 0) -> None:
        self.staleness, self.lag = staleness, lag
        self.kept: dict[int, dict[str, Tensor]] = {0: weights_of(policy)}

    def played(self, step: int) -> int:
        """The version that plays round `step`."""
        return max(0, step - self.staleness)

    def opponent(self, step: int) -> int:
        """The version of the copy in round `step`."""
        version = self.played(step)
        return 0 if self.lag == FROZEN else version - version % (self.lag + 1)

    def needed(self, step: int) -> set[int]:
        """Versions up to `step` that it or a later round is played with. The start is always among them:
        returns are measured against it."""
        rounds = range(step, step + self.staleness + 1)
        players = {self.played(k) for k in rounds} if self.staleness else set()
        return {0} | players | ({self.opponent(k) for k in rounds} if self.lag else set())

    def remember(self, step: int, policy: Policy) -> None:
        """Keeps the policy as version `step`, where it is needed, and forgets what is not any more."""
        needed = self.needed(step)
        if step in needed and step not in self.kept:
            self.kept[step] = weights_of(policy)
        self.kept = {version: weights for version, weights in self.kept.items() if version in needed}

    def save(self, directory: Path, step: int) -> None:
        """Writes what rounds from `step` on need besides the policy itself and the start."""
        for version in self.needed(step) & self.kept.keys() - {0, step}:
            save_file(self.kept[version], directory / f"weights-{version}.safetensors")

    def load(self, directory: Path) -> None:
        """The inverse of `save`."""
        for path in sorted(directory.glob("weights-*.safetensors")):
            self.kept[int(path.stem.rpartition("-")[2])] = load_file(path)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """A copy of what a policy speaks with, in main memory: its language model, of one with adapters the
    adapters alone."""
    state = policy.lm.state_dict()
    names = [name for name in state if not policy.has_adapters or "lora_" in name]
    return {name: state[name].detach().to("cpu", copy=True) for name in names}


def take_weights(policy: Policy, weights: Mapping[str, Any]) -> None:
    """The inverse of `weights_of`, into another policy of the same start; arrays do as well as tensors."""
    state = policy.lm.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            # An array out of the object store cannot be written to, which torch would warn of.
            value = value if isinstance(value, Tensor) else np.require(value, requirements="W")
            state[name].copy_(torch.as_tensor(value))
