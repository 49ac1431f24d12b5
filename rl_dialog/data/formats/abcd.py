"""ABCD: the full file ({train, dev, test}, each a list of conversations) and the sample (a list). `original`
holds [speaker, text] rows; the rows of `action` become tool messages. The lower-cased, delexicalised copy is
not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.records import Record, dialogs, mismatch, records, split_of
from rl_dialog.data.schema import Dialog

ROLES = {"agent": "assistant", "customer": "user", "action": "tool"}
KEYS = {"convo_id", "original"}


def matches(head: Head) -> bool:
    if isinstance(head.top, dict) and head.top:
        name, conversations = next(iter(head.top.items()))
        conversation = conversations[0] if isinstance(conversations, list) and conversations else None
        return (
            name in ("train", "dev", "test")
            and isinstance(conversation, dict)
            and conversation.keys() >= KEYS
        )
    return any(record.keys() >= KEYS for record in head.records)


def corpus(head: Head) -> str | None:
    return "abcd"


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(
        log,
        records(log, max_line_bytes=max_line_bytes, object_depth=2),
        lambda record: [_dialog(log, record)],
    )


def _dialog(log: LogFile, record: Record) -> Dialog:
    row = record.value
    if not isinstance(row, dict) or not row.keys() >= KEYS:
        raise mismatch(
            "", "an object with convo_id and original", sorted(row) if isinstance(row, dict) else row
        )
    where = f"dialog {row['convo_id']!r}"
    split = record.path[0] if len(record.path) == 2 else None
    return Dialog(
        id=f"abcd-{row['convo_id']}",
        messages=[_message(turn, f"{where}, turn {number}") for number, turn in enumerate(row["original"])],
        source=log.corpus,
        split=split_of(split, f"{where}, split"),
        goal=row.get("scenario"),
    )


def _message(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, list) or len(turn) != 2 or turn[0] not in ROLES:
        raise mismatch(where, f"[speaker, text] with a speaker of {sorted(ROLES)}", turn)
    return {"role": ROLES[turn[0]], "content": turn[1]}
