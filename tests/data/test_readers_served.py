"""Stores of served chats among other logs: how they are found, cut into pieces and read, and what is said of
those that are none."""

from __future__ import annotations

import gzip
import os
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from rl_dialog.cluster.scoring import group_logs
from rl_dialog.data.building import fingerprint
from rl_dialog.data.formats import served
from rl_dialog.data.readers import Bad, Dialog, find_logs, read_log
from rl_dialog.data.schema import write_jsonl
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError

MADE = {"model": "bot", "checkpoint": "c", "method": "bc", "settings": {}, "seconds": 0.1}


def fill(url, count, *, first=0):
    """`count` chats of one reply, every second of them with a vote."""
    store = Store(url)
    for number in range(first, first + count):
        store.add_turns(
            [{"role": "user", "content": f"hi {number}"}],
            [("Hello", "stop", {})],
            completion=f"c{number}",
            user=f"u{number}",
            **MADE,
        )
        if number % 2:
            store.feedback(f"c{number}", vote=1)
    return store


def read(logs):
    items = [item for log in logs for item in read_log(log)]
    return [item for item in items if isinstance(item, Dialog)], [
        item for item in items if isinstance(item, Bad)
    ]


def test_a_store_is_read_in_pieces_that_hold_every_chat_once(store_url, monkeypatch):
    monkeypatch.setattr(served, "PIECE", 4)
    store = fill(store_url, 12)
    assert store.delete_user("u3") + store.delete_user("u9") == 2  # gaps in the numbers
    store.start_chat(model="bot")
    logs, bads, skipped = find_logs([store_url, store_url])
    assert [log.member for log in logs] == [
        "chats 1 to 5, turns up to 12",
        "chats 6 to 10, turns up to 12",
        "chats 11 to 12, turns up to 12",
    ]
    assert not bads and ["also given as" in skip.reason for skip in skipped] == [True]
    dialogs, bads = read(logs)
    assert dialogs == list(store.dialogs()) and len(dialogs) == 10 and not bads
    assert {dialog.source for dialog in dialogs} == {"served"} == {log.corpus for log in logs}
    assert "hunter2" not in repr(logs) + str([log.name for log in logs])
    store.close()


def test_what_is_said_while_a_store_is_read_is_left_for_the_next_time(store_url):
    store = fill(store_url, 3)
    before = list(store.dialogs())
    logs, _, _ = find_logs([store_url])
    store.add_turns(
        [*before[0].messages, {"role": "user", "content": "more"}],
        [("x", "stop", {})],
        completion="late",
        user="u0",
        **MADE,
    )
    fill(store_url, 2, first=10).close()
    assert read(logs)[0] == before
    assert len(read(find_logs([store_url])[0])[0]) == 5
    store.close()


def test_the_fingerprint_tells_every_change(store_url):
    store = fill(store_url, 2)
    [log] = find_logs([store_url])[0]
    found = [fingerprint(log)[log.path]]
    changes = [
        lambda: store.feedback("c0", vote=-1),
        lambda: store.rate(next(store.threads())[0][0].id, {"quality": 1}),
        lambda: store.delete_user("u1"),
    ]
    changes += [lambda: fill(store_url, 1, first=5).close()]
    for change in changes:
        change()
        found.append(fingerprint(log)[log.path])
        assert fingerprint(log)[log.path] == found[-1]
    assert len({figures["sha256"] for figures in found}) == len(found)
    assert {name: value for name, value in found[-1].items() if name not in ("sha256", "updated")} == dict(
        chats=2, turns=2, last_chat=3, last_turn=3
    )
    store.close()


def test_a_file_is_known_by_its_first_bytes(tmp_path):
    fill(f"sqlite:///{tmp_path}/made.db", 2).close()
    os.rename(tmp_path / "made.db", tmp_path / "100% chats ?#.log")
    write_jsonl(
        [Dialog("d", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])],
        tmp_path / "z.jsonl",
    )
    store = Store(f"sqlite:///{tmp_path}/open.db")  # stands open: with -wal and -shm beside it
    store.add_turns([{"role": "user", "content": "hey"}], [("Yes?", "stop", {})], completion="c", **MADE)
    logs, bads, skipped = find_logs([str(tmp_path)])
    assert [(Path(log.path).name, log.reader) for log in logs] == [
        ("100% chats ?#.log", "served"),
        ("open.db", "served"),
        ("z.jsonl", "dialog"),
    ]
    assert not bads and {Path(skip.file).name: skip.reason for skip in skipped} == dict.fromkeys(
        ("open.db-shm", "open.db-wal"), "part of the SQLite database beside it"
    )
    assert [d.messages[0]["content"] for d in read(logs)[0]] == ["hi 0", "hi 1", "hey", "a"]
    assert [log.reader for log in find_logs([str(tmp_path / "open.db")], reader="served")[0]] == ["served"]
    assert group_logs(logs) == [[0, 1, 2]]
    store.close()


def test_a_store_that_stands_in_a_relative_url_is_found_from_anywhere(tmp_path, monkeypatch):
    fill(f"sqlite:///{tmp_path}/chats.db", 1).close()
    monkeypatch.chdir(tmp_path)
    logs, _, _ = find_logs(["sqlite:///chats.db"])
    monkeypatch.chdir("/")
    assert len(read(logs)[0]) == 1


def test_what_is_no_store_or_an_empty_one(tmp_path):
    with sqlite3.connect(tmp_path / "songs.db") as connection:
        connection.execute("CREATE TABLE songs (name)")
    with sqlite3.connect(tmp_path / "old.db") as connection:
        connection.execute("CREATE TABLE chats (number)")
        connection.execute("CREATE TABLE turns (number)")
    Store(f"sqlite:///{tmp_path}/empty.db").start_chat(model="bot")
    fill(f"sqlite:///{tmp_path}/whole.db", 1).close()
    whole = (tmp_path / "whole.db").read_bytes()
    (tmp_path / "cut.db").write_bytes(whole[:5000])
    (tmp_path / "packed.db.gz").write_bytes(gzip.compress(whole))
    for name, reason in (
        ("songs.db", "no reader recognises this file: .*an SQLite database with the tables songs"),
        ("old.db", "missing the columns id, thread"),
        ("empty.db", "a store without a reply"),
        ("cut.db", "malformed"),
        ("packed.db.gz", "unpack it"),
    ):
        logs, [bad], _ = find_logs([str(tmp_path / name)])
        assert not logs and bad.file.endswith(name)
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(bad.reason)
    with pytest.raises(UserError, match="found nothing at .*whole.bd; did you mean 'whole.db'"):
        find_logs([f"sqlite:///{tmp_path}/whole.bd"])
    assert not (tmp_path / "whole.bd").exists()


def test_a_chat_that_was_tampered_with_is_quarantined_alone(tmp_path):
    store = fill(f"sqlite:///{tmp_path}/chats.db", 3)
    with sqlite3.connect(tmp_path / "chats.db") as connection:
        connection.execute(
            """UPDATE turns SET prompt = '[{"role": "robot", "content": "x"}]' WHERE number = 2"""
        )
    dialogs, [bad] = read(find_logs([str(tmp_path / "chats.db")])[0])
    assert [d.messages[0]["content"] for d in dialogs] == ["hi 0", "hi 2"]
    assert (
        bad.where == f"chat {[chat.id for (chat,), *_ in store.threads()][1]}"
        and "`role` to be one of" in bad.reason
    )
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter2@127.0.0.1:1/chats",
        "postgresql://ann@127.0.0.1:1/chats?password=hunter2",
        "mysql://a:hunter2@h/d",
    ],
)
def test_passwords_are_not_in_errors(url):
    with pytest.raises(UserError) as raised:
        find_logs([url])
    assert "hunter2" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.postgres
def test_a_database_that_stops_answering_is_no_bad_record(postgres_url, monkeypatch):
    """The chats can be read later, so the run ends instead of going on without them."""
    store = fill(postgres_url, 3)
    monkeypatch.setattr("rl_dialog.data.store.CHATS_AT_ONCE", 1)
    [log] = find_logs([postgres_url])[0]
    with pytest.raises(UserError, match="expected --reader served for the store"):
        find_logs([postgres_url], reader="openai")
    reading = read_log(log)
    next(reading)
    database = make_url(postgres_url)
    with create_engine(
        database.set(drivername="postgresql+psycopg", database="postgres"), isolation_level="AUTOCOMMIT"
    ).connect() as connection:
        connection.execute(text(f"DROP DATABASE {database.database} WITH (FORCE)"))
    for wait in (reading, read_log(log)):
        with pytest.raises(ConnectionError, match="does not exist") as raised:
            next(wait)
        assert "hunter2" not in str(raised.value) and log.path in str(raised.value)
    store.close()
