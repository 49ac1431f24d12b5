"""A slow start of a role is no death; a role that dies at each start ends the run, and so does nobody else's
silence: a driver that was stopped takes none of it for theirs."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from envs import vectors_of
from pipelines.prefer import PreferConfig, main, resolved
from rl_dialog.cluster import preferences
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.preference_plan import plan_of
from rl_dialog.errors import UserError
from rl_dialog.training.policy_gradient import PPO

ROOT = Path(__file__).parents[2]
SMALL = PreferConfig(
    env_options="observations=position",
    labeller="oracle",
    steps=1024,
    budget=20,
    initial_labels=20,
    first_epochs=5,
    num_envs=16,
    ppo=PPO(batch_size=256, minibatch_size=64, passes=2),
    eval_every=0,
    report_to="none",
    quiet=True,
)
# In every process that Ray starts a module that all roles need is imported once a file is there.
LATE = """
import importlib.abc, os, sys, time

class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        by_ray = any("default_worker" in word for word in sys.orig_argv)
        if name == "rl_dialog.models.reward_model" and by_ray:
            sys.meta_path.remove(self)
            while not os.path.exists({there!r}):
                time.sleep(0.05)

sys.meta_path.insert(0, Late())
"""


def events(out: Path) -> list[dict]:
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def computing(there: Path):
    """Four processes that compute while the roles start, until a file is there."""
    work = f"import os\nwhile not os.path.exists({str(there)!r}): sum(range(10**5))"
    running = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(4)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_roles_that_load_for_longer_than_they_have_to_answer_come_up(tmp_path, monkeypatch, capfd):
    """On a busy machine, with imports that take longer than the limit of a process that says nothing (they
    wait until every role has loaded for so long): every role is started once."""
    there = tmp_path / "there"
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE.format(there=str(there)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "late"))
    monkeypatch.setattr(preferences, "SAID", 15.0)
    hear, longest = preferences.Supervisor._hear, {}

    def heard(run, role):
        hear(run, role)
        longest[role.name] = role.loading
        if all(each.pid for each in run.roles.values()) and not there.exists():
            # Those that found a place have less time: to answer, not to load.
            is_over = min(longest.values()) > preferences.SAID
            monkeypatch.setattr(preferences, "STARTING", 60.0 if is_over else 12.0)
            if is_over:
                there.touch()

    monkeypatch.setattr(preferences, "STARTING", 60.0)
    monkeypatch.setattr(preferences.Supervisor, "_hear", heard)
    out = tmp_path / "run"
    with connect(), computing(there):
        result = main(replace(SMALL, output_dir=str(out)))
    assert result["steps"] >= 1024 and result["labels"] == 20 and events(out) == []
    status = json.loads((out / "status.json").read_text())
    assert [role["restarts"] for role in status["roles"].values()] == [0, 0, 0, 0]
    told = capfd.readouterr().err
    for role in ("learner", "asker", "teacher", "oracle"):
        assert f"{role} (process" in told and longest[role] > 12
    assert "still loading after" in told and "it answers, and has 600 s" in told


class SlowTeacher:
    def teach(self):
        time.sleep(10)
        return {"version": 1, "all_labels": 1}, (1, "a model")


class QuickAsker:
    """It says that all is labelled once there is a model."""

    def step(self, clips, *, wanted, published):
        return {"labels": float(published is not None)}


def test_a_role_that_works_for_long_is_told(tmp_path, monkeypatch, capfd):
    """One whose steps are short is not."""
    monkeypatch.setattr(preferences, "SAID", 2.0)
    roles = {"learner": None, "asker": QuickAsker, "teacher": SlowTeacher, "labellers": {}}
    plan = preferences.Plan(**roles, wanted=lambda steps: 1, steps=1, budget=1, gather=1)
    with connect():
        preferences.Supervisor(plan, tmp_path, lambda step, metrics: None).run()
    told = [line for line in capfd.readouterr().err.splitlines() if "still at work after" in line]
    assert len(told) > 1 and all(line.startswith("teacher (process ") for line in told), told


def die() -> None:
    os._exit(1)


@pytest.mark.slow
def test_a_role_that_dies_at_every_start_ends_the_run(tmp_path):
    run = resolved(replace(SMALL, output_dir=str(tmp_path)))
    plan = replace(plan_of(run, vectors_of(run.env, run.env_options), tmp_path), teacher=die)
    with connect(), pytest.raises(UserError, match="the role teacher was lost 4 times without a step"):
        preferences.Supervisor(plan, tmp_path, lambda step, metrics: None).run()
    assert [event["role"] for event in events(tmp_path)] == 4 * ["teacher"]
    assert {event["what"] for event in events(tmp_path)} == {"its process died"}


@pytest.mark.slow
def test_a_driver_that_is_stopped_for_a_while_takes_nobody_for_dead(tmp_path):
    """As by Ctrl-Z, or a machine that sleeps."""
    flags = "--env_options observations=position --labeller oracle --steps 1000000 --budget 20 --quiet"
    flags += " --initial_labels 20 --first_epochs 5 --num_envs 16 --ppo.batch_size 256 --eval_every 0"
    out = tmp_path / "run"
    command = [sys.executable, "-m", "pipelines.prefer", *flags.split(), "--report_to", "none"]
    driver = subprocess.Popen([*command, "--output_dir", str(out)], cwd=ROOT, stderr=subprocess.PIPE)

    def status() -> dict:
        try:
            return json.loads((out / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def wait_for_steps(least: int) -> None:
        deadline = time.monotonic() + 600
        while status().get("steps", 0) < least:
            assert time.monotonic() < deadline and driver.poll() is None, f"{least} steps: {status()}"
            time.sleep(0.2)

    try:
        wait_for_steps(1)
        driver.send_signal(signal.SIGSTOP)
        time.sleep(2 * preferences.HEARTBEAT)
        driver.send_signal(signal.SIGCONT)
        wait_for_steps(status()["steps"] + 2000)
        assert events(out) == []
    finally:
        driver.kill()
        driver.communicate()
