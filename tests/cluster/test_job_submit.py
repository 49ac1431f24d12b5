"""`ray job submit` of a sweep to a cluster with a token: its progress is in the job's log, its results on the
cluster's storage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SWEEP = {
    "title": "tiny",
    "about": "Two weights.",
    "write_logs": {"dialogs": 60, "seed": 1},
    "prepare": "--rewards.logged 1 --vocab_size 400 --max_length 256",
    "train": "--model.layers 1 --model.width 16 --max_steps 6 --env small_talk --eval_steps 3",
    "space": {"learning_rate": [0.001, 0.002]},
    "evaluate": "--env small_talk --episodes 8 --contexts 0 --samples 1",
}


def test_a_submitted_sweep_tells_its_progress_and_leaves_its_results(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = head
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    work = [
        sys.executable,
        "-m",
        "pipelines.tune",
        "--sweep",
        str(tmp_path / "sweep.yaml"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    refused = submit((address, environment | {"RAY_AUTH_MODE": "disabled"}), *work)
    assert refused.returncode != 0 and not (tmp_path / "out").exists()
    done = submit(head, *work)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[2/2] learning_rate=0.00" in done.stdout and "succeeded" in done.stdout
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]) == 2
    assert (tmp_path / "out" / "best" / "model.safetensors").is_file()
