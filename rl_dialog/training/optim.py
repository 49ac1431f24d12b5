"""Optimizer and schedule, and their exact state without pickles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl_dialog.errors import UserError

Schedule = Literal["constant", "linear", "cosine"]


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    values: Iterable[nn.Parameter] = (),
    value_share: float = 1.0,
) -> torch.optim.AdamW:
    """AdamW over the parameters that train; only matrices decay. Of `values` the rate is `value_share` of the
    others'."""
    apart = {id(p) for p in values}
    groups = []
    for in_values, share in ((False, 1.0), (True, value_share)):
        parameters = [p for p in model.parameters() if p.requires_grad and (id(p) in apart) == in_values]
        for matrices, decay in ((True, weight_decay), (False, 0.0)):
            groups.append(
                {
                    "params": [p for p in parameters if (p.dim() >= 2) == matrices],
                    "weight_decay": decay,
                    "share": share,
                }
            )
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=(0.9, 0.95), fused=True
    )


def default_learning_rate(width: int, start: str) -> float:
    """Narrow models want long steps, and what has been learned short ones: over the root of the width, 0.016
    for a `new` model, 0.008 for one that was `made` by us, and 0.0016 for a `pretrained` one.

    That is 2e-3 for a new model of width 64, 1e-3 for what goes on from it (and for its values), 6e-5 for a
    pretrained model of width 768.
    """
    return {"new": 0.016, "made": 0.008, "pretrained": 0.0016}[start] / math.sqrt(width)


class RMSprop(torch.optim.Optimizer):
    """TensorFlow's: theta -= lr g / sqrt(s + eps) with s = decay s + (1 - decay) g^2, from s = 1 on.

    PyTorch's adds eps to the root and starts at 0: its first steps are ten times as long.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, *, decay: float = 0.99, eps: float = 1e-5
    ) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                square = self.state[parameter].setdefault("square", torch.ones_like(parameter))
                square.lerp_(parameter.grad**2, 1 - group["decay"])
                parameter.addcdiv_(parameter.grad, (square + group["eps"]).sqrt(), value=-group["lr"])


def learning_rate_at(step: int, *, peak: float, warmup: int, total: int, schedule: Schedule) -> float:
    """The learning rate of update `step` (0-based): linear warm-up, then constant, or down to zero after
    `total` updates."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (1 - share if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share)))


def save_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The optimizer's tensors as `<parameter index>.<name>` in one safetensors file."""
    state = optimizer.state_dict()["state"]
    save_file(
        {
            f"{i}.{name}": torch.as_tensor(value).detach().cpu().contiguous()
            for i, slots in state.items()
            for name, value in slots.items()
        },
        path,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The inverse of `save_optimizer`. Raises UserError when the file belongs to other parameters."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(path).items():
        index, slot = name.split(".", 1)
        state.setdefault(int(index), {})[slot] = value
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if any(index >= count for index in state):
        raise UserError(
            f"{path}: expected the state of {count} parameters, got {max(state) + 1}: was the run started "
            "with other heads or adapters?"
        )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
