"""The stages of an experiment, as calls of the verbs prepare, train, online, candidates and evaluate.

What compares, sweeps or shows the circle calls them through here, and knows no other verb.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from envs import write_logs_of
from pipelines import candidates, evaluate, online, prepare, train
from rl_dialog.cluster.experiment import evaluate_all, train_all
from rl_dialog.config import changed, load_config
from rl_dialog.data.shards import MANIFEST
from rl_dialog.evaluation import experiment
from rl_dialog.evaluation.comparison import BASELINE
from rl_dialog.evaluation.experiment import (
    Progress,
    Run,
    Say,
    Task,
    claim,
    logged_folder,
    make_data_of_candidates,
    timed,
)

CORPORA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[1] / "../shared/data"))
CONFIGS = Path(__file__).parents[1] / "tune_configs"
train_run = train.main
train_here = partial(experiment.train_run, train_worker=train.train_worker)


@dataclass(frozen=True)
class Learning:
    """A verb that the trials of a sweep are runs of."""

    config_of: Callable[..., Any]
    check_settings: Callable[[Any], None]
    check: Callable[[Any], None]
    learn: Callable[..., dict[str, Any]]


def _trained(
    data: Path, out: Path, seed: int, flags: Sequence[str], start: Path | None = None
) -> train.TrainConfig:
    words = [*flags, *(_words(model_name_or_path=start) if start else [])]
    return train.from_anywhere(train_config(data, out, seed, words))


def _played(
    data: Path, out: Path, seed: int, flags: Sequence[str], start: Path | None = None
) -> online.OnlineConfig:
    """It learns from what it plays, and from `data` where the flags say so."""
    where = _words(model_name_or_path=start) if start else []
    words = [*flags, *_words(output_dir=out, seed=str(seed)), *where]
    return online.from_anywhere(load_config(online.OnlineConfig, words, choices=online.CHOICES))


LEARNING = {
    "train": Learning(_trained, train.check_settings, train.check, train.train_worker),
    "online": Learning(_played, online.check_trial, online.check, online.learn_worker),
}


def prepare_logs(logs: str, out: Path, *flags: str) -> dict[str, Any]:
    """A data directory of logs."""
    words = [*_words(logs=logs, output_dir=out), *flags, "--quiet"]
    return prepare.main(load_config(prepare.PrepareConfig, words))


def train_config(data: Path, out: Path, seed: int, flags: Sequence[str]) -> train.TrainConfig:
    """How a run is trained; the flags as one would type them."""
    words = [*flags, *_words(data=data, output_dir=out, seed=str(seed))]
    return load_config(train.TrainConfig, words, choices=train.CHOICES)


def train_config_of_file(
    file: Path, data: Path, out: Path, seed: int, *, start: Path | None = None, steps: int = 0
) -> train.TrainConfig:
    """The same by a YAML file, quietly on one core, from the run `start`; `steps`: other updates than the
    file's."""
    words = ["--config", str(file), "--cpus_per_worker", "1", "--quiet"]
    words += ["--model_name_or_path", str(start)] if start else []
    return train_config(data, out, seed, [*words, *(["--max_steps", str(steps)] if steps else [])])


def evaluate_runs(runs: Sequence[Path], data: Path, out: Path, *flags: str) -> dict[str, Any]:
    """The report of runs."""
    words = [*_words(checkpoints=runs, data=data, output_dir=out), *flags]
    return evaluate.main(load_config(evaluate.EvaluateConfig, words))


def found(logs: str) -> Path:
    """Where a task's logs are: from the folder where the command starts, else among the public corpora."""
    return (Path(logs) if Path(logs).exists() else CORPORA / logs).resolve()


def written_logs(folder: Path) -> Path:
    """Where the logs go that a world writes for a task."""
    return folder / "logs" / "dialogs.jsonl"


def prepare_config(task: Task, folder: Path) -> prepare.PrepareConfig:
    logs = [found(path) for path in task.logs] or [written_logs(folder)]
    where = _words(logs=logs, output_dir=logged_folder(task, folder))
    return load_config(prepare.PrepareConfig, [*where, *shlex.split(task.prepare), "--quiet"])


def candidates_config(task: Task, folder: Path, policy: Path) -> candidates.CandidatesConfig:
    where = _words(data=folder / "logged", checkpoint=policy, output_dir=folder / "data")
    return load_config(candidates.CandidatesConfig, [*shlex.split(task.candidates), *where, "--quiet"])


def evaluate_config(task: Task, folder: Path, runs: Sequence[str]) -> evaluate.EvaluateConfig:
    where = _words(checkpoints=runs, data=logged_folder(task, folder), output_dir=folder / "report")
    return load_config(evaluate.EvaluateConfig, [*shlex.split(task.evaluate), *where, "--quiet"])


def _words(**places: str | Path | Sequence[str | Path]) -> list[str]:
    """What a verb reads and writes, as one would type it."""
    listed = {name: [place] if isinstance(place, str | Path) else place for name, place in places.items()}
    return [word for name, each in listed.items() for word in (f"--{name}", *map(str, each))]


def prepare_task(task: Progress, say: Say) -> None:
    """The data directory of the logs."""
    missing = [path for path in task.task.logs if not found(path).exists()]
    if missing:
        task.problem = f"no {missing[0]} where the command starts, nor below RL_DIALOG_DATA (public corpora)"
        say(f"{task.name}: skipped, neither {Path(missing[0]).resolve()} nor {found(missing[0])} is there")
        return
    config = prepare_config(task.task, task.folder)

    def make() -> None:
        if task.task.write_logs:
            write_logs_of(task.task.write_logs, written_logs(task.folder))
        prepare.main(config)

    recipe = {"settings": changed(config), "write_logs": task.task.write_logs}
    if not claim(task.logged, MANIFEST, recipe):
        timed(task, make, "prepared", say)


def make_candidates(task: Progress, say: Say) -> None:
    """Scored replies of the first seed's bc: the data of all other methods."""
    config_of = partial(candidates_config, task.task, task.folder)
    make_data_of_candidates(task, config_of, candidates.main, say)


def train_tasks(tasks: Sequence[Progress], chosen: Callable[[Run], bool], say: Say) -> None:
    """The chosen runs of all tasks."""
    train_all(tasks, chosen, train.train_worker, say)


def evaluate_tasks(tasks: Sequence[Progress], say: Say, *, required: str = BASELINE) -> None:
    """A report for each task."""

    def config_of(task: Progress) -> evaluate.EvaluateConfig:
        config = evaluate_config(task.task, task.folder, [str(run.folder) for run in task.done()])
        return replace(config, output_dir=str(task.report or task.folder / "report"))

    evaluate_all(tasks, config_of, evaluate.main, say, required=required)
