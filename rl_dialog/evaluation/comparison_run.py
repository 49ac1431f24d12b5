"""The runs of a comparison, and what became of them as the results table, for `pipelines.compare`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE, ComparedTask, FinishedRun, write_comparison
from rl_dialog.evaluation.comparison_file import Chosen, Comparison, Settings, how_chosen
from rl_dialog.evaluation.experiment import Progress, Run, Say, logged_folder, metrics_file
from rl_dialog.evaluation.machine import describe_machine
from rl_dialog.evaluation.sweep_space import Point

TrainConfig = Callable[[Path, Path, int, Sequence[str]], Any]  # (data, out, seed, flags) -> config of `train`


def runs_of(
    comparison: Comparison, name: str, folder: Path, settings: Chosen, train_config: TrainConfig
) -> list[Run]:
    """Every method of a task for every seed, bc first: the others start from their seed's. Raises UserError
    for a flag that there is none of."""
    task, runs = comparison.tasks[name], []
    for method, everywhere in comparison.methods.items():
        here, first = task.methods.get(method, ""), method == BASELINE
        fixed = shlex.split(
            " ".join([comparison.train, task.bc if first else task.improve, everywhere, here or ""])
        )
        for seed in comparison.seeds if here is not None else ():
            data = logged_folder(task, folder) if first else folder / "data"
            start = [] if first else ["--model_name_or_path", str(folder / f"{BASELINE}-seed{seed}")]
            flags = [*fixed, *Point(settings.get(method, {})).flags, "--method", method, *start]
            runs.append(Run(method, seed, train_config(data, folder / f"{method}-seed{seed}", seed, flags)))
    return runs


def write_results(
    out: Path,
    comparison: Comparison,
    tasks: Sequence[Progress],
    settings: Settings,
    *,
    command: str,
    readme: str = "",
    picture: str = "",
    say: Say = print,
) -> dict[str, Any]:
    """compare.md, compare.json, compare.svg and the table in README; their paths. Says the table, and raises
    UserError where something is missing from it."""
    compared = [_compared(task, how_chosen(comparison, task.name, settings)) for task in tasks]
    machine, seeds = describe_machine(), ", ".join(map(str, comparison.seeds))
    cores = f"{machine['cores']} cores of {machine['cpu']}, one per run; torch {machine['torch']}"
    record = {"command": command, "seeds": comparison.seeds, "machine": machine, "settings": settings}
    header, files = f"`{command}`: seeds {seeds}; {cores}.", {"readme": readme, "picture": picture}
    paths, table = write_comparison(out, compared, list(comparison.methods), header, record=record, **files)
    say("\n" + table)
    if what := _what_failed(tasks):
        raise UserError(f"{what} failed: {paths['md']} says which and why; --resume tries them again")
    return {**paths, "skipped": [task.name for task in tasks if task.problem]}


def _what_failed(tasks: Sequence[Progress]) -> str:
    """`2 runs and talk`, and nothing where all went well."""
    failed = sum(bool(one.error) for task in tasks for one in _finished(task))
    # a task without runs is one without data, and no failure
    broken = [task.name for task in tasks if task.problem and _finished(task)]
    return " and ".join([*([f"{failed} runs"] if failed else []), *broken])


def _finished(task: Progress) -> tuple[FinishedRun, ...]:
    return tuple(task.finished[one.name] for one in task.runs if one.name in task.finished)


def _compared(task: Progress, chosen: str) -> ComparedTask:
    path = None if task.problem else metrics_file(task.folder / "report")
    metrics = json.loads(path.read_text(encoding="utf-8")) if path else None
    about = " ".join(part for part in (task.task.about, _what_best_means(task.runs[0]), chosen) if part)
    title, figures, searched = task.task.title, task.task.figures, bool(task.task.search)
    return ComparedTask(task.name, title, figures, about, _finished(task), metrics, task.problem, searched)


def _what_best_means(one: Run) -> str:
    if one.config.env:
        measured = f"the highest return in {one.config.env_episodes} conversations during training"
        return f"Best is the checkpoint of {measured}, with other users than the table's."
    cloned = "Best is the checkpoint of the lowest held-out loss for methods that clone"
    return f"{cloned}, and the last one for the others: a TD error ranks no policies."
