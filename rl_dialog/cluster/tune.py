"""A sweep on Ray Tune: trials that report as they go, and successive halving that stops the ones that fall
behind."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from rl_dialog.errors import UserError
from rl_dialog.evaluation.sweep_space import Halving

Report = Callable[[dict[str, float]], None]
STEP = "step"  # what every report says besides the metric
REPLAYED = "replayed"  # in a report: an earlier start of the sweep judged it and let the trial go on
NAMES, LAST = "names of the metrics", "last"


@dataclass(frozen=True)
class Resources:
    """What one trial takes."""

    workers: int = 1
    cpus_per_worker: float = 1.0
    use_gpu: bool = False

    @property
    def in_trial(self) -> bool:
        """Does the trial's own process train? Else it starts workers, which take the resources."""
        return self.workers == 1 and not self.use_gpu

    def trials_at_once(self) -> int:
        """How many fit the cluster now. Raises UserError if none does: Ray would wait for them without a
        word."""
        here = ray.cluster_resources()
        wanted = {"CPU": self.workers * self.cpus_per_worker} | (
            {"GPU": float(self.workers)} if self.use_gpu else {}
        )
        if lacking := [name for name, amount in wanted.items() if amount > here.get(name, 0.0)]:
            name = lacking[0]
            raise UserError(
                f"a trial takes {wanted[name]:g} {name}s ({self.workers} workers), the cluster has "
                f"{here.get(name, 0.0):g}"
            )
        return int(min(here[name] // amount for name, amount in wanted.items() if amount))


class _Halving(AsyncHyperBandScheduler):
    """Learns from what is told again after a restart, and lets it stand."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        action = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if result.get(REPLAYED) else action


def run_trials(
    work: Callable[[Any, Report], dict[str, float] | None],
    trials: Sequence[Any],
    *,
    metric: str,
    mode: str,
    resources: Resources,
    folder: Path,
    halving: Halving | None = None,
    seconds: float = 0.0,
    retries: int = 2,
    ended: Callable[[int, str, float], None],
) -> None:
    """Runs `work(trial, report)` for every trial, as many at a time as fit. Ray must be running, `folder` is
    Tune's.

    `work` returns its last metrics instead of reporting them, since nothing is left to be stopped; or None
    for a trial that an earlier start stopped. With one worker and no GPU it runs in the trial's own process,
    else it starts workers itself (`train.fit` with `tune_callbacks`). `ended(position, how, seconds)` hears
    of each trial that is done: how is "ended", "stopped" (by halving) or "failed" (`retries` times more than
    once). After `seconds` the rest is left as it is. Raises UserError for a metric that is not in the first
    report; halving passes over later ones without it.
    """
    began, unknown = time.monotonic(), _UnknownMetric(metric)
    limit = seconds or math.inf
    listener = _Listener(ended, deaf=lambda: unknown.stop_all() or time.monotonic() - began >= limit)
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}  # we say what counts
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # `unknown` checks
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    # a trial that only starts workers takes no CPU, but Tune wants something
    driver = {"CPU": resources.cpus_per_worker} if resources.in_trial else {"memory": 1}
    tune_config = tune.TuneConfig(
        metric=metric,
        mode=mode,
        scheduler=_scheduler(halving),
        max_concurrent_trials=resources.trials_at_once(),
        time_budget_s=seconds or None,
        # a process that starts and imports torch takes as long as a small trial
        reuse_actors=resources.in_trial,
    )
    run_config = tune.RunConfig(
        name=folder.name,
        storage_path=str(folder.parent),
        failure_config=tune.FailureConfig(max_failures=retries),
        callbacks=[listener],
        verbose=0,
        stop=unknown,
    )
    positions = {"position": tune.grid_search(list(range(len(trials))))}
    trainable = tune.with_resources(_trainable(work, trials, resources), driver)
    tune.Tuner(trainable, param_space=positions, tune_config=tune_config, run_config=run_config).fit()
    if unknown.reported:
        raise UserError(f"the metric {metric!r} is never reported: expected one of {unknown.reported}")
    if len(listener.heard) < len(trials) and time.monotonic() - began < limit:
        raise KeyboardInterrupt  # Tune takes Ctrl-C for "finish early"


def _trainable(
    work: Callable[[Any, Report], dict[str, float] | None],
    trials: Sequence[Any],
    resources: Resources,
) -> Callable[[dict[str, Any]], None]:
    """What the process of a trial does."""

    def report(metrics: dict[str, float]) -> None:
        tune.report(_with_names(metrics))

    def trainable(config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(max(1, int(resources.cpus_per_worker)))
        if last := work(trials[config["position"]], report):
            report({**last, LAST: True})

    return trainable


def _with_names(metrics: dict[str, float]) -> dict[str, Any]:
    """Tune adds results of its own, which nobody can go by."""
    return {**metrics, NAMES: ", ".join(sorted(metrics))}


def _scheduler(halving: Halving | None) -> _Halving | None:
    if not halving:
        return None
    steps = {"grace_period": halving.grace, "reduction_factor": halving.factor}
    return _Halving(time_attr=STEP, max_t=10**12, **steps)


class _UnknownMetric(tune.Stopper):
    """A metric that the first report lacks ends the sweep; later ones may lack it, as no return is measured
    where every episode failed."""

    def __init__(self, metric: str) -> None:
        self.metric, self.known = metric, False
        self.reported = ""  # what is reported instead

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.known = self.known or self.metric in result
        if not self.known:
            self.reported = self.reported or result.get(NAMES, "")
        return self.stop_all()

    def stop_all(self) -> bool:
        return bool(self.reported)


class _Listener(tune.Callback):
    """Tells how each trial ended, until it is deaf: what Tune ends because time is over has not ended."""

    def __init__(self, ended: Callable[[int, str, float], None], *, deaf: Callable[[], bool]) -> None:
        self.ended, self.deaf = ended, deaf
        self.started: dict[str, float] = {}  # trial -> when
        self.heard: set[int] = set()  # positions

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.started.setdefault(trial.trial_id, time.monotonic())

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        if not self.deaf():
            self._tell(trial, "ended" if trial.last_result.get(LAST) else "stopped")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._tell(trial, "failed")

    def _tell(self, trial: Any, how: str) -> None:
        self.heard.add(trial.config["position"])
        self.ended(trial.config["position"], how, time.monotonic() - self.started[trial.trial_id])


def tune_callbacks() -> list[Any]:
    """For `train.fit` inside a trial: what its first worker reports goes to Tune."""
    return [TuneReportCallback()]


def report_from_worker(metrics: dict[str, float]) -> None:
    """What every worker of a trial calls together."""
    ray.train.report(_with_names(metrics))


def is_first_worker() -> bool:
    """Of the trial that this process trains."""
    return ray.train.get_context().get_world_rank() == 0
