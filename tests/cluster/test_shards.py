"""Pass 2 without a cluster: what runs on Ray is called directly."""

from __future__ import annotations

import copy
import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.cluster.scored import Scored
from rl_dialog.cluster.scoring import WORK, hash64
from rl_dialog.cluster.shards import Shard, ShardWriter, occurrences, plan_shards, shared_contexts
from rl_dialog.data.schema import ARROW_SCHEMA, SPLITS, Dialog
from rl_dialog.data.shards import SHARD_SCHEMA, unpack_rows
from rl_dialog.errors import UserError
from tests.cluster.test_scoring import ring_now


def talk(number, *, opening=None, **fields):
    replies = [
        {"role": "user", "content": opening or f"question {number}"},
        {"role": "assistant", "content": "how are you ?"},
    ]
    return Dialog(id=f"d{number}", messages=replies, source="chats", **fields)


def scored(**ids):
    """Pass 1's result for dialogs with these ids per split, one chunk each."""
    full = {split: ids.get(split, []) for split in SPLITS}
    chunks = {split: [(f"{split}.parquet", len(names))] if names else [] for split, names in full.items()}
    hashed = {split: np.array([hash64(name) for name in names], np.uint64) for split, names in full.items()}
    order = {split: np.zeros(len(names), np.int64) for split, names in full.items()}
    return Scored(chunks, hashed, hashed, order, {}, {}, None, None, {}, {}, 0, 0)


def test_an_id_that_was_taken_is_counted_in_reading_order_over_chunks():
    found = scored(train=["a", "b", "a"], validation=["a", "c"], test=["b"])
    found.order = {"train": np.array([0, 0, 2]), "validation": np.array([1, 1]), "test": np.array([3])}
    copies = occurrences(found)
    assert {split: copy.tolist() for split, copy in copies.items()} == {
        "train": [1, 1, 3],
        "validation": [2, 1],
        "test": [2],
    }
    assert shared_contexts(found) == 2
    assert [len(copy) for copy in occurrences(scored()).values()] == [0, 0, 0]


def test_shards_cut_the_chunks_of_a_split_into_equal_parts():
    found = scored(train=list("abcdefg"), test=["a"])
    found.chunks["train"] = [("one", 3), ("two", 1), ("three", 3)]
    plan = list(plan_shards(found, 2))
    assert [(p["split"], p["number"]) for p in plan] == [
        ("train", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
        ("test", 0),
    ]
    assert [p["parts"] for p in plan[:4]] == [
        [["one", 0, 2]],
        [["one", 2, 3], ["two", 0, 1]],
        [["three", 0, 2]],
        [["three", 2, 3]],
    ]
    assert [p["suffixes"] for p in plan] == [{}, {}, {}, {}, {0: "#2"}]


def test_new_ids_cannot_meet_ids_that_look_like_them():
    found = scored(train=["a#2", "a", "a"])
    found.hashes = 1
    [plan] = plan_shards(found, 10)
    assert plan["suffixes"] == {2: "##2"}


def test_a_writer_tokenises_the_planned_dialogs_and_renames(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / WORK).mkdir()
    dialogs = [talk(i) for i in range(4)]
    pq.write_table(
        pa.Table.from_pylist([d.to_row() for d in dialogs], ARROW_SCHEMA), tmp_path / "chunk.parquet"
    )
    plan = {
        "split": "train",
        "number": 2,
        "parts": [[str(tmp_path / "chunk.parquet"), 1, 4]],
        "suffixes": {"1": "#2"},
    }
    writer = ShardWriter(str(tmp_path / "tokenizer"), str(tmp_path), 64, {}, {})
    [row] = writer(pa.table({"plan": [json.dumps(plan)]})).to_pylist()
    shard = Shard(**json.loads(row["summary"]))
    table = pq.read_table(tmp_path / "train-00002.parquet")
    rows = list(unpack_rows(table.column("rows").combine_chunks()))
    assert table.schema == SHARD_SCHEMA
    assert table.column("id").to_pylist() == ["d1", "d2#2", "d3"]
    assert (shard.file, shard.dialogs, shard.replies, shard.rows) == ("train-00002.parquet", 3, 3, 3)
    assert shard.tokens == sum(len(row.input_ids) for row in rows)
    assert tokenizer.decode(rows[0].input_ids) == tokenizer.apply_chat_template(
        dialogs[1].messages, tokenize=False
    )
    assert not list(tmp_path.glob("*.part"))


ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}<|end|>{% endfor %}"
)


def test_a_dialog_that_the_template_refuses_is_left_out(tmp_path, tokenizer):
    """The templates of many models want roles to alternate, and logs have two replies in a row."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = ALTERNATING
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / WORK).mkdir()
    twice = talk(1)
    twice.messages.append({"role": "assistant", "content": "still there ?"})
    table = pa.Table.from_pylist([each.to_row() for each in (talk(0), twice, talk(2))], ARROW_SCHEMA)
    pq.write_table(table, tmp_path / "chunk.parquet")
    parts = [[str(tmp_path / "chunk.parquet"), 0, 3]]
    plan = json.dumps({"split": "train", "number": 0, "parts": parts, "suffixes": {}})
    given = str(tmp_path / "tokenizer"), str(tmp_path), 64, {}, {}
    with pytest.raises(UserError, match="dialog 'd1'.*roles must alternate.*a strict run stops"):
        ShardWriter(*given, strict=True)(pa.table({"plan": [plan]}))
    [row] = ShardWriter(*given)(pa.table({"plan": [plan]})).to_pylist()
    shard = Shard(**json.loads(row["summary"]))
    assert pq.read_table(tmp_path / "train-00000.parquet").column("id").to_pylist() == ["d0", "d2"]
    assert [(item["bad"]["where"], item["replies"], item["turns"]) for item in shard.late] == [
        ("dialog 'd1'", 2, 3)
    ]
    assert "got its error: roles must alternate" in shard.late[0]["bad"]["reason"]


def test_a_dialog_that_takes_too_long_to_tokenise_is_left_out(tmp_path, tokenizer, monkeypatch):
    from rl_dialog.data import tokenize as module

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / WORK).mkdir()
    pq.write_table(
        pa.Table.from_pylist([talk(i).to_row() for i in range(3)], ARROW_SCHEMA), tmp_path / "chunk.parquet"
    )
    plan = {
        "split": "train",
        "number": 0,
        "parts": [[str(tmp_path / "chunk.parquet"), 0, 3]],
        "suffixes": {"1": "#2", "2": "#3"},
    }
    real = module.tokenize

    def slow(dialog, *args, **more):
        if dialog.id == "d1":
            ring_now()
            time.sleep(600)
        return real(dialog, *args, **more)

    monkeypatch.setattr(module, "tokenize", slow)
    [row] = ShardWriter(str(tmp_path / "tokenizer"), str(tmp_path), 64, {}, {}, 600.0)(
        pa.table({"plan": [json.dumps(plan)]})
    ).to_pylist()
    shard = Shard(**json.loads(row["summary"]))
    assert pq.read_table(tmp_path / "train-00000.parquet").column("id").to_pylist() == ["d0", "d2#3"]
    assert shard.dialogs == 2 and [(item["bad"]["source"], item["bad"]["where"]) for item in shard.late] == [
        ("chats", "dialog 'd1#2'")
    ]
    assert "tokenised within 600 s" in shard.late[0]["bad"]["reason"]
