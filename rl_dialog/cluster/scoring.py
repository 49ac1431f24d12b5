"""Pass 1 of prepare: read, score and split every dialog (data.py tells how the passes fit together)."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.cluster.data import CHUNK_BYTES, dataset, errors_of_workers, peak_kib, pool, stream_tables
from rl_dialog.cluster.scored import CHUNKS, Scored, choose_split, chunk_name, gather, merge, write_table
from rl_dialog.cluster.time_limit import TookTooLong, time_limit, too_long
from rl_dialog.data.building import fingerprint
from rl_dialog.data.formats.log_file import shown
from rl_dialog.data.readers import Bad, LogFile, read_log
from rl_dialog.data.schema import SPLITS, Dialog, DialogError, to_table
from rl_dialog.data.splits import SplitBy, assign_split, split_key
from rl_dialog.errors import UserError
from rl_dialog.rewards import Statistics, apply_rewards, choose_rewards
from rl_dialog.rewards.scorers import BUILT_IN, in_batches, make_scorers

GROUP_BYTES = 16 << 20  # small files are read together up to this size
CHUNK_DIALOGS = 1000  # or CHUNK_BYTES, whichever comes first
WORK = "work"  # folder of a data directory in the making, for what only prepare needs
FIGURES = "figures"  # folder in it with a row of CHUNKS per finished chunk

RECORDS = pa.schema(
    [
        ("group", pa.int32()),
        ("position", pa.int64()),
        ("log", pa.int32()),
        ("file", pa.string()),
        ("record", pa.int64()),  # its number in the file
        ("kind", pa.string()),
        ("json", pa.large_string()),
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
    split_by: SplitBy | Literal["auto"] = "first_turn"
    validation: float = 0.05
    test: float = 0.05
    seed: int = 0
    strict: bool = False
    max_line_bytes: int = 64 << 20
    record_seconds: float = 0.0  # that scoring one may take; 0: no limit


def score_logs(
    logs: Sequence[LogFile],
    scoring: Scoring,
    directory: Path,
    *,
    concurrency: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> Scored:
    """Pass 1: reads, scores and splits every dialog into chunks under `directory`; `progress` is told how
    many dialogs arrived.

    Chunks that an earlier run left there are taken as they are: `directory` must be one of the same logs and
    the same scoring. Raises what the user can fix (a strict run's first bad record, a reward that fails) as
    it was raised in the worker.
    """
    for name in (*SPLITS, "quarantine", FIGURES):
        (directory / name).mkdir(parents=True, exist_ok=True)
    whole = _whole_groups(directory)
    size = round(sum(_shares(logs)))
    small = size <= GROUP_BYTES  # starting another process would take longer than reading does
    with errors_of_workers():
        left = [table for number, table in enumerate(group_tables(logs)) if number not in whole]
        records = dataset(left).map_batches(
            read_group,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=0.6 if small else 0.4,
            fn_kwargs={"scoring": scoring},
        )
        chunks = records.map_batches(
            Scorer,
            batch_size=None,
            batch_format="pyarrow",
            # with a reader's 0.4 the two fit one CPU; with equal shares Ray fuses them into one process
            num_cpus=0.6,
            compute=pool(concurrency, 1 if small else 1 + size // GROUP_BYTES),
            fn_constructor_kwargs={"scoring": scoring, "directory": str(directory)},
        )
        tables = itertools.chain(*whole.values(), stream_tables(chunks) if left else ())
        rows = gather(tables, progress)
    if scoring.split_by != "auto":
        return merge(rows, directory, scoring.ranked, split_by=scoring.split_by)
    return choose_split(rows, directory, scoring.ranked, validation=scoring.validation, test=scoring.test)


def _whole_groups(directory: Path) -> dict[int, list[pa.Table]]:
    """group -> the figures of all its chunks, for the groups that an earlier run has read and scored to the
    end."""
    chunks: dict[int, list[pa.Table]] = {}
    for path in sorted((directory / FIGURES).glob("*.parquet")):  # by group, then position
        table = pq.read_table(path)
        chunks.setdefault(table["group"][0].as_py(), []).append(table)
    whole = {}
    for group, tables in chunks.items():
        ends = itertools.accumulate((table["records"][0].as_py() for table in tables), initial=0)
        if (
            tables[-1]["last"][0].as_py()
            and [table["position"][0].as_py() for table in tables] == list(ends)[:-1]
        ):
            whole[group] = tables
    return whole


def group_logs(logs: Sequence[LogFile]) -> list[list[int]]:
    """Indices of `logs` in runs of about GROUP_BYTES on disk: one read task each, decided by the files
    alone."""
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
    """Bytes on disk of each log, a file's shared equally by its members. A database server's are not known:
    each piece counts as a group."""
    members = Counter(log.path for log in logs)
    return [GROUP_BYTES if log.url else os.path.getsize(log.path) / members[log.path] for log in logs]


def read_group(table: pa.Table, *, scoring: Scoring) -> Iterator[pa.Table]:
    """A read task: the records of a group of files, a chunk at a time. Kinds: dialog, bad, file (its hash),
    worker (its peak memory)."""
    [row] = table.to_pylist()
    chunk = _Records(row["group"])
    for entry in json.loads(row["logs"]):
        log = LogFile(**entry["log"])
        if entry["first"]:
            chunk.add(entry["index"], "file", json.dumps(fingerprint(log)))
        for number, item in enumerate(read_log(log, max_line_bytes=scoring.max_line_bytes), 1):
            if isinstance(item, Bad):
                if scoring.strict:
                    raise UserError(
                        f"{item} (a strict run stops at the first bad record; without --strict it goes to "
                        "quarantine.jsonl)"
                    )
                chunk.add(entry["index"], "bad", json.dumps(asdict(item), ensure_ascii=False))
            else:
                chunk.add(entry["index"], "dialog", item.to_json(), file=log.name, record=number)
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

    def add(self, log: int, kind: str, text: str, *, file: str = "", record: int = 0) -> None:
        what = {"log": log, "file": file, "record": record, "kind": kind, "json": text}
        self.rows.append({"group": self.group, "position": self.position, **what})
        self.position += 1
        self.bytes += len(text)

    def take(self) -> pa.Table:
        table = pa.Table.from_pylist(self.rows, RECORDS)
        self.rows, self.bytes = [], 0
        return table


class Scorer:
    """An actor of pass 1: scores a chunk, decides its splits, writes it, and returns one row of figures about
    it."""

    def __init__(self, scoring: Scoring, directory: str) -> None:
        self.scoring, self.directory = scoring, Path(directory)
        scorers = make_scorers(scoring.scorers, label_weights=scoring.label_weights)
        self.models = [
            scorer for name, scorer in scorers.items() if scorer is not BUILT_IN[name]
        ]  # the built-in ones gain nothing from batches
        self.rewards = choose_rewards(
            scoring.weights, rating_name=scoring.rating, compat=scoring.compat, scorers=scorers
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        name = chunk_name(rows[0])
        figures = self.directory / FIGURES / name
        if figures.is_file() and (done := pq.read_table(figures))["records"][0].as_py() == len(rows):
            return done  # by a run that was killed later
        chunk = _Chunk([], [], [], Counter(), {})
        dialogs = [(Dialog.from_json(row["json"]), row) for row in rows if row["kind"] == "dialog"]
        for row in rows:
            self._take(row, chunk)
        ready = in_batches([dialog for dialog, _ in dialogs], list(self.rewards.values()), self.models)
        for dialog, (_, row) in zip(ready, dialogs, strict=True):
            self._score(dialog, row, chunk)
        for split in SPLITS:
            if members := [d for d in chunk.dialogs if d.split == split]:
                table = to_table(members)
                write_table(table, self.directory / split / name)
        if chunk.bad:
            quarantine = (self.directory / "quarantine" / name).with_suffix(".jsonl")
            write_text("".join(line + "\n" for line in chunk.bad), quarantine)
        made = self._figures(rows, chunk)
        write_table(made, figures)
        return made

    def _take(self, row: dict[str, Any], chunk: _Chunk) -> None:
        if row["kind"] == "file":
            chunk.files |= json.loads(row["json"])
        elif row["kind"] == "worker":
            chunk.worker_kib = int(row["json"])
        elif row["kind"] == "bad":
            chunk.bad.append(row["json"])
            chunk.counts[row["log"], json.loads(row["json"])["source"], "quarantined"] += 1

    def _score(self, dialog: Dialog, row: dict[str, Any], chunk: _Chunk) -> None:
        log = row["log"]
        if not dialog.replies:
            chunk.counts[log, dialog.source, "no_reply"] += 1
            return
        try:
            with time_limit(self.scoring.record_seconds):
                scores = apply_rewards(dialog, self.rewards, self.scoring.weights)
        except TookTooLong:
            self._quarantine(dialog, row, too_long(self.scoring.record_seconds, "scored"), chunk)
            return
        except DialogError as error:  # a vote of 2
            self._quarantine(dialog, row, str(error), chunk)
            return
        declared = self.scoring.split == "declared" and dialog.split is not None
        if self.scoring.split_by == "auto":
            chunk.by_dialog.append(dialog.split if declared else self._split(dialog, "dialog"))
        if not declared:
            by = "dialog" if self.scoring.split_by == "dialog" else "first_turn"
            dialog.split = self._split(dialog, by)
        chunk.scores.append(scores)
        chunk.dialogs.append(dialog)
        chunk.counts[log, dialog.source, "dialogs"] += 1
        chunk.counts[log, dialog.source, "replies"] += len(dialog.replies)
        chunk.counts[log, dialog.source, "turns"] += len(dialog.messages)

    def _quarantine(self, dialog: Dialog, row: dict[str, Any], reason: str, chunk: _Chunk) -> None:
        bad = Bad(row["file"], f"record {row['record']}", reason, dialog.source, shown(row["json"]))
        if self.scoring.strict:
            raise UserError(
                f"{bad} (a strict run stops at the first bad record; without --strict it goes to "
                "quarantine.jsonl)"
            )
        chunk.bad.append(json.dumps(asdict(bad), ensure_ascii=False))
        chunk.counts[row["log"], dialog.source, "quarantined"] += 1

    def _split(self, dialog: Dialog, by: SplitBy) -> str:
        s = self.scoring
        return assign_split(dialog, s.validation, s.test, seed=s.seed, by=by)

    def _figures(self, rows: list[dict[str, Any]], chunk: _Chunk) -> pa.Table:
        splits = [SPLITS.index(dialog.split) for dialog in chunk.dialogs]
        order = np.argsort(splits, kind="stable")  # as written
        summary, ranked = self._training(chunk, splits)
        summary |= {
            "counts": [[*key, count] for key, count in chunk.counts.items()],
            "files": chunk.files,
            "statistics": Statistics.of(self._table(chunk.scores)).to_dict(),
            "hashes": max((trailing_hashes(d.id) for d in chunk.dialogs), default=0),
            "worker_kib": max(chunk.worker_kib, peak_kib()),
            "first_bad": str(Bad(**json.loads(chunk.bad[0]))) if chunk.bad else None,
        }
        row = {
            "group": rows[0]["group"],
            "position": rows[0]["position"],
            "records": len(rows),
            "last": rows[-1]["kind"] == "worker",
            "split": np.array(splits, np.uint8)[order],
            "place": order,
            "by_dialog": [],
            "id": [hash64(chunk.dialogs[i].id) for i in order],
            "context": [hash64(split_key(chunk.dialogs[i])) for i in order],
            "ranked": ranked,
            "ranked_by_dialog": [],
        }
        if self.scoring.split_by == "auto":
            other = [SPLITS.index(split) for split in chunk.by_dialog]
            row["by_dialog"] = np.array(other, np.uint8)[order]
            summary["by_dialog"], row["ranked_by_dialog"] = self._training(chunk, other)
        return pa.Table.from_pylist([row | {"summary": json.dumps(summary)}], CHUNKS)

    def _training(self, chunk: _Chunk, splits: Sequence[int]) -> tuple[dict[str, Any], list[float]]:
        """Figures of the training split, and what else depends on the splits; the ranked values."""
        chosen = [scores for scores, split in zip(chunk.scores, splits, strict=True) if not split]
        training = self._table(chosen)
        columns = [training[:, list(self.rewards).index(name)] for name in self.scoring.ranked]
        ranked = [column[~np.isnan(column)] for column in columns]
        characters: Counter[str] = Counter()
        for dialog, split in zip(chunk.dialogs, splits, strict=True):
            characters[SPLITS[split]] += sum(len(m["content"] or "") for m in dialog.messages)
        figures = {
            "training": Statistics.of(training).to_dict(),
            "ranked": [len(column) for column in ranked],
            "characters": characters,
        }
        return figures, np.concatenate([np.empty(0), *ranked]).tolist()

    def _table(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """(R, K + 1)."""
        return np.concatenate([np.empty((0, len(self.rewards) + 1)), *scores])


@dataclass
class _Chunk:
    """What a scorer collects from one table of records."""

    dialogs: list[Dialog]  # as read
    scores: list[np.ndarray]  # of each
    by_dialog: list[str]  # the split that each has by dialog, where that may be chosen
    counts: Counter  # (log, source, what) -> how many
    files: dict[str, dict[str, Any]]
    bad: list[str] = field(default_factory=list)
    worker_kib: int = 0


def trailing_hashes(identifier: str) -> int:
    """2 for "a##7": how many "#" stand before the number at the end of an id."""
    stem = identifier.rstrip("0123456789")
    return len(stem) - len(stem.rstrip("#")) if stem != identifier else 0


def hash64(text: str) -> int:
    """The first 64 bits of the text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def group_tables(logs: Sequence[LogFile]) -> list[pa.Table]:
    """One table per read task: its number and its logs; the first log of a path is the one that hashes the
    file."""
    first: dict[str, int] = {}
    tables = []
    for number, group in enumerate(group_logs(logs)):
        entries = [
            {"index": i, "first": first.setdefault(logs[i].path, i) == i, "log": asdict(logs[i])}
            for i in group
        ]
        tables.append(
            pa.table(
                {
                    "group": pa.array([number], pa.int32()),
                    "logs": pa.array([json.dumps(entries)], pa.large_string()),
                }
            )
        )
    return tables


def write_text(text: str, path: Path) -> None:
    """Whole or not at all."""
    Path(f"{path}.part").write_text(text, encoding="utf-8")
    os.replace(f"{path}.part", path)
