"""Rounds of our loop in turn with others: that each turn is one round, what is counted, and what goes wrong
with a process that is waited for."""

from __future__ import annotations

import json
import os
import sys

import pytest

from pipelines.benchmark import online, trl_process
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.online import METHODS, Clock, OneReply, new_policy, rounds_of, trainer_of
from pipelines.benchmark.settings import BenchmarkConfig
from pipelines.benchmark.trl_process import TrlProcess
from rl_dialog.errors import UserError

SIZE = {"layers": 1, "width": 32, "attention_heads": 2, "vocabulary": 300, "new_tokens": 4, "threads": 1}
SETTINGS = {"threads": 1, "trainer": "rloo"}


def config(out, **more):
    where = {"output_dir": str(out), "quiet": True}
    return BenchmarkConfig(what="online", rounds=2, warmup=1, **SIZE, **where, **more)


def test_every_turn_is_a_round_and_ours_is_measured_alone_without_trl(tmp_path):
    out = tmp_path / "online"
    found = main(config(out, overlap_runs=0))
    report = json.loads((out / "benchmark.json").read_text())
    up_to = "replies of up to 4 tokens"
    kinds = {"replies of 4 tokens": "equal", up_to: "ending", f"{up_to} to long prompts": "long"}
    assert list(report["figures"]) == [
        name
        for kind in kinds
        for name in (*(f"{m}, {kind}, ours alone" for m in METHODS), f"playing, {kind}")
    ]
    for kind, place in kinds.items():
        assert list(report["figures"][f"playing, {kind}"]) == ["plain", "a round's playing"]
        assert set(found["ratios"][f"playing, {kind}"]) == {"a round's playing"}
        for name in METHODS:
            logs = sorted((out / place / name / "rollouts").iterdir())
            lines = [json.loads(line) for path in logs for line in path.open()]
            assert len(logs) == 3 and len(lines) == 3 * 64
            assert {line["messages"][0]["content"] for line in lines} <= set(online.KINDS[place][1].prompts)
            share = report[f"tokens_of_a_round, {name}, {kind}"]["rl_dialog"] / (64 * 4)
            # A random model ends few replies; with a chance of 1/2 a reply has 15/8 of 4 tokens on average.
            assert 0.9 < share <= 1 if place == "equal" else 0.4 < share < 0.55


def test_what_a_round_raises_comes_out_of_its_turn(tmp_path):
    settings = config(tmp_path / "out")
    trainer = trainer_of(settings, new_policy(settings, tmp_path / "start"), tmp_path / "run", "rloo")

    def broken(*_):
        raise UserError("no world today")

    trainer.play = broken
    with rounds_of(trainer) as rounds, pytest.raises(UserError, match="no world today"):
        rounds()
    assert not rounds.thread.is_alive()


def test_the_world_pays_for_its_letter():
    world = OneReply()
    assert world.reset(seed=3) == world.reset(seed=3)
    messages, reward, terminated, truncated, _ = world.step("banana")
    assert (len(messages), reward, terminated, truncated) == (2, 3.0, True, False)


def test_a_python_without_trl(tmp_path):
    with pytest.raises(UserError, match=r"--trl_python .*No module named 'trl'.*pip install trl"):
        TrlProcess(sys.executable, SETTINGS, patience=1.0).__enter__()
    with pytest.raises(UserError, match="expected the Python of an environment with TRL"):
        TrlProcess(str(tmp_path / "nowhere"), SETTINGS, patience=1.0).__enter__()


def test_a_process_that_says_nothing_is_waited_for_so_long_and_ended(tmp_path, monkeypatch):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(trl_process, "START", 0.2)
    process = TrlProcess(str(silent), SETTINGS, patience=1.0)
    with pytest.raises(TimeoutError, match="for TRL's trainer"):
        process.__enter__()
    assert process.process.poll() is not None


@pytest.mark.slow
@pytest.mark.skipif("RL_DIALOG_TRL_PYTHON" not in os.environ, reason="RL_DIALOG_TRL_PYTHON names no Python")
def test_trl_takes_its_steps_in_turn(tmp_path):
    out = tmp_path / "online"
    main(config(out, overlap_runs=0, trl_python=os.environ["RL_DIALOG_TRL_PYTHON"]))
    report = json.loads((out / "benchmark.json").read_text())
    up_to = "replies of up to 4 tokens"
    for kind in ("replies of 4 tokens", up_to, f"{up_to} to long prompts"):
        figures = report["figures"][f"rloo, {kind}; plain: TRL"]
        assert figures["plain"]["per_second"] > 0 and figures["rl_dialog rloo"]["ratio"] > 0
        tokens = report[f"tokens_of_a_round, rloo, {kind}"]
        assert tokens["trl"] == pytest.approx(tokens["rl_dialog"], rel=0.15)


@pytest.mark.slow
def test_runs_that_play_ahead_and_weights_on_their_way(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "ROUNDS_ALONE", 5)
    out = tmp_path / "online"
    main(config(out, overlap_runs=1))
    report = json.loads((out / "benchmark.json").read_text())
    assert list(report["figures"]["rloo with one Ray actor"]) == ["plain", "1 rounds ahead", "2 rounds ahead"]
    assert set(report["milliseconds_of_weights"]) == {"put", "take"}
    assert len(list((out / "staleness-2-0" / "rollouts").iterdir())) == 5


def test_a_clock_notes_when_it_is_asked():
    clock = Clock(lambda *given: given)
    assert [clock("policy", k) for k in range(2)] == [("policy", 0), ("policy", 1)]
    assert len(clock.began) == 2 and clock.began[0] <= clock.began[1]
