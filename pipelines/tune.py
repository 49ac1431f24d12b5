"""Which method, which KL weight, which reward mix is best for these logs: many runs, their evaluation, and a
report.

    python -m pipelines.tune --sweep tune_configs/sweep_kl.yaml --output_dir runs/sweep_kl

    logs -> prepare (again for every reward mix of the space) -> bc for every seed
         -> trials -> evaluate -> report

A trial is a point of the search space with a seed: the same training that `train` does, in
OUT/trials/<point>-seed<k>. A killed sweep goes on with --resume: trials that are done are not run again, the
others continue from their latest checkpoint.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipelines import stages
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.train import wants_gpus
from rl_dialog.cluster.trials import run_all, trial_of
from rl_dialog.cluster.tune import Resources
from rl_dialog.data.files import write_text_atomically
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE, FinishedRun
from rl_dialog.evaluation.experiment import ERROR, RESULT, Progress, Run, Say, Task, claim, metrics_file
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.sweep import Trial, frontier_as_svg, write_sweep_report
from rl_dialog.evaluation.sweep_measured import check_figure, check_metric
from rl_dialog.evaluation.sweep_space import (
    COPY,
    OptunaSearch,
    Point,
    Sweep,
    check_same_sweep,
    find_points,
    read_sweep,
)
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, claim_output, require, run


@dataclass(frozen=True)
class TuneConfig(ResumableOutput, OnCluster, OnDevice):
    """Which sweep, where, and how much of it."""

    sweep: str = ""
    """a YAML file like tune_configs/sweep_kl.yaml"""
    seeds: tuple[int, ...] = ()
    """other seeds than those of the file"""
    samples: int = 0
    """another number of draws from the space's distributions than the file's; 0 takes that"""
    minutes: float = 0.0
    """time for the trials; what is not done then is left, and said; 0 is no limit"""
    trials: int = 0
    """at most so many trials, the first ones; 0 is no limit"""
    num_workers: int = 1
    """training processes of a trial"""
    cpus_per_worker: float = 1.0
    """CPU cores of each training process"""
    max_failures: int = 2
    """how often a trial that fails starts again, from its latest checkpoint"""
    picture: str = ""
    """also draw reward against KL into this SVG file"""


def main(config: TuneConfig) -> dict[str, Any]:
    """Runs the sweep and writes its report; returns the winner and the paths.

    Raises UserError for what the user can fix.
    """
    began = time.perf_counter()
    require(config, sweep="a file like tune_configs/sweep_kl.yaml", output_dir="a folder for everything")
    sweep = _with_workers(read_sweep(config.sweep, seeds=config.seeds, samples=config.samples), config)
    search = OptunaSearch(sweep) if sweep.search == "optuna" else None
    # those of Optuna come later; these show whether the flags exist
    points = find_points(replace(sweep, samples=1) if search else sweep)
    out = Path(config.output_dir).absolute()
    say: Say = (lambda text: None) if config.quiet else partial(print, flush=True)
    _check_flags(config, sweep, points, out)
    _claim(config, out)
    with connect(config.address or None):
        at_once = resources_of(config).trials_at_once()  # said now, and not after an hour
        if search is None:
            trained = list({point.trained.name: point.trained for point in points}.values())
            trained_runs = f"{len(trained)} x {len(sweep.seeds)} seeds to train"
            say(f"{len(points)} points, {trained_runs}, {at_once} at a time, in {out}")
            trials = train_points(config, sweep, trained, out, say)
        else:
            chosen = f"{sweep.batch} points chosen at a time, {at_once} trials at a time"
            say(f"{sweep.samples} points x {len(sweep.seeds)} seeds, {chosen}, in {out}")
            points, trials = _search(config, sweep, search, out, say)
        if sweep.evaluate:
            trials = evaluate_points(sweep, points, trials, out, say)
    seconds = time.perf_counter() - began
    report = write_sweep_report(out, sweep, trials, seconds=seconds, command=_command(config))
    say(f"wrote {report['html']}")
    if config.picture:
        write_text_atomically(Path(config.picture), frontier_as_svg(sweep, trials))
    return report


def _with_workers(sweep: Sweep, config: TuneConfig) -> Sweep:
    """Its flags of train, with those of this command."""
    devices = [] if config.device == "auto" else ["--device", config.device]
    workers = [f"--num_workers {config.num_workers}"] if config.num_workers > 1 else []
    start = " ".join([sweep.start, *devices]) if sweep.start else ""
    return replace(sweep, train=" ".join([sweep.train, *workers, *devices]), start=start)


def resources_of(config: TuneConfig) -> Resources:
    """What a trial takes of the cluster."""
    return Resources(
        config.num_workers, config.cpus_per_worker, wants_gpus(config.device, config.num_workers)
    )


def _check_flags(config: TuneConfig, sweep: Sweep, points: Sequence[Point], out: Path) -> None:
    """Before anything starts, so that a misspelt one costs no time."""
    runs: list[Any] = []
    held_out = True
    for point in points:
        held_out &= stages.prepare_config(_task(sweep, point), out).validation > 0
        evaluation = stages.evaluate_config(_task(sweep, point), out, ["RUN"])
        if sweep.evaluate:
            check_figure(sweep.figure, evaluation, where=config.sweep)
        for one in (*starts(sweep, point, out), *plan_trials(sweep, point.trained, out)):
            stages.check_env(one.config.env)
            runs += [one.config] if one.folder.parent.name == "trials" else []
    check_metric(sweep, runs, held_out=held_out, where=config.sweep)


def _task(sweep: Sweep, point: Point) -> Task:
    """What the stages need to know to prepare, to train the starts, and to evaluate."""
    flags = {
        verb: " ".join([getattr(sweep, verb), *point.of(verb).flags])
        for verb in ("prepare", "start", "evaluate")
    }
    logs = {"logs": sweep.logs, "write_logs": sweep.write_logs, "prepare": flags["prepare"]}
    verbs = {"bc": flags["start"], "improve": sweep.train, "evaluate": flags["evaluate"]}
    return Task(sweep.title, sweep.about, (sweep.figure,), **verbs, **logs)


def _claim(config: TuneConfig, out: Path) -> None:
    """The folder, with a copy of the sweep; each trial in it has a recipe of its own."""
    if config.resume:
        check_same_sweep(out, config.sweep)
    text = Path(config.sweep).read_text(encoding="utf-8")
    claim_output(config, "tune", free=[field.name for field in fields(config)])
    write_text_atomically(out / COPY, text)


def _command(config: TuneConfig) -> str:
    """What was typed, as far as the result depends on it."""
    parts = ["python -m pipelines.tune --sweep", config.sweep, "--output_dir", config.output_dir]
    parts += ["--seeds", *map(str, config.seeds)] if config.seeds else []
    default = TuneConfig()
    for name in ("samples", "minutes", "trials", "num_workers", "cpus_per_worker"):
        if getattr(config, name) != getattr(default, name):
            parts += [f"--{name}", f"{getattr(config, name):g}"]
    parts += [] if config.device == default.device else ["--device", config.device]
    return " ".join(parts)


def starts(sweep: Sweep, point: Point, out: Path) -> list[Run]:
    """bc of every seed, which the point's trials of that seed start from."""
    own = point.of("start")
    name = ",".join([BASELINE, own.name]) if own.values else BASELINE
    flags = [*shlex.split(sweep.start), *own.flags]
    seeds = sweep.seeds if sweep.start else ()
    return [_run(BASELINE, seed, flags, out / "data", out / f"{name}-seed{seed}") for seed in seeds]


def plan_trials(sweep: Sweep, point: Point, out: Path) -> Iterator[Run]:
    """The runs of a point, one per seed."""
    first = {one.seed: ["--model_name_or_path", str(one.folder)] for one in starts(sweep, point, out)}
    for seed in sweep.seeds:
        flags = [*shlex.split(sweep.train), *point.of("train").flags, *first.get(seed, ())]
        data, folder = point.data_folder(out) / "data", out / "trials" / f"{point.name}-seed{seed}"
        yield _run(point.name, seed, flags, data, folder)


def _run(method: str, seed: int, flags: Sequence[str], data: Path, folder: Path) -> Run:
    config = stages.train_config(data, folder, seed, ["--report_to", "none", *flags])
    return Run(method, seed, stages.absolute(config))


def _search(
    config: TuneConfig, sweep: Sweep, search: OptunaSearch, out: Path, say: Say
) -> tuple[list[Point], list[Trial]]:
    """Points as the search asks for them, and their trials."""
    points: list[Point] = []
    trials: list[Trial] = []
    deadline = time.monotonic() + 60 * config.minutes
    for asked, tell in search.batches():
        # it may choose one twice
        new = list({point.name: point for point in asked if point not in points}.values())
        trials += train_points(_what_is_left(config, deadline, trials), sweep, new, out, say)
        points += new
        tell([_reached(sweep, [trial for trial in trials if trial.point == point.name]) for point in asked])
        if any(trial.how == "left" for trial in trials) or len(trials) == config.trials > 0:
            break
    return points, trials


def _what_is_left(config: TuneConfig, deadline: float, trials: Sequence[Trial]) -> TuneConfig:
    """Of the time and the trials."""
    minutes = max((deadline - time.monotonic()) / 60, 1e-9) if config.minutes else 0.0
    return replace(config, minutes=minutes, trials=config.trials and config.trials - len(trials))


def _reached(sweep: Sweep, trials: Sequence[Trial]) -> float | None:
    """What a search is told of a point: its last metric, the mean over seeds; None where all failed."""
    last = [
        trial.reports[-1][sweep.metric]
        for trial in trials
        if trial.reports and trial.how in ("ended", "stopped")
    ]
    return sum(last) / len(last) if last else None


def train_points(
    config: TuneConfig, sweep: Sweep, points: Sequence[Point], out: Path, say: Say
) -> list[Trial]:
    """All seeds of all points; with halving the first seed decides which points get the others, so that every
    ranked point has all of them."""
    if not sweep.halving or len(sweep.seeds) == 1:
        return run_points(config, sweep, points, out, say)
    deadline = time.monotonic() + 60 * config.minutes
    first = run_points(config, replace(sweep, seeds=sweep.seeds[:1]), points, out, say)
    names = {trial.point for trial in first if trial.how == "ended"}
    ended = [point for point in points if point.name in names]
    if not ended or (config.trials and config.trials <= len(first)):
        return first
    others = replace(sweep, halving={}, seeds=sweep.seeds[1:])
    return first + run_points(_what_is_left(config, deadline, first), others, ended, out, say)


def run_points(config: TuneConfig, sweep: Sweep, points: Sequence[Point], out: Path, say: Say) -> list[Trial]:
    """Makes the data and the starts that these points need, runs what is not done, and tells how every trial
    ended."""
    started = _make_starts(sweep, points, out, say)
    planned = [(point, one) for point in points for one in plan_trials(sweep, point, out)][
        : config.trials or None
    ]
    for _, one in planned:
        start = started.get(one.config.model.model_name_or_path)
        claim(one.folder, RESULT, one.recipe(start), keep=True)
        (one.folder / ERROR).unlink(missing_ok=True)
        stages.check_run(replace(one.config, device="cpu"))  # the GPUs of the cluster were counted
    left = [
        one for _, one in planned if sweep.halving or not one.is_done
    ]  # halving compares with those that are done
    if done := sum(one.is_done for _, one in planned):
        say(f"{done} trials are done already")
    if left:
        limits = {"seconds": 60 * config.minutes, "retries": config.max_failures}
        run_all(left, stages.train_worker, sweep, out, resources=resources_of(config), **limits, say=say)
    return [trial_of(point, one) for point, one in planned]


def _make_starts(sweep: Sweep, points: Sequence[Point], out: Path, say: Say) -> dict[str, Run]:
    """The data of all mixes, and the bc of every start, by its folder."""
    firsts = {str(one.folder): one for point in points for one in starts(sweep, point, out)}
    base = Progress("sweep", _task(sweep, Point({})), out, list(firsts.values()))
    folders = {point.data_folder(out): point for point in points}
    mixes = [
        Progress(folder.name, _task(sweep, point), folder, [])
        for folder, point in folders.items()
        if folder != out
    ]
    for preparing in (base, *mixes):
        stages.prepare_task(preparing, say)
        if preparing.problem:
            raise UserError(f"prepare {' '.join(shlex.split(preparing.task.prepare))}: {preparing.problem}")
    stages.train_tasks([base], lambda one: True, say)
    if failed := next((done for done in base.finished.values() if done.error), None):
        raise UserError(f"{BASELINE} of seed {failed.seed}, which trials start from, failed: {failed.error}")
    return firsts


def evaluate_points(
    sweep: Sweep, points: Sequence[Point], trials: Sequence[Trial], out: Path, say: Say
) -> list[Trial]:
    """A report for every kind of start and way to evaluate, with its bc; returns every point's trials with
    where they are told."""
    ways: dict[Path, tuple[Task, dict[str, Run]]] = {}
    told = []
    for point in points:
        start, folder = Point(point.of("start").values), point.report_folder(out)
        first = {one.name: one for one in starts(sweep, start, out) if one.is_done}
        _, runs = ways.setdefault(folder, (_task(sweep, point), first))
        mine = [trial for trial in trials if trial.point == point.trained.name]
        folders = {trial.folder for trial in mine}
        planned = plan_trials(sweep, point.trained, out)
        runs |= {one.name: one for one in planned if str(one.folder) in folders and one.is_done}
        own = {"point": point.name, "values": point.values, "chat": chat_flags(sweep, point, out)}
        told += [(replace(trial, **own), folder) for trial in mine]
    reports = [_finished(task, runs, out, folder) for folder, (task, runs) in ways.items() if runs]
    stages.evaluate_tasks(reports, say, required="")
    if failed := next((one for one in reports if one.problem), None):
        raise UserError(f"{failed.name}: {failed.problem}")
    errors = {
        (one.report, str(run.folder)): one.finished[run.name].error for one in reports for run in one.runs
    }
    return [
        replace(
            trial,
            metrics=str(metrics_file(folder) or ""),
            error=trial.error or errors.get((folder, trial.folder), ""),
        )
        for trial, folder in told
    ]


def _finished(task: Task, runs: dict[str, Run], out: Path, report: Path) -> Progress:
    finished = {name: FinishedRun(one.method, one.seed) for name, one in runs.items()}
    return Progress(report.name, task, out, list(runs.values()), finished, report=report)


def chat_flags(sweep: Sweep, point: Point, out: Path) -> str:
    """With which `chat` draws replies as the evaluation of a point did."""
    config = stages.evaluate_config(_task(sweep, point), out, ["RUN"])
    drawn, usual = asdict(Decoding.of(config)) | {"beta": config.beta}, asdict(Decoding()) | {"beta": None}
    return shlex.join(Point({name: value for name, value in drawn.items() if value != usual[name]}).flags)


if __name__ == "__main__":
    run(TuneConfig, main)
