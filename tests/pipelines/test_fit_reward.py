"""`fit_reward` as a user runs it: from every source, judged on what it did not see."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipelines import fit_reward
from pipelines.fit_reward import FitRewardConfig, main
from rl_dialog.config import load_config
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation import reply_judges
from rl_dialog.evaluation.reply_judges import MODEL
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.replies import Preferences, Rating, ReplyPair, group_of
from rl_dialog.preferences.reply_fitting import Fitting
from rl_dialog.preferences.reply_reward import divisions, read_labels
from rl_dialog.preferences.segments import Reply

DATA = (
    Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data"))
    / "taskmaster4"
    / "reward"
)
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 330, "max_length": 64, "quiet": True}
FAST = Fitting(learning_rate=5e-3, epochs=5)


def rated(count):
    """Two good and two bad replies to each context: the good ones say "sure", the bad ones are as long. In
    one context of eight it is the other way round, so that no judge can be right in more than 7 / 8."""
    rng = random.Random(0)
    for n in range(count):
        for k in range(4):
            text = (
                f"{rng.choice('abcdefgh')} {'sure' if (k % 2 == 1) != (n % 8 == 0) else 'hmpf'} "
                f"{rng.choice('abcdefgh')} {'wx'[k // 2]}"
            )
            context = [{"role": "user", "content": f"what about {n}?"}]
            yield Dialog(
                f"{n}:{k}",
                [
                    *context,
                    {
                        "role": "assistant",
                        "content": text,
                        "reward": float(k % 2),
                        "feedback": {"vote": 2 * (k % 2) - 1},
                    },
                ],
            )


@pytest.fixture
def logs(tmp_path):
    write_jsonl(rated(40), tmp_path / "logs.jsonl")
    return str(tmp_path / "logs.jsonl")


@pytest.fixture
def trl(tmp_path):
    """TRL's preferences, standard and conversational."""
    rows = []
    for n in range(40):
        good, bad = f"sure {n % 7}", f"hmpf {n % 5}"
        rows.append({"prompt": f"what about {n}?", "chosen": good, "rejected": bad})
        talk = {"prompt": [{"role": "user", "content": f"and {n}?"}]}
        rows.append(
            talk
            | {
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
            }
        )
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "pairs.jsonl")


@pytest.mark.parametrize("objective", ["pairs", "ratings", "both"])
def test_it_learns_what_is_good_from_rated_replies(logs, tmp_path, objective):
    found = main(
        FitRewardConfig(
            logs=(logs,),
            output_dir=str(tmp_path / "model"),
            folds=2,
            objective=objective,
            fitting=FAST,
            **SMALL,
        )
    )
    assert (found["pairs"], found["ratings"], found["conversations"], found["held_out_pairs"]) == (
        160,
        160,
        40,
        160,
    )
    assert (
        0.8 < found["accuracy"][0] <= 0.875 and found["accuracy"][1] > 0.6 and found["chosen_good"][0] > 0.8
    )
    assert found["random_good"][0] == 0.5 and found["tie_share"][0] == 0 and found["calibration_error"] < 0.3
    assert ("auc" in found) == (
        objective != "pairs"
    )  # scores that pairs alone have fixed have no common zero
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())["held_out"]
    assert set(metrics["judges"]) == {MODEL, "longer reply", "words of the reply"}
    assert (
        metrics["judges"]["longer reply"]["accuracy"][0] == 0.5
        and metrics["advantage"]["longer reply"]["accuracy"][1] > 0
    )
    assert (
        metrics["judges"]["words of the reply"]["accuracy"][0] > 0.8
        and metrics["judges"]["longer reply"].get("loss") is None
    )
    close = found["not_surely_better_than"]
    assert "longer reply" not in close
    card = (tmp_path / "model" / "README.md").read_text()
    assert ("not surely better than: words of the reply" in card) == ("words of the reply" in close)
    assert "what it was not fitted to" not in (tmp_path / "model" / "README.md").read_text()
    reward = TextReward.from_pretrained(tmp_path / "model")
    question = [{"role": "user", "content": "what about 77?"}]
    good, bad = reward.score(
        [[*question, {"role": "assistant", "content": f"a {said} b"}] for said in ("sure", "hmpf")]
    )
    assert good > bad


def test_it_learns_from_preferences_of_trl(trl, tmp_path):
    found = main(
        FitRewardConfig(
            logs=(trl,), output_dir=str(tmp_path / "model"), validation=0.3, fitting=FAST, **SMALL
        )
    )
    assert found["pairs"] + found["held_out_pairs"] == 80 and 10 < found["held_out_pairs"] < 40
    assert found["accuracy"][0] > 0.9


def test_votes_are_labels_too(logs, tmp_path):
    labels = read_labels(FitRewardConfig(logs=(logs,), reward="vote"))
    assert len(labels.pairs) == 160 and {rating.value for rating in labels.ratings} == {-1.0, 1.0}


def test_nothing_of_a_conversation_is_on_both_sides(logs):
    """Also where its later contexts are longer, and whatever splits their replies came with."""
    labels = read_labels(FitRewardConfig(logs=(logs,)))
    longer = [
        Reply(
            [*r.reply.context, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}], "z"
        )
        for r in labels.ratings
    ]
    stray = ReplyPair(*(Reply(labels.ratings[0].reply.context, text, {"split": "test"}) for text in "pq"))
    labels = Preferences([*labels.pairs, stray], [*labels.ratings, *(Rating(reply, 1.0) for reply in longer)])
    for settings in ({"folds": 5}, {"validation": 0.3}):
        held_out = []
        for train, test in divisions(labels, FitRewardConfig(**settings)):
            assert not {group_of(reply) for reply in train.replies} & {
                group_of(reply) for reply in test.replies
            }
            assert len(train.pairs) + len(test.pairs) == 161 and train.pairs and test.pairs
            held_out += [pair.first.id for pair in test.pairs]
        assert len(held_out) == (161 if settings.get("folds") else len(test.pairs))


def test_a_policy_and_its_likelihood(logs, checkpoints, tmp_path, monkeypatch):
    """The base is the policy's trunk with a new head, and its likelihood is one of the judges, for which it
    is opened once, whatever `folds` says."""
    opened, load = [], fit_reward.load_for_decoding
    for module in (fit_reward, reply_judges):
        noting = lambda path: opened.append(path) or load(path)  # noqa: E731
        monkeypatch.setattr(module, "load_for_decoding", noting, raising=False)
    settings = SMALL | {"model_name_or_path": checkpoints["bc"], "checkpoint": checkpoints["bc"]}
    main(
        FitRewardConfig(
            logs=(logs,), output_dir=str(tmp_path / "model"), fitting=Fitting(epochs=0.2), **settings
        )
    )
    about = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert opened == [checkpoints["bc"]]
    assert (
        about["held_out"]["judges"]["likelihood"]["accuracy"]
        and about["held_out"]["advantage"]["likelihood"]["accuracy"]
    )
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [
        "GPT2ForSequenceClassification"
    ]


def test_the_same_seed_gives_the_same_model(logs, tmp_path):
    for name in "ab":
        main(
            FitRewardConfig(logs=(logs,), output_dir=str(tmp_path / name), fitting=Fitting(epochs=1), **SMALL)
        )
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


def test_only_its_own_models_are_replaced(logs, tmp_path):
    out = tmp_path / "model"
    settings = {"logs": (logs,), "output_dir": str(out), "fitting": Fitting(epochs=0.1), **SMALL}
    main(FitRewardConfig(**settings))
    assert yaml.safe_load((out / "fit_reward.yaml").read_text())["fitting"]["epochs"] == 0.1
    with pytest.raises(UserError, match="already holds a run of `fit_reward`: pass --overwrite"):
        main(FitRewardConfig(**settings))
    main(FitRewardConfig(**settings, overwrite=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match="was not made by `fit_reward`, so it is left alone"):
        main(FitRewardConfig(**settings | {"output_dir": str(tmp_path / "mine")}))


def test_a_checkpoint_that_is_not_there_is_told_before_an_earlier_model_is_deleted(logs, tmp_path):
    out = tmp_path / "reward"
    out.mkdir()
    for name in ("fit_reward.yaml", "model.safetensors"):
        (out / name).touch()
    config = FitRewardConfig(logs=(logs,), fitting=Fitting(epochs=0.1), output_dir=str(out), **SMALL)
    with pytest.raises((UserError, OSError), match="nowhere"):
        main(replace(config, checkpoint=str(tmp_path / "nowhere"), overwrite=True))
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--logs", "LOGS"], "expected --output_dir"),
        (["--output_dir", "x"], "expected one of --run"),
        (
            ["--output_dir", "x", "--logs", "LOGS", "--model_name_or_path", "tfidf"],
            "tfidf: expected --objective ratings, got pairs",
        ),
        (["--output_dir", "x", "--logs", "LOGS", "--data", "y"], "expected one of --run"),
        (["--output_dir", "x", "--logs", "LOGS", "--labels", "sqlite:///y"], "--labels: expected --run"),
        (["--output_dir", "x", "--run", "nowhere"], "nowhere"),
        (["--output_dir", "x", "--data", "nowhere"], "expected a directory written by"),
        (
            ["--output_dir", "x", "--data", "y", "--folds", "2"],
            "a prepared directory is judged by its own splits",
        ),
        (["--output_dir", "x", "--logs", "nowhere.jsonl"], "found nothing at nowhere"),
        (["--output_dir", "x", "--logs", "LOGS", "--folds", "1"], "--folds of 0 or at least 2"),
        (["--output_dir", "x", "--logs", "LOGS", "--folds", "41"], "at least as many conversations, got 40"),
        (
            ["--output_dir", "x", "--logs", "LOGS", "--validation", "0.999"],
            "expected preferences to learn from in the train split",
        ),
        (["--output_dir", "x", "--logs", "LOGS", "--hidden_size", "50"], "multiple of 32"),
        (["--output_dir", "x", "--logs", "LOGS", "--reward", "kindness"], "unknown reward 'kindness'"),
        (
            ["--output_dir", "x", "--logs", "LOGS", "--above", "7", "--objective", "both"],
            "expected good and bad replies, got 0 good ones of 160",
        ),
        (["--output_dir", "x", "--logs", "ALONE"], "found none among 2 rated: try --objective ratings"),
        (
            ["--output_dir", "x", "--logs", "BROKEN"],
            r"broken.jsonl.*`prepare` puts such records into quarantine",
        ),
        (["--output_dir", "x", "--logs", "LOGS", "--model_name_or_path", "./nowhere"], "found nothing there"),
    ],
)
def test_mistakes_are_explained(arguments, told, logs, tmp_path, monkeypatch):
    (tmp_path / "broken.jsonl").write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": 3, "rejected": "c"}\n'
    )
    alone = [
        Dialog(
            f"{n}",
            [
                {"role": "user", "content": str(n)},
                {"role": "assistant", "content": "yes", "reward": float(n)},
            ],
        )
        for n in range(2)
    ]
    write_jsonl(alone, tmp_path / "alone.jsonl")
    monkeypatch.chdir(tmp_path)
    places = {"LOGS": logs, "ALONE": "alone.jsonl", "BROKEN": "broken.jsonl"}
    with pytest.raises(UserError, match=told):
        main(load_config(FitRewardConfig, [places.get(word, word) for word in arguments]))
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.realdata
def test_people_who_rated_coffee_orders(tmp_path):
    """Taskmaster-4: better than chance on conversations that it did not see, by the interval over
    conversations."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    flags = [
        "--logs",
        str(DATA),
        "--output_dir",
        str(tmp_path / "model"),
        "--folds",
        "2",
        "--max_length",
        "96",
        "--fitting.learning_rate",
        "3e-3",
        "--quiet",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.fit_reward", *flags], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (
        found["held_out_pairs"] > 500
        and found["accuracy"][1] > 0.5
        and found["chosen_good"][1] > found["random_good"][2]
    ), found
