"""Labellers in processes of their own, which are killed: what was acknowledged is there, once, and what was
not returns to the others."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest

from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import NewQuery
from tests.preferences.label_processes import answer_all, answer_forever, hold_and_vanish

LEASE = 0.2


@pytest.fixture(scope="module")
def processes():
    """Started in milliseconds: forked from a process that has imported everything and opened nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preferences.label_processes"])
    return context


@pytest.fixture
def start(processes):
    """start(function, url, labeller, lease): (the process, the pipe from which its acknowledgements are
    read)."""
    started = []

    def run(function, url, labeller, lease=LEASE, **more):
        here, there = processes.Pipe(duplex=False)
        given = (url, labeller, lease, there)
        process = processes.Process(target=function, args=given, kwargs=more, daemon=True)
        process.start()
        there.close()
        started.append(process)
        return process, here

    yield run
    for process in started:
        process.kill()
        process.join()


def ask(url, number):
    log = LabelLog(url)
    log.add_queries(NewQuery(f"a{i}", f"b{i}", validation=False) for i in range(number))
    return log


def received(pipe):
    """What came through the pipe of a process that has ended."""
    found = []
    while True:
        try:
            found.append(pipe.recv())
        except (EOFError, OSError):
            return found


def check(log, acknowledged, kills, queries):
    """Every acknowledged answer is there exactly once, one of a killed process may be there unacknowledged,
    and the books balance."""
    answers = {answer.number: answer for answer in log.answers()}
    assert len({number for _, number in acknowledged}) == len(acknowledged)
    assert all(answers[number].query == query for query, number in acknowledged)
    assert len(acknowledged) <= len(answers) <= len(acknowledged) + kills
    assert sorted(answers) == list(range(1, len(answers) + 1))
    labels = log.labels()
    assert len({label.query for label in labels}) == len(labels)
    assert {label.query for label in labels} == {
        answer.query for answer in answers.values() if answer.revoked is None
    }
    counts = log.counts()
    assert counts["labels"] + counts["waiting"] + counts["leased"] == queries
    assert counts["revoked"] == sum(answer.revoked is not None for answer in answers.values())


@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.long])])
def test_kill_9_loses_nothing_that_was_acknowledged(store_url, start, kills):
    """One labeller after the other is killed at a random moment, somewhere between two acknowledgements."""
    log, rng, acknowledged = ask(store_url, 500), random.Random(kills), []
    for _ in range(kills):
        process, pipe = start(answer_forever, store_url, "ann")
        acknowledged += [pipe.recv() for _ in range(rng.randrange(1, 12))]
        time.sleep(rng.random() * 0.01)
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += received(pipe)
    check(log, acknowledged, kills, 500)
    assert len(acknowledged) >= 2 * kills
    log.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "store_url",
    ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.long])],
    indirect=True,
)
def test_kill_9_of_one_among_four(store_url, start):
    """50 kills during 500 labels; the others go on meanwhile and take over what the killed one held."""
    log, rng, acknowledged = ask(store_url, 500), random.Random(0), []
    running = [start(answer_forever, store_url, f"labeller {i}") for i in range(4)]
    for kill in range(50):
        before = log.state()[0]
        while log.state()[0] < before + rng.randrange(1, 10) and log.counts()["labels"] < 500:
            time.sleep(0.002)
        place = rng.randrange(4)
        process, pipe = running[place]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += received(pipe)
        running[place] = start(
            answer_forever, store_url, f"labeller {place}" if kill % 2 else f"substitute {kill}"
        )
    deadline = time.monotonic() + 240
    while log.counts()["labels"] < 500 and time.monotonic() < deadline:
        time.sleep(0.05)
    for process, pipe in running:
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += received(pipe)
    check(log, acknowledged, 54, 500)
    assert log.counts()["labels"] >= 500 - 4  # an answer that was just undone
    log.close()


def test_three_processes_label_90_pairs_once_and_one_vanishes(store_url, start, processes):
    """Three make the tables at once and share the work; a fourth takes five pairs and is killed: they return
    when its leases run out, which for the three, who come later, is so."""
    log = ask(store_url, 90)
    gone, pipe = start(hold_and_vanish, store_url, "eve", 600.0)
    held = pipe.recv()
    os.kill(gone.pid, signal.SIGKILL)
    assert len(held) == 5 and log.counts() | {"leased": 5, "waiting": 85} == log.counts()
    later = {"ahead": 601.0, "together": processes.Barrier(3)}
    running = [start(answer_all, store_url, name, 300.0, **later) for name in ("ann", "bob", "cid")]
    acknowledged = [each for process, pipe in running for each in received(pipe)]
    assert Counter(query for query, _ in acknowledged) == Counter(
        {query: 1 for query in Counter(a.query for a in log.answers())}
    )
    assert len(acknowledged) == 90 and {query for query, _ in acknowledged} >= set(held)
    assert {who for _, who in acknowledged} == {"ann", "bob", "cid"}
    assert log.counts() | {"labels": 90, "late": 0, "waiting": 0, "leased": 0} == log.counts()
    log.close()


def test_processes_make_the_tables_at_the_same_moment(store_url, start):
    running = [start(answer_all, store_url, f"labeller {i}") for i in range(6)]
    assert [received(pipe) for _, pipe in running] == [[]] * 6
    for process, _ in running:
        process.join()
        assert process.exitcode == 0
