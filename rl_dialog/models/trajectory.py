"""What a policy did, as learned rewards and clips of an episode are made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trajectory:
    """A piece of one episode: n steps that were taken one after the other.

    An environment numbers its episodes; a trajectory that does not begin with one (`start` > 0) continues the
    environment's earlier one.
    """

    observations: np.ndarray  # (n + 1, ...): before each action and after the last
    actions: np.ndarray  # (n,) or (n, A)
    log_probs: np.ndarray  # (n,) of the actions under the policy that took them
    rewards: np.ndarray  # (n,) of the environment, never learned ones
    terminated: bool  # the episode ended with the last action
    truncated: bool = False  # it was cut off there; both False: it goes on
    episode: str = ""  # the same for all pieces of an episode, and for no other in a run
    start: int = 0  # steps of the episode before these
    worker: int = 0  # which env runner
    env: int = 0  # and which of its environments
    pictures: np.ndarray | None = None  # (n, H, W, 3) bytes: what people see before each action, if drawn
