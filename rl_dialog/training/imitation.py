"""Imitation of expert acts: each of the acts is a yes-or-no question, answered with logistic regression on a
shared network.

    loss = mean_i -[w a_i log p_i + (1 - a_i) log(1 - p_i)]     w = pos_weight: of 209 acts about 2.5 are
                                                                said in a turn

Masks play no part here: an act that a person said is an example, wherever the simulator would not allow it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy


@dataclass(frozen=True)
class Imitation:
    """How to imitate. Raises UserError for a number out of its range."""

    epochs: int = 16
    """passes over the demonstrations; the one with the best held-out loss is kept"""
    learning_rate: float = 1e-3
    """learning rate of RMSprop"""
    weight_decay: float = 1e-5
    """weight decay of RMSprop"""
    pos_weight: float = 5.0
    """how much more an act that was said counts than one that was not"""
    batch_size: int = 32
    """turns per update"""
    held_out: float = 0.1
    """share of the dialogs that are held out, to choose the epoch by"""

    def __post_init__(self) -> None:
        if (
            self.epochs < 0
            or self.batch_size < 1
            or self.learning_rate <= 0
            or self.pos_weight <= 0
            or not 0 < self.held_out < 1
        ):
            raise UserError(
                "expected epochs >= 0, batch_size >= 1, positive rates and weights and 0 < held_out < 1, got "
                f"{self}"
            )


def imitate(policy: ActPolicy, states: np.ndarray, actions: np.ndarray, dialogs: np.ndarray,
            config: Imitation, *, seed: int = 0,
            log: Callable[[int, dict[str, float]], None] = lambda epoch, metrics: None,
            ) -> dict[str, float]:  # fmt: skip
    """Trains `policy` in place on expert turns # (N, S), (N, A), (N,); returns the metrics of the epoch that
    was kept.

    Metrics: `loss` as above on the training dialogs; `held_out_loss`, and `held_out_f1` of the acts with p >
    1/2, on the others. Raises UserError for demonstrations of another world, or too few to hold one dialog
    out.
    """
    _check_shapes(policy, states, actions)
    generator = np.random.default_rng(seed)
    everyone = generator.permutation(np.unique(dialogs))
    if len(everyone) < 2:
        raise UserError(f"expected at least two dialogs to imitate, got {len(everyone)}")
    count = min(max(1, round(config.held_out * len(everyone))), len(everyone) - 1)  # one to learn from stays
    held_out = np.isin(dialogs, everyone[:count])
    x, a = torch.from_numpy(states), torch.from_numpy(actions).float()
    train, held_out = torch.from_numpy(np.flatnonzero(~held_out)), torch.from_numpy(np.flatnonzero(held_out))
    optimizer = torch.optim.RMSprop(
        policy.policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    weight = torch.tensor(config.pos_weight)
    best: dict[str, float] = {}
    best_state = policy.state_dict()
    for epoch in range(config.epochs):
        losses = []
        shuffled = train[torch.from_numpy(generator.permutation(len(train)))]
        for batch in shuffled.split(config.batch_size):
            loss = binary_cross_entropy_with_logits(policy.logits(x[batch]), a[batch], pos_weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        metrics = {
            "loss": float(np.mean(losses)),
            **_held_out(policy, x[held_out], a[held_out], weight),
            "epoch": float(epoch + 1),
        }
        log(epoch + 1, metrics)
        if not best or metrics["held_out_loss"] < best["held_out_loss"]:
            best, best_state = metrics, copy.deepcopy(policy.state_dict())
    policy.load_state_dict(best_state)
    return best


@torch.inference_mode()
def _check_shapes(policy: ActPolicy, states: np.ndarray, actions: np.ndarray) -> None:
    shapes = (policy.config.state_size, policy.config.action_size)
    if (states.shape[1:], actions.shape[1:]) != ((shapes[0],), (shapes[1],)):
        raise UserError(
            f"expected states and actions with {shapes} bits, got {states.shape[1:]} and {actions.shape[1:]}:"
            " another world's?"
        )


def _held_out(policy: ActPolicy, states: Tensor, actions: Tensor, weight: Tensor) -> dict[str, float]:
    logits = policy.logits(states)
    predicted, right = logits > 0, actions > 0
    loss = binary_cross_entropy_with_logits(logits, actions, pos_weight=weight)
    return {
        "held_out_loss": loss.item(),
        "held_out_f1": 2 * (predicted & right).sum().item() / max(1, (predicted.sum() + right.sum()).item()),
    }
