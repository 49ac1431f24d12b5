"""Parsed records of any container, and the loop that turns them into Dialogs or quarantine entries."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.data.formats.head import look
from rl_dialog.data.formats.json_stream import json_items
from rl_dialog.data.formats.log_file import Bad, LogFile, bad, lines, open_log, shown
from rl_dialog.data.schema import SPLITS, Dialog, DialogError

SPLIT_NAMES = {"val": "validation", "valid": "validation", "dev": "validation"} | {
    name: name for name in SPLITS
}


@dataclass(frozen=True, slots=True)
class Record:
    """One parsed record and where it stands."""

    value: Any  # parsed JSON, a dict of a CSV or Parquet row, or a line of text
    where: str  # "line 3", "item 3", "row 3" or a key
    number: int  # 3
    came: str = ""  # the beginning of its text
    path: tuple[str | int, ...] = ()  # keys and indices inside one JSON value


def dialogs(
    log: LogFile, file_records: Iterable[Record | Bad], convert: Callable[[Record], Iterable[Dialog | Bad]]
) -> Iterator[Dialog | Bad]:
    """`convert` on every record; a record that it cannot take becomes Bad and the next one is read."""
    for record in file_records:
        if isinstance(record, Bad):
            yield record
            continue
        try:
            converted = list(convert(record))  # a pair is quarantined whole
        except DialogError as error:
            converted = [bad(log, record.where, str(error), record.came or shown(record.value))]
        except Exception as error:  # a shape that the format did not foresee must not stop the job
            reason = (
                f"expected a record of this format, got one that fails with {type(error).__name__}: {error}"
            )
            converted = [bad(log, record.where, reason, record.came or shown(record.value))]
        yield from converted


def records(log: LogFile, *, max_line_bytes: int, object_depth: int = 0) -> Iterator[Record | Bad]:
    """Every record of the file. `object_depth` is how far below the top of a JSON object its records lie (0:
    the object is the record)."""
    head = look(log.path, log.member)
    if head.problem:
        yield bad(log, "", head.problem)
    elif head.kind == "parquet":
        yield from _parquet_rows(log)
    elif head.kind == "csv":
        yield from csv_rows(log, max_line_bytes=max_line_bytes)
    elif head.kind in ("array", "object"):
        yield from _items(log, 1 if head.kind == "array" else object_depth, max_line_bytes)
    else:
        yield from _lines(log, max_line_bytes, parse=head.kind == "lines")


def mismatch(where: str, expected: str, got: Any) -> DialogError:
    """The error of a record that is not what its format says."""
    return DialogError(
        f"{where}: expected {expected}, got {shown(got)!r}"
        if where
        else f"expected {expected}, got {shown(got)!r}"
    )


def split_of(name: Any, where: str = "split") -> str | None:
    """The corpus's word for a split as ours; null (in CSV: empty) is null."""
    if name in (None, ""):
        return None
    if str(name).lower() not in SPLIT_NAMES:
        raise mismatch(where, f"one of {sorted(SPLIT_NAMES)} or null", name)
    return SPLIT_NAMES[str(name).lower()]


def compact(value: Any) -> Any:
    """Annotations without what is empty ("", [], {}, null and "not mentioned"): a belief state is mostly
    empty slots."""
    if isinstance(value, dict):
        return {
            key: compacted
            for key, item in value.items()
            if (compacted := compact(item)) not in ("", [], {}, None, "not mentioned")
        }
    return value


def _lines(log: LogFile, limit: int, *, parse: bool) -> Iterator[Record | Bad]:
    with open_log(log.path, log.member) as stream:
        for number, line, size in lines(stream, limit):
            where = f"line {number}"
            if size > limit:
                yield bad(
                    log,
                    where,
                    f"expected a line of at most {limit} bytes (max_line_bytes), got {size} bytes",
                    line,
                )
                continue
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8").strip()
                yield Record(json.loads(text) if parse else text, where, number, text[:200])
            except UnicodeDecodeError as error:
                yield bad(
                    log,
                    where,
                    f"expected UTF-8 text, got byte 0x{line[error.start]:02x} at column {error.start + 1}",
                    line,
                )
            except (ValueError, RecursionError) as error:
                yield bad(log, where, f"expected one JSON object per line, got invalid JSON: {error}", line)


def _items(log: LogFile, depth: int, limit: int) -> Iterator[Record | Bad]:
    with open_log(log.path, log.member) as stream:
        for item in json_items(stream, depth, limit):
            last_step = item.path[-1] if item.path else 0
            number = last_step + 1 if isinstance(last_step, int) else 0
            where = " ".join(f"item {step + 1}" if isinstance(step, int) else step for step in item.path)
            if item.problem:
                yield bad(log, where, item.problem, item.text)
            else:
                yield Record(item.value, where, number, item.text, item.path)


def csv_rows(log: LogFile, *, max_line_bytes: int) -> Iterator[Record | Bad]:
    """Rows as {column: text}; text stays text ("NA", "null" and "" too). `number` is the line on which a row
    begins."""
    csv.field_size_limit(max(csv.field_size_limit(), max_line_bytes))
    with open_log(log.path, log.member) as stream:
        feed = _CsvLines(log, lines(stream, max_line_bytes), max_line_bytes)
        rows = csv.reader(feed)
        header: list[str] = []
        while True:
            feed.begins = 0
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield bad(
                    log,
                    f"line {feed.begins}",
                    f"expected a CSV row, got one that ends at line {feed.number} with: {error}",
                )
                continue
            unreadable = feed.take_bad()
            yield from unreadable
            if unreadable and not header:
                yield bad(
                    log,
                    "",
                    "expected the column names on the first line; it cannot be read, so the rows cannot be "
                    "told apart",
                )
                return
            if row is None:
                return
            if not any(map(str.strip, row)):  # below a table spreadsheets write rows of nothing but commas
                continue
            if not header:
                header = row
                if twice := next((name for name in header if name and header.count(name) > 1), ""):
                    yield bad(log, f"line {feed.begins}", f"expected each column once, got {twice!r} twice")
                    return
            elif len(row) != len(header):
                yield bad(log, f"line {feed.begins}", _row_length(header, row, feed), ",".join(row))
            else:
                yield Record(dict(zip(header, row, strict=True)), f"line {feed.begins}", feed.begins)


def _row_length(header: list[str], row: list[str], feed: _CsvLines) -> str:
    spans = (
        f"; it goes from line {feed.begins} to line {feed.number}: an unclosed quote?"
        if feed.number > feed.begins
        else ""
    )
    return f"expected {len(header)} fields ({', '.join(header[:4])}, ...), got {len(row)}{spans}"


class _CsvLines:
    """The decoded lines that csv.reader asks for; lines that cannot be decoded are kept out of it and
    reported."""

    def __init__(self, log: LogFile, source: Iterator[tuple[int, bytes, int]], limit: int) -> None:
        self.log, self.source, self.limit = log, source, limit
        self.number = 0  # of the line that was handed out last
        self.begins = 0  # of the first line handed out since this was set to 0: where the current row begins
        self.bad: list[Bad] = []

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        for number, line, size in self.source:
            self.number = number
            if size > self.limit:
                reason = f"expected a line of at most {self.limit} bytes (max_line_bytes), got {size} bytes"
                self.bad.append(bad(self.log, f"line {self.number}", reason, line))
                continue
            try:
                text = line.decode("utf-8")
                self.begins = self.begins or number
                return text
            except UnicodeDecodeError as error:
                reason = (
                    f"expected UTF-8 text, got byte 0x{line[error.start]:02x} at column {error.start + 1}"
                )
                self.bad.append(bad(self.log, f"line {self.number}", reason, line))
        raise StopIteration

    def take_bad(self) -> list[Bad]:
        bad_records, self.bad = self.bad, []
        return bad_records


def _parquet_rows(log: LogFile) -> Iterator[Record]:
    number = 0
    with pq.ParquetFile(log.path) as file:
        for batch in file.iter_batches(batch_size=256):
            for row in pa.Table.from_batches([batch]).to_pylist():
                number += 1
                yield Record(_present(row), f"row {number}", number)


def _present(value: Any) -> Any:
    """An Arrow row as JSON has it: structs fill absent keys with null (a message's `content` may really be
    null), and dates become text."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return str(value) if isinstance(value, date | time | timedelta | Decimal | bytes) else value
