"""Real kills: a worker with SIGKILL, then the driver with everything it started. What comes out equals the
run that nobody touched, bit for bit."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from envs.small_talk import write_logs
from pipelines import prepare, train
from rl_dialog.cluster.data import connect
from rl_dialog.config import load_config
from tests.holding import Hold
from tests.processes import title

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TRAIN = shlex.split(
    "--method ilql --model.family llama --model.layers 1 --model.width 32 --model.dropout 0.1 "
    "--per_device_train_batch_size 4 --max_steps 40 --save_steps 5 --save_total_limit 20 --logging_steps 5 "
    "--learning_rate 1e-3 --cpus_per_worker 1 --num_workers 2 --method.alpha 0.1"
)


def start(*arguments: str, hold: Hold | None = None) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment |= hold.environment if hold else {}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 900) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output[-4000:]
    return output


def wait_for(condition: Callable[[], object], process: subprocess.Popen, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, (
            f"the run ended before it could be killed: {process.stdout.read()[-3000:]}"
        )
        assert time.monotonic() < deadline, f"waited {seconds:g} s for the run to reach the point of the kill"
        time.sleep(0.05)


@contextmanager
def alone() -> Iterator[None]:
    """A Ray of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with connect(num_cpus=2):
            yield


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    return Hold(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    write_logs(folder / "logs.jsonl", dialogs=150, seed=3)
    logs = ["--logs", str(folder / "logs.jsonl"), "--output_dir", str(folder / "data"), "--quiet"]
    with alone():
        prepare.main(load_config(prepare.PrepareConfig, [*logs, "--vocab_size", "500"]))
    return folder / "data"


def untouched_run(out: Path, data: Path, *more: str) -> dict[str, torch.Tensor]:
    flags = ["--data", str(data), "--output_dir", str(out), *TRAIN, *more, "--quiet"]
    assert train.main(load_config(train.TrainConfig, flags, choices=train.CHOICES))["step"] == 40
    return state(out)


@pytest.fixture(scope="module")
def untouched(data: Path) -> dict[str, torch.Tensor]:
    with alone():
        return untouched_run(data.parent / "untouched", data)


def state(run: Path) -> dict[str, torch.Tensor]:
    assert (run / "latest").read_text().strip() == "checkpoint-40"
    folder = run / "checkpoint-40" / "trainer"
    return load_file(folder / "policy.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def test_a_killed_worker_is_replaced_and_nothing_changes(
    data: Path, untouched: dict[str, torch.Tensor], hold: Hold
) -> None:
    out = data.parent / "worker"
    hold.begin(f"{out}/checkpoint-*", 3)  # of 8
    process = start("pipelines.train", "--data", str(data), "--output_dir", str(out), *TRAIN, hold=hold)
    wait_for((out / "checkpoint-15").exists, process)
    workers = [
        p for p in psutil.Process(process.pid).children(recursive=True) if "RayTrainWorker" in title(p)
    ]
    assert len(workers) == 2, [title(p) for p in workers]
    os.kill(workers[-1].pid, signal.SIGKILL)
    hold.end()
    finish(process)
    assert_equal(state(out), untouched)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(range(5, 45, 5)) <= set(steps)


@pytest.mark.parametrize("here", [False, True], ids=["two workers", "this process"])
def test_a_killed_driver_is_started_again_with_resume(
    data: Path, hold: Hold, request: pytest.FixtureRequest, here: bool
) -> None:
    out, more = data.parent / f"driver_{here}", ("--num_workers", "0") if here else ()
    where = ("--data", str(data), "--output_dir", str(out), *TRAIN, *more, "--resume")
    for most, point in ((2, "checkpoint-10"), (5, "checkpoint-25")):  # twice
        hold.begin(f"{out}/checkpoint-*", most)
        process = start("pipelines.train", *where, hold=hold)
        wait_for((out / point).exists, process)
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(everyone) == 1 or not here  # no Ray
        for member in everyone:
            with_nobody_left(member)
        process.wait(timeout=120)
    finish(start("pipelines.train", *where))
    expected = (
        untouched_run(out.with_name("here"), data, *more) if here else request.getfixturevalue("untouched")
    )
    assert_equal(state(out), expected)


def with_nobody_left(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:  # it went with its parent
        return
