"""Policies over dialogue acts: a vector of a dialog's state in, a probability for each act out.

    state (S)  ->  S-100-100-A, ReLU  ->  logits z (A)  ->  p_i = sigmoid(z_i), independent of each other,
                                                            0 where the mask is 0
               ->  S-50-50-1, ReLU    ->  the state's value

S is 340 and A 209 for MultiWOZ. Shapes: B states, S bits of a state, A acts.

A checkpoint is a directory with `config.json` (sizes, and the vocabulary they belong to) and
`model.safetensors`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from rl_dialog.errors import UserError
from rl_dialog.models.network_files import load_weights, save_network, shape_in

KIND = "act_policy"
IMPOSSIBLE = -1e9  # a masked logit: finite, so that 0 * logit is 0; its probability is 0 in floating point


@dataclass(frozen=True)
class ActPolicyConfig:
    """The shape of an `ActPolicy`. Raises UserError for a size below 1."""

    state_size: int
    action_size: int
    hidden: tuple[int, ...] = (100, 100)
    value_hidden: tuple[int, ...] = (50, 50)
    value_scale: float = (
        40.0  # the value network's output is in units of this; returns are between about -60 and 80
    )
    vocabulary: str = ""  # a digest of the acts that the bits stand for

    def __post_init__(self) -> None:
        if (
            min(self.state_size, self.action_size, *self.hidden, *self.value_hidden) < 1
            or self.value_scale <= 0
        ):
            raise UserError(f"expected sizes of at least 1 and a positive value_scale, got {self}")


class MaskedBernoulli:
    """A product of independent Bernoullis, p(a|s) = prod_i p_i^a_i (1 - p_i)^(1 - a_i), by its logits # (B,
    A).

    Everything is computed from log sigmoid(z), so logits of +-100 have finite log-probabilities; the
    logarithm of a sigmoid would not.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits  # those of impossible bits are IMPOSSIBLE

    @staticmethod
    def masked(logits: Tensor, mask: Tensor) -> Tensor:
        """Logits with which the bits where `mask` is 0 are never set; they add nothing to log-probability,
        entropy and gradient."""
        return logits.masked_fill(mask == 0, IMPOSSIBLE)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Bits, int8 # (B, A)."""
        uniform = torch.rand(
            self.logits.shape, generator=generator, dtype=self.logits.dtype, device=self.logits.device
        )
        return (uniform < self.logits.sigmoid()).to(torch.int8)

    def mode(self) -> Tensor:
        """The most probable bits, p > 1/2 # (B, A)."""
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, bits: Tensor) -> Tensor:
        """sum_i log p_i^a_i (1 - p_i)^(1 - a_i) # (B,)"""
        return torch.where(bits > 0, logsigmoid(self.logits), logsigmoid(-self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        """-sum_i p_i log p_i + (1 - p_i) log(1 - p_i), in nats # (B,)"""
        return (softplus(self.logits) - self.logits * self.logits.sigmoid()).sum(-1)

    def kl(self, other: MaskedBernoulli) -> Tensor:
        """KL(self || other) under the same mask, in nats # (B,)"""
        on = self.logits.sigmoid() * (logsigmoid(self.logits) - logsigmoid(other.logits))
        off = (-self.logits).sigmoid() * (logsigmoid(-self.logits) - logsigmoid(-other.logits))
        return (on + off).sum(-1)


class ActPolicy(nn.Module):
    """The policy and the value network; they share nothing."""

    distribution = MaskedBernoulli
    value_unit = 1.0  # what an error of a value is measured in

    def __init__(self, config: ActPolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.policy = _mlp(config.state_size, *config.hidden, config.action_size)
        self.value_network = _mlp(config.state_size, *config.value_hidden, 1)

    def forward(self, states: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`logits` and `values` # (B, A), (B,)"""
        return self.logits(states, masks), self.values(states)

    def logits(self, states: Tensor, masks: Tensor | None = None) -> Tensor:
        """Logits of a `MaskedBernoulli` # (B, A); without masks every act is possible."""
        logits = self.policy(states)
        return logits if masks is None else MaskedBernoulli.masked(logits, masks)

    def values(self, states: Tensor) -> Tensor:
        """The expected discounted return from each state, in raw units of reward # (B,)"""
        return self.config.value_scale * self.value_network(states).squeeze(-1)

    def optimized(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by the optimizer that they belong to."""
        return {"policy": list(self.policy.parameters()), "value": list(self.value_network.parameters())}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the checkpoint's two files into `directory`, which is made if needed."""
        save_network(self, self.config, directory, kind=KIND)

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, expected: ActPolicyConfig | None = None) -> ActPolicy:
        """The policy of a checkpoint directory, in eval mode.

        `expected` is what the caller's world needs: its sizes and vocabulary are compared. Raises UserError
        where they differ or the files are not those of an ActPolicy.
        """
        config = read_config(directory)
        if expected is not None:
            _check_fits(directory, config, expected)
        return load_weights(cls(config), directory, config)


class GreedyActs:
    """States and masks as arrays to the most probable bits, in float64: what is chosen does not depend on
    which states share the batch."""

    def __init__(self, policy: ActPolicy) -> None:
        self.policy = ActPolicy(policy.config).double().eval()
        self.policy.load_state_dict(policy.state_dict())

    @torch.inference_mode()
    def __call__(self, states: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """float32 (B, S) and int8 (B, A) to int8 (B, A)."""
        return (
            MaskedBernoulli(self.policy.logits(torch.from_numpy(states).double(), torch.from_numpy(masks)))
            .mode()
            .numpy()
        )


def is_act_policy(directory: str | Path) -> bool:
    """Is this the checkpoint of a task policy, whatever else may be wrong with it?"""
    try:
        values = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        return values.get("model_type") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def read_config(directory: str | Path) -> ActPolicyConfig:
    """The shape of a checkpoint. Raises UserError for a directory that is none."""
    path = Path(directory) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{directory}: expected the checkpoint of a task policy (config.json, model.safetensors), found "
            "no config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected JSON, got {error}") from error
    remedy = "; `simulate --policy mle` writes one"
    return shape_in(values, ActPolicyConfig, path, kind=KIND, remedy=remedy)


def _check_fits(directory: str | Path, config: ActPolicyConfig, expected: ActPolicyConfig) -> None:
    sizes, needed = (config.state_size, config.action_size), (expected.state_size, expected.action_size)
    if sizes != needed or config.vocabulary != expected.vocabulary:
        same = " with the same sizes but other acts" if sizes == needed else ""
        raise UserError(
            f"{directory}: expected a policy for states of {needed[0]} bits and {needed[1]} acts, got one for"
            f" {sizes[0]} and {sizes[1]}{same}: it was trained in another world; pass that one as --world, or"
            " train a policy here"
        )


def _mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)
