"""An experiment: tasks on their way to an evaluation of many runs, and the folders that these are made in.

OUT/recipes/<folder>.json says what OUT/<folder> was made from. The same recipe again goes on with the folder,
another one makes it anew. The code is not part of it, so a folder must be deleted to be made again by other
code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_dialog.config import changed, save_config
from rl_dialog.data.files import write_json, write_text_atomically
from rl_dialog.data.shards import MANIFEST
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE, FinishedRun
from rl_dialog.methods import METHODS
from rl_dialog.models.checkpoint import resolve

METRICS, METRICS_OF_SOME = "metrics.json", "metrics_without_failed_runs.json"
RESULT, ERROR, WALL = "result.json", "error.txt", "wall.json"  # in the folder of a run
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One task as a YAML file has it. Every string of flags is what one would type after the verb."""

    title: str
    about: str  # one sentence for the notes below the table
    figures: tuple[str, ...]  # of evaluate's metrics.json: the headline, then more
    evaluate: str
    bc: str  # flags of `train` for bc
    improve: str  # for every other method
    # from where the command starts, or below $RL_DIALOG_DATA; without them the task is skipped
    logs: tuple[str, ...] = ()
    # instead: dialogs and seed, of small talk or of a `world`, with options of its write_logs
    write_logs: dict[str, object] = field(default_factory=dict)
    prepare: str = ""
    candidates: str = ""  # its flags: the methods learn from scored replies of the first seed's bc
    # more flags of a method in this task; null leaves it out
    methods: dict[str, str | None] = field(default_factory=dict)
    search: str = ""  # flags of `evaluate` with other users: settings are drawn from `space` and chosen there
    search_train: str = ""  # flags of the runs searched among, after those of `improve`: shorter ones
    settings_of: str = ""  # or the task whose chosen settings of methods hold here too


@dataclass(frozen=True)
class Run:
    """One run to make."""

    method: str
    seed: int
    config: Any  # of `train`, or of `online`

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def verb(self) -> str:
        """What it is a run of."""
        return "online" if self.config.method.online else "train"

    @property
    def data(self) -> list[str]:
        """The data directories that it learns from; none where it learns in a world alone."""
        places = [self.config.data, self.config.contexts if self.verb == "online" else ""]
        return [place for place in places if place]

    @property
    def is_done(self) -> bool:
        return (self.folder / RESULT).is_file()

    @property
    def seconds(self) -> float | None:
        """None for a run that was killed after its last checkpoint or resumed from one."""
        path = self.folder / WALL
        return json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.is_file() else None

    @property
    def headline(self) -> str:
        """What training itself measured last."""
        checkpoint = self.folder / (self.folder / "latest").read_text(encoding="utf-8").strip()
        metrics = json.loads((checkpoint / "metrics.json").read_text(encoding="utf-8"))
        name = next(
            (name for name in ("eval/return", "eval/perplexity", "eval/loss") if name in metrics), "step"
        )
        return f"{name} {metrics[name]:.4g}"

    def recipe(self, start: Run | None) -> dict[str, Any]:
        """All that it follows from, apart from the code."""
        digests = [digest(Path(place) / MANIFEST) for place in self.data]
        data = digests[0] if len(digests) == 1 else digests
        recipe = {"settings": changed(self.config), "data": data}
        return recipe | ({"start": digest_of_weights(start.folder)} if start else {})


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
        return logged_folder(self.task, self.folder)

    def done(self) -> list[Run]:
        """The runs without an error."""
        return [run for run in self.runs if run.name in self.finished and not self.finished[run.name].error]


def logged_folder(task: Task, folder: Path) -> Path:
    """Where the logs of a task are prepared; with candidates, `data` is made of those."""
    return folder / ("logged" if task.candidates else "data")


def metrics_file(report: Path) -> Path | None:
    """What an evaluation wrote, of all runs or without those that it could not evaluate."""
    return next((report / name for name in (METRICS, METRICS_OF_SOME) if (report / name).is_file()), None)


def claim(folder: Path, marker: str, recipe: dict[str, Any], *, keep: bool = False) -> bool:
    """Was `folder` made by this recipe, to the end?

    One by another recipe is deleted (with `keep` only unless it is whole).

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
            changes = _changes(note, text)
            fix = "Choose another --output_dir, or --overwrite"
            raise UserError(f"{folder} was made with other settings: {changes}. {fix}")
        folder.rename(old)  # at once: a killed deletion would leave half a run under the name of a whole one
    note.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(note, text)
    shutil.rmtree(old, ignore_errors=True)
    return False


def _changes(note: Path, text: str) -> str:
    """The lines of a recipe that are others now."""
    old_lines, new_lines = (recipe.splitlines() for recipe in (note.read_text(encoding="utf-8"), text))
    lines = [f"then {line.strip()}" for line in old_lines if line not in new_lines]
    lines += [f"now {line.strip()}" for line in new_lines if line not in old_lines]
    return "; ".join(lines[:6])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of_weights(folder: Path) -> str:
    """Of the checkpoint that other runs start from."""
    place = Path(resolve(folder))
    adapters = place / "adapter_model.safetensors"
    return digest(adapters if adapters.is_file() else place / "model.safetensors")


def line_of(error: BaseException) -> str:
    """One line for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def timed(task: Progress, make: Callable[[], Any], made: str, say: Say) -> None:
    """A stage, which says how long it took and may end the task."""
    began = time.perf_counter()
    try:
        make()
    except (UserError, OSError) as error:
        task.problem = line_of(error)
    say(f"{task.name}: {task.problem or made} ({time.perf_counter() - began:.0f} s)")


def make_data_of_candidates(
    task: Progress, config_of: Callable[[Path], Any], make: Callable[[Any], Any], say: Say
) -> None:
    """Scored replies of the first seed's bc to the task's logs, as `data`; a task without candidates has the
    logs there. `config_of`: the settings of `make` for a run."""
    if task.problem or not task.task.candidates:
        return
    first = next(run for run in task.runs if run.method == BASELINE)
    if task.finished[first.name].error:
        task.problem = f"{first.name}, which the candidates come from, failed"
        return
    config = config_of(first.folder)
    recipe = {
        "settings": changed(config),
        "data": digest(task.logged / MANIFEST),
        "policy": digest_of_weights(first.folder),
    }
    if not claim(task.folder / "data", MANIFEST, recipe):
        timed(task, lambda: make(replace(config, resume=True)), "candidates written and scored", say)


def train_run(config: Any, train_worker: Callable[[Any], Any]) -> float:
    """One run from start, or from its latest checkpoint, to end, in this process; returns its seconds."""
    out, began, worked = Path(config.output_dir), time.perf_counter(), time.process_time()
    resumed = (out / "latest").exists()
    out.mkdir(parents=True, exist_ok=True)
    (out / ERROR).unlink(missing_ok=True)
    save_config(config, out / "train.yaml", choices={"method": METHODS})
    try:
        train_worker(config)
    except Exception:
        (out / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    write_json(out / WALL, {"seconds": None if resumed else round(seconds, 2), "cpu_seconds": round(cpu, 2)})
    return seconds


def evaluate_runs(config: Any, evaluate: Callable[[Any], Any]) -> tuple[float, dict[str, str]]:
    """The report of `config.checkpoints`: its seconds, and run -> error of those that cannot be evaluated and
    that it therefore leaves out."""
    began, errors = time.perf_counter(), {}
    try:
        evaluate(config)
    except Exception:
        errors = {run: error for run in config.checkpoints if (error := _error_alone(run, config, evaluate))}
        sound_runs = tuple(run for run in config.checkpoints if run not in errors)
        if not errors or not sound_runs:
            raise
        evaluate(replace(config, checkpoints=sound_runs))
        out = Path(config.output_dir)
        (out / METRICS).rename(out / METRICS_OF_SOME)  # so that the same command tries all of them again
    return time.perf_counter() - began, errors


def _error_alone(run: str, config: Any, evaluate: Callable[[Any], Any]) -> str:
    """What an evaluation says against this run, if anything; the traceback goes into the run's error.txt."""
    with tempfile.TemporaryDirectory() as out:
        try:
            evaluate(replace(config, checkpoints=(run,), output_dir=out))
        except Exception as error:
            (Path(run) / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
            return line_of(error)
    return ""
