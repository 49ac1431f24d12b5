"""Pass 2 of prepare: plan the shards, tokenise and write them (data.py tells how the passes fit together)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.cluster.data import dataset, errors_of_workers, joined, peak_kib, pool, rows_of, stream_tables
from rl_dialog.cluster.scored import Scored
from rl_dialog.cluster.scoring import WORK, write_text
from rl_dialog.cluster.time_limit import TookTooLong, time_limit, too_long
from rl_dialog.data.formats.log_file import Bad, shown
from rl_dialog.data.schema import ARROW_SCHEMA, SPLITS, Dialog, to_table
from rl_dialog.data.shards import SHARD_SCHEMA, TAUGHT_SCHEMA, pack_rows, pack_taught, shard_name
from rl_dialog.data.taught import Taught
from rl_dialog.errors import UserError
from rl_dialog.rewards import Statistics
from rl_dialog.rewards.normalise import Normaliser, weighted_sum
from rl_dialog.rewards.scorers import TOGETHER
from rl_dialog.rewards.teachers import make_teachers, teach

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ACTOR_DIALOGS = (
    2000  # dialogs that are worth starting another tokenising actor for: it takes seconds to start
)
ROW_GROUP_TOKENS = 1 << 20  # a shard is written in row groups of about this size

SHARDS = pa.schema([("split", pa.string()), ("number", pa.int32()), ("summary", pa.large_string())])


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
    late: list[dict[str, Any]] = field(
        default_factory=list
    )  # quarantined, because tokenising them took too long or the chat template refuses them
    rewards: dict[str, Any] | None = (
        None  # Statistics of the replies' rewards, where normalisers made them anew
    )


def write_shards(
    scored: Scored,
    tokenizer_dir: Path,
    directory: Path,
    *,
    shard_rows: int,
    max_length: int,
    weights: Mapping[str, float],
    normalisers: Mapping[str, Normaliser],
    teachers: Sequence[str] = (),
    record_seconds: float = 0.0,
    strict: bool = False,
    concurrency: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, list[Shard]]:
    """Pass 2: tokenises every chunk into `directory`, `shard_rows` dialogs a shard. Returns the shards per
    split, in order. Raises TemplateError.

    A shard that a killed run has finished there is taken as it is. With `normalisers` a reply's reward is the
    weighted sum of its normalised components; pass 1 could not know them yet. `teachers` are asked about
    every message (rewards/teachers.py).
    """
    plan = [json.dumps(entry) for entry in plan_shards(scored, shard_rows)]
    tables = [pa.table({"plan": pa.array([entry], pa.large_string())}) for entry in plan]
    written: dict[str, list[tuple[int, Shard]]] = {split: [] for split in SPLITS}
    arguments = {
        "tokenizer_dir": str(tokenizer_dir),
        "directory": str(directory),
        "max_length": max_length,
        "weights": dict(weights),
        "normalisers": dict(normalisers),
        "teachers": tuple(teachers),
        "record_seconds": record_seconds,
        "strict": strict,
    }
    writers = pool(concurrency, min(len(plan), 1 + sum(scored.dialogs.values()) // ACTOR_DIALOGS))
    blocks = {"batch_size": None, "batch_format": "pyarrow", "num_cpus": 1}
    with errors_of_workers():
        shards = dataset(tables).map_batches(
            ShardWriter, compute=writers, fn_constructor_kwargs=arguments, **blocks
        )
        for row in rows_of(stream_tables(shards)):
            shard = Shard(**json.loads(row["summary"]))
            written[row["split"]].append((row["number"], shard))
            if progress:
                progress(shard.dialogs)
    return {
        split: [shard for _, shard in sorted(entries, key=lambda e: e[0])]
        for split, entries in written.items()
    }


def occurrences(scored: Scored) -> dict[str, np.ndarray]:
    """Per split and dialog: 1 for the first dialog with its id in reading order (chunks, then splits), 2 for
    the second, ..."""
    lengths = [len(scored.ids[split]) for split in SPLITS]
    ids = joined([scored.ids[split] for split in SPLITS], np.uint64)
    read = np.argsort(joined([scored.order[split] for split in SPLITS], np.int64), kind="stable")
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


def largest_context(scored: Scored) -> float:
    """The largest share of the dialogs that have one split key ("hi"), so that they had to go into one
    split."""
    keys = np.concatenate([scored.contexts[split] for split in SPLITS])
    return float(np.unique(keys, return_counts=True)[1].max() / len(keys))


def plan_shards(scored: Scored, shard_rows: int) -> Iterator[dict[str, Any]]:
    """Which dialogs of which chunks make up each shard, and the new ids of those whose id was taken: `id#2`,
    or `id##2` where ids already end so."""
    copies = occurrences(scored)
    for split in SPLITS:
        starts = np.cumsum([0, *(count for _, count in scored.chunks[split])])
        for number, begin in enumerate(range(0, int(starts[-1]), shard_rows)):
            end = min(begin + shard_rows, int(starts[-1]))
            touched = range(
                int(np.searchsorted(starts, begin, "right")) - 1, int(np.searchsorted(starts, end, "left"))
            )
            parts = [
                [
                    scored.chunks[split][c][0],
                    max(begin - int(starts[c]), 0),
                    min(end, int(starts[c + 1])) - int(starts[c]),
                ]
                for c in touched
            ]
            renamed = np.flatnonzero(copies[split][begin:end] > 1)
            suffixes = {int(i): "#" * (scored.hashes + 1) + str(copies[split][begin + i]) for i in renamed}
            yield {"split": split, "number": number, "parts": parts, "suffixes": suffixes}


class ShardWriter:
    """An actor of pass 2: tokenises the dialogs of one planned shard and writes it, with its own tokenizer
    (shared ones are "Already borrowed")."""

    def __init__(
        self,
        tokenizer_dir: str,
        directory: str,
        max_length: int,
        weights: dict[str, float],
        normalisers: dict[str, Normaliser],
        record_seconds: float = 0.0,
        strict: bool = False,
        teachers: Sequence[str] = (),
    ) -> None:
        self.record_seconds, self.strict = record_seconds, strict
        self.tokenizer, self.directory, self.max_length = (
            _saved_tokenizer(tokenizer_dir),
            Path(directory),
            max_length,
        )
        self.weights, self.normalisers = weights, normalisers
        self.teachers = make_teachers(teachers)

    def __call__(self, table: pa.Table) -> pa.Table:
        [row] = table.to_pylist()
        plan = json.loads(row["plan"])
        name = shard_name(plan["split"], plan["number"])
        figures = self.directory / WORK / f"{name}.json"
        if not figures.is_file():  # else a run that was killed later has written the shard
            write_text(json.dumps(asdict(self._write(name, plan))), figures)
        return pa.Table.from_pylist(
            [
                {
                    "split": plan["split"],
                    "number": plan["number"],
                    "summary": figures.read_text(encoding="utf-8"),
                }
            ],
            SHARDS,
        )

    def _write(self, name: str, plan: dict[str, Any]) -> Shard:
        shard, path = Shard(name), self.directory / name
        schema = TAUGHT_SCHEMA if self.teachers else SHARD_SCHEMA
        with pq.ParquetWriter(f"{path}.part", schema, compression="zstd") as writer:
            for group in self._row_groups(plan, shard):
                writer.write_table(group)
        os.replace(f"{path}.part", path)
        shard.worker_kib = peak_kib()
        return shard

    def _row_groups(self, plan: dict[str, Any], shard: Shard) -> Iterator[pa.Table]:
        """Tables of about ROW_GROUP_TOKENS tokens; a chunk is held as Arrow, its dialogs become objects one
        at a time."""
        pending: list[pa.Table] = []
        tokens = 0
        for path, start, stop in plan["parts"]:
            part = pq.read_table(path).slice(start, stop - start)
            if self.normalisers:
                part = self._normalised(part, shard)
            before = shard.tokens
            pending.append(self._tokenised(part, plan["suffixes"], shard))
            tokens += shard.tokens - before
            if tokens >= ROW_GROUP_TOKENS:
                yield pa.concat_tables(pending)
                pending, tokens = [], 0
        if pending:
            yield pa.concat_tables(pending)

    def _normalised(self, part: pa.Table, shard: Shard) -> pa.Table:
        """The same dialogs, each reply's reward the weighted sum of its normalised components, or null."""
        dialogs = [Dialog.from_row(row) for row in part.to_pylist()]
        totals = []
        for dialog in dialogs:
            for i in dialog.replies:
                message = dialog.messages[i]
                components = {
                    name: message["rewards"][name] for name in self.weights if name in message["rewards"]
                }
                message["reward"] = weighted_sum(components, self.weights, self.normalisers)
                totals.append(message["reward"])
        statistics = Statistics.of(np.array(totals, dtype=float)[:, None])  # None becomes NaN
        shard.rewards = (
            statistics if shard.rewards is None else Statistics.from_dict(shard.rewards).merge(statistics)
        ).to_dict()
        return to_table(dialogs)

    def _tokenised(self, part: pa.Table, suffixes: dict[str, str], shard: Shard) -> pa.Table:
        from rl_dialog.data.tokenize import Refused, cut_replies, tokenize

        ids, windows, kept = [], [], []
        for i, (dialog, taught) in enumerate(self._dialogs(part)):
            for message in (
                dialog.messages
            ):  # no template shows these, and transformers copies all it is given for every prefix it renders
                message.pop("rewards", None), message.pop("feedback", None)
            name = dialog.id + suffixes.get(str(shard.dialogs + len(shard.late)), "")
            try:
                with time_limit(self.record_seconds):
                    rows = tokenize(dialog, self.tokenizer, max_length=self.max_length, taught=taught)
            except (TookTooLong, Refused) as error:
                late = isinstance(error, TookTooLong)
                why = too_long(self.record_seconds, "tokenised") if late else str(error)
                counts = {"replies": len(dialog.replies), "turns": len(dialog.messages)}
                shard.late.append({"bad": asdict(self._left_out(name, dialog, why)), **counts})
                continue
            ids.append(name)
            windows.append(rows)
            kept.append(i)
            shard.dialogs += 1
            shard.replies += len(dialog.replies)
            shard.rows += len(rows)
            shard.tokens += sum(len(r.input_ids) for r in rows)
            shard.cut_replies += cut_replies(dialog, self.tokenizer, rows)
        part = part.take(pa.array(kept, pa.int64())) if len(kept) < len(part) else part
        renamed = part.set_column(0, ARROW_SCHEMA.field("id"), pa.array(ids, pa.string()))
        table = renamed.append_column(SHARD_SCHEMA.field("rows"), pack_rows(windows))
        if not self.teachers:
            return table
        return table.append_column(TAUGHT_SCHEMA.field("taught"), pack_taught(windows))

    def _dialogs(self, part: pa.Table) -> Iterator[tuple[Dialog, Taught | None]]:
        """The dialogs one after another, with what teachers say of their messages: those are asked about
        several dialogs together."""
        if not self.teachers:
            for i in range(len(part)):
                yield Dialog.from_row(part.slice(i, 1).to_pylist()[0]), None
            return
        for start in range(0, len(part), TOGETHER):
            dialogs = [Dialog.from_row(row) for row in part.slice(start, TOGETHER).to_pylist()]
            yield from zip(dialogs, teach(self.teachers, dialogs), strict=True)

    def _left_out(self, name: str, dialog: Dialog, why: str) -> Bad:
        begins = shown(dialog.messages[0]["content"] or "")
        bad = Bad(dialog.source, f"dialog {name!r}", why, dialog.source, begins)
        if self.strict:
            raise UserError(f"{bad} (a strict run stops at the first bad record)")
        return bad


def _saved_tokenizer(directory: str) -> PreTrainedTokenizerFast:
    """A tokenizer saved by `save_pretrained`, without AutoTokenizer where it has no class of its own: that
    imports torch, which takes seconds."""
    from transformers import PreTrainedTokenizerFast

    from rl_dialog.data.tokenize import load_tokenizer

    name = json.loads((Path(directory) / "tokenizer_config.json").read_text(encoding="utf-8")).get(
        "tokenizer_class"
    )
    if name in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    ):  # the second is the first's name since transformers 5
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return load_tokenizer(directory)
