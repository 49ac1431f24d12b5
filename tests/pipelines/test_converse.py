"""`converse` as a user runs it."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from envs.multiwoz import Options
from pipelines.converse import ConverseConfig, main
from rl_dialog.config import load_config
from rl_dialog.data.schema import read_jsonl
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.methods import BC
from rl_dialog.models.checkpoint import save_policy
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy


def test_the_rule_system_in_words(tmp_path):
    """The last line of stdout is JSON and agrees with the files; words lose next to nothing against acts with
    the same goals."""
    command = [sys.executable, "-m", "pipelines.converse", "--output_dir", str(tmp_path), "--episodes", "100"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    headline = json.loads(done.stdout.splitlines()[-1])
    dialogs = list(read_jsonl(tmp_path / "dialogs.jsonl"))
    assert (
        len(dialogs) == 100
        and sum(dialog.meta["outcome"]["success"] for dialog in dialogs) / 100 == headline["success"]
    )
    assert sum(len(dialog.replies) for dialog in dialogs) / 100 == headline["turns"]
    assert (
        json.loads((tmp_path / "results.json").read_text())["figures"]["success"]["value"]
        == headline["success"]
    )
    acts = main(ConverseConfig(output_dir=str(tmp_path / "acts"), nlu="acts", episodes=100, quiet=True))
    assert (
        abs(acts["success"] - headline["success"]) <= 0.03 and not (tmp_path / "acts/dialogs.jsonl").exists()
    )
    again = load_config(ConverseConfig, ["--config", str(tmp_path / "converse.yaml"), "--quiet"])
    with pytest.raises(UserError, match="already holds a run of `converse`: pass --overwrite"):
        main(again)
    assert main(replace(again, overwrite=True))["return"] == headline["return"]


def test_logs_to_train_on(tmp_path):
    """Placeholders, notes and rewards of mixed quality."""
    found = main(
        ConverseConfig(
            output_dir=str(tmp_path),
            placeholders=True,
            mistakes=0.4,
            episodes=60,
            quiet=True,
            options=Options(reward="terminal"),
        )
    )
    dialogs = list(read_jsonl(tmp_path / "dialogs.jsonl"))
    texts = [dialog.messages[i]["content"] for dialog in dialogs for i in dialog.replies]
    assert any("[hotel_name]" in text for text in texts) and 0.2 < found["success"] < 0.95
    assert [m["role"] for m in dialogs[0].messages[:4]] == ["user", "system", "assistant", "user"]
    ends = {dialog.messages[dialog.replies[-1]]["reward"] for dialog in dialogs}
    assert ends == {80.0, -40.0}


def test_a_checkpoint_meets_the_same_users(tmp_path):
    """An untrained language model fails, the same way for any batch size, with the goals that the rule system
    gets."""
    main(ConverseConfig(output_dir=str(tmp_path / "rule"), placeholders=True, episodes=6, quiet=True))
    dialogs = list(read_jsonl(tmp_path / "rule/dialogs.jsonl"))
    tokenizer = train_tokenizer(
        (message["content"] for dialog in dialogs for message in dialog.messages), vocab_size=400
    )
    shape = ModelConfig(layers=1, width=32, attention_heads=2, context=512)
    save_policy(Policy(load_lm(shape, tokenizer), BC(), shape), tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    settings = [
        "--system",
        str(tmp_path / "lm"),
        "--episodes",
        "6",
        "--options.max_turn",
        "8",
        "--decoding.max_new_tokens",
        "8",
        "--quiet",
    ]
    one = main(
        load_config(ConverseConfig, [*settings, "--output_dir", str(tmp_path / "one"), "--batch_size", "4"])
    )
    assert one["success"] == 0 and one["turns"] == 4
    main(load_config(ConverseConfig, [*settings, "--output_dir", str(tmp_path / "other")]))
    texts = [(tmp_path / name / "dialogs.jsonl").read_text() for name in ("one", "other")]
    assert texts[0] == texts[1]
    assert [dialog.goal for dialog in read_jsonl(tmp_path / "one/dialogs.jsonl")] == [
        dialog.goal for dialog in dialogs
    ]


def test_an_earlier_run_stays_where_there_is_no_such_checkpoint(tmp_path):
    for name in ("converse.yaml", "results.json"):
        (tmp_path / name).touch()
    how = {"episodes": 2, "output_dir": str(tmp_path), "overwrite": True, "quiet": True}
    with pytest.raises(UserError, match="no such checkpoint: nowhere"):
        main(ConverseConfig(system="nowhere", **how))
    assert (tmp_path / "results.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected --output_dir"),
        (["--output_dir", "x", "--episodes", "0"], "expected --episodes of at least 1, got 0"),
        (["--output_dir", "x", "--system", "runs/none"], "runs/none"),
        (
            ["--output_dir", "x", "--system", "lm", "--mistakes", "0.1"],
            "--nlu acts, --templates auto_manual: expected with --system rule or a task policy",
        ),
        (["--output_dir", "x", "--nlu", "acts", "--placeholders"], "--nlu acts: expected without words"),
        (["--output_dir", "x", "--user_nlu", "acts"], "expected --nlu acts for both sides"),
        (
            ["--output_dir", "x", "--nlu", "nowhere"],
            "nowhere: expected a folder that `python -m pipelines.fit_nlu` wrote",
        ),
        (["--output_dir", "x", "--templates", "auto_manual"], "cannot be read backwards"),
        (["--output_dir", "x", "--mistakes", "2"], "expected noise between 0 and 1, got 2"),
    ],
)
def test_mistakes_are_explained(arguments, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, OSError), match=told):
        main(load_config(ConverseConfig, arguments))
