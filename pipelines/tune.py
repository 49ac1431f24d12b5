"""Which method, which KL weight, which reward mix is best for these logs: many runs, their evaluation, and a report.

    python -m pipelines.tune --sweep tune_configs/sweep_kl.yaml --output_dir runs/sweep_kl

    logs -> prepare (again for every reward mix of the space) -> bc for every seed -> trials -> evaluate -> report

A trial is a point of the search space with a seed: the same training that `train` does, in OUT/trials/<point>-seed<k>. A killed sweep goes on with
--resume: trials that are done are not run again, the others continue from their latest checkpoint.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipelines import train
from pipelines.chat import ChatConfig
from pipelines.compare import (
    METRICS,
    METRICS_OF_SOME,
    Progress,
    Run,
    Task,
    claim,
    evaluate_config,
    evaluate_tasks,
    prepare_config,
    prepare_task,
    recipe_of,
    train_runs,
)
from pipelines.tune_space import OptunaSearch, Point, Sweep, find_points, read_sweep
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.train import WorkerGroup, fit, wants_gpus
from rl_dialog.cluster.tune import REPLAYED, Halving, Report, Resources, is_first_worker, report_from_worker, run_trials, tune_callbacks
from rl_dialog.config import ConfigError, load_config, read_yaml, save_config
from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.shards import load_manifest
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE, FinishedRun
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.sweep import Trial, frontier_as_svg, write_sweep_report
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, run

REPORTS, STOPPED, ERROR = "reports.jsonl", "stopped.txt", "error.txt"
Say = Callable[[str], None]


@dataclass(frozen=True)
class TuneConfig(ResumableOutput, OnCluster, OnDevice):
    """Which sweep, where, and how much of it."""

    sweep: str = ""
    """a YAML file like tune_configs/sweep_kl.yaml"""
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
    max_failures: int = 2
    """how often a trial that fails starts again, from its latest checkpoint"""
    picture: str = ""
    """also draw reward against KL into this SVG file"""


def main(config: TuneConfig) -> dict[str, Any]:
    """Runs the sweep and writes its report; returns the winner and the paths. Raises UserError for what the user can fix."""
    began = time.perf_counter()
    for name, what in (("sweep", "a file like tune_configs/sweep_kl.yaml"), ("out", "a folder for everything")):
        if not getattr(config, name):
            raise UserError(f"expected --{name}: {what}")
    sweep = read_sweep(config.sweep, seeds=config.seeds, samples=config.samples)
    devices = [] if config.device == "auto" else ["--device", config.device]
    workers = [f"--num_workers {config.num_workers}"] * (config.num_workers > 1)
    sweep = replace(sweep, train=" ".join([sweep.train, *workers, *devices]), start=sweep.start and " ".join([sweep.start, *devices]))
    search = OptunaSearch(sweep) if sweep.search == "optuna" else None
    points = find_points(replace(sweep, samples=1) if search else sweep)  # those of Optuna come later; these show whether the flags exist
    out = Path(config.output_dir).absolute()
    say: Say = (lambda text: None) if config.quiet else lambda text: print(text, flush=True)
    _check_flags(config, sweep, points, out)
    _claim_folder(config, out)
    with connect(config.address or None):
        at_once = resources_of(config).trials_at_once()  # said now, and not after an hour
        if search is None:
            trained = list({point.trained.name: point.trained for point in points}.values())
            say(f"{len(points)} points, {len(trained)} x {len(sweep.seeds)} seeds to train, {at_once} at a time, in {out}")
            trials = train_points(config, sweep, trained, out, say)
        else:
            say(f"{sweep.samples} points x {len(sweep.seeds)} seeds, {sweep.batch} points chosen at a time, {at_once} trials at a time, in {out}")
            points, trials, deadline = [], [], time.monotonic() + 60 * config.minutes
            for asked, tell in search.batches():
                new = list({point.name: point for point in asked if point not in points}.values())  # it may choose one twice
                left = replace(config, minutes=_minutes_left(config, deadline), trials=config.trials and config.trials - len(trials))
                trials += train_points(left, sweep, new, out, say)
                points += new
                tell([_reached(sweep, [trial for trial in trials if trial.point == point.name]) for point in asked])
                if any(trial.how == "left" for trial in trials) or len(trials) == config.trials > 0:
                    break
        if sweep.evaluate:
            trials = evaluate_points(sweep, points, trials, out, say)
    report = write_sweep_report(out, sweep, trials, seconds=time.perf_counter() - began, command=_command(config))
    say(f"wrote {report['html']}")
    if config.picture:
        write_text_atomically(Path(config.picture), frontier_as_svg(sweep, trials))
    return report


def resources_of(config: TuneConfig) -> Resources:
    """What a trial takes of the cluster."""
    return Resources(config.num_workers, config.cpus_per_worker, wants_gpus(config.device, config.num_workers))


def _check_flags(config: TuneConfig, sweep: Sweep, points: Sequence[Point], out: Path) -> None:
    """Before anything starts, so that a misspelt one costs no time."""
    for point in points:
        prepare_config(_task(sweep, point), out)
        evaluate_config(_task(sweep, point), out, ["RUN"])
        for one in (*starts(sweep, point, out), *plan_trials(sweep, point.trained, out)):
            train.check_env(one.config.env)
            if sweep.metric == "eval/return" and one.folder.parent.name == "trials" and not one.config.env:
                raise ConfigError(f"{config.sweep}: the metric eval/return is measured in an environment: expected --env in train, or another metric")


def _task(sweep: Sweep, point: Point) -> Task:
    """What compare.py needs to know to prepare, to train the starts, and to evaluate."""
    flags = {verb: " ".join([getattr(sweep, verb), *point.of(verb).flags]) for verb in ("prepare", "start", "evaluate")}
    logs = {"logs": sweep.logs, "write_logs": sweep.write_logs}
    about = (sweep.title, sweep.about, (sweep.figure,))
    return Task(*about, prepare=flags["prepare"], bc=flags["start"], improve=sweep.train, evaluate=flags["evaluate"], **logs)


def _minutes_left(config: TuneConfig, deadline: float) -> float:
    return max((deadline - time.monotonic()) / 60, 1e-9) if config.minutes else 0.0


def _reached(sweep: Sweep, trials: Sequence[Trial]) -> float | None:
    """What a search is told of a point: its last metric, the mean over seeds; None where all failed."""
    last = [trial.reports[-1][sweep.metric] for trial in trials if trial.reports and trial.how in ("ended", "stopped")]
    return sum(last) / len(last) if last else None


def _claim_folder(config: TuneConfig, out: Path) -> None:
    """A sweep that stands there is continued or replaced only when asked; what is no sweep is left alone."""
    ours = out / "tune.yaml"
    if out.exists() and any(out.iterdir()):
        if not ours.is_file():
            raise UserError(f"{out} exists and holds no sweep: choose another --output_dir")
        if not (config.resume or config.overwrite):
            raise UserError(f"{out} already holds a sweep: pass --resume to go on with it or --overwrite to delete it")
        if config.overwrite:
            shutil.rmtree(out)
        else:
            _check_same(config, out, read_yaml(str(ours)), read_yaml(config.sweep))
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(ours, Path(config.sweep).read_text(encoding="utf-8"))


def _check_same(config: TuneConfig, out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """What done trials follow from must not change under them: they would have to be deleted. The space may grow, and the evaluation change."""
    for name in ("logs", "write_logs", "prepare", "start", "train"):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{config.sweep}: {name} is {now.get(name)!r}, but {out} was made with {before.get(name)!r}: "
                "choose another --output_dir, or --overwrite"
            )
    recipe = next((out / "recipes").glob("*.json"), None)
    if recipe and json.dumps(str(out))[1:-1] not in recipe.read_text(encoding="utf-8"):
        raise UserError(f"{out} was moved since: {recipe} says where it was made. Move it back to go on with it")


def _command(config: TuneConfig) -> str:
    """What was typed, as far as the result depends on it."""
    parts = ["python -m pipelines.tune --sweep", config.sweep, "--output_dir", config.output_dir]
    parts += ["--seeds", *map(str, config.seeds)] if config.seeds else []
    default = TuneConfig()
    for name in ("samples", "minutes", "trials", "num_workers", "cpus_per_worker"):
        parts += [f"--{name}", f"{getattr(config, name):g}"] if getattr(config, name) != getattr(default, name) else []
    parts += [] if config.device == default.device else ["--device", config.device]
    return " ".join(parts)


def data_folder(point: Point, out: Path) -> Path:
    """Where the data of a point's reward mix is made: `out` itself for points that say nothing about prepare."""
    mix = point.of("prepare")
    return out / "mixes" / mix.name if mix.values else out


def starts(sweep: Sweep, point: Point, out: Path) -> list[Run]:
    """bc of every seed, which the point's trials of that seed start from."""
    own = point.of("start")
    name = ",".join([BASELINE, own.name]) if own.values else BASELINE
    flags = [*shlex.split(sweep.start), *own.flags]
    return [_run(BASELINE, seed, flags, out / "data", out / f"{name}-seed{seed}") for seed in (sweep.seeds if sweep.start else ())]


def plan_trials(sweep: Sweep, point: Point, out: Path) -> Iterator[Run]:
    """The runs of a point, one per seed."""
    first = {one.seed: ["--model_name_or_path", str(one.folder)] for one in starts(sweep, point, out)}
    for seed in sweep.seeds:
        flags = [*shlex.split(sweep.train), *point.of("train").flags, *first.get(seed, ())]
        yield _run(point.name, seed, flags, data_folder(point, out) / "data", out / "trials" / f"{point.name}-seed{seed}")


def _run(method: str, seed: int, flags: Sequence[str], data: Path, folder: Path) -> Run:
    where = ["--data", str(data), "--output_dir", str(folder), "--seed", str(seed)]
    config = load_config(train.TrainConfig, ["--report_to", "none", *flags, *where], choices=train.CHOICES)
    return Run(method, seed, train.from_anywhere(config))


def train_points(config: TuneConfig, sweep: Sweep, points: Sequence[Point], out: Path, say: Say) -> list[Trial]:
    """All seeds of all points; with halving the first seed decides which points get the others, so that every ranked point has all of them."""
    if not sweep.halving or len(sweep.seeds) == 1:
        return run_points(config, sweep, points, out, say)
    deadline = time.monotonic() + 60 * config.minutes
    first = run_points(config, replace(sweep, seeds=sweep.seeds[:1]), points, out, say)
    ended = [point for point in points if any(trial.point == point.name and trial.how == "ended" for trial in first)]
    if not ended or (config.trials and config.trials <= len(first)):
        return first
    config = replace(config, minutes=_minutes_left(config, deadline), trials=config.trials and config.trials - len(first))
    return first + run_points(config, replace(sweep, halving={}, seeds=sweep.seeds[1:]), ended, out, say)


def run_points(config: TuneConfig, sweep: Sweep, points: Sequence[Point], out: Path, say: Say) -> list[Trial]:
    """Makes the data and the starts that these points need, runs what is not done, and tells how every trial ended."""
    task = _task(sweep, Point({}))
    firsts = list({one.folder: one for point in points for one in starts(sweep, point, out)}.values())
    base = Progress("sweep", task, out, firsts)
    mixes = {folder: Progress(folder.name, _task(sweep, point), folder, []) for point in points if (folder := data_folder(point, out)) != out}
    for preparing in (base, *mixes.values()):
        prepare_task(preparing, say)
        if preparing.problem:
            raise UserError(f"prepare {' '.join(shlex.split(preparing.task.prepare))}: {preparing.problem}")
    train_runs([base], lambda one: True, say)
    if failed := next((done for done in base.finished.values() if done.error), None):
        raise UserError(f"{BASELINE} of seed {failed.seed}, which trials start from, failed: {failed.error}")
    planned = [(point, one) for point in points for one in plan_trials(sweep, point, out)][: config.trials or None]
    started = {str(first.folder): first for first in firsts}
    for _, one in planned:
        claim(one.folder, "result.json", recipe_of(one, started.get(one.config.model.model_name_or_path)), keep=True)
        (one.folder / ERROR).unlink(missing_ok=True)
        train.check(replace(one.config, device="cpu"))  # the GPUs of the cluster were counted
    left = [one for _, one in planned if sweep.halving or not _is_done(one)]  # halving compares with those that are done
    if done := sum(_is_done(one) for _, one in planned):
        say(f"{done} trials are done already")
    if left:
        _run_all(config, sweep, left, out, say)
    return [_trial(point, one) for point, one in planned]


def _run_all(config: TuneConfig, sweep: Sweep, left: Sequence[Run], out: Path, say: Say) -> None:
    settled = 0

    def ended(position: int, how: str, seconds: float) -> None:
        nonlocal settled
        settled += 1
        one = left[position]
        if how == "stopped" and not _is_done(one):
            write_text_atomically(one.folder / STOPPED, f"{_reports(one)[-1]['step']}\n")
        if how == "failed" and not (one.folder / ERROR).is_file():
            write_text_atomically(one.folder / ERROR, "its process died\n")
        error = f": {_error(one)}" if how == "failed" else ""
        say(f"[{settled}/{len(left)}] {one.folder.name}: {how} after {seconds:.0f} s{error}")

    resources = resources_of(config)
    shutil.rmtree(out / "tune", ignore_errors=True)  # what Tune knew of an earlier start; what counts is in the trials' folders
    run_trials(
        partial(run_trial, resources=resources),
        left,
        metric=sweep.metric,
        mode=sweep.mode,
        resources=resources,
        folder=out / "tune",
        halving=Halving(**sweep.halving) if sweep.halving else None,
        seconds=60 * config.minutes,
        retries=config.max_failures,
        ended=ended,
    )


def report_folder(point: Point, out: Path) -> Path:
    """`report` of points that say nothing about start and evaluation, `reports/<what they say>` of the others: each is compared with its own bc."""
    own = Point(point.of("start").values | point.of("evaluate").values)
    return out / "reports" / own.name if own.values else out / "report"


def evaluate_points(sweep: Sweep, points: Sequence[Point], trials: Sequence[Trial], out: Path, say: Say) -> list[Trial]:
    """A report for every kind of start and way to evaluate, with its bc; returns every point's trials with where they are told."""
    ways: dict[Path, tuple[Task, dict[str, Run]]] = {}
    found = []
    for point in points:
        start, folder = Point(point.of("start").values), report_folder(point, out)
        _, runs = ways.setdefault(folder, (_task(sweep, point), {one.name: one for one in starts(sweep, start, out) if _is_done(one)}))
        mine = [trial for trial in trials if trial.point == point.trained.name]
        folders = {trial.folder for trial in mine}
        runs |= {one.name: one for one in plan_trials(sweep, point.trained, out) if str(one.folder) in folders and _is_done(one)}
        found += [(replace(trial, point=point.name, values=point.values, chat=chat_flags(sweep, point, out)), folder) for trial in mine]
    waiting = [
        Progress(folder.name, task, out, list(runs.values()), {name: FinishedRun(one.method, one.seed) for name, one in runs.items()}, report=folder)
        for folder, (task, runs) in ways.items()
        if runs
    ]
    evaluate_tasks(waiting, say, required="")
    if failed := next((one for one in waiting if one.problem), None):
        raise UserError(f"{failed.name}: {failed.problem}")
    errors = {(one.report, str(run.folder)): one.finished[run.name].error for one in waiting for run in one.runs}
    metrics = {folder: next((str(path) for name in (METRICS, METRICS_OF_SOME) if (path := folder / name).is_file()), "") for folder in ways}
    return [replace(trial, metrics=metrics[folder], error=trial.error or errors.get((folder, trial.folder), "")) for trial, folder in found]


def chat_flags(sweep: Sweep, point: Point, out: Path) -> str:
    """With which `chat` draws replies as the evaluation of a point did."""
    config, chat = evaluate_config(_task(sweep, point), out, ["RUN"]), ChatConfig()
    drawn = asdict(Decoding.of(config)) | {"beta": config.beta}
    return shlex.join(Point({name: value for name, value in drawn.items() if value != getattr(chat, name)}).flags)


def run_trial(one: Run, report: Report, *, resources: Resources) -> dict[str, float] | None:
    """One trial from where it is to its end; what it reported before is reported again first, so that halving knows it."""
    folder, rows = one.folder, _reports(one)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR).unlink(missing_ok=True)
    for metrics in rows[:-1] if _is_done(one) else rows:
        report(metrics | {REPLAYED: True})
    if _is_done(one):
        return rows[-1]
    if (folder / STOPPED).is_file():
        return None
    save_config(one.config, folder / "train.yaml", choices=train.CHOICES)

    def tell(metrics: dict[str, float], last: bool) -> None:
        _note(folder, metrics)
        if not last:
            report(metrics)

    try:
        if resources.in_trial:
            train.train_worker(one.config, report=tell)
        else:
            group = WorkerGroup(resources.workers, resources.cpus_per_worker, resources.use_gpu, max_failures=0)
            fit(partial(train.train_worker, report=partial(_tell_tune, folder)), one.config, group, folder, callbacks=tune_callbacks())
    except Exception:
        (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    return _reports(one)[-1]


def _tell_tune(folder: Path, metrics: dict[str, float], last: bool) -> None:
    """On every worker of a trial that has several."""
    if is_first_worker():
        _note(folder, metrics)
    if not last:
        report_from_worker(metrics)


def _note(folder: Path, metrics: dict[str, float]) -> None:
    with open(folder / REPORTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics | {"time": round(time.time(), 2)}) + "\n")


def _is_done(one: Run) -> bool:
    return (one.folder / "result.json").is_file()


def _reports(one: Run) -> list[dict[str, float]]:
    """What the trial has reported so far, once per step. A line that a kill cut off is left out; its checkpoint was saved before and has it."""
    path, found = one.folder / REPORTS, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["step"]] = row
    for saved in one.folder.glob("checkpoint-*/metrics.json"):
        row = json.loads(saved.read_text(encoding="utf-8"))
        if row["step"] not in found and len(row) > 1:
            found[row["step"]] = row | {"time": round(saved.stat().st_mtime, 2)}
    return [found[step] for step in sorted(found)]


def _error(one: Run) -> str:
    path = one.folder / ERROR
    return path.read_text(encoding="utf-8").strip().splitlines()[-1][:300] if path.is_file() else "its process died"


def _trial(point: Point, one: Run) -> Trial:
    how = "ended" if _is_done(one) else "stopped" if (one.folder / STOPPED).is_file() else "failed" if (one.folder / ERROR).is_file() else "left"
    reports = _reports(one)
    scored = load_manifest(one.config.data)["rewards"]
    weights = {name: row["weight"] for name, row in scored["components"].items() if row["weight"]}
    scales = {name: _scale(row, scored["components"][name]) for name, row in scored["normalisers"].items()}
    error = _error(one) if how == "failed" else ""
    return Trial(point.name, point.values, one.seed, str(one.folder), how, reports, error, rewards=weights, scales=scales)


def _scale(normaliser: dict[str, Any], component: dict[str, Any]) -> float:
    """What it divides a reward by; a rank, on average, by all that the reward spans."""
    return (component["max"] - component["min"]) or 1.0 if normaliser["kind"] == "rank" else normaliser["scale"]


if __name__ == "__main__":
    run(TuneConfig, main)
