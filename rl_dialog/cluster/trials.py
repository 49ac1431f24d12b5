"""The trials of a sweep: runs that report as they go, in folders that say how far each came.

reports.jsonl    what it reported, once per step
stopped.txt      the step at which halving stopped it
error.txt        why it failed
"""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl_dialog.cluster.train import WorkerGroup, fit
from rl_dialog.cluster.tune import (
    REPLAYED,
    Report,
    Resources,
    is_first_worker,
    report_from_worker,
    run_trials,
    tune_callbacks,
)
from rl_dialog.config import save_config
from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.shards import load_manifest
from rl_dialog.evaluation.experiment import ERROR, Run, Say
from rl_dialog.evaluation.sweep import Trial
from rl_dialog.evaluation.sweep_space import Halving, Point, Sweep
from rl_dialog.methods import METHODS
from rl_dialog.rewards.choosing import read_weights

REPORTS, STOPPED = "reports.jsonl", "stopped.txt"


def run_all(
    left: Sequence[Run],
    learn: Callable[..., Any],
    sweep: Sweep,
    out: Path,
    *,
    resources: Resources,
    seconds: float,
    retries: int,
    say: Say,
) -> None:
    """These trials of a sweep, each from where it is; `learn(config, report=...)` is what a worker of a trial
    does.

    Ray must be running.
    """
    settled = 0

    def ended(position: int, how: str, seconds: float) -> None:
        nonlocal settled
        settled += 1
        one = left[position]
        _note_end(one, how)
        error = f": {_error(one)}" if how == "failed" else ""
        say(f"[{settled}/{len(left)}] {one.folder.name}: {how} after {seconds:.0f} s{error}")

    # what Tune knew of an earlier start; what counts is in the trials' folders
    shutil.rmtree(out / "tune", ignore_errors=True)
    run_trials(
        partial(_run_trial, learn=learn, resources=resources),
        left,
        metric=sweep.metric,
        mode=sweep.mode,
        resources=resources,
        folder=out / "tune",
        halving=Halving(**sweep.halving) if sweep.halving else None,
        seconds=seconds,
        retries=retries,
        ended=ended,
    )


def _note_end(one: Run, how: str) -> None:
    """Into its folder, so that the next start knows."""
    if how == "stopped" and not one.is_done:
        write_text_atomically(one.folder / STOPPED, f"{reports_of(one)[-1]['step']}\n")
    if how == "failed" and not (one.folder / ERROR).is_file():
        write_text_atomically(one.folder / ERROR, "its process died\n")


def _run_trial(
    one: Run, report: Report, *, learn: Callable[..., Any], resources: Resources
) -> dict[str, float] | None:
    """One trial from where it is to its end; what it reported before is reported again first, so that halving
    knows it."""
    folder, rows = one.folder, reports_of(one)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR).unlink(missing_ok=True)
    for metrics in rows[:-1] if one.is_done else rows:
        report(metrics | {REPLAYED: True})
    if one.is_done:
        return rows[-1]
    if (folder / STOPPED).is_file():
        return None
    save_config(one.config, folder / f"{one.verb}.yaml", choices={"method": METHODS})

    def tell(metrics: dict[str, float], last: bool) -> None:
        _note(folder, metrics)
        if not last:
            report(metrics)

    try:
        if resources.in_trial:
            learn(one.config, report=tell)
        else:
            group = WorkerGroup(
                resources.workers, resources.cpus_per_worker, resources.use_gpu, max_failures=0
            )
            work = partial(learn, report=partial(_tell_tune, folder))
            fit(work, one.config, group, folder, callbacks=tune_callbacks())
    except Exception:
        (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    return reports_of(one)[-1]


def _tell_tune(folder: Path, metrics: dict[str, float], last: bool) -> None:
    """On every worker of a trial that has several."""
    if is_first_worker():
        _note(folder, metrics)
    if not last:
        report_from_worker(metrics)


def _note(folder: Path, metrics: dict[str, float]) -> None:
    with open(folder / REPORTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics | {"time": round(time.time(), 2)}) + "\n")


def reports_of(one: Run) -> list[dict[str, float]]:
    """What the trial has reported so far, once per step.

    A line that a kill cut off is left out; its checkpoint was saved before and has it.
    """
    path, rows = one.folder / REPORTS, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["step"]] = row
    for saved in one.folder.glob("checkpoint-*/metrics.json"):
        row = json.loads(saved.read_text(encoding="utf-8"))
        if row["step"] not in rows and len(row) > 1:
            rows[row["step"]] = row | {"time": round(saved.stat().st_mtime, 2)}
    return [rows[step] for step in sorted(rows)]


def trial_of(point: Point, one: Run) -> Trial:
    """What a report tells of it."""
    files = {
        "ended": one.is_done,
        "stopped": (one.folder / STOPPED).is_file(),
        "failed": (one.folder / ERROR).is_file(),
    }
    how = next((how for how, is_there in files.items() if is_there), "left")
    weights, scales = _rewards(one)
    error = _error(one) if how == "failed" else ""
    about = {"error": error, "rewards": weights, "scales": scales, "verb": one.verb}
    return Trial(point.name, point.values, one.seed, str(one.folder), how, reports_of(one), **about)


def _rewards(one: Run) -> tuple[dict[str, float], dict[str, float]]:
    """The weights of the rewards that it learned from, and what their normalisers divide by; of a world that
    pays by itself none."""
    if one.verb == "online":
        return read_weights(one.config.rewards), {}
    scored = load_manifest(one.config.data)["rewards"]
    weights = {name: row["weight"] for name, row in scored["components"].items() if row["weight"]}
    return weights, {
        name: _scale(row, scored["components"][name]) for name, row in scored["normalisers"].items()
    }


def _error(one: Run) -> str:
    path = one.folder / ERROR
    said = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    # a full disk leaves the file empty
    return said.splitlines()[-1][:300] if said else "its process died"


def _scale(normaliser: dict[str, Any], component: dict[str, Any]) -> float:
    """What it divides a reward by; a rank, on average, by all that the reward spans."""
    return (
        (component["max"] - component["min"]) or 1.0 if normaliser["kind"] == "rank" else normaliser["scale"]
    )
