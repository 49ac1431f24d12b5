"""Logs of any known format to Dialogs: `find_logs` says what to read and with which reader, `read_log` reads
one file (of a store, one piece).

The reader is chosen by what a file's beginning holds, not by its extension. A malformed file, row or message
never stops the reading and never disappears: it comes out as a `Bad` with file, place and reason. Files known
not to be dialogs come out as `Skipped`.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from rl_dialog.data.database import database_url, shown_url
from rl_dialog.data.formats import (
    abcd,
    convlab,
    deal_or_not,
    dialog,
    multiwoz,
    neural_chat,
    openai,
    reddit,
    served,
    sharegpt,
    taskmaster,
    trl,
)
from rl_dialog.data.formats.head import Head, look
from rl_dialog.data.formats.json_stream import JsonError
from rl_dialog.data.formats.log_file import Bad, LogFile, Skipped, full_name, open_log, shown
from rl_dialog.data.formats.records import Record, dialogs
from rl_dialog.data.schema import Dialog, DialogError
from rl_dialog.data.shards import FORMAT, MANIFEST, RECIPE
from rl_dialog.errors import UserError, page
from rl_dialog.own import line_in, own

__all__ = [
    "READERS",
    "Bad",
    "LogFile",
    "Skipped",
    "find_logs",
    "read_log",
    "dialogs_of_logs",
    "read_logs",
    "write_quarantine",
]

STOPPED = "reading stopped here, and what follows in this file was not read"  # how such a reason begins

READERS = {  # the first one that matches reads the file
    "dialog": dialog,
    "sharegpt": sharegpt,
    "trl": trl,
    "openai": openai,
    "convlab": convlab,
    "multiwoz": multiwoz,
    "taskmaster": taskmaster,
    "abcd": abcd,
    "deal_or_not": deal_or_not,
    "neural_chat": neural_chat,
    "reddit": reddit,
    "served": served,
}

# Skipped by name alone: text about the data, which may quote a record. A data file may well be called
# notice.jsonl.
DOCUMENTS = re.compile(
    r"(?:readme|licen[cs]e|notice|copying|changelog|citation|authors)\b(?!.*\.(?:jsonl?|csv|parquet|zip|gz)$).*"
    r"|.*\.(?:md|rst|py|ipynb|html?|pdf|png|jpe?g|gif|svg|ya?ml|toml|sh)"
)

# Skipped where no reader recognises the content; with a reader of the user's own, only OURS. Matched against
# the end of the lower-case path.
OURS = (
    r"(?:manifest\.json|quarantine\.jsonl|rl_dialog\.yaml|metrics\.jsonl?)",
    "written by this project about other files",
)
AUXILIARY = (
    OURS,
    (r"(?:results|tasks)\.json", OURS[1]),
    (r"ontology[^/]*\.json", "an ontology"),
    (r"schema\.json", "a schema"),
    (r"(?:kb|guidelines|utterances|actions|api)\.json", "a corpus's guidelines or knowledge base"),
    (r"(?:db|database)/[^/]+|[a-z]+_db\.(?:json|db)|postcode\.json", "a database of entities"),
    (r"goal/[^/]+\.json|[^/]*goal_model\.json", "a goal model"),
    (r"nlg/[^/]+\.json|[^/]*_template_nlg\.json", "templates for language generation"),
    (
        r"[^/]*voc\.txt|[^/]*value_dict\.json|all_value\.json|da_slot_cnt\.json|trackable_intent\.json",
        "a vocabulary or count table",
    ),
    (
        r"(?:dialog_acts|dialogue_acts|system_acts|slot_descriptions|attraction_phrases)\.json",
        "annotations without the talk",
    ),
    (r"[^/]+-(?:wal|shm|journal)", "part of the SQLite database beside it"),
    (r"(?:val|test)listfile\.(?:json|txt)", "a list of dialog ids, read together with data.json"),
    (r"selfplay\.txt", "negotiation scenarios without dialogs"),
    (
        r"(?:splits?|train-dev-test)/.*\.(?:tsv|csv)",
        "ids or derived pairs of dialogs that stand in the corpus's JSON files",
    ),
)

# A file that repeats records of another one in the same folder or zip: (file, the other).
REPEATS = (
    (r"(?:train|val|test)\.txt", ("data.txt",)),
    (r"data/dialogues\.json", ("data.zip",)),
    (r"dummy_data\.json", ("data.zip", "data/dialogues.json")),
    (r"sample\.json", ("self-dialogs.json",)),
    (r"abcd_sample\.json", ("abcd_v1.1.json", "abcd_v1.1.json.gz")),
)


def find_logs(
    paths: Sequence[str], *, reader: str | None = None
) -> tuple[list[LogFile], list[Bad], list[Skipped]]:
    """What to read among files, folders (searched recursively, in sorted order) and the URLs of stores, what
    is broken, and what is known not to be dialogs.

    `reader` forces one reader for every file. Raises UserError for an unknown reader, a missing path, a
    folder without any log and a store that cannot be reached.
    """
    if reader is not None:
        _reader(reader)
    logs: list[LogFile] = []
    bad: list[Bad] = []
    skipped: list[Skipped] = []
    names: dict[Path, str] = {}
    for path in paths:
        results = [piece for result in _judged(path, reader, names) for piece in _pieces(result)]
        logs += [result for result in results if isinstance(result, LogFile)]
        bad += [result for result in results if isinstance(result, Bad)]
        skipped += [result for result in results if isinstance(result, Skipped)]
        if Path(path).is_dir() and all(
            isinstance(result, Skipped) and "also given as" not in result.reason for result in results
        ):
            among = (
                ", ".join(sorted({PurePosixPath(result.file).name for result in results})[:5]) or "nothing"
            )
            raise UserError(
                f"expected logs in the folder {path}, found {among}; the readers are {', '.join(READERS)}"
            )
    return _distinct(logs), bad, skipped


def read_log(log: LogFile, *, max_line_bytes: int = 64 << 20) -> Iterator[Dialog | Bad]:
    """The dialogs of one file in its order, and a Bad for everything in it that is not one. Memory stays flat
    however long the file is."""
    reader, count = _reader(log.reader), 0
    try:
        for item in reader.read(log, max_line_bytes=max_line_bytes):
            count += 1
            yield item
    except ConnectionError:  # nothing is damaged
        raise
    except Exception as error:  # the file is damaged from here on; what came before is already out
        where = f"after record {count}" if count else ""
        yield Bad(log.name, where, f"{STOPPED}: {_plain(error)}", log.corpus)
        return
    if not count:
        yield Bad(log.name, "", "expected dialogs, got a file without any record", log.corpus)


def _reader(name: str) -> Any:
    """The module of READERS, or the user's own `module:function`. Raises UserError for what is neither."""
    if name in READERS:
        return READERS[name]
    if ":" not in name:
        expected = f"{', '.join(READERS)}, or module:function for one of your own"
        raise UserError(f"expected one of the readers {expected}, got {name!r}{_suggestion(name, READERS)}")
    function = own(name, "reader")
    if not callable(function):
        raise UserError(
            f"reader {name!r}: expected a function that takes an open text file, got {function!r}"
        )
    return _Own(name, function)


class _ReaderFailed(Exception):
    """The user's function raised something; the message says what and where."""


@dataclass(frozen=True)
class _Own:
    """A user's function as a reader (data/formats/example.py is one)."""

    name: str
    function: Callable[[TextIO], Iterable[dict[str, Any]]]

    def corpus(self, head: Head) -> str | None:
        return None

    def read(self, log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
        with open_log(log.path, log.member) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as file:
            yield from dialogs(log, self._records(file), lambda record: [self._dialog(log, record)])

    def _records(self, file: TextIO) -> Iterator[Record]:
        try:
            for number, record in enumerate(self.function(file), 1):
                yield Record(record, f"record {number}", number)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):  # of the file
            raise
        except Exception as error:
            where = line_in(self.function.__module__, error)
            raise _ReaderFailed(
                f"the reader {self.name} raised {type(error).__name__}: {error}{where}; let it yield such "
                "records as they are, and those that are no dialogs go to quarantine one by one"
            ) from error

    def _dialog(self, log: LogFile, record: Record) -> Dialog:
        if not isinstance(record.value, dict):
            raise DialogError(f"expected a dict with `messages`, got {type(record.value).__name__}")
        return Dialog.from_record({"id": log.dialog_id(record.number), "source": log.corpus} | record.value)


def read_logs(paths: Iterable[str | Path]) -> tuple[list[Dialog], list[Bad]]:
    """All dialogs of files and folders, and what could not be read. Raises UserError for paths where there is
    nothing."""
    logs, bad, _ = find_logs([str(path) for path in paths])
    items = [item for log in logs for item in read_log(log)]
    dialogs = [item for item in items if isinstance(item, Dialog)]
    return dialogs, [*bad, *(item for item in items if isinstance(item, Bad))]


def write_quarantine(bad: Iterable[Bad], folder: Path) -> None:
    """What could not be read, one record per line, in the folder's quarantine.jsonl; an earlier one there is
    replaced."""
    lines = (json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in bad)
    (folder / "quarantine.jsonl").write_text("".join(lines), encoding="utf-8")


def dialogs_of_logs(paths: Sequence[str]) -> Iterator[Dialog]:
    """The dialogs of files and folders. Raises UserError for the first record that cannot be read."""
    logs, bad, _ = find_logs(paths)
    for item in chain(bad, *map(read_log, logs)):
        if isinstance(item, Bad):
            raise UserError(
                f"{item.file} {item.where}: {item.reason} (`prepare` puts such records into quarantine)"
            )
        yield item


@dataclass(frozen=True)
class _File:
    """A file on the way to being judged."""

    path: str
    member: str | None
    corpus: str  # for logs of the user's own: the folder, or the stem of a file that was named itself
    siblings: frozenset[str] = field(
        default=frozenset(), repr=False
    )  # every name in the same folder or zip, for REPEATS
    problem: str = ""
    named: bool = False  # given itself, not found in a folder or zip

    @property
    def name(self) -> str:
        return full_name(self.path, self.member).replace("\\", "/")


def _judged(path: str, reader: str | None, names: dict[Path, str]) -> list[LogFile | Bad | Skipped]:
    """What there is at a path or a URL."""
    if "://" not in path:
        return [_judge(file, reader, names) for file in _search(Path(path))]
    url = database_url(path)
    if url.drivername == "sqlite":
        return _judged(str(url.database), reader, names)
    name = shown_url(url)
    if reader not in (None, "served"):
        raise UserError(
            f"expected --reader served for the store {name}, got {reader!r}: leave --reader out to read "
            "stores and files together"
        )
    if Path(name) in names:
        return [Skipped(name, f"also given as {names[Path(name)]}")]
    names[Path(name)] = name
    return [LogFile(name, "served", corpus=served.SOURCE, url=url.render_as_string(hide_password=False))]


def _pieces(result: LogFile | Bad | Skipped) -> Sequence[LogFile | Bad | Skipped]:
    return served.pieces(result) if isinstance(result, LogFile) and result.reader == "served" else [result]


def _search(path: Path) -> Iterator[_File]:
    if path.is_dir():
        files = sorted(_files(path))
        names = frozenset(file.as_posix() for file in files)
        for file in files:
            corpus = (
                PurePosixPath(path.resolve().name) / file.parent.relative_to(path).as_posix()
            ).as_posix()
            yield from _unpacked(_File(str(file), None, corpus, names))
    elif path.exists():
        stem = LogFile(str(path), "").stem
        yield from _unpacked(_File(str(path), None, stem, named=True))
    else:
        nearby = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"expected a file or folder, found nothing at {path}{_suggestion(path.name, nearby)}")


def _files(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file below a folder that is not hidden; links to folders are followed, except back to one we came
    from. Below a data directory are its tokenizer and its pairs, which repeat what its shards hold; one in
    the making holds what is only half read."""
    real_folder, is_data = os.path.realpath(folder), _is_data_directory(folder)
    for entry in sorted(folder.iterdir()) if real_folder not in above else ():
        if _hidden([entry.name]):
            continue
        if entry.is_dir():
            in_the_making = ".tmp-" in entry.name and (entry / RECIPE).is_file()
            yield from () if is_data or in_the_making else _files(entry, above | {real_folder})
        elif entry.is_file():
            yield entry


def _is_data_directory(folder: Path) -> bool:
    """Whether `prepare` wrote it, in whichever version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _unpacked(file: _File) -> Iterator[_File]:
    """The members of a zip as files of their own; every other file as it is."""
    if DOCUMENTS.fullmatch(Path(file.path).name.lower()) or not _is_zip(file.path) or _copied(file):
        yield file
        return
    try:
        with zipfile.ZipFile(file.path) as archive:
            members = sorted(info.filename for info in archive.infolist() if not info.is_dir())
    except (zipfile.BadZipFile, OSError) as error:
        yield replace(file, problem=f"expected a whole zip file, got a truncated or damaged one: {error}")
        return
    names = frozenset(f"{file.name}/{member}" for member in members)
    for member in members:
        if not _hidden(PurePosixPath(member).parts):
            yield replace(file, member=member, siblings=names, named=False)


def _is_own(reader: str | None) -> bool:
    return reader is not None and reader not in READERS


def _is_zip(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
    except OSError:
        return False


def _judge(file: _File, reader: str | None, names: dict[Path, str]) -> LogFile | Bad | Skipped:
    place = Path(file.path).resolve() / (file.member or "")
    if place in names:
        return Skipped(file.name, f"also given as {names[place]}")
    names[place] = file.name
    if DOCUMENTS.fullmatch(PurePosixPath(file.name).name.lower()):
        return Skipped(file.name, "documentation or code")
    if other := _copied(file) or ("" if _is_own(reader) else _repeated(file)):
        return Skipped(file.name, f"repeats records of {other}")
    if file.problem:
        return Bad(file.name, "", file.problem, file.corpus)
    try:
        head = look(file.path, file.member)
        recognised = (
            None
            if head.problem
            else next((name for name, form in READERS.items() if form.matches(head)), None)
        )
        return _by_content(file, head, recognised, reader)
    except Exception as error:
        return Bad(file.name, "", _plain(error), file.corpus)


def _by_content(
    file: _File, head: Head, recognised: str | None, forced: str | None
) -> LogFile | Bad | Skipped:
    auxiliary = next(
        (
            description
            for pattern, description in ([OURS] if _is_own(forced) else AUXILIARY)
            if re.search(f"(?:^|/)(?:{pattern})$", file.name.lower())
        ),
        None,
    )
    unread = recognised != forced and not file.named if forced else recognised is None
    if auxiliary and unread:
        return Skipped(file.name, auxiliary)
    if name := forced or recognised:
        return LogFile(file.path, name, file.member, _reader(name).corpus(head) or file.corpus)
    if set(head.columns) >= neural_chat.RATINGS_ONLY:
        return Skipped(
            file.name, "conversation ratings without messages; the export of the chats carries them too"
        )
    return Bad(file.name, "", head.problem or _unrecognised(head), file.corpus, shown(head.text))


def _copied(file: _File) -> str:
    """The file beside this packed one that holds the same bytes; "" for none."""
    name = PurePosixPath(file.name)
    beside = name.with_suffix("").as_posix()
    if name.suffix.lower() not in (".gz", ".zip") or beside not in file.siblings:
        return ""
    bare = (file.member or file.path)[: -len(name.suffix)]
    path, member = (file.path, bare) if file.member else (bare, None)
    try:
        same = _digest(*_only_member(file)) == _digest(path, member)
    except Exception:  # damaged or encrypted, which is told where it is read
        return ""
    return beside if same else ""


def _only_member(file: _File) -> tuple[str, str | None]:
    """Of a zip with a single file, that one; every other file as it is."""
    if file.member is None and _is_zip(file.path):
        with zipfile.ZipFile(file.path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
        members = [name for name in names if not _hidden(PurePosixPath(name).parts)]
        return file.path, members[0] if len(members) == 1 else None
    return file.path, file.member


def _digest(path: str, member: str | None) -> bytes:
    with open_log(path, member) as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _repeated(file: _File) -> str:
    """The other file of the same folder or zip that holds this file's records as well; "" for none."""
    for pattern, others in REPEATS:
        match = re.search(f"(?:^|/)(?:{pattern})$", file.name)
        folder = file.name[: match.start()] if match else ""
        for other in others if match else ():
            candidate = f"{folder}/{other}" if folder else other
            if candidate in file.siblings:
                return candidate
    return ""


def _hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _unrecognised(head: Head) -> str:
    holds = f"text of the kind {head.kind!r}"
    if head.kind == "sqlite":
        holds = (
            f"an SQLite database with the tables {', '.join(head.tables[:12])}"
            if head.tables
            else "an SQLite database without tables"
        )
    elif head.kind in ("csv", "parquet"):
        holds = f"the columns {', '.join(head.columns)}"
    elif head.records:
        holds = f"the keys {', '.join(sorted(head.keys)[:12])}"
    elif "\ufffd" in head.text[:-1]:  # the last character may be cut
        holds = "text that is not UTF-8 (convert it, as with `iconv -f latin1 -t utf-8`)"
    own_format = (
        "a format of your own is read by a function of a few lines, `prepare --reader module:function`: "
    )
    own_format += f"{page('rl_dialog/data/README.md')} has one for tables"
    return f"no reader recognises this file: expected one of {', '.join(READERS)}; got {holds}; {own_format}"


def _distinct(logs: list[LogFile]) -> list[LogFile]:
    """Ids of records without one are made of corpus and stem: logs that share both carry their full name as
    corpus."""
    shared = Counter((log.corpus, log.stem) for log in logs)
    generic = {"dialog", "trl", "openai", "sharegpt", "neural_chat"}
    return [
        replace(log, corpus=log.name)
        if shared[log.corpus, log.stem] > 1 and (log.reader in generic or _is_own(log.reader))
        else log
        for log in logs
    ]


def _suggestion(word: str, names: Sequence[str] | dict) -> str:
    close = difflib.get_close_matches(word, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _plain(error: Exception) -> str:
    """What went wrong, in words."""
    if isinstance(error, JsonError | _ReaderFailed):
        return str(error)
    if isinstance(error, zlib.error):
        return f"expected whole gzip or zip data, got damaged data: {error}"
    if isinstance(error, EOFError):
        return f"expected a whole gzip file, got one that is cut off: {error}"
    if isinstance(error, zipfile.BadZipFile):
        return f"expected a whole zip file, got a damaged one: {error}"
    if isinstance(error, UnicodeDecodeError):
        got = f"expected UTF-8 text, got the byte {error.object[error.start]:#04x} of another encoding"
        return f"{got}: convert the file, from Latin-1 by `iconv -f latin1 -t utf-8 FILE > NEW_FILE`"
    if isinstance(error, OSError) and error.strerror:
        return f"the file cannot be read: {error.strerror}"
    return f"the file cannot be read: {type(error).__name__}: {error}"
