"""The data directory: what goes in comes out, and what is not one is said so."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.data import shards
from rl_dialog.data.schema import ARROW_SCHEMA, Dialog
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError


def window(length, ends, rewards, truncated=False):
    ids = np.arange(length, dtype=np.int32)
    return Row(ids, ids % 2 == 1, np.array(ends, np.int32), np.array(rewards, np.float32), truncated)


DIALOGS = [
    Dialog(
        id=f"d{i}",
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "reward": i}],
    )
    for i in range(3)
]
WINDOWS = [
    [window(4, [3], [1.5])],
    [
        replace(window(6, [1, 5], [0.0, -2.0], True), next_prompt=np.array([7, 8], np.int32)),
        window(3, [1], [1e-3]),
    ],
    [window(2, [1], [7.0])],
]


@pytest.fixture
def data_dir(tmp_path):
    """Two shards of a train split; validation is empty."""
    for number, (start, stop) in enumerate([(0, 2), (2, 3)]):
        table = pa.Table.from_pylist([d.to_row() for d in DIALOGS[start:stop]], ARROW_SCHEMA)
        table = table.append_column(shards.SHARD_SCHEMA.field("rows"), shards.pack_rows(WINDOWS[start:stop]))
        pq.write_table(table, tmp_path / shards.shard_name("train", number))
    files = [{"file": shards.shard_name("train", n)} for n in range(2)]
    manifest = {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "splits": {"train": {"shards": files}, "validation": {"shards": []}},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def assert_equal(row, expected):
    for name, dtype in (
        ("input_ids", np.int32),
        ("assistant", np.bool_),
        ("reply_ends", np.int32),
        ("rewards", np.float64),
        ("next_prompt", np.int32),
    ):
        assert getattr(row, name).dtype == dtype
        np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))
    assert row.truncated is expected.truncated


def test_rows_come_back_in_order_over_shards_and_windows(data_dir):
    rows = list(shards.read_rows(data_dir, "train"))
    expected = [row for windows in WINDOWS for row in windows]
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert_equal(row, wanted)
    assert list(shards.read_rows(data_dir, "validation")) == []


def test_rows_are_views_into_one_buffer(data_dir):
    first, second = list(shards.read_rows(data_dir, "train"))[:2]
    assert not first.input_ids.flags.owndata
    assert (
        second.input_ids.__array_interface__["data"][0]
        == first.input_ids.__array_interface__["data"][0] + first.input_ids.nbytes
    )


def test_a_slice_of_a_column_unpacks_to_its_own_rows():
    column = shards.pack_rows(WINDOWS).slice(1, 1)
    for row, wanted in zip(shards.unpack_rows(column), WINDOWS[1], strict=True):
        assert_equal(row, wanted)


def test_a_missing_reward_is_null_in_the_file_and_nan_in_memory(tmp_path):
    """Zeros stay zeros. Through Parquet, and for a slice of the column."""
    two = [window(6, [1, 5], [np.nan, -2.0]), window(2, [1], [np.nan])]
    rows = [[window(4, [1, 3], [0.0, np.nan])], two, [window(2, [1], [0.0])]]
    column = shards.pack_rows(rows)
    stored = [[row["rewards"] for row in windows] for windows in column.to_pylist()]
    assert stored == [[[0.0, None]], [[None, -2.0], [None]], [[0.0]]]
    pq.write_table(pa.table({"rows": column}), tmp_path / "rows.parquet")
    (chunk,) = pq.read_table(tmp_path / "rows.parquet").column("rows").chunks
    for found, first in ((chunk, 0), (chunk.slice(1, 2), 1)):
        expected = [row for windows in rows[first:] for row in windows]
        for row, wanted in zip(shards.unpack_rows(found), expected, strict=True):
            assert_equal(row, wanted)


def test_an_empty_column():
    assert list(shards.unpack_rows(shards.pack_rows([]))) == []
    assert shards.pack_rows([]).type == shards.SHARD_SCHEMA.field("rows").type


def test_dialogs_come_back_equal(data_dir):
    assert list(shards.read_dialogs(data_dir, "train")) == DIALOGS


def test_what_is_no_data_directory_is_said_so(data_dir, tmp_path):
    with pytest.raises(
        UserError,
        match="expected a directory written by `python -m pipelines.prepare`, got no such directory",
    ):
        shards.load_manifest(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"got no manifest\.json in it"):
        shards.load_manifest(tmp_path / "empty")
    with pytest.raises(UserError, match="expected one of the splits train, validation, got 'dev'"):
        next(shards.read_rows(data_dir, "dev"))
    (data_dir / "train-00001.parquet").unlink()
    with pytest.raises(
        UserError, match=r"train-00001\.parquet: expected the Parquet shard that manifest\.json lists"
    ):
        list(shards.read_rows(data_dir, "train"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "rl_dialog.data", "version": 99}', "expected version 4 of the data format, got 99"),
        ('{"format": "rl_dialog.data", "version": 1}', "got 1; .*the reward 0 for replies that have none"),
        ('{"format": "other"}', "one of another program"),
        ("[1]", "one of another program"),
        ("{", "expected the JSON"),
    ],
)
def test_a_manifest_of_another_version_or_program(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        shards.load_manifest(tmp_path)
