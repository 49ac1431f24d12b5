"""The pole on a cart whose episodes go on after the fall: 500 steps always, reward 1 while cart and pole are
inside the limits.

What a user would write to take an end away that tells more than people say. After the fall cart and pole go
on by the same equations, so positions grow to hundreds and nothing is rewarded any more.
"""

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class EndlessCartPole(gymnasium.Wrapper):
    """Observations and actions of CartPole-v1."""

    def __init__(self) -> None:
        super().__init__(gymnasium.wrappers.TimeLimit(CartPoleEnv(), 500))

    def step(self, action):
        inner = self.unwrapped
        inner.steps_beyond_terminated = None  # it would warn of every step after the fall
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(not terminated), False, truncated, info
