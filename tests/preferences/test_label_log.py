"""The label log, on SQLite and on PostgreSQL: what it offers, to whom, what it keeps, and what counts."""

from __future__ import annotations

import pytest

from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import NewQuery


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(store_url, clock):
    opened = LabelLog(store_url, validation=0.0, clock=clock)
    yield opened
    opened.close()


def ask(log, number, **given):
    """Queries about `number` pairs of segments."""
    return log.add_queries(NewQuery(f"a{i}", f"b{i}", **given) for i in range(number))


def test_a_query_is_answered_once_and_unswapped(log, clock):
    (query,) = ask(log, 1, task="left or right?", reward_version=3, about={"env": "dot"})
    shown = log.lease("ann", 60)
    assert (shown.id, shown.task, shown.reward_version, shown.about, shown.until) == (query, "left or right?", 3, {"env": "dot"}, 1060.0)
    assert {shown.left, shown.right} == {"a0", "b0"} and (shown.left == "b0") == shown.swapped
    assert log.lease("bob") is None and log.lease("ann") is None
    clock.now += 5
    label = log.answer(query, "ann", "left")
    preferred = label.first if label.preference == 1 else label.second
    assert preferred == shown.left
    assert (label.number, label.query, label.labeller, label.shown, label.answered, label.reward_version) == (1, query, "ann", 1000.0, 1005.0, 3)
    assert log.answer(query, "ann", "right") == label  # a repeated request changes nothing
    assert log.labels() == [label] and log.state() == (1, 0)
    assert log.lease("bob") is None
