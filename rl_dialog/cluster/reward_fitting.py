"""A reward model over replies on several workers of Ray Train: each computes its parts of every update, and
their gradients are added up, so that the model is the one of a single worker but for rounding (and for
dropout, where the model has some)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray import train
from torch import nn

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import device, wants_gpus
from rl_dialog.cluster.train import WorkerGroup
from rl_dialog.cluster.train import fit as fit_on_workers
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.replies import Preferences
from rl_dialog.preferences.reply_batches import Worker
from rl_dialog.preferences.reply_reward import ReplyRewardSettings, fitted
from rl_dialog.training.worker_group import place_in_group

FOLDER = "workers"  # of an output folder, while they fit


def fitted_by_workers(
    labels: Preferences,
    settings: ReplyRewardSettings,
    *,
    num_workers: int,
    folder: str | Path,
    device: str = "auto",
    address: str | None = None,
) -> TextReward:
    """A model of these labels, fitted by so many workers; `folder` must be storage that all nodes see.

    Raises UserError where GPUs are asked for and there are fewer.
    """
    place, settings = Path(folder).resolve() / FOLDER, from_anywhere(settings)
    with connect(address or None, num_cpus=num_workers + 1):
        group = WorkerGroup(num_workers=num_workers, use_gpu=wants_gpus(device, num_workers))
        fit_on_workers(_fit_share, (labels, settings, str(place)), group, place)
    reward = TextReward.from_pretrained(place / "model")
    shutil.rmtree(place)
    return reward


def from_anywhere(settings: ReplyRewardSettings) -> ReplyRewardSettings:
    """With the absolute path of a base in a folder: Ray Train gives each worker a directory of its own."""
    base = settings.model_name_or_path
    is_folder = base and Path(base).is_dir()
    return replace(settings, model_name_or_path=str(Path(base).resolve())) if is_folder else settings


def _fit_share(told: tuple[Preferences, ReplyRewardSettings, str]) -> None:
    labels, settings, folder = told
    load_quietly()
    context = train.get_context()
    worker = Worker(context.get_world_rank(), context.get_world_size(), add_up, as_the_first)
    reward = fitted(labels, settings, device=str(device()), worker=worker)
    if worker.rank == 0:
        reward.to("cpu").save_pretrained(Path(folder) / "model")


def add_up(model: nn.Module, loss: float) -> float:
    """The sum over all workers of the gradients, in place, and of the loss."""
    if place_in_group()[1] == 1:
        return loss
    learned: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learned:
        if parameter.grad is None:  # this worker had no row
            parameter.grad = torch.zeros_like(parameter)
    whole = torch.cat(
        [parameter.grad.flatten() for parameter in learned] + [torch.tensor([loss]).to(learned[0])]
    )
    dist.all_reduce(whole)
    start = 0
    for parameter in learned:
        parameter.grad.copy_(whole[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    return float(whole[-1])


def as_the_first(number: float) -> float:
    """The number of worker 0."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    told = torch.tensor([number], dtype=torch.float64, device=device())
    dist.broadcast(told, src=0)
    return float(told)
