"""Reward models of both sides from the same pairs: what the pairs are, what is reported, and that TRL's
trainer and ours are the same where nothing is drawn."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import islice

import pytest

from pipelines.benchmark import reward_model
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.oracle_pairs import oracle_pairs, worth
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.replies import conversation_of
from rl_dialog.preferences.reply_fitting import new_reward
from rl_dialog.rewards.learned import learned
from rl_dialog.rewards.scorers import make_scorers

TRL_PYTHON = os.environ.get("RL_DIALOG_TRL_PYTHON", "")
SIZE = {"layers": 1, "width": 32, "attention_heads": 2, "vocabulary": 300, "threads": 1, "labels": 60}


def config(out, **more):
    where = {"output_dir": str(out), "quiet": True}
    return BenchmarkConfig(what="reward_model", **SIZE | where | {"seeds": 2, "epochs": 1.0} | more)


def test_the_oracle_errs_in_so_many_pairs():
    pairs = list(islice(oracle_pairs(0, 0.25), 400))
    wrong = [worth(pair.first) < worth(pair.second) for pair in pairs]
    assert not any(worth(pair.first) == worth(pair.second) for pair in pairs)
    assert 0.18 < sum(wrong) / len(wrong) < 0.32
    assert not any(worth(p.first) < worth(p.second) for p in islice(oracle_pairs(0, 0.0), 100))
    again = list(islice(oracle_pairs(0, 0.25), 400))
    assert [pair.first.id for pair in again] == [pair.first.id for pair in pairs]


def test_ours_alone_without_trl(tmp_path):
    out = tmp_path / "out"
    found = main(config(out))
    report = json.loads((out / "benchmark.json").read_text())
    names = ["plain", "the same, in 4 parts", "rl_dialog", "rl_dialog, calibrated"]
    assert list(report["figures"]["a model, from folder to folder"]) == names
    assert list(report["figures"]["processor time of its steps but the first"]) == names[:3]
    sizes = report["sizes"]
    assert sizes["pairs"] + sizes["held_out"] == 60 and sizes["steps"] == round(sizes["pairs"] / 16)
    assert list(report["models"])[:4] == names and {"longer reply", "the oracle"} <= set(report["models"])
    model = report["models"]["rl_dialog"]
    assert len(model["calibration_error"]) == 2 and set(model["advantage"]) == {"accuracy", "loss"}
    low, value, high = (model["accuracy"][i] for i in (1, 0, 2))
    assert 0 <= low < value < high <= 1
    assert TextReward.from_pretrained(out / "rl_dialog-1").reads == "conversation"
    assert report["scores_apart"] == {} and found["scores_apart"] == {}


def test_logs_and_pairs_that_are_too_long(tmp_path):
    path = tmp_path / "rated.jsonl"
    said = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n} what?"}],
            "chosen": said("a good one"),
            "rejected": said("bad " * (600 if n == 7 else 1)),
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = reward_model.task_of(config(tmp_path / "out", logs=str(path)))
    assert task.too_long == 1 and len(task.train.pairs) + len(task.test.pairs) == 39
    figures = reward_model.figures_of(task, {})
    assert "the oracle" not in figures and figures["longer reply"]["accuracy"][0] == 1.0


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"labels": 0}, {"epochs": 0.0}, {"flipped": 0.5}])
def test_numbers_that_no_run_has(wrong, tmp_path):
    with pytest.raises(UserError, match="reward_model: expected seeds, labels"):
        main(config(tmp_path, **wrong))


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON, reason="RL_DIALOG_TRL_PYTHON names no Python")
def test_with_trl_both_sides_read_the_folders_of_the_other(tmp_path):
    out = tmp_path / "out"
    main(config(out, seeds=1, trl_python=TRL_PYTHON))
    report = json.loads((out / "benchmark.json").read_text())
    assert set(report["scores_apart"]) == {reward_model.TRL, *reward_model.OURS}
    assert max(report["scores_apart"].values()) < 1e-4
    assert report["figures"]["a model, from folder to folder"][reward_model.ALIKE]["ratio"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON, reason="RL_DIALOG_TRL_PYTHON names no Python")
def test_a_model_of_trl_goes_on_learning_here_and_is_a_reward(tmp_path):
    """Where each batch has all pairs nothing is drawn, and both trainers take the same steps."""
    settings = config(tmp_path / "out", seeds=1, trl_python=TRL_PYTHON)
    task = reward_model.task_of(settings)
    every = replace(task, config=replace(settings, batch_size=len(task.train.pairs)))
    with reward_model._rival(task) as rival:
        reward_model.theirs(every, rival.ask)(0, 4)
        reward_model.ours(every, reward_model.ALIKE, noise=0.0)(0, 4)
    folders = [every.folder(name, 0) for name in (reward_model.TRL, reward_model.ALIKE)]
    talks = [conversation_of(reply) for reply in task.test.replies]
    trls, here = (TextReward.from_pretrained(folder).score(talks) for folder in folders)
    before = TextReward.from_pretrained(every.start(0)).score(talks)
    assert here == pytest.approx(trls, abs=2e-4) and here != pytest.approx(before, abs=1e-2)
    assert new_reward(task.train, folders[0], {}, 512, "conversation").score(talks) == pytest.approx(trls)
    dialog = Dialog("one", [dict(message) for message in talks[0]])
    scorers = make_scorers([f"reward_model={folders[0]}"])
    assert learned(dialog, reward_model=scorers["reward_model"])[-1] == pytest.approx(trls[0], abs=1e-4)
