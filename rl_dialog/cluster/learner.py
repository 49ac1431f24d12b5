"""Learning of control and task policies (that of language models is in `online.py`): policies as RLlib's
modules, and the connectors and learners that update them.

    episodes -> LearnedRewards (where a reward is learned) -> TrainingBatch: one batch with advantages
             -> loss -> optimizers

`PolicyModule` is around an ActPolicy or a ControlPolicy: what both have are `logits`, `values`,
`distribution` and `optimized`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np
import torch
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.ppo.ppo import LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import (
    TARGET_NETWORK_ACTION_DIST_INPUTS,
    TargetNetworkAPI,
    ValueFunctionAPI,
)
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor, nn

from rl_dialog.cluster.env_runner import parts_of, trajectory_of
from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy, MaskedBernoulli
from rl_dialog.models.control_policy import Categorical, ControlPolicy, DiagonalGaussian
from rl_dialog.models.trajectory import Trajectory
from rl_dialog.training.optim import RMSprop, learning_rate_at
from rl_dialog.training.policy_gradient import PPO, clipped_loss, generalised_advantages

LearnedReward = Callable[
    [Sequence[Trajectory]], Sequence[np.ndarray] | None
]  # rewards (n,) of each trajectory of a batch; None: none yet


class ActionDistribution(Distribution):
    """One of our distributions as RLlib asks for it; a subclass names it."""

    of: type

    def __init__(self, ours: Any, *, deterministic: bool = False) -> None:
        self.ours, self.deterministic = ours, deterministic

    @classmethod
    def from_logits(cls, logits: Tensor, **_: Any) -> ActionDistribution:
        return cls(cls.of(logits))

    def sample(self, **_: Any) -> Tensor:
        return self.ours.mode() if self.deterministic else self.ours.sample()

    def rsample(self, **_: Any) -> Tensor:
        raise NotImplementedError("policies are trained by likelihood ratios, not by reparameterised samples")

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        return self.ours.log_prob(value)

    def entropy(self, **_: Any) -> Tensor:
        return self.ours.entropy()

    def kl(self, other: ActionDistribution, **_: Any) -> Tensor:
        return self.ours.kl(other.ours)

    def to_deterministic(self) -> ActionDistribution:
        return type(self)(self.ours, deterministic=True)

    @staticmethod
    def required_input_dim(space: gymnasium.Space, **_: Any) -> int:
        return int(space.n) if hasattr(space, "n") else 2 * space.shape[0]


class ActDistribution(ActionDistribution):
    of = MaskedBernoulli


class CategoricalDistribution(ActionDistribution):
    of = Categorical


class GaussianDistribution(ActionDistribution):
    of = DiagonalGaussian


DISTRIBUTIONS = {each.of: each for each in (ActDistribution, CategoricalDistribution, GaussianDistribution)}


class PolicyModule(TorchRLModule, ValueFunctionAPI):
    """A policy as RLlib asks for it; `model_config` has its class, config, weights as arrays, and whether
    values are used."""

    def setup(self) -> None:
        self.network = self.model_config["policy"](self.model_config["config"])
        self.network.load_state_dict(
            {name: torch.from_numpy(np.array(value)) for name, value in self.model_config["weights"].items()}
        )
        self.action_dist_cls = DISTRIBUTIONS[self.network.distribution]

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        return {Columns.ACTION_DIST_INPUTS: self.network.logits(*parts_of(batch[Columns.OBS]))}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        states = parts_of(batch[Columns.OBS])[0]
        return self.network.values(states) if self.model_config["baseline"] else torch.zeros(len(states))


class TargetModule(PolicyModule, TargetNetworkAPI):
    """The same with the older policy that APPO compares with."""

    def make_target_networks(self) -> None:
        self.target = make_target_network(self.network)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.network, self.target)]

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: self.target.logits(*parts_of(batch[Columns.OBS]))}


class LearnedRewards(ConnectorV2):
    """Replaces the environment's rewards by learned ones, before advantages are computed. Raises UserError
    for a wrong number of rewards."""

    def __init__(self, *spaces: Any, reward: LearnedReward, **more: Any) -> None:
        super().__init__(*spaces, **more)
        self.reward = reward

    def __call__(
        self, *, rl_module: Any, batch: dict[str, Any], episodes: list[Any], **_: Any
    ) -> dict[str, Any]:
        all_rewards = self.reward([trajectory_of(episode) for episode in episodes])
        for episode, rewards in zip(episodes, all_rewards, strict=True) if all_rewards is not None else ():
            if np.shape(rewards) != (len(episode),):
                raise UserError(
                    f"expected {len(episode)} rewards for an episode of {len(episode)} steps, got the shape "
                    f"{np.shape(rewards)}"
                )
            episode.rewards = InfiniteLookbackBuffer(
                np.asarray(rewards, np.float32)
            )  # what came from another process cannot be written to
        return batch


class TrainingBatch(ConnectorV2):
    """Episodes to one batch of tensors with advantages, as arrays and once; RLlib's own connectors go through
    lists of steps."""

    def __init__(self, *spaces: Any, settings: PPO, **more: Any) -> None:
        super().__init__(*spaces, **more)
        self.settings = settings

    def __call__(
        self, *, rl_module: Any, batch: dict[str, Any], episodes: list[Any], **_: Any
    ) -> dict[str, Any]:
        settings, steps = self.settings, [len(each) for each in episodes]
        module = rl_module[DEFAULT_MODULE_ID]
        device = next(module.parameters()).device
        pieces = [
            each.get_observations(slice(0, n + 1)) for each, n in zip(episodes, steps, strict=True)
        ]  # with the states after them
        seen = tree.map_structure(lambda *each: torch.from_numpy(np.concatenate(each)).to(device), *pieces)
        ends = np.cumsum([n + 1 for n in steps])
        values = _values_of(module, seen, ends)
        rewards, ended = [each.get_rewards() for each in episodes], [each.is_terminated for each in episodes]
        advantages = generalised_advantages(
            rewards, values, ended, gamma=settings.gamma, gae_lambda=settings.gae_lambda
        )
        flat, expected = np.concatenate(advantages), np.concatenate([v[:-1] for v in values])
        targets = flat + expected
        if settings.standardise:
            flat = (flat - flat.mean()) / max(flat.std(ddof=1), 1e-4)
        arrays = {
            Columns.ACTIONS: np.concatenate([each.get_actions() for each in episodes]),
            Columns.ACTION_LOGP: np.concatenate(
                [each.get_extra_model_outputs(Columns.ACTION_LOGP) for each in episodes]
            ),
            Postprocessing.ADVANTAGES: flat,
            Postprocessing.VALUE_TARGETS: targets,
            Columns.VF_PREDS: expected,
        }
        acted = torch.from_numpy(np.delete(np.arange(ends[-1]), ends - 1)).to(device)
        before = tree.map_structure(itemgetter(acted), seen)
        return {
            DEFAULT_MODULE_ID: {
                Columns.OBS: before,
                **{name: torch.from_numpy(each).to(device) for name, each in arrays.items()},
            }
        }


@torch.no_grad()
def _values_of(module: Any, seen: Any, ends: np.ndarray) -> list[np.ndarray]:
    """The values (n + 1,) of each episode's states, which stand in `seen` one episode behind the other, up to
    `ends`."""
    parts = (
        tree.map_structure(itemgetter(slice(start, end)), seen)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    return [module.compute_values({Columns.OBS: each}).cpu().numpy() for each in parts]


class PolicyLearner(TorchLearner):
    """Optimizers, their learning rates, and the place of learned rewards.

    The policy and the value network each have their optimizer where they share nothing: returns may be large
    numbers, and values must follow faster.
    """

    earlier_steps = 0  # of the environments, before this learner was made
    pace = 1.0  # factor of the policy's learning rate: how far the reward is to be followed

    def learn_from(self, reward: LearnedReward) -> None:
        """From now on, instead of the environment's rewards."""
        self._learner_connector.prepend(LearnedRewards(reward=reward))

    @property
    def network(self) -> ActPolicy | ControlPolicy:
        return self.module[DEFAULT_MODULE_ID].unwrapped().network

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By the names that the network gives them."""
        return {
            name.removeprefix(f"{DEFAULT_MODULE_ID}_"): each
            for name, each in self.get_optimizers_for_module(DEFAULT_MODULE_ID)
        }

    def configure_optimizers_for_module(self, module_id: str, config: AlgorithmConfig | None = None) -> None:
        settings: PPO = self.config.learner_config_dict["settings"]
        for name, parameters in self._module[module_id].unwrapped().network.optimized().items():
            rate = settings.learning_rate if name == "policy" else settings.value_learning_rate
            optimizer = (
                torch.optim.Adam(parameters, lr=rate, fused=True)
                if settings.optimizer == "adam"
                else RMSprop(parameters, lr=rate)
            )
            self.register_optimizer(
                module_id=module_id, optimizer_name=name, optimizer=optimizer, params=parameters
            )

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        settings: PPO = self.config.learner_config_dict["settings"]
        steps = self.earlier_steps + timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0)
        for name, optimizer in self.optimizers.items():
            rate = settings.learning_rate if name == "policy" else settings.value_learning_rate
            if settings.lr_zero_steps:
                rate = learning_rate_at(
                    steps, peak=rate, warmup=0, total=settings.lr_zero_steps, schedule="linear"
                )
            optimizer.param_groups[0]["lr"] = rate * (self.pace if name == "policy" else 1.0)


class PPOPolicyLearner(PolicyLearner):
    """PPO's update in one loop over tensors: of small networks RLlib's own makes half as many steps in the
    same time."""

    def build(self) -> None:
        super().build()
        self._learner_connector.append(TrainingBatch(settings=self.config.learner_config_dict["settings"]))

    def update(
        self, *, training_data: TrainingData, timesteps: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Learns from episodes; how, the settings say and not RLlib's arguments. Raises RuntimeError for
        gradients that are no numbers."""
        settings: PPO = self.config.learner_config_dict["settings"]
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        episodes = training_data.episodes
        batch = self._learner_connector(
            rl_module=self.module, batch={}, episodes=episodes, shared_data={}, metrics=self.metrics
        )[DEFAULT_MODULE_ID]
        if isinstance(self.network, ControlPolicy) and self.network.config.normalise_values:
            self.network.fit_values(batch[Postprocessing.VALUE_TARGETS])
        n, parts = len(batch[Columns.ACTIONS]), []
        minibatches = max(1, round(n / settings.minibatch_size)) if settings.minibatch_size else 1
        for _ in range(settings.passes):
            for chosen in (
                torch.randperm(n).to(batch[Columns.ACTIONS].device).tensor_split(minibatches)
                if minibatches > 1
                else [slice(None)]
            ):
                parts.append(self._step(tree.map_structure(itemgetter(chosen), batch), settings))
        if isinstance(self.network, ControlPolicy):
            self.network.fit_observations(batch[Columns.OBS])
        names = (POLICY_LOSS_KEY, VF_LOSS_KEY, ENTROPY_KEY)
        metrics = {
            name: torch.stack(values).mean().item()
            for name, values in zip(names, zip(*parts, strict=True), strict=True)
        }
        targets = batch[Postprocessing.VALUE_TARGETS]
        unexplained = (targets - batch[Columns.VF_PREDS]).var() / targets.var().clamp(min=1e-8)
        metrics[LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY] = 1 - unexplained.item()
        metrics["policy_learning_rate"] = self.optimizers["policy"].param_groups[0]["lr"]
        self.metrics.log_dict(metrics, key=DEFAULT_MODULE_ID, window=1)
        return self.metrics.reduce()

    def _step(self, minibatch: dict[str, Any], settings: PPO) -> tuple[Tensor, Tensor, Tensor]:
        """One gradient step; the policy's loss, the value's, and the entropy."""
        network = self.network
        inputs, values = network(*parts_of(minibatch[Columns.OBS]))
        distribution = network.distribution(inputs)
        log_probs, entropy = distribution.log_prob(minibatch[Columns.ACTIONS]), distribution.entropy().mean()
        policy_loss = clipped_loss(
            log_probs, minibatch[Columns.ACTION_LOGP], minibatch[Postprocessing.ADVANTAGES], settings.clip
        )
        value_loss = (
            ((values - minibatch[Postprocessing.VALUE_TARGETS]) / network.value_unit) ** 2
        ).mean() * settings.baseline
        loss = policy_loss - settings.entropy_coeff * entropy + settings.value_coeff * value_loss
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers.values():
            nn.utils.clip_grad_norm_(
                optimizer.param_groups[0]["params"], settings.max_grad_norm, error_if_nonfinite=True
            )
            optimizer.step()
        return policy_loss.detach(), value_loss.detach(), entropy.detach()

    def compute_loss_for_module(self, **_: Any) -> Tensor:
        raise NotImplementedError("`update` computes the loss")


class APPOPolicyLearner(PolicyLearner, APPOTorchLearner):
    """APPO's loss, connectors and loop: RLlib's."""
