"""The settings that a comparison's methods are trained with: as many draws for every method, on other seeds and users than the table's.

A task with `search` (flags of `evaluate`: other users) tries `samples` draws of the file's `space` for each method, through `pipelines.tune` in
OUT/<task>/search; a task with `settings_of` takes over what another one found, and one with neither takes the file's flags as they are.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipelines.tune_space import Point
from rl_dialog.config import ConfigError
from rl_dialog.data.files import write_text_atomically
from rl_dialog.evaluation.comparison import BASELINE

if TYPE_CHECKING:
    from pipelines.compare import CompareConfig, Comparison

Settings = dict[str, dict[str, dict[str, Any]]]  # task -> method -> flag of train -> value


def find_settings(comparison: Comparison, config: CompareConfig, out: Path) -> Settings:
    """Searches where a task says so; a search that is done is read. Raises ConfigError for a task that takes over what no search finds."""
    found: Settings = {}
    for name, task in comparison.tasks.items():
        if task.search:
            found[name] = _search(comparison, name, config, out)
    for name, task in comparison.tasks.items():
        if task.settings_of and task.settings_of not in found:
            raise ConfigError(f"tasks: {name}: settings_of: expected a task with a search, got {task.settings_of!r}")
        if task.settings_of:
            chosen = found[task.settings_of]
            found[name] = {method: {flag: v for flag, v in values.items() if flag.startswith("method.")} for method, values in chosen.items()}
    return found


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """As one would type them after `train`."""
    return Point(dict(values)).flags


def describe(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence for the notes below the table."""
    return "; ".join(f"`{method}` {', '.join(f'{flag} {value}' for flag, value in values.items())}" for method, values in settings.items() if values)


def _search(comparison: Comparison, name: str, config: CompareConfig, out: Path) -> dict[str, dict[str, Any]]:
    from pipelines import tune  # which imports compare

    sweep, task = out / name / "search.yaml", comparison.tasks[name]
    spaces = []
    for method, flags in comparison.methods.items():
        here = task.methods.get(method, "")
        if method != BASELINE and here is not None and (drawn := comparison.space.get(method)):
            spaces.append({"method": [method]} | {flag: [value] for flag, value in _pairs(f"{flags} {here}").items() if flag not in drawn} | drawn)
    if not spaces:
        raise ConfigError(f"tasks: {name}: search: expected a space for at least one of the methods, got none")
    values = {
        "title": f"Settings for {task.title}",
        "about": f"{comparison.samples} draws for each method.",
        "write_logs": task.write_logs,
        "logs": list(task.logs),
        "prepare": task.prepare,
        "start": f"{comparison.train} {task.bc}",
        "train": f"{comparison.train} {task.improve}",
        "evaluate": task.search,
        "figure": task.figures[0],
        "seeds": list(comparison.search_seeds),
        "samples": comparison.samples,
        "space": spaces,
    }
    sweep.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(sweep, yaml.safe_dump(values, sort_keys=False))
    where = {"sweep": str(sweep), "output_dir": str(out / name / "search"), "address": config.address, "quiet": config.quiet}
    points = json.loads(Path(tune.main(tune.TuneConfig(resume=True, **where))["sweep"]).read_text(encoding="utf-8"))["points"]
    best: dict[str, dict[str, Any]] = {}
    for point in points:  # the best ones come first
        best.setdefault(point["values"]["method"], {flag: value for flag, value in point["values"].items() if flag != "method"})
    return best


def _pairs(flags: str) -> dict[str, Any]:
    """`--method.samples 5` as {method.samples: "5"}. Raises ConfigError for a flag without one value."""
    words = shlex.split(flags)
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise ConfigError(f"methods: where settings are searched, expected flags with one value each, got {flags!r}")
    return {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
