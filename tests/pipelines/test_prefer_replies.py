"""`prefer_replies`: pairs out of every source into a label log, answered, exported and read again."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from transformers.utils import logging as transformers_logging

from pipelines import prefer_replies
from pipelines.fit_reward import FitRewardConfig
from pipelines.fit_reward import main as fit_reward
from pipelines.prefer_replies import PreferRepliesConfig
from rl_dialog.config import load_config
from rl_dialog.data.schema import ARROW_SCHEMA, Dialog, to_table, write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.exchange import open_labels
from rl_dialog.preferences.labels import NewQuery
from rl_dialog.preferences.reply_queries import TASK


def talk(number, text, **said):
    context = [
        {"role": "user", "content": f"what about {number}?"},
        {"role": "assistant", "content": "hm", "weight": 0},
        {"role": "user", "content": "so?"},
    ]
    return Dialog(f"{number}:{text}", [*context, {"role": "assistant", "content": text, **said}])


@pytest.fixture
def logs(tmp_path):
    """Four contexts with three rated replies each, of which the last two say the same; one with a single
    reply; one that nobody rated."""
    rated = [
        talk(n, text, reward=float(text == "yes"))
        for n in range(4)
        for text in ("yes", "no", "never", "never")
    ]
    write_jsonl(
        [*rated, talk(8, "alone", reward=1.0), talk(9, "yes"), talk(9, "no")], tmp_path / "logs.jsonl"
    )
    return tmp_path / "logs.jsonl"


def run(tmp_path, **settings):
    return prefer_replies.main(PreferRepliesConfig(output_dir=str(tmp_path / "run"), quiet=True, **settings))


def test_logs_become_questions_once(logs, tmp_path):
    found = run(tmp_path, source="logs", logs=(str(logs),))
    assert (found["added"], found["waiting"], found["labels"]) == (5, 5, 0)
    assert run(tmp_path, source="logs", logs=(str(logs),))["added"] == 0
    assert (
        run(tmp_path, source="logs", logs=(str(logs),), pairs_per_context=3)["added"] == 8
    )  # 4 x 3 + 1, of which 5 were there
    log, segments = open_labels(tmp_path / "run")
    query = log.lease("ann")
    left, right = segments[query.left], segments[query.right]
    assert query.task == TASK and left.context == right.context and left.text != right.text
    assert left.source["split"] == right.source["split"] == ("validation" if query.validation else "train")
    log.close()


def test_the_folder_is_told_from_anywhere(logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = PreferRepliesConfig(output_dir="run", source="logs", logs=(str(logs),), quiet=True)
    assert prefer_replies.main(config)["output_dir"] == str(tmp_path / "run")
    assert (tmp_path / "run" / "labels.db").is_file()


def test_the_oracle_says_what_the_log_says(logs, tmp_path):
    found = run(
        tmp_path,
        source="logs",
        logs=(str(logs),),
        pairs_per_context=3,
        oracle="logged",
        export=str(tmp_path / "pairs.jsonl"),
    )
    assert (found["answered"], found["labels"], found["ties"], found["skipped"], found["exported"]) == (
        13,
        12,
        4,
        1,
        8,
    )
    log, segments = open_labels(tmp_path / "run")
    for label in log.labels():
        first, second = segments[label.first].text, segments[label.second].text
        assert label.preference == (0.5 if "yes" not in (first, second) else float(first == "yes"))
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert Counter((row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows) == {
        ("yes", "no"): 4,
        ("yes", "never"): 4,
    }
    assert rows[0]["prompt"][-1] == {"role": "user", "content": "so?"}


def test_what_a_careless_labeller_said_first_is_not_exported(logs, tmp_path):
    """Bob is first everywhere, and wrong; ann comes later, and half of the pairs are gold, as she says."""
    run(tmp_path, source="logs", logs=(str(logs),), pairs_per_context=3)
    log, segments = open_labels(tmp_path / "run")
    log.set_plan(overlap=2)
    for name, preferred in (("bob", ("no", "never")), ("ann", ("yes",))):
        for query in log.lease_many(name, 99):
            is_left, is_right = (segments[side].text in preferred for side in (query.left, query.right))
            log.answer(query.id, name, "tie" if is_left == is_right else "left" if is_left else "right")
    decided = [one for one in log.answers() if one.labeller == "ann" and one.preference != 0.5]
    log.add_gold(NewQuery(one.first, one.second, gold=one.preference) for one in decided[::2])
    log.close()
    exported = tmp_path / "pairs.jsonl"
    assert run(tmp_path, export=str(exported))["exported"] == len(decided[1::2])
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    assert {row["chosen"][0]["content"] for row in rows} == {"yes"}


def test_what_is_exported_comes_in_again_and_is_learned(logs, tmp_path):
    run(
        tmp_path,
        source="logs",
        logs=(str(logs),),
        pairs_per_context=3,
        oracle="logged",
        export=str(tmp_path / "new" / "pairs.jsonl"),
    )
    second = tmp_path / "second"
    found = run(
        second,
        source="logs",
        logs=(str(tmp_path / "new" / "pairs.jsonl"),),
        oracle="logged",
        pairs_per_context=9,
    )
    assert (found["labels"], found["ties"]) == (
        12,
        4,
    )  # "no" against "never" is among the pairs of a context again
    settings = {"hidden_size": 32, "vocab_size": 300, "max_length": 64, "folds": 2, "quiet": True}
    from_log = fit_reward(
        FitRewardConfig(run=str(second / "run"), output_dir=str(tmp_path / "a"), **settings)
    )
    from_file = fit_reward(
        FitRewardConfig(
            logs=(str(tmp_path / "new" / "pairs.jsonl"),), output_dir=str(tmp_path / "b"), **settings
        )
    )
    assert (from_log["pairs"], from_file["pairs"], from_log["held_out_pairs"]) == (12, 8, 12)
    assert from_log["tie_share"][0] == pytest.approx(4 / 12, abs=1e-3) and from_file["tie_share"][0] == 0


def test_a_limit_of_answers_and_noise(logs, tmp_path):
    found = run(tmp_path, source="logs", logs=(str(logs),), oracle="logged", oracle_labels=2)
    assert (found["answered"], found["waiting"]) == (2, 3)
    assert run(tmp_path, oracle="logged", oracle_labels=2)["answered"] == 2
    coins = run(
        tmp_path / "b",
        source="logs",
        logs=(str(logs),),
        pairs_per_context=3,
        oracle="logged",
        oracle_noise=1.0,
    )
    assert (
        coins["ties"] == 0 and coins["skipped"] == 1
    )  # a coin knows no ties, and what cannot be judged stays so


def test_candidates_and_the_order_of_a_reward_model(tmp_path):
    """The human's reply stands among the candidates unless it is left out; the pairs that a model is least
    sure of are asked first."""
    dialogs = []
    for n in range(6):
        for text, who in (("the human's", "human"), ("one of ours", "bc:1"), ("another one", "bc:1")):
            dialog = talk(n, text, reward=0.5)
            dialog.meta, dialog.split = {"generator": who}, "train" if n else "test"
            dialogs.append(dialog)
    data(dialogs, tmp_path / "data")
    torch.manual_seed(0)
    TextReward.new(
        ["what about 012345? one of ours the human's another one"],
        hidden_size=32,
        vocab_size=300,
        max_length=64,
    ).save_pretrained(tmp_path / "m")
    settings = {"source": "candidates", "data": str(tmp_path / "data"), "reward_model": str(tmp_path / "m")}
    assert run(tmp_path, **settings, human=False)["added"] == 6
    assert run(tmp_path, **settings, pairs_per_context=3)["added"] == 12
    log, segments = open_labels(tmp_path / "run")
    reward = TextReward.from_pretrained(tmp_path / "m")
    apart = []
    while query := log.lease("ann"):
        said = [
            [*segments[id].context, {"role": "assistant", "content": segments[id].text}]
            for id in (query.first, query.second)
        ]
        one, other = reward.score(said)
        apart.append(abs(one - other))
        assert query.validation == ("what about 0?" in said[0][0]["content"])  # of the test split
    assert len(apart) == 18 and apart == pytest.approx(sorted(apart), abs=1e-5) and max(apart) > min(apart)
    log.close()


def test_two_checkpoints_answer_the_same_contexts(checkpoints, tmp_path, capfd):
    transformers_logging.enable_progress_bar()
    data([talk(n, "logged") for n in range(5)], tmp_path / "data")
    settings = {
        "source": "checkpoints",
        "data": str(tmp_path / "data"),
        "checkpoints": (checkpoints["bc"], checkpoints["ilql"]),
    }
    settings |= {"max_new_tokens": 6, "max_prompt_length": 60}
    found = run(tmp_path, **settings, contexts=4)
    assert found["added"] == 4 and "Loading" not in capfd.readouterr().err
    log, segments = open_labels(tmp_path / "run")
    while query := log.lease("ann"):
        one, other = segments[query.left], segments[query.right]
        assert {one.source["model"], other.source["model"]} == set(
            settings["checkpoints"]
        ) and one.context == other.context
    assert run(tmp_path, **settings, contexts=4)["added"] == 0  # the same seed, the same replies
    log.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected --output_dir"),
        (["--output_dir", "OUT"], "found no labels.db in it"),
        (["--output_dir", "OUT", "--source", "logs"], "expected --logs"),
        (
            ["--output_dir", "OUT", "--source", "logs", "--logs", "x", "--data", "y"],
            "--data: not used with --source logs",
        ),
        (
            ["--output_dir", "OUT", "--source", "checkpoints", "--data", "x", "--checkpoints", "a"],
            "expected two --checkpoints, got 1",
        ),
        (["--output_dir", "OUT", "--source", "logs", "--logs", "nowhere"], "found nothing at nowhere"),
        (["--output_dir", "OUT", "--source", "candidates", "--data", "nowhere"], "nowhere"),
        (
            ["--output_dir", "OUT", "--source", "candidates", "--data", "x", "--splits", "train", "dev"],
            "expected --splits among",
        ),
        (
            ["--output_dir", "OUT", "--source", "logs", "--logs", "x", "--pairs_per_context", "0"],
            "--pairs_per_context of at least 1",
        ),
        (
            ["--output_dir", "OUT", "--source", "logs", "--logs", "LOGS", "--oracle", "kindness"],
            "unknown reward 'kindness'",
        ),
        (
            [
                "--output_dir",
                "OUT",
                "--source",
                "logs",
                "--logs",
                "LOGS",
                "--oracle",
                "logged",
                "--oracle_noise",
                "2",
            ],
            "noise: expected a share",
        ),
        (["--output_dir", "OUT", "--source", "logs", "--logs", "BROKEN"], "prepare"),
    ],
)
def test_mistakes_are_explained(arguments, told, logs, tmp_path):
    (tmp_path / "broken.jsonl").write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": 3, "rejected": "c"}\n'
    )
    places = {"OUT": str(tmp_path / "run"), "LOGS": str(logs), "BROKEN": str(tmp_path / "broken.jsonl")}
    with pytest.raises(UserError, match=told):
        prefer_replies.main(load_config(PreferRepliesConfig, [places.get(word, word) for word in arguments]))


def test_no_password_is_written(logs, tmp_path, postgres_url):
    run(tmp_path, source="logs", logs=(str(logs),), labels=postgres_url, oracle="logged")
    written = (tmp_path / "run" / "prefer_replies.yaml").read_text()
    assert "postgresql" in written and "hunter2" not in written and "***" not in written


def data(dialogs, folder):
    """A data directory as prepare writes one, without tokens: dialogs in their splits."""
    import pyarrow.parquet as pq

    from rl_dialog.data.shards import FORMAT, VERSION

    folder.mkdir()
    splits = {}
    for split in ("train", "validation", "test"):
        found = [dialog for dialog in dialogs if (dialog.split or "train") == split]
        for dialog in found:
            dialog.split = split
        pq.write_table(
            to_table(found) if found else ARROW_SCHEMA.empty_table(), folder / f"{split}-00000.parquet"
        )
        splits[split] = {
            "dialogs": len(found),
            "replies": len(found),
            "shards": [{"file": f"{split}-00000.parquet", "dialogs": len(found)}],
        }
    (folder / "manifest.json").write_text(
        json.dumps({"format": FORMAT, "version": VERSION, "splits": splits, "rewards": {"components": {}}})
    )
