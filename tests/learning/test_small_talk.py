"""Methods that see rewards learn from small-talk logs: their policies talk better than clones of them, tested
by permuting the seeds.

Cloning for as many updates more gains something too, so those that gain more than that are held to it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from envs import ENVS
from envs.small_talk import write_logs
from pipelines import prepare, train
from rl_dialog.config import load_config
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.evaluation.generation import load_for_decoding
from rl_dialog.models.checkpoint import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SEEDS = 3
# few updates, so long steps
CLONE = "--model.layers 2 --model.width 64 --model.context 512 --max_steps 400 --learning_rate 4e-3"
IMPROVE = "--max_steps 200 --learning_rate 3e-3"  # of words; values take shorter steps by themselves
METHODS = {
    "tf_top": "--method.fraction 0.3",
    "dt": "--method.bins 3",
    "ilql": "",
    "mc": "",
    "cql": "",
    "dbcq": "",
    "utterance_ilql": "",
    "dpo": "--max_steps 0 --learning_rate 2e-4",
    "kto": "--learning_rate 1e-3",
    "psi": "",
    # The paper's discount; with gamma 1 the entropy in its target pays for talking on and on.
    "way_off_policy": (
        "--method.backup psi --method.c 0.5 --method.gamma 0.5 --reward_spread every_token --value_unit 1 "
        "--learning_rate 2e-3"
    ),
}
OFTEN = ("ilql",)  # the others are `long`
ABOVE_CLONE_ONLY = (
    "dpo",
    "way_off_policy",
)  # their gain over longer cloning is within the noise of the seeds


def learn(arguments: list[str]) -> float:
    """Trains as `train` would, then lets the best checkpoint talk; the mean return of 128 conversations."""
    torch.set_num_threads(1)
    config = load_config(train.TrainConfig, arguments, choices=train.CHOICES)
    train.train_worker(config)
    best = resolve(config.output_dir)
    policy, tokenizer = load_for_decoding(best), load_tokenizer(best)
    return env_return(policy, tokenizer, make_env=ENVS["small_talk"], episodes=128, seed=10_000)[
        "eval/return"
    ]


class Learner:
    """Runs of all methods, as many at a time as there are cores."""

    def __init__(self, folder: Path, methods: Iterable[str], pool: ProcessPoolExecutor) -> None:
        self.folder, self.pool = folder, pool
        write_logs(folder / "logs.jsonl", dialogs=2000, seed=1)
        flags = [
            "--logs",
            str(folder / "logs.jsonl"),
            "--output_dir",
            str(folder / "data"),
            "--vocab_size",
            "1024",
            "--max_length",
            "512",
            "--quiet",
        ]
        prepare.main(load_config(prepare.PrepareConfig, [*flags, "--rewards.logged", "1"]))
        self.runs = {"bc": self.start("bc", CLONE)}
        self.returns("bc")  # which the others start from
        self.runs |= {
            method: self.start(method, f"{IMPROVE} {METHODS.get(method, '')}")
            for method in ("tf_all", *methods)
        }

    def start(self, method: str, flags: str) -> list[Future[float]]:
        """Queues the runs of every seed."""
        found = []
        for seed in range(SEEDS):
            run = [
                "--method",
                method,
                *flags.split(),
                "--data",
                str(self.folder / "data"),
                "--report_to",
                "none",
            ]
            run += [] if method == "bc" else ["--model_name_or_path", str(self.folder / f"bc-seed{seed}")]
            run += ["--seed", str(seed), "--output_dir", str(self.folder / f"{method}-seed{seed}")]
            found.append(self.pool.submit(learn, run))
        return found

    def returns(self, method: str) -> list[float]:
        """The mean return of each seed's policy."""
        return [run.result() for run in self.runs[method]]


@pytest.fixture(scope="module")
def learner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    chosen = [
        item.callspec.params["method"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))
    try:
        yield Learner(tmp_path_factory.mktemp("learning"), chosen, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def p_value(better: list[float], worse: list[float]) -> float:
    """The share of relabellings whose difference of means is at least the observed one (exact permutation
    test, one-sided)."""
    values = np.asarray([*better, *worse])
    chosen = [list(members) for members in itertools.combinations(range(len(values)), len(better))]
    sums = np.asarray([values[members].sum() for members in chosen])
    return float(np.mean(sums >= values[: len(better)].sum() - 1e-12))


def test_the_permutation_test() -> None:
    assert p_value([3.0, 4.0, 5.0], [0.0, 1.0, 2.0]) == 1 / 20
    assert p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert p_value([0.0, 5.0], [1.0, 2.0]) == 3 / 6


@pytest.mark.parametrize(
    "method", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in METHODS]
)
def test_it_talks_better_than_a_clone(learner: Learner, method: str) -> None:
    """Than the clone it starts from, and where it can than that clone trained for as long as it was."""
    returns, cloned, cloned_longer = (learner.returns(name) for name in (method, "bc", "tf_all"))
    baseline = cloned if method in ABOVE_CLONE_ONLY else cloned_longer
    print(method, np.round(returns, 2), "bc", np.round(cloned, 2), "tf_all", np.round(cloned_longer, 2))
    assert p_value(returns, baseline) <= 0.05, (returns, baseline)
