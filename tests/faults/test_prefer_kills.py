"""The asynchronous preference run, with real kills: of every role, of a labeller and of the driver, at random
moments. No acknowledged label is lost.

RL_DIALOG_KILLS=50 kills more often than CI has time for.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from rl_dialog.cluster.preferences import Role
from rl_dialog.preferences.label_log import LabelLog

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("RL_DIALOG_KILLS", 7))  # each of them once
LABELS = max(250, 10 * KILLS)
ROLES = ("learner", "asker", "teacher", "page")

# A person as a process: answers one query after the other, and writes each answer that was acknowledged.
LABELLER = """
import sys, time
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.segments import Segments
log, segments = LabelLog(sys.argv[1]), Segments(sys.argv[2])
while True:
    query = log.lease(sys.argv[3], seconds=5)
    if query is None:
        time.sleep(0.02)
        continue
    left, right = segments[query.left].true_return, segments[query.right].true_return
    label = log.answer(query.id, sys.argv[3], "left" if left > right else "right" if left < right else "tie")
    sys.stdout.write(f"{label.query}\\n")
    sys.stdout.flush()
    time.sleep(float(sys.argv[4]))
"""


class Run:
    """A run and its labellers, each a process."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        steps: int,
        labels: int,
        pause: float,
        labeller: str = "page",
        people=("ann", "bob"),
    ):
        self.folder, self.url, self.pause = folder, url, pause
        settings = (
            f"--env_options observations=position --labeller {labeller} --page_port 0 --steps {steps} "
            f"--budget {labels} --schedule constant"
        )
        settings += (
            " --initial_labels 40 --first_epochs 10 --ppo.batch_size 512 --ppo.minibatch_size 128 "
            "--eval_every 0 --save_every 5 --quiet"
        )
        self.command = [
            sys.executable,
            "-m",
            "pipelines.prefer",
            *settings.split(),
            "--report_to",
            "none",
            "--output_dir",
            str(folder),
            "--labels",
            url,
            "--resume",  # a driver that was killed goes on
        ]
        self.acknowledged = folder.with_suffix(".acknowledged")
        self.start()
        self.labellers = {name: self.labeller(name) for name in people}

    def start(self) -> None:
        self.started = time.time()
        self.driver = subprocess.Popen(
            self.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def labeller(self, name: str) -> subprocess.Popen:
        with self.acknowledged.open("a") as out:
            where = [self.url, str(self.folder / "clips"), name, str(self.pause)]
            return subprocess.Popen(
                [sys.executable, "-c", LABELLER, *where], cwd=ROOT, stdout=out, stderr=subprocess.DEVNULL
            )

    def status(self) -> dict:
        try:
            return json.loads((self.folder / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def pid(self, role: str) -> int:
        status = self.status()
        # Of this driver, and not the one before; on a busy machine it may be told seldom.
        alive = status.get("time", 0) > max(self.started, time.time() - 20) and not status.get("over")
        return status["roles"][role]["pid"] if alive else 0

    def page_answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.status()["pages"]["page"], timeout=30) as answer:
                return b"<html" in answer.read()
        except (KeyError, OSError):
            return False

    def kill(self, victim: str) -> bool:
        """SIGKILL; False if the victim is just being made."""
        if victim == "driver":
            self.driver.kill()
            self.driver.communicate()
            self.start()
        elif victim in self.labellers:
            self.labellers[victim].kill()
            self.labellers[victim].wait()
            self.labellers[victim] = self.labeller(victim)
        else:
            pid = self.pid(victim)
            if not pid:
                return False
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        return True

    def wait_until(self, condition, what: str, seconds: float = 400.0):
        """What the condition finds, once that is something."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.driver.poll() is None, f"it ended before {what}: {self.driver.communicate()}"
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}: {self.status()}"
            time.sleep(0.1)
        return found

    def stop(self) -> None:
        for process in (self.driver, *self.labellers.values()):
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(  # tests/preferences/test_label_log_faults.py kills those who write to PostgreSQL
    "store_url",
    ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.long])],
    indirect=True,
)
def test_no_acknowledged_label_is_lost(store_url, tmp_path):
    chance = random.Random(7)
    run = Run(
        tmp_path / "run", store_url, steps=10**5 * KILLS, labels=4 * LABELS, pause=0.05
    )  # it is stopped long before its end
    try:
        victims = ["driver", *ROLES, *run.labellers] * KILLS
        killed: Counter[str] = Counter()
        deadline = time.monotonic() + 1200 + 60 * KILLS
        labels = 0
        while killed.total() < KILLS or labels < LABELS:
            assert time.monotonic() < deadline, f"{labels} labels, {dict(killed)} killed, {run.status()}"
            assert run.driver.poll() is None, run.driver.communicate()
            time.sleep(chance.uniform(0.2, 2.0))
            labels = run.status().get("labels", labels)
            if (
                killed.total() < KILLS
                and labels * KILLS >= LABELS * killed.total() * 0.8
                and run.kill(victims[killed.total()])
            ):
                killed[victims[killed.total()]] += 1
        while not run.page_answers():
            assert time.monotonic() < deadline, run.status()
            time.sleep(0.5)
    finally:
        run.stop()
    acknowledged = run.acknowledged.read_text().split()
    assert len(acknowledged) == len(set(acknowledged)) >= LABELS - 2 * killed["ann"] - 2 * killed["bob"]
    log = LabelLog(store_url)
    found = Counter(label.query for label in log.labels())
    assert all(found[query] == 1 for query in acknowledged), (
        "an acknowledged label is missing or counted twice"
    )
    assert len(found) >= LABELS
    log.close()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert Counter(event["role"] for event in events) >= Counter({role: killed[role] for role in ROLES})
    assert run.status()["reward_version"] > 0 and run.status()["steps"] > 0


@pytest.mark.slow
def test_an_oracle_that_is_killed_answers_every_query_once(tmp_path):
    run = Run(
        tmp_path / "run",
        f"sqlite:///{tmp_path}/labels.db",
        steps=5 * 10**5,
        labels=4 * LABELS,
        pause=0.0,
        labeller="oracle",
        people=(),
    )
    try:
        deadline, killed = time.monotonic() + 1200, 0
        while (labels := run.status().get("labels", 0)) < LABELS or killed < 3:
            assert time.monotonic() < deadline and run.driver.poll() is None, run.status()
            if killed < 3 and labels >= killed * LABELS // 4 and labels and run.kill("oracle"):
                killed += 1
                time.sleep(3)
            time.sleep(0.05)
    finally:
        run.stop()
    log = LabelLog(run.url)
    assert killed == 3 and LABELS <= len(log.labels()) == len({label.query for label in log.labels()})
    log.close()


def test_a_role_that_is_slow_gets_more_time_than_before():
    role = Role("learner", dict)
    starting = role.patience
    role.is_made = True
    running = role.patience
    assert (starting, running) == (120, 10)
    role.silences += 1
    assert role.patience == 2 * running
    role.is_made, role.restarts = False, 50  # others of its kind were killed: that is no sign of slowness
    assert role.patience == 2 * starting
    role.silences = 100
    assert role.patience <= 32 * 60  # never for ever


@pytest.mark.slow
def test_a_role_that_hangs_is_made_again_and_one_that_cannot_live_ends_the_run(tmp_path):
    """SIGSTOP: the process is there and says nothing. Reported after ten seconds (of those in which somebody
    asked), and replaced. Then the teacher finds a broken clip again and again: the run says so and
    ends with an error, not in silence."""
    run = Run(tmp_path / "run", f"sqlite:///{tmp_path}/labels.db", steps=10**6, labels=200, pause=0.0)
    try:
        run.wait_until(lambda: run.status().get("reward_version") and run.pid("learner"), "a first reward")
        frozen = run.pid("learner")
        os.kill(frozen, signal.SIGSTOP)
        # Of this process: on a busy machine others may be slow to answer.
        of_it = lambda: [each for each in run.status().get("events", ()) if each["pid"] == frozen]  # noqa: E731
        (event,) = run.wait_until(of_it, "a report on the learner")
        assert event["role"] == "learner"
        # 10, if it was never slow before
        assert re.fullmatch(r"it did not answer for (10|20|40) s", event["what"]), event
        before = run.status()["steps"]
        run.wait_until(
            lambda: run.status().get("steps", 0) > before and run.pid("learner") not in (0, frozen),
            "steps of the new learner",
        )
        for path in (tmp_path / "run" / "clips").rglob("*.npz"):
            path.write_bytes(b"broken")
        run.kill("teacher")  # unless a broken clip ended it already
        log = LabelLog(run.url)
        for name in run.labellers:
            log.undo(name)  # there is something to learn: the new teacher reads all clips
        log.close()
        _, said = run.driver.communicate(timeout=600)
        assert run.driver.returncode == 2 and "expected a segment" in " ".join(said.split())
    finally:
        run.stop()
