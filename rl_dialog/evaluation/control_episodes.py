"""Episodes of a policy in a vector of environments: what it did, the true rewards, and what a reward model
would have given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rl_dialog.evaluation.intervals import Measure, estimate, rounded
from rl_dialog.models.control_policy import ControlPolicy
from rl_dialog.models.reward_model import RewardModel

LEAST = 3  # values: a line through two fits whatever they are


@dataclass(frozen=True)
class ControlEpisode:
    """One whole episode of n steps."""

    actions: np.ndarray  # (n,) int64 or (n, A) float32, as the policy chose them
    rewards: np.ndarray  # (n,) of the environment
    predicted: np.ndarray | None  # (n,) of the reward model, normalised
    frames: list[
        np.ndarray
    ]  # what was seen before each action, bytes (H, W, 3); none, or the first ones where there is a limit

    @property
    def true_return(self) -> float:
        """Undiscounted."""
        return float(self.rewards.sum(dtype=float))

    @property
    def predicted_return(self) -> float | None:
        """The same of the predicted rewards."""
        return None if self.predicted is None else float(self.predicted.sum(dtype=float))


def first_episodes(
    policy: ControlPolicy, envs: Any, *, seed: int, greedy: bool = True
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]]:
    """Steps of all N environments until each has ended its first episode: observations before them (N, ...),
    actions, true rewards (N,), which environments are still in that episode (N,): of the others a step does
    not count; and the infos of the observations. Sampled actions come from torch's generator.
    """
    observations, infos = envs.reset(seed=seed)
    running, space = np.ones(envs.num_envs, bool), envs.action_space
    while running.any():
        actions = policy.act(observations, greedy=greedy)
        env_actions = (
            actions if policy.config.discrete else np.clip(actions, space.low, space.high)
        )  # a Gaussian knows no bounds
        next_observations, rewards, terminated, truncated, next_infos = envs.step(env_actions)
        yield observations, actions, rewards, running, infos
        observations, infos = next_observations, next_infos
        running = running & ~(terminated | truncated)


def play_control(policy: ControlPolicy, envs: Any, *, seed: int, greedy: bool = True,
                 reward: RewardModel | None = None, draw: Callable[[np.ndarray], np.ndarray] | None = None,
                 drawn: int = 0, most_frames: int = 3000,
                 quiet: bool = True) -> list[ControlEpisode]:  # fmt: skip
    """One episode in each environment; of the first `drawn` ones there are frames, drawn by `draw` or as the
    environment's infos show them, up to `most_frames` of each."""
    count, rows = envs.num_envs, []
    frames: list[list[np.ndarray]] = [[] for _ in range(count)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        steps = first_episodes(policy, envs, seed=seed, greedy=greedy)
        for observations, actions, rewards, running, infos in tqdm(
            steps, desc="playing", unit=" steps", disable=quiet
        ):
            predicted = np.zeros(count, np.float32)
            if reward:
                predicted[running] = reward.predict(observations[running], actions[running])
            rows.append((actions, rewards, predicted, running))
            for i in np.flatnonzero(running[:drawn]):
                if len(frames[i]) < most_frames:
                    frames[i].append(infos["pictures"][i] if "pictures" in infos else draw(observations[i]))
    actions, rewards, predicted, running = (
        np.stack(column) for column in zip(*rows, strict=True)
    )  # (T, N, ...)
    lengths = running.sum(0)
    return [
        ControlEpisode(actions[:n, i], rewards[:n, i], predicted[:n, i] if reward else None, frames[i])
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def headline(episodes: Sequence[ControlEpisode]) -> dict[str, Any]:
    """The mean true return with its 95 % interval, the predicted one, and correlations over all steps and
    over episodes."""
    returns = [episode.true_return for episode in episodes]
    mean = estimate([Measure.mean(returns)])
    figures = {
        "episodes": len(episodes),
        "steps": sum(len(episode.rewards) for episode in episodes),
        "return": rounded(mean.value),
    }
    figures["return_interval"] = None if mean.low is None else [rounded(mean.low), rounded(mean.high)]
    if episodes[0].predicted is None:
        return figures
    predicted = np.array([episode.predicted_return for episode in episodes])
    true_steps, predicted_steps = (
        np.concatenate([getattr(episode, name) for episode in episodes]) for name in ("rewards", "predicted")
    )
    figures["predicted_return"] = rounded(float(predicted.mean()))
    step_correlation, return_correlation = (
        correlation(true_steps, predicted_steps),
        correlation(np.array(returns), predicted),
    )
    for name, value in (("step_correlation", step_correlation), ("return_correlation", return_correlation)):
        figures[name] = None if value is None else round(value, 3)
    return figures


def correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Pearson's; None of fewer than three pairs, and where one side does not vary."""
    if len(first) < LEAST or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])
