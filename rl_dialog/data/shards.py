"""The data directory that `prepare` writes and training reads.

    train-00000.parquet ...   one row per dialog: the columns of `schema.ARROW_SCHEMA`, and `rows`, its
                              windows as tokens; a reply's reward is null where it is missing; with
                              `prepare --teachers` also `taught`, what these say of each window's messages
    validation-...  test-...
    manifest.json             where the data came from, what was quarantined or skipped, splits, reward
                              statistics, tokenizer
    quarantine.jsonl          every record that could not be read: file, place, reason
    tokenizer/                a `from_pretrained` directory
    prepare.yaml              the resolved config

Reading needs pyarrow and numpy only, and holds one record batch at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.data.schema import ARROW_SCHEMA, Dialog
from rl_dialog.data.taught import Taught, sizes
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError

FORMAT = "rl_dialog.data"
VERSION = 4  # 1 wrote the reward 0 where there was none; 2 and 3 did not know what followed a window
MANIFEST = "manifest.json"
RECIPE = "recipe.json"  # in a data directory in the making (building.py)
BATCH_DIALOGS = 1024  # dialogs decoded at a time when reading

TOKENS = pa.struct(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("assistant", pa.list_(pa.bool_())),
        ("reply_ends", pa.list_(pa.int32())),
        ("rewards", pa.list_(pa.float64())),  # null: missing
        ("truncated", pa.bool_()),
        ("later_rewards", pa.list_(pa.float64())),  # null: missing
        ("later_tokens", pa.list_(pa.int32())),
        ("later_done", pa.bool_()),
        ("next_prompt", pa.list_(pa.int32())),
    ]
)
SHARD_SCHEMA = ARROW_SCHEMA.append(pa.field("rows", pa.list_(TOKENS)))
TAUGHT = pa.struct(  # of a window, beside its tokens
    [
        ("places", pa.list_(pa.int32())),
        ("emotions", pa.list_(pa.float32())),  # one message's labels behind the other's
        ("embeddings", pa.list_(pa.float16())),
    ]
)
TAUGHT_SCHEMA = SHARD_SCHEMA.append(pa.field("taught", pa.list_(TAUGHT)))


def load_manifest(data_dir: str | Path) -> dict[str, Any]:
    """manifest.json of a prepared directory. Raises UserError for anything else, and for one written by
    another version of the format."""
    path = Path(data_dir) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        problem = "no manifest.json in it" if Path(data_dir).is_dir() else "no such directory"
        raise UserError(
            f"{data_dir}: expected a directory written by `python -m pipelines.prepare`, got {problem}"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path}: expected the JSON that `python -m pipelines.prepare` writes, got {error}"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: expected a manifest of format {FORMAT!r}, got one of another program")
    if manifest.get("version") != VERSION:
        version = manifest.get("version")
        reasons = {
            1: " (version 1 wrote the reward 0 for replies that have none)",
            2: " (version 2 did not say what followed where a conversation was cut at --max_length)",
            3: " (version 3 did not say what a policy would read next where one was cut)",
        }
        reason = reasons.get(version, "") if isinstance(version, int) else ""
        raise UserError(
            f"{path}: expected version {VERSION} of the data format, got {version!r}; run `pipelines.prepare`"
            f" again{reason}"
        )
    return manifest


def read_rows(data_dir: str | Path, split: str, *, taught: bool = False) -> Iterator[Row]:
    """The token rows of a split, in the order of its shards. Their arrays are views into the record batch
    they came in: read-only and compact. `taught` asks for what teachers say of their messages too, of a
    directory that was prepared with some."""
    if not taught:
        for batch in _batches(data_dir, split, ["rows"]):
            yield from unpack_rows(batch.column("rows"))
        return
    widths = sizes(load_manifest(data_dir)["teachers"])
    for batch in _batches(data_dir, split, ["rows", "taught"]):
        lessons = unpack_taught(batch.column("taught"), *widths)
        for row, mine in zip(unpack_rows(batch.column("rows")), lessons, strict=True):
            yield replace(row, taught=mine)


def read_dialogs(data_dir: str | Path, split: str) -> Iterator[Dialog]:
    """The dialogs of a split, scored, in the order of its shards."""
    for batch in _batches(data_dir, split, ARROW_SCHEMA.names):
        yield from map(Dialog.from_row, batch.to_pylist())


def shard_name(split: str, number: int) -> str:
    """`train-00007.parquet`."""
    return f"{split}-{number:05d}.parquet"


def pack_rows(dialogs: Sequence[Sequence[Row]]) -> pa.ListArray:
    """The `rows` column for dialogs given as lists of windows."""
    rows = [row for windows in dialogs for row in windows]
    fields = [
        _lists([row.input_ids for row in rows], np.int32),
        _lists([row.assistant for row in rows], np.bool_),
        _lists([row.reply_ends for row in rows], np.int32),
        _lists([row.rewards for row in rows], np.float64, nan_is_null=True),
        pa.array([row.truncated for row in rows], pa.bool_()),
        _lists([row.later_rewards for row in rows], np.float64, nan_is_null=True),
        _lists([row.later_tokens for row in rows], np.int32),
        pa.array([row.later_done for row in rows], pa.bool_()),
        _lists([row.next_prompt for row in rows], np.int32),
    ]
    structs = pa.StructArray.from_arrays(fields, fields=list(TOKENS))
    return pa.ListArray.from_arrays(_offsets(map(len, dialogs)), structs)


def unpack_rows(column: pa.ListArray) -> Iterator[Row]:
    """The inverse of `pack_rows`, without the grouping by dialog.

    Integers are not copied, rewards only where one is null.
    """
    structs = column.flatten()
    input_ids, assistant, reply_ends, rewards, truncated, *behind = structs.flatten()
    later_rewards, later_tokens, later_done, next_prompt = behind
    ids, id_at = _values(input_ids)
    mask, mask_at = _values(assistant)
    ends, end_at = _values(reply_ends)
    earned, earned_at = _values(rewards)
    later, later_at = _values(later_rewards)
    lengths, _ = _values(later_tokens)
    done = later_done.to_pylist()
    prompts, prompt_at = _values(next_prompt)
    for i, cut in enumerate(truncated.to_pylist()):
        yield Row(
            ids[id_at[i] : id_at[i + 1]],
            mask[mask_at[i] : mask_at[i + 1]],
            ends[end_at[i] : end_at[i + 1]],
            earned[earned_at[i] : earned_at[i + 1]],
            cut,
            later[later_at[i] : later_at[i + 1]],
            lengths[later_at[i] : later_at[i + 1]],
            done[i],
            prompts[prompt_at[i] : prompt_at[i + 1]],
        )


def pack_taught(dialogs: Sequence[Sequence[Row]]) -> pa.ListArray:
    """The `taught` column for dialogs given as lists of windows."""
    lessons = [row.taught for windows in dialogs for row in windows]
    fields = [
        _lists([each.places for each in lessons], np.int32),
        _lists([each.emotions.ravel() for each in lessons], np.float32),
        _lists([each.embeddings.ravel() for each in lessons], np.float16),
    ]
    structs = pa.StructArray.from_arrays(fields, fields=list(TAUGHT))
    return pa.ListArray.from_arrays(_offsets(map(len, dialogs)), structs)


def unpack_taught(column: pa.ListArray, emotions: int, embedding: int) -> Iterator[Taught]:
    """The inverse of `pack_taught`, for so many labels of an emotion and numbers of an embedding."""
    columns = [_values(lists) for lists in column.flatten().flatten()]
    (places, place_at), (moods, mood_at), (vectors, vector_at) = columns
    for i in range(len(place_at) - 1):
        mine = places[place_at[i] : place_at[i + 1]]
        yield Taught(
            mine,
            moods[mood_at[i] : mood_at[i + 1]].reshape(len(mine), emotions),
            vectors[vector_at[i] : vector_at[i + 1]].reshape(len(mine), embedding),
        )


def _batches(data_dir: str | Path, split: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    splits = load_manifest(data_dir)["splits"]
    if split not in splits:
        raise UserError(f"{data_dir}: expected one of the splits {', '.join(splits)}, got {split!r}")
    for shard in splits[split]["shards"]:
        path = Path(data_dir) / shard["file"]
        try:
            file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(
                f"{path}: expected the Parquet shard that manifest.json lists, got {error}"
            ) from error
        with file:
            yield from file.iter_batches(batch_size=BATCH_DIALOGS, columns=columns)


def _lists(arrays: Sequence[np.ndarray], dtype: type, *, nan_is_null: bool = False) -> pa.ListArray:
    values = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
    return pa.ListArray.from_arrays(_offsets(map(len, arrays)), pa.array(values, from_pandas=nan_is_null))


def _offsets(lengths: Any) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def _values(lists: pa.ListArray) -> tuple[np.ndarray, list[int]]:
    """The flat values of all lists, and where each begins in them. A null among floats is NaN."""
    offsets = lists.offsets.to_numpy()
    return lists.flatten().to_numpy(zero_copy_only=False), (offsets - offsets[0]).tolist()
