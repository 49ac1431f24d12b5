"""`benchmark tune`: trials of a sweep side by side, against the same runs in a plain loop, and what Ray Tune
costs per trial.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from statistics import median

import torch

from envs.small_talk import write_logs
from pipelines import prepare, train
from pipelines.benchmark.measuring import Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.tune import Report, Resources, run_trials
from rl_dialog.config import load_config

STEPS = 150  # of a trial, some fifteen seconds
MODEL = "--model.family llama --model.layers 2 --model.width 64 --model.context 512"


def measure(config: BenchmarkConfig) -> Result:
    """Trials of a round and its seconds, and the seconds that Tune adds to a trial.

    Ray is started before the clock is.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_logs(folder / "logs.jsonl", dialogs=300, seed=config.seed)
        flags = [
            "--logs",
            str(folder / "logs.jsonl"),
            "--output_dir",
            str(folder / "data"),
            "--vocab_size",
            "512",
            "--max_length",
            "512",
            "--quiet",
        ]
        with connect("local", num_cpus=config.threads):
            prepare.main(load_config(prepare.PrepareConfig, [*flags, "--rewards.logged", "1"]))
            side_by_side = f"tune, {config.threads} at a time"
            contenders = {
                "plain": lambda: [_train(folder, number) for number in range(config.trials)],
                "tune, one at a time": lambda: _tune(folder, config.trials, config.threads),
                side_by_side: lambda: _tune(folder, config.trials, 1),
            }
            seconds = take_turns(contenders, rounds=config.rounds, warmup=0)
    setting = f"{config.trials} trials of {STEPS} steps, a 2-layer model of width 64, one core each"
    setting += "; plain: one after the other in one process"
    added = [
        (tune - plain) / config.trials
        for tune, plain in zip(seconds["tune, one at a time"], seconds["plain"], strict=True)
    ]
    overhead = {"seconds_that_tune_adds_to_a_trial": round(median(added), 2)}
    return speeds(config, {setting: (config.trials, seconds)}, overhead=overhead)


def _tune(folder: Path, trials: int, cores: int) -> None:
    run_trials(
        lambda number, report: _train(folder, number, report),
        range(trials),
        metric="eval/loss",
        mode="min",
        resources=Resources(cpus_per_worker=cores),
        folder=folder / "tune",
        ended=lambda position, how, seconds: None,
    )


def _train(folder: Path, number: int, report: Report | None = None) -> dict[str, float]:
    out = folder / f"trial{number}"
    shutil.rmtree(out, ignore_errors=True)
    flags = f"--data {folder / 'data'} --output_dir {out} --seed {number} {MODEL} --report_to none"
    flags += f" --max_steps {STEPS} --eval_steps {STEPS // 2}"
    torch.set_num_threads(1)
    config = load_config(train.TrainConfig, flags.split(), choices=train.CHOICES)
    rows = []

    def hear(metrics: dict[str, float], last: bool) -> None:
        rows.append(metrics)
        if report and not last:
            report(metrics)

    train.train_worker(config, report=hear)
    return rows[-1]
