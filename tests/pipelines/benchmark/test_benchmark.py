"""The benchmark runs end to end on tiny sizes and writes what it promises. No test here is about time."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pipelines.benchmark import playing
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.contenders import CONTENDERS
from pipelines.benchmark.generation import GUIDED
from pipelines.benchmark.measuring import summarise
from pipelines.benchmark.serving import Load
from pipelines.benchmark.settings import BenchmarkConfig
from pipelines.benchmark.training import make_batch
from rl_dialog.errors import UserError

TINY = {
    "rounds": 2,
    "warmup": 1,
    "threads": 1,
    "layers": 1,
    "attention_heads": 2,
    "width": 16,
    "vocabulary": 64,
    "rank": 4,
}
TINY |= {
    "batch_size": 2,
    "length": 16,
    "user_block": 4,
    "system_prompt": 4,
    "prompt": 4,
    "new_tokens": 3,
    "top_k": 5,
}
FLAGS = [part for name, value in TINY.items() for part in (f"--{name}", str(value))] + [
    "--batch_sizes",
    "1",
    "2",
]
HALF = "half of the tokens the user's, blocks of 4"
SETTINGS = {
    "train": ["every token a decision", HALF, f"{HALF}, behind a system prompt of 4"],
    "generate": ["batch 1", "batch 2"],
}
OURS = {"train": set(CONTENDERS), "generate": set(GUIDED)}


def benchmark(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-m", "pipelines.benchmark", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


def figures_in(folder):
    return json.loads((folder / "benchmark.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("what, quiet", [("train", False), ("generate", True)])
def test_the_command(what, quiet, tmp_path):
    out = tmp_path / "figures"
    done = benchmark(what, *FLAGS, "--output_dir", out, *(["--quiet"] if quiet else []))
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert bool(table) != quiet
    headline, report = json.loads(last), figures_in(out)
    assert headline["what"] == report["what"] == what
    assert headline["output_dir"] == str(out)
    assert list(report["figures"]) == SETTINGS[what]
    for setting, rows in report["figures"].items():
        assert set(rows) == OURS[what] | {"plain"}
        assert set(headline["ratios"][setting]) == OURS[what]
        assert "ratio" not in rows["plain"]
        assert all(row["per_second"] > 0 and row.get("ratio", 1) > 0 for row in rows.values())
        assert quiet or any(setting in line for line in table)
    assert report["settings"]["vocabulary"] == 64 and report["settings"]["rounds"] == 2
    assert report["machine"]["torch"] == torch.__version__
    assert len(report["machine"]["load_average_before"]) == 3
    if sys.platform == "linux":
        assert "mmap_max=0" in report["machine"]["allocator"], "the run did not set its allocator"
    with pytest.raises(UserError, match="already holds a run of `benchmark`: pass --overwrite"):
        main(BenchmarkConfig(what=what, output_dir=str(out)))


@pytest.mark.slow
def test_memory_is_measured_in_fresh_processes(tmp_path):
    out = tmp_path / "memory"
    done = benchmark(
        "memory", *FLAGS, "--contenders", "ilql mlp", "--vocabulary", "4096", "--output_dir", out
    )
    assert done.returncode == 0, done.stderr
    figures = figures_in(out)["figures"]
    assert set(figures) == {"plain", "ilql mlp"} and figures["plain"]["ratio"] == 1
    assert (
        figures["ilql mlp"]["peak_kib"] > figures["plain"]["peak_kib"] > 0
    )  # four heads of 32 x 4096 numbers, with their moments


def test_games_are_measured_against_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(playing, "GAMES", 20)
    size = {"layers": 1, "width": 16, "attention_heads": 2, "num_envs": 3, "rounds": 1, "warmup": 0}
    size |= {"threads": 1}
    out = tmp_path / "play"
    found = main(BenchmarkConfig(what="play", **size, quiet=True, output_dir=str(out)))
    (ratios,) = found["ratios"].values()
    assert set(ratios) == {"one at a time, caches kept", "3 at a time", "3 at a time, caches kept"}
    assert set(found["games_per_second"]) == set(playing.PLAYERS)
    assert min(found["games_per_second"].values()) > 0 and found["microseconds_per_step"] > 0
    told = figures_in(out)
    assert told["games_per_second"] == found["games_per_second"]


def test_simulated_users_are_measured_with_their_memory(tmp_path):
    out = tmp_path / "simulate"
    size = {"steps": 50, "num_envs": 3, "rounds": 1, "warmup": 0, "threads": 1}
    found = main(BenchmarkConfig(what="simulate", **size, quiet=True, output_dir=str(out)))
    (setting,) = figures_in(out)["figures"].values()
    assert set(setting) == {"plain", "3 at once, acts as bits", "3 at once", "without state vectors"}
    assert 0 < found["memory"]["mib_per_1000_conversations"] < 100


@pytest.mark.slow
@pytest.mark.long
def test_prepare_is_measured_with_its_memory(tmp_path):
    out = tmp_path / "prepare"
    small = ("--conversations", 200, "--turns", 2, "--exchanges", 30, "--turn_bytes", 100)
    done = benchmark(
        "prepare", *small, "--threads", 2, "--rounds", 1, "--warmup", 0, "--quiet", "--output_dir", out
    )
    assert done.returncode == 0, done.stderr
    report = figures_in(out)
    assert set(report["figures"]["200 conversations of 2 exchanges, 11 rewards, 2 CPUs"]) == {
        "plain",
        "prepare",
    }
    assert report["memory"]["worker at ten times the log"] > 0
    assert list(report["long"]) == ["30 exchanges", "a turn of 100 bytes"] and all(
        row["tokenise"] > 0 for row in report["long"].values()
    )


def test_what_is_served_has_the_vocabulary_asked_for(tmp_path):
    config = BenchmarkConfig(what="serve", **{**TINY, "vocabulary": 9000, "requests": 1})
    load = Load(config, tmp_path)
    assert load.policy.lm.get_input_embeddings().num_embeddings == 9000 > len(load.tokenizer)
    load.one_at_a_time(clients=2)


def test_an_unknown_contender_is_named():
    with pytest.raises(UserError, match="unknown contender 'dqn': expected some of 'bc', 'ilql mlp'"):
        main(BenchmarkConfig(contenders=("dqn",)))


def test_contenders_that_would_not_be_measured_are_refused(tmp_path):
    with pytest.raises(UserError, match="--contenders: expected none beside generate, .* got 'ilql mlp'"):
        main(BenchmarkConfig(what="generate", contenders=("ilql mlp",), output_dir=str(tmp_path / "b")))
    assert not (tmp_path / "b").exists()


def test_a_wrong_size_is_one_paragraph(tmp_path):
    with pytest.raises(UserError, match="expected rounds"):
        main(BenchmarkConfig(rounds=0, output_dir=str(tmp_path / "b")))
    with pytest.raises(UserError, match=r"--length 64: expected at least system_prompt \+ 2 user_block = 96"):
        main(BenchmarkConfig(length=64, output_dir=str(tmp_path / "b")))


def test_the_batches():
    """Every token but the first is an action; with user blocks, every second block is."""
    config = BenchmarkConfig(batch_size=2, length=16, vocabulary=64)
    assert make_batch(config, 0).decisions == 2 * 15
    half = make_batch(config, 4)
    assert half.decisions == 2 * 8
    assert half.act[0].nonzero().squeeze(1).tolist() == [
        3,
        4,
        5,
        6,
        11,
        12,
        13,
        14,
    ]  # position t decides token t + 1
    behind = make_batch(config, 4, system_prompt=5)
    assert behind.act[0].nonzero().squeeze(1).tolist() == [4, 5, 6, 11, 12, 13, 14]
    assert torch.equal(behind.input_ids[0, :5], behind.input_ids[1, :5])


def test_a_ratio_is_taken_within_each_round():
    """The machine became ten times slower in the second round: the ratio stays 0.5."""
    rows = summarise({"plain": [1.0, 10.0, 1.0], "ours": [2.0, 20.0, 2.0]}, 100, seed=0)
    assert rows["ours"]["ratio"] == rows["ours"]["low"] == rows["ours"]["high"] == 0.5
    assert rows["plain"]["per_second"] == 100.0 and np.isclose(rows["ours"]["per_second"], 50.0)
