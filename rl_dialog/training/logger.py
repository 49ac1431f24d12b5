"""What a run writes while it trains, one JSON line per logged step and a tracker of your choice, and how it is shown to whoever started it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

Log = Callable[[int, Mapping[str, float]], None]
PROJECT = "rl_dialog"  # of wandb and mlflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME say otherwise


class Logger:
    """Writes `metrics.jsonl` into `directory` and reports to tensorboard, wandb, mlflow or none.

    A resumed run drops the lines after the step that it resumes from. `settings` is what the tracker shows of the run's config. Raises ImportError
    when the tracker's package is not there.
    """

    def __init__(self, directory: Path, *, first_step: int = 0, report_to: str = "tensorboard", settings: Mapping[str, Any] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step] if path.exists() and first_step else []
        path.write_text("".join(line + "\n" for line in kept))
        self._track, self._close_tracker = _open_tracker(report_to, directory, first_step, settings or {})
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


def _open_tracker(name: str, directory: Path, first_step: int, settings: Mapping[str, Any]) -> tuple[Log, Callable[[], None]]:
    """How to log and how to close."""
    if name == "tensorboard":
        return _tensorboard(directory, first_step)
    if name == "wandb":
        return _wandb(directory, settings)
    if name == "mlflow":
        return _mlflow(directory, first_step, settings)
    return lambda step, metrics: None, lambda: None


def _tensorboard(directory: Path, first_step: int) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step + 1)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            board.add_scalar(name, value, step)

    return log, board.close


def _wandb(directory: Path, settings: Mapping[str, Any]) -> tuple[Log, Callable[[], None]]:
    try:
        import wandb
    except ImportError as error:
        raise ImportError("report_to wandb needs the package wandb: pip install wandb, or choose another --report_to") from error
    where = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": directory.name, "dir": str(directory)}
    run = wandb.init(**where, id=_run_id(directory), resume="allow", config=dict(settings))
    return lambda step, metrics: run.log(dict(metrics), step=step), run.finish


def _mlflow(directory: Path, first_step: int, settings: Mapping[str, Any]) -> tuple[Log, Callable[[], None]]:
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise ImportError("report_to mlflow needs the package mlflow: pip install mlflow, or choose another --report_to") from error
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.absolute().parent / 'mlflow.db'}")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    earlier = client.search_runs([experiment], f"tags.rl_dialog_run = '{_run_id(directory)}'") if first_step else ()
    run = earlier[0] if earlier else client.create_run(experiment, run_name=directory.name, tags={"rl_dialog_run": _run_id(directory)})
    for key, value in () if earlier else _flat(settings):
        client.log_param(run.info.run_id, key, value)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            client.log_metric(run.info.run_id, key, value, step=step)

    return log, lambda: client.set_terminated(run.info.run_id)


def _run_id(directory: Path) -> str:
    """The same for a run that is resumed."""
    return hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def following(directory: Path) -> Iterator[None]:
    """Shows a run while the block lasts, from what its workers write to `metrics.jsonl`: a bar in a terminal, else a line per logged step."""
    over = threading.Event()
    path = directory / "metrics.jsonl"
    before = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    thread = threading.Thread(target=_follow, args=(path, before, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(path: Path, shown: int, over: threading.Event) -> None:
    bar = tqdm(
        total=1.0, disable=not sys.stderr.isatty(), dynamic_ncols=True, bar_format="{percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}"
    )
    while True:
        last = over.wait(0.5)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        shown = min(shown, len(lines))  # a resumed run drops what came after its checkpoint
        for line in lines[shown:]:
            if not line.endswith("\n"):
                break
            shown, values = shown + 1, json.loads(line)
            text = f"step {values.pop('step')}: " + "  ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
            if bar.disable:
                print(text, flush=True)
            else:
                bar.n = values.get("train/progress", bar.n)
                bar.set_postfix_str(text[:120])
        if last:
            bar.close()
            return


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the last line of a killed run may be cut
        return sys.maxsize
