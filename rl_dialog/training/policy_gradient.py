"""Policy gradient methods: their settings, losses and advantages; rl_dialog/cluster/learner.py trains with
them.

PPO (Schulman et al. 2017), with A_t from GAE (2016) and standardised over the batch, rho = pi(a|s) /
pi_old(a|s):

    loss = -mean min(rho A, clip(rho, 1 - clip, 1 + clip) A) - entropy_coeff mean H(pi)
           + value_coeff mean (v(s) - v_target)^2

v_target is the lambda-return A + v. With one pass over the whole batch rho = 1: REINFORCE is that with lambda
= 1 and v = 0, A2C (Mnih et al. 2016) with lambda = 1, n steps, and advantages as they are. APPO samples
asynchronously; V-trace (Espeholt et al. 2018) corrects for the age of the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl_dialog.errors import UserError
from rl_dialog.models.adversarial_reward import AdversarialRewardConfig


@dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation. Raises UserError for a number out of its range."""

    batch_size: int = 2048
    """system turns per round"""
    minibatch_size: int = 256
    """turns per update; 0: all of them"""
    passes: int = 4
    """passes over a batch"""
    gamma: float = 0.99
    """discount per turn"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    clip: float = 0.2
    """how far the probability ratio may go from 1"""
    entropy_coeff: float = 0.0
    """bonus for undecided policies"""
    learning_rate: float = 1e-3
    """learning rate of the policy"""
    value_learning_rate: float = 3e-3
    """learning rate of the value network"""
    value_coeff: float = 1.0
    """weight of the value's loss; it makes a difference where both networks share layers"""
    baseline: bool = True
    """subtract the state's value; without it returns are weights as they are, up to standardisation"""
    standardise: bool = True
    """advantages with mean 0 and deviation 1 over a batch"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """adam, or rmsprop as TensorFlow has it, with which A2C was published"""
    max_grad_norm: float = 10.0
    """clipping of each network's gradient"""
    lr_zero_steps: int = 0
    """steps of the environments after which the learning rates have fallen to zero, in a line; 0: they
    stay"""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.passes) < 1 or not 0 <= self.minibatch_size <= self.batch_size:
            raise UserError(
                "expected batch_size and passes of at least 1, and minibatch_size between 0 and batch_size, "
                f"got {self}"
            )
        if (
            not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1)
            or min(self.clip, self.learning_rate, self.value_learning_rate) <= 0
        ):
            raise UserError(
                "expected gamma and gae_lambda between 0 and 1, and a positive clip and learning rates, got "
                f"{self}"
            )
        if (
            self.optimizer not in ("adam", "rmsprop")
            or min(self.entropy_coeff, self.value_coeff, self.lr_zero_steps) < 0
            or self.max_grad_norm <= 0
        ):
            raise UserError(
                "expected adam or rmsprop, no negative coefficients or lr_zero_steps, and a positive "
                f"max_grad_norm, got {self}"
            )


@dataclass(frozen=True)
class PG(PPO):
    """REINFORCE: one gradient step per batch, with discounted returns as weights."""

    minibatch_size: int = 0
    passes: int = 1
    gae_lambda: float = 1.0
    learning_rate: float = 1e-3
    baseline: bool = False


@dataclass(frozen=True)
class A2C(PPO):
    """Advantage actor-critic as in OpenAI's baselines: one gradient step per batch, of n steps of each
    environment."""

    batch_size: int = 80
    """steps per round: 5 of each of 16 environments"""
    minibatch_size: int = 0
    passes: int = 1
    gae_lambda: float = 1.0
    entropy_coeff: float = 0.01
    learning_rate: float = 7e-4
    value_learning_rate: float = 7e-4
    value_coeff: float = 0.25
    """weight of the value's loss: 0.5 of half the squared error, as published"""
    standardise: bool = False
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    max_grad_norm: float = 0.5


@dataclass(frozen=True)
class APPO(PPO):
    """Asynchronous PPO: env runners never wait for the learner; V-trace corrects for the age of their
    policy."""

    batch_size: int = 1024
    minibatch_size: int = 0
    passes: int = 1
    fragment: int = 16
    """turns of a conversation that are sent to the learner at a time"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gae_lambda != PPO.gae_lambda:
            raise UserError(f"expected no gae_lambda, because V-trace has none, got {self.gae_lambda}")
        if self.fragment < 1:
            raise UserError(f"expected a fragment of at least 1 turn, got {self.fragment}")


@dataclass(frozen=True)
class GDPL(PPO):
    """PPO on rewards learned from demonstrations; the simulator's own are not used."""

    reward: AdversarialRewardConfig = field(default_factory=AdversarialRewardConfig)
    """how the reward is learned"""


# What MovingDot and Atari games start from. With few numbers to see, steps are dear and updates cheap; envs:
# 16, 32 and 16 of them.
POSITION = PPO(
    batch_size=1600, gamma=0.9, gae_lambda=0.9, entropy_coeff=0.01, learning_rate=3e-3, max_grad_norm=0.5
)
FEATURES = PPO(entropy_coeff=0.01, value_learning_rate=1e-3, max_grad_norm=0.5)
PIXELS = PPO(
    batch_size=1024, clip=0.1, entropy_coeff=0.01, learning_rate=2.5e-4, value_coeff=0.5, max_grad_norm=0.5
)


def generalised_advantages(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    terminated: Sequence[bool],
    *,
    gamma: float,
    gae_lambda: float,
) -> list[np.ndarray]:
    """A_t = d_t + gamma lambda A_t+1 with d_t = r_t + gamma v_t+1 - v_t, of pieces of episodes: float32 #
    (n,) each

    Args:
        rewards: (n,) each.
        values: (n + 1,) each, of the states before each action and after the last.
        terminated: whether the episode ended with the piece; then its last value counts as 0. Otherwise it
            stands for what comes after.
    """
    lengths = np.array([len(row) for row in rewards])
    is_step = np.arange(lengths.max()) < lengths[:, None]  # (E, T)
    deltas = np.zeros(is_step.shape)
    for i, (r, v, ended) in enumerate(zip(rewards, values, terminated, strict=True)):
        ahead = np.append(v[1:-1], 0.0 if ended else v[-1])
        deltas[i, : len(r)] = r + gamma * ahead - v[:-1]
    advantages, running = np.zeros(is_step.shape, np.float32), np.zeros(len(lengths))
    for t in reversed(range(is_step.shape[1])):
        running = deltas[:, t] + gamma * gae_lambda * running  # 0 after the end of a shorter piece
        advantages[:, t] = running
    return [row[:n] for row, n in zip(advantages, lengths, strict=True)]


def clipped_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-mean min(rho A, clip(rho) A), of (B,) each."""
    ratio = (log_probs - old_log_probs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
