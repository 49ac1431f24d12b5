"""Labels that go out and come in: from log to log, and as TRL's preferences."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
import sqlalchemy

from rl_dialog.data.database import database_url
from rl_dialog.data.readers import find_logs, read_log
from rl_dialog.errors import UserError
from rl_dialog.preferences.exchange import open_labels, take_over, trl_rows
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import NewQuery, Remarks
from rl_dialog.preferences.segments import Clip, Reply, Segments

CONTEXT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]


@pytest.fixture
def log(store_url):
    opened = LabelLog(store_url, validation=0.0)
    yield opened
    opened.close()


@pytest.fixture
def other_log(tmp_path):
    opened = LabelLog(f"sqlite:///{tmp_path}/other.db", validation=0.0)
    yield opened
    opened.close()


@pytest.fixture
def segments(tmp_path):
    return Segments(tmp_path / "clips")


def fill(log, choices):
    """One query, answer and labeller after the other."""
    log.add_queries(
        NewQuery(f"a{i}", f"b{i}", reward_version=i, validation=i % 2 == 1) for i in range(len(choices))
    )
    for i, choice in enumerate(choices):
        query = log.lease(f"labeller {i % 2}")
        log.answer(query.id, f"labeller {i % 2}", choice)


def unnumbered(labels):
    return [replace(label, number=0) for label in labels]


def test_labels_of_one_log_come_into_another_once(log, other_log):
    fill(log, ["left", "right", "tie", "skip", "left"])
    log.undo("labeller 0")
    assert len(log.labels()) == 3
    other_log.add_query("x", "y")
    other_log.answer(other_log.lease("me").id, "me", "left")
    assert other_log.add_labels(log.labels()) == 3
    assert unnumbered(other_log.labels()[1:]) == unnumbered(log.labels()) and other_log.state() == (4, 0, 0)
    assert other_log.add_labels(log.labels()) == 0 and other_log.lease("me") is None
    other_log.revoke_labeller("labeller 0")
    assert other_log.add_labels(log.labels()) == 0  # what was revoked does not come back
    assert len(log.answers()) == 5


def test_a_label_of_a_query_that_is_answered_already(log, other_log):
    log.add_query("a", "b")
    mine = log.answer(log.lease("ann").id, "ann", "tie")
    other_log.add_query("b", "a")  # the other way round
    theirs = other_log.answer(other_log.lease("bob").id, "bob", "left")
    assert other_log.labels()[0].first == "b" and log.add_labels([theirs]) == 1
    assert log.labels() == [mine] and log.counts()["late"] == 1 and log.labellers()["bob"]["shared"] == 1
    assert log.answers()[1].preference == 1 - theirs.preference
    log.undo("ann")
    (label,) = log.labels()
    prefers = label.first if label.preference == 1 else label.second
    assert label.labeller == "bob" and prefers == (theirs.first if theirs.preference == 1 else theirs.second)


def test_a_label_for_an_open_query_answers_it(log, other_log):
    fill(other_log, ["left"])
    log.add_query("a0", "b0", validation=False)
    assert log.counts()["waiting"] == 1 and log.add_labels(other_log.labels()) == 1
    assert log.counts() | {"waiting": 0, "labels": 1, "late": 0} == log.counts() and log.lease("ann") is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"preference": 0.7}, "expected a preference of 1, 0, 0.5 or None, got 0.7"),
        ({"labeller": ""}, "name of a labeller"),
        ({"first": "b0"}, "two different segments"),
        ({"query": "\0"}, "id of a query"),
    ],
)
def test_labels_that_are_none_leave_nothing(log, other_log, change, told):
    fill(other_log, ["left", "left"])
    one, other = other_log.labels()
    with pytest.raises(UserError, match=told):
        log.add_labels([one, replace(other, **{"second": "b0", "first": "x"} | change)])
    assert log.answers() == [] and log.pairs() == set()


# Replies


def label_replies(log, segments, choices):
    """A label for each choice: of two replies to one context, "good i" and "bad i"."""
    for i, choice in enumerate(choices):
        replies = [Reply(CONTEXT, text, {"model": "bot"}) for text in (f"good {i}", f"bad {i}")]
        log.add_query(*(segments.add(reply) for reply in replies), validation=False)
        query = log.lease("ann")
        log.answer(
            query.id,
            "ann",
            choice if choice in ("tie", "skip") else "left" if query.left == replies[0].id else "right",
        )


def test_replies_as_rows_of_trl(log, segments):
    label_replies(log, segments, ["good", "tie", "skip", "good"])
    rows = list(trl_rows(log.labels(), segments))
    assert rows == [
        {
            "prompt": CONTEXT,
            "chosen": [{"role": "assistant", "content": f"good {i}"}],
            "rejected": [{"role": "assistant", "content": f"bad {i}"}],
        }
        | {
            "chosen_reward": 1.0,
            "rejected_reward": 0.0,
            "ids": [Reply(CONTEXT, f"{name} {i}").id for name in ("good", "bad")],
        }
        for i in (0, 3)
    ]


def test_rows_of_trl_are_read_by_prepare(log, segments, tmp_path):
    label_replies(log, segments, ["good"] * 8)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in trl_rows(log.labels(), segments)))
    dialogs = [dialog for file in find_logs([str(path)])[0] for dialog in read_log(file)]
    assert [(dialog.messages[-1]["content"], dialog.messages[-1]["reward"]) for dialog in dialogs[:2]] == [
        ("good 0", 1.0),
        ("bad 0", 0.0),
    ]


def test_labels_of_clips_and_of_different_contexts_are_no_rows(log, segments):
    clip = [
        Clip(np.full((2, 3), i, np.float32), np.zeros(2, np.int64), np.zeros(2, np.float32), 2)
        for i in range(2)
    ]
    log.add_query(*map(segments.add, clip))
    label = log.answer(log.lease("ann").id, "ann", "left")
    with pytest.raises(UserError, match="expected labels of replies, got one of clips"):
        list(trl_rows([label], segments))
    one, other = segments.add(Reply(CONTEXT, "a")), segments.add(Reply(CONTEXT[1:], "b"))
    with pytest.raises(UserError, match="expected two replies to one context"):
        list(trl_rows([replace(label, first=one, second=other)], segments))


def test_the_labels_of_a_run_of_an_earlier_version(log, store_url, tmp_path):
    """Before there were plans, gold pairs and remarks. Who reads it makes nothing; a labeller does."""
    fill(log, ["left", "tie"])
    given = log.labels()
    with sqlalchemy.create_engine(database_url(store_url)).begin() as connection:
        for change in ("TABLE plan", "INDEX queries_with_known_answers"):
            connection.execute(sqlalchemy.text(f"DROP {change}"))
        for column in ("strength", "reasons", "flag", "undone_by"):
            connection.execute(sqlalchemy.text(f"ALTER TABLE answers DROP COLUMN {column}"))
        connection.execute(sqlalchemy.text("ALTER TABLE queries DROP COLUMN gold"))
    for _ in range(2):
        with pytest.raises(UserError, match="an earlier version's, which opens once .* a labeller"):
            open_labels(tmp_path, store_url)
    LabelLog(store_url).close()
    old, _ = open_labels(tmp_path, store_url)
    assert old.labels() == given and old.answers()[0].strength is None
    old.close()


@pytest.mark.parametrize(
    "table", ["other (id INTEGER)", "answers (id INTEGER)", "plan (name TEXT, value TEXT)"]
)
def test_nothing_is_made_in_another_programs_database(tmp_path, table):
    """Also where a table of it could be ours."""
    with closing(sqlite3.connect(tmp_path / "labels.db")) as connection, connection:
        connection.execute(f"CREATE TABLE {table}")
    with pytest.raises(UserError, match="expected a log of labels, missing"):
        open_labels(tmp_path)
    with closing(sqlite3.connect(tmp_path / "labels.db")) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [(table.split()[0],)]


def test_a_run_takes_over_what_everybody_said(tmp_path, segments):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "prefer.yaml").write_text("{}")
    old, url = LabelLog(f"sqlite:///{tmp_path}/old/labels.db"), f"sqlite:///{tmp_path}/new.db"
    old.set_plan(overlap=2)
    kept = Segments(tmp_path / "old" / "clips")
    old.add_query(*(kept.add(Reply(CONTEXT, text)) for text in ("a", "b")), validation=False)
    for who, choice in (("ann", "left"), ("bob", "right")):
        old.answer(old.lease(who).id, who, choice, Remarks(2, ("polite",), "odd"))
    assert take_over(tmp_path / "old", tmp_path, url) == 2
    log, told = LabelLog(url), attrgetter("labeller", "preference", "strength", "reasons", "flag")
    assert [told(one) for one in log.answers()] == [told(one) for one in old.answers()]
    assert told(log.answers()[1])[2:] == (2, ["polite"], "odd") and log.counts()["labels"] == 1
    assert {segments[id].text for id in (log.labels()[0].first, log.labels()[0].second)} == {"a", "b"}
    old.close()
    log.close()


def test_the_labels_of_a_run(tmp_path, store_url):
    with pytest.raises(UserError, match="found nothing at"):
        open_labels(tmp_path)
    LabelLog(f"sqlite:///{tmp_path}/labels.db").close()
    id = Segments(tmp_path / "clips").add(Reply(CONTEXT, "a"))
    log, segments = open_labels(tmp_path)
    assert log.labels() == [] and segments[id].text == "a"
    with pytest.raises(UserError, match=r"expected the segment b in .*, found none; .* copy or move both"):
        segments["b"]
    log.close()
    LabelLog(store_url).close()
    log, _ = open_labels(tmp_path, store_url)
    assert log.counts()["labels"] == 0
    log.close()
