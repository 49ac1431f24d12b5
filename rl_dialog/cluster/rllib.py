"""Reinforcement learning of task policies with RLlib's new API stack.

    env runners   actors, each with a vector of environments and a copy of the policy; they sample acts             (DialogEnvRunner)
       | episodes
    learner       rewards are replaced if a learned one is given, advantages by GAE, updates of both networks       (LearnedRewards, a Learner)
       | weights back to the env runners

An environment comes as a constructor `make_envs(num_envs, worker=i)` of a gymnasium VectorEnv with observations {"obs", "action_mask"} and
MultiBinary actions. `ActTrainer.train()` is one round of all this; the losses are described in rl_dialog/training/policy_gradient.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers.vector import DictInfoToList
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor

from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig, MaskedBernoulli
from rl_dialog.models.adversarial_reward import Trajectory
from rl_dialog.training.optim import load_optimizer, save_optimizer
from rl_dialog.training.policy_gradient import APPO, PPO

MakeEnvs = Callable[..., gymnasium.vector.VectorEnv]
LearnedReward = Callable[[Sequence[Trajectory]], Sequence[np.ndarray]]  # the rewards (n,) of each trajectory of a batch
OUTCOMES = ("success", "complete", "book_rate", "inform_f1", "turns", "total")  # what `infos["outcome"]` of an ended episode may have
STRIDE = 1_000_003  # between the seeds of neighbouring runs


class ActDistribution(Distribution):
    """`MaskedBernoulli` as RLlib asks for it."""

    def __init__(self, product: MaskedBernoulli, *, deterministic: bool = False) -> None:
        self.product, self.deterministic = product, deterministic

    @classmethod
    def from_logits(cls, logits: Tensor, **_: Any) -> ActDistribution:
        return cls(MaskedBernoulli(logits))

    def sample(self, **_: Any) -> Tensor:
        return self.product.mode() if self.deterministic else self.product.sample()

    def rsample(self, **_: Any) -> Tensor:
        raise NotImplementedError("bits have no reparameterised sample")

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        return self.product.log_prob(value)

    def entropy(self, **_: Any) -> Tensor:
        return self.product.entropy()

    def kl(self, other: ActDistribution, **_: Any) -> Tensor:
        return self.product.kl(other.product)

    def to_deterministic(self) -> ActDistribution:
        return ActDistribution(self.product, deterministic=True)

    @staticmethod
    def required_input_dim(space: gymnasium.Space, **_: Any) -> int:
        return int(space.n)


class ActModule(TorchRLModule, ValueFunctionAPI):
    """An `ActPolicy` as RLlib asks for it; `model_config` has its config, its weights as arrays, and whether values are used."""

    def setup(self) -> None:
        self.action_dist_cls = ActDistribution
        self.network = ActPolicy(ActPolicyConfig(**self.model_config["config"]))
        self.network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in self.model_config["weights"].items()})

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        observation = batch[Columns.OBS]
        return {Columns.ACTION_DIST_INPUTS: self.network.logits(observation["obs"], observation["action_mask"])}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        states = batch[Columns.OBS]["obs"]
        return self.network.values(states) if self.model_config["baseline"] else torch.zeros(len(states))


class ActTargetModule(ActModule, TargetNetworkAPI):
    """The same with the older policy that APPO compares with."""

    def make_target_networks(self) -> None:
        self.target = make_target_network(self.network)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.network, self.target)]

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        observation = batch[Columns.OBS]
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: self.target.logits(observation["obs"], observation["action_mask"])}


class _TwoOptimizers(TorchLearner):
    """The policy and the value network each have their Adam: returns are large numbers, and values must follow faster than acts."""

    def configure_optimizers_for_module(self, module_id: str, config: AlgorithmConfig | None = None) -> None:
        network, rates = self._module[module_id].unwrapped().network, self.config.learner_config_dict
        parts = {"policy": network.policy, "value": network.value_network}
        for name, part in parts.items():
            parameters = list(part.parameters())
            optimizer = torch.optim.Adam(parameters, lr=rates[name])
            self.register_optimizer(module_id=module_id, optimizer_name=name, optimizer=optimizer, params=parameters, lr_or_lr_schedule=rates[name])


class StandardisedAdvantages(ConnectorV2):
    """Advantages with mean 0 and deviation 1 over the turns that were taken; RLlib's own counts the step that it adds to each episode, too."""

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: list[Any], **_: Any) -> dict[str, Any]:
        for columns in batch.values():
            advantages, taken = columns[Postprocessing.ADVANTAGES], columns[Columns.LOSS_MASK]
            columns[Postprocessing.ADVANTAGES] = (advantages - advantages[taken].mean()) / advantages[taken].std().clamp(min=1e-4)
        return batch


class PPOActLearner(_TwoOptimizers, PPOTorchLearner):
    """PPO's loss, two optimizers."""

    def build(self) -> None:
        super().build()
        self._learner_connector.append(StandardisedAdvantages())


class APPOActLearner(_TwoOptimizers, APPOTorchLearner):
    """APPO's loss, two optimizers."""


class DialogEnvRunner(SingleAgentEnvRunner):
    """An env runner whose vector of environments is made as a whole, and whose chance is that of the round, so that rounds can be repeated.

    Every `renew_every` rounds all conversations start anew: a run that is resumed there goes on as if it had never stopped.
    """

    def make_env(self) -> None:
        settings = self.config.env_config
        self.env = DictInfoToList(settings["make_envs"](self.config.num_envs_per_env_runner, worker=self.worker_index + 1))  # 0: held-out goals
        self.num_envs = self.env.num_envs
        self.round, self._needs_initial_reset = settings["first_round"], True

    def sample(self, **arguments: Any) -> list[Any]:
        settings = self.config.env_config
        self._seed = settings["seed"] * STRIDE + self.round
        torch.manual_seed(self._seed * STRIDE + self.worker_index)
        if (self.round - settings["first_round"]) % settings["renew_every"] == 0:
            self._needs_initial_reset = True
        self.round += 1
        return super().sample(**arguments)


class LearnedRewards(ConnectorV2):
    """Replaces the environment's rewards by learned ones, before advantages are computed. Raises ValueError for a wrong number of rewards."""

    def __init__(self, *spaces: Any, reward: LearnedReward, **more: Any) -> None:
        super().__init__(*spaces, **more)
        self.reward = reward

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: list[Any], **_: Any) -> dict[str, Any]:
        steps = [len(episode) - 1 for episode in episodes]  # RLlib has added a step to each, for the value of its last state
        trajectories = [_trajectory(episode, n) for episode, n in zip(episodes, steps, strict=True)]
        for episode, n, rewards in zip(episodes, steps, self.reward(trajectories), strict=True):
            if np.shape(rewards) != (n,):
                raise ValueError(f"expected {n} rewards for an episode of {n} steps, got the shape {np.shape(rewards)}")
            episode.set_rewards(new_data=np.asarray(rewards, np.float32), at_indices=slice(0, n))
        return batch


class Outcomes(RLlibCallback):
    """How the episodes that ended went, from `infos["outcome"]`."""

    def on_episode_end(self, *, episode: Any, metrics_logger: Any, **_: Any) -> None:
        outcome = episode.get_infos(-1).get("outcome")
        for name in OUTCOMES:
            if (value := getattr(outcome, name, None)) is not None:
                metrics_logger.log_value(("outcome", name), float(value), reduce="sum")  # sums start anew each round, means do not
                metrics_logger.log_value(("outcomes", name), 1, reduce="sum")


class ActTrainer:
    """RLlib's training of one policy, as a context manager; with workers it needs a running Ray.

    Args:
        policy: where to start; it is copied.
        make_envs: constructor of a vector of environments, see above.
        settings: PPO, PG or APPO.
        reward: a learned reward; by default the environment's.
        workers, envs: env runner actors, and environments of each. Without workers this process samples and learns, and no Ray is started.
        first_round, renew_every: the round to start with, and how often conversations start anew.
    """

    def __init__(self, policy: ActPolicy, make_envs: MakeEnvs, settings: PPO, *, reward: LearnedReward | None = None, workers: int = 1,
                 envs: int = 64, seed: int = 0, first_round: int = 0, renew_every: int = 1) -> None:  # fmt: skip
        if workers < 0 or envs < 1:
            raise ValueError(f"expected workers of at least 0 and envs of at least 1, got {workers} and {envs}")
        if not workers and isinstance(settings, APPO):
            raise ValueError("appo samples while it learns: expected at least one worker, got 0")
        self.shape, self.settings, self.seed, self.round = policy.config, settings, seed, first_round
        self.steps = 0
        run = {"make_envs": make_envs, "seed": seed, "first_round": first_round, "renew_every": renew_every}
        config = algorithm_config(policy, run, settings, reward)
        config.env_runners(num_env_runners=workers, num_envs_per_env_runner=envs)
        for name in ("ray.rllib", "ray._common.deprecation"):  # RLlib warns of what it does itself
            logging.getLogger(name).setLevel(logging.ERROR)
        self.algorithm = config.build_algo() if workers else None
        if not workers:
            config.validate()
            self.runner = DialogEnvRunner(config=config, worker_index=0)
            self.learner = config.build_learner(env=self.runner.env.unwrapped)

    def __enter__(self) -> ActTrainer:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.algorithm:
            self.algorithm.stop()

    def train(self) -> dict[str, float]:
        """One round; its metrics: `steps` so far, the loss's parts, the sampled episodes' mean outcomes. Raises RuntimeError if nothing came back."""
        seed = self.seed * STRIDE + self.round
        self.round += 1
        if not self.algorithm:
            return metrics_of(self._train_here(seed))
        _seed_minibatches(seed)
        return metrics_of(self.algorithm.train())

    def policy(self) -> ActPolicy:
        """A copy of the policy as it is now."""
        found = ActPolicy(self.shape)
        found.load_state_dict(self._on_learner(lambda network, _: {name: value.clone() for name, value in network.state_dict().items()}))
        return found.eval()

    def save(self, directory: Path) -> None:
        """Writes the state of both optimizers into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._on_learner(lambda _, optimizers: [save_optimizer(each, directory / f"{name}.safetensors") for name, each in optimizers])

    def load(self, directory: Path) -> None:
        """The inverse of `save`."""
        self._on_learner(lambda _, optimizers: [load_optimizer(each, directory / f"{name}.safetensors") for name, each in optimizers])

    def _train_here(self, seed: int) -> dict[str, Any]:
        settings = self.settings
        episodes = self.runner.sample(num_timesteps=settings.batch_size)
        self.steps += sum(map(len, episodes))
        _seed_minibatches(seed)
        learned = self.learner.update(
            training_data=TrainingData(episodes=episodes),
            timesteps={"num_env_steps_sampled_lifetime": self.steps},
            num_epochs=settings.passes,
            minibatch_size=settings.minibatch_size or None,
            shuffle_batch_per_epoch=True,
        )
        self._on_learner(lambda network, _: self.runner.module.network.load_state_dict(network.state_dict()))
        return {"env_runners": {**self.runner.get_metrics(), "num_env_steps_sampled_lifetime": self.steps}, "learners": learned}

    def _on_learner(self, use: Callable[[ActPolicy, list[tuple[str, torch.optim.Optimizer]]], Any]) -> Any:
        def call(learner: TorchLearner) -> Any:
            optimizers = [(name.removeprefix(f"{DEFAULT_MODULE_ID}_"), each) for name, each in learner.get_optimizers_for_module(DEFAULT_MODULE_ID)]
            return use(learner.module[DEFAULT_MODULE_ID].unwrapped().network, optimizers)

        return self.algorithm.learner_group.foreach_learner(call).result_or_errors[0].get() if self.algorithm else call(self.learner)


def _seed_minibatches(seed: int) -> None:
    """RLlib shuffles with the global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def algorithm_config(policy: ActPolicy, run: Mapping[str, Any], settings: PPO, reward: LearnedReward | None) -> AlgorithmConfig:
    """RLlib's config of a method. `run` is what `DialogEnvRunner` reads."""
    asynchronous = isinstance(settings, APPO)
    config = APPOConfig() if asynchronous else PPOConfig()
    probe = run["make_envs"](1, worker=0)
    spaces = {"observation_space": probe.single_observation_space, "action_space": probe.single_action_space}
    weights = {name: value.detach().cpu().numpy() for name, value in policy.state_dict().items()}
    model = {"config": asdict(policy.config), "weights": weights, "baseline": settings.baseline}
    config.environment(env="dialogs", env_config=dict(run), disable_env_checking=True, **spaces)
    config.env_runners(env_runner_cls=DialogEnvRunner)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=ActTargetModule if asynchronous else ActModule, model_config=model))
    config.callbacks(Outcomes)
    config.fault_tolerance(restart_failed_env_runners=True)
    config.debugging(seed=run["seed"], log_level="ERROR")
    config.reporting(min_time_s_per_iteration=0)
    config.training(
        lr=settings.learning_rate,
        gamma=settings.gamma,
        entropy_coeff=settings.entropy_coeff,
        grad_clip=settings.max_grad_norm,
        grad_clip_by="global_norm",
        train_batch_size_per_learner=settings.batch_size,
        clip_param=settings.clip,
        use_kl_loss=False,
        num_epochs=settings.passes,
        minibatch_size=settings.minibatch_size or None,
        shuffle_batch_per_epoch=True,
    )
    if asynchronous:
        config.env_runners(rollout_fragment_length=settings.fragment)
        config.training(vf_loss_coeff=1.0, broadcast_interval=1)
        config.reporting(min_sample_timesteps_per_iteration=settings.batch_size)
    else:  # without a limit to the value loss: returns are large, and beyond it there is no gradient
        config.training(lambda_=settings.gae_lambda, vf_clip_param=float("inf"), vf_loss_coeff=1.0, use_critic=settings.baseline)
    learners = {} if reward is None else {"learner_connector": lambda *spaces: LearnedRewards(*spaces[:2], reward=reward)}
    rates = {"policy": settings.learning_rate, "value": settings.value_learning_rate}
    config.learners(num_learners=0, learner_class=APPOActLearner if asynchronous else PPOActLearner, learner_config_dict=rates, **learners)
    return config


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of RLlib's result that `simulate` logs. Raises RuntimeError where no env runner returned anything."""
    sampled, learned = result.get("env_runners", {}), result.get("learners", {}).get(DEFAULT_MODULE_ID, {})
    if not sampled.get("num_env_steps_sampled_lifetime"):  # an asynchronous learner may have nothing to say yet
        raise RuntimeError("expected turns from the env runners, got none: all of them failed; RL_DIALOG_DEBUG=1 shows Ray's log")
    names = {"policy_loss": "policy_loss", "vf_loss": "value_loss", "entropy": "entropy", "vf_explained_var": "explained_variance"}
    metrics = {ours: _number(learned[theirs]) for theirs, ours in names.items() if theirs in learned}
    sums, counts = sampled.get("outcome", {}), sampled.get("outcomes", {})
    outcomes = {("return" if name == "total" else name): _number(sums[name]) / _number(counts[name]) for name in sums}
    return {"steps": _number(sampled["num_env_steps_sampled_lifetime"]), **metrics, **outcomes}


def _number(value: Any) -> float:
    """Of RLlib's statistics, which are objects before its algorithm has reduced them."""
    return float(value.peek() if hasattr(value, "peek") else value)


def _trajectory(episode: Any, steps: int) -> Trajectory:
    observations = episode.get_observations(slice(0, steps + 1))
    return Trajectory(
        observations=observations["obs"] if isinstance(observations, dict) else observations,
        actions=np.asarray(episode.get_actions(slice(0, steps))),
        log_probs=np.asarray(episode.get_extra_model_outputs(Columns.ACTION_LOGP, slice(0, steps))),
        rewards=np.array(episode.get_rewards(slice(0, steps))),  # a copy: they are about to be replaced
        terminated=episode.is_terminated,
    )
