"""Policies and values for control: numbers or pictures in, one of A actions or A real numbers out.

    numbers (S,)        S-64-64 to the actions' distribution, another S-64-64-1 to the value; tanh; they
                        share nothing
    pictures (H, W, F)  bytes / 255, convolutions 8x8/4 32, 4x4/2 64, 3x3/1 64, linear 512, ReLU; a layer for
                        the distribution, one for the value
                        (the network of A2C; 1,687,719 parameters with 84 x 84 x 4 and 6 actions)

    Discrete: logits # (B, A)                                      Categorical
    Box:      means and logarithms of deviations # (B, 2 A)         DiagonalGaussian; the deviations are
                                                                    parameters and depend on no state

Weights start orthogonal, with gain sqrt(2) before a non-linearity, 0.01 before actions and 1 before values;
biases are 0. A checkpoint is a directory with `config.json` and `model.safetensors`. B observations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_dialog.errors import UserError
from rl_dialog.models.network_files import load_weights, read_shape, save_network
from rl_dialog.models.observations import RunningScale

KIND = "control_policy"
FOLLOWING = 0.1  # share of the newest batch in the statistics of values
CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # filters, kernel, stride


@dataclass(frozen=True)
class ControlPolicyConfig:
    """The shape of a `ControlPolicy`. Raises UserError for sizes that do not fit."""

    observation: tuple[int, ...]  # shape of one: (numbers,) or (height, width, frames)
    actions: int  # how many, or how many numbers one has
    discrete: bool = True
    hidden: tuple[int, ...] = (64, 64)  # with pictures one layer, after the convolutions
    # the value network's outputs have mean 0 and deviation 1 over recent targets, whatever the scale of
    # rewards
    normalise_values: bool = True
    log_std: float = 0.0  # of a Gaussian at the beginning
    normalise_observations: bool = False  # that are numbers, by those seen so far (observations.py)
    scales: int = 1  # of numbers that are normalised; 2: they are there also as they come

    def __post_init__(self) -> None:
        if (
            len(self.observation) not in (1, 3)
            or min(*self.observation, *self.hidden, self.actions) < 1
            or not self.hidden
        ):
            raise UserError(
                f"expected observations (numbers,) or (height, width, frames), and positive sizes, got {self}"
            )
        if self.pixels and len(self.hidden) != 1:
            raise UserError(f"expected one hidden layer after the convolutions, got {self.hidden}")

    @property
    def pixels(self) -> bool:
        return len(self.observation) == 3


class Categorical:
    """One of A actions, by logits # (B, A)."""

    def __init__(self, logits: Tensor) -> None:
        self.log_p = logits.log_softmax(-1)

    def sample(self) -> Tensor:
        """int64 # (B,): the argmax of log p plus Gumbel noise."""
        return (self.log_p - torch.empty_like(self.log_p).exponential_().log()).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_p.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_p.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """In nats # (B,)"""
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other), in nats # (B,)"""
        return (self.log_p.exp() * (self.log_p - other.log_p)).sum(-1)


class DiagonalGaussian:
    """A independent real numbers, by means and logarithms of standard deviations side by side # (B, 2 A)."""

    def __init__(self, inputs: Tensor) -> None:
        self.mean, self.log_std = inputs.chunk(2, -1)

    def sample(self) -> Tensor:
        """float32 # (B, A)"""
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        scaled = (actions - self.mean) * (-self.log_std).exp()
        return -(0.5 * scaled**2 + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        """In nats # (B,)"""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, other: DiagonalGaussian) -> Tensor:
        """KL(self || other), in nats # (B,)"""
        variances = (2 * (self.log_std - other.log_std)).exp()
        apart = (self.mean - other.mean) ** 2 * (-2 * other.log_std).exp()
        return (0.5 * (variances + apart - 1) + other.log_std - self.log_std).sum(-1)


class ControlPolicy(nn.Module):
    """The policy and the value network."""

    def __init__(self, config: ControlPolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.distribution = Categorical if config.discrete else DiagonalGaussian
        if config.pixels:
            self.trunk = _convolutions(config)
            self.policy, self.value_network = (
                _linear(config.hidden[0], config.actions, 0.01),
                _linear(config.hidden[0], 1, 1.0),
            )
        else:
            inputs, self.trunk = config.observation[0], nn.Identity()
            if config.normalise_observations:
                self.trunk = RunningScale(inputs, scales=config.scales)
                inputs *= config.scales
            self.policy = _mlp(inputs, *config.hidden, config.actions, gain=0.01)
            self.value_network = _mlp(inputs, *config.hidden, 1, gain=1.0)
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.zeros(()))  # 0: nothing was seen yet
        if not config.discrete:
            self.log_std = nn.Parameter(torch.full((config.actions,), config.log_std))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """What the distribution is made from, and values # (B, A) or (B, 2 A); (B,)"""
        hidden = self._hidden(observations)
        return self._inputs(hidden), self._values(hidden)

    def logits(self, observations: Tensor) -> Tensor:
        """What the distribution is made from # (B, A) or (B, 2 A)"""
        return self._inputs(self._hidden(observations))

    def values(self, observations: Tensor) -> Tensor:
        """The expected discounted return from each observation # (B,)"""
        return self._values(self._hidden(observations))

    @torch.no_grad()
    def fit_values(self, targets: Tensor) -> None:
        """Mean and deviation of values follow those of a batch of targets # (B,); values stay as they are
        (Pop-Art, van Hasselt et al. 2016)."""
        old_mean, old_std, is_first = self.value_mean.clone(), self.value_std.clone(), self.value_std == 0
        rate = 1.0 if is_first else FOLLOWING
        self.value_mean.lerp_(targets.mean(), rate)
        self.value_std.copy_(((1 - rate) * old_std**2 + rate * targets.var()).sqrt().clamp(min=1e-3))
        if is_first:
            return
        output = (
            self.value_network[-1] if isinstance(self.value_network, nn.Sequential) else self.value_network
        )
        output.bias.copy_((old_std * output.bias + old_mean - self.value_mean) / self.value_std)
        output.weight.mul_(old_std / self.value_std)

    def fit_observations(self, observations: Tensor) -> None:
        """Takes (N, S) into what they are normalised by, where they are."""
        if isinstance(self.trunk, RunningScale):
            self.trunk.add(observations)

    @property
    def value_unit(self) -> Tensor | float:
        """What an error of a value is measured in."""
        return self.value_std if self.config.normalise_values else 1.0

    def optimized(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by the optimizer that they belong to: one for both networks where they share layers."""
        if self.config.pixels:
            return {"policy": list(self.parameters())}
        value = list(self.value_network.parameters())
        return {
            "policy": [
                parameter for parameter in self.parameters() if not any(parameter is other for other in value)
            ],
            "value": value,
        }

    @torch.inference_mode()
    def act(self, observations: np.ndarray, *, greedy: bool = True) -> np.ndarray:
        """Actions as an environment takes them: the most probable ones, or drawn from torch's generator #
        (B,) or (B, A)"""
        distribution = self.distribution(
            self.logits(torch.from_numpy(observations).to(self.value_mean.device))
        )
        return (distribution.mode() if greedy else distribution.sample()).cpu().numpy()

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the checkpoint's two files into `directory`, which is made if needed."""
        save_network(self, self.config, directory, kind=KIND)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, expected: ControlPolicyConfig | None = None
    ) -> ControlPolicy:
        """The policy of a checkpoint directory, in eval mode.

        `expected` is what the caller's environment needs. Raises UserError where observations or actions
        differ, or the files are not those of a ControlPolicy.
        """
        remedy = "; `prefer` writes one"
        config = read_shape(ControlPolicyConfig, directory, kind=KIND, remedy=remedy)
        needs = lambda shape: (shape.observation, shape.actions, shape.discrete)  # noqa: E731
        if expected is not None and needs(config) != needs(expected):
            raise UserError(
                f"{directory}: expected a policy for {expected}, got one for {config}: it was trained in "
                "another environment"
            )
        return load_weights(cls(config), directory, config)

    def _hidden(self, observations: Tensor) -> Tensor:
        return self.trunk(observations.movedim(-1, 1).float() / 255 if self.config.pixels else observations)

    def _inputs(self, hidden: Tensor) -> Tensor:
        inputs = self.policy(hidden)
        return inputs if self.config.discrete else torch.cat([inputs, self.log_std.expand_as(inputs)], -1)

    def _values(self, hidden: Tensor) -> Tensor:
        values = self.value_network(hidden).squeeze(-1)
        return self.value_mean + self.value_std * values if self.config.normalise_values else values


def shape_of(envs: Any, **more: Any) -> ControlPolicyConfig:
    """The shape of a policy for a vector of environments. `more`: other fields. Raises UserError for actions
    that are neither Discrete nor a Box."""
    observation, action = envs.single_observation_space, envs.single_action_space
    if not hasattr(action, "n") and len(action.shape or ()) != 1:
        raise UserError(f"expected actions that are Discrete or a Box of one dimension, got {action}")
    discrete = hasattr(action, "n")
    if len(observation.shape) == 3:
        more = {"hidden": (512,), **more}
    return ControlPolicyConfig(
        tuple(observation.shape), int(action.n) if discrete else action.shape[0], discrete, **more
    )


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    return _orthogonal(layer, gain)


def _orthogonal(layer: Any, gain: float) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _mlp(*sizes: int, gain: float) -> nn.Sequential:
    """Linear layers with tanh between them; `gain`: of the last one."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [_linear(inputs, outputs, math.sqrt(2)), nn.Tanh()]
    return nn.Sequential(*layers, _linear(sizes[-2], sizes[-1], gain))


def _convolutions(config: ControlPolicyConfig) -> nn.Sequential:
    height, width, channels = config.observation
    layers: list[nn.Module] = []
    for filters, kernel, stride in CONVOLUTIONS:
        layers += [_orthogonal(nn.Conv2d(channels, filters, kernel, stride), math.sqrt(2)), nn.ReLU()]
        height, width, channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, filters
    if min(height, width) < 1:
        raise UserError(
            f"expected pictures of at least 36 x 36, got {config.observation[0]} x {config.observation[1]}"
        )
    return nn.Sequential(
        *layers, nn.Flatten(), _linear(channels * height * width, config.hidden[0], math.sqrt(2)), nn.ReLU()
    )
