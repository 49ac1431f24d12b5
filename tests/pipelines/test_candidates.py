"""candidates end to end with a tiny policy: what is written, what is used again, and that train reads it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import prepare
from pipelines.candidates import CandidatesConfig, main
from rl_dialog.cluster import candidate_folder
from rl_dialog.cluster.candidate_run import drawing_of
from rl_dialog.cluster.candidates import (
    KEY,
    Generator,
    candidate_dialog,
    is_current,
    reward_of,
    write_contexts,
)
from rl_dialog.cluster.data import connect
from rl_dialog.config import load_config
from rl_dialog.data.schema import SPLITS, Dialog, write_jsonl
from rl_dialog.data.shards import load_manifest, read_dialogs, read_rows
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, METHODS
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.text_reward import TextReward
from rl_dialog.rewards.similarity import token_f1
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.holding import Hold

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running():
    with connect(num_cpus=2):
        yield


def save_policy(folder, tokenizer, seed=0):
    torch.manual_seed(seed)
    config = ModelConfig(layers=1, attention_heads=2, width=32, context=128)
    policy = Policy(load_lm(config, tokenizer), BC(), config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if "wte" in name else 0.3))
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talk(number):
    """Four replies: the opening of a conversation, one never trained on, one of two lines, and the last
    behind a context too long for a row."""
    return Dialog(
        id=f"d{number}",
        messages=[
            {"role": "assistant", "content": "hello there", "reward": 0.3},
            {"role": "user", "content": f"what about {number} ?"},
            {"role": "assistant", "content": "let me see", "weight": 0},
            {
                "role": "assistant",
                "content": f"thank you,\nthat is {number}",
                "feedback": {"vote": 1},
                "reward": 1.0,
            },
            {"role": "user", "content": "how are you? " * 40},
            {"role": "assistant", "content": "thank you , that is all"},
        ],
        source="talk",
        goal={"number": number},
        meta={"group": f"g{number}", "ratings": {"quality": 3}},
    )


@pytest.fixture(scope="module")
def world(running, tokenizer, tmp_path_factory):
    """A policy and a data directory of 24 dialogs in three splits; one reply is a tool call."""
    folder = tmp_path_factory.mktemp("world")
    save_policy(folder / "policy", tokenizer)
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    tool = Dialog("tool", [{"role": "user", "content": "call it"}, call], split="train")
    dialogs = [talk(n) for n in range(24)]
    for n, dialog in enumerate(dialogs):
        dialog.split = "validation" if n % 8 == 6 else "test" if n % 8 == 7 else "train"
    write_jsonl([*dialogs, tool], folder / "logs.jsonl")
    flags = [
        "--logs",
        str(folder / "logs.jsonl"),
        "--output_dir",
        str(folder / "data"),
        "--tokenizer",
        str(folder / "policy"),
        "--split",
        "declared",
        "--quiet",
    ]
    prepare.main(load_config(prepare.PrepareConfig, flags))
    return folder


def config_of(world, out, **changes):
    settings = {
        "max_new_tokens": 6,
        "num_candidates": 3,
        "shard_contexts": 10,
        "max_length": 96,
        "threshold": 0.6,
        "quiet": True,
        "batch_size": 16,
    }
    return CandidatesConfig(
        data=str(world / "data"),
        checkpoint=str(world / "policy"),
        output_dir=str(out),
        **{**settings, **changes},
    )


@pytest.fixture(scope="module")
def made(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "out"
    return out, main(config_of(world, out))


def table(out):
    return [
        row
        for path in sorted((out / "candidates").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def contents(folder):
    """Every file that does not hold a time, with its bytes."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "prepare.yaml", "candidates.yaml")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_context_is_answered_and_the_human_is_candidate_0(made):
    out, headline = made
    rows = table(out)
    contexts = {row["context"] for row in rows}
    assert contexts == {
        f"d{n}:{i}" for n in range(24) for i in (0, 3, 5)
    }  # message 2 is never trained on, the tool call has no text
    assert headline["contexts"] == 72 and headline["skipped"] == {"openings": 0, "tool_calls": 1}
    for context in contexts:
        own = [row for row in rows if row["context"] == context]
        assert [row["candidate"] for row in own] == list(range(len(own))) and 2 <= len(own) <= 4
        assert len({row["text"].strip() for row in own}) == len(own), "duplicates are removed"
        number, i = context[1:].split(":")
        assert own[0]["text"] == talk(int(number)).messages[int(i)]["content"] and own[0]["similarity"] == 1.0
        for row in own[1:]:
            assert row["similarity"] == token_f1(row["text"], own[0]["text"]) * bool(row["text"])
    generated = [row for row in rows if row["candidate"]]
    assert headline["candidates"] == len(generated) == 72 * 3 - headline["missing"]
    assert headline["mean_similarity"] == pytest.approx(
        sum(row["similarity"] for row in generated) / len(generated), abs=1e-4
    )
    assert headline["empty"] == sum(not row["text"] for row in generated)


def test_the_data_directory_has_a_row_per_candidate_in_the_split_of_its_context(made, world):
    out, headline = made
    split_of = {d.id: split for split in SPLITS for d in read_dialogs(world / "data", split)}
    rows = {f"{row['context']}:{row['candidate']}": row for row in table(out)}
    tokenizer, seen = load_tokenizer(out / "tokenizer"), 0
    for split in SPLITS:
        dialogs, tokens = list(read_dialogs(out, split)), list(read_rows(out, split))
        assert len(dialogs) == len(tokens) > 0
        for dialog, row in zip(dialogs, tokens, strict=True):
            candidate = rows[dialog.id]
            name, i, k = dialog.id.rsplit(":", 2)
            assert split_of[name] == split == dialog.split
            assert dialog.replies == [len(dialog.messages) - 1] == [int(i)], "the context is never trained on"
            reward = 1.0 if k == "0" or (candidate["text"] and candidate["similarity"] > 0.6) else 0.0
            reply = dialog.messages[-1]
            assert (
                reply["content"] == candidate["text"]
                and reply["reward"] == reward
                and reply["rewards"]["token_f1"] == candidate["similarity"]
            )
            assert all("reward" not in m and "feedback" not in m for m in dialog.messages[:-1])
            assert (dialog.source, dialog.goal, dialog.meta["group"], dialog.meta["context"]) == (
                "talk",
                {"number": int(name[1:])},
                f"g{name[1:]}",
                f"{name}:{i}",
            )
            assert "ratings" not in dialog.meta and dialog.meta["candidate"] == int(k)
            assert dialog.meta["generator"] == ("human" if k == "0" else headline_generator(out))
            assert tokenizer.decode(row.input_ids[row.assistant]) == f"{reply['content']}<|end|>", (
                "the reply is whole"
            )
            assert len(row.input_ids) <= 96 and row.rewards.tolist() == [reward] and not row.truncated
            seen += 1
    assert seen == len(rows) == headline["rows"]
    assert headline["cut_replies"] == 0


def headline_generator(out):
    return load_manifest(out)["candidates"]["generator"]


def test_the_manifest_says_where_it_came_from(made, world):
    out, headline = made
    about = load_manifest(out)["candidates"]
    assert about["policy"] == str(world / "policy") and about["generator"].startswith("policy:")
    assert about["similarity"] == "token_f1" and about["threshold"] == 0.6
    assert about["ingredients"]["texts"]["settings"]["decoding"]["max_new_tokens"] == 6
    assert set(about["ingredients"]["texts"]["model"]) >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "rl_dialog.yaml",
    }
    assert sorted(p.name for p in out.iterdir()) == sorted(
        [
            "candidates",
            "candidates.yaml",
            "manifest.json",
            "prepare.yaml",
            "quarantine.jsonl",
            "tokenizer",
            *(f"{s}-00000.parquet" for s in SPLITS),
        ]
    )
    assert {
        "contexts",
        "candidates",
        "duplicates",
        "empty",
        "mean_similarity",
        "contexts_per_s",
        "seconds",
        "output_dir",
        "manifest",
    } <= headline.keys()


def test_the_same_bytes_from_any_number_of_workers_and_any_batch(made, world, tmp_path):
    out, _ = made
    main(config_of(world, tmp_path / "two", num_generators=1, num_scorers=2, batch_size=5))
    assert contents(tmp_path / "two") == contents(out)


def test_another_threshold_and_another_similarity_use_the_texts_again(made, world, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    before = {path: path.stat().st_mtime_ns for path in (out / "candidates").rglob("*.parquet")}
    headline = main(config_of(world, out, threshold=None, resume=True))
    assert (
        headline["generated_contexts"] == 0 and {path: path.stat().st_mtime_ns for path in before} == before
    )
    for dialog in read_dialogs(out, "train"):
        expected = 1.0 if dialog.meta["candidate"] == 0 else dialog.messages[-1]["rewards"]["token_f1"]
        assert dialog.messages[-1]["reward"] == expected
    headline = main(config_of(world, out, similarity="chrf", resume=True))
    assert headline["generated_contexts"] == 0
    assert all(path.stat().st_mtime_ns == before[path] for path in (out / "candidates" / "texts").iterdir())
    assert set(next(iter(read_dialogs(out, "train"))).messages[-1]["rewards"]) == {"chrf", "logged"}
    assert [row["text"] for row in table(out)] == [row["text"] for row in table(made[0])]


def test_a_reward_model_says_what_candidates_earn(made, world, tmp_path):
    """The texts are used again; what each reply earns is what the model says of it behind its context, the
    human's too; another model is asked."""
    out, model = tmp_path / "out", tmp_path / "model"
    shutil.copytree(made[0], out)
    for seed in (0, 1):
        torch.manual_seed(seed)
        TextReward.new(
            ["hello there, thank you, that is all", "what about 0123456789 ?"],
            hidden_size=32,
            vocab_size=300,
            max_length=64,
        ).save_pretrained(model)
        headline = main(config_of(world, out, reward_model=str(model), threshold=None, resume=True))
        reward = TextReward.from_pretrained(model)
        assert headline["generated_contexts"] == 0
        dialogs = [dialog for split in SPLITS for dialog in read_dialogs(out, split)]
        said = reward.score([dialog.messages for dialog in dialogs])
        for dialog, value in zip(dialogs, said, strict=True):
            reply = dialog.messages[-1]
            assert (
                reply["reward"] == reply["rewards"]["learned"] == pytest.approx(value, abs=1e-5)
                and "token_f1" in reply["rewards"]
            )
        generated = [value for dialog, value in zip(dialogs, said, strict=True) if dialog.meta["candidate"]]
        assert headline["mean_learned"] == pytest.approx(sum(generated) / len(generated), abs=1e-4)
        assert [row["text"] for row in table(out)] == [row["text"] for row in table(made[0])]
    main(config_of(world, out, threshold=0.6, resume=True))  # and back to the similarity
    assert all("learned" not in dialog.messages[-1]["rewards"] for dialog in read_dialogs(out, "train"))


def test_another_model_never_uses_the_texts(made, world, tokenizer, tmp_path):
    """The same settings, path and data; one weight more or less."""
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "data").symlink_to(world / "data")
    save_policy(tmp_path / "world" / "policy", tokenizer, seed=1)
    with pytest.raises(
        UserError,
        match=(
            "holds candidates of another model: choose another --output_dir, or delete them with --overwrite"
        ),
    ):
        main(config_of(tmp_path / "world", out, resume=True))
    with pytest.raises(UserError, match=r"another seed \(0 then, 1 now\)"):
        main(config_of(world, out, seed=1, resume=True))
    headline = main(config_of(tmp_path / "world", out, overwrite=True))
    assert headline["generated_contexts"] == 72
    assert [row["text"] for row in table(out)] != [row["text"] for row in table(made[0])]
    key = load_manifest(out)["candidates"]["keys"]["texts"]
    train = "train-00000.parquet"
    right = (out / "candidates" / "texts" / train).read_bytes()
    shutil.copy(
        made[0] / "candidates" / "texts" / train, out / "candidates" / "texts" / train
    )  # a shard of the other model in its place
    assert not is_current(out / "candidates" / "texts" / train, key)
    drawing = drawing_of(config_of(tmp_path / "world", out), tmp_path / "world" / "policy", device="auto")
    Generator(str(out / "candidates"), drawing, key)(pa.table({"file": [train]}))
    assert (out / "candidates" / "texts" / train).read_bytes() == right


def test_missing_shards_are_made_and_the_others_left(made, world, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    (out / "candidates" / "train-00001.parquet").unlink()
    (out / "candidates" / "train-00002.parquet").unlink()
    (out / "candidates" / "texts" / "train-00002.parquet").write_bytes(b"not a shard")
    (out / "manifest.json").unlink()
    (out / "candidates" / "texts" / "train-00004.parquet.1.part").touch()
    assert main(config_of(world, out, resume=True))["generated_contexts"] == 10
    assert contents(out) == contents(made[0])


@pytest.mark.parametrize("name", ["tf_all", "tf_top", "dt", "ilql"])
def test_training_reads_it(made, world, name, tmp_path):
    """Without Ray: what a worker of `pipelines.train` does with the data directory."""
    out, _ = made
    method = METHODS[name](threshold=1.0) if name == "tf_top" else METHODS[name]()
    tokenizer = method.extend_tokenizer(load_tokenizer(out / "tokenizer"))
    model = ModelConfig(model_name_or_path=str(world / "policy"), rank=4, heads="lowrank")
    rows, held_out = list(read_rows(out, "train")), list(read_rows(out, "validation"))
    kept, _ = method.prepare(rows, held_out, tokenizer)
    if name == "tf_top":
        assert len(kept) == sum(row.rewards[0] == 1 for row in rows) < len(rows)
    policy = Policy(load_lm(model, tokenizer), method, model)
    trainer = Trainer(
        policy, tokenizer, rows, held_out, TrainerConfig(max_steps=2, per_device_train_batch_size=4), tmp_path
    )
    result = trainer.train()
    assert result["step"] == 2


def test_a_limit_takes_contexts_at_even_distances_and_the_same_replies(made, world, tmp_path):
    settings = {"limit": 6, "total": 55, "size": 100, "openings": True}
    [shard], _ = write_contexts(world / "data", "train", tmp_path / "contexts", **settings)
    numbers = pq.read_table(tmp_path / "contexts" / shard["file"]).column("number").to_pylist()
    assert numbers == [0, 10, 19, 28, 37, 46]  # the first of six stretches of 55 / 6 replies
    drawing = drawing_of(config_of(world, tmp_path), world / "policy", device="auto")
    Generator(str(tmp_path), drawing, "key")(pa.table({"file": [shard["file"]]}))
    everything = {(row["context"], row["candidate"]): row["text"] for row in table(made[0])}
    rows = pq.read_table(tmp_path / "texts" / shard["file"]).to_pylist()
    assert len(rows) > 12 and all(row["text"] == everything[row["context"], row["candidate"]] for row in rows)


def test_rewards():
    def row(similarity, k=1, text="x", learned=None):
        return {"candidate": k, "text": text, "similarity": similarity, "learned": learned}

    assert [reward_of(row(s), 0.6) for s in (0.6, 0.600001, -0.2, 1.0)] == [
        0.0,
        1.0,
        0.0,
        1.0,
    ]  # strictly above
    assert [reward_of(row(s), None) for s in (0.6, -0.2)] == [0.6, -0.2]
    assert reward_of(row(0.0, k=0, text=""), 0.6) == 1.0, "the human is always right"
    assert reward_of(row(0.0, text=""), -1.0) == 0.0
    assert [
        reward_of(row(1.0, k=k, text=text, learned=-2.5), None) for k, text in ((0, "x"), (1, "x"), (1, ""))
    ] == [-2.5] * 3
    assert [reward_of(row(1.0, k=k, learned=0.3), 0.2) for k in (0, 1)] == [1.0, 1.0] and reward_of(
        row(1.0, k=0, learned=0.2), 0.2
    ) == 0.0


def test_an_empty_candidate_stays_empty(world, tokenizer):
    from rl_dialog.data.tokenize import tokenize

    context = Dialog(
        "d:1", [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], split="train"
    ).to_row() | {"number": 0}
    dialog = candidate_dialog(
        context,
        {"candidate": 2, "text": "", "similarity": 0.0, "learned": None},
        name="token_f1",
        threshold=None,
        generator="bc:1",
    )
    assert dialog == Dialog.from_row(dialog.to_row())
    assert dialog.messages[-1] == {
        "role": "assistant",
        "content": "",
        "reward": 0.0,
        "rewards": {"token_f1": 0.0},
    }
    [row] = tokenize(dialog, tokenizer)
    assert tokenizer.decode(row.input_ids[row.assistant]) == "<|end|>"


def test_openings_are_left_out_where_the_template_cannot_ask_for_them(world, tmp_path):
    settings = {"limit": 0, "total": 54, "size": 100, "openings": False}
    shards, skipped = write_contexts(world / "data", "train", tmp_path, **settings)
    assert skipped == {"openings": 18, "tool_calls": 1} and shards == [
        {"file": "train-00000.parquet", "contexts": 36}
    ]
    assert pq.read_schema(tmp_path / "train-00000.parquet").metadata[KEY] == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, "nowhere: expected a directory written by"),
        ({"checkpoint": "gpt2"}, "--checkpoint gpt2: expected a checkpoint directory or run folder"),
        ({"output_dir": ""}, "expected --output_dir"),
        ({"splits": ("test",)}, "with train"),
        ({"similarity": "token_f"}, "Did you mean token_f1?"),
        ({"reward_model": "./nowhere"}, "found nothing there"),
        ({"similarity": "meteor"}, "apt-get install wordnet-base"),
        ({"threshold": float("nan")}, "a finite --threshold"),
        ({"num_candidates": 5, "do_sample": False}, "num_beams 1 for 5: set num_beams 5"),
        ({"shard_contexts": 0}, "--shard_contexts of at least 1"),
        ({"seed": -1}, "expected --seed of at least 0, got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(world, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        main(replace(config_of(world, tmp_path / "out"), **changes))
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_left_alone(world, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    with pytest.raises(UserError, match="was not made by `candidates`, so it is left alone"):
        main(config_of(world, tmp_path / "out", overwrite=True))
    assert (tmp_path / "out" / "thesis.txt").exists()


def test_candidates_are_neither_overwritten_nor_gone_on_with_unasked(made, world):
    with pytest.raises(
        UserError, match="already holds a run of `candidates`: pass --resume to go on with it or --overwrite"
    ):
        main(config_of(world, made[0]))


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(world, tmp_path):
    """SIGKILL to the driver when a few shards are there; another Ray must not be running, so this one brings
    its own."""
    main(config_of(world, tmp_path / "whole", shard_contexts=2))
    sizes = shlex.split(
        "--max_new_tokens 6 --num_candidates 3 --shard_contexts 2 --max_length 96 --threshold 0.6 "
        "--batch_size 16 --num_cpus 2 --quiet"
    )
    where = [
        "--data",
        str(world / "data"),
        "--checkpoint",
        str(world / "policy"),
        "--output_dir",
        str(tmp_path / "killed"),
    ]
    command = [sys.executable, "-m", "pipelines.candidates", *where, *sizes]
    texts = tmp_path / "killed" / "candidates" / "texts"
    hold = Hold(tmp_path)
    hold.begin(f"{texts}/*.parquet", 3)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | hold.environment
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 600
    while len(list(texts.glob("*.parquet"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, (
            process.stdout.read() if process.poll() is not None else "waited in vain"
        )
        time.sleep(0.01)
    everyone = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in everyone:  # the driver first
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=120)
    kept = len(list(texts.glob("*.parquet")))
    assert kept < 36 and not (tmp_path / "killed" / "manifest.json").exists(), (
        "the run ended before it was killed"
    )
    done = main(config_of(world, tmp_path / "killed", shard_contexts=2, resume=True))
    assert done["generated_contexts"] == 2 * (36 - kept)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_run_that_died_while_publishing_leaves_no_half_data_directory(made, tmp_path, monkeypatch):
    out, prepared = tmp_path / "out", tmp_path / "out" / "candidates" / "prepared"
    shutil.copytree(made[0], out)
    (out / "candidates" / "dialogs").mkdir()

    def dies(path, values):
        raise KeyboardInterrupt

    for attempt in (dies, candidate_folder.write_json):
        shutil.copytree(made[0], prepared, ignore=shutil.ignore_patterns("candidates*"), dirs_exist_ok=True)
        monkeypatch.setattr(candidate_folder, "write_json", attempt)
        with pytest.raises(KeyboardInterrupt) if attempt is dies else nullcontext():
            candidate_folder.publish(prepared, out, {"policy": "p"})
        assert (out / "manifest.json").exists() == (attempt is not dies)
    assert contents(out) == contents(made[0]) and load_manifest(out)["candidates"] == {"policy": "p"}


def test_scores_follow_from_what_a_file_of_word_vectors_holds(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("vectors.txt").write_text("x 1 0\n")
    scoring = candidate_folder.scoring_from_anywhere("average", "vectors.txt", "")
    assert scoring.path == str(tmp_path / "vectors.txt")  # workers do not share this working directory
    before = candidate_folder._read_from(scoring.path)
    Path("vectors.txt").write_text("x 0 1\n")
    assert candidate_folder._read_from(scoring.path) != before
