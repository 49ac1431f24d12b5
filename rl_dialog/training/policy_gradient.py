"""Settings of the policy gradient methods; rl_dialog/cluster/rllib.py trains with them.

PPO (Schulman et al. 2017), with A_t from GAE (2016) and standardised over the batch, rho = pi(a|s) / pi_old(a|s):

    loss = -mean min(rho A, clip(rho, 1 - clip, 1 + clip) A) - entropy_coeff mean H(pi) + mean (v(s) - v_target)^2

v_target is the lambda-return A + v. REINFORCE is the same with one pass over the whole batch (rho = 1), lambda = 1 and v = 0. APPO samples
asynchronously; V-trace (Espeholt et al. 2018) corrects for the age of the policy that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation. Raises ValueError for a number out of its range."""

    batch_size: int = 2048
    """system turns per round"""
    minibatch_size: int = 256
    """turns per update; 0: all of them"""
    passes: int = 4
    """passes over a batch"""
    gamma: float = 0.99
    """discount per turn"""
    gae_lambda: float = 0.95
    """of generalised advantage estimation"""
    clip: float = 0.2
    """how far the probability ratio may go from 1"""
    entropy_coeff: float = 0.0
    """bonus for undecided policies"""
    learning_rate: float = 1e-3
    """of the policy's Adam"""
    value_learning_rate: float = 3e-3
    """of the value network's Adam"""
    baseline: bool = True
    """subtract the state's value; without it returns are weights as they are, up to standardisation"""
    max_grad_norm: float = 10.0
    """clipping of each network's gradient"""
    lr_zero_steps: int = 0
    """steps of the environments after which the learning rates have fallen to zero, in a line; 0: they stay"""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.passes) < 1 or not 0 <= self.minibatch_size <= self.batch_size:
            raise ValueError(f"expected batch_size and passes of at least 1, and minibatch_size between 0 and batch_size, got {self}")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1) or min(self.clip, self.learning_rate, self.value_learning_rate) <= 0:
            raise ValueError(f"expected gamma and gae_lambda between 0 and 1, and a positive clip and learning rates, got {self}")


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
    """Advantage actor-critic (Mnih et al. 2016) as PPO writes it: one step per batch of a few steps of each environment, so that there is nothing to
    clip, and n-step returns (lambda 1)."""

    batch_size: int = 80
    minibatch_size: int = 0
    passes: int = 1
    gae_lambda: float = 1.0
    entropy_coeff: float = 0.01
    learning_rate: float = 7e-4
    value_learning_rate: float = 7e-4
    max_grad_norm: float = 0.5


@dataclass(frozen=True)
class APPO(PPO):
    """Asynchronous PPO: env runners never wait for the learner; V-trace corrects for the age of their policy."""

    batch_size: int = 1024
    minibatch_size: int = 0
    passes: int = 1
    fragment: int = 16
    """turns of a conversation that are sent to the learner at a time"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gae_lambda != PPO.gae_lambda:
            raise ValueError(f"expected no gae_lambda, because V-trace has none, got {self.gae_lambda}")
        if self.fragment < 1:
            raise ValueError(f"expected a fragment of at least 1 turn, got {self.fragment}")
