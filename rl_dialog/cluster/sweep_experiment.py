"""The experiment that answers a sweep: data of its reward mixes, bc of its starts, trials of its points, and
their reports.

    OUT/data, OUT/mixes/<mix>/data    what `prepare` made
    OUT/bc-seed<k>                    what the trials of a seed start from
    OUT/trials/<point>-seed<k>        the trials
    OUT/report, OUT/reports/<kind>    their evaluations
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rl_dialog.cluster.trials import run_all, trial_of
from rl_dialog.cluster.tune import Resources
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE, FinishedRun
from rl_dialog.evaluation.experiment import ERROR, RESULT, Progress, Run, Say, Task, claim, metrics_file
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.sweep import Trial
from rl_dialog.evaluation.sweep_measured import check_figure, check_metric
from rl_dialog.evaluation.sweep_space import DATA, OptunaSearch, Point, Sweep


class Learning(Protocol):
    """A verb that trials are runs of."""

    config_of: Callable[..., Any]  # (data, out, seed, flags, start=None) -> its settings, with absolute paths
    check_settings: Callable[[Any], None]  # before there is anything that they name
    check: Callable[[Any], None]  # before the run starts
    learn: Callable[..., dict[str, Any]]  # (settings, report=None): what one worker does


class Stages(Protocol):
    """The verbs that an experiment calls (pipelines/stages.py)."""

    LEARNING: Mapping[str, Learning]

    def prepare_config(self, task: Task, folder: Path) -> Any: ...
    def evaluate_config(self, task: Task, folder: Path, runs: Sequence[str]) -> Any: ...
    def prepare_task(self, task: Progress, say: Say) -> None: ...
    def train_tasks(self, tasks: Sequence[Progress], chosen: Callable[[Run], bool], say: Say) -> None: ...
    def evaluate_tasks(self, tasks: Sequence[Progress], say: Say, *, required: str = ...) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Of the trials."""

    minutes: float = 0.0  # for all of them; 0 is no limit
    trials: int = 0  # the first ones alone; 0 is no limit
    retries: int = 0  # of one that fails

    def after(self, trials: Sequence[Trial], *, began: float) -> Limits:
        """What is left when these are done; `began` is a time of time.monotonic()."""
        passed = (time.monotonic() - began) / 60
        minutes = max(self.minutes - passed, 1e-9) if self.minutes else 0.0
        return replace(self, minutes=minutes, trials=self.trials and self.trials - len(trials))


@dataclass(frozen=True)
class SweepExperiment:
    """A sweep on its way through the stages, in the folder `out`."""

    sweep: Sweep
    out: Path
    stages: Stages
    say: Say = print

    def check(self, points: Sequence[Point], *, where: str) -> None:
        """Before anything starts, so that a misspelt flag costs no time. Raises UserError."""
        trained: list[Any] = []
        held_out = True
        for point in points:
            held_out &= self.stages.prepare_config(self._task(point), self.out).validation > 0
            if self.sweep.evaluate:
                check_figure(self.sweep.figure, self._evaluate_config(point), where=where)
            trials = list(self.trials_of(point.trained))
            for one in (*self.starts_of(point), *trials):
                self.stages.LEARNING[one.verb].check_settings(one.config)
            trained += [one.config for one in trials]
        check_metric(self.sweep, trained, held_out=held_out, where=where)

    def starts_of(self, point: Point) -> list[Run]:
        """bc of every seed, which the point's trials of that seed start from."""
        own = point.of("start")
        name = ",".join([BASELINE, own.name]) if own.values else BASELINE
        flags = [*shlex.split(self.sweep.start), *own.flags]
        seeds = self.sweep.seeds if self.sweep.start else ()
        data = self.out / "data"
        places = {seed: self.out / f"{name}-seed{seed}" for seed in seeds}
        return [self._run("train", BASELINE, seed, flags, data, place) for seed, place in places.items()]

    def trials_of(self, point: Point) -> Iterator[Run]:
        """The runs of a point, one per seed."""
        first = {one.seed: one.folder for one in self.starts_of(point)}
        data = point.data_folder(self.out) / "data"
        words = [str(data) if word == DATA else word for word in shlex.split(self.sweep.flags)]
        flags = [*words, *point.of("train").flags]
        for seed in self.sweep.seeds:
            place = self.out / "trials" / f"{point.name}-seed{seed}"
            yield self._run(self.sweep.verb, point.name, seed, flags, data, place, start=first.get(seed))

    def _run(
        self, verb: str, name: str, seed: int, flags: Sequence[str], *places: Path, start: Path | None = None
    ) -> Run:
        config_of = self.stages.LEARNING[verb].config_of
        return Run(name, seed, config_of(*places, seed, ["--report_to", "none", *flags], start))

    def _task(self, point: Point) -> Task:
        """What the stages need to know to prepare, to train the starts, and to evaluate."""
        sweep = self.sweep
        flags = {
            verb: " ".join([getattr(sweep, verb), *point.of(verb).flags])
            for verb in ("prepare", "start", "evaluate")
        }
        logs = {"logs": sweep.logs, "write_logs": sweep.write_logs, "prepare": flags["prepare"]}
        verbs = {"bc": flags["start"], "improve": sweep.flags, "evaluate": flags["evaluate"]}
        return Task(sweep.title, sweep.about, (sweep.figure,), **verbs, **logs)

    def _evaluate_config(self, point: Point) -> Any:
        return self.stages.evaluate_config(self._task(point), self.out, ["RUN"])

    def search(
        self, search: OptunaSearch, limits: Limits, resources: Resources
    ) -> tuple[list[Point], list[Trial]]:
        """Points as the search asks for them, and their trials."""
        points: list[Point] = []
        trials: list[Trial] = []
        began = time.monotonic()
        for asked, tell in search.batches():
            # it may choose one twice
            new = list({point.name: point for point in asked if point not in points}.values())
            trials += self.train(new, limits.after(trials, began=began), resources)
            points += new
            tell([self._reached([trial for trial in trials if trial.point == one.name]) for one in asked])
            if any(trial.how == "left" for trial in trials) or len(trials) == limits.trials > 0:
                break
        return points, trials

    def _reached(self, trials: Sequence[Trial]) -> float | None:
        """What a search is told of a point: its last metric, the mean over seeds; None without any."""
        metric = self.sweep.metric
        ended = [trial.with_metric(metric) for trial in trials if trial.how in ("ended", "stopped")]
        last = [rows[-1][metric] for rows in ended if rows]
        return sum(last) / len(last) if last else None

    def train(self, points: Sequence[Point], limits: Limits, resources: Resources) -> list[Trial]:
        """All seeds of all points; with halving the first seed decides which points get the others, so that
        every ranked point has all of them."""
        sweep = self.sweep
        if not sweep.halving or len(sweep.seeds) == 1:
            return self._train_all_seeds(points, limits, resources)
        began = time.monotonic()
        first = replace(self, sweep=replace(sweep, seeds=sweep.seeds[:1]))
        trials = first._train_all_seeds(points, limits, resources)
        names = {trial.point for trial in trials if trial.how == "ended"}
        ended = [point for point in points if point.name in names]
        if not ended or (limits.trials and limits.trials <= len(trials)):
            return trials
        others = replace(self, sweep=replace(sweep, halving={}, seeds=sweep.seeds[1:]))
        return trials + others._train_all_seeds(ended, limits.after(trials, began=began), resources)

    def _train_all_seeds(self, points: Sequence[Point], limits: Limits, resources: Resources) -> list[Trial]:
        """Makes the data and the starts that these points need, runs what is not done, and tells how every
        trial ended."""
        self._make_starts(points)
        planned = [(point, one) for point in points for one in self.trials_of(point)]
        planned = planned[: limits.trials or None]
        learning = self.stages.LEARNING[self.sweep.verb]
        for point, one in planned:
            start = next((first for first in self.starts_of(point) if first.seed == one.seed), None)
            claim(one.folder, RESULT, one.recipe(start), keep=True)
            (one.folder / ERROR).unlink(missing_ok=True)
            learning.check(replace(one.config, device="cpu"))  # the GPUs of the cluster were counted
        # halving compares with those that are done
        left = [one for _, one in planned if self.sweep.halving or not one.is_done]
        if done := sum(one.is_done for _, one in planned):
            self.say(f"{done} trials are done already")
        if left:
            more = {"seconds": 60 * limits.minutes, "retries": limits.retries, "say": self.say}
            run_all(left, learning.learn, self.sweep, self.out, resources=resources, **more)
        return [trial_of(point, one) for point, one in planned]

    def _make_starts(self, points: Sequence[Point]) -> None:
        """The data of all mixes, and the bc of every start."""
        firsts = {str(one.folder): one for point in points for one in self.starts_of(point)}
        base = Progress("sweep", self._task(Point({})), self.out, list(firsts.values()))
        folders = {point.data_folder(self.out): point for point in points}
        mixes = [
            Progress(folder.name, self._task(point), folder, [])
            for folder, point in folders.items()
            if folder != self.out
        ]
        for preparing in (base, *mixes):
            self.stages.prepare_task(preparing, self.say)
            if preparing.problem:
                flags = " ".join(shlex.split(preparing.task.prepare))
                raise UserError(f"prepare {flags}: {preparing.problem}")
        self.stages.train_tasks([base], lambda one: True, self.say)
        if failed := next((done for done in base.finished.values() if done.error), None):
            which = f"{BASELINE} of seed {failed.seed}, which trials start from"
            raise UserError(f"{which}, failed: {failed.error}")

    def evaluate(self, points: Sequence[Point], trials: Sequence[Trial]) -> list[Trial]:
        """A report for every kind of start and way to evaluate, with its bc; returns every point's trials
        with where they are reported."""
        ways: dict[Path, tuple[Task, dict[str, Run]]] = {}
        reported = []
        for point in points:
            start, folder = Point(point.of("start").values), point.report_folder(self.out)
            first = {one.name: one for one in self.starts_of(start) if one.is_done}
            _, runs = ways.setdefault(folder, (self._task(point), first))
            mine = [trial for trial in trials if trial.point == point.trained.name]
            folders = {trial.folder for trial in mine}
            planned = self.trials_of(point.trained)
            runs |= {one.name: one for one in planned if str(one.folder) in folders and one.is_done}
            own = {"point": point.name, "values": point.values, "chat": self.chat_flags(point)}
            reported += [(replace(trial, **own), folder) for trial in mine]
        errors = self._evaluate(ways)
        return [
            replace(
                trial,
                metrics=str(metrics_file(folder) or ""),
                error=trial.error or errors.get((folder, trial.folder), ""),
            )
            for trial, folder in reported
        ]

    def _evaluate(self, ways: dict[Path, tuple[Task, dict[str, Run]]]) -> dict[tuple[Path, str], str]:
        """Makes these reports; (report, folder of a run) -> why it is not in the report."""
        reports = []
        for folder, (task, runs) in ways.items():
            finished = {name: FinishedRun(one.method, one.seed) for name, one in runs.items()}
            report = Progress(folder.name, task, self.out, list(runs.values()), finished, report=folder)
            reports += [report] if runs else []
        self.stages.evaluate_tasks(reports, self.say, required="")
        if failed := next((one for one in reports if one.problem), None):
            raise UserError(f"{failed.name}: {failed.problem}")
        done = [(one, run) for one in reports for run in one.runs]
        return {(one.report, str(run.folder)): one.finished[run.name].error for one, run in done}

    def chat_flags(self, point: Point) -> str:
        """With which `chat` draws replies as the evaluation of a point did."""
        config = self._evaluate_config(point)
        drawn = asdict(Decoding.of(config)) | {"beta": config.beta}
        usual = asdict(Decoding()) | {"beta": None}
        different = {name: value for name, value in drawn.items() if value != usual[name]}
        return shlex.join(Point(different).flags)
