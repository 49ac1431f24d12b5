"""Our own Dialogs: JSON lines as `Dialog.to_json` writes them, Parquet rows of `schema.ARROW_SCHEMA`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.data.formats import openai
from rl_dialog.data.formats.head import Head, look
from rl_dialog.data.formats.log_file import Bad, LogFile, bad
from rl_dialog.data.formats.records import Record, dialogs
from rl_dialog.data.schema import ARROW_SCHEMA, Dialog

COLUMNS = set(ARROW_SCHEMA.names)


def matches(head: Head) -> bool:
    if head.kind == "parquet":
        return _own_columns(head)
    return any({"id", "messages"} <= record.keys() <= COLUMNS for record in head.records)


def corpus(head: Head) -> str | None:
    return None


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    head = look(log.path, log.member)
    if head.kind != "parquet":
        yield from openai.read(log, max_line_bytes=max_line_bytes)
    elif missing := COLUMNS - set(head.columns):
        yield bad(
            log,
            "",
            f"expected the columns {sorted(COLUMNS)}, missing {sorted(missing)}; got {sorted(head.columns)}",
        )
    else:
        yield from dialogs(log, _rows(log), lambda record: [_own(log, record)])


def _own_columns(head: Head) -> bool:
    """Messages that carry their extra keys as JSON text are ours alone."""
    messages = head.records[0].get("messages") if head.records else None
    return (
        bool(messages)
        and isinstance(messages, list)
        and isinstance(messages[0], dict)
        and set(messages[0]) == {"role", "content", "extra"}
    )


def _rows(log: LogFile) -> Iterator[Record]:
    number = 0
    with pq.ParquetFile(log.path) as file:
        for batch in file.iter_batches(batch_size=256, columns=ARROW_SCHEMA.names):
            for row in pa.Table.from_batches([batch]).to_pylist():
                number += 1
                yield Record(row, f"row {number}", number)


def _own(log: LogFile, record: Record) -> Dialog:
    dialog = Dialog.from_row(record.value)
    dialog.source = dialog.source or log.corpus
    return dialog
