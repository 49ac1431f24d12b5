"""What a run writes while it trains, one JSON line per logged step and a tracker of your choice, and how it
is shown to whoever started it."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rl_dialog.data.files import write_text_atomically
from rl_dialog.errors import UserError

Log = Callable[[int, Mapping[str, float]], None]
NOTES = "notes.txt"  # what a run warned of, a line each
PROJECT = "rl_dialog"  # of wandb and mlflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME say otherwise


class Logger:
    """Writes `metrics.jsonl` into `directory` and reports to tensorboard, wandb, mlflow or none.

    A resumed run drops the lines after the step that it resumes from, and brings the tracker to hold just the
    lines that are left: the curve becomes the one of a run that was never stopped. `settings` is what the
    tracker shows of the run's config. Raises UserError when the tracker's package is not there, UserError
    when it cannot be written to.
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_step: int = 0,
        report_to: str = "tensorboard",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        lines = (
            [line for line in path.read_text().splitlines() if _step_of(line) <= first_step]
            if path.exists()
            else []
        )
        write_text_atomically(path, "".join(line + "\n" for line in lines))
        self._track, self._close_tracker = _open_tracker(
            report_to, directory, first_step, lines, settings or {}
        )
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line; values that are not finite become null."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step} | {name: finite.get(name) for name in metrics}) + "\n")
        self._file.flush()
        self._track(step, finite)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        self._close_tracker()


def check_tracker(name: str) -> None:
    """What can be known to fail before a run starts: raises as `Logger` does."""
    if name == "wandb":
        _import_wandb()
    if name == "mlflow":
        client = _import_mlflow().MlflowClient
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri and "://" not in uri.removeprefix(
            "file://"
        ):  # a folder: nothing is written, and nobody is asked
            with _mlflow_errors(uri):
                client(uri)


def _open_tracker(
    name: str, directory: Path, first_step: int, lines: Sequence[str], settings: Mapping[str, Any]
) -> tuple[Log, Callable[[], None]]:
    """How to log and how to close."""
    if name == "tensorboard":
        return _tensorboard(directory, first_step)
    if name == "wandb":
        return _wandb(directory, first_step, lines, settings)
    if name == "mlflow":
        return _mlflow(directory, first_step, lines, settings)
    return lambda step, metrics: None, lambda: None


def _tensorboard(directory: Path, first_step: int) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    folder = directory / "tensorboard"
    # Files are read in the order of their names, which begin with the second they were made in: two of one
    # second could be read the wrong way round.
    while any(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
        time.sleep(0.1)
    board = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            board.add_scalar(name, value, step)
        # by itself it waits two minutes, and what a killed run had not written is not written again
        board.flush()

    return log, board.close


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "report_to wandb needs the package wandb: pip install wandb, or choose another --report_to"
        ) from error
    return wandb


def _wandb(
    directory: Path, first_step: int, lines: Sequence[str], settings: Mapping[str, Any]
) -> tuple[Log, Callable[[], None]]:
    """A server goes on behind the last step that it has. An offline run is written again from its first line:
    what a killed one had in memory is missing from its file."""
    wandb = _import_wandb()
    earlier, run_id = _run_ids(directory, first_step)
    for file in (directory / "wandb").glob(f"offline-run-*/run-{earlier}.wandb"):
        if not file.with_name(file.name + ".synced").exists():
            shutil.rmtree(file.parent)
    run_settings = {
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": directory.name,
        "dir": str(directory),
    }
    run = wandb.init(**run_settings, id=run_id, resume="allow", config=dict(settings))
    begin = run.step

    def log(step: int, metrics: Mapping[str, float]) -> None:
        if step >= begin:  # what the server has of the killed run is what would be logged again
            run.log(dict(metrics), step=step)

    for step, metrics in _points(lines):
        log(step, metrics)

    def close() -> None:
        run.finish()
        wandb.teardown()  # waits for the process that writes the file; `finish` only tells it to

    return log, close


def _import_mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise UserError(
            "report_to mlflow needs the package mlflow: pip install mlflow, or choose another --report_to"
        ) from error
    return mlflow


@contextmanager
def _mlflow_errors(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise UserError(
            "report_to mlflow: expected a database or a server in MLFLOW_TRACKING_URI "
            f"(sqlite:////folder/mlflow.db, http://host:5000), got {uri!r} "
            f"({' '.join(str(error).split())[:120]}...): set one, or unset it for a database beside the "
            "run's folder"
        ) from None


def _mlflow(
    directory: Path, first_step: int, lines: Sequence[str], settings: Mapping[str, Any]
) -> tuple[Log, Callable[[], None]]:
    """MLflow keeps every point it was ever given, so a run that holds others than `lines` is deleted and
    written again."""
    mlflow = _import_mlflow()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.absolute().parent / 'mlflow.db'}"
    with _mlflow_errors(uri):
        client = mlflow.MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else client.create_experiment(name)
    earlier, run_id = _run_ids(directory, first_step)
    runs = client.search_runs([experiment], f"tags.rl_dialog_run = '{earlier}'") if earlier else ()
    expected = sorted((name, step) for step, metrics in _points(lines) for name in metrics)
    history = [
        point
        for run in runs
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]
    if first_step and len(runs) == 1 and sorted((point.key, point.step) for point in history) == expected:
        run = runs[0].info.run_id
        client.update_run(run, status="RUNNING")
    else:
        tags = {"rl_dialog_run": run_id}
        run = client.create_run(experiment, run_name=directory.name, tags=tags).info.run_id
        for key, value in _flat(settings):
            client.log_param(run, key, value)
        timestamps = {(point.key, point.step): point.timestamp for point in history}
        _write_again(client, run, lines, timestamps)
        for old in runs:
            client.delete_run(old.info.run_id)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            client.log_metric(run, key, value, step=step)

    return log, lambda: client.set_terminated(run)


def _write_again(
    client: Any, run: str, lines: Sequence[str], timestamps: Mapping[tuple[str, int], int]
) -> None:
    """The points of the lines into a run of MLflow, with the times that they had."""
    metric, now = _import_mlflow().entities.Metric, int(time.time() * 1000)
    points = [
        metric(key, value, timestamps.get((key, step), now), step)
        for step, metrics in _points(lines)
        for key, value in metrics.items()
    ]
    for start in range(0, len(points), 1000):  # no more at once
        client.log_batch(run, metrics=points[start : start + 1000])


def _run_ids(directory: Path, first_step: int) -> tuple[str | None, str]:
    """What a tracker knew the run in this folder by, if there was one, and now knows it by: the same where it
    is resumed."""
    path = directory / "tracker_id"
    earlier = path.read_text(encoding="utf-8").strip() if path.exists() else None
    run_id = earlier if earlier and first_step else uuid.uuid4().hex[:16]
    path.write_text(run_id + "\n", encoding="utf-8")
    return earlier, run_id


def _points(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, finite metrics) of lines of `metrics.jsonl`."""
    for line in lines:
        values = json.loads(line)
        yield values.pop("step"), {name: value for name, value in values.items() if value is not None}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_note(directory: Path, text: str) -> None:
    """Tells whoever follows the run in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NOTES).open("a", encoding="utf-8") as file:
        file.write(" ".join(text.split()) + "\n")


@contextmanager
def following(directory: Path) -> Iterator[list[str]]:
    """Shows a run while the block lasts, from what its workers write to `metrics.jsonl`: a bar in a terminal,
    else a line per logged step.

    Their notes are shown between, each one once; the block gets the list of those.
    """
    over, notes = threading.Event(), []
    line_counts = [len(_lines(directory / name)) for name in ("metrics.jsonl", NOTES)]
    thread = threading.Thread(target=_follow, args=(directory, *line_counts, notes, over), daemon=True)
    thread.start()
    try:
        yield notes
    finally:
        over.set()
        thread.join()


@contextmanager
def logged(
    directory: Path,
    *,
    first_step: int = 0,
    report_to: str = "tensorboard",
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Iterator[Log]:
    """`log(step, metrics)` of a run in this process, which is shown while the block lasts unless it is to be
    `quiet`."""
    with nullcontext() if quiet else following(directory):
        logger = Logger(directory, first_step=first_step, report_to=report_to, settings=settings)
        try:
            yield logger.log
        finally:
            logger.close()


def _follow(directory: Path, shown: int, noted: int, notes: list[str], over: threading.Event) -> None:
    bar = tqdm(
        total=1.0,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        bar_format="{percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}",
    )
    while True:
        last = over.wait(0.5)
        for line in (line.rstrip("\n") for line in _lines(directory / NOTES)[noted:] if line.endswith("\n")):
            noted += 1
            if line not in notes:  # a worker that is started again warns again
                notes.append(line)
                bar.clear()
                print(f"note: {line}", flush=True)
        lines = _lines(directory / "metrics.jsonl")
        shown = min(shown, len(lines))  # a resumed run drops what came after its checkpoint
        for line in lines[shown:]:
            if not line.endswith("\n"):
                break
            shown, values = shown + 1, json.loads(line)
            text = f"step {values.pop('step')}: " + "  ".join(
                f"{name} {value:.4g}" for name, value in values.items() if value is not None
            )
            if bar.disable:
                print(text, flush=True)
            else:
                bar.n = values.get("train/progress", bar.n)
                bar.set_postfix_str(text[:120])
        if last:
            bar.close()
            return


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the last line of a killed run may be cut
        return sys.maxsize
