"""prepare end to end on small files, on one Ray that all tests here share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from pipelines import fit_reward
from pipelines.prepare import PrepareConfig, main
from rl_dialog.cluster import scoring, shards
from rl_dialog.cluster.data import connect, pool
from rl_dialog.cluster.preparation import recipe
from rl_dialog.config import ConfigError, load_config
from rl_dialog.data.manifest_report import notes
from rl_dialog.data.schema import SPLITS, Dialog, write_jsonl
from rl_dialog.data.shards import load_manifest, read_dialogs, read_rows
from rl_dialog.data.splits import split_key
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.preferences.reply_fitting import Fitting
from rl_dialog.rewards.tfidf import TfidfSettings

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--rewards.question",
    "0.5",
    "--rewards.vote",
    "2",
    "--rewards.sentiment",
    "0",
    "--rewards.coherence",
    "0",
    "--shard_rows",
    "15",
    "--vocab_size",
    "300",
    "--validation",
    "0.1",
    "--test",
    "0.1",
    "--quiet",
]


@pytest.fixture(scope="module")
def running():
    """A Ray of this process, as a caller of `main` may have one."""
    with connect(num_cpus=2):
        yield


def talk(number):
    """A dialog of two replies; every third opening is the same, every second first reply has a vote."""
    voted = {"feedback": {"vote": 1}} if number % 2 else {}
    return Dialog(
        id=f"d{number}",
        messages=[
            {"role": "user", "content": "hello" if number % 3 == 0 else f"what about {number} ?"},
            {"role": "assistant", "content": f"tell me , how is {number} ?", **voted},
            {"role": "user", "content": "I love it" if number % 2 else "I hate it"},
            {"role": "assistant", "content": "I see", "rewards": {"learned": 0.25}},
        ],
    )


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two files: the second repeats two ids of the first; one line is broken, one holds no dialog, one nobody
    answered."""
    folder = tmp_path_factory.mktemp("logs")
    write_jsonl([talk(i) for i in range(30)], folder / "a.jsonl")
    write_jsonl([talk(i) for i in range(28, 60)], folder / "b.jsonl")
    silent = Dialog(id="silent", messages=[{"role": "user", "content": "anyone?"}]).to_json()
    with open(folder / "b.jsonl", "a", encoding="utf-8") as file:
        file.write('{"id": "cut off", "mess\n{"id": "x", "messages": []}\n' + silent + "\n")
    (folder / "README.md").write_text("About these logs.")
    return folder


@pytest.fixture(scope="module")
def prepared(running, logs, tmp_path_factory):
    """The same logs prepared twice: by one worker per stage reading both files at once, and by two reading
    one each."""
    folder = tmp_path_factory.mktemp("prepared")
    config = load_config(
        PrepareConfig,
        ["--logs", str(logs), "--output_dir", str(folder / "one"), "--num_workers", "1", *FLAGS],
    )
    headline = main(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "GROUP_BYTES", 1000)
        patch.setattr(shards, "ACTOR_DIALOGS", 10)
        main(
            load_config(
                PrepareConfig,
                ["--logs", str(logs), "--output_dir", str(folder / "two"), "--num_workers", "2", *FLAGS],
            )
        )
    assert sorted(p.name for p in folder.iterdir()) == ["one", "two"]
    return folder / "one", folder / "two", headline


@pytest.mark.slow
def test_every_record_is_a_dialog_or_counted(prepared):
    out, _, headline = prepared
    manifest = load_manifest(out)
    [source] = manifest["sources"].values()
    assert (source["dialogs"], source["replies"], source["turns"]) == (62, 124, 248)
    assert (
        (source["quarantined"], source["no_reply"])
        == (2, 1)
        == (manifest["quarantined"], manifest["no_reply"])
    )
    assert [os.path.basename(file["path"]) for file in source["files"]] == ["a.jsonl", "b.jsonl"]
    assert all(
        len(file["sha256"]) == 64 and file["bytes"] == os.path.getsize(file["path"])
        for file in source["files"]
    )
    assert ["README.md" in skip["file"] for skip in manifest["skipped"]] == [True]
    quarantine = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [set(bad) for bad in quarantine] == [{"file", "where", "reason", "source", "excerpt"}] * 2
    assert all(bad["file"].endswith("b.jsonl") for bad in quarantine)
    assert (headline["dialogs"], headline["replies"], headline["quarantined"]) == (62, 124, 2)
    assert headline["output_dir"] == str(out)


@pytest.mark.slow
def test_ids_stay_unique_and_order_is_that_of_the_files(prepared):
    out, _, _ = prepared
    ids = {split: [d.id for d in read_dialogs(out, split)] for split in SPLITS}
    flat = [name for names in ids.values() for name in names]
    assert len(flat) == len(set(flat)) == 62
    assert set(flat) == {f"d{i}" for i in range(60)} | {"d28#2", "d29#2"}
    reading = [f"d{i}" for i in range(30)] + ["d28#2", "d29#2"] + [f"d{i}" for i in range(30, 60)]
    for names in ids.values():
        assert names == [name for name in reading if name in names]
    assert load_manifest(out)["renamed_ids"] == 2


@pytest.mark.slow
def test_no_context_is_in_two_splits(prepared):
    out, _, _ = prepared
    assert load_manifest(out)["split_by"] == "first_turn"
    contexts = [{split_key(d) for d in read_dialogs(out, split)} for split in SPLITS]
    assert not (contexts[0] & contexts[1] or contexts[0] & contexts[2] or contexts[1] & contexts[2])
    assert load_manifest(out)["shared_contexts"] == 0


@pytest.mark.slow
def test_rewards_are_written_into_the_messages_and_summed_up_in_the_manifest(prepared):
    out, _, _ = prepared
    for dialog in (d for split in SPLITS for d in read_dialogs(out, split)):
        first, last = dialog.messages[1], dialog.messages[3]
        odd = int(dialog.id[1:].split("#")[0]) % 2
        assert all(-1 <= message["rewards"].pop("coherence") <= 1 for message in (first, last))
        assert first["rewards"] == {
            "question": 1.0,
            "sentiment": pytest.approx(0.6369 if odd else -0.5719),
            **({"vote": 1.0} if odd else {}),
        }
        assert first["reward"] == 0.5 + 2.0 * odd
        assert last["rewards"] == {"learned": 0.25, "question": 0.0}
        assert last["reward"] == 0.0
    rewards = load_manifest(out)["rewards"]
    assert (
        rewards["scorers"] == {"sentiment": "VADER", "coherence": "hashed words"}
        and rewards["normalisers"] == {}
    )
    assert rewards["components"]["vote"] == {
        "weight": 2.0,
        "mean": 1.0,
        "std": 0.0,
        "min": 1.0,
        "max": 1.0,
        "coverage": 0.25,
    }
    assert rewards["components"]["question"]["mean"] == 0.5
    assert rewards["sum"]["mean"] == pytest.approx((31 * 0.5 + 31 * 2.5) / 124)
    assert rewards["correlation"]["question"]["question"] == pytest.approx(1.0)
    assert rewards["correlation"]["vote"]["sum"] is None


@pytest.fixture(scope="module")
def voted(running, tmp_path_factory):
    """prepare(name, flags): forty dialogs with one opening; their first replies get votes 1, -1, none, 0."""
    folder = tmp_path_factory.mktemp("voted")
    (folder / "logs").mkdir()

    def dialog(i):
        vote = (1, -1, None, 0)[i % 4]
        first = {"role": "assistant", "content": f"number {i} ?"}
        first |= {} if vote is None else {"feedback": {"vote": vote}}
        turns = [("user", "hello"), ("user", f"again {i}"), ("assistant", "I see")]
        hello, again, last = ({"role": role, "content": text} for role, text in turns)
        return Dialog(f"d{i}", [hello, first, again, last])

    write_jsonl([dialog(i) for i in range(40)], folder / "logs" / "a.jsonl")

    def prepare(name, *flags):
        paths = ["--logs", str(folder / "logs"), "--output_dir", str(folder / name)]
        usual = ["--vocab_size", "300", "--quiet", "--rewards.vote", "2"]
        headline = main(load_config(PrepareConfig, [*paths, *usual, *flags]))
        dialogs = [dialog for split in SPLITS for dialog in read_dialogs(folder / name, split)]
        rows = [row for split in SPLITS for row in read_rows(folder / name, split)]
        return folder / name, headline, dialogs, rows

    return prepare


@pytest.mark.slow
def test_what_nobody_rated_has_no_reward_from_the_log_to_the_rows(voted):
    """30 of 80 replies have a vote. Messages hold null, rows NaN, the manifest the share that is known."""
    out, headline, dialogs, rows = voted("plain")
    known = {0: 2.0, 1: -2.0, 2: None, 3: 0.0}
    for dialog, row in zip(dialogs, rows, strict=True):
        expected = [known[int(dialog.id[1:]) % 4], None]
        assert [dialog.messages[i]["reward"] for i in dialog.replies] == expected
        np.testing.assert_array_equal(row.rewards, np.array(expected, float))
    manifest = load_manifest(out)
    std = pytest.approx(2 * np.std([1, -1, 0]))
    assert manifest["rewards"]["sum"] == {"mean": 0.0, "std": std, "min": -2.0, "max": 2.0, "coverage": 0.375}
    assert headline["reward"] == {"mean": 0.0, "std": std, "coverage": 0.375}
    assert "50 of 80 replies have no reward: no component with a weight applies" in notes(manifest)


@pytest.mark.slow
def test_normalised_rewards_are_missing_where_raw_ones_are(voted):
    out, headline, dialogs, _ = voted("scaled", "--normalise", "zscore")
    found = {dialog.id: [dialog.messages[i]["reward"] for i in dialog.replies] for dialog in dialogs}
    assert [found["d2"], found["d1"][1], found["d3"][1]] == [[None, None], None, None]
    assert found["d0"][0] > found["d3"][0] > found["d1"][0]
    assert load_manifest(out)["rewards"]["sum"]["coverage"] == headline["reward"]["coverage"] == 0.375


@pytest.mark.slow
def test_a_component_without_a_weight_changes_no_pair(voted):
    """`question` applies to every reply, and adds 0 to it."""
    found = []
    for name, more in (("pairs", []), ("reported", ["--rewards.question", "0", "--report"])):
        out, _, dialogs, rows = voted(name, "--pairs", *more)
        pairs = {split: (out / "pairs" / f"{split}.jsonl").read_text() for split in SPLITS}
        found.append((pairs, [[d.messages[i]["reward"] for i in d.replies] for d in dialogs]))
    assert found[0] == found[1] and found[0][0]["train"]
    assert "62.5% of the replies have no reward" in (out / "report" / "report.md").read_text()
    assert np.isnan(np.concatenate([row.rewards for row in rows])).sum() == 50


@pytest.mark.slow
def test_rewards_are_normalised_by_the_training_split_and_later_logs_by_the_same(
    prepared, running, logs, tmp_path
):
    """Components stay raw; the reward is -2 z(sentiment) + 0.5 rank(question) + vote, z and rank by hand from
    the training replies."""
    flags = [
        "-r",
        "sentiment",
        "reward_question",
        "manual_ratings",
        "-w",
        "-2",
        "0.5",
        "1",
        "--shard_rows",
        "15",
        "--vocab_size",
        "300",
        "--quiet",
    ]
    fitted, later = tmp_path / "fitted", tmp_path / "later"
    headline = main(
        load_config(
            PrepareConfig,
            [
                "--logs",
                str(logs),
                "--output_dir",
                str(fitted),
                *flags,
                "--normalise",
                "zscore",
                "question=rank",
                "vote=none",
            ],
        )
    )
    messages = {
        split: [m for d in read_dialogs(fitted, split) for m in (d.messages[i] for i in d.replies)]
        for split in SPLITS
    }
    felt = np.array([m["rewards"]["sentiment"] for m in messages["train"] if "sentiment" in m["rewards"]])
    asked = np.array([m["rewards"]["question"] for m in messages["train"]])
    totals = []
    for message in (m for split in SPLITS for m in messages[split]):
        given = message["rewards"]
        rank = ((asked < given["question"]).sum() + (asked == given["question"]).sum() / 2) / len(asked)
        z = (given["sentiment"] - felt.mean()) / felt.std() if "sentiment" in given else 0.0
        assert message["reward"] == pytest.approx(-2 * z + 0.5 * rank + given.get("vote", 0), abs=1e-6)
        totals.append(message["reward"])
    manifest = load_manifest(fitted)["rewards"]
    assert set(manifest["normalisers"]) == {"sentiment", "question"} and "sum" not in manifest["correlation"]
    assert (
        manifest["sum"]["mean"] == pytest.approx(np.mean(totals)) == pytest.approx(headline["reward"]["mean"])
    )
    assert manifest["sum"]["max"] == pytest.approx(np.max(totals))
    rows = [row for split in SPLITS for row in read_rows(fitted, split)]
    assert sorted(float(r) for row in rows for r in row.rewards) == pytest.approx(sorted(totals), abs=1e-6)

    write_jsonl([talk(1)], tmp_path / "one.jsonl")
    main(
        load_config(
            PrepareConfig,
            [
                "--logs",
                str(tmp_path / "one.jsonl"),
                "--output_dir",
                str(later),
                *flags,
                "--normalisers",
                str(fitted),
                "--report",
            ],
        )
    )
    known = {d.id: d for split in SPLITS for d in read_dialogs(fitted, split)}["d1"]
    [again] = read_dialogs(later, "train")
    assert [m.get("reward") for m in again.messages] == [m.get("reward") for m in known.messages]
    assert load_manifest(later)["rewards"]["normalisers"] == manifest["normalisers"]
    report = (later / "report" / "report.md").read_text()
    titles = ["Components", "Distributions", "Hacks", "Examples"]
    assert [
        line[3:] for line in report.splitlines() if line.startswith("## ")
    ] == titles  # one dialog: nothing correlates, one vote
    assert "question falls for: always asks" not in report  # its first reply asks already
    assert (later / "report" / "report.html").stat().st_size > 10_000
    for wrong, message in (
        (["--normalisers", str(fitted), "--normalise", "zscore"], "got both"),
        (["--normalisers", str(prepared[0])], "that was prepared with --normalise"),
    ):
        with pytest.raises(UserError, match=message):
            main(
                load_config(
                    PrepareConfig, ["--logs", str(logs), "--output_dir", str(tmp_path / "x"), *flags, *wrong]
                )
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["words", "fine-tuned"])
def test_a_scorer_is_fitted_to_labelled_replies(prepared, running, tmp_path, kind, tokenizer):
    """Which replies ask a question can be told from their words."""
    out, _, _ = prepared
    scorer, more = tmp_path / "asks", {"model_name_or_path": "tfidf", "tfidf": TfidfSettings(max_share=1.0)}
    if kind == "fine-tuned":
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(
            GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_head=2, n_embd=16)
        ).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        more = {
            "model_name_or_path": str(tmp_path / "base"),
            "reads": "reply",
            "fitting": Fitting(learning_rate=1e-2, epochs=8),
        }
    settings = {"data": str(out), "objective": "ratings", "quiet": True} | more
    done = fit_reward.main(fit_reward.FitRewardConfig(output_dir=str(scorer), reward="question", **settings))
    assert done["good"] * 2 == done["ratings"] and done["auc"] == [1.0, 0.75, 1.0]
    write_jsonl([talk(1)], tmp_path / "one.jsonl")
    flags = [
        "--logs",
        str(tmp_path / "one.jsonl"),
        "--output_dir",
        str(tmp_path / "out"),
        "--vocab_size",
        "300",
        "--quiet",
    ]
    flags += [
        "--rewards.toxicity",
        "1",
        "--rewards.learned",
        "0",
        "--scorers",
        f"toxicity={scorer}",
        f"reward_model={scorer}",
    ]
    main(load_config(PrepareConfig, flags))
    [dialog] = (dialog for split in SPLITS for dialog in read_dialogs(tmp_path / "out", split))
    asks, tells = (dialog.messages[i]["reward"] for i in dialog.replies)
    assert -1 <= asks < -0.7 and -0.3 < tells <= 0
    log_odds = [dialog.messages[i]["rewards"]["learned"] for i in dialog.replies]
    assert (1 / (1 + np.exp(-np.array(log_odds)))).tolist() == pytest.approx([-asks, -tells], abs=1e-5)
    assert load_manifest(tmp_path / "out")["rewards"]["scorers"] == {
        "toxicity": str(scorer),
        "learned": str(scorer),
    }
    with pytest.raises(
        UserError, match="--reward votes: expected one of vote, sentiment, question, coherence, with which"
    ):
        fit_reward.main(fit_reward.FitRewardConfig(output_dir=str(scorer), reward="votes", **settings))


@pytest.mark.slow
def test_pairs_are_written_for_every_split(running, tmp_path):
    """Two votes on two replies to one question; the files are logs that prepare reads."""
    said = [("yes", 1), ("no", -1), ("maybe", 0)]
    dialogs = [
        Dialog(
            id=text,
            messages=[
                {"role": "user", "content": "well?"},
                {"role": "assistant", "content": text, "feedback": {"vote": vote}},
            ],
        )
        for text, vote in said
    ]
    write_jsonl(dialogs, tmp_path / "a.jsonl")
    flags = ["--vocab_size", "300", "--quiet", "--validation", "0", "--test", "0"]
    main(
        load_config(
            PrepareConfig,
            [
                "--logs",
                str(tmp_path / "a.jsonl"),
                "--output_dir",
                str(tmp_path / "out"),
                "--rewards.vote",
                "1",
                "--pairs",
                *flags,
            ],
        )
    )
    pairs = [
        json.loads(line) for line in (tmp_path / "out" / "pairs" / "train.jsonl").read_text().splitlines()
    ]
    assert [(p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in pairs] == [
        ("yes", "no"),
        ("yes", "maybe"),
        ("maybe", "no"),
    ]
    assert (tmp_path / "out" / "pairs" / "test.jsonl").read_text() == ""
    main(
        load_config(
            PrepareConfig,
            ["--logs", str(tmp_path / "out" / "pairs"), "--output_dir", str(tmp_path / "again"), *flags],
        )
    )
    assert sum(len(d.replies) for d in read_dialogs(tmp_path / "again", "train")) == 6


@pytest.mark.slow
def test_what_costs_first_and_pays_later_is_the_better_reply_of_a_pair(running, tmp_path):
    """Asking costs 1 and leads to 5. By default that counts, as it does for dpo."""
    talks = {
        "ask": [("hello", "what may it cost?", -1), ("100", "sold", 5)],
        "offer": [("hello", "take this one", 0), ("no", "as you like", 0)],
    }
    dialogs = [
        Dialog(
            id=name,
            messages=[
                message
                for asked, answered, reward in turns
                for message in (
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": answered, "reward": reward},
                )
            ],
        )
        for name, turns in talks.items()
    ]
    write_jsonl(dialogs, tmp_path / "a.jsonl")
    flags = ["--pairs", "--vocab_size", "300", "--quiet", "--validation", "0", "--test", "0"]
    better = {}
    for by, more in (("to_go", []), ("reply", ["--pairs_by", "reply"])):
        out = ["--logs", str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path / by)]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            main(load_config(PrepareConfig, [*out, *flags, *more]))
        told = [text for w in warned if "--pairs judges by to_go" in (text := str(w.message))]
        assert len(told) == (by == "to_go") and all("--pairs_by says otherwise" in text for text in told)
        pairs = (tmp_path / by / "pairs" / "train.jsonl").read_text().splitlines()
        better[by] = [json.loads(line)["chosen"][0]["content"] for line in pairs]
    assert better == {"to_go": ["what may it cost?"], "reply": ["take this one"]}


@pytest.mark.slow
def test_the_2019_columns_are_normalised_over_the_whole_file(running, tmp_path):
    """Laughs 2, 0, 0 and 4, 0 (letters "ha", the last reply 0): z over the five, population std."""
    texts = (("hi", "a", "what do you have", "b", "so", "c"), ("hello", "a", "hahahahaha", "b"))
    dialogs = [
        Dialog(
            id=f"d{n}",
            messages=[
                {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talked)
            ],
        )
        for n, talked in enumerate(texts)
    ]
    write_jsonl(dialogs, tmp_path / "a.jsonl")
    flags = [
        "--logs",
        str(tmp_path / "a.jsonl"),
        "--output_dir",
        str(tmp_path / "out"),
        "--vocab_size",
        "300",
        "--quiet",
        "--validation",
        "0",
        "--test",
        "0",
    ]
    main(load_config(PrepareConfig, [*flags, "-r", "reward_user_ha", "--compat", "2019"]))
    laughs = np.array([2, 0, 0, 4, 0])
    expected = ((laughs - laughs.mean()) / laughs.std()).tolist()
    assert [
        d.messages[i]["reward"] for d in read_dialogs(tmp_path / "out", "train") for i in d.replies
    ] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("dialogs", [3, 9], ids=["that works", "that fails"])
def test_a_reward_of_one_s_own_runs_in_the_workers(dialogs, tmp_path):
    (tmp_path / "own_reward_of_a_test.py").write_text(
        "def length(dialog):\n    return [len(dialog.messages[i]['content']) / (dialog.id != 'd7') for i in "
        "dialog.replies]\n"
    )
    flags = ["--rewards.own_reward_of_a_test:length", "2", "--vocab_size", "300", "--quiet"]
    write_jsonl([talk(i) for i in range(dialogs)], tmp_path / "logs.jsonl")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT)
    }  # the folder where the command starts is on the path by itself
    command = [
        sys.executable,
        "-m",
        "pipelines.prepare",
        "--logs",
        "logs.jsonl",
        "--output_dir",
        "out",
        *flags,
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    if dialogs == 3:
        assert done.returncode == 0, done.stderr
        read = [dialog for split in SPLITS for dialog in read_dialogs(tmp_path / "out", split)]
        assert len(read) == 3 and all(
            d.messages[i]["reward"] == 2 * len(d.messages[i]["content"]) for d in read for i in d.replies
        )
        return
    assert done.returncode == 2
    assert "reward 'own_reward_of_a_test:length', dialog 'd7': ZeroDivisionError" in " ".join(
        done.stderr.split()
    )


@pytest.mark.slow
def test_token_rows_decode_to_the_rendered_dialogs(prepared):
    out, _, _ = prepared
    tokenizer = load_tokenizer(out / "tokenizer")
    for split in SPLITS:
        dialogs, rows = list(read_dialogs(out, split)), list(read_rows(out, split))
        assert len(rows) == load_manifest(out)["splits"][split]["rows"] == len(dialogs)
        for dialog, row in zip(dialogs, rows, strict=True):
            assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(
                dialog.messages, tokenize=False
            )
            assert (
                tokenizer.decode(row.input_ids[row.assistant])
                == f"{dialog.messages[1]['content']}<|end|>I see<|end|>"
            )
            assert row.rewards.tolist() == [dialog.messages[1]["reward"], dialog.messages[3]["reward"]]


@pytest.mark.slow
def test_the_shards_do_not_depend_on_the_number_of_workers(prepared):
    one, two, _ = prepared
    names = sorted(
        str(p.relative_to(one))
        for p in one.rglob("*")
        if p.is_file() and p.name not in ("manifest.json", "prepare.yaml")
    )
    assert names == sorted(
        str(p.relative_to(two))
        for p in two.rglob("*")
        if p.is_file() and p.name not in ("manifest.json", "prepare.yaml")
    )
    assert sum(name.startswith("train-") for name in names) == 4  # 55 dialogs or so, 15 a shard
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    same = ("sources", "skipped", "splits", "rewards", "tokenizer", "renamed_ids")
    assert [load_manifest(one)[key] for key in same] == [load_manifest(two)[key] for key in same]


@pytest.mark.slow
def test_the_saved_config_reads_back(prepared):
    out, _, _ = prepared
    config = load_config(PrepareConfig, ["--config", str(out / "prepare.yaml")])
    assert (config.output_dir, config.shard_rows, config.rewards["vote"], config.rewards["logged"]) == (
        str(out),
        15,
        2.0,
        None,
    )


@pytest.mark.slow
def test_logs_without_a_single_reply_are_an_error_that_counts_them(running, tmp_path):
    write_jsonl(
        [Dialog(id=str(i), messages=[{"role": "user", "content": "hi"}]) for i in range(3)],
        tmp_path / "silent.jsonl",
    )
    with pytest.raises(
        UserError,
        match="at least one dialog with an assistant reply, got 3 without a reply and 0 quarantined",
    ):
        main(
            PrepareConfig(
                logs=(str(tmp_path / "silent.jsonl"),), output_dir=str(tmp_path / "out"), quiet=True
            )
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logs": ()}, "expected --logs: files, folders or stores with logs"),
        ({"output_dir": ""}, "expected --output_dir: a directory to write"),
        ({"logs": ("nowhere.jsonl",)}, "nowhere.jsonl"),
        ({"split": "random"}, "expected --split hash or declared, got 'random'"),
        ({"validation": 0.6, "test": 0.5}, "validation [+] test < 1"),
        ({"rewards": {"vote": float("nan")}}, "a finite weight for --rewards.vote"),
        ({"shard_rows": 0}, "expected --shard_rows of at least 1, got 0"),
        ({"num_workers": 0}, "expected --num_workers of at least 1, got 0"),
        ({"tokenizer": "./nowhere"}, "./nowhere: expected a directory with a model"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    logs, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr("pipelines.prepare.connect", None)
    with pytest.raises(UserError, match=message):
        main(
            PrepareConfig(
                **{"logs": (str(logs),), "output_dir": str(tmp_path / "out"), "quiet": True, **changes}
            )
        )


def test_a_rating_that_no_conversation_has_is_refused_with_those_that_are_there(running, tmp_path):
    rated = [
        Dialog(id=str(i), messages=talk(i).messages, meta={"ratings": {"quality": 1 + i % 5}})
        for i in range(20)
    ]
    write_jsonl(rated, tmp_path / "logs.jsonl")
    flags = ["--logs", str(tmp_path / "logs.jsonl"), "--output_dir", str(tmp_path / "out"), "--quiet"]
    reading = load_config(PrepareConfig, [*flags, "--rewards.rating", "1", "--rating", "qualty"])
    with pytest.raises(UserError, match="qualty: .* rated by quality. Did you mean quality?"):
        main(reading)
    assert not (tmp_path / "out").exists()
    assert main(replace(reading, rating="quality", vocab_size=300))["dialogs"] == 20
    with pytest.raises(UserError, match="--rating quality: expected --rewards.rating WEIGHT too"):
        main(load_config(PrepareConfig, [*flags, "--rewards.vote", "1", "--rating", "quality"]))


def test_logs_of_exactly_one_group_have_one_scorer(running, logs, tmp_path, monkeypatch):
    """Reading and scoring are one operator there: a second actor never gets anything, and Ray warns of it."""
    asked = []
    monkeypatch.setattr(scoring, "GROUP_BYTES", sum(path.stat().st_size for path in logs.glob("*.jsonl")))
    monkeypatch.setattr(scoring, "pool", lambda most, work: asked.append(work) or pool(most, work))
    main(load_config(PrepareConfig, ["--logs", str(logs), "--output_dir", str(tmp_path / "out"), *FLAGS]))
    assert asked == [1]


def test_an_unknown_reward_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown flag --rewards\.votes.* Did you mean --rewards\.vote\?"):
        load_config(PrepareConfig, ["--logs", "x", "--output_dir", "y", "--rewards.votes", "1"])


@pytest.mark.slow
def test_a_context_that_many_dialogs_share_is_mentioned(tmp_path, running):
    reply = {"role": "assistant", "content": "yes"}
    dialogs = [
        Dialog(str(i), [{"role": "user", "content": "hi" if i < 20 else f"question {i}"}, reply])
        for i in range(60)
    ]
    write_jsonl(dialogs, tmp_path / "logs.jsonl")
    main(
        load_config(
            PrepareConfig,
            [
                "--logs",
                str(tmp_path / "logs.jsonl"),
                "--output_dir",
                str(tmp_path / "out"),
                "--quiet",
                "--vocab_size",
                "300",
            ],
        )
    )
    manifest = load_manifest(tmp_path / "out")
    assert manifest["largest_context"] == pytest.approx(1 / 3, abs=1e-4)
    assert any("33% of the dialogs share their first user turn" in note for note in notes(manifest))


def game(number, opening="Which way?"):
    """One of many dialogs that begin alike; what it earns depends on its number."""
    moves = ("north", "south", "east", "west")
    messages = [{"role": "user", "content": opening}]
    for turn in range(3):
        said = {"role": "assistant", "content": moves[number // 4**turn % 4], "reward": float(number % 5)}
        messages += [said, {"role": "user", "content": f"You see {number}."}]
    return Dialog(id=f"game {number}", messages=messages[:-1])


@pytest.mark.slow
def test_dialogs_that_all_begin_alike_are_split_one_by_one(running, tmp_path, monkeypatch, capsys):
    """By default as with --split_by dialog, to the last figure, over several chunks."""
    monkeypatch.setattr(scoring, "GROUP_BYTES", 20_000)
    for part in range(3):
        (tmp_path / "logs").mkdir(exist_ok=True)
        write_jsonl([game(100 * part + i) for i in range(100)], tmp_path / "logs" / f"{part}.jsonl")
    flags = ["--logs", str(tmp_path / "logs"), "--vocab_size", "300"]
    flags += ["--rewards.logged", "1", "--normalise", "rank"]
    told, manifests = {}, {}
    for by in ("auto", "dialog", "first_turn"):
        out = tmp_path / by
        headline = main(load_config(PrepareConfig, [*flags, "--output_dir", str(out), "--split_by", by]))
        told[by], manifests[by] = capsys.readouterr().out, load_manifest(out)
        expected = "first_turn" if by == "first_turn" else "dialog"
        assert headline["split_by"] == manifests[by]["split_by"] == expected
    for split in SPLITS:
        found = list(read_dialogs(tmp_path / "auto", split))
        assert found == list(read_dialogs(tmp_path / "dialog", split)) and found
        assert {dialog.split for dialog in found} == {split}
    for key in ("splits", "rewards", "tokenizer", "shared_contexts"):
        assert manifests["auto"][key] == manifests["dialog"][key]
    why = "by their first user turns the 300 dialogs would be 300 in train, 0 in validation, 0 in test"
    assert manifests["auto"]["split_why"] == why and why in " ".join(told["auto"].split())
    assert manifests["dialog"]["split_why"] == manifests["first_turn"]["split_why"] == ""
    assert manifests["first_turn"]["splits"]["train"]["dialogs"] == 300
    assert "no dialog fell into validation" in told["first_turn"] and "fell into" not in told["auto"]


@pytest.mark.slow
def test_what_stays_empty_either_way_is_split_by_first_turn(running, tmp_path):
    """Copies of one dialog are on one side by any key; contexts that differ need no other one."""
    for name, dialogs in (("copies", [game(1)] * 80), ("apart", [game(i, f"maze {i}") for i in range(80)])):
        write_jsonl(dialogs, tmp_path / f"{name}.jsonl")
        flags = ["--logs", str(tmp_path / f"{name}.jsonl"), "--output_dir", str(tmp_path / name)]
        main(load_config(PrepareConfig, [*flags, "--vocab_size", "300", "--quiet"]))
        assert load_manifest(tmp_path / name)["split_by"] == "first_turn"


def test_what_is_half_done_by_a_reader_or_a_reward_that_changed_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("our_reader", "our_reward"):
        (tmp_path / f"{name}.py").write_text("def ours(*_): ...\n")

    config = PrepareConfig(reader="our_reader:ours")
    weights = {"our_reward:ours": 1.0, "vote": 1.0}
    recipes = {recipe(config, [], weights)}
    for name in ("our_reader", "our_reward"):
        (tmp_path / f"{name}.py").write_text("def ours(*_): ...  # another\n")
        recipes.add(recipe(config, [], weights))
    assert len(recipes) == 3


# At the end of the file: Ray Data keeps the CPUs of a pass that failed for a while, and the next one waits.


@pytest.mark.slow
def test_a_strict_run_stops_with_file_and_line_and_leaves_nothing(running, logs, tmp_path):
    with pytest.raises(UserError, match=r"b\.jsonl:.*33.*a strict run stops"):
        main(PrepareConfig(logs=(str(logs),), output_dir=str(tmp_path / "out"), strict=True, quiet=True))
    assert list(tmp_path.iterdir()) == []
    assert ray.is_initialized()


@pytest.mark.slow
def test_a_template_that_cannot_be_masked_is_an_error_that_says_so(running, logs, tmp_path, tokenizer):
    broken = tmp_path / "broken"
    tokenizer.save_pretrained(broken)
    (broken / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(UserError, match="the chat template changes earlier text when message 1 is added"):
        main(
            PrepareConfig(
                logs=(str(logs / "a.jsonl"),),
                output_dir=str(tmp_path / "out"),
                tokenizer=str(broken),
                quiet=True,
            )
        )
    assert not (tmp_path / "out").exists()
