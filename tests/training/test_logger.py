"""Metrics reach the tracker that was asked for, a resumed run goes on in the same one, and what is not finite
is left out."""

from __future__ import annotations

import json
import math
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_dialog.errors import UserError
from rl_dialog.training.logger import Logger, check_tracker, following, write_note


def log(directory: Path, report_to: str, steps: range) -> None:
    settings = {"learning_rate": 0.1, "method": {"name": "psi", "c": 0.5}}
    logger = Logger(directory, first_step=steps.start - 1, report_to=report_to, settings=settings)
    for step in steps:
        logger.log(step, {"train/loss": 1.0 / step, "train/odd": math.nan})
    logger.close()


def test_lines_after_the_step_that_a_run_resumes_from_are_dropped(tmp_path: Path) -> None:
    log(tmp_path, "none", range(1, 4))
    log(tmp_path, "none", range(3, 5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[2] == {
        "step": 3,
        "train/loss": pytest.approx(1 / 3),
        "train/odd": None,
    }


@pytest.mark.slow
def test_mlflow_holds_one_run_with_its_settings_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log(tmp_path / "psi", "mlflow", range(1, 4))
    log(tmp_path / "psi", "mlflow", range(4, 6))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("rl_dialog").experiment_id])
    assert (
        run.data.params == {"learning_rate": "0.1", "method.name": "psi", "method.c": "0.5"}
        and run.info.run_name == "psi"
    )
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [
        (step, pytest.approx(1 / step)) for step in range(1, 6)
    ]
    assert "train/odd" not in run.data.metrics and run.info.status == "FINISHED"


@pytest.mark.slow
def test_wandb_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path, "wandb", range(1, 4))
    [record] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = record.read_bytes()
    assert b"train/loss" in content and b"learning_rate" in content and b"train/odd" not in content


def test_the_process_that_writes_wandb_s_file_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the file, or ends the worker, after `close` finds all of it: `finish` alone returns while
    the file may hold its header only."""
    pytest.importorskip("wandb")
    from wandb.sdk.lib.service.service_process import ServiceProcess

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ended, join = [], ServiceProcess.join
    monkeypatch.setattr(ServiceProcess, "join", lambda self: ended.append(join(self)))
    log(tmp_path, "wandb", range(1, 2))
    assert ended == [0]


# --- killed and resumed -------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from rl_dialog.training.logger import Logger

logger = Logger(Path(sys.argv[1]), report_to=sys.argv[2], settings={"c": 0.5})
for step in range(1, int(sys.argv[3]) + 1):
    logger.log(step, {"train/loss": 1.0 / step, "train/q": -float(step)})
    if step == 4:
        logger.log(step, {"eval/loss": 0.25})
os.kill(os.getpid(), signal.SIGKILL)
"""
WHOLE = {
    "train/loss": {step: 1 / step for step in range(1, 9)},
    "train/q": {step: -step for step in range(1, 9)},
    "eval/loss": {4: 0.25},
}


def tensorboard_curves(folder: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return (
        (name, point.step, point.value) for name in events.Tags()["scalars"] for point in events.Scalars(name)
    )


def mlflow_curves(folder: Path) -> Iterator[tuple[str, int, float]]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("rl_dialog").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"c": "0.5"}
    return (
        (name, point.step, point.value)
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    )


def wandb_curves(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Its file is a LevelDB log: 7 bytes, then blocks of 32 kB of records: a checksum, a length, a kind, and
    (a part of) a protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = (folder / "wandb").glob("offline-run-*/*.wandb")
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # neither whole nor the last part
            continue
        record, message = Record.FromString(message), b""
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        yield from (
            (name, values["_step"], value) for name, value in values.items() if not name.startswith("_")
        )


CURVES = {"tensorboard": tensorboard_curves, "wandb": wandb_curves, "mlflow": mlflow_curves}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("report_to", "killed_at"), [("tensorboard", 7), ("wandb", 7), ("mlflow", 7), ("mlflow", 2)]
)
def test_a_killed_and_resumed_run_draws_the_curve_of_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report_to: str, killed_at: int
) -> None:
    """Killed behind its checkpoint of step 4 it goes on from there, killed before it from the start: every
    step once, and the same values."""
    if report_to != "tensorboard":
        pytest.importorskip(report_to)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, folder, report_to, str(killed_at)],
        cwd=Path(__file__).parents[2],
        timeout=500,
    )
    assert killed.returncode == -signal.SIGKILL
    first = 4 if killed_at > 4 else 0
    logger = Logger(folder, first_step=first, report_to=report_to, settings={"c": 0.5})
    for step in range(first + 1, 9):
        logger.log(step, {"train/loss": 1.0 / step, "train/q": -float(step)})
        if step == 4:
            logger.log(step, {"eval/loss": 0.25})
    logger.close()
    points = list(CURVES[report_to](folder))
    found = {name: {step: value for key, step, value in points if key == name} for name, _, _ in points}
    assert found == {name: pytest.approx(curve) for name, curve in WHOLE.items()} and len(points) == 17


def test_a_run_anew_in_the_same_folder_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After --overwrite: the finished one stays in the tracker, and its points are not mixed with the new
    ones."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for last in (4, 3):
        shutil.rmtree(tmp_path / "psi", ignore_errors=True)
        log(tmp_path / "psi", "mlflow", range(1, last))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("rl_dialog").experiment_id])
    assert sorted(len(client.get_metric_history(run.info.run_id, "train/loss")) for run in runs) == [2, 3]


@pytest.mark.parametrize(
    "make",
    [lambda folder: check_tracker("mlflow"), lambda folder: log(folder, "mlflow", range(1, 2))],
    ids=["before", "in it"],
)
def test_a_store_that_mlflow_no_longer_takes_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make
) -> None:  # noqa: ANN001
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    for uri in (f"file://{tmp_path}/mlruns", f"{tmp_path}/mlruns"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(UserError) as error:
            make(tmp_path / "run")
        text = str(error.value)
        assert (
            f"got {uri!r}" in text
            and "expected a database or a server in MLFLOW_TRACKING_URI (sqlite:" in text
            and "unset it" in text
        )
        assert "\n" not in text and len(text) < 500 and error.value.__suppress_context__


def test_who_follows_a_run_is_told_its_notes_at_once_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "runs" / "psi"  # which need not be there yet
    write_note(folder, "of an earlier run")
    with following(folder) as shown:
        for _ in range(2):
            write_note(folder, "the prior\nis far")
        deadline = time.monotonic() + 240
        while not shown and time.monotonic() < deadline:
            time.sleep(0.05)
    assert shown == ["the prior is far"] and capsys.readouterr().out.count("note:") == 1
