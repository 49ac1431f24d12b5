"""Learning: policies as RLlib's modules, and the connectors and learners that update them.

    episodes -> LearnedRewards (where a reward is learned) -> RLlib's connectors and GAE -> StandardisedAdvantages -> loss -> optimizers

`PolicyModule` is around an ActPolicy or a ControlPolicy: what both have are `logits`, `values`, `distribution` and `optimized`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor

from rl_dialog.cluster.env_runner import trajectory_of
from rl_dialog.models.act_policy import MaskedBernoulli
from rl_dialog.models.control_policy import Categorical, DiagonalGaussian
from rl_dialog.models.trajectory import Trajectory
from rl_dialog.training.optim import learning_rate_at

LearnedReward = Callable[[Sequence[Trajectory]], Sequence[np.ndarray] | None]  # rewards (n,) of each trajectory of a batch; None: none yet


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
    """A policy as RLlib asks for it; `model_config` has its class, config, weights as arrays, and whether values are used."""

    def setup(self) -> None:
        self.network = self.model_config["policy"](self.model_config["config"])
        self.network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in self.model_config["weights"].items()})
        self.action_dist_cls = DISTRIBUTIONS[self.network.distribution]

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        return {Columns.ACTION_DIST_INPUTS: self.network.logits(*_parts(batch))}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        states = _parts(batch)[0]
        return self.network.values(states) if self.model_config["baseline"] else torch.zeros(len(states))


class TargetModule(PolicyModule, TargetNetworkAPI):
    """The same with the older policy that APPO compares with."""

    def make_target_networks(self) -> None:
        self.target = make_target_network(self.network)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.network, self.target)]

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: self.target.logits(*_parts(batch))}


def _parts(batch: dict[str, Any]) -> tuple[Tensor, ...]:
    """Observations, and masks where there are some."""
    observations = batch[Columns.OBS]
    return (observations["obs"], observations["action_mask"]) if isinstance(observations, dict) else (observations,)


class LearnedRewards(ConnectorV2):
    """Replaces the environment's rewards by learned ones, before advantages are computed. Raises ValueError for a wrong number of rewards."""

    def __init__(self, *spaces: Any, reward: LearnedReward, **more: Any) -> None:
        super().__init__(*spaces, **more)
        self.reward = reward

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: list[Any], **_: Any) -> dict[str, Any]:
        found = self.reward([trajectory_of(episode) for episode in episodes])
        for episode, rewards in zip(episodes, found, strict=True) if found is not None else ():
            if np.shape(rewards) != (len(episode),):
                raise ValueError(f"expected {len(episode)} rewards for an episode of {len(episode)} steps, got the shape {np.shape(rewards)}")
            episode.set_rewards(new_data=np.asarray(rewards, np.float32), at_indices=slice(0, len(episode)))
        return batch


class StandardisedAdvantages(ConnectorV2):
    """Advantages with mean 0 and deviation 1 over the steps that were taken; RLlib's own counts the step that it adds to each episode, too."""

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: list[Any], **_: Any) -> dict[str, Any]:
        for columns in batch.values():
            advantages, taken = columns[Postprocessing.ADVANTAGES], columns[Columns.LOSS_MASK]
            columns[Postprocessing.ADVANTAGES] = (advantages - advantages[taken].mean()) / advantages[taken].std().clamp(min=1e-4)
        return batch


class PolicyLearner(TorchLearner):
    """Optimizers, their learning rates, and the place of learned rewards.

    The policy and the value network each have their Adam where they share nothing: returns may be large numbers, and values must follow faster.
    """

    earlier_steps = 0  # of the environments, before this learner was made

    def learn_from(self, reward: LearnedReward) -> None:
        """From now on, instead of the environment's rewards."""
        self._learner_connector.prepend(LearnedRewards(reward=reward))

    def configure_optimizers_for_module(self, module_id: str, config: AlgorithmConfig | None = None) -> None:
        for name, parameters in self._module[module_id].unwrapped().network.optimized().items():
            optimizer = torch.optim.Adam(parameters, lr=self.config.learner_config_dict["rates"][name])
            self.register_optimizer(module_id=module_id, optimizer_name=name, optimizer=optimizer, params=parameters)

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        settings = self.config.learner_config_dict
        if not settings["lr_zero_steps"]:
            return
        steps = self.earlier_steps + timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0)
        for name, optimizer in self.optimizers():
            peak = settings["rates"][name]
            optimizer.param_groups[0]["lr"] = learning_rate_at(steps, peak=peak, warmup=0, total=settings["lr_zero_steps"], schedule="linear")

    def optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """Each with the name that the network gives it."""
        (module_id,) = self._module.keys()
        return [(name.removeprefix(f"{module_id}_"), each) for name, each in self.get_optimizers_for_module(module_id)]


class PPOPolicyLearner(PolicyLearner, PPOTorchLearner):
    """PPO's loss."""

    def build(self) -> None:
        super().build()
        self._learner_connector.append(StandardisedAdvantages())


class APPOPolicyLearner(PolicyLearner, APPOTorchLearner):
    """APPO's loss."""
