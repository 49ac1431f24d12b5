"""Reddit comments with their score and the comment that they answer, as in `comments_positive.csv` and
`comments_negative.csv`: a CSV with the columns `text` (the fifth), `score` (the sixth) and `parent_text` (the
eleventh); others are left alone, but for those in META.

A row is a dialog with one reply: the parent as the user's message, the comment as the assistant's, with its
score as `feedback`. Comments to one parent share `meta["group"]`, where the file names it. A comment without
a parent has nobody to answer: the reply stands alone. Deleted comments hold no text and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.records import Record, dialogs, mismatch, records
from rl_dialog.data.schema import Dialog

COLUMNS = ("text", "score", "parent_text")
GONE = ("", "[deleted]", "[removed]")  # what Reddit shows for a comment that is not there any more
EXACT = 2**53  # from here on a float is no exact count
META = {"subreddit_id": "subreddit", "parent_id": "group", "author": "author"}


def matches(head: Head) -> bool:
    return head.kind in ("csv", "parquet") and set(COLUMNS) <= set(head.columns)


def corpus(head: Head) -> str | None:
    return "reddit"


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(log, records(log, max_line_bytes=max_line_bytes), lambda record: [_dialog(log, record)])


def _dialog(log: LogFile, record: Record) -> Dialog:
    row = record.value
    text, parent, name = (_text(row, name) for name in ("text", "parent_text", "id"))
    if text.strip() in GONE:
        raise mismatch("text", "a comment", text)
    messages = [] if parent.strip() in GONE else [{"role": "user", "content": parent}]
    messages.append({"role": "assistant", "content": text, "feedback": {"score": _score(row.get("score"))}})
    return Dialog(
        id=f"reddit-{name}" if name else log.dialog_id(record.number),
        messages=messages,
        source=log.corpus,
        meta={ours: row[theirs] for theirs, ours in META.items() if row.get(theirs)},
    )


def _text(row: dict[str, Any], name: str) -> str:
    """A null of Parquet is the empty cell that it was in the CSV."""
    value = row.get(name)
    if not isinstance(value, str | None):
        raise mismatch(name, "a text", value)
    return value or ""


def _score(value: Any) -> int:
    """Votes for a comment less votes against it."""
    try:
        score = float(value)
        if not isinstance(value, bool) and score == int(score) and abs(score) < EXACT:
            return int(score)
    except (TypeError, ValueError, OverflowError):
        pass
    raise mismatch("score", "a whole number", value)
