"""How a small model is fitted: AdamW, whose rate rises for a tenth of the steps and then falls to zero in a
line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rl_dialog.errors import UserError
from rl_dialog.training.optim import learning_rate_at, make_optimizer

WARMUP = 0.1  # share of the steps
Progress = Callable[[int, int, float], None]  # hears the step, how many there are, and the loss


@contextmanager
def fitting_bar(*, quiet: bool) -> Iterator[Progress]:
    """A bar of the steps and the loss, where there is a terminal."""
    with tqdm(unit="step", disable=True if quiet else None) as bar:

        def show(step: int, steps: int, loss: float) -> None:
            bar.total = steps
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)

        yield show


def minimise(
    model: nn.Module,
    batch_loss: Callable[[], Tensor],
    *,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    progress: Progress = lambda step, steps, loss: None,
) -> None:
    """Takes `steps` steps down the loss of the next batch, gradients clipped to norm 1; ends in eval mode."""
    rate = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    minimise_in_parts(model, lambda: iter([batch_loss()]), steps=steps, **rate, progress=progress)


def minimise_in_parts(
    model: nn.Module,
    batch_parts: Callable[[], Iterator[Tensor]],
    *,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    progress: Progress = lambda step, steps, loss: None,
    together: Callable[[nn.Module, float], float] = lambda model, loss: loss,
    is_done: Callable[[int], bool] = lambda step: False,
) -> None:
    """The same where the loss of a batch comes in parts, whose sum it is: each is let go before the next is
    computed, so that memory holds one.

    together: called with the loss after the gradients are there; adds up those of several processes, and
    returns the loss of all. is_done: called after each step, numbered from 1; True ends it.

    Raises UserError for a gradient that is not finite: what it made would be no model.
    """
    optimizer = make_optimizer(model, learning_rate=learning_rate, weight_decay=weight_decay)
    rate = {"peak": learning_rate, "warmup": round(WARMUP * steps), "total": steps, "schedule": "linear"}
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, **rate)
        optimizer.zero_grad(set_to_none=True)
        loss = together(model, sum(_backward(part) for part in batch_parts()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise UserError(
                f"step {step + 1} of {steps}: expected a finite gradient, got norm {norm.item()}; lower the "
                f"learning rate, which is {learning_rate:g}"
            )
        optimizer.step()
        progress(step + 1, steps, loss)
        if is_done(step + 1):
            break
    model.eval()


def _backward(loss: Tensor) -> float:
    loss.backward()
    return loss.item()
