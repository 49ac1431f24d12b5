"""CartPole as many poles at once, with the 200 steps of the classic version; an episode can also start from
states that logs hold."""

from __future__ import annotations

import gymnasium
import numpy as np

LIMIT = 200  # steps of an episode


def cart_poles(count: int, *, seed: int) -> tuple[gymnasium.vector.VectorEnv, np.ndarray]:
    """`count` poles and their first observations, float32 (count, 4): position, speed, angle, angular speed.
    The reward is 1 a step."""
    env = gymnasium.make_vec(
        "CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point", max_episode_steps=LIMIT
    )
    return env, env.reset(seed=seed)[0]


def cart_poles_at(states: np.ndarray) -> gymnasium.vector.VectorEnv:
    """Poles in given states (N, 4), with all 200 steps before them. The world has no luck of its own: the
    same actions lead to the same states."""
    env, _ = cart_poles(len(states), seed=0)
    env.unwrapped.state = states.T.astype(np.float64)
    return env
