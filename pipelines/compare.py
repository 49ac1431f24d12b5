"""The results table: every method on every task over seeds, trained, evaluated, and written as Markdown, JSON and a plot.

    python -m pipelines.compare --experiments tune_configs/compare_methods.yaml --output_dir runs/compare --readme README.md

    logs -> settings (where a task searches) -> prepare -> bc for every seed -> candidates (where a task wants them)
         -> every method from its seed's bc -> evaluate -> table

Runs are processes of one core, as many at a time as Ray has cores; OUT/<task>/<method>-seed<k> is the folder of one, OUT/<task>/report of `evaluate`.
The same command again repeats nothing that is done: a killed run goes on from its latest checkpoint, and only what follows from a changed flag is
made anew (OUT/<task>/recipes says what each folder was made from; the code is not part of it, so delete a folder to repeat it). A run that fails
stops no other one: the table names it, its traceback is in error.txt of its folder, and the command ends with status 2.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shlex
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from envs import small_talk, text_env
from pipelines import candidates, evaluate, prepare, train
from pipelines.compare_search import Settings, describe, find_settings, flags_of
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.jobs import each
from rl_dialog.config import ConfigError, changed, from_dict, load_config, read_yaml, save_config
from rl_dialog.data.files import write_json, write_text_atomically
from rl_dialog.data.shards import MANIFEST
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE, ComparedTask, FinishedRun, replace_table, to_markdown, to_svg
from rl_dialog.evaluation.machine import describe_machine
from rl_dialog.evaluation.runs import nearest
from rl_dialog.methods import METHODS
from rl_dialog.models.checkpoint import resolve
from rl_dialog.run import OnCluster, ResumableOutput, claim_output, require, run

METRICS, METRICS_OF_SOME = "metrics.json", "metrics_without_failed_runs.json"
CORPORA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[1] / "../shared/data"))


@dataclass(frozen=True)
class CompareConfig(ResumableOutput, OnCluster):
    """Which table, or which part of it."""

    experiments: str = ""
    """what to compare: a YAML file like tune_configs/compare_methods.yaml"""
    tasks: tuple[str, ...] = ()
    """only these tasks of the file"""
    methods: tuple[str, ...] = ()
    """only these methods of the file; bc, which they start from, is always there"""
    seeds: tuple[int, ...] = ()
    """other seeds than those of the file"""
    readme: str = ""
    """also put the table into this file, between the lines `<!-- compare: begin -->` and `<!-- compare: end -->`"""
    picture: str = ""
    """also write the plot to this SVG file"""


@dataclass(frozen=True)
class Task:
    """One task as the YAML file has it. Every string of flags is what one would type after the verb."""

    title: str
    about: str  # one sentence for the notes below the table
    figures: tuple[str, ...]  # of evaluate's metrics.json: the headline, then more
    evaluate: str
    bc: str  # flags of `train` for bc
    improve: str  # for every other method
    logs: tuple[str, ...] = ()  # below $RL_DIALOG_DATA; the task is skipped where they are missing
    write_logs: dict[str, object] = field(default_factory=dict)  # instead: dialogs and seed of logs from small talk, or from a `world` (module:Class)
    prepare: str = ""
    candidates: str = ""  # flags of `candidates`: the methods learn from scored replies of the first seed's bc
    methods: dict[str, str | None] = field(default_factory=dict)  # more flags of a method in this task; null leaves it out
    search: str = ""  # flags of `evaluate`, with other users than `evaluate` has: settings are drawn from `space` and chosen there
    settings_of: str = ""  # or the task whose chosen settings of methods hold here too


@dataclass(frozen=True)
class Comparison:
    """The YAML file."""

    methods: dict[str, str]  # in the order of the table's rows: flags that hold in every task
    tasks: dict[str, Task]
    seeds: tuple[int, ...] = (0, 1, 2)
    train: str = ""  # flags of every run
    space: dict[str, object] = field(default_factory=dict)  # method -> flag of train -> {uniform|loguniform|randint: [low, high]} or a list of values
    samples: int = 6  # draws for each method
    search_seeds: tuple[int, ...] = (100,)


@dataclass(frozen=True)
class Run:
    """One run to make."""

    method: str
    seed: int
    config: train.TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass
class Progress:
    """A task on its way through the stages."""

    name: str
    task: Task
    folder: Path
    runs: list[Run]
    finished: dict[str, FinishedRun] = field(default_factory=dict)  # run name -> how it ended
    problem: str = ""  # why the task goes no further
    report: Path | None = None  # of its evaluation, where that is not folder/report

    @property
    def logged(self) -> Path:
        """The logs as they are: what bc clones, and what everything is evaluated on."""
        return self.folder / ("logged" if self.task.candidates else "data")

    def done(self) -> list[Run]:
        return [run for run in self.runs if run.name in self.finished and not self.finished[run.name].error]


Say = Callable[[str], None]


def main(config: CompareConfig) -> dict[str, Any]:
    """Makes the table; returns its paths. Raises UserError for what the user can fix, and at the end when something is missing from the table."""
    comparison = read_comparison(config)
    out = claim_output(config, "compare", free=[field.name for field in fields(CompareConfig)])  # each part has a recipe of its own
    if config.readme:  # to fail now and not in two hours
        replace_table(Path(config.readme).read_text(encoding="utf-8"), "")
    say: Say = (lambda text: None) if config.quiet else lambda text: print(text, flush=True)
    for name in comparison.tasks:
        plan(comparison, name, out, {})
    settings = find_settings(comparison, config, out)
    tasks = [Progress(name, task, out / name, plan(comparison, name, out, settings.get(name, {}))) for name, task in comparison.tasks.items()]
    with connect(config.address or None):
        for task in tasks:
            prepare_task(task, say)
        train_runs([task for task in tasks if not task.problem], lambda run: run.method == BASELINE, say)
        for task in tasks:
            _candidates(task, say)
        train_runs([task for task in tasks if not task.problem], lambda run: run.method != BASELINE, say)
        evaluate_tasks([task for task in tasks if not task.problem], say)
    return _write(config, comparison, tasks, out, say, settings)


def read_comparison(config: CompareConfig) -> Comparison:
    """The YAML file, cut down to what the flags ask for. Raises UserError for what is not in it."""
    require(config, experiments="a file like tune_configs/compare_methods.yaml")
    try:
        values = read_yaml(config.experiments)
        values["tasks"] = {name: from_dict(Task, task, where=f"{config.experiments}: tasks: {name}") for name, task in values["tasks"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{config.experiments}: expected YAML with methods and tasks, got {type(error).__name__}: {error}") from error
    found = from_dict(Comparison, values, where=config.experiments)
    if BASELINE not in found.methods:
        raise ConfigError(f"{config.experiments}: expected {BASELINE} among the methods: every other method starts from it and is compared with it")
    methods = _chosen(config.methods and (BASELINE, *config.methods), found.methods, "methods")
    for name in methods:
        if name not in METHODS:
            raise ConfigError(f"{config.experiments}: unknown method {name!r}: expected one of {', '.join(METHODS)}.{nearest(name, METHODS)}")
    return replace(found, methods=methods, tasks=_chosen(config.tasks, found.tasks, "tasks"), seeds=config.seeds or found.seeds)


def _chosen(names: Sequence[str], among: dict[str, Any], what: str) -> dict[str, Any]:
    """The entries of these names in the order of the file; all of them without names."""
    for name in names:
        if name not in among:
            raise UserError(f"--{what}: unknown name {name!r}: the file has {', '.join(among)}.{nearest(name, among)}")
    return {name: value for name, value in among.items() if not names or name in names}


def plan(comparison: Comparison, name: str, out: Path, settings: dict[str, dict[str, Any]]) -> list[Run]:
    """Every run of a task, bc first, with the chosen settings. All flags are read here: a misspelt one is found before anything starts."""
    task, runs = comparison.tasks[name], []
    prepare_config(task, out / name)
    _candidates_config(task, out / name, out / name)
    evaluate_config(task, out / name, ["RUN"])
    for method, everywhere in comparison.methods.items():
        here = task.methods.get(method, "")
        for seed in comparison.seeds if here is not None else ():
            first, folder = method == BASELINE, out / name
            data = folder / ("logged" if first and task.candidates else "data")
            where = ["--data", str(data), "--output_dir", str(folder / f"{method}-seed{seed}")]
            where += [] if first else ["--model_name_or_path", str(folder / f"{BASELINE}-seed{seed}")]
            fixed = shlex.split(" ".join([comparison.train, task.bc if first else task.improve, everywhere, here]))
            flags = [*fixed, *flags_of(settings.get(method, {})), "--method", method, "--seed", str(seed), *where]
            runs.append(Run(method, seed, load_config(train.TrainConfig, flags, choices=train.CHOICES)))
    unknown = next((method for method in task.methods if method not in METHODS), None)
    if unknown:
        raise ConfigError(f"tasks: {name}: methods: unknown method {unknown!r}.{nearest(unknown, METHODS)}")
    return runs


def prepare_task(task: Progress, say: Say) -> None:
    """The data directory of the logs."""
    missing = [str(CORPORA / path) for path in task.task.logs if not (CORPORA / path).exists()]
    if missing:
        task.problem = f"no {Path(missing[0]).relative_to(CORPORA)} in the folder of public corpora (RL_DIALOG_DATA)"
        say(f"{task.name}: skipped, {missing[0]} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
        return
    config = prepare_config(task.task, task.folder)
    if not claim(task.logged, "manifest.json", {"settings": changed(config), "write_logs": task.task.write_logs}):
        began = time.perf_counter()
        if task.task.write_logs:
            write_logs(task.task.write_logs, Path(config.logs[0]))
        try:
            prepare.main(config)
        except (ValueError, OSError) as error:
            task.problem = line_of(error)
        say(f"{task.name}: {task.problem or 'prepared'} ({time.perf_counter() - began:.0f} s)")


def write_logs(asked: dict[str, Any], path: Path) -> None:
    """Logs of small talk, or of `world`, whose module has a function write_logs(world, path, dialogs, seed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if world := asked.get("world"):
        made = text_env(world)
        importlib.import_module(world.partition(":")[0]).write_logs(made, path, asked["dialogs"], asked["seed"])
    else:
        small_talk.write_logs(path, **asked)


def prepare_config(task: Task, folder: Path) -> prepare.PrepareConfig:
    logs = [str((CORPORA / path).resolve()) for path in task.logs] or [str(folder / "logs" / "small_talk.jsonl")]
    out = folder / ("logged" if task.candidates else "data")
    return load_config(prepare.PrepareConfig, ["--logs", *logs, "--output_dir", str(out), *shlex.split(task.prepare), "--quiet"])


def _candidates(task: Progress, say: Say) -> None:
    """Scored replies of the first seed's bc: the data of all other methods."""
    if task.problem or not task.task.candidates:
        return
    first = next(run for run in task.runs if run.method == BASELINE)
    if task.finished[first.name].error:
        task.problem = f"{first.name}, which the candidates come from, failed"
        return
    config = _candidates_config(task.task, task.folder, first.folder)
    recipe = {"settings": changed(config), "data": _digest(task.logged / MANIFEST), "policy": _weights(first.folder)}
    if not claim(task.folder / "data", MANIFEST, recipe):
        began = time.perf_counter()
        try:
            candidates.main(config)
        except (ValueError, OSError) as error:
            task.problem = line_of(error)
        say(f"{task.name}: {task.problem or 'candidates written and scored'} ({time.perf_counter() - began:.0f} s)")


def _candidates_config(task: Task, folder: Path, policy: Path) -> candidates.CandidatesConfig:
    where = ["--data", str(folder / "logged"), "--checkpoint", str(policy), "--output_dir", str(folder / "data"), "--quiet"]
    return load_config(candidates.CandidatesConfig, [*shlex.split(task.candidates), *where])


def train_runs(tasks: Sequence[Progress], wanted: Callable[[Run], bool], say: Say) -> None:
    """Every wanted run that is not done yet, all tasks together."""
    waiting: list[tuple[Progress, Run]] = []
    for task in tasks:
        for one in filter(wanted, task.runs):
            start = next((r for r in task.runs if r.method == BASELINE and r.seed == one.seed and one.method != BASELINE), None)
            if start and task.finished[start.name].error:
                task.finished[one.name] = FinishedRun(one.method, one.seed, error=f"{start.folder.name}, which it starts from, failed")
            elif claim(one.folder, "result.json", recipe_of(one, start)):
                task.finished[one.name] = FinishedRun(one.method, one.seed, _seconds(one))
            else:
                waiting.append((task, one))
    total, began = len(waiting), time.perf_counter()
    configs = [one.config for _, one in waiting]
    outcomes = each(
        train_run, configs, waiting=still_waiting(say, "training runs"), gpus=float(any(config.device.startswith("cuda") for config in configs))
    )
    for count, (position, outcome) in enumerate(outcomes, 1):
        task, one = waiting[position]
        error = line_of(outcome) if isinstance(outcome, BaseException) else ""
        task.finished[one.name] = FinishedRun(one.method, one.seed, None if error else _seconds(one), error)
        passed = time.perf_counter() - began
        left = f"{passed * (total - count) / count / 60:.0f} min left" if count < total else f"{passed / 60:.0f} min in all"
        say(f"[{count}/{total}, {left}] {one.name}: " + (f"failed: {error}" if error else f"{outcome:.0f} s, {_headline(one)}"))


def train_run(config: train.TrainConfig) -> float:
    """One run from start, or from its latest checkpoint, to end, in this process; returns its seconds."""
    out, began, worked = Path(config.output_dir), time.perf_counter(), time.process_time()
    resumed = (out / "latest").exists()
    out.mkdir(parents=True, exist_ok=True)
    (out / "error.txt").unlink(missing_ok=True)
    save_config(config, out / "train.yaml", choices=train.CHOICES)
    try:
        train.train_worker(config)
    except Exception:
        (out / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    seconds = time.perf_counter() - began
    write_json(out / "wall.json", {"seconds": None if resumed else round(seconds, 2), "cpu_seconds": round(time.process_time() - worked, 2)})
    return seconds


def evaluate_tasks(tasks: Sequence[Progress], say: Say, *, required: str = BASELINE) -> None:
    """One report per task over all of its runs, the tasks side by side; a task without a run of `required` gets none."""
    waiting, configs = [], []
    for task in tasks:
        if required and not any(run.method == required for run in task.done()):
            task.problem = f"no run of {required} finished: " + next(iter(task.finished.values())).error
            continue
        report = task.report or task.folder / "report"
        config = replace(evaluate_config(task.task, task.folder, [str(run.folder) for run in task.done()]), output_dir=str(report))
        runs = {run.name: [_digest(run.folder / "result.json"), _weights(run.folder)] for run in task.done()}
        if not claim(report, METRICS, {"settings": changed(config), "runs": runs}):
            waiting.append(task)
            configs.append(replace(config, side_by_side=not config.num_workers))
            say(f"{task.name}: evaluating {len(runs)} runs")
    for position, outcome in each(evaluate_runs, configs, waiting=still_waiting(say, "evaluations")):
        task = waiting[position]
        if isinstance(outcome, BaseException):
            task.problem = f"evaluation failed: {line_of(outcome)}"
            say(f"{task.name}: {task.problem}")
            continue
        seconds, errors = outcome
        say(f"{task.name}: evaluated in {seconds:.0f} s" + "".join(f", without {Path(run).name}" for run in errors))
        for one in task.done():
            if error := errors.get(str(one.folder)):
                task.finished[one.name] = replace(task.finished[one.name], error=f"evaluation: {error}")


def evaluate_runs(config: evaluate.EvaluateConfig) -> tuple[float, dict[str, str]]:
    """`evaluate` in this process: its seconds, and run -> error of those that it cannot evaluate and that the report therefore leaves out."""
    began, errors = time.perf_counter(), {}
    try:
        evaluate.main(config)
    except Exception:
        errors = {run: error for run in config.checkpoints if (error := _error_alone(run, config))}
        rest = tuple(run for run in config.checkpoints if run not in errors)
        if not errors or not rest:
            raise
        evaluate.main(replace(config, checkpoints=rest))
        (Path(config.output_dir) / METRICS).rename(Path(config.output_dir) / METRICS_OF_SOME)  # so that the same command tries all of them again
    return time.perf_counter() - began, errors


def _error_alone(run: str, config: evaluate.EvaluateConfig) -> str:
    """What `evaluate` says against this run, if anything; the traceback goes into the run's error.txt."""
    with tempfile.TemporaryDirectory() as out:
        try:
            evaluate.main(replace(config, checkpoints=(run,), output_dir=out))
        except Exception as error:
            (Path(run) / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
            return line_of(error)
    return ""


def evaluate_config(task: Task, folder: Path, runs: Sequence[str]) -> evaluate.EvaluateConfig:
    data = folder / ("logged" if task.candidates else "data")
    where = ["--checkpoints", *runs, "--data", str(data), "--output_dir", str(folder / "report"), "--quiet"]
    return load_config(evaluate.EvaluateConfig, [*shlex.split(task.evaluate), *where])


def _write(config: CompareConfig, comparison: Comparison, tasks: Sequence[Progress], out: Path, say: Say, settings: Settings) -> dict[str, Any]:
    """compare.md, compare.json, compare.svg and the table in README."""
    found = [_compared(task, _how_chosen(comparison, task, settings)) for task in tasks]
    machine = describe_machine()
    methods, seeds, command = list(comparison.methods), ", ".join(map(str, comparison.seeds)), _command(config)
    header = f"`{command}`: seeds {seeds}; {machine['cores']} cores of {machine['cpu']}, one per run; torch {machine['torch']}."
    table = to_markdown(found, methods, header)
    paths = {kind: out / f"compare.{kind}" for kind in ("md", "json", "svg")}
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(paths["md"], table)
    record = {"command": command, "seeds": comparison.seeds, "machine": machine, "methods": methods, "settings": settings}
    record["tasks"] = [asdict(task) for task in found]
    write_json(paths["json"], record)
    if any(task.metrics for task in found):
        for path in (paths["svg"], *([Path(config.picture)] if config.picture else [])):
            write_text_atomically(path, to_svg(found, methods))
    if config.readme:
        readme = Path(config.readme)
        write_text_atomically(readme, replace_table(readme.read_text(encoding="utf-8"), table))
    say("\n" + table)
    failed = [run for task in found for run in task.runs if run.error]
    broken = [task.name for task in found if task.problem and task.runs]  # a task without runs is one without data: told, and no failure
    if failed or broken:
        what = [*(f"{len(failed)} runs" for _ in failed[:1]), *broken]
        raise UserError(f"{' and '.join(what)} failed: {paths['md']} says which and why; the same command tries them again")
    return {**{kind: str(path) for kind, path in paths.items()}, "skipped": [task.name for task in found if task.problem]}


def _how_chosen(comparison: Comparison, task: Progress, settings: Settings) -> str:
    if task.name not in settings:
        return ""
    chosen, draws = describe(settings[task.name]), f"{comparison.samples} draws for each method"
    if task.task.settings_of:
        return f"Settings are those chosen in {comparison.tasks[task.task.settings_of].title}, none was chosen here: {chosen}."
    seeds = ", ".join(map(str, comparison.search_seeds))
    return f"Settings are the best of {draws}, with training seed {seeds} and other users: {chosen}."


def _compared(task: Progress, chosen: str) -> ComparedTask:
    paths = [task.folder / "report" / name for name in (METRICS, METRICS_OF_SOME)]
    metrics = json.loads(next(path for path in paths if path.is_file()).read_text(encoding="utf-8")) if not task.problem else None
    runs = tuple(task.finished[run.name] for run in task.runs if run.name in task.finished)
    about = " ".join(part for part in (task.task.about, _what_best_means(task.runs[0].config), chosen) if part)
    return ComparedTask(task.name, task.task.title, task.task.figures, about, runs, metrics, task.problem)


def _what_best_means(config: train.TrainConfig) -> str:
    if config.env:
        return (
            f"Best is the checkpoint of the highest return in {config.env_episodes} conversations during training, with other users than the table's."
        )
    return "Best is the checkpoint of the lowest held-out loss for methods that clone, and the last one for the others: a TD error ranks no policies."


def _command(config: CompareConfig) -> str:
    """What was typed, as far as the table depends on it."""
    parts = ["python -m pipelines.compare --experiments", config.experiments, "--output_dir", config.output_dir]
    for name in ("tasks", "methods", "seeds"):
        parts += [f"--{name}", *map(str, getattr(config, name))] if getattr(config, name) else []
    return " ".join(parts)


def recipe_of(one: Run, start: Run | None) -> dict[str, Any]:
    """All that a run follows from, apart from the code."""
    recipe = {"settings": changed(one.config), "data": _digest(Path(one.config.data) / MANIFEST)}
    return recipe | ({"start": _weights(start.folder)} if start else {})


def claim(folder: Path, marker: str, recipe: dict[str, Any], *, keep: bool = False) -> bool:
    """Was `folder` made by this recipe, to the end? One by another recipe is deleted (with `keep` only unless it is whole).

    Raises UserError for a folder that is not ours, and for one that may not be deleted.
    """
    note, text = folder.parent / "recipes" / f"{folder.name}.json", json.dumps(recipe, indent=1, default=str)
    if note.is_file() and note.read_text(encoding="utf-8") == text:
        return (folder / marker).is_file()
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        if not note.is_file():
            raise UserError(f"{folder} exists and no comparison made it: choose another --output_dir")
        if keep and (folder / marker).is_file():
            raise UserError(f"{folder} was made with other settings: {_changes(note, text)}. Choose another --output_dir, or --overwrite")
        folder.rename(old)  # at once: a killed deletion would leave half a run under the name of a whole one
    note.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(note, text)
    shutil.rmtree(old, ignore_errors=True)
    return False


def _changes(note: Path, text: str) -> str:
    """The lines of a recipe that are others now."""
    before, now = (recipe.splitlines() for recipe in (note.read_text(encoding="utf-8"), text))
    lines = [f"then {line.strip()}" for line in before if line not in now] + [f"now {line.strip()}" for line in now if line not in before]
    return "; ".join(lines[:6])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _weights(folder: Path) -> str:
    """Of the checkpoint that other runs start from."""
    return _digest(Path(resolve(folder)) / "model.safetensors")


def _seconds(one: Run) -> float | None:
    """None for a run that was killed after its last checkpoint or resumed from one."""
    path = one.folder / "wall.json"
    return json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.is_file() else None


def _headline(one: Run) -> str:
    last = one.folder / (one.folder / "latest").read_text(encoding="utf-8").strip()
    metrics = json.loads((last / "metrics.json").read_text(encoding="utf-8"))
    name = next((name for name in ("eval/return", "eval/perplexity", "eval/loss") if name in metrics), "step")
    return f"{name} {metrics[name]:.4g}"


def line_of(error: BaseException) -> str:
    """One line for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def still_waiting(say: Say, what: str) -> Callable[[int], None]:
    return lambda unfinished: say(f"still waiting for {unfinished} {what}")


if __name__ == "__main__":
    run(CompareConfig, main)
