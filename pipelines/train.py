"""Shards to checkpoint: any method, one worker or many.

    python -m pipelines.train --data DATA --output_dir runs/bc
    python -m pipelines.train --data DATA --output_dir runs/ilql --method ilql --model_name_or_path runs/bc

`rl_dialog/methods/README.md` explains methods and metrics, `rl_dialog/training/start.py` tells how a run
starts, `rl_dialog/training/loop.py` is the loop. Methods that learn by talking belong to `online`.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from envs import text_env
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import check_device, device, wants_gpus
from rl_dialog.errors import NoRoom
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.methods import FROM_LOGS, METHODS
from rl_dialog.models.device import named_device
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, at_least, claimed, require, run
from rl_dialog.training.logger import following
from rl_dialog.training.start import (
    Report,
    TrainingRun,
    check_run,
    notes_before,
    train_run,
    with_absolute_paths,
)

CHOICES = {"method": METHODS}  # those of `online` too, to be told apart from misspelt ones
LISTED = {"method": FROM_LOGS}
CHANGEABLE = (  # by --resume: how long, how fast and with what it is watched, but not what is learned
    *("max_steps", "num_train_epochs", "eval_steps", "save_steps", "logging_steps", "save_total_limit"),
    *("env", "env_episodes", "data", "model.model_name_or_path", "num_workers", "cpus_per_worker", "device"),
    *("max_failures", "per_device_train_batch_size", "gradient_accumulation_steps"),
)
ENV_SEED = 10_000  # of the conversation partners: others than `evaluate` has


@dataclass(frozen=True)
class TrainConfig(TrainingRun, ResumableOutput, OnCluster, OnDevice):
    """Everything a training run depends on."""

    num_workers: int = 0
    """training processes on Ray (data parallel), each with a GPU where there are enough; 0 trains in this
    process, or with one of them where there is a cluster to join (--address, RAY_ADDRESS)"""
    cpus_per_worker: float = 0.0
    """CPU cores of each training process; 0 shares out the cores of this machine"""
    max_failures: int = 3
    """restarts after a worker on Ray died"""
    env: str = ""
    """measure the return in this environment at each evaluation, and choose the best checkpoint by it:
    small_talk, multiwoz, wordle, toy_maze, ..., textarena:NAME, reasoning_gym:NAME, openenv:URL, or
    module:Class for one of your own (envs/README.md)"""
    env_episodes: int = 64
    """conversations per measurement of the return"""


def main(config: TrainConfig) -> dict[str, Any]:
    """Trains and returns the final metrics and checkpoint paths."""
    check(config)
    config = from_anywhere(config)
    with claimed(config, "train", free=CHANGEABLE, choices=CHOICES) as out:
        before = notes_before(config, measured=bool(config.env))
        for note in () if config.quiet else before:
            print(f"note: {note}", flush=True)
        with nullcontext([]) if config.quiet else following(out) as shown:
            _train_or_clear(config, out)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    for note in () if config.quiet else result.get("notes", ()):
        if note not in (*before, *shown):
            print(f"note: {note}", flush=True)
    return result


def _train_or_clear(config: TrainConfig, out: Path) -> None:
    """Without room for a first checkpoint nothing is left that anyone could go on with."""
    try:
        _train(config, out)
    except NoRoom:
        if not (out / "latest").is_file():
            shutil.rmtree(out, ignore_errors=True)
        raise


def _train(config: TrainConfig, out: Path) -> None:
    """In this process, or by workers of Ray Train where there are to be some or a cluster is there."""
    cluster = config.address or os.environ.get("RAY_ADDRESS") or ray.is_initialized()
    workers = config.num_workers or int(bool(cluster))
    if not workers:
        before = torch.get_num_threads()
        torch.set_num_threads(int(config.cpus_per_worker) or before)
        try:
            train_worker(config)
        finally:
            torch.set_num_threads(before)
        return
    # a second of imports, which training here does without
    from rl_dialog.cluster.train import WorkerGroup, fit

    with connect(config.address or None):
        use_gpu = wants_gpus(config.device, workers)
        config = replace(config, device="cuda" if use_gpu else "cpu")
        share = max(1, int(ray.cluster_resources().get("CPU", 1)) // workers)
        group = WorkerGroup(workers, config.cpus_per_worker or share, use_gpu, config.max_failures)
        fit(train_worker, config, group, out)


def train_worker(config: TrainConfig, *, report: Report | None = None) -> dict[str, Any]:
    """What one worker does; runs without Ray too, then on the device that the flag means."""
    where = device() if "WORLD_SIZE" in os.environ and config.device != "cpu" else named_device(config.device)
    evaluate = None
    if config.env:
        make_env = text_env(config.env)
        evaluate = partial(env_return, make_env=make_env, episodes=config.env_episodes, seed=ENV_SEED)
    return train_run(config, Path(config.output_dir), device=where, evaluate=evaluate, report=report)


def check(config: TrainConfig) -> None:
    """What can be known to fail before a worker starts. Raises UserError."""
    require(config, data="a directory that `prepare` wrote", output_dir="a folder for the run")
    at_least(config, num_workers=0, env_episodes=1, max_failures=0)
    check_run(config)
    check_device(config.device, config.address)
    check_settings(config)


def check_settings(config: TrainConfig) -> None:
    """Raises UserError for an environment that does not exist or is not talked in; none at all is fine."""
    if config.env:
        text_env(config.env)


def from_anywhere(config: TrainConfig) -> TrainConfig:
    """With absolute paths: workers do not share the driver's working directory."""
    return replace(with_absolute_paths(config), output_dir=str(Path(config.output_dir).absolute()))


if __name__ == "__main__":
    run(TrainConfig, main, choices=CHOICES, listed=LISTED)
