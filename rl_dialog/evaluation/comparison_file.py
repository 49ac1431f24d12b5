"""The file of a comparison: tasks, methods and seeds, and the search for settings that the methods are
trained with.

A task with `search` (flags of `evaluate`: other users) tries `samples` draws of the file's `space` for each
method; a task with `settings_of` takes over what another one found, and one with neither takes the file's
flags as they are.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rl_dialog.config import ConfigError, check_flags, from_dict, read_yaml
from rl_dialog.data.files import write_text_atomically
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE
from rl_dialog.evaluation.experiment import Task
from rl_dialog.evaluation.runs import nearest
from rl_dialog.evaluation.sweep_space import check_logs, check_seeds
from rl_dialog.methods import FROM_LOGS

Chosen = dict[str, dict[str, Any]]  # method -> flag of train -> value
Settings = dict[str, Chosen]  # of each task


@dataclass(frozen=True)
class Comparison:
    """The YAML file."""

    methods: dict[str, str]  # in the order of the table's rows: flags that hold in every task
    tasks: dict[str, Task]
    seeds: tuple[int, ...] = (0, 1, 2)
    train: str = ""  # flags of every run
    # method -> flag of train -> {distribution: [low, high]} or a list of values
    space: dict[str, object] = field(default_factory=dict)
    samples: int = 6  # draws for each method
    search_seeds: tuple[int, ...] = (100,)


def read_comparison(
    path: str, *, tasks: Sequence[str] = (), methods: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Comparison:
    """The YAML file, cut down to these tasks and methods (and bc), with other seeds if given.

    Raises UserError for what is not in it.
    """
    try:
        values = read_yaml(path)
        entries = values["tasks"].items()
        values["tasks"] = {
            name: from_dict(Task, task, where=f"{path}: tasks: {name}") for name, task in entries
        }
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: expected YAML with methods and tasks, got {problem}") from error
    comparison = from_dict(Comparison, values, where=path)
    if BASELINE not in comparison.methods:
        reason = "every other method starts from it and is compared with it"
        raise ConfigError(f"{path}: expected {BASELINE} among the methods: {reason}")
    chosen_methods = _chosen(methods and (BASELINE, *methods), comparison.methods, "methods")
    for name in chosen_methods:
        if name not in FROM_LOGS:
            near = nearest(name, FROM_LOGS)
            known = ", ".join(FROM_LOGS)
            raise ConfigError(f"{path}: unknown method {name!r}: expected one of {known}.{near}")
    if unknown := next((name for name in comparison.space if name not in comparison.methods), None):
        near = nearest(unknown, comparison.methods)
        raise ConfigError(f"{path}: space: expected names of the file's methods, got {unknown!r}.{near}")
    if not comparison.tasks:
        raise ConfigError(f"{path}: tasks: expected at least one, got none")
    for name, task in comparison.tasks.items():
        _check_task(path, name, task, comparison)
    comparison = replace(
        comparison,
        methods=chosen_methods,
        tasks=_chosen(tasks, comparison.tasks, "tasks"),
        seeds=tuple(seeds) or comparison.seeds,
    )
    check_seeds(path, "seeds", comparison.seeds)
    check_seeds(path, "search_seeds", comparison.search_seeds)
    if comparison.samples < 1:
        raise ConfigError(f"{path}: samples: expected at least 1, got {comparison.samples}")
    for name, flags in {"train": comparison.train, **comparison.methods}.items():
        check_flags(flags, f"{path}: {name}")
    return comparison


def _check_task(path: str, name: str, task: Task, comparison: Comparison) -> None:
    """What can be known to fail before anything starts."""
    where = f"{path}: tasks: {name}"
    if name != Path(name).name or name == "..":
        raise ConfigError(f"{path}: tasks: expected names that can be folders, got {name!r}")
    if unknown := next((method for method in task.methods if method not in FROM_LOGS), None):
        raise ConfigError(f"{where}: methods: unknown method {unknown!r}.{nearest(unknown, FROM_LOGS)}")
    if lacking := next((method for method in task.methods if method not in comparison.methods), None):
        expected = f"expected methods of the file ({', '.join(comparison.methods)}), got {lacking!r}"
        raise ConfigError(f"{where}: methods: {expected}.{nearest(lacking, comparison.methods)}")
    if task.methods.get(BASELINE, "") is None:
        raise ConfigError(f"{where}: methods: expected {BASELINE} to stay: the other methods start from it")
    if not task.figures:
        raise ConfigError(f"{where}: figures: expected at least one, the table's headline, got none")
    origin = task.settings_of
    if origin and (origin not in comparison.tasks or not comparison.tasks[origin].search):
        raise ConfigError(f"{where}: settings_of: expected a task with a search, got {origin!r}")
    if task.search_train and not task.search:
        raise ConfigError(
            f"{where}: search_train: expected `search`, flags of `evaluate`, beside it, got none"
        )
    strings = [task.evaluate, task.bc, task.improve, task.prepare, task.candidates]
    strings += [task.search, task.search_train]
    for flags in (*strings, *task.methods.values()):
        check_flags(flags or "", where)
    check_logs(where, task.logs, task.write_logs)


def _chosen(names: Sequence[str], among: dict[str, Any], flag: str) -> dict[str, Any]:
    """The entries of these names in the order of the file; all of them without names."""
    for name in names:
        if name not in among:
            raise UserError(
                f"--{flag}: unknown name {name!r}: the file has {', '.join(among)}.{nearest(name, among)}"
            )
    return {name: value for name, value in among.items() if not names or name in names}


def write_search(comparison: Comparison, name: str, folder: Path) -> Path:
    """The file of the sweep that chooses the settings of a task, written into its folder."""
    path = folder / "search.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, yaml.safe_dump(_search_of(comparison, name), sort_keys=False))
    return path


def _search_of(comparison: Comparison, name: str) -> dict[str, Any]:
    """What stands in it.

    Raises ConfigError where no method has a space.
    """
    task, spaces = comparison.tasks[name], []
    for method, flags in comparison.methods.items():
        task_flags = task.methods.get(method, "")
        if method != BASELINE and task_flags is not None and (method_space := comparison.space.get(method)):
            fixed = {
                flag: [value]
                for flag, value in _pairs(f"{flags} {task_flags}").items()
                if flag not in method_space
            }
            spaces.append({"method": [method]} | fixed | method_space)
    if not spaces:
        raise ConfigError(
            f"tasks: {name}: search: expected a space for at least one of the methods, got none"
        )
    return {
        "title": f"Settings for {task.title}",
        "about": f"{comparison.samples} draws for each method.",
        "write_logs": task.write_logs,
        "logs": list(task.logs),
        "prepare": task.prepare,
        "start": f"{comparison.train} {task.bc}",
        "train": f"{comparison.train} {task.improve} {task.search_train}".rstrip(),
        "evaluate": task.search,
        "figure": task.figures[0],
        "seeds": list(comparison.search_seeds),
        "samples": comparison.samples,
        "space": spaces,
    }


def _pairs(flags: str) -> dict[str, Any]:
    """`--method.samples 5` as {method.samples: "5"}. Raises ConfigError for a flag without one value."""
    words = shlex.split(flags)
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise ConfigError(
            f"methods: where settings are searched, expected flags with one value each, got {flags!r}"
        )
    return {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}


def best_settings(sweep: Path) -> Chosen:
    """The best point of each method among those of a sweep's record, where the best ones come first."""
    best: Chosen = {}
    for point in json.loads(sweep.read_text(encoding="utf-8"))["points"]:
        values = dict(point["values"])
        best.setdefault(values.pop("method"), values)
    return best


def with_taken_over(comparison: Comparison, searched: Settings) -> Settings:
    """Also the settings of tasks that take over those of another one; a task's own flags of the model or the
    training stay its own."""
    settings = dict(searched)
    for name, task in comparison.tasks.items():
        if task.settings_of and task.settings_of not in searched:
            raise ConfigError(
                f"tasks: {name}: settings_of: expected a task with a search, got {task.settings_of!r}"
            )
        if task.settings_of:
            settings[name] = {
                method: {flag: value for flag, value in values.items() if flag.startswith("method.")}
                for method, values in searched[task.settings_of].items()
            }
    return settings


def how_chosen(comparison: Comparison, name: str, settings: Settings) -> str:
    """For the notes below the table: where the settings of a task come from; empty where nothing was
    searched."""
    if name not in settings:
        return ""
    chosen_settings = "; ".join(
        f"`{method}` {', '.join(f'{flag} {value}' for flag, value in values.items())}"
        for method, values in settings[name].items()
        if values
    )
    if origin := comparison.tasks[name].settings_of:
        title = comparison.tasks[origin].title
        return f"Settings are those chosen in {title}, none was chosen here: {chosen_settings}."
    draws, seeds = f"{comparison.samples} draws for each method", ", ".join(map(str, comparison.search_seeds))
    return f"Settings are the best of {draws}, with training seed {seeds} and other users: {chosen_settings}."
