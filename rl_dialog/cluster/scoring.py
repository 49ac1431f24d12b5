"""Pass 1 of prepare: read, score and split every dialog (data.py tells how the passes fit together)."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.cluster.data import CHUNK_BYTES, dataset, errors_of_workers, joined, peak_kib, pool, rows_of, stream_tables
from rl_dialog.data.formats import served
from rl_dialog.data.readers import Bad, LogFile, read_log
from rl_dialog.data.schema import SPLITS, Dialog, to_table
from rl_dialog.data.splits import assign_split, split_key
from rl_dialog.rewards import Statistics, apply_rewards, choose_rewards
from rl_dialog.rewards.scorers import BUILT_IN, in_batches, make_scorers

GROUP_BYTES = 16 << 20  # small files are read together up to this size
CHUNK_DIALOGS = 1000  # or CHUNK_BYTES, whichever comes first
WORK = "work"  # folder of a data directory in the making, for what only prepare needs
FIGURES = "figures"  # folder in it with a row of CHUNKS per finished chunk

RECORDS = pa.schema([("group", pa.int32()), ("position", pa.int64()), ("log", pa.int32()), ("kind", pa.string()), ("json", pa.large_string())])
CHUNKS = pa.schema(
    [
        ("group", pa.int32()),
        ("position", pa.int64()),
        ("records", pa.int64()),  # how many there were: the next chunk of the group begins behind them
        ("last", pa.bool_()),  # of its group
        ("split", pa.list_(pa.uint8())),  # per dialog, in the order written
        ("id", pa.list_(pa.uint64())),  # 64-bit hashes: exact enough to find equal ids and contexts in 8 bytes per dialog
        ("context", pa.list_(pa.uint64())),
        ("ranked", pa.list_(pa.float64())),  # the training values of the ranked components, one component after the other
        ("summary", pa.large_string()),
    ]
)


@dataclass(frozen=True)
class Scoring:
    """How pass 1 treats every dialog; plain values, so that it travels to the workers."""

    weights: dict[str, float]
    ranked: tuple[str, ...] = ()  # components whose training values are kept, to fit ranks to
    rating: str | None = None
    compat: str = ""
    scorers: tuple[str, ...] = ()  # NAME=PATH
    label_weights: dict[str, float] = field(default_factory=dict)
    split: str = "hash"  # or "declared"
    validation: float = 0.05
    test: float = 0.05
    seed: int = 0
    strict: bool = False
    max_line_bytes: int = 64 << 20


@dataclass
class Scored:
    """What pass 1 found. `chunks` lists (path, dialogs) per split; the arrays have one entry per dialog in the same order."""

    chunks: dict[str, list[tuple[str, int]]]
    ids: dict[str, np.ndarray]  # (dialogs,) uint64 per split
    contexts: dict[str, np.ndarray]
    order: dict[str, np.ndarray]  # (dialogs,) int64: the chunk each dialog lies in, for who came first across splits
    counts: dict[tuple[int, str], Counter]  # (log, source) -> dialogs, replies, turns, no_reply, quarantined
    files: dict[str, dict[str, Any]]  # path -> fingerprint
    statistics: Statistics | None
    training: Statistics | None  # of the training split alone, which normalisers are fitted to
    ranked: dict[str, np.ndarray]  # component -> its values in the training split
    characters: dict[str, int]  # of message text, per split
    hashes: int  # the longest run of "#" before a number at the end of an id
    worker_kib: int
    first_bad: str | None = None

    @property
    def dialogs(self) -> dict[str, int]:
        return {split: sum(n for _, n in chunks) for split, chunks in self.chunks.items()}


def score_logs(
    logs: Sequence[LogFile], scoring: Scoring, directory: Path, *, concurrency: int | None = None, progress: Callable[[int], Any] | None = None
) -> Scored:
    """Pass 1: reads, scores and splits every dialog into chunks under `directory`; `progress` is told how many dialogs arrived.

    Chunks that an earlier run left there are taken as they are: `directory` must be one of the same logs and the same scoring.
    Raises what the user can fix (a strict run's first bad record, a reward that fails) as it was raised in the worker.
    """
    for name in (*SPLITS, "quarantine", FIGURES):
        (directory / name).mkdir(parents=True, exist_ok=True)
    whole = _whole_groups(directory)
    size = round(sum(_shares(logs)))
    small = size <= GROUP_BYTES  # starting another process would take longer than reading does
    with errors_of_workers():
        left = [table for number, table in enumerate(group_tables(logs)) if number not in whole]
        records = dataset(left).map_batches(
            read_group, batch_size=None, batch_format="pyarrow", num_cpus=0.6 if small else 0.4, fn_kwargs={"scoring": scoring}
        )
        chunks = records.map_batches(
            Scorer,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=0.6,  # with a reader's 0.4 the two fit one CPU; with equal shares Ray fuses them into one process
            compute=pool(concurrency, 1 + size // GROUP_BYTES),
            fn_constructor_kwargs={"scoring": scoring, "directory": str(directory)},
        )
        tables = itertools.chain(*whole.values(), stream_tables(chunks) if left else ())
        return _gather(tables, directory, scoring.ranked, progress)


def _whole_groups(directory: Path) -> dict[int, list[pa.Table]]:
    """group -> the figures of all its chunks, for the groups that an earlier run has read and scored to the end."""
    found: dict[int, list[pa.Table]] = {}
    for path in sorted((directory / FIGURES).glob("*.parquet")):  # by group, then position
        table = pq.read_table(path)
        found.setdefault(table["group"][0].as_py(), []).append(table)
    whole = {}
    for group, tables in found.items():
        ends = itertools.accumulate((table["records"][0].as_py() for table in tables), initial=0)
        if tables[-1]["last"][0].as_py() and [table["position"][0].as_py() for table in tables] == list(ends)[:-1]:
            whole[group] = tables
    return whole


def group_logs(logs: Sequence[LogFile]) -> list[list[int]]:
    """Indices of `logs` in runs of about GROUP_BYTES on disk: one read task each, decided by the files alone."""
    groups: list[list[int]] = []
    size = 0.0
    for index, share in enumerate(_shares(logs)):
        if not groups or size + share > GROUP_BYTES:
            groups.append([])
            size = 0.0
        groups[-1].append(index)
        size += share
    return groups


def _shares(logs: Sequence[LogFile]) -> list[float]:
    """Bytes on disk of each log, a file's shared equally by its members. A database server's are not known: each piece counts as a group."""
    members = Counter(log.path for log in logs)
    return [GROUP_BYTES if log.url else os.path.getsize(log.path) / members[log.path] for log in logs]


def read_group(table: pa.Table, *, scoring: Scoring) -> Iterator[pa.Table]:
    """A read task: the records of a group of files, a chunk at a time. Kinds: dialog, bad, file (its hash), worker (its peak memory)."""
    [row] = table.to_pylist()
    chunk = _Records(row["group"])
    for entry in json.loads(row["logs"]):
        log = LogFile(**entry["log"])
        if entry["first"]:
            chunk.add(entry["index"], "file", json.dumps(fingerprint(log)))
        for item in read_log(log, max_line_bytes=scoring.max_line_bytes):
            if isinstance(item, Bad):
                if scoring.strict:
                    raise ValueError(f"{item} (a strict run stops at the first bad record; without --strict it goes to quarantine.jsonl)")
                chunk.add(entry["index"], "bad", json.dumps(asdict(item), ensure_ascii=False))
            else:
                chunk.add(entry["index"], "dialog", item.to_json())
            if chunk.full:
                yield chunk.take()
    chunk.add(-1, "worker", str(peak_kib()))
    yield chunk.take()


class _Records:
    """The records of a chunk that is being filled."""

    def __init__(self, group: int) -> None:
        self.group, self.position, self.rows, self.bytes = group, 0, [], 0

    @property
    def full(self) -> bool:
        return len(self.rows) >= CHUNK_DIALOGS or self.bytes >= CHUNK_BYTES

    def add(self, log: int, kind: str, text: str) -> None:
        self.rows.append({"group": self.group, "position": self.position, "log": log, "kind": kind, "json": text})
        self.position += 1
        self.bytes += len(text)

    def take(self) -> pa.Table:
        table = pa.Table.from_pylist(self.rows, RECORDS)
        self.rows, self.bytes = [], 0
        return table


class Scorer:
    """An actor of pass 1: scores a chunk, decides its splits, writes it, and returns one row of figures about it."""

    def __init__(self, scoring: Scoring, directory: str) -> None:
        self.scoring, self.directory = scoring, Path(directory)
        scorers = make_scorers(scoring.scorers, label_weights=scoring.label_weights)
        self.models = [scorer for name, scorer in scorers.items() if scorer is not BUILT_IN[name]]  # the built-in ones gain nothing from batches
        self.rewards = choose_rewards(scoring.weights, rating_name=scoring.rating, compat=scoring.compat, scorers=scorers)

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        where = f"{rows[0]['group']:06d}-{rows[0]['position']:010d}"
        figures = self.directory / FIGURES / f"{where}.parquet"
        if figures.is_file() and (done := pq.read_table(figures))["records"][0].as_py() == len(rows):
            return done  # by a run that was killed later
        chunk = _Chunk([], [], [], Counter(), {})
        found = [(Dialog.from_json(row["json"]), row["log"]) for row in rows if row["kind"] == "dialog"]
        for row in rows:
            self._take(row, chunk)
        ready = in_batches([dialog for dialog, _ in found], list(self.rewards.values()), self.models)
        for dialog, (_, log) in zip(ready, found, strict=True):
            self._score(dialog, log, chunk)
        chunk.dialogs.sort(key=lambda d: SPLITS.index(d.split))  # stable: the order of reading within a split
        for split in SPLITS:
            if members := [d for d in chunk.dialogs if d.split == split]:
                table = to_table(members)
                _write_table(table, self.directory / split / f"{where}.parquet")
        if chunk.bad:
            write_text("".join(line + "\n" for line in chunk.bad), self.directory / "quarantine" / f"{where}.jsonl")
        made = self._figures(rows, chunk)
        _write_table(made, figures)
        return made

    def _take(self, row: dict[str, Any], chunk: _Chunk) -> None:
        if row["kind"] == "file":
            chunk.files |= json.loads(row["json"])
        elif row["kind"] == "worker":
            chunk.worker_kib = int(row["json"])
        elif row["kind"] == "bad":
            chunk.bad.append(row["json"])
            chunk.counts[row["log"], json.loads(row["json"])["source"], "quarantined"] += 1

    def _score(self, dialog: Dialog, log: int, chunk: _Chunk) -> None:
        s = self.scoring
        if not dialog.replies:
            chunk.counts[log, dialog.source, "no_reply"] += 1
            return
        if s.split == "hash" or dialog.split is None:
            dialog.split = assign_split(dialog, s.validation, s.test, seed=s.seed)
        scores = apply_rewards(dialog, self.rewards, s.weights)
        chunk.scores.append(scores)
        if dialog.split == "train":
            chunk.training.append(scores)
        chunk.dialogs.append(dialog)
        chunk.counts[log, dialog.source, "dialogs"] += 1
        chunk.counts[log, dialog.source, "replies"] += len(dialog.replies)
        chunk.counts[log, dialog.source, "turns"] += len(dialog.messages)

    def _figures(self, rows: list[dict[str, Any]], chunk: _Chunk) -> pa.Table:
        nothing = np.empty((0, len(self.rewards) + 1))
        scores, training = (np.concatenate([nothing, *tables]) for tables in (chunk.scores, chunk.training))
        columns = [training[:, list(self.rewards).index(name)] for name in self.scoring.ranked]
        ranked = [column[~np.isnan(column)] for column in columns]
        characters = Counter()
        for dialog in chunk.dialogs:
            characters[dialog.split] += sum(len(m["content"] or "") for m in dialog.messages)
        summary = {
            "counts": [[*key, count] for key, count in chunk.counts.items()],
            "files": chunk.files,
            "statistics": Statistics.of(scores).to_dict(),
            "training": Statistics.of(training).to_dict(),
            "ranked": [len(column) for column in ranked],
            "characters": characters,
            "hashes": max((trailing_hashes(d.id) for d in chunk.dialogs), default=0),
            "worker_kib": max(chunk.worker_kib, peak_kib()),
            "first_bad": str(Bad(**json.loads(chunk.bad[0]))) if chunk.bad else None,
        }
        row = {
            "group": rows[0]["group"],
            "position": rows[0]["position"],
            "records": len(rows),
            "last": rows[-1]["kind"] == "worker",
            "split": [SPLITS.index(d.split) for d in chunk.dialogs],
            "id": [hash64(d.id) for d in chunk.dialogs],
            "context": [hash64(split_key(d)) for d in chunk.dialogs],
            "ranked": np.concatenate([np.empty(0), *ranked]).tolist(),
            "summary": json.dumps(summary),
        }
        return pa.Table.from_pylist([row], CHUNKS)


@dataclass
class _Chunk:
    """What a scorer collects from one table of records."""

    dialogs: list[Dialog]
    scores: list[np.ndarray]
    training: list[np.ndarray]  # those of `scores` that are of the training split
    counts: Counter  # (log, source, what) -> how many
    files: dict[str, dict[str, Any]]
    bad: list[str] = field(default_factory=list)
    worker_kib: int = 0


def _gather(tables: Iterable[pa.Table], directory: Path, ranked: Sequence[str], progress: Callable[[int], Any] | None) -> Scored:
    """Merges the chunks' figures in the order of the chunks, whatever order they arrived in: float sums come out the same every time."""
    rows = []
    for row in rows_of(tables, numpy=("split", "id", "context", "ranked")):
        row["summary"] = json.loads(row["summary"])
        rows.append(row)
        if progress:
            progress(len(row["id"]))
    rows.sort(key=lambda row: (row["group"], row["position"]))
    scored = Scored({s: [] for s in SPLITS}, {}, {}, {}, {}, {}, None, None, {}, dict.fromkeys(SPLITS, 0), 0, 0)
    for row in rows:
        _add(scored, row["summary"])
        for code, split in enumerate(SPLITS):
            if count := int((row["split"] == code).sum()):
                scored.chunks[split].append((str(directory / split / f"{row['group']:06d}-{row['position']:010d}.parquet"), count))
    values = [np.split(row["ranked"], np.cumsum(row["summary"]["ranked"])[:-1]) for row in rows] if ranked else []
    scored.ranked = {name: np.concatenate(parts) for name, parts in zip(ranked, zip(*values, strict=True), strict=True)}
    for code, split in enumerate(SPLITS):
        chosen = [row["split"] == code for row in rows]
        scored.ids[split] = joined([row["id"][c] for row, c in zip(rows, chosen, strict=True)], np.uint64)
        scored.contexts[split] = joined([row["context"][c] for row, c in zip(rows, chosen, strict=True)], np.uint64)
        scored.order[split] = joined([np.full(int(c.sum()), i) for i, c in enumerate(chosen)], np.int64)
    return scored


def _add(scored: Scored, summary: dict[str, Any]) -> None:
    for log, source, what, count in summary["counts"]:
        scored.counts.setdefault((log, source), Counter())[what] += count
    scored.files |= summary["files"]
    for name in ("statistics", "training"):
        found, more = getattr(scored, name), Statistics.from_dict(summary[name])
        setattr(scored, name, more if found is None else found.merge(more))
    for split, count in summary["characters"].items():
        scored.characters[split] += count
    scored.hashes = max(scored.hashes, summary["hashes"])
    scored.worker_kib = max(scored.worker_kib, summary["worker_kib"])
    scored.first_bad = scored.first_bad or summary["first_bad"]


def trailing_hashes(identifier: str) -> int:
    """2 for "a##7": how many "#" stand before the number at the end of an id."""
    stem = identifier.rstrip("0123456789")
    return len(stem) - len(stem.rstrip("#")) if stem != identifier else 0


def fingerprint(log: LogFile) -> dict[str, dict[str, Any]]:
    """{path: its size and sha256}, read in pieces; of a store, which is seldom twice the same file, how far it had come."""
    if log.reader == "served":
        return {log.path: served.fingerprint(log)}
    with open(log.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {log.path: {"bytes": os.path.getsize(log.path), "sha256": digest}}


def hash64(text: str) -> int:
    """The first 64 bits of the text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def group_tables(logs: Sequence[LogFile]) -> list[pa.Table]:
    """One table per read task: its number and its logs; the first log of a path is the one that hashes the file."""
    first: dict[str, int] = {}
    tables = []
    for number, group in enumerate(group_logs(logs)):
        entries = [{"index": i, "first": first.setdefault(logs[i].path, i) == i, "log": asdict(logs[i])} for i in group]
        tables.append(pa.table({"group": pa.array([number], pa.int32()), "logs": pa.array([json.dumps(entries)], pa.large_string())}))
    return tables


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, f"{path}.part", compression="zstd", compression_level=1)
    os.replace(f"{path}.part", path)


def write_text(text: str, path: Path) -> None:
    """Whole or not at all."""
    Path(f"{path}.part").write_text(text, encoding="utf-8")
    os.replace(f"{path}.part", path)
