"""The parts of the two passes, without a cluster: what runs on Ray is called directly."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from rl_dialog.cluster import data as cluster
from rl_dialog.data.readers import LogFile, find_logs
from rl_dialog.data.schema import ARROW_SCHEMA, SPLITS, Dialog, write_jsonl
from rl_dialog.data.shards import SHARD_SCHEMA, unpack_rows
from rl_dialog.data.splits import assign_split


def talk(number, *, opening=None, **fields):
    replies = [{"role": "user", "content": opening or f"question {number}"}, {"role": "assistant", "content": "how are you ?"}]
    return Dialog(id=f"d{number}", messages=replies, source="chats", **fields)


def scored(**ids):
    """Pass 1's result for dialogs with these ids per split, one chunk each."""
    full = {split: ids.get(split, []) for split in SPLITS}
    chunks = {split: [(f"{split}.parquet", len(names))] if names else [] for split, names in full.items()}
    hashed = {split: np.array([cluster.hash64(name) for name in names], np.uint64) for split, names in full.items()}
    order = {split: np.zeros(len(names), np.int64) for split, names in full.items()}
    return cluster.Scored(chunks, hashed, hashed, order, {}, {}, None, {}, 0, 0)


def test_small_files_are_read_together_and_a_big_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "GROUP_BYTES", 100)
    logs = []
    for number, size in enumerate([40, 50, 30, 500, 10]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"x" * size)
        logs.append(LogFile(str(path), "openai"))
    assert cluster.group_logs(logs) == [[0, 1], [2], [3], [4]]


def test_a_reader_yields_dialogs_bad_records_file_hashes_and_its_memory(tmp_path):
    path = tmp_path / "chats.jsonl"
    write_jsonl([talk(0), talk(1)], path)
    path.write_text(path.read_text() + "{broken\n")
    logs, _, _ = find_logs([str(path)])
    [table] = cluster._group_tables(logs)
    rows = pa.concat_tables(cluster.read_group(table, scoring=cluster.Scoring({}))).to_pylist()
    assert [row["kind"] for row in rows] == ["file", "dialog", "dialog", "bad", "worker"]
    assert [row["position"] for row in rows] == [0, 1, 2, 3, 4]
    assert json.loads(rows[0]["json"]) == cluster.fingerprint(str(path))
    assert Dialog.from_json(rows[1]["json"]) == talk(0)
    assert "chats.jsonl" in json.loads(rows[3]["json"])["file"]
    with pytest.raises(ValueError, match="chats.jsonl:.*a strict run stops at the first bad record"):
        list(cluster.read_group(table, scoring=cluster.Scoring({}, strict=True)))


def records(*dialogs):
    rows = [{"group": 3, "position": 7 + i, "log": 0, "kind": "dialog", "json": d.to_json()} for i, d in enumerate(dialogs)]
    return pa.Table.from_pylist(rows, cluster.RECORDS)


def make_scorer(directory, scoring):
    for name in (*SPLITS, "quarantine"):
        (directory / name).mkdir()
    return cluster.Scorer(scoring, str(directory))


def test_a_scorer_writes_scored_dialogs_by_split_and_reports_figures(tmp_path):
    scoring = cluster.Scoring({"question": 0.5}, validation=0.2, test=0.2)
    silent = Dialog(id="silent", messages=[{"role": "user", "content": "hi"}], source="chats")
    dialogs = [talk(i) for i in range(30)]
    [row] = make_scorer(tmp_path, scoring)(records(*dialogs, silent)).to_pylist()
    written = {}
    for split in SPLITS:
        rows = pq.read_table(tmp_path / split / "000003-0000000007.parquet").to_pylist()
        written[split] = [Dialog.from_row(r) for r in rows]
    for split, members in written.items():
        assert [d.id for d in members] == [d.id for d in dialogs if assign_split(d, 0.2, 0.2) == split]
        assert all(d.split == split and d.messages[1]["reward"] == 0.5 and d.messages[1]["rewards"] == {"question": 1.0} for d in members)
    assert Counter(row["split"]) == {code: len(written[split]) for code, split in enumerate(SPLITS)}
    assert row["id"] == [cluster.hash64(d.id) for split in SPLITS for d in written[split]]
    summary = json.loads(row["summary"])
    assert {(what, count) for _, _, what, count in summary["counts"]} == {("dialogs", 30), ("replies", 30), ("turns", 60), ("no_reply", 1)}
    assert cluster.Statistics.from_dict(summary["statistics"]).summary({"question": 0.5})["sum"]["mean"] == 0.5


def test_declared_splits_are_kept_and_the_rest_hashed(tmp_path):
    scoring = cluster.Scoring({"logged": 1.0}, split="declared", validation=0.0, test=0.0)
    [row] = make_scorer(tmp_path, scoring)(records(talk(0, split="test"), talk(1), talk(2, split="validation"))).to_pylist()
    assert row["split"] == [0, 1, 2]
    assert row["id"] == [cluster.hash64(name) for name in ("d1", "d2", "d0")]


def test_an_id_that_was_taken_is_counted_in_reading_order_over_chunks():
    found = scored(train=["a", "b", "a"], validation=["a", "c"], test=["b"])
    found.order = {"train": np.array([0, 0, 2]), "validation": np.array([1, 1]), "test": np.array([3])}
    copies = cluster.occurrences(found)
    assert {split: copy.tolist() for split, copy in copies.items()} == {"train": [1, 1, 3], "validation": [2, 1], "test": [2]}
    assert cluster.shared_contexts(found) == 2
    assert [len(copy) for copy in cluster.occurrences(scored()).values()] == [0, 0, 0]


def test_shards_cut_the_chunks_of_a_split_into_equal_parts():
    found = scored(train=list("abcdefg"), test=["a"])
    found.chunks["train"] = [("one", 3), ("two", 1), ("three", 3)]
    plan = list(cluster.plan_shards(found, 2))
    assert [(p["split"], p["number"]) for p in plan] == [("train", 0), ("train", 1), ("train", 2), ("train", 3), ("test", 0)]
    assert [p["parts"] for p in plan[:4]] == [[["one", 0, 2]], [["one", 2, 3], ["two", 0, 1]], [["three", 0, 2]], [["three", 2, 3]]]
    assert [p["suffixes"] for p in plan] == [{}, {}, {}, {}, {0: "#2"}]


@pytest.mark.parametrize(("identifier", "hashes"), [("a", 0), ("a7", 0), ("a#7", 1), ("a##12", 2), ("#3", 1), ("a#", 0), ("7", 0)])
def test_hashes_before_a_number_at_the_end_of_an_id(identifier, hashes):
    assert cluster.trailing_hashes(identifier) == hashes


def test_new_ids_cannot_meet_ids_that_look_like_them():
    found = scored(train=["a#2", "a", "a"])
    found.hashes = 1
    [plan] = cluster.plan_shards(found, 10)
    assert plan["suffixes"] == {2: "##2"}


def test_a_writer_tokenises_the_planned_dialogs_and_renames(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    dialogs = [talk(i) for i in range(4)]
    pq.write_table(pa.Table.from_pylist([d.to_row() for d in dialogs], ARROW_SCHEMA), tmp_path / "chunk.parquet")
    plan = {"split": "train", "number": 2, "parts": [[str(tmp_path / "chunk.parquet"), 1, 4]], "suffixes": {"1": "#2"}}
    writer = cluster.ShardWriter(str(tmp_path / "tokenizer"), str(tmp_path), 64)
    [row] = writer(pa.table({"plan": [json.dumps(plan)]})).to_pylist()
    shard = cluster.Shard(**json.loads(row["summary"]))
    table = pq.read_table(tmp_path / "train-00002.parquet")
    rows = list(unpack_rows(table.column("rows").combine_chunks()))
    assert table.schema == SHARD_SCHEMA
    assert table.column("id").to_pylist() == ["d1", "d2#2", "d3"]
    assert (shard.file, shard.dialogs, shard.replies, shard.rows) == ("train-00002.parquet", 3, 3, 3)
    assert shard.tokens == sum(len(row.input_ids) for row in rows)
    assert tokenizer.decode(rows[0].input_ids) == tokenizer.apply_chat_template(dialogs[1].messages, tokenize=False)
    assert not list(tmp_path.glob("*.part"))


def test_the_workers_own_error_comes_out_of_rays_wrapper():
    error = ray.exceptions.RayTaskError("write", "a long traceback of Ray's", ValueError("fix the template"))
    with pytest.raises(ValueError, match="^fix the template$"), cluster.errors_of_workers():
        raise error.as_instanceof_cause()
    with pytest.raises(ray.exceptions.RayTaskError), cluster.errors_of_workers():
        raise ray.exceptions.RayTaskError("write", "a long traceback of Ray's", KeyError("a defect"))
