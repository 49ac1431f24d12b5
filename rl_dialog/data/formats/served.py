"""Chats that `pipelines.serve` stored: an SQLite file, found among other logs by its first bytes, or a
PostgreSQL database, given by its URL.

A store is read in pieces, ranges of its chats, so that several tasks read at once. What was said after the
pieces were cut is left for the next time, so a store may be read while it is in use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError

from rl_dialog.data.database import plain_reason
from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile, bad
from rl_dialog.data.formats.records import Record, dialogs
from rl_dialog.data.schema import Dialog
from rl_dialog.data.served_dialogs import SOURCE, chat_dialogs
from rl_dialog.data.store import Store

PIECE = 2000  # chats
TABLES = {"chats", "turns"}
MEMBER = "chats {} to {}, turns up to {}"


def matches(head: Head) -> bool:
    return set(head.tables) >= TABLES


def corpus(head: Head) -> str | None:
    return SOURCE


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    """Raises ConnectionError when the database does not answer: its chats are not bad, they can be read
    later."""
    first, last, last_turn = map(int, re.findall(r"\d+", log.member or ""))
    try:
        store = _open(log)
    except ValueError as error:
        raise ConnectionError(str(error)) from None
    with closing(store):
        records = (
            Record(thread, f"chat {thread[0][0].id}", thread[0][0].number)
            for thread in store.threads(first, last, last_turn=last_turn)
        )
        try:
            yield from dialogs(log, records, lambda record: chat_dialogs(*record.value))
        except OperationalError as error:
            raise ConnectionError(
                f"expected the database {log.path} to answer, got: {plain_reason(error)}"
            ) from None


def pieces(log: LogFile) -> list[LogFile | Bad]:
    """The store as logs of at most PIECE chats each. A server that cannot be reached raises UserError; a file
    that is no store is a Bad."""
    try:
        with closing(_open(log)) as store:
            ranges, last_turn = store.ranges(PIECE)
    except ValueError as error:
        if log.url:
            raise
        return [bad(log, "", str(error))]
    if not ranges:
        return [
            bad(
                log,
                "",
                "expected served chats, got a store without a reply: talk to a model first (python -m "
                "pipelines.serve --help)",
            )
        ]
    return [replace(log, member=MEMBER.format(first, last, last_turn)) for first, last in ranges]


def fingerprint(log: LogFile) -> dict[str, Any]:
    """How far the store had come: the number of its chats and turns, the last of each, and its last change;
    `sha256` is of these figures, not of the texts."""
    with closing(_open(log)) as store:
        figures = store.extent()
    return figures | {"sha256": hashlib.sha256(json.dumps(figures).encode()).hexdigest()}


def _open(log: LogFile) -> Store:
    return Store(log.url or URL.create("sqlite", database=log.path), create=False)
