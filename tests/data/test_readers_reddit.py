"""The CSV files of Reddit comments."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.data.readers import Bad, find_logs, read_log
from rl_dialog.data.schema import Dialog
from tests.data.reddit_sample import HEADER, write_comments


def read(*paths: Path) -> tuple[list[Dialog], list[Bad]]:
    logs, bad, _ = find_logs([str(path) for path in paths])
    assert {log.reader for log in logs} <= {"reddit"}
    items = [*bad, *(item for log in logs for item in read_log(log))]
    return [i for i in items if isinstance(i, Dialog)], [i for i in items if isinstance(i, Bad)]


def write_rows(path: Path, *changes: dict[str, str], header: list[str] = HEADER) -> Path:
    row = dict.fromkeys(HEADER, "x") | {"text": "so it is", "score": "3", "parent_text": "is it?"}
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, header, extrasaction="ignore")
        rows.writeheader()
        rows.writerows(row | change for change in changes)
    return path


def test_the_layout_is_the_published_one():
    assert [HEADER.index(name) for name in ("text", "score", "parent_text")] == [4, 5, 10]


def test_a_comment_is_the_reply_to_its_parent(tmp_path):
    """Quotes and line breaks included, from both files, plain and gzipped."""
    positive, negative = write_comments(tmp_path, comments=30, seed=5)
    negative.with_suffix(".csv.gz").write_bytes(gzip.compress(negative.read_bytes()))
    negative.unlink()
    dialogs, bad = read(tmp_path)
    assert not bad and len(dialogs) == 60 and len({dialog.id for dialog in dialogs}) == 60
    with open(positive, newline="", encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    first = next(dialog for dialog in dialogs if dialog.id == f"reddit-{row['id']}")
    assert first.messages == [
        {"role": "user", "content": row["parent_text"]},
        {"role": "assistant", "content": row["text"], "feedback": {"score": int(row["score"])}},
    ]
    assert first.source == "reddit" and first.meta == {
        "subreddit": "t5_made",
        "group": "t1_p0",
        "author": "ann",
    }
    assert sum("\n" in dialog.messages[0]["content"] for dialog in dialogs) > 5


def test_a_comment_without_a_parent_stands_alone(tmp_path):
    changes = [{"parent_text": gone, "id": str(n)} for n, gone in enumerate(("", "[deleted]", "[removed]"))]
    dialogs, bad = read(write_rows(tmp_path / "a.csv", *changes, {"score": "-2.0", "text": "[deleted] it"}))
    assert not bad and [len(dialog.messages) for dialog in dialogs] == [1, 1, 1, 2]
    assert dialogs[3].messages[1]["feedback"] == {"score": -2}


def test_parquet_has_null_where_the_csv_has_nothing(tmp_path):
    columns = {"text": ["so it is", None], "score": [3, 4], "parent_text": [None, "is it?"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (dialog,), (bad,) = read(tmp_path / "a.parquet")
    assert [(each["role"], each["content"]) for each in dialog.messages] == [("assistant", "so it is")]
    assert bad.where == "row 2" and "text: expected a comment" in bad.reason


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"score": "many"}, "score: expected a whole number, got 'many'"),
        ({"score": ""}, "a whole number"),
        ({"score": "1.5"}, "a whole number"),
        ({"score": "inf"}, "a whole number"),
        ({"score": "1e300"}, "a whole number"),
        ({"score": "12345678901234567"}, "a whole number"),
        ({"text": "[removed]"}, "text: expected a comment"),
        ({"text": "  "}, "text: expected a comment"),
    ],
)
def test_bad_rows_go_to_quarantine_with_their_line(tmp_path, change, told):
    dialogs, (bad,) = read(write_rows(tmp_path / "a.csv", {"id": "1"}, change, {"id": "3"}))
    assert [dialog.id for dialog in dialogs] == ["reddit-1", "reddit-3"]
    assert bad.where == "line 3" and told in bad.reason


def test_a_row_of_another_length_goes_too(tmp_path):
    path = write_rows(tmp_path / "a.csv", {"id": "1"})
    path.write_text(path.read_text() + "a,b\n" + ",".join("x" * 15) + "\n")
    dialogs, bad = read(path)
    assert len(dialogs) == 1 and [each.where for each in bad] == ["line 3", "line 4"]
    assert "expected 15 fields" in bad[0].reason


def test_the_columns_tell(tmp_path):
    """Three columns are enough, without ids; with one of them away it is no such file."""
    few = ["text", "score", "parent_text"]
    dialogs, bad = read(write_rows(tmp_path / "few.csv", {}, {}, header=few))
    assert not bad and [dialog.id for dialog in dialogs] == ["reddit/few:2", "reddit/few:3"]
    dialogs, (bad,) = read(write_rows(tmp_path / "none.csv", {}, header=few[:2]))
    assert not dialogs and "no reader recognises" in bad.reason
