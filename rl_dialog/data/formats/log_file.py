"""One file to read, what goes wrong with it, and its bytes: plain, gzipped or inside a zip, cut into lines in
bounded memory."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO

PIECE = 1 << 18  # bytes read at a time
SHOWN = 200  # characters of a bad record that are kept
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LogFile:
    """One file to read."""

    path: str
    reader: str  # key of READERS, or the user's own module:function
    member: str | None = None  # member inside a zip, chats of a store
    corpus: str = ""  # the `source` its dialogs carry where the records do not name one
    url: str = field(
        default="", repr=False
    )  # of a database server, whose `path` is for people: with its password, so it is written nowhere

    @property
    def name(self) -> str:
        return full_name(self.path, self.member)

    @property
    def stem(self) -> str:
        """The file's name without folders, compression and extension."""
        name = PurePosixPath(self.name.replace("\\", "/"))
        return (name.with_suffix("") if name.suffix.lower() == ".gz" else name).stem

    def dialog_id(self, number: int) -> str:
        """The id of a record that has none: the same whenever the file is read again."""
        prefix = f"{self.corpus}/" if self.corpus and self.corpus != self.stem else ""
        return f"{prefix}{self.stem}:{number}"


@dataclass(frozen=True)
class Bad:
    """One quarantined record; `asdict()` is a line of quarantine.jsonl."""

    file: str
    where: str  # line, row, item, dialog id, or "" for the whole file
    reason: str  # what was expected and what came
    source: str
    excerpt: str = ""  # the beginning of what came

    def __post_init__(self) -> None:
        for name, length in (
            ("file", 4096),
            ("where", SHOWN),
            ("reason", 5 * SHOWN),
            ("source", SHOWN),
            ("excerpt", SHOWN),
        ):
            object.__setattr__(self, name, _writable(getattr(self, name), length))

    def __str__(self) -> str:
        """`file:where: reason`."""
        return f"{self.file}:{self.where}: {self.reason}" if self.where else f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Skipped:
    """A file known not to be dialogs of its own: an ontology, a database, a README, a second copy."""

    file: str
    reason: str


def full_name(path: str, member: str | None) -> str:
    return path if member is None else f"{path}/{member}"


def shown(value: Any) -> str:
    """The beginning of what came, as text."""
    if isinstance(value, bytes):
        return value[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]
    return _writable(value if isinstance(value, str) else repr(value), SHOWN)


def _writable(text: str, length: int) -> str:
    """At most `length` characters that a UTF-8 file can hold: what is quarantined may contain (as a file's
    name may) bytes that are not UTF-8."""
    return text[:length].encode("utf-8", "backslashreplace").decode("utf-8")[:length]


def bad(log: LogFile, where: str, reason: str, record: Any = "") -> Bad:
    return Bad(file=log.name, where=where, reason=reason, source=log.corpus, excerpt=shown(record))


@contextmanager
def open_log(path: str, member: str | None = None) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a file or of a zip's member; gzip is known by its first bytes, whatever the
    name."""
    with ExitStack() as stack:
        if member is None:
            stream: Any = stack.enter_context(open(path, "rb"))
        else:
            archive = stack.enter_context(zipfile.ZipFile(path))
            stream = io.BufferedReader(_Pieces(stack.enter_context(archive.open(member))), PIECE)
        if stream.peek(2)[:2] == b"\x1f\x8b":
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        yield stream


class _Pieces(io.RawIOBase):
    """A zip member as a raw stream: hands over what was unpacked before a damaged place raises."""

    def __init__(self, member: zipfile.ZipExtFile) -> None:
        self._member = member

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._member.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, its size) for every line. Of a line longer than `limit` only the beginning is kept:
    memory stays bounded by `limit`."""
    number = 0
    while piece := stream.readline(PIECE):
        number += 1
        size = len(piece)
        if size == PIECE and not piece.endswith(b"\n"):
            piece, size = _long_line(stream, piece, limit)
        if number == 1 and piece.startswith(BOM):
            piece = piece[len(BOM) :]
        yield number, piece if size <= limit else piece[: 4 * SHOWN], size


def _long_line(stream: BinaryIO, beginning: bytes, limit: int) -> tuple[bytes, int]:
    line = bytearray(beginning)
    size = len(line)
    while piece := stream.readline(PIECE):
        size += len(piece)
        if size <= limit:
            line += piece
        else:
            del line[4 * SHOWN :]
        if piece.endswith(b"\n"):
            break
    return bytes(line), size
