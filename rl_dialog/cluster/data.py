"""Logs to shards on Ray Data, in two streaming passes.

    pass 1   files -> read (tasks) -> score and split (actors) -> chunks of scored dialogs on disk, one statistics row per chunk to the driver
    pass 2   plan of shards -> tokenise (actors, a tokenizer each) -> finished shards on disk

The driver sees numbers, never texts. Every chunk is named by where it came from (group of files, position in it), and pass 2 cuts each split's
chunks, in that order, into shards of equal size: so the shards do not depend on how many workers there were or who finished first. Files are read and
written by the workers: on several machines the logs and the output must lie on storage that all of them mount.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from rl_dialog.data.readers import Bad, LogFile, read_log
from rl_dialog.data.schema import ARROW_SCHEMA, SPLITS, Dialog
from rl_dialog.data.shards import SHARD_SCHEMA, pack_rows, shard_name
from rl_dialog.data.splits import assign_split, split_key
from rl_dialog.rewards import Statistics, apply_rewards, choose_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GROUP_BYTES = 16 << 20  # small files are read together up to this size
CHUNK_DIALOGS, CHUNK_BYTES = 1000, 4 << 20  # what travels between a reader and a scorer at a time
ACTOR_DIALOGS = 2000  # dialogs that are worth starting another tokenising actor for: it takes seconds to start
ROW_GROUP_TOKENS = 1 << 20  # a shard is written in row groups of about this size
OBJECT_STORE_BYTES = 256 << 20  # of a Ray that we start: only a few chunks are ever under way

RECORDS = pa.schema([("group", pa.int32()), ("position", pa.int64()), ("log", pa.int32()), ("kind", pa.string()), ("json", pa.large_string())])
CHUNKS = pa.schema(
    [
        ("group", pa.int32()),
        ("position", pa.int64()),
        ("split", pa.list_(pa.uint8())),  # per dialog, in the order written
        ("id", pa.list_(pa.uint64())),  # 64-bit hashes: exact enough to find equal ids and contexts in 8 bytes per dialog
        ("context", pa.list_(pa.uint64())),
        ("summary", pa.large_string()),
    ]
)
SHARDS = pa.schema([("split", pa.string()), ("number", pa.int32()), ("summary", pa.large_string())])


@dataclass(frozen=True)
class Scoring:
    """How pass 1 treats every dialog; plain values, so that it travels to the workers."""

    weights: dict[str, float]
    rating: str | None = None
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
    files: dict[str, dict[str, Any]]  # path -> bytes, sha256
    statistics: Statistics | None
    characters: dict[str, int]  # of message text, per split
    hashes: int  # the longest run of "#" before a number at the end of an id
    worker_kib: int
    first_bad: str | None = None

    @property
    def dialogs(self) -> dict[str, int]:
        return {split: sum(n for _, n in chunks) for split, chunks in self.chunks.items()}


@dataclass
class Shard:
    """One finished shard."""

    file: str
    dialogs: int = 0
    replies: int = 0
    rows: int = 0
    tokens: int = 0
    cut_replies: int = 0
    worker_kib: int = 0


@contextmanager
def connect(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """A Ray to run on: the one this process already uses, else the cluster at `address` or RAY_ADDRESS, else a local one that ends with the block."""
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    local = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if address == "local" else {}
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's C++ side warns about the arguments of Ray Data's own actors
    with _native_stderr_held():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _native_stderr_held() -> Iterator[None]:
    """Holds back what Ray's C++ side writes to stderr while it starts (the log level it found); shown if the start fails."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(shown, held.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)


def score_logs(
    logs: Sequence[LogFile], scoring: Scoring, directory: Path, *, concurrency: int | None = None, progress: Callable[[int], Any] | None = None
) -> Scored:
    """Pass 1: reads, scores and splits every dialog into chunks under `directory`; `progress` is told how many dialogs arrived.

    Raises what the user can fix (a strict run's first bad record, a reward that fails) as it was raised in the worker.
    """
    for name in (*SPLITS, "quarantine"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    size = sum(os.path.getsize(path) for path in {log.path for log in logs})
    small = size <= GROUP_BYTES  # starting another process would take longer than reading does
    with errors_of_workers():
        records = _dataset(_group_tables(logs)).map_batches(
            read_group, batch_size=None, batch_format="pyarrow", num_cpus=0.6 if small else 0.4, fn_kwargs={"scoring": scoring}
        )
        chunks = records.map_batches(
            Scorer,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=0.6,  # with a reader's 0.4 the two fit one CPU; with equal shares Ray fuses them into one process
            compute=_pool(concurrency, 1 + size // GROUP_BYTES),
            fn_constructor_kwargs={"scoring": scoring, "directory": str(directory)},
        )
        return _gather(chunks, directory, progress)


def write_shards(
    scored: Scored,
    tokenizer_dir: Path,
    directory: Path,
    *,
    shard_rows: int,
    max_length: int,
    concurrency: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, list[Shard]]:
    """Pass 2: tokenises every chunk into `directory`, `shard_rows` dialogs a shard. Returns the shards per split, in order. Raises TemplateError."""
    plan = [json.dumps(entry) for entry in plan_shards(scored, shard_rows)]
    tables = [pa.table({"plan": pa.array([entry], pa.large_string())}) for entry in plan]
    found: dict[str, list[tuple[int, Shard]]] = {split: [] for split in SPLITS}
    with errors_of_workers():
        shards = _dataset(tables).map_batches(
            ShardWriter,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=1,
            compute=_pool(concurrency, min(len(plan), 1 + sum(scored.dialogs.values()) // ACTOR_DIALOGS)),
            fn_constructor_kwargs={"tokenizer_dir": str(tokenizer_dir), "directory": str(directory), "max_length": max_length},
        )
        for row in _rows(shards):
            shard = Shard(**json.loads(row["summary"]))
            found[row["split"]].append((row["number"], shard))
            if progress:
                progress(shard.dialogs)
    return {split: [shard for _, shard in sorted(entries, key=lambda e: e[0])] for split, entries in found.items()}


# Pass 1 -----------------------------------------------------------------------------------------------------


def group_logs(logs: Sequence[LogFile]) -> list[list[int]]:
    """Indices of `logs` in runs of about GROUP_BYTES on disk: one read task each, decided by the files alone."""
    members = Counter(log.path for log in logs)
    groups: list[list[int]] = []
    size = 0.0
    for index, log in enumerate(logs):
        share = os.path.getsize(log.path) / members[log.path]
        if not groups or size + share > GROUP_BYTES:
            groups.append([])
            size = 0.0
        groups[-1].append(index)
        size += share
    return groups


def read_group(table: pa.Table, *, scoring: Scoring) -> Iterator[pa.Table]:
    """A read task: the records of a group of files, a chunk at a time. Kinds: dialog, bad, file (its hash), worker (its peak memory)."""
    [row] = table.to_pylist()
    chunk = _Records(row["group"])
    for entry in json.loads(row["logs"]):
        log = LogFile(**entry["log"])
        if entry["first"]:
            chunk.add(entry["index"], "file", json.dumps(fingerprint(log.path)))
        for item in read_log(log, max_line_bytes=scoring.max_line_bytes):
            if isinstance(item, Bad):
                if scoring.strict:
                    raise ValueError(f"{describe(item)} (a strict run stops at the first bad record; without --strict it goes to quarantine.jsonl)")
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
        self.rewards = choose_rewards(scoring.weights, rating_name=scoring.rating)

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        chunk = _Chunk([], [], Counter(), {})
        for row in rows:
            self._take(row, chunk)
        where = f"{rows[0]['group']:06d}-{rows[0]['position']:010d}"
        chunk.dialogs.sort(key=lambda d: SPLITS.index(d.split))  # stable: the order of reading within a split
        for split in SPLITS:
            if members := [d for d in chunk.dialogs if d.split == split]:
                table = pa.Table.from_pylist([d.to_row() for d in members], ARROW_SCHEMA)
                _write_table(table, self.directory / split / f"{where}.parquet")
        if chunk.bad:
            _write_text("".join(line + "\n" for line in chunk.bad), self.directory / "quarantine" / f"{where}.jsonl")
        return self._figures(rows[0], chunk)

    def _take(self, row: dict[str, Any], chunk: _Chunk) -> None:
        if row["kind"] == "file":
            chunk.files |= json.loads(row["json"])
        elif row["kind"] == "worker":
            chunk.worker_kib = int(row["json"])
        elif row["kind"] == "bad":
            chunk.bad.append(row["json"])
            chunk.counts[row["log"], json.loads(row["json"])["source"], "quarantined"] += 1
        else:
            self._score(Dialog.from_json(row["json"]), row["log"], chunk)

    def _score(self, dialog: Dialog, log: int, chunk: _Chunk) -> None:
        s = self.scoring
        if not dialog.replies:
            chunk.counts[log, dialog.source, "no_reply"] += 1
            return
        if s.split == "hash" or dialog.split is None:
            dialog.split = assign_split(dialog, s.validation, s.test, seed=s.seed)
        chunk.scores.append(apply_rewards(dialog, self.rewards, s.weights))
        chunk.dialogs.append(dialog)
        chunk.counts[log, dialog.source, "dialogs"] += 1
        chunk.counts[log, dialog.source, "replies"] += len(dialog.replies)
        chunk.counts[log, dialog.source, "turns"] += len(dialog.messages)

    def _figures(self, first: dict[str, Any], chunk: _Chunk) -> pa.Table:
        scores = np.concatenate(chunk.scores) if chunk.scores else np.empty((0, len(self.rewards) + 1))
        characters = Counter()
        for dialog in chunk.dialogs:
            characters[dialog.split] += sum(len(m["content"] or "") for m in dialog.messages)
        summary = {
            "counts": [[*key, count] for key, count in chunk.counts.items()],
            "files": chunk.files,
            "statistics": Statistics.of(scores).to_dict(),
            "characters": characters,
            "hashes": max((trailing_hashes(d.id) for d in chunk.dialogs), default=0),
            "worker_kib": max(chunk.worker_kib, peak_kib()),
            "first_bad": describe(Bad(**json.loads(chunk.bad[0]))) if chunk.bad else None,
        }
        row = {
            "group": first["group"],
            "position": first["position"],
            "split": [SPLITS.index(d.split) for d in chunk.dialogs],
            "id": [hash64(d.id) for d in chunk.dialogs],
            "context": [hash64(split_key(d)) for d in chunk.dialogs],
            "summary": json.dumps(summary),
        }
        return pa.Table.from_pylist([row], CHUNKS)


@dataclass
class _Chunk:
    """What a scorer collects from one table of records."""

    dialogs: list[Dialog]
    scores: list[np.ndarray]
    counts: Counter  # (log, source, what) -> how many
    files: dict[str, dict[str, Any]]
    bad: list[str] = field(default_factory=list)
    worker_kib: int = 0


def _gather(chunks: ray.data.Dataset, directory: Path, progress: Callable[[int], Any] | None) -> Scored:
    """Merges the chunks' figures in the order of the chunks, whatever order they arrived in: float sums come out the same every time."""
    rows = []
    for row in _rows(chunks, numpy=("split", "id", "context")):
        row["summary"] = json.loads(row["summary"])
        rows.append(row)
        if progress:
            progress(len(row["id"]))
    rows.sort(key=lambda row: (row["group"], row["position"]))
    scored = Scored({s: [] for s in SPLITS}, {}, {}, {}, {}, {}, None, dict.fromkeys(SPLITS, 0), 0, 0)
    for row in rows:
        _add(scored, row["summary"])
        for code, split in enumerate(SPLITS):
            if count := int((row["split"] == code).sum()):
                scored.chunks[split].append((str(directory / split / f"{row['group']:06d}-{row['position']:010d}.parquet"), count))
    for code, split in enumerate(SPLITS):
        chosen = [row["split"] == code for row in rows]
        scored.ids[split] = _joined([row["id"][c] for row, c in zip(rows, chosen, strict=True)], np.uint64)
        scored.contexts[split] = _joined([row["context"][c] for row, c in zip(rows, chosen, strict=True)], np.uint64)
        scored.order[split] = _joined([np.full(int(c.sum()), i) for i, c in enumerate(chosen)], np.int64)
    return scored


def _add(scored: Scored, summary: dict[str, Any]) -> None:
    for log, source, what, count in summary["counts"]:
        scored.counts.setdefault((log, source), Counter())[what] += count
    scored.files |= summary["files"]
    statistics = Statistics.from_dict(summary["statistics"])
    scored.statistics = statistics if scored.statistics is None else scored.statistics.merge(statistics)
    for split, count in summary["characters"].items():
        scored.characters[split] += count
    scored.hashes = max(scored.hashes, summary["hashes"])
    scored.worker_kib = max(scored.worker_kib, summary["worker_kib"])
    scored.first_bad = scored.first_bad or summary["first_bad"]


# Between the passes -----------------------------------------------------------------------------------------


def occurrences(scored: Scored) -> dict[str, np.ndarray]:
    """Per split and dialog: 1 for the first dialog with its id in reading order (chunks, then splits), 2 for the second, ..."""
    lengths = [len(scored.ids[split]) for split in SPLITS]
    ids = _joined([scored.ids[split] for split in SPLITS], np.uint64)
    read = np.argsort(_joined([scored.order[split] for split in SPLITS], np.int64), kind="stable")
    order = read[np.argsort(ids[read], kind="stable")]  # equal ids side by side, each run in reading order
    first = np.flatnonzero(np.diff(ids[order], prepend=~ids[order[:1]]) != 0)
    rank = np.arange(len(ids)) - np.repeat(first, np.diff([*first, len(ids)]))
    count = np.empty(len(ids), np.int64)
    count[order] = rank + 1
    return dict(zip(SPLITS, np.split(count, np.cumsum(lengths)[:-1]), strict=True))


def shared_contexts(scored: Scored) -> int:
    """How many split keys occur in more than one split."""
    unique = [np.unique(scored.contexts[split]) for split in SPLITS]
    _, counts = np.unique(np.concatenate(unique), return_counts=True)
    return int((counts > 1).sum())


def plan_shards(scored: Scored, shard_rows: int) -> Iterator[dict[str, Any]]:
    """Which dialogs of which chunks make up each shard, and the new ids of those whose id was taken: `id#2`, or `id##2` where ids already end so."""
    copies = occurrences(scored)
    for split in SPLITS:
        starts = np.cumsum([0, *(count for _, count in scored.chunks[split])])
        for number, begin in enumerate(range(0, int(starts[-1]), shard_rows)):
            end = min(begin + shard_rows, int(starts[-1]))
            touched = range(int(np.searchsorted(starts, begin, "right")) - 1, int(np.searchsorted(starts, end, "left")))
            parts = [[scored.chunks[split][c][0], max(begin - int(starts[c]), 0), min(end, int(starts[c + 1])) - int(starts[c])] for c in touched]
            renamed = np.flatnonzero(copies[split][begin:end] > 1)
            suffixes = {int(i): "#" * (scored.hashes + 1) + str(copies[split][begin + i]) for i in renamed}
            yield {"split": split, "number": number, "parts": parts, "suffixes": suffixes}


def trailing_hashes(identifier: str) -> int:
    """2 for "a##7": how many "#" stand before the number at the end of an id."""
    stem = identifier.rstrip("0123456789")
    return len(stem) - len(stem.rstrip("#")) if stem != identifier else 0


# Pass 2 -----------------------------------------------------------------------------------------------------


class ShardWriter:
    """An actor of pass 2: tokenises the dialogs of one planned shard and writes it, with its own tokenizer (shared ones are "Already borrowed")."""

    def __init__(self, tokenizer_dir: str, directory: str, max_length: int) -> None:
        self.tokenizer, self.directory, self.max_length = _saved_tokenizer(tokenizer_dir), Path(directory), max_length

    def __call__(self, table: pa.Table) -> pa.Table:
        [row] = table.to_pylist()
        plan = json.loads(row["plan"])
        shard = Shard(shard_name(plan["split"], plan["number"]))
        path = self.directory / shard.file
        with pq.ParquetWriter(f"{path}.part", SHARD_SCHEMA, compression="zstd") as writer:
            for group in self._row_groups(plan, shard):
                writer.write_table(group)
        os.replace(f"{path}.part", path)
        shard.worker_kib = peak_kib()
        return pa.Table.from_pylist([{"split": plan["split"], "number": plan["number"], "summary": json.dumps(asdict(shard))}], SHARDS)

    def _row_groups(self, plan: dict[str, Any], shard: Shard) -> Iterator[pa.Table]:
        """Tables of about ROW_GROUP_TOKENS tokens; a chunk is held as Arrow, its dialogs become objects one at a time."""
        pending: list[pa.Table] = []
        tokens = 0
        for path, start, stop in plan["parts"]:
            part = pq.read_table(path).slice(start, stop - start)
            before = shard.tokens
            pending.append(self._tokenised(part, plan["suffixes"], shard))
            tokens += shard.tokens - before
            if tokens >= ROW_GROUP_TOKENS:
                yield pa.concat_tables(pending)
                pending, tokens = [], 0
        if pending:
            yield pa.concat_tables(pending)

    def _tokenised(self, part: pa.Table, suffixes: dict[str, str], shard: Shard) -> pa.Table:
        from rl_dialog.data.tokenize import cut_replies, tokenize

        ids, windows = [], []
        for i in range(len(part)):
            [row] = part.slice(i, 1).to_pylist()
            dialog = Dialog.from_row(row)
            for message in dialog.messages:  # no template shows these, and transformers copies all it is given for every prefix it renders
                message.pop("rewards", None), message.pop("feedback", None)
            rows = tokenize(dialog, self.tokenizer, max_length=self.max_length)
            ids.append(dialog.id + suffixes.get(str(shard.dialogs), ""))
            windows.append(rows)
            shard.dialogs += 1
            shard.replies += len(dialog.replies)
            shard.rows += len(rows)
            shard.tokens += sum(len(r.input_ids) for r in rows)
            shard.cut_replies += cut_replies(dialog, self.tokenizer, rows)
        renamed = part.set_column(0, ARROW_SCHEMA.field("id"), pa.array(ids, pa.string()))
        return renamed.append_column(SHARD_SCHEMA.field("rows"), pack_rows(windows))


def _saved_tokenizer(directory: str) -> PreTrainedTokenizerFast:
    """A tokenizer saved by `save_pretrained`, without AutoTokenizer where it has no class of its own: that imports torch, which takes seconds."""
    from transformers import PreTrainedTokenizerFast

    from rl_dialog.data.tokenize import load_tokenizer

    name = json.loads((Path(directory) / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    if name in ("PreTrainedTokenizerFast", "TokenizersBackend"):  # the second is the first's name since transformers 5
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return load_tokenizer(directory)


# Both passes ------------------------------------------------------------------------------------------------


@contextmanager
def errors_of_workers() -> Iterator[None]:
    """What a worker raised, as it raised it: Ray's wrappers and logs hold tracebacks of Ray's own, and a user can only fix the cause."""
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
        cause: BaseException | None = error
        while cause is not None and not _fixable(cause):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None:
            raise
        raise cause from None
    finally:
        logger.setLevel(level)


def _fixable(error: BaseException) -> bool:
    wrapped = isinstance(error, ray.exceptions.RayError | ray.data.exceptions.SystemException)
    return isinstance(error, ValueError | OSError | ImportError) and not wrapped


def describe(bad: Bad) -> str:
    """`file:where: reason` of a quarantined record."""
    return f"{bad.file}:{bad.where}: {bad.reason}" if bad.where else f"{bad.file}: {bad.reason}"


def fingerprint(path: str) -> dict[str, dict[str, Any]]:
    """{path: its size and sha256}, read in pieces."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {path: {"bytes": os.path.getsize(path), "sha256": digest}}


def hash64(text: str) -> int:
    """The first 64 bits of the text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def peak_kib() -> int:
    """This process's peak resident memory, in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def _dataset(tables: list[pa.Table]) -> ray.data.Dataset:
    """A dataset with one block, so one task, per table; small blocks keep memory flat."""
    dataset = ray.data.from_arrow(tables)
    context = dataset.context
    context.target_max_block_size = CHUNK_BYTES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True  # else what a worker raised arrives as text inside a traceback
    return dataset


def _rows(dataset: ray.data.Dataset, *, numpy: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Streams the rows; the columns in `numpy` as flat arrays, copied so that they do not hold Ray's shared memory."""
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        for batch in table.to_batches():
            plain = batch.drop_columns(list(numpy)).to_pylist() if numpy else batch.to_pylist()
            for i, row in enumerate(plain):
                yield row | {name: batch.column(name)[i].values.to_numpy().copy() for name in numpy}


def _pool(concurrency: int | None, work: int) -> ray.data.ActorPoolStrategy:
    """Actors: one per CPU, not more than `concurrency` or than there is work for."""
    cpus = int(ray.cluster_resources().get("CPU", 1))
    return ray.data.ActorPoolStrategy(size=max(1, min(concurrency or cpus, cpus, work)))


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _group_tables(logs: Sequence[LogFile]) -> list[pa.Table]:
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


def _write_text(text: str, path: Path) -> None:
    Path(f"{path}.part").write_text(text, encoding="utf-8")
    os.replace(f"{path}.part", path)
