"""Which method, which KL weight, which reward mix is best for these logs: many runs, their evaluation, and a
report.

    python -m pipelines.tune --sweep tune_configs/sweep_kl.yaml --output_dir runs/sweep_kl

    logs -> prepare (again for every reward mix of the space) -> bc for every seed
         -> trials -> evaluate -> report

A trial is a point of the search space with a seed: the same training that `train` does, or the same playing
and learning as `online` (tune_configs/sweep_online.yaml), in OUT/trials/<point>-seed<k>. A killed sweep goes
on with --resume: trials that are done are not run again, the others continue from their latest checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipelines import stages
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import check_device, wants_gpus
from rl_dialog.cluster.sweep_experiment import Limits, SweepExperiment
from rl_dialog.cluster.tune import Resources
from rl_dialog.config import typed_command
from rl_dialog.data.files import write_text_atomically
from rl_dialog.evaluation.experiment import Say
from rl_dialog.evaluation.sweep import frontier_as_svg, write_sweep_report
from rl_dialog.evaluation.sweep_space import (
    COPY,
    OptunaSearch,
    Sweep,
    check_same_sweep,
    check_world,
    find_points,
    read_sweep,
)
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, claim_output, require, run

TYPED = ("sweep", "output_dir", "seeds", "samples", "minutes", "trials")  # what the result depends on,
PLACED = ("num_workers", "cpus_per_worker", "device")  # with where it was made


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
    check_device(config.device, config.address)
    sweep = _with_workers(read_sweep(config.sweep, seeds=config.seeds, samples=config.samples), config)
    search = OptunaSearch(sweep) if sweep.search == "optuna" else None
    # those of Optuna come later; these show whether the flags exist
    points = find_points(replace(sweep, samples=1) if search else sweep)
    out = Path(config.output_dir).absolute()
    say: Say = (lambda text: None) if config.quiet else partial(print, flush=True)
    experiment = SweepExperiment(sweep, out, stages, say)
    experiment.check(points, where=config.sweep)
    check_world(config.sweep, sweep.write_logs, (sweep.start, sweep.train, sweep.online, sweep.evaluate))
    _claim(config, out)
    limits = Limits(config.minutes, config.trials, config.max_failures)
    with connect(config.address or None):
        resources = resources_of(config)
        at_once = resources.trials_at_once()  # said now, and not after an hour
        if search is None:
            trained = list({point.trained.name: point.trained for point in points}.values())
            trained_runs = f"{len(trained)} x {len(sweep.seeds)} seeds to train"
            say(f"{len(points)} points, {trained_runs}, {at_once} at a time, in {out}")
            trials = experiment.train(trained, limits, resources)
        else:
            chosen = f"{sweep.batch} points chosen at a time, {at_once} trials at a time"
            say(f"{sweep.samples} points x {len(sweep.seeds)} seeds, {chosen}, in {out}")
            points, trials = experiment.search(search, limits, resources)
        if sweep.evaluate:
            trials = experiment.evaluate(points, trials)
    seconds = time.perf_counter() - began
    command = typed_command("tune", config, (*TYPED, *PLACED))
    report = write_sweep_report(out, sweep, trials, seconds=seconds, command=command)
    say(f"wrote {report['html']}")
    if config.picture:
        write_text_atomically(Path(config.picture), frontier_as_svg(sweep, trials))
    return report


def _with_workers(sweep: Sweep, config: TuneConfig) -> Sweep:
    """Its flags of training, with those of this command."""
    devices = [] if config.device == "auto" else ["--device", config.device]
    learners = "num_learners" if sweep.online else "num_workers"
    workers = [f"--{learners} {config.num_workers}"] if config.num_workers > 1 else []
    start = " ".join([sweep.start, *devices]) if sweep.start else ""
    flags = {sweep.verb: " ".join([sweep.flags, *workers, *devices])}
    return replace(sweep, start=start, **flags)


def resources_of(config: TuneConfig) -> Resources:
    """What a trial takes of the cluster."""
    return Resources(
        config.num_workers, config.cpus_per_worker, wants_gpus(config.device, config.num_workers)
    )


def _claim(config: TuneConfig, out: Path) -> None:
    """The folder, with a copy of the sweep; each trial in it has a recipe of its own."""
    if config.resume:
        check_same_sweep(out, config.sweep)
    text = Path(config.sweep).read_text(encoding="utf-8")
    claim_output(config, "tune", free=[field.name for field in fields(config)], written=["sweep"])
    write_text_atomically(out / COPY, text)


if __name__ == "__main__":
    run(TuneConfig, main)
