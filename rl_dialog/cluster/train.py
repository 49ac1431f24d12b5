"""Training on Ray Train (V2): N workers in one process group, restarted from the latest checkpoint when one
of them dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer

from rl_dialog.errors import UserError, room_for
from rl_dialog.training.worker_group import TOGETHER, WORKERS


@dataclass(frozen=True)
class WorkerGroup:
    """How many workers train and what each one gets."""

    num_workers: int = 1
    cpus_per_worker: float = 1.0
    use_gpu: bool = False
    max_failures: int = 3


def fit(
    train_worker: Callable[[Any], Any],
    config: Any,
    group: WorkerGroup,
    output_dir: str | Path,
    *,
    callbacks: Sequence[Any] = (),
) -> None:
    """Runs `train_worker(config)` on every worker of the group, to the end. `callbacks` hear what it reports
    to Ray Train.

    A worker that dies takes the group down; it is started again up to `max_failures` times and `train_worker`
    continues from its latest checkpoint. A message to people (UserError) ends the training at once: it would
    come again. `output_dir` must be storage that all nodes see. Raises what a worker raised.
    """
    # Ray's watcher of announced preemptions takes a process of its own, and nothing here hears it: a worker
    # that goes is started again from its latest checkpoint, announced or not.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    per_worker = {"CPU": group.cpus_per_worker, **({"GPU": 1} if group.use_gpu else {})}
    trainer = TorchTrainer(
        _worker_loop,
        train_loop_config={
            "call": cloudpickle.dumps((train_worker, config)),
            "threads": max(1, int(group.cpus_per_worker)),
        },
        scaling_config=ScalingConfig(
            num_workers=group.num_workers, use_gpu=group.use_gpu, resources_per_worker=per_worker
        ),
        # one worker talks to nobody
        torch_config=TorchConfig(
            backend="nccl" if group.use_gpu and group.num_workers > 1 else "gloo", timeout_s=TOGETHER
        ),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(Path(output_dir).resolve()),
            failure_config=FailureConfig(max_failures=group.max_failures),
            callbacks=[EndAtMessages(), *callbacks],
        ),
    )
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with room_for(output_dir), _errors_of_workers():
            trainer.fit()
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            raise
        raise KeyboardInterrupt from ended  # Ray Train's handler of Ctrl-C says nothing to anybody
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGINT, interrupt
            )  # Ray leaves its own behind, which after the training does nothing: Ctrl-C would end nothing


class EndAtMessages(UserCallback):
    """Starts no worker again for what a config, a file or a full disk made fail."""

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(cause := _cause(error), UserError):
                raise cause


def _worker_loop(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    os.environ[WORKERS] = str(ray.train.get_context().get_world_size())
    work, config = cloudpickle.loads(
        settings["call"]
    )  # opened here only: Ray's controller would import all of transformers for it
    work(config)


@contextmanager
def _errors_of_workers() -> Iterator[None]:
    try:
        yield
    except ray.train.TrainingFailedError as error:
        raise _cause(error) from error


def _cause(error: BaseException) -> BaseException:
    """The user's own error inside Ray's wrappers, when it is one that a config or a file can fix."""
    failures = getattr(error, "worker_failures", None) or {}
    inside = [*failures.values(), getattr(error, "controller_failure", None), getattr(error, "cause", None)]
    for inner in (error, *(_cause(one) for one in inside if isinstance(one, BaseException))):
        if isinstance(inner, UserError | OSError) and not isinstance(inner, ray.exceptions.RayError):
            return inner
    return error
