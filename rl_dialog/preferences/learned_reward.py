"""What stands in for the environment's reward while a policy learns from preferences.

It sees every batch of trajectories before advantages are computed (`LearnedRewards` in
rl_dialog/cluster/rllib.py calls it): it cuts them into clips for labellers, with the true rewards, and
answers with the reward model's rewards. Before the first model is published it answers zeros.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_dialog.errors import UserError
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.models.trajectory import Trajectory
from rl_dialog.preferences.segments import Clip, cut_clips


@dataclass
class _Rest:
    """Steps of an episode that goes on, too few for a clip so far."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    pictures: np.ndarray | None
    start: int  # of these steps in the episode


class LearnedReward:
    """Trajectories to rewards; `take_clips` gives what was cut since.

    Args:
        clip_length: steps of a clip.
        environment: its name, for the clips' source.
        keep: clips that are kept between two calls of `take_clips`, a uniform sample of all that were cut;
            the others are counted as dropped.
        seed: of that sample and of where each episode's first clip begins, so that clips are not always
            aligned to its start.
        device: where the model works.
        aligned: share of the episodes whose first clip begins with them; the others' begins anywhere in the
            first clip's length. Above 0, what remains of an episode at its time limit behind its whole
            clips is none: of two that cost something at every step the shorter one would be called better.
        curious: as far as labels do not confirm the reward, what its members disagree on stands in for it
            (`RewardModel.predict`).
    """

    def __init__(
        self, clip_length: int, *, environment: str = "", keep: int = 64, seed: int = 0, device: str = "cpu",
        aligned: float = 0.0, curious: bool = False) -> None:  # fmt: skip
        self.clip_length, self.environment, self.keep, self.device = clip_length, environment, keep, device
        self.aligned, self.curious = aligned, curious
        self.model: RewardModel | None = None
        self.version = 0  # 0: no model yet
        self.dropped = 0
        self.metrics: dict[str, float] = {}
        self._random = random.Random(seed)
        self._rests: dict[str, _Rest] = {}
        self._clips: list[Clip] = []
        self._starts: list[Clip] = []
        self._cut_since = 0

    def use(self, model: RewardModel, version: int) -> None:
        """From now on, weights and normaliser of this version. Raises UserError for one that is older than
        what is in use."""
        if version < self.version:
            raise UserError(f"expected a reward of version {self.version} or newer, got {version}")
        self.model, self.version = model.to(self.device), version

    def renew(self, seed: int) -> None:
        """All episodes start anew: what was kept of them is forgotten, and chance begins again."""
        self._random = random.Random(seed)
        self._rests = {}

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """The rewards of each trajectory's steps, float32 # (n,)"""
        drawn = [each for each in trajectories if each.pictures is not None]
        for trajectory in drawn or trajectories:  # what people could not see is no clip
            self._cut(trajectory)
        if self.model is None:
            return [np.zeros(len(trajectory.actions), np.float32) for trajectory in trajectories]
        observations = np.concatenate(
            [trajectory.observations[: len(trajectory.actions)] for trajectory in trajectories]
        )
        actions = np.concatenate([trajectory.actions for trajectory in trajectories])
        rewards = self.model.predict(observations, actions, curious=self.curious)
        true = np.concatenate([trajectory.rewards for trajectory in trajectories])
        self.metrics = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        if rewards.std() > 0 and true.std() > 0:
            self.metrics["reward_correlation"] = float(np.corrcoef(rewards, true)[0, 1])
        return np.split(rewards, np.cumsum([len(trajectory.actions) for trajectory in trajectories])[:-1])

    def cut_starts(self, trajectories: Sequence[Trajectory]) -> None:
        """Beginnings of episodes of a clip's length, one clip each; all of them are kept."""
        for each in trajectories:
            if any(other.pictures is not None for other in trajectories) and each.pictures is None:
                continue
            source = {"env": self.environment, "worker": each.worker, "episode": each.episode}
            source["reward_version"] = self.version
            n, about = len(each.actions), {"source": source, "first": 0, "pictures": each.pictures}
            steps = (each.observations[:n], each.actions, each.rewards)
            self._starts += cut_clips(*steps, length=self.clip_length, **about)

    def take_clips(self) -> list[Clip]:
        """What was cut since the last call."""
        clips, self._clips, self._starts, self._cut_since = [*self._starts, *self._clips], [], [], 0
        return clips

    def _cut(self, trajectory: Trajectory) -> None:
        """Whole clips of what is known of the episode; what remains waits for the rest, or is padded where
        there will be none."""
        rest = self._rests.pop(trajectory.episode, None)
        ended = trajectory.terminated or trajectory.truncated
        n, start = len(trajectory.actions), trajectory.start
        steps = [trajectory.observations[:n], trajectory.actions, trajectory.rewards]
        steps += [] if trajectory.pictures is None else [trajectory.pictures]
        if rest is not None and rest.start + len(rest.actions) == start:
            before = (rest.observations, rest.actions, rest.rewards, rest.pictures)
            steps, start = [np.concatenate(parts) for parts in zip(before, steps, strict=False)], rest.start
        elif start == 0:
            start = min(self._random.randrange(self.clip_length), n)
            start = 0 if self.aligned and self._random.random() < self.aligned else start
            steps = [values[start:] for values in steps]
        length = len(steps[1])
        too_short = start + length < self.clip_length  # such episodes would never give a clip
        padded = trajectory.terminated or (trajectory.truncated and (not self.aligned or too_short))
        whole = length if padded else length // self.clip_length * self.clip_length
        source = {
            "env": self.environment,
            "worker": trajectory.worker,
            "episode": trajectory.episode,
            "reward_version": self.version,
        }
        *whole_steps, pictures = [values[:whole] for values in steps] + [None] * (4 - len(steps))
        about = {"source": source, "first": start, "pictures": pictures}
        for clip in cut_clips(*whole_steps, length=self.clip_length, **about):
            self._keep(clip)
        if not ended:
            left = [values[whole:] for values in steps] + [None] * (4 - len(steps))
            self._rests[trajectory.episode] = _Rest(*left, start + whole)

    def _keep(self, clip: Clip) -> None:
        """Reservoir sampling (Vitter 1985): every clip cut since the last `take_clips` is equally likely to
        be kept."""
        self._cut_since += 1
        if len(self._clips) < self.keep:
            self._clips.append(clip)
            return
        self.dropped += 1
        place = self._random.randrange(self._cut_since)
        if place < self.keep:
            self._clips[place] = clip
