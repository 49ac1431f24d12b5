"""A reward learned from preferences: an ensemble of networks over observations and actions, and the
normaliser that goes with its weights.

The M members stand side by side in one network (linear layers as batched products, convolutions in groups),
so that an ensemble costs little more than one member. Letters: M members, N steps.

    raw      r_m(o, a)                                          # (M, N)
    given    mean over m of  scale (r_m - mean_m) / std_m        # (N,) mean_m, std_m: over reference steps,
                                                                        saved with the weights

A clip's members' returns are sums of r_m over its steps. rl_dialog/preferences/reward_trainer.py fits them to
labels. Christiano et al. 2017 (arXiv 1706.03741); network sizes are theirs and those of Rahtz's reproduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_dialog.errors import UserError
from rl_dialog.models.control_policy import ControlPolicyConfig
from rl_dialog.models.network_files import load_weights, read_shape, save_network
from rl_dialog.models.observations import RunningScale

KIND = "reward_model"
SLOPE = 0.01  # of the leaky ReLUs
FILTERS = ((7, 3), (5, 2), (3, 1), (3, 1))  # kernel and stride of the convolutions, 16 filters each


@dataclass(frozen=True)
class RewardModelConfig:
    """Shape of a reward model. Raises UserError for sizes that do not fit."""

    observation: tuple[int, ...]  # shape of one: (features,) or (height, width, frames) of bytes
    actions: int  # number of discrete actions, or size of a continuous one
    discrete: bool = True
    action_input: Literal["one_hot", "number", "none"] = (
        "one_hot"  # number: action / (actions - 1), as the original has it for MovingDot
    )
    hidden: tuple[int, ...] = (64, 64)  # after the convolutions: (64,)
    members: int = 3
    # after the convolutions but the last, or the hidden layers but the last; a mask of its own for every step
    dropout: float = 0.0
    batchnorm: bool = False  # of the convolutions
    coordinates: bool = False  # what the convolutions find is told by where it is
    scale: float = 1.0  # standard deviation of the normalised reward
    normalise_observations: bool = False  # that are numbers, by those of labelled clips (observations.py)
    scales: int = 1  # of numbers that are normalised; 2: they are there also as they come
    action_limit: float = 0.0  # what continuous actions are cut to, as the environment does; 0: nothing

    def __post_init__(self) -> None:
        if (
            len(self.observation) not in (1, 3)
            or min(self.observation) < 1
            or self.actions < 1
            or self.members < 1
            or not self.hidden
        ):
            raise UserError(
                "expected observations (features,) or (height, width, frames), actions, members and hidden "
                f"layers, got {self}"
            )
        if not 0 <= self.dropout < 1 or self.scale <= 0:
            raise UserError(
                f"expected dropout in [0, 1) and a positive scale, got {self.dropout} and {self.scale}"
            )
        for name in ("batchnorm", "coordinates"):
            if getattr(self, name) and not self.pixels:
                raise UserError(
                    f"{name} belongs to the convolutions: expected it with observations (height, width, "
                    "frames) only"
                )

    @property
    def pixels(self) -> bool:
        return len(self.observation) == 3

    @property
    def action_size(self) -> int:
        """Inputs that the action takes."""
        sizes = {"none": 0, "number": 1, "one_hot": self.actions}
        return sizes[self.action_input] if self.discrete else self.actions * (self.action_input != "none")


class RewardModel(nn.Module):
    """The ensemble with its normaliser. Without `fit_normaliser` normalised rewards are scale times the raw
    ones.

    `confirmed`, 0 to 1, is how much of the labels it explains that it was not fitted to, as far as somebody
    has measured it: a policy follows it so fast (reward_trainer.py, PPO's learning rate).
    """

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__()
        self.config = config
        self.convolutions = _Convolutions(config) if config.pixels else None
        numbers = config.normalise_observations and not config.pixels
        seen = config.observation[0] * (config.scales if numbers else 1)
        sizes = [(self.convolutions.size if config.pixels else seen) + config.action_size, *config.hidden, 1]
        self.layers = nn.ModuleList(
            _MemberLinear(config.members, m, n) for m, n in zip(sizes, sizes[1:], strict=False)
        )
        self.observations = RunningScale(config.observation[0], scales=config.scales) if numbers else None
        self.register_buffer("confirmed", torch.ones(()))
        self.register_buffer("mean", torch.zeros(config.members))
        self.register_buffer("std", torch.ones(config.members))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Raw rewards of every member: (N, ...) and (N,) or (N, A) to (M, N)."""
        members, n = self.config.members, len(observations)
        observations = observations if self.observations is None else self.observations(observations)
        hidden = (
            self.convolutions(observations)
            if self.convolutions
            else observations.float().expand(members, n, -1)
        )  # (M, N, size)
        hidden = torch.cat([hidden, self._action(actions).expand(members, n, -1)], -1)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if i < len(self.layers) - 1:
                hidden = F.leaky_relu(hidden, SLOPE)
                if not self.convolutions and i < len(self.layers) - 2:
                    hidden = F.dropout(hidden, self.config.dropout, self.training)
        return hidden.squeeze(-1)

    def returns(self, observations: Tensor, actions: Tensor, steps: Tensor) -> Tensor:
        """Undiscounted sums over the steps that were taken: (C, L, ...), (C, L, ...) and (C,) to (M, C)."""
        clips, length = actions.shape[:2]
        rewards = self(observations.flatten(0, 1), actions.flatten(0, 1)).view(-1, clips, length)
        mask = torch.arange(length, device=steps.device) < steps[:, None]  # (C, L)
        return (rewards * mask).sum(-1)

    def load_state_dict(self, state: Mapping[str, Tensor], *arguments: Any, **more: Any) -> Any:
        """As torch does; what was saved before there was a share `confirmed` has all of it."""
        return super().load_state_dict({"confirmed": torch.ones(()), **state}, *arguments, **more)

    @torch.no_grad()
    def fit_normaliser(self, observations: Tensor, actions: Tensor) -> None:
        """Means and standard deviations of the members' rewards become those over these steps."""
        was, self.training = self.training, False
        raw = self.eval()(observations, actions)
        self.train(was)
        self.mean.copy_(raw.mean(1))
        # One step has no deviation; a constant reward has none either, and must not be divided by zero.
        self.std.copy_(raw.std(1).clamp(min=1e-8) if raw.shape[1] > 1 else torch.ones(len(raw)))

    def normalised(self, raw: Tensor) -> Tensor:
        """Each member's, then their mean: (M, N) to (N,)."""
        return self._normalised_each(raw).mean(0)

    def disagreement(self, raw: Tensor) -> Tensor:
        """Standard deviation over the members of their normalised rewards: (M, N) to (N,)."""
        return self._normalised_each(raw).std(0, unbiased=False)

    def _normalised_each(self, raw: Tensor) -> Tensor:
        return self.config.scale * (raw - self.mean[:, None]) / self.std[:, None]

    @torch.inference_mode()
    def predict(self, observations: np.ndarray, actions: np.ndarray, *, curious: bool = False) -> np.ndarray:
        """Normalised rewards r of N steps, in eval mode, float32 # (N,)

        With `curious` they are c r + (1 - c) s, with c what is `confirmed` of the reward and s the
        disagreement of its members, which is large where nothing is known (after Liang et al. 2022, arXiv
        2205.12401, who add s to r, less and less of it).
        """
        self.eval()
        device = self.mean.device
        raw = self(torch.from_numpy(observations).to(device), torch.from_numpy(actions).to(device))
        rewards = self.normalised(raw)
        if curious:
            rewards = self.confirmed * rewards + (1 - self.confirmed) * self.disagreement(raw)
        return rewards.cpu().numpy()

    def save_pretrained(self, directory: str | Path, *, version: int = 0) -> None:
        """Writes config.json and model.safetensors: weights and normaliser, which belong together."""
        save_network(self, self.config, directory, kind=KIND, about={"version": version})

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, expected: ControlPolicyConfig | None = None
    ) -> RewardModel:
        """The reward model of a directory, in eval mode. Raises UserError for a directory that holds none.

        `expected` is the shape of a policy in the caller's environment. Raises UserError where observations
        or actions differ.
        """
        config = read_shape(RewardModelConfig, directory, kind=KIND)
        if expected is not None and _world(config) != _world(expected):
            mismatch = f"expected a reward model for {_world(expected)}, got one for {_world(config)}"
            raise UserError(f"{directory}: {mismatch}: it was fitted in another environment")
        return load_weights(cls(config), directory, config)

    def _action(self, actions: Tensor) -> Tensor:
        """(N,) or (N, A) to (N, inputs)."""
        config = self.config
        if config.action_input == "none":
            return actions.new_zeros((len(actions), 0), dtype=torch.float32)
        if not config.discrete:
            limit = config.action_limit or math.inf
            return actions.float().clamp(-limit, limit)
        if config.action_input == "number":
            return actions.float()[:, None] / max(config.actions - 1, 1)
        return F.one_hot(actions.long(), config.actions).float()


LEAST_NOISE = 1e-7  # whose logarithm is finite


def preference_loss(
    first: Tensor, second: Tensor, preferred: Tensor, *, noise: float | Tensor = 0.1
) -> Tensor:
    """Cross-entropy of labels under Bradley and Terry's model with a share `noise` of random answers, in nats
    per label, element by element.

    With d = first - second, the sums of rewards: P = sigmoid(d), P' = (1 - noise) P + noise / 2, loss = -mu
    log P' - (1 - mu) log(1 - P'). mu is `preferred`: 1 for the first, 0 for the second, .5 for a tie. `noise`
    is one number, or one for each label: with 1 a label says nothing, and its loss is constant. It bounds
    the loss by -log(noise / 2) and lets gradients of labels that the model is sure are wrong vanish.
    """
    difference = first - second
    if not isinstance(noise, Tensor) and noise == 0:
        return -(preferred * F.logsigmoid(difference) + (1 - preferred) * F.logsigmoid(-difference))
    random = torch.as_tensor(noise, dtype=difference.dtype, device=difference.device).clamp(LEAST_NOISE, 1.0)
    floor, high = (random / 2).log().expand_as(difference), torch.log1p(-random)
    log_p = torch.logaddexp(high + F.logsigmoid(difference), floor)
    log_not_p = torch.logaddexp(high + F.logsigmoid(-difference), floor)
    return -(preferred * log_p + (1 - preferred) * log_not_p)


def _world(config: RewardModelConfig | ControlPolicyConfig) -> str:
    """What is observed and done there."""
    return (
        f"observations {config.observation} and {config.actions} "
        f"{'discrete' if config.discrete else 'continuous'} actions"
    )


class _MemberLinear(nn.Module):
    """M linear layers at once: (M, N, inputs) to (M, N, outputs)."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = math.sqrt(6 / (inputs + outputs))  # Glorot
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)


class _Convolutions(nn.Module):
    """The original's four convolutions for each member, as groups of channels: bytes (N, H, W, frames) to (M,
    N, size).

    With `coordinates` each of the last 16 filters says two numbers and not a picture: the mean place of what
    it sees, weighted by softmax(what it sees) (Levine et al. 2016, arXiv 1504.00702). A reward that depends
    on where something is has then a few weights to learn, the same for every place, and not some for each
    place, of which a few hundred labels say little.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__()
        height, width, frames = config.observation
        self.members, self.dropout = config.members, config.dropout
        layers, norms, inputs = [], [], frames
        for kernel, stride in FILTERS:
            layers.append(
                nn.Conv2d(inputs * config.members, 16 * config.members, kernel, stride, groups=config.members)
            )
            for member in range(config.members):
                nn.init.xavier_uniform_(layers[-1].weight.data[16 * member : 16 * (member + 1)])
            nn.init.zeros_(layers[-1].bias)
            norms.append(nn.BatchNorm2d(16 * config.members) if config.batchnorm else nn.Identity())
            height, width, inputs = (height - kernel) // stride + 1, (width - kernel) // stride + 1, 16
        if min(height, width) < 1:
            raise UserError(
                f"expected pictures of at least 43 x 43, got {config.observation[0]} x "
                f"{config.observation[1]}"
            )
        self.layers, self.norms, self.size = nn.ModuleList(layers), nn.ModuleList(norms), 16 * height * width
        self.sharpness = None
        if config.coordinates:
            self.size = 2 * 16
            self.sharpness = nn.Parameter(torch.ones(16 * config.members))  # its logarithm

    def forward(self, observations: Tensor) -> Tensor:
        hidden = (
            (observations.float() / 255).movedim(-1, 1).repeat(1, self.members, 1, 1)
        )  # (N, M frames, H, W)
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            hidden = norm(layer(hidden))
            if i < len(self.layers) - 1:
                hidden = F.dropout(F.leaky_relu(hidden, SLOPE), self.dropout, self.training)
        hidden = F.leaky_relu(hidden, SLOPE) if self.sharpness is None else self._places(hidden)
        return hidden.view(len(hidden), self.members, -1).movedim(0, 1)

    def _places(self, seen: Tensor) -> Tensor:
        """(N, filters, H, W) to (N, filters, 2): x and y, each from -1 to 1."""
        height, width = seen.shape[2:]
        odds = (seen.flatten(2) * self.sharpness.exp()[:, None]).softmax(-1).view_as(seen)
        x = odds.sum(2) @ torch.linspace(-1, 1, width, device=seen.device)
        y = odds.sum(3) @ torch.linspace(-1, 1, height, device=seen.device)
        return torch.stack([x, y], -1)
