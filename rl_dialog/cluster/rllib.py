"""Reinforcement learning of policies with RLlib's new API stack.

    env runners   actors, each with a vector of environments and a copy of the policy; they sample actions
                  (env_runner.py)
       | episodes
    learner       rewards are replaced if a learned one is given, advantages by GAE, updates of both networks
                  (learner.py)
       | weights back to the env runners

An environment comes as a constructor `make_envs(num_envs, worker=i)` of a gymnasium VectorEnv that starts its
next episode one step after an end (AutoresetMode.NEXT_STEP) and returns new arrays: observations that an
ActPolicy ({"obs", "action_mask"}, MultiBinary actions) or a ControlPolicy (arrays; Discrete or Box)
understands. `PolicyTrainer.train()` is one round of all this; the losses are described in
rl_dialog/training/policy_gradient.py.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from rl_dialog.cluster.env_runner import STRIDE, VectorEnvRunner, trajectory_of
from rl_dialog.cluster.learner import (
    APPOPolicyLearner,
    LearnedReward,
    PolicyLearner,
    PolicyModule,
    PPOPolicyLearner,
    TargetModule,
)
from rl_dialog.cluster.rollout import STALLED
from rl_dialog.cluster.waiting import cpus_of_cluster
from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy
from rl_dialog.models.control_policy import ControlPolicy
from rl_dialog.models.trajectory import Trajectory
from rl_dialog.training.optim import load_optimizer, save_optimizer
from rl_dialog.training.policy_gradient import APPO, PPO

MakeEnvs = Callable[..., gymnasium.vector.VectorEnv]
Policy = TypeVar("Policy", ActPolicy, ControlPolicy)

RESTARTS = 3  # of each env runner, without a sample in between, after which the environments are to blame
AGAIN = 1.0  # seconds until a round is tried again in which no env runner sampled anything
PROBE = 0.5  # seconds for env runners that died to say that they are back


class PolicyTrainer:
    """RLlib's training of one policy, as a context manager; with workers it needs a running Ray.

    Args:
        policy: an ActPolicy or a ControlPolicy to start with; it is copied.
        make_envs: constructor of a vector of environments, see above.
        settings: PPO, PG or APPO.
        reward: a learned reward; by default the environment's. It is called in this process, with each batch
            before it is learned from; where it returns None the environment's rewards stay.
        workers, envs: env runner actors, and environments of each. Without workers this process samples and
            learns, and no Ray is started.
        device: where the learner works and, without workers, the policy acts; workers are CPU processes.
        first_round, renew_every: the round to start with, and how often episodes start anew; 0: only in the
            first round.
    """

    def __init__(self, policy: Policy, make_envs: MakeEnvs, settings: PPO, *,
                 reward: LearnedReward | None = None, workers: int = 1, envs: int = 64, device: str = "cpu",
                 seed: int = 0, first_round: int = 0, renew_every: int = 1) -> None:  # fmt: skip
        if workers < 0 or envs < 1:
            raise UserError(
                f"expected workers of at least 0 and envs of at least 1, got {workers} and {envs}"
            )
        if not workers and isinstance(settings, APPO):
            raise UserError("appo samples while it learns: expected at least one worker, got 0")
        self.kind, self.shape, self.settings, self.seed, self.round = (
            type(policy),
            policy.config,
            settings,
            seed,
            first_round,
        )
        self.steps = 0  # of the environments, learned from
        run = {"make_envs": make_envs, "seed": seed, "first_round": first_round, "renew_every": renew_every}
        config = algorithm_config(policy, run, settings)
        config.env_runners(num_env_runners=workers, num_envs_per_env_runner=envs)
        for name in ("ray.rllib", "ray._common.deprecation"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.algorithm = config.build_algo() if workers else None
        if not workers:
            config.validate()
            self.runner = VectorEnvRunner(config=config, worker_index=0)
            self.learner = config.build_learner(env=self.runner.env.unwrapped)
            self.runner.module.network.to(device)
        self._on_learner(lambda learner: learner.network.to(device))
        if reward:  # not by the config, which is copied and sent to the env runners
            self._on_learner(lambda learner: learner.learn_from(reward))

    def __enter__(self) -> PolicyTrainer:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.algorithm:
            self.algorithm.stop()

    def train(self) -> dict[str, float]:
        """One round. Env runners that died are made again; what is left of them samples alone until then.
        Raises UserError if nothing comes back.

        Its metrics: `steps` so far; the parts of the loss, means over the round; of the `episodes` that ended
        the mean `return` and `length` with the environment's own rewards, and other outcomes that it tells.
        Where no episode ended there are none of these. With workers `worker_restarts`: how many were made
        again because their process died.
        """
        seed = self.seed * STRIDE + self.round
        self.round += 1
        if not self.algorithm:
            return self._metrics(self._train_here(seed))
        _seed_minibatches(seed)
        return self._metrics(self._until_sampled(self.algorithm.train, steps_sampled))

    def sample(self) -> list[Trajectory]:
        """One round of sampling that nothing is learned from: what the policy does as it is now. Raises
        UserError if nothing came back."""
        self.round += 1
        if self.algorithm:
            episodes = self._until_sampled(self._sampled_apart, bool)
        else:
            episodes = self.runner.sample(num_timesteps=self.settings.batch_size)
            self.runner.get_metrics()
        return [trajectory_of(each) for each in episodes]

    def sample_starts(self, steps: int, number: int) -> list[Trajectory]:
        """The first `steps` of at least so many episodes, by the policy as it is now; nothing is learned from
        them. It is no round."""
        if not self.algorithm:
            times = -(-number // self.runner.num_envs)
            return [trajectory_of(each) for each in self.runner.sample_starts(steps=steps, times=times)]
        group = self.algorithm.env_runner_group
        envs = self.algorithm.config.num_envs_per_env_runner * max(1, group.num_healthy_remote_workers())
        sampled = group.foreach_env_runner(
            lambda runner: runner.sample_starts(steps=steps, times=-(-number // envs)),
            local_env_runner=False,
        )
        return [trajectory_of(each) for episodes in sampled for each in episodes]

    def _sampled_apart(self) -> list[Any]:
        self.algorithm.restore_env_runners(self.algorithm.env_runner_group)
        episodes, _ = synchronous_parallel_sample(  # with its metrics, or the next round would count them
            worker_set=self.algorithm.env_runner_group,
            max_env_steps=self.settings.batch_size,
            _uses_new_env_runners=True,
            _return_metrics=True,
        )
        return episodes

    def _until_sampled(self, round_of: Callable[[], Any], has_samples: Callable[[Any], Any]) -> Any:
        """What a round brings, repeated while all env runners are dead or being made again.

        Raises UserError where each of them was made again and again and none came back with anything, and
        after `STALLED` seconds.
        """
        group, began = self.algorithm.env_runner_group, time.monotonic()
        most = group.num_remote_worker_restarts() + RESTARTS * group.num_remote_env_runners()
        while not has_samples(samples := round_of()):
            seconds, restarts = time.monotonic() - began, group.num_remote_worker_restarts()
            if restarts > most or seconds > STALLED:
                raise UserError(
                    f"expected steps from the env runners, got none within {seconds:.0f} s: all of them "
                    f"failed or have no place. {cpus_of_cluster()}; RL_DIALOG_DEBUG=1 shows Ray's log"
                )
            time.sleep(AGAIN)
        return samples

    def pace(self, factor: float) -> None:
        """From now on the policy's learning rate is so many times what the settings say."""

        def change(learner: PolicyLearner) -> None:
            learner.pace = factor

        self._on_learner(change)

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """What the policy normalises observations by takes these in, before anything is learned from any."""
        seen = np.concatenate([each.observations[: len(each.actions)] for each in trajectories])
        self._on_learner(lambda each: each.network.fit_observations(torch.from_numpy(seen)))
        if self.algorithm:
            self.algorithm.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.algorithm.learner_group, inference_only=True
            )
        else:
            self.runner.module.network.load_state_dict(self.learner.network.state_dict())

    def policy(self) -> Policy:
        """A copy of the policy as it is now."""
        policy = self.kind(self.shape)
        policy.load_state_dict(
            self._on_learner(
                lambda each: {
                    name: value.detach().cpu().clone() for name, value in each.network.state_dict().items()
                }
            )
        )
        return policy.eval()

    def save(self, directory: Path) -> None:
        """Writes what a resumed run needs besides the policy: the state of its optimizers, and the number of
        steps."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "trainer.json").write_text(json.dumps({"steps": self.steps}) + "\n", encoding="utf-8")
        self._on_learner(
            lambda learner: [
                save_optimizer(each, directory / f"{name}.safetensors")
                for name, each in learner.optimizers.items()
            ]
        )

    def load(self, directory: Path) -> None:
        """The inverse of `save`."""
        self.steps = json.loads((directory / "trainer.json").read_text(encoding="utf-8"))["steps"]

        def restore(learner: PolicyLearner) -> None:
            learner.earlier_steps = self.steps
            for name, optimizer in learner.optimizers.items():
                load_optimizer(optimizer, directory / f"{name}.safetensors")

        self._on_learner(restore)

    def _train_here(self, seed: int) -> dict[str, Any]:
        episodes = self.runner.sample(num_timesteps=self.settings.batch_size)
        steps = sum(map(len, episodes))
        _seed_minibatches(seed)
        learned = self.learner.update(
            training_data=TrainingData(episodes=episodes),
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.steps - self.learner.earlier_steps + steps},
        )
        self._on_learner(
            lambda learner: self.runner.module.network.load_state_dict(learner.network.state_dict())
        )
        return {
            "env_runners": {**self.runner.get_metrics(), "num_env_steps_sampled": steps},
            "learners": learned,
        }

    def _metrics(self, result: Mapping[str, Any]) -> dict[str, float]:
        metrics = metrics_of(result)
        self.steps += int(metrics.pop("new_steps"))
        if self.algorithm:
            metrics["worker_restarts"] = float(self.algorithm.env_runner_group.num_remote_worker_restarts())
        return {"steps": self.steps, **metrics}

    def _on_learner(self, use: Callable[[PolicyLearner], Any]) -> Any:
        return (
            self.algorithm.learner_group.foreach_learner(use).result_or_errors[0].get()
            if self.algorithm
            else use(self.learner)
        )


def _seed_minibatches(seed: int) -> None:
    """RLlib shuffles with the global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def algorithm_config(policy: Policy, run: Mapping[str, Any], settings: PPO) -> AlgorithmConfig:
    """RLlib's config of a method. `run` is what `VectorEnvRunner` reads."""
    asynchronous = isinstance(settings, APPO)
    config = APPOConfig() if asynchronous else PPOConfig()
    probe = run["make_envs"](1, worker=0)
    spaces = {"observation_space": probe.single_observation_space, "action_space": probe.single_action_space}
    probe.close()
    weights = {name: value.detach().cpu().numpy() for name, value in policy.state_dict().items()}
    model = {
        "policy": type(policy),
        "config": policy.config,
        "weights": weights,
        "baseline": settings.baseline,
    }
    module = RLModuleSpec(module_class=TargetModule if asynchronous else PolicyModule, model_config=model)
    config.environment(env="ours", env_config=dict(run), disable_env_checking=True, **spaces)
    config.env_runners(env_runner_cls=VectorEnvRunner)
    config.rl_module(rl_module_spec=module)
    # every round asks those that are away whether they are back, and waits for the answer
    config.fault_tolerance(restart_failed_env_runners=True, env_runner_health_probe_timeout_s=PROBE)
    config.debugging(seed=run["seed"], log_level="ERROR")
    config.reporting(min_time_s_per_iteration=0)
    config.training(
        train_batch_size_per_learner=settings.batch_size,
        num_epochs=settings.passes,
        minibatch_size=settings.minibatch_size or None,
    )
    if asynchronous:
        _sample_asynchronously(config, settings)
    config.learners(
        num_learners=0,
        learner_class=APPOPolicyLearner if asynchronous else PPOPolicyLearner,
        learner_config_dict={"settings": settings},
        add_default_connectors_to_learner_pipeline=asynchronous,
    )
    return config


def _sample_asynchronously(config: AlgorithmConfig, settings: APPO) -> None:
    """What RLlib's own loss and sampling of APPO take; the other methods have ours."""
    config.env_runners(rollout_fragment_length=settings.fragment)
    config.training(
        gamma=settings.gamma,
        entropy_coeff=settings.entropy_coeff,
        grad_clip=settings.max_grad_norm,
        grad_clip_by="global_norm",
        clip_param=settings.clip,
        use_kl_loss=False,
        vf_loss_coeff=settings.value_coeff,
        broadcast_interval=1,
    )
    config.reporting(min_sample_timesteps_per_iteration=settings.batch_size)


def steps_sampled(result: Mapping[str, Any]) -> int:
    """In a round of RLlib's; 0 where no env runner returned anything, which RLlib tells as nothing or NaN."""
    return _count(result.get("env_runners", {}).get("num_env_steps_sampled", 0))


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a round in RLlib's result."""
    # an asynchronous learner may have nothing to say yet
    sampled, learned = result.get("env_runners", {}), result.get("learners", {}).get(DEFAULT_MODULE_ID, {})
    names = {
        "policy_loss": "policy_loss",
        "vf_loss": "value_loss",
        "entropy": "entropy",
        "vf_explained_var": "explained_variance",
    }
    names |= {"policy_learning_rate": "learning_rate"}
    metrics = {ours: _number(learned[theirs]) for theirs, ours in names.items() if theirs in learned}
    sums, counts = sampled.get("outcome", {}), sampled.get("outcomes", {})
    outcomes = {name: _number(sums[name]) / ended for name in sums if (ended := _count(counts[name]))}
    return {
        "new_steps": steps_sampled(result),
        "episodes": _count(counts.get("return", 0)),
        **metrics,
        **outcomes,
    }


def _number(value: Any) -> float:
    """Of RLlib's statistics, which are objects before its algorithm has reduced them."""
    return float(value.peek() if hasattr(value, "peek") else value)


def _count(value: Any) -> int:
    """The same of how many there were; where nothing came, RLlib says NaN."""
    number = _number(value)
    return 0 if math.isnan(number) else int(number)
