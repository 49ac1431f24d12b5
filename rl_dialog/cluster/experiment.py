"""The long stages of an experiment on Ray: all runs of all tasks, and the reports of all tasks, each in a
process of one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_dialog.cluster.jobs import each
from rl_dialog.cluster.waiting import cpus_of_cluster
from rl_dialog.config import changed
from rl_dialog.evaluation.comparison import BASELINE, FinishedRun
from rl_dialog.evaluation.experiment import (
    METRICS,
    RESULT,
    Progress,
    Run,
    Say,
    claim,
    digest,
    digest_of_weights,
    evaluate_runs,
    line_of,
    train_run,
)

Verb = Callable[[Any], Any]  # what is called with a verb's config


def train_all(tasks: Sequence[Progress], chosen: Callable[[Run], bool], train_worker: Verb, say: Say) -> None:
    """Every chosen run that is not done yet, of all tasks without a problem together."""
    waiting = list(_waiting_runs(tasks, chosen))
    total, began = len(waiting), time.perf_counter()
    configs = [one.config for _, one in waiting]
    gpus = float(any(config.device.startswith("cuda") for config in configs))
    train, tell = partial(train_run, train_worker=train_worker), still_waiting(say, "training runs")
    for count, (position, outcome) in enumerate(each(train, configs, waiting=tell, gpus=gpus), 1):
        task, one = waiting[position]
        error = line_of(outcome) if isinstance(outcome, BaseException) else ""
        task.finished[one.name] = FinishedRun(one.method, one.seed, None if error else one.seconds, error)
        passed = (time.perf_counter() - began) / 60
        left = (
            f"{passed * (total - count) / count:.0f} min left"
            if count < total
            else f"{passed:.0f} min in all"
        )
        how = f"failed: {error}" if error else f"{outcome:.0f} s, {one.headline}"
        say(f"[{count}/{total}, {left}] {one.name}: {how}")


def _waiting_runs(tasks: Sequence[Progress], chosen: Callable[[Run], bool]) -> Iterator[tuple[Progress, Run]]:
    """Those that must be made; the others are noted as finished."""
    for task in (task for task in tasks if not task.problem):
        bc = {run.seed: run for run in task.runs if run.method == BASELINE}
        for one in filter(chosen, task.runs):
            start = bc.get(one.seed) if one.method != BASELINE else None
            if start and task.finished[start.name].error:
                error = f"{start.folder.name}, which it starts from, failed"
                task.finished[one.name] = FinishedRun(one.method, one.seed, error=error)
            elif claim(one.folder, RESULT, one.recipe(start)):
                task.finished[one.name] = FinishedRun(one.method, one.seed, one.seconds)
            else:
                yield task, one


def evaluate_all(
    tasks: Sequence[Progress],
    config_of: Callable[[Progress], Any],
    evaluate: Verb,
    say: Say,
    *,
    required: str = BASELINE,
) -> None:
    """One report per task over all of its runs, the tasks side by side.

    A task without a run of `required` gets a problem instead, one with a problem nothing.
    """
    waiting, configs = [], []
    for task in (task for task in tasks if not task.problem):
        if required and not any(run.method == required for run in task.done()):
            task.problem = f"no run of {required} finished: " + next(iter(task.finished.values())).error
            continue
        config = config_of(task)
        runs = {run.name: [digest(run.folder / RESULT), digest_of_weights(run.folder)] for run in task.done()}
        recipe = {"settings": changed(config), "runs": runs}
        if not claim(Path(config.output_dir), METRICS, recipe):
            waiting.append(task)
            # a report that a killed run or a failed checkpoint left incomplete is made again
            configs.append(replace(config, side_by_side=not config.num_workers, overwrite=True))
            say(f"{task.name}: evaluating {len(runs)} runs")
    work, tell = partial(evaluate_runs, evaluate=evaluate), still_waiting(say, "evaluations")
    for position, outcome in each(work, configs, waiting=tell):
        _note_evaluation(waiting[position], outcome, say)


def _note_evaluation(task: Progress, outcome: Any, say: Say) -> None:
    if isinstance(outcome, BaseException):
        task.problem = f"evaluation failed: {line_of(outcome)}"
        say(f"{task.name}: {task.problem}")
        return
    seconds, errors = outcome
    left_out = "".join(f", without {run.rpartition('/')[2]}" for run in errors)
    say(f"{task.name}: evaluated in {seconds:.0f} s{left_out}")
    for one in task.done():
        if error := errors.get(str(one.folder)):
            task.finished[one.name] = replace(task.finished[one.name], error=f"evaluation: {error}")


def still_waiting(say: Say, what: str) -> Callable[[int], None]:
    """For `each`: says how many have not finished, and what there is to run them on."""
    return lambda unfinished: say(f"still waiting for {unfinished} {what}. {cpus_of_cluster()}")
