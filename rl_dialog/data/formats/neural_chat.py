"""CSV exports of the neural.chat website and the processed CSV that batch RL was trained on.

Website export: a row is one exchange (Message of the user, Response of the bot, the user's vote on it); rows
with one Chat ID, in time order, are a conversation, whose six ratings stand in every row. Processed CSV: a
row is one transition (state, action, next_state, done, reward_*). Where it has Chat IDs the rows are chained
back into conversations, so that what the limited history of a state dropped is found in earlier rows; without
them every row is a dialog with one reply. `Bot Input` is not kept: it repeats the last five texts.

An empty reply stays in its place with `weight` 0: it is never trained on, and the conversation still ends
where it ended.
"""

from __future__ import annotations

import ast
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rl_dialog.data.formats.head import Head, look
from rl_dialog.data.formats.log_file import Bad, LogFile, bad
from rl_dialog.data.formats.records import Record, csv_rows, dialogs, mismatch
from rl_dialog.data.schema import Dialog

WEBSITE = ("Chat ID", "Datetime", "Message", "Response")
PROCESSED = ("state", "action", "next_state", "done")
KNOWN = {
    *WEBSITE,
    *PROCESSED,
    "Chatbot ID",
    "Bot Input",
    "Study Key",
    "User Session Key",
    "Response Rating",
    "Chat Rating Quality",
}
RATINGS = ("quality", "fluency", "coherency", "diversity", "contingency", "empathy")
RATINGS_ONLY = {
    "Chat ID",
    "Quality",
    "Chat Length",
}  # the website's other export: ratings without a word of the chats
META = {
    "Chatbot ID": "chatbot",
    "Study Key": "study",
    "User Session Key": "session",
    "Chat Rating Comments": "comments",
}
DONE = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
EMOJI = re.compile(
    "\\s?(?:[\U0001f000-\U0001faff\u2600-\u27bf\u231a\u231b\u23e9-\u23fa\u25aa-\u25fe\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55]"
    "[\ufe0e\ufe0f\u200d\u20e3\U000e0020-\U000e007f]*)+"
)


def matches(head: Head) -> bool:
    columns = set(head.columns) if head.kind in ("csv", "text") else set()
    return len(columns & KNOWN) >= 2 and not columns >= RATINGS_ONLY


def corpus(head: Head) -> str | None:
    return None


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    columns = look(log.path, log.member).columns
    processed = bool({"state", "action", "next_state"} & set(columns))
    missing = [name for name in (PROCESSED if processed else WEBSITE) if name not in columns]
    if missing:
        kind = "a processed CSV" if processed else "a website export"
        yield bad(
            log,
            "",
            f"expected the columns of {kind}, missing {', '.join(missing)}; found {', '.join(columns)}",
        )
    elif "Chat ID" in columns:
        convert = _chain if processed else _conversation
        yield from dialogs(log, _chats(log, max_line_bytes), lambda record: [convert(log, record)])
    else:
        yield from dialogs(
            log, csv_rows(log, max_line_bytes=max_line_bytes), lambda record: [_transition(log, record)]
        )


def strip_emoji(text: str) -> str:
    """The text without emoji; other scripts (CJK too) stay as they are.

    >>> strip_emoji("😀 hi"), strip_emoji("日本語 ok")
    ('hi', '日本語 ok')
    """
    stripped = EMOJI.sub("", text)
    return text if stripped == text else stripped.strip()


def _chats(log: LogFile, limit: int) -> Iterator[Record | Bad]:
    """The rows of one Chat ID as one record, in time order. A first pass counts the rows, so a chat is given
    out with its last row and only unfinished chats are held: one at a time in a sorted export, and an
    unsorted one is read correctly as well."""
    rows_left = _row_counts(log, limit)
    unfinished: dict[str, list[Record]] = {}
    for row in csv_rows(log, max_line_bytes=limit):
        if isinstance(row, Bad):
            yield row
            continue
        chat = row.value["Chat ID"]
        if not chat.strip():
            yield bad(log, row.where, "expected a Chat ID, got an empty one", ",".join(row.value.values()))
            continue
        unfinished.setdefault(chat, []).append(row)
        rows_left[chat] -= 1
        if not rows_left[chat]:
            rows = unfinished.pop(chat)
            where = f"chat {chat} ({rows[0].where})"
            yield Record(
                _in_time_order(rows), where, rows[0].number, came=",".join(rows[0].value.values())[:200]
            )


def _row_counts(log: LogFile, limit: int) -> Counter[str]:
    """Rows of every chat. Where the file is cut off, the chat at the cut is counted as never complete; the
    second pass reports the damage."""
    counts: Counter[str] = Counter()
    chat = ""
    try:
        for row in csv_rows(log, max_line_bytes=limit):
            if isinstance(row, Record):
                chat = row.value["Chat ID"]
                counts[chat] += 1
    except (EOFError, OSError, zlib.error, zipfile.BadZipFile):
        counts[chat] += 1
    return counts


def _in_time_order(rows: list[Record]) -> list[dict[str, str]]:
    moments = [_moment(row.value.get("Datetime", "")) for row in rows]
    if None not in moments:
        rows = [row for _, row in sorted(zip(moments, rows, strict=True), key=lambda pair: pair[0])]
    elif any(row.value.get("Datetime") for row in rows):
        worst = rows[moments.index(None)]
        for row in rows:  # `_meta` says so: the order is that of the file
            row.value["unreadable datetime"] = worst.value["Datetime"]
    return [row.value for row in rows]


def _moment(text: str) -> float | None:
    """Seconds; self-play exports count exchanges instead. Without a time zone it is UTC, as the website
    writes it."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _conversation(log: LogFile, record: Record) -> Dialog:
    messages = []
    for row in record.value:
        messages += [{"role": "user", "content": row["Message"]}, _reply(row, row["Response"])]
    return Dialog(
        id=record.value[0]["Chat ID"], messages=messages, source=log.corpus, meta=_meta(record.value)
    )


def _chain(log: LogFile, record: Record) -> Dialog:
    """Transitions of one chat as the conversation they were cut from."""
    rows = record.value
    where = f"dialog {rows[0]['Chat ID']!r}"
    messages: list[dict[str, Any]] = []
    for row in rows:
        messages += _unseen(messages, _context(row, where))
        messages.append(_reply(row, row["action"]))
    done, last_texts = _done(rows[-1], where), _texts(rows[-1], "next_state", where)
    if not done and last_texts and last_texts[-1]:
        messages.append({"role": "user", "content": last_texts[-1]})
    return Dialog(
        id=rows[0]["Chat ID"], messages=messages, source=log.corpus, truncated=not done, meta=_meta(rows)
    )


def _transition(log: LogFile, record: Record) -> Dialog:
    row, name = record.value, log.dialog_id(record.number)
    where = f"dialog {name!r}"
    done, next_texts = _done(row, where), _texts(row, "next_state", where)
    messages = [*_context(row, where), _reply(row, row["action"])]
    if not done and next_texts and next_texts[-1]:
        messages.append({"role": "user", "content": next_texts[-1]})
    return Dialog(id=name, messages=messages, source=log.corpus, truncated=not done, meta=_meta([row]))


def _context(row: dict[str, str], where: str) -> list[dict[str, Any]]:
    """A state ends with the user's message and alternates backwards from there."""
    texts = _texts(row, "state", where)
    if not texts:
        raise mismatch(where, "a state that ends with the user's message", row["state"])
    users = range(len(texts) - 1, -1, -2)
    replies = {"role": "assistant", "weight": 0}
    return [
        {"role": "user", "content": text} if i in users else replies | {"content": strip_emoji(text)}
        for i, text in enumerate(texts)
    ]


def _unseen(messages: list[dict[str, Any]], state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a state that are not yet in the conversation: usually one, the user's; more where rows
    between are missing."""
    message_texts, state_texts = (
        [(message["role"], message["content"]) for message in chat] for chat in (messages, state)
    )
    for overlap in range(min(len(state_texts) - 1, len(message_texts)), -1, -1):
        if message_texts[len(message_texts) - overlap :] == state_texts[:overlap]:
            break
    return state[overlap:]


def _texts(row: dict[str, str], column: str, where: str) -> list[str]:
    try:
        texts = ast.literal_eval(row[column].strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise mismatch(where, f"a Python list of strings as `{column}`", row[column])
    return texts


def _done(row: dict[str, str], where: str) -> bool:
    done = DONE.get(row["done"].strip().lower())
    if done is None:
        raise mismatch(where, "0 or 1 as `done`", row["done"])
    return done


def _reply(row: dict[str, str], text: str) -> dict[str, Any]:
    content = strip_emoji(text)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if content != text:
        message["original"] = text
    if not content:
        message["weight"] = 0
    rewards = {
        name: _number(value, name)
        for name, value in row.items()
        if name.startswith("reward_") and value.strip()
    }
    if rewards:
        message["rewards"] = rewards
    if row.get("reward", "").strip():
        message["reward"] = _number(row["reward"], "reward")
    if row.get("Response Rating", "").strip():
        message["feedback"] = {"vote": _vote(row["Response Rating"])}
    return message | {
        name: row[column]
        for column, name in (("Datetime", "datetime"), ("Chatbot ID", "chatbot"))
        if row.get(column)
    }


def _vote(text: str) -> int:
    vote = _number(text, "Response Rating")
    if vote not in (-1, 0, 1):
        raise mismatch("", "-1, 0 or 1 as `Response Rating`", text)
    return int(vote)


def _number(text: str, column: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise mismatch("", f"a finite number as `{column}`", text)
    return number


def _meta(rows: list[dict[str, str]]) -> dict[str, Any]:
    """What the export says about the whole chat. Ratings and comments stand in every row, or only in some:
    the first one found counts."""

    def first(*columns: str) -> str:
        return next((row[column] for row in rows for column in columns if row.get(column, "").strip()), "")

    meta: dict[str, Any] = {name: first(column) for column, name in META.items() if first(column)}
    ratings = {name: first(f"Chat Rating {name.capitalize()}", name.capitalize()) for name in RATINGS}
    ratings = {
        name: _number(text, f"Chat Rating {name.capitalize()}") for name, text in ratings.items() if text
    }
    unreadable = first("unreadable datetime")
    return (
        meta
        | ({"datetime": rows[0]["Datetime"]} if rows[0].get("Datetime") else {})
        | ({"ratings": ratings} if ratings else {})
        | ({"order": f"as in the file: {unreadable!r} is not a date"} if unreadable else {})
    )
