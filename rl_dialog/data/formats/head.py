"""What the beginning of a file shows: its container (JSON lines, array, object, CSV, Parquet, SQLite, text)
and its first records."""

from __future__ import annotations

import csv
import json
import sqlite3
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.data.formats.json_stream import DECODER, beginning
from rl_dialog.data.formats.log_file import BOM, full_name, lines, open_log

LENGTH = 1 << 17  # bytes of a file that are looked at
RECORDS = 20  # records that are looked at: the first ones may be broken
LINES = 100  # lines searched for them
LINE = 1 << 20  # a longer line is judged by its beginning
SQLITE = b"SQLite format 3\0"
PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"7z\xbc\xaf\x27\x1c": "7z"}


@dataclass(frozen=True)
class Head:
    """The beginning of one file."""

    path: PurePosixPath  # the file, or zip/member
    # "lines", "array", "object", "csv", "parquet", "sqlite", "text" or "" where `problem` says why there is
    # nothing to read
    kind: str
    text: str = ""
    top: Any = None  # of "array" and "object": the value as far as the beginning goes
    records: tuple[dict[str, Any], ...] = ()
    columns: tuple[str, ...] = ()  # of "csv" and "parquet"
    tables: tuple[str, ...] = ()  # of "sqlite"
    problem: str = ""

    @property
    def keys(self) -> set[str]:
        """Every key that one of the first records has, or the columns."""
        return {key for record in self.records for key in record} | set(self.columns)


def look(path: str, member: str | None = None) -> Head:
    """Reads the beginning. Raises OSError or zipfile.BadZipFile where the file cannot be opened; damage
    further on is left to the reader."""
    name = PurePosixPath(full_name(str(Path(path).absolute()), member).replace("\\", "/"))
    data, damage = _first_bytes(path, member)
    if data.startswith(b"PAR1"):
        return _parquet_head(path, name, member)
    if data.startswith(SQLITE):
        return _sqlite_head(path, name)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return Head(
            name, "", problem="expected UTF-8 text, got UTF-16; convert it with `iconv -f utf-16 -t utf-8`"
        )
    if packed := next((kind for start, kind in PACKED.items() if data.startswith(start)), ""):
        return Head(name, "", problem=f"expected a plain file, gzip or zip, got {packed}: unpack it")
    text = data.removeprefix(BOM).decode("utf-8", "replace")
    if not text.strip():
        return Head(
            name,
            "",
            problem=f"the file holds nothing that could be read: {damage}" if damage else "the file is empty",
        )
    suffixes = {suffix.lower() for suffix in name.suffixes}
    if ".csv" in suffixes and text.lstrip()[0] not in "[{":
        return Head(name, "csv", text, columns=_columns(text))
    kind = _json_kind(text, suffixes)
    if kind in ("array", "object"):
        top = beginning(text)
        items = top if isinstance(top, list) else [top]
        return Head(name, kind, text, top, tuple(item for item in items[:RECORDS] if isinstance(item, dict)))
    if records := _line_records(path, member):
        return Head(name, "lines", text, records=records)
    return Head(name, kind or "text", text, columns=_columns(text))


def _first_bytes(path: str, member: str | None) -> tuple[bytes, str]:
    """Up to LENGTH bytes, and what stopped the reading earlier ("" for nothing): of a truncated gzip the
    bytes before the cut are returned."""
    data = bytearray()
    with open_log(path, member) as stream:
        try:
            while len(data) < LENGTH and (piece := stream.read1(LENGTH - len(data))):
                data += piece
        except (EOFError, OSError, zlib.error) as error:
            return bytes(data), str(error)
    return bytes(data), ""


def _json_kind(text: str, suffixes: set[str]) -> str:
    """ "array" for one JSON value over the whole file, "object" for one or for objects of several lines each,
    "lines" for a value per line, "" for anything else."""
    named_lines = bool(suffixes & {".jsonl", ".ndjson"})
    start = text.lstrip()
    if start[0] == "[":
        return "array" if _opens_array(start) else "lines" if named_lines else ""
    if start[0] != "{" or named_lines:
        return "lines" if named_lines else ""
    try:
        _, end = DECODER.raw_decode(start)
        one_line = "\n" not in start[:end]
        return "lines" if one_line and start[end:].lstrip().startswith("{") else "object"
    except (
        ValueError,
        RecursionError,
    ):  # an object that goes on after the beginning, or a broken line among good ones
        _, _, later_lines = start.partition("\n")
        return "lines" if isinstance(_parsed(later_lines.partition("\n")[0]), dict) else "object"


def _opens_array(start: str) -> bool:
    """Whether a text that begins with `[` goes on like an array of values (and not like a broken line)."""
    inside = start[1:].lstrip()
    return inside[:1] in ("", "]") or (inside[0] in "[{" and (inside[1:].lstrip()[:1] or '"') in '"[{}]')


def _line_records(path: str, member: str | None) -> tuple[dict[str, Any], ...]:
    records: list[dict[str, Any]] = []
    with open_log(path, member) as stream:
        try:
            for number, line, size in lines(stream, LINE):
                value = _parsed(line) if size == len(line) else beginning(line.decode("utf-8", "replace"))
                records += [value] if isinstance(value, dict) else []
                if len(records) == RECORDS or number == LINES:
                    break
        except (EOFError, OSError, zlib.error):
            pass  # the reader meets the same damage and reports it
    return tuple(records)


def _parsed(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _columns(text: str) -> tuple[str, ...]:
    try:
        return tuple(next(csv.reader([text.lstrip("\r\n").split("\n", 1)[0].rstrip("\r")])))
    except (csv.Error, StopIteration):
        return ()


def _parquet_head(path: str, name: PurePosixPath, member: str | None) -> Head:
    if member is not None:
        return Head(
            name,
            "",
            problem="expected Parquet outside a zip; unpack the zip and read the Parquet file itself",
        )
    try:
        with pq.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            first_row = next(file.iter_batches(batch_size=1), None)
    except (pa.ArrowException, OSError) as error:
        return Head(name, "", problem=f"expected a whole Parquet file, got: {error}")
    if first_row is None or not first_row.num_rows:
        return Head(
            name,
            "",
            columns=columns,
            problem=f"the Parquet file holds no rows (columns: {', '.join(columns)})",
        )
    return Head(name, "parquet", records=tuple(first_row.to_pylist()), columns=columns)


def _sqlite_head(path: str, name: PurePosixPath) -> Head:
    with open(path, "rb") as file:
        if file.read(len(SQLITE)) != SQLITE:
            return Head(
                name,
                "",
                problem=(
                    "expected an SQLite database as it is, got a packed one; unpack it and read the database "
                    "itself"
                ),
            )
    try:
        address = (  # rw: SQLite may have to finish what a crash left
            f"{Path(path).absolute().as_uri()}?mode=rw"
        )
        with closing(sqlite3.connect(address, uri=True)) as connection:
            tables = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY "
                "name"
            ).fetchall()
    except sqlite3.Error as error:
        return Head(name, "", problem=f"expected a whole SQLite database, got: {error}")
    return Head(name, "sqlite", tables=tuple(table for (table,) in tables))
