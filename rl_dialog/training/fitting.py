"""How a small model is fitted: AdamW, whose rate rises for a tenth of the steps and then falls to zero in a
line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm

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
    optimizer = make_optimizer(model, learning_rate=learning_rate, weight_decay=weight_decay)
    rate = {"peak": learning_rate, "warmup": round(WARMUP * steps), "total": steps, "schedule": "linear"}
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, **rate)
        loss = batch_loss()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, steps, loss.item())
    model.eval()
