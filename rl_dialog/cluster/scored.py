"""What pass 1 of prepare found: the figures of its chunks together, and by what key the dialogs are split."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.cluster.data import joined, rows_of
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.splits import SplitBy
from rl_dialog.rewards import Statistics

Row = dict[str, Any]  # one of CHUNKS, its arrays as such and its summary parsed
BY_DIALOG = "by_dialog"  # folder beside those of the splits: the same chunks, split by dialog
ARRAYS = ("split", "place", "by_dialog", "id", "context", "ranked", "ranked_by_dialog")  # columns of CHUNKS

CHUNKS = pa.schema(
    [
        ("group", pa.int32()),
        ("position", pa.int64()),
        ("records", pa.int64()),  # how many there were: the next chunk of the group begins behind them
        ("last", pa.bool_()),  # of its group
        ("split", pa.list_(pa.uint8())),  # per dialog, in the order written: by split, then as read
        ("place", pa.list_(pa.uint32())),  # the how-manieth it was when read
        ("by_dialog", pa.list_(pa.uint8())),  # the split it has by dialog, where `choose_split` may want it
        (
            "id",
            pa.list_(pa.uint64()),
        ),  # 64-bit hashes: exact enough to find equal ids and contexts in 8 bytes per dialog
        ("context", pa.list_(pa.uint64())),
        (
            "ranked",
            pa.list_(pa.float64()),
        ),  # the training values of the ranked components, one component after the other
        ("ranked_by_dialog", pa.list_(pa.float64())),
        ("summary", pa.large_string()),
    ]
)


@dataclass
class Scored:
    """What pass 1 found. `chunks` lists (path, dialogs) per split; the arrays have one entry per dialog in
    the same order."""

    chunks: dict[str, list[tuple[str, int]]]
    ids: dict[str, np.ndarray]  # (dialogs,) uint64 per split
    contexts: dict[str, np.ndarray]
    order: dict[
        str, np.ndarray
    ]  # (dialogs,) int64: the chunk each dialog lies in, for who came first across splits
    counts: dict[tuple[int, str], Counter]  # (log, source) -> dialogs, replies, turns, no_reply, quarantined
    files: dict[str, dict[str, Any]]  # path -> fingerprint
    statistics: Statistics | None
    training: Statistics | None  # of the training split alone, which normalisers are fitted to
    ranked: dict[str, np.ndarray]  # component -> its values in the training split
    characters: dict[str, int]  # of message text, per split
    hashes: int  # the longest run of "#" before a number at the end of an id
    worker_kib: int
    first_bad: str | None = None
    split_by: SplitBy = "first_turn"
    split_why: str = ""  # why it is not what was asked for first

    @property
    def dialogs(self) -> dict[str, int]:
        return {split: sum(n for _, n in chunks) for split, chunks in self.chunks.items()}


def gather(tables: Iterable[pa.Table], progress: Callable[[int], Any] | None) -> list[Row]:
    """The chunks' figures in the order of the chunks, whatever order they arrived in: float sums come out the
    same every time."""
    rows = []
    for row in rows_of(tables, numpy=ARRAYS):
        row["summary"] = json.loads(row["summary"])
        rows.append(row)
        if progress:
            progress(len(row["id"]))
    return sorted(rows, key=lambda row: (row["group"], row["position"]))


def choose_split(
    rows: Sequence[Row],
    directory: Path,
    ranked: Sequence[str],
    *,
    validation: float,
    test: float,
) -> Scored:
    """As the chunks were cut, by first user turn; by dialog where that leaves fewer of the splits empty.

    The chunks are then written anew beside those that pass 1 wrote, which stay for a run that is killed now.
    """
    splits = [code for code, share in enumerate((1.0, validation, test)) if share]  # in the order of SPLITS
    sizes, others = (_sizes(rows, column) for column in ("split", "by_dialog"))
    if sum(others[splits] == 0) >= sum(sizes[splits] == 0):
        return merge(rows, directory, ranked, split_by="first_turn")
    again = [_cut_by_dialog(row, directory) for row in rows]
    scored = merge(again, directory / BY_DIALOG, ranked, split_by="dialog")
    shares = ", ".join(f"{size:,} in {split}" for split, size in zip(SPLITS, sizes.tolist(), strict=True))
    scored.split_why = f"by their first user turns the {sizes.sum():,} dialogs would be {shares}"
    return scored


def _sizes(rows: Sequence[Row], column: str) -> np.ndarray:
    """(3,) dialogs in each of SPLITS."""
    return np.bincount(joined([row[column] for row in rows], np.uint8), minlength=len(SPLITS))


def _cut_by_dialog(row: Row, directory: Path) -> Row:
    """Writes one chunk split by dialog; its figures."""
    name, order = chunk_name(row), np.lexsort((row["place"], row["by_dialog"]))
    codes = row["by_dialog"][order]
    written = [split for code, split in enumerate(SPLITS) if (row["split"] == code).any()]
    parts = [pq.read_table(directory / split / name) for split in written]
    table = pa.concat_tables(parts) if parts else None
    for code in np.unique(codes).tolist():
        part = table.take(pa.array(order[codes == code]))
        names = pa.array([SPLITS[code]] * len(part), part.schema.field("split").type)
        part = part.set_column(part.schema.get_field_index("split"), part.schema.field("split"), names)
        (directory / BY_DIALOG / SPLITS[code]).mkdir(parents=True, exist_ok=True)
        write_table(part, directory / BY_DIALOG / SPLITS[code] / name)
    figures = {column: row[column][order] for column in ("id", "context", "place")}
    summary = row["summary"] | row["summary"]["by_dialog"]
    return row | figures | {"split": codes, "ranked": row["ranked_by_dialog"], "summary": summary}


def merge(rows: Sequence[Row], directory: Path, ranked: Sequence[str], *, split_by: SplitBy) -> Scored:
    """The figures of all chunks together; their files lie in `directory`/<split>."""
    scored = Scored(
        {s: [] for s in SPLITS}, {}, {}, {}, {}, {}, None, None, {}, dict.fromkeys(SPLITS, 0), 0, 0
    )
    scored.split_by = split_by
    for row in rows:
        _add(scored, row["summary"])
        for code, split in enumerate(SPLITS):
            if count := int((row["split"] == code).sum()):
                scored.chunks[split].append((str(directory / split / chunk_name(row)), count))
    values = (
        [np.split(row["ranked"], np.cumsum(row["summary"]["ranked"])[:-1]) for row in rows] if ranked else []
    )
    scored.ranked = {
        name: np.concatenate(parts) for name, parts in zip(ranked, zip(*values, strict=True), strict=True)
    }
    for code, split in enumerate(SPLITS):
        chosen = [row["split"] == code for row in rows]
        scored.ids[split] = joined([row["id"][c] for row, c in zip(rows, chosen, strict=True)], np.uint64)
        scored.contexts[split] = joined(
            [row["context"][c] for row, c in zip(rows, chosen, strict=True)], np.uint64
        )
        scored.order[split] = joined([np.full(int(c.sum()), i) for i, c in enumerate(chosen)], np.int64)
    return scored


def chunk_name(row: Row) -> str:
    """The file of a chunk, in the folder of each split that it has dialogs of."""
    return f"{row['group']:06d}-{row['position']:010d}.parquet"


def _add(scored: Scored, summary: dict[str, Any]) -> None:
    for log, source, what, count in summary["counts"]:
        scored.counts.setdefault((log, source), Counter())[what] += count
    scored.files |= summary["files"]
    for name in ("statistics", "training"):
        before, more = getattr(scored, name), Statistics.from_dict(summary[name])
        setattr(scored, name, more if before is None else before.merge(more))
    for split, count in summary["characters"].items():
        scored.characters[split] += count
    scored.hashes = max(scored.hashes, summary["hashes"])
    scored.worker_kib = max(scored.worker_kib, summary["worker_kib"])
    scored.first_bad = scored.first_bad or summary["first_bad"]


def write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, f"{path}.part", compression="zstd", compression_level=1)
    os.replace(f"{path}.part", path)
