"""Which method, which KL weight, which reward mix is best for these logs: many runs, their evaluation, and a report.

    python -m pipelines.tune --sweep tune_configs/sweep_kl.yaml --out runs/sweep_kl

    logs -> prepare (again for every reward mix of the space) -> bc for every seed -> trials -> evaluate -> report

A trial is a point of the search space with a seed: the same training that `train` does, in OUT/trials/<point>-seed<k>. A killed sweep goes on with
--resume: trials that are done are not run again, the others continue from their latest checkpoint.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from pipelines import train
from pipelines.compare import Progress, Run, Task, claim, evaluate_tasks, prepare_task, recipe_of, train_runs
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.train import WorkerGroup, fit
from rl_dialog.cluster.tune import Halving, Report, Resources, is_first_worker, report_from_worker, run_trials, tune_callbacks
from rl_dialog.config import ConfigError, from_dict, load_config, run, save_config
from rl_dialog.evaluation.comparison import BASELINE, FinishedRun
from rl_dialog.evaluation.sweep import Trial, write_sweep_report
from rl_dialog.models.checkpoint import write_text_atomically

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, float, float], float]] = {
    "uniform": lambda rng, low, high: float(rng.uniform(low, high)),
    "loguniform": lambda rng, low, high: float(np.exp(rng.uniform(np.log(low), np.log(high)))),
    "randint": lambda rng, low, high: int(rng.integers(low, high + 1)),
}
PREPARE = "prepare."  # what parameters of prepare begin with
REPORTS, STOPPED, ERROR = "reports.jsonl", "stopped.txt", "error.txt"


@dataclass(frozen=True)
class TuneConfig:
    """Which sweep, where, and how much of it."""

    sweep: str = ""
    """a YAML file like tune_configs/sweep_kl.yaml"""
    out: str = ""
    """folder for everything; with several nodes, storage that all of them see"""
    seeds: tuple[int, ...] = ()
    """other seeds than those of the file"""
    samples: int = 0
    """other than in the file: draws from the space's distributions"""
    minutes: float = 0.0
    """time for the trials; what is not done then is left, and said; 0 is no limit"""
    trials: int = 0
    """at most so many trials, the first ones; 0 is no limit"""
    num_workers: int = 1
    """training processes of a trial"""
    cpus_per_worker: float = 1.0
    """CPU cores of each"""
    use_gpu: bool = False
    """one GPU per worker"""
    retries: int = 2
    """how often a trial that fails starts again, from its latest checkpoint"""
    resume: bool = False
    """go on with the sweep in out"""
    overwrite: bool = False
    """delete the sweep in out and start anew"""
    address: str = ""
    """Ray cluster to join; empty starts one here (or joins RAY_ADDRESS)"""
    quiet: bool = False
    """print only the final JSON line"""


@dataclass(frozen=True)
class Sweep:
    """The YAML file. Strings of flags are what one would type after the verb."""

    title: str
    about: str
    space: object  # flag of train (or prepare.FLAG) -> list of values or {uniform|loguniform|randint: [low, high]}; or a list of such, their union
    train: str = ""  # flags of every trial
    start: str = ""  # flags of the bc that every trial of a seed starts from; without them trials start as `train` says
    logs: tuple[str, ...] = ()  # below $RL_DIALOG_DATA, or absolute
    write_logs: dict[str, int] = field(default_factory=dict)  # instead: dialogs and seed of small-talk logs
    prepare: str = ""
    evaluate: str = ""  # flags of the evaluation of all trials that reach their end
    metric: str = "eval/return"  # of training's own evaluations: what trials are stopped and ranked by where there is no evaluation
    figure: str = "return"  # of the evaluation: what the report ranks by
    mode: Literal["max", "min"] = "max"
    seeds: tuple[int, ...] = (0,)
    samples: int = 1
    halving: dict[str, int] = field(default_factory=dict)  # {grace: steps, factor: 3}; without it every trial reaches its end


@dataclass(frozen=True)
class Point:
    """Values of the space's parameters, and what a trial folder is called after them."""

    name: str
    values: dict[str, Any]


def main(config: TuneConfig) -> dict[str, Any]:
    """Runs the sweep and writes its report; returns the winner and the paths. Raises ValueError for what the user can fix."""
    began = time.perf_counter()
    sweep = read_sweep(config)
    out = Path(config.out).absolute()
    say: Callable[[str], None] = (lambda text: None) if config.quiet else lambda text: print(text, flush=True)
    points = find_points(sweep)
    task = _task(sweep)
    progress = Progress("sweep", task, out, starts(sweep, task, out))
    planned = [(point, one) for point in points for one in plan_trials(sweep, point, out)][: config.trials or None]
    for _, one in planned:
        if sweep.metric == "eval/return" and not one.config.env:
            raise ConfigError(f"{config.sweep}: the metric eval/return is measured in an environment: expected --env in train, or another metric")
    if not config.quiet:
        print(f"{len(points)} points x {len(sweep.seeds)} seeds = {len(planned)} trials in {out}")
    _claim_folder(config, out)
    with connect(config.address or None):
        resources = Resources(config.num_workers, config.cpus_per_worker, config.use_gpu)
        at_once = resources.trials_at_once()  # said now, and not after an hour of preparation
        mixes = {data_folder(point, out): point for point in points}
        for folder, point in {out: Point("", {}), **mixes}.items():
            preparing = progress if folder == out else Progress(folder.name, replace(task, prepare=_prepare_flags(sweep, point)), folder, [])
            prepare_task(preparing, say)
            if preparing.problem:
                raise ValueError(f"prepare {' '.join(shlex.split(preparing.task.prepare))}: {preparing.problem}")
        if sweep.start:
            train_runs([progress], lambda one: True, say)
            if failed := next((done for done in progress.finished.values() if done.error), None):
                raise ValueError(f"{BASELINE} of seed {failed.seed}, which trials start from, failed: {failed.error}")
        say(f"trials, {at_once} at a time")
        found = run_sweep(config, sweep, planned, progress, out, say)
        ended = [trial for trial in found if trial.how == "ended"]
        if ended and sweep.evaluate:
            done = [one for _, one in planned if _is_done(one)]
            evaluated = Progress("sweep", task, out, done, {one.name: FinishedRun(one.method, one.seed) for one in done})
            evaluate_tasks([evaluated], say, required="")
            if evaluated.problem:
                raise ValueError(evaluated.problem)
    report = write_sweep_report(out, sweep, found, seconds=time.perf_counter() - began, command=_command(config))
    say(f"wrote {report['html']}")
    return report


def read_sweep(config: TuneConfig) -> Sweep:
    """The YAML file with what the flags change. Raises ConfigError for what is not in it."""
    for name, what in (("sweep", "a file like tune_configs/sweep_kl.yaml"), ("out", "a folder for everything")):
        if not getattr(config, name):
            raise ValueError(f"expected --{name}: {what}")
    try:
        values = yaml.safe_load(Path(config.sweep).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{config.sweep}: expected YAML, got: {error}") from error
    if not isinstance(values, dict) or not values.get("space"):
        raise ConfigError(f"{config.sweep}: expected a space: flags of train with the values to try, got none")
    sweep = from_dict(Sweep, values, where=config.sweep)
    if sweep.halving:
        Halving(**_known(sweep.halving, {"grace", "factor"}, f"{config.sweep}: halving"))
    return replace(sweep, seeds=config.seeds or sweep.seeds, samples=config.samples or sweep.samples)


def _known(values: Mapping[str, Any], names: set[str], where: str) -> Mapping[str, Any]:
    if unknown := set(values) - names:
        raise ConfigError(f"{where}: expected {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
    return values


def _task(sweep: Sweep) -> Task:
    """What compare.py needs to know to prepare, to train the starts, and to evaluate."""
    logs = {"logs": sweep.logs, "write_logs": sweep.write_logs, "prepare": sweep.prepare}
    return Task(sweep.title, sweep.about, (sweep.figure,), evaluate=sweep.evaluate, bc=sweep.start, improve=sweep.train, **logs)


def _claim_folder(config: TuneConfig, out: Path) -> None:
    """A sweep that stands there is continued or replaced only when asked; what is no sweep is left alone."""
    ours = out / "tune.yaml"
    if out.exists() and any(out.iterdir()):
        if not ours.is_file():
            raise ValueError(f"{out} exists and holds no sweep: choose another --out")
        if not (config.resume or config.overwrite):
            raise ValueError(f"{out} already holds a sweep: pass --resume to go on with it or --overwrite to delete it")
        if config.overwrite:
            shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(ours, Path(config.sweep).read_text(encoding="utf-8"))


def _command(config: TuneConfig) -> str:
    """What was typed, as far as the result depends on it."""
    parts = ["python -m pipelines.tune --sweep", config.sweep, "--out", config.out]
    parts += ["--seeds", *map(str, config.seeds)] if config.seeds else []
    for name in ("samples", "minutes", "trials"):
        parts += [f"--{name}", f"{getattr(config, name):g}"] if getattr(config, name) else []
    return " ".join(parts)


def find_points(sweep: Sweep) -> list[Point]:
    """Every combination of the listed values, each `samples` times where a distribution takes part. Raises ConfigError for an empty space."""
    spaces = sweep.space if isinstance(sweep.space, list) else [sweep.space]
    rng, found = np.random.default_rng(0), {}
    for space in spaces:
        if not isinstance(space, Mapping) or not space:
            raise ConfigError(f"space: expected a mapping of flags to values, or a list of such mappings, got {space!r}")
        drawn = {name: entry for name, entry in space.items() if isinstance(entry, Mapping)}
        listed = {name: entry for name, entry in space.items() if name not in drawn}
        for name, entry in listed.items():
            if not isinstance(entry, list) or not entry:
                raise ConfigError(f"space: {name}: expected a list of values or one of {', '.join(DISTRIBUTIONS)}, got {entry!r}")
        for combination in itertools.product(*listed.values()):
            for _ in range(sweep.samples if drawn else 1):
                values = dict(zip(listed, combination, strict=True)) | {name: _draw(name, entry, rng) for name, entry in drawn.items()}
                name = point_name({key: values[key] for key in space})
                found[name] = Point(name, {key: values[key] for key in space})
    return list(found.values())


def _draw(name: str, entry: Mapping[str, Any], rng: np.random.Generator) -> float:
    kind = next(iter(entry))
    limits = entry[kind]
    if len(entry) != 1 or kind not in DISTRIBUTIONS or not isinstance(limits, list) or len(limits) != 2 or not limits[0] < limits[1]:
        raise ConfigError(f"space: {name}: expected a list of values or one of {', '.join(DISTRIBUTIONS)} with [low, high], got {dict(entry)!r}")
    return DISTRIBUTIONS[kind](rng, *map(float, limits))


def point_name(values: Mapping[str, Any]) -> str:
    """`psi,c=0.2` of {method: psi, method.c: 0.2}."""
    parts = [shown(value) if name == "method" else f"{name.rpartition('.')[2]}={shown(value)}" for name, value in values.items()]
    return ",".join(parts).replace("/", "_")


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def data_folder(point: Point, out: Path) -> Path:
    """Where the data of a point's reward mix is made: `out` itself for points that say nothing about prepare."""
    mix = {name: value for name, value in point.values.items() if name.startswith(PREPARE)}
    return out / "mixes" / point_name(mix) if mix else out


def _prepare_flags(sweep: Sweep, point: Point) -> str:
    mix = {name.removeprefix(PREPARE): value for name, value in point.values.items() if name.startswith(PREPARE)}
    return " ".join([sweep.prepare, *(f"--{name} {shown(value)}" for name, value in mix.items())])


def plan_trials(sweep: Sweep, point: Point, out: Path) -> Iterator[Run]:
    """The runs of a point, one per seed. All flags are read here, so that a misspelt one is found before anything starts."""
    values = [part for name, value in point.values.items() if not name.startswith(PREPARE) for part in (f"--{name}", shown(value))]
    for seed in sweep.seeds:
        start = ["--model.model_name_or_path", str(out / f"{BASELINE}-seed{seed}")] if sweep.start else []
        flags = [*shlex.split(sweep.train), *values, *start]
        yield _run(point.name, seed, flags, data_folder(point, out) / "data", out / "trials" / f"{point.name}-seed{seed}")


def starts(sweep: Sweep, task: Task, out: Path) -> list[Run]:
    """bc of every seed, which the trials of that seed start from."""
    return [_run(BASELINE, seed, shlex.split(task.bc), out / "data", out / f"{BASELINE}-seed{seed}") for seed in (sweep.seeds if sweep.start else ())]


def _run(method: str, seed: int, flags: Sequence[str], data: Path, folder: Path) -> Run:
    where = ["--data", str(data), "--output_dir", str(folder), "--seed", str(seed), "--report_to", "none"]
    return Run(method, seed, load_config(train.TrainConfig, [*flags, *where], choices=train.CHOICES))


def run_sweep(
    config: TuneConfig, sweep: Sweep, planned: Sequence[tuple[Point, Run]], progress: Progress, out: Path, say: Callable[[str], None]
) -> list[Trial]:
    """Runs what is not done, and says how every trial ended."""
    for _, one in planned:
        start = next((first for first in progress.runs if first.seed == one.seed), None)
        claim(one.folder, "result.json", recipe_of(one, start))
        (one.folder / ERROR).unlink(missing_ok=True)
    left = [(point, one) for point, one in planned if sweep.halving or not _is_done(one)]
    if done := len(planned) - sum(not _is_done(one) for _, one in planned):
        say(f"{done} trials are done already")
    settled = 0

    def ended(position: int, how: str, seconds: float) -> None:
        nonlocal settled
        settled += 1
        one = left[position][1]
        if how == "stopped" and not _is_done(one):
            write_text_atomically(one.folder / STOPPED, f"{_reports(one)[-1]['step']}\n")
        error = f": {_error(one)}" if how == "failed" else ""
        say(f"[{settled}/{len(left)}] {one.folder.name}: {how} after {seconds:.0f} s{error}")

    if left:
        shutil.rmtree(out / "tune", ignore_errors=True)  # what Tune knew of an earlier start; what counts is in the trials' folders
        group = WorkerGroup(config.num_workers, config.cpus_per_worker, config.use_gpu, 0)
        run_trials(
            partial(run_trial, group=group),
            [one for _, one in left],
            metric=sweep.metric,
            mode=sweep.mode,
            resources=Resources(config.num_workers, config.cpus_per_worker, config.use_gpu),
            folder=out / "tune",
            halving=Halving(**sweep.halving) if sweep.halving else None,
            seconds=60 * config.minutes,
            retries=config.retries,
            ended=ended,
        )
    return [_trial(point, one) for point, one in planned]


def run_trial(one: Run, report: Report, *, group: WorkerGroup) -> None:
    """One trial from where it is to its end; what it reported before is reported again first, so that halving knows it."""
    folder = one.folder
    folder.mkdir(parents=True, exist_ok=True)
    for metrics in _reports(one):
        report(metrics)
    if _is_done(one) or (folder / STOPPED).is_file():
        return
    save_config(one.config, folder / "train.yaml", choices=train.CHOICES)

    def tell(metrics: dict[str, float]) -> None:
        _note(folder, metrics)
        report(metrics)

    try:
        if group.num_workers == 1 and not group.use_gpu:
            train.train_worker(one.config, report=tell)
        else:
            fit(partial(train.train_worker, report=partial(_tell_tune, folder)), one.config, group, folder, callbacks=tune_callbacks())
    except Exception:
        (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        raise


def _tell_tune(folder: Path, metrics: dict[str, float]) -> None:
    """On every worker of a trial that has several."""
    if is_first_worker():
        _note(folder, metrics)
    report_from_worker(metrics)


def _note(folder: Path, metrics: dict[str, float]) -> None:
    with open(folder / REPORTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics | {"time": round(time.time(), 2)}) + "\n")


def _is_done(one: Run) -> bool:
    return (one.folder / "result.json").is_file()


def _reports(one: Run) -> list[dict[str, float]]:
    """What the trial has reported so far. A line that a kill cut off is left out."""
    path, found = one.folder / REPORTS, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _error(one: Run) -> str:
    path = one.folder / ERROR
    return path.read_text(encoding="utf-8").strip().splitlines()[-1][:300] if path.is_file() else "its process died"


def _trial(point: Point, one: Run) -> Trial:
    how = "ended" if _is_done(one) else "stopped" if (one.folder / STOPPED).is_file() else "failed" if (one.folder / ERROR).is_file() else "left"
    reports = _reports(one)
    return Trial(point.name, point.values, one.seed, str(one.folder), how, reports, _error(one) if how == "failed" else "")


if __name__ == "__main__":
    run(TuneConfig, main)
