"""`imitation`'s learning from preferences in one environment, by its own script with its own defaults.

    imitation/bin/python pipelines/benchmark/imitation_rival.py '{"env": "Pendulum-v1", "steps": 100000, ...}'

It runs in an environment of its own, which has imitation and nothing of ours, and prints a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
import warnings
from typing import Any

import gymnasium
import numpy as np

NAME = "rival/World-v0"


class Counted(gymnasium.Wrapper):
    """Counts the steps of all its environments: imitation counts those that its agent learned from only."""

    steps = 0

    def step(self, action: Any) -> tuple:
        Counted.steps += 1
        return super().step(action)


def make_env(env: str) -> gymnasium.Env:
    """A Gymnasium id, or `module:Class`."""
    module, _, name = env.partition(":")
    return getattr(importlib.import_module(module), name)() if name else gymnasium.make(env)


def make_counted(env: str, **unused: Any) -> gymnasium.Env:
    return Counted(make_env(env))


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Learns, then plays episodes of the last policy with actions drawn and with the most probable ones."""
    from imitation.policies import serialize
    from imitation.scripts.train_preference_comparisons import train_preference_comparisons_ex
    from stable_baselines3.common.vec_env import DummyVecEnv

    env, began = settings["env"], time.process_time()
    gymnasium.register(NAME, entry_point=make_counted, kwargs={"env": env})
    with tempfile.TemporaryDirectory() as folder:
        updates = {
            "environment": {"gym_id": NAME, "parallel": False},
            "total_timesteps": settings["steps"],
            "total_comparisons": settings["labels"],
            "seed": settings["seed"],
            "logging": {"log_dir": folder, "log_format_strs": []},
            "policy_evaluation": {"n_episodes_eval": 1},  # its own, which is not looked at
        }
        train_preference_comparisons_ex.run(config_updates=updates)
        steps, seconds = Counted.steps, time.process_time() - began
        world = DummyVecEnv([lambda: make_env(env)])
        policy = serialize.load_policy("ppo", world, path=f"{folder}/checkpoints/final/policy")
        seeds = range(settings["episodes"])
        returns = {
            way: [played(policy, make_env(env), seed, deterministic) for seed in seeds]
            for way, deterministic in (("sampled", False), ("probable", True))
        }
    return {"steps": steps, "labels": settings["labels"], "cpu_seconds": seconds, **returns}


def played(policy: Any, env: gymnasium.Env, seed: int, deterministic: bool) -> float:
    """The true return of an episode."""
    (observation, _), total, over = env.reset(seed=seed), 0.0, False
    while not over:
        action, _ = policy.predict(np.asarray(observation), deterministic=deterministic)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(json.loads(sys.argv[1]))))
