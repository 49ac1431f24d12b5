"""Rewards learned from experts: what tells a policy's turns from an expert's is what the policy is paid for.

Guided dialog policy learning (Takanobu et al. 2019), which is adversarial inverse reinforcement learning (Fu
et al. 2018) on dialog states:

    f(s, a, s') = g(s, a) + gamma h(s') - h(s)                       h = 0 after the end of a dialog
    loss        = -mean over experts of f + mean over the policy of f,     every weight clamped to +-`clamp`
    reward      = f(s, a, s') - w log pi(a|s), less its mean over the batch             w = `log_prob_weight`

Published is w = 1 without the centring. Every turn then earns about the entropy of 209 acts, many nats, so
that long and random dialogs pay best.

S bits of a state, A acts, n turns of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rl_dialog.errors import UserError
from rl_dialog.models.trajectory import Trajectory


@dataclass(frozen=True)
class AdversarialRewardConfig:
    """How the reward is learned. Raises UserError for a number out of its range."""

    learning_rate: float = 1e-3
    """learning rate of RMSprop"""
    batch_size: int = 32
    """turns of either side per update; a batch of the policy's turns is gone through once"""
    clamp: float = 0.02
    """largest absolute weight"""
    hidden: int = 50
    """hidden size of its two networks, g and h"""
    gamma: float = 0.99
    """discount per turn of the shaping term h"""
    log_prob_weight: float = 0.0
    """how much improbable acts earn; 1 as published"""
    centre: bool = True
    """subtract the batch's mean, so that a turn more earns nothing by itself; not so as published"""

    def __post_init__(self) -> None:
        if (
            self.learning_rate <= 0
            or self.batch_size < 1
            or self.clamp <= 0
            or self.hidden < 1
            or not 0 <= self.gamma <= 1
        ):
            raise UserError(f"expected positive numbers and gamma between 0 and 1, got {self}")


class AdversarialReward(nn.Module):
    """A learned reward: called with the trajectories of a batch it first learns from them, then says what
    each of their turns earned.

    `states` (N, S), `actions` (N, A) and `dialogs` (N,) are the experts' turns, dialog after dialog.
    """

    def __init__(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        dialogs: np.ndarray,
        config: AdversarialRewardConfig,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.metrics = config, {}
        is_last = np.append(dialogs[1:] != dialogs[:-1], True)
        following = np.where(is_last[:, None], 0.0, np.roll(states, -1, axis=0)).astype(np.float32)
        self.experts = tuple(
            torch.from_numpy(np.ascontiguousarray(x)).float() for x in (states, actions, following, ~is_last)
        )
        size, acts = states.shape[1], actions.shape[1]
        self.generator = torch.Generator().manual_seed(seed)
        self.g = nn.Sequential(nn.Linear(size + acts, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1))
        self.h = nn.Sequential(nn.Linear(size, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1))
        self.optimizer = torch.optim.RMSprop(self.parameters(), lr=config.learning_rate)
        self._clamp()

    def f(self, states: Tensor, actions: Tensor, following: Tensor, goes_on: Tensor) -> Tensor:
        """g(s, a) + gamma h(s') - h(s) # (N,)"""
        ahead = self.config.gamma * goes_on * self.h(following).squeeze(-1)
        return self.g(torch.cat([states, actions], -1)).squeeze(-1) + ahead - self.h(states).squeeze(-1)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """The rewards of each trajectory's turns, float32 # (n,)"""
        turns = [_turns(trajectory) for trajectory in trajectories]
        self.learn(*(torch.cat(column) for column in zip(*turns, strict=True)))
        with torch.no_grad():
            weight = self.config.log_prob_weight
            turn_rewards = [
                self.f(*turn).numpy() - weight * trajectory.log_probs
                for turn, trajectory in zip(turns, trajectories, strict=True)
            ]
        mean = float(np.concatenate(turn_rewards).mean())
        self.metrics["learned_reward"] = mean
        return [(rewards - mean * self.config.centre).astype(np.float32) for rewards in turn_rewards]

    def learn(self, states: Tensor, actions: Tensor, following: Tensor, goes_on: Tensor) -> None:
        """One pass over the policy's turns # (N, ...), each batch against as many of the experts', drawn at
        random."""
        policy, losses = (states, actions, following, goes_on), []
        for batch in torch.randperm(len(states), generator=self.generator).split(self.config.batch_size):
            expert_rows = torch.randint(len(self.experts[0]), (len(batch),), generator=self.generator)
            expert, ours = (
                self.f(*(x[expert_rows] for x in self.experts)).mean(),
                self.f(*(x[batch] for x in policy)).mean(),
            )
            self.optimizer.zero_grad()
            (ours - expert).backward()
            self.optimizer.step()
            self._clamp()
            losses.append((ours - expert).item())
        self.metrics = {"discriminator_loss": float(np.mean(losses))}

    @torch.no_grad()
    def _clamp(self) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-self.config.clamp, self.config.clamp)


def _turns(trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    observations = torch.from_numpy(
        np.array(trajectory.observations, np.float32)
    )  # a copy: what another process sent cannot be written to
    goes_on = torch.ones(len(trajectory.actions))
    if trajectory.terminated:
        goes_on[-1] = 0
    return (
        observations[:-1],
        torch.from_numpy(np.array(trajectory.actions, np.float32)),
        observations[1:],
        goes_on,
    )
