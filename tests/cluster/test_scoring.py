"""Pass 1 without a cluster: what runs on Ray is called directly."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.cluster.data_directory import _check_scored, sample_texts
from rl_dialog.cluster.preparation import Preparation, check_logs
from rl_dialog.cluster.scored import merge, write_table
from rl_dialog.cluster.scoring import (
    FIGURES,
    RECORDS,
    Scorer,
    Scoring,
    group_logs,
    group_tables,
    hash64,
    read_group,
    trailing_hashes,
)
from rl_dialog.data.building import fingerprint
from rl_dialog.data.readers import LogFile, find_logs
from rl_dialog.data.schema import SPLITS, Dialog, to_table, write_jsonl
from rl_dialog.data.splits import assign_split
from rl_dialog.errors import UserError
from rl_dialog.rewards import Statistics


def talk(number, *, opening=None, **fields):
    replies = [
        {"role": "user", "content": opening or f"question {number}"},
        {"role": "assistant", "content": "how are you ?"},
    ]
    return Dialog(id=f"d{number}", messages=replies, source="chats", **fields)


def test_small_files_are_read_together_and_a_big_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_dialog.cluster.scoring.GROUP_BYTES", 100)
    logs = []
    for number, size in enumerate([40, 50, 30, 500, 10]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"x" * size)
        logs.append(LogFile(str(path), "openai"))
    assert group_logs(logs) == [[0, 1], [2], [3], [4]]


def test_a_reader_yields_dialogs_bad_records_file_hashes_and_its_memory(tmp_path):
    path = tmp_path / "chats.jsonl"
    write_jsonl([talk(0), talk(1)], path)
    path.write_text(path.read_text() + "{broken\n")
    logs, _, _ = find_logs([str(path)])
    [table] = group_tables(logs)
    rows = pa.concat_tables(read_group(table, scoring=Scoring({}))).to_pylist()
    assert [row["kind"] for row in rows] == ["file", "dialog", "dialog", "bad", "worker"]
    assert [row["position"] for row in rows] == [0, 1, 2, 3, 4]
    assert json.loads(rows[0]["json"]) == fingerprint(logs[0])
    assert Dialog.from_json(rows[1]["json"]) == talk(0)
    assert "chats.jsonl" in json.loads(rows[3]["json"])["file"]
    with pytest.raises(UserError, match="chats.jsonl:.*a strict run stops at the first bad record"):
        list(read_group(table, scoring=Scoring({}, strict=True)))


def records(*dialogs):
    rows = [
        {
            "group": 3,
            "position": 7 + i,
            "log": 0,
            "file": "chats",
            "record": i,
            "kind": "dialog",
            "json": d.to_json(),
        }
        for i, d in enumerate(dialogs)
    ]
    return pa.Table.from_pylist(rows, RECORDS)


def make_scorer(directory, scoring):
    for name in (*SPLITS, "quarantine", FIGURES):
        (directory / name).mkdir(parents=True)
    return Scorer(scoring, str(directory))


def test_a_scorer_writes_scored_dialogs_by_split_and_reports_figures(tmp_path):
    scoring = Scoring({"question": 0.5}, validation=0.2, test=0.2)
    silent = Dialog(id="silent", messages=[{"role": "user", "content": "hi"}], source="chats")
    dialogs = [talk(i) for i in range(30)]
    [row] = make_scorer(tmp_path, scoring)(records(*dialogs, silent)).to_pylist()
    written = {}
    for split in SPLITS:
        rows = pq.read_table(tmp_path / split / "000003-0000000007.parquet").to_pylist()
        written[split] = [Dialog.from_row(r) for r in rows]
    for split, members in written.items():
        assert [d.id for d in members] == [d.id for d in dialogs if assign_split(d, 0.2, 0.2) == split]
        assert all(
            d.split == split
            and d.messages[1]["reward"] == 0.5
            and d.messages[1]["rewards"] == {"question": 1.0}
            for d in members
        )
    assert Counter(row["split"]) == {code: len(written[split]) for code, split in enumerate(SPLITS)}
    assert row["id"] == [hash64(d.id) for split in SPLITS for d in written[split]]
    summary = json.loads(row["summary"])
    assert {(what, count) for _, _, what, count in summary["counts"]} == {
        ("dialogs", 30),
        ("replies", 30),
        ("turns", 60),
        ("no_reply", 1),
    }
    assert Statistics.from_dict(summary["statistics"]).summary({"question": 0.5})["sum"]["mean"] == 0.5


def test_declared_splits_are_kept_and_the_rest_hashed(tmp_path):
    scoring = Scoring({"logged": 1.0}, split="declared", validation=0.0, test=0.0)
    [row] = make_scorer(tmp_path, scoring)(
        records(talk(0, split="test"), talk(1), talk(2, split="validation"))
    ).to_pylist()
    assert row["split"] == [0, 1, 2]
    assert row["id"] == [hash64(name) for name in ("d1", "d2", "d0")]


@pytest.mark.parametrize(
    ("identifier", "hashes"), [("a", 0), ("a7", 0), ("a#7", 1), ("a##12", 2), ("#3", 1), ("a#", 0), ("7", 0)]
)
def test_hashes_before_a_number_at_the_end_of_an_id(identifier, hashes):
    assert trailing_hashes(identifier) == hashes


def test_a_vote_that_is_none_goes_to_quarantine(tmp_path):
    path = tmp_path / "chats.jsonl"
    talks = [talk(number) for number in range(4)]
    for number, given in ((0, 1), (1, 2), (3, "up")):
        talks[number].messages[1]["feedback"] = {"vote": given}
    write_jsonl(talks, path)
    [table] = group_tables(find_logs([str(path)])[0])
    read = pa.concat_tables(read_group(table, scoring=Scoring({})))
    for compat in ("", "2019"):
        scorer = make_scorer(tmp_path / f"out{compat}", Scoring({"vote": 1.0}, compat=compat))
        [row] = scorer(read).to_pylist()
        assert len(row["id"]) == 2 and ["quarantined", 2] in [
            entry[2:] for entry in json.loads(row["summary"])["counts"]
        ]
        bad = [
            json.loads(line)
            for line in next((tmp_path / f"out{compat}" / "quarantine").iterdir()).read_text().splitlines()
        ]
        assert [entry["where"] for entry in bad] == ["record 2", "record 4"] and bad[0]["file"] == str(path)
        assert "dialog 'd3', message 1: expected feedback.vote to be -1, 0 or 1, got 'up'" in bad[1]["reason"]
    with pytest.raises(UserError, match="chats.jsonl:record 2: .*a strict run"):
        make_scorer(tmp_path / "strict", Scoring({"vote": 1.0}, strict=True))(read)


def ring_now():
    """The timer of a record: a short one might end the others, too, on a busy machine."""
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def test_a_record_that_takes_too_long_goes_to_quarantine(tmp_path):
    """Even where the reward suppresses what stops it."""
    scorer = make_scorer(tmp_path / "out", Scoring({"question": 1.0}, record_seconds=600))

    def slow(dialog):
        if dialog.id == "d1":
            ring_now()
        while dialog.id == "d1":
            with suppress(Exception):
                time.sleep(0.01)
        return [1.0]

    scorer.rewards = {"question": slow}
    [row] = scorer(records(talk(0), talk(1), talk(2))).to_pylist()
    assert len(row["id"]) == 2
    [line] = next((tmp_path / "out" / "quarantine").iterdir()).read_text().splitlines()
    assert "within 600 s" in json.loads(line)["reason"] and "--record_seconds" in line


def test_a_tokenizer_is_trained_on_texts_where_there_are_any(tmp_path):
    table = to_table([Dialog("d", [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}])])
    write_table(table, tmp_path / "a.parquet")
    scored = merge([], tmp_path, (), split_by="dialog")
    scored.chunks["train"].append((str(tmp_path / "a.parquet"), 1))
    assert list(sample_texts(scored)) == []


def test_logs_that_declare_no_train_split_are_told_what_helps(tmp_path):
    scored = merge([], tmp_path, (), split_by="first_turn")
    scored.chunks["test"].append(("a.parquet", 2))
    for split, fix in (("declared", "--split hash"), ("hash", "lower --validation and --test")):
        with pytest.raises(UserError, match=f"no dialog of 2 fell into the train split: {fix}"):
            _check_scored(scored, [], split=split)


def test_where_nothing_is_read_the_reason_is_said(tmp_path):
    (tmp_path / "chats.md").write_text("hi")
    logs, bad, skipped = find_logs([str(tmp_path / "chats.md")], reader="json:load")
    told = r"found none that can be read: .*chats\.md: documentation or code"
    with pytest.raises(UserError, match=told):
        check_logs(Preparation(logs=("chats.md",)), logs, bad, skipped, tmp_path, overwrite=False)


def test_logs_in_a_folder_that_is_linked_are_not_overwritten(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    logs = [LogFile(str(tmp_path / "disk/chats.jsonl"), "openai")]
    with pytest.raises(UserError, match="is a log inside .*, which --overwrite would replace"):
        check_logs(Preparation(), logs, [], [], tmp_path / "out", overwrite=True)
