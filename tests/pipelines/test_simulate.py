"""`simulate` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.multiwoz import Options
from pipelines.simulate import SimulateConfig, main, table
from rl_dialog.config import load_config
from rl_dialog.data.schema import read_jsonl

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data")) / "multiwoz"


def simulate(*arguments, hash_seed="0"):
    command = [sys.executable, "-m", "pipelines.simulate", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_rule_policy_in_the_generated_town(tmp_path):
    """The last line of stdout is JSON and agrees with the files."""
    done = simulate("--policy", "rule", "--episodes", 50, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    headline = json.loads(done.stdout.splitlines()[-1])
    assert headline["episodes"] == 50 and headline["success"] > 0.8 and {"complete", "book_rate", "inform_f1", "turns", "return"} <= headline.keys()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["figures"]["success"]["value"] == headline["success"] and results["transcripts"] == headline["transcripts"]
    dialogs = list(read_jsonl(tmp_path / "dialogs.jsonl"))
    assert len(dialogs) == 50 and sum(dialog.meta["outcome"]["success"] for dialog in dialogs) / 50 == headline["success"]
    turns = sum(len(dialog.replies) for dialog in dialogs) / 50
    assert turns == headline["turns"]
    other = simulate("--episodes", 50, "--out", tmp_path / "other", "--quiet", hash_seed="1")  # the order of Python's sets is another one there
    assert len(other.stdout.splitlines()) == 1 and json.loads(other.stdout)["transcripts"] == headline["transcripts"]
    again = load_config(SimulateConfig, ["--config", str(tmp_path / "simulate.yaml")])
    assert main(again)["transcripts"] == headline["transcripts"]


def test_the_number_stepped_together_changes_nothing(tmp_path):
    config = SimulateConfig(episodes=30, out=str(tmp_path), quiet=True)
    first = main(config)
    other = main(SimulateConfig(episodes=30, out=str(tmp_path), quiet=True, together=3))
    assert first["transcripts"] == other["transcripts"]
    assert main(SimulateConfig(episodes=30, out=str(tmp_path), quiet=True, seed=1))["transcripts"] != first["transcripts"]


def test_the_original_with_exceptions(tmp_path):
    config = SimulateConfig(episodes=20, out=str(tmp_path), quiet=True, original=True, options=Options(reward="user"))
    rewards = {message["reward"] for dialog in (main(config), read_jsonl(tmp_path / "dialogs.jsonl"))[1] for message in dialog.messages[1::2]}
    assert rewards <= {-1, 80, -40}  # not the 40 and 5 of the original
    per_turn = SimulateConfig(episodes=20, out=str(tmp_path), quiet=True, original=True)
    assert main(per_turn)["return"] < 80 and 40 in {m["reward"] for dialog in read_jsonl(tmp_path / "dialogs.jsonl") for m in dialog.messages[1::2]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected --out"),
        (["--out", "x", "--episodes", "0"], "expected --episodes of at least 1, got 0"),
        (["--out", "x", "--world", "nowhere"], "nowhere: expected a folder with world files, found nothing"),
        (["--out", "x", "--episode", "3"], "Did you mean --episodes"),
    ],
)
def test_mistakes_are_explained(arguments, told, tmp_path):
    with pytest.raises((ValueError, OSError), match=told.replace("(", r"\(")):
        main(load_config(SimulateConfig, arguments))


def test_the_table_leaves_out_what_does_not_apply():
    shown = table(
        {"success": {"value": 1.0, "low": None, "high": None, "dialogs": 2}, "book_rate": {"value": None, "low": None, "high": None, "dialogs": 0}}
    )
    assert "success" in shown and "book_rate" not in shown


@pytest.mark.realdata
def test_the_published_world(tmp_path):
    """The command of the README, shorter."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    found = main(SimulateConfig(world=str(DATA), out=str(tmp_path), quiet=True))
    assert found["success"] == pytest.approx(0.973, abs=0.010) and found["complete"] == pytest.approx(0.982, abs=0.010)
    assert found["book_rate"] == pytest.approx(0.99, abs=0.01) and found["inform_f1"] == pytest.approx(0.90, abs=0.015)
    assert found["turns"] == pytest.approx(4.34, abs=0.2)
