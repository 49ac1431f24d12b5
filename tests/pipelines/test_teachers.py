"""From logs to a chat with a hierarchical model that learned from teachers, as a user types it; and what is
told to who left something out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.small_talk import write_logs
from pipelines import evaluate, prepare, train
from rl_dialog.cluster.data import connect
from rl_dialog.config import load_config
from rl_dialog.data.shards import load_manifest, read_rows
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.methods import BC
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy

pytestmark = pytest.mark.slow  # what is said of bad input stands in tests/models/test_message_heads.py, too
ROOT = Path(__file__).parents[2]
STEPS = ["--max_steps", "2", "--eval_steps", "0"]
SIZES = ["--model.width", "16", *STEPS]
EI = ["--model.emotion_weight", "1", "--model.embedding_weight", "1"]


def call(folder: Path, verb: str, *arguments: str, typed: str = "") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"pipelines.{verb}", *arguments]
    where = {"cwd": folder, "env": environment, "input": typed, "timeout": 500}
    return subprocess.run(command, capture_output=True, text=True, **where)


def check(*arguments: str) -> None:
    train.check(load_config(train.TrainConfig, list(arguments), choices=train.CHOICES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` with both teachers and `plain` with none, of the same logs."""
    folder = tmp_path_factory.mktemp("teachers")
    write_logs(folder / "logs.jsonl", dialogs=60, seed=3)
    logs = ["--logs", "logs.jsonl", "--vocab_size", "400", "--max_length", "96", "--quiet"]
    with pytest.MonkeyPatch.context() as patch, connect(num_cpus=2):
        patch.chdir(folder)
        for name, more in (("data", ["--teachers", "emotion", "embedding"]), ("plain", [])):
            prepare.main(load_config(prepare.PrepareConfig, [*logs, "--output_dir", name, *more]))
    return folder


def test_the_columns_stand_beside_the_same_rows(folder: Path) -> None:
    teachers = load_manifest(folder / "data")["teachers"]
    assert teachers["emotion"] == {"name": "VADER", "labels": ["negative", "neutral", "positive"]}
    assert teachers["embedding"] == {"name": "hashed words", "size": 256}
    assert load_manifest(folder / "plain")["teachers"] == {}
    end = load_tokenizer(folder / "data" / "tokenizer").eos_token_id
    rows = list(read_rows(folder / "data", "train", taught=True))
    for row, plain in zip(rows, read_rows(folder / "plain", "train"), strict=True):
        assert row.input_ids.tolist() == plain.input_ids.tolist() and plain.taught is None
        assert (row.input_ids[row.taught.places] == end).all()
        assert row.taught.emotions.shape == (len(row.taught.places), 3)
        assert row.taught.embeddings.shape == (len(row.taught.places), 256)
    assert sum(len(row.taught.places) for row in rows) > len(rows)


def test_what_is_left_out_is_told_before_a_worker_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    start = ["--output_dir", "runs/x", "--model.family", "vhred", *EI]
    check("--data", "data", *start)
    with pytest.raises(
        UserError, match="got plain, prepared without teachers: run prepare again with --teach"
    ):
        check("--data", "plain", *start)
    with pytest.raises(UserError, match="expected a method that clones .*got psi: train bc first"):
        check("--data", "data", *start, "--method", "psi")
    with pytest.raises(UserError, match="unknown teacher 'emotions'.*Did you mean emotion?"):
        logs = ["--logs", "logs.jsonl", "--output_dir", "y", "--teachers", "emotions", "--quiet"]
        prepare.main(load_config(prepare.PrepareConfig, logs))
    assert not Path("y").exists()


def test_logs_to_a_chat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(
        folder, "train", "--data", "data", "--output_dir", "runs/ei", "--model.family", "vhred", *EI, *SIZES
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert metrics["eval/emotion"] > 0 and metrics["eval/embedding"] > 0
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of Ray's workers
    flags = "--checkpoints runs/ei --data data --output_dir report --contexts 4 --max_new_tokens 8 --quiet"
    evaluate.main(load_config(evaluate.EvaluateConfig, [*flags.split(), "--replicates", "50"]))
    [group] = json.loads((folder / "report" / "metrics.json").read_text())["groups"]
    expected = {
        "answer/average",
        "answer/extrema",
        "answer/greedy",
        "answer/emotion",
        "perplexity",
        "active_units",
    }
    assert expected <= group["figures"].keys()
    assert "## Answers against the log" in (folder / "report" / "report.md").read_text()
    chat = call(folder, "chat", "--checkpoint", "runs/ei", "--max_new_tokens", "8", typed="hello\nquit\n")
    assert chat.returncode == 0, chat.stderr
    # values on top of it need no teachers; cloning on does, and the same ones
    onwards = ["--data", "plain", "--model_name_or_path", "runs/ei", *STEPS]
    cloned = call(folder, "train", *onwards, "--output_dir", "runs/more")
    assert cloned.returncode != 0 and "prepare again with --teachers embedding emotion" in cloned.stderr
    psi = [*onwards, "--output_dir", "runs/psi", "--method", "psi", "--quiet"]
    assert train.main(load_config(train.TrainConfig, psi, choices=train.CHOICES))["step"] == 2


def test_going_on_needs_the_same_teachers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cloning on does; a method with values does not ask."""
    monkeypatch.chdir(folder)
    trained = load_tokenizer(folder / "data" / "tokenizer")
    model = ModelConfig(family="hred", width=16, emotion_weight=1.0, embedding_weight=1.0)
    described = load_manifest("data")["teachers"]
    Policy(load_lm(model, trained, teachers=described), BC(), model).save_pretrained("start")
    trained.save_pretrained("start")
    onwards = ["--output_dir", "runs/x", "--model_name_or_path", "start"]
    check("--data", "data", *onwards)
    check("--data", "plain", *onwards, "--method", "psi")
    with pytest.raises(
        UserError, match="learns what hashed words says .*got none in plain: run prepare again"
    ):
        check("--data", "plain", *onwards)
