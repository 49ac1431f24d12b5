"""Metrics reach the tracker that was asked for, a resumed run goes on in the same one, and what is not finite is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rl_dialog.training.logger import Logger


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
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[2] == {"step": 3, "train/loss": pytest.approx(1 / 3), "train/odd": None}


def test_mlflow_holds_one_run_with_its_settings_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log(tmp_path / "psi", "mlflow", range(1, 4))
    log(tmp_path / "psi", "mlflow", range(4, 6))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("rl_dialog").experiment_id])
    assert run.data.params == {"learning_rate": "0.1", "method.name": "psi", "method.c": "0.5"} and run.info.run_name == "psi"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(step, pytest.approx(1 / step)) for step in range(1, 6)]
    assert "train/odd" not in run.data.metrics and run.info.status == "FINISHED"


def test_wandb_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path, "wandb", range(1, 4))
    [record] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = record.read_bytes()
    assert b"train/loss" in content and b"learning_rate" in content and b"train/odd" not in content
