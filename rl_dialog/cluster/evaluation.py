"""Many checkpoints evaluated: one after the other, or as many at a time as Ray has cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import wants_gpus
from rl_dialog.cluster.jobs import each
from rl_dialog.cluster.rollout import Rollouts
from rl_dialog.evaluation.checkpoints import CheckpointConfig, MakeEnv, Player, evaluate_checkpoint, play_here
from rl_dialog.evaluation.held_out import HeldOut
from rl_dialog.evaluation.summary import RunResult


def evaluate_in_turn(
    directories: Sequence[str],
    config: CheckpointConfig,
    make_env: MakeEnv | None,
    held_out: HeldOut | None,
    *,
    num_workers: int = 0,
    address: str | None = None,
) -> Iterator[tuple[str, RunResult]]:
    """(directory, result) of each checkpoint; with workers these are Ray actors that play the episodes."""
    with _player(config, make_env, num_workers, address) as play:
        for directory in directories:
            yield directory, evaluate_checkpoint(directory, config, play, held_out)


@contextmanager
def _player(
    config: CheckpointConfig, make_env: MakeEnv | None, num_workers: int, address: str | None
) -> Iterator[Player | None]:
    if make_env is None or not num_workers:
        yield play_here(config, make_env)
        return
    what = {"episodes": range(config.episodes), "seed": config.seed, "batch_size": config.batch_size}
    with (
        connect(address, num_cpus=max(num_workers, os.cpu_count() or 1)),
        Rollouts(make_env, num_workers, use_gpu=wants_gpus(config.device, num_workers)) as rollouts,
    ):
        yield lambda policy, tokenizer, directory, beta, decoding: rollouts.play(
            Path(directory).absolute(), beta=beta, decoding=decoding, **what
        )


def evaluate_side_by_side(
    directories: Sequence[str],
    config: CheckpointConfig,
    make_env: MakeEnv | None,
    held_out: HeldOut | None,
    *,
    address: str | None = None,
    waiting: Callable[[int], None],
) -> Iterator[tuple[str, RunResult]]:
    """(directory, result) of each checkpoint, each on a core (and a GPU) of its own, in the order of
    finishing; `waiting(unfinished)` is called as `each` does."""
    alone = partial(_evaluate_alone, config=config, make_env=make_env, held_out=held_out)
    with connect(address):
        gpus = float(wants_gpus(config.device, 1))
        for position, outcome in each(alone, directories, waiting=waiting, gpus=gpus):
            if isinstance(outcome, BaseException):
                raise outcome
            yield directories[position], outcome


def _evaluate_alone(
    directory: str, config: CheckpointConfig, make_env: MakeEnv | None, held_out: HeldOut | None
) -> RunResult:
    return evaluate_checkpoint(directory, config, play_here(config, make_env), held_out)
