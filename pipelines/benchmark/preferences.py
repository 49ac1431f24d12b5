"""`benchmark prefer`: environment steps/s of PPO on one core, learning included: plain RLlib, ours, and ours
with the preference machinery.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from envs import control_env
from pipelines.benchmark.measuring import Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig

ENVS, BATCH, MINIBATCH, PASSES, GAMMA = (
    32,
    1024,
    256,
    4,
    0.9,
)  # of all contenders: MovingDot with positions, networks of 2 x 64


def measure(config: BenchmarkConfig) -> Result:
    """Environment steps and their seconds. All contenders run in this process and start no Ray."""
    make_envs = partial(control_env("moving_dot"), observations="position")
    rounds = max(1, config.steps // BATCH)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            "plain": _plain(make_envs, rounds),
            "ours, true reward": _ours(make_envs, rounds, Path(folder), learned=False),
            "ours, learned reward and clips": _ours(make_envs, rounds, Path(folder), learned=True),
        }
        seconds = take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    plain = "RLlib's env runner, module, connectors and learner"
    setting = f"{rounds * BATCH} steps of {ENVS} dots with positions, PPO; plain: {plain}"
    return speeds(config, {setting: (rounds * BATCH, seconds)})


def _plain(make_envs: Callable, rounds: int) -> Callable[[], None]:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.learner.training_data import TrainingData
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    class Runner(SingleAgentEnvRunner):
        def make_env(self) -> None:
            self.env, self.num_envs = _ListInfos(make_envs(ENVS)), ENVS

    probe = make_envs(1)
    config = PPOConfig().environment(
        env="dots",
        observation_space=probe.single_observation_space,
        action_space=probe.single_action_space,
        disable_env_checking=True,
    )
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS, env_runner_cls=Runner)
    config.training(
        train_batch_size_per_learner=BATCH,
        minibatch_size=MINIBATCH,
        num_epochs=PASSES,
        gamma=GAMMA,
        use_kl_loss=False,
        grad_clip=0.5,
    )
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
    config.validate()
    runner = Runner(config=config, worker_index=0)
    learner = config.build_learner(env=runner.env.unwrapped)
    steps = 0

    def call() -> None:
        nonlocal steps
        for _ in range(rounds):
            episodes = runner.sample(num_timesteps=BATCH)
            runner.get_metrics()
            steps += BATCH
            learner.update(
                training_data=TrainingData(episodes=episodes),
                timesteps={"num_env_steps_sampled_lifetime": steps},
                num_epochs=PASSES,
                minibatch_size=MINIBATCH,
                shuffle_batch_per_epoch=True,
            )
            runner.module.set_state(learner.module["default_policy"].get_state())

    return call


class _ListInfos:
    """RLlib's env runner wants an info for each environment; the dots have none."""

    def __init__(self, envs: Any) -> None:
        self.envs = self.unwrapped = envs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)

    def reset(self, **arguments: Any) -> tuple[Any, list[dict]]:
        return self.envs.reset(**arguments)[0], [{} for _ in range(ENVS)]

    def step(self, actions: Any) -> tuple[Any, ...]:
        return *self.envs.step(actions)[:4], [{} for _ in range(ENVS)]


def _ours(make_envs: Callable, rounds: int, folder: Path, *, learned: bool) -> Callable[[], None]:
    """The learner of `prefer`; its clips are taken as the asker would, and its reward is an ensemble of
    three.
    """
    from rl_dialog.cluster.preference_learner import Learner, LearnerSettings
    from rl_dialog.cluster.preference_plan import reward_shape
    from rl_dialog.models.reward_model import RewardModel
    from rl_dialog.training.policy_gradient import PPO

    ppo = PPO(batch_size=BATCH, minibatch_size=MINIBATCH, passes=PASSES, gamma=GAMMA, max_grad_norm=0.5)
    learner = Learner(
        LearnerSettings("moving_dot", make_envs, ppo, 25, envs=ENVS, learned=learned),
        folder / f"learned_{learned}",
    )
    torch.manual_seed(0)
    published = (1, RewardModel(reward_shape(make_envs))) if learned else None

    def call() -> None:
        for _ in range(rounds):
            learner.step(published)

    return call
