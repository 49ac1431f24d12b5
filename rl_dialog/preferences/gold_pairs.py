"""Gold pairs: pairs whose answer is known, from a file, or from somebody whose answers are trusted.

A line of the file is a pair of replies, as `prefer_replies --export` and TRL write it, or a pair of segments
that the run has, clips too, by their ids:

    {"prompt": [{"role": "user", "content": "..."}], "chosen": "...", "rejected": "..."}
    {"first": "3fa9...", "second": "8177...", "preference": 1}           1: the first one, 0: the second, 0.5
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_dialog.data.schema import said
from rl_dialog.errors import UserError
from rl_dialog.preferences.labels import Answer, NewQuery, pair_id
from rl_dialog.preferences.segments import Reply, Segments

HALF = re.compile("[\ud800-\udfff]")  # of a character: no file in UTF-8 can hold it


def read_gold(path: str | Path, segments: Segments, *, task: str = "") -> list[NewQuery]:
    """The pairs of a file; replies that are new are added to the segments. Raises UserError, with the line,
    for what is no pair."""
    try:
        # Not splitlines: a text in JSON may hold U+2028, U+0085 and others that would end a line there.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--gold: expected a file of JSON lines, got {path}: {error}") from None
    pairs: dict[str, tuple[int, NewQuery]] = {}  # id -> its line and itself
    for n, line in enumerate(lines, 1):
        if line.strip():
            pair = _pair(line, f"{path}:{n}", segments, task)
            before, _ = pairs.setdefault(pair_id(pair.first, pair.second), (n, pair))
            if before != n:
                raise UserError(f"{path}:{n}: expected every pair once, got that of line {before} again")
    if not pairs:
        raise UserError(f"--gold {path}: expected a pair on each line, found none")
    return [pair for _, pair in pairs.values()]


def gold_of(labeller: str, answers: Iterable[Answer], *, task: str = "") -> list[NewQuery]:
    """The pairs of which somebody preferred one: what they said is taken to be right, but for pairs whose
    answer is known already. Raises UserError where they preferred none."""
    said = [one for one in answers if one.labeller == labeller and one.counts and one.preference != 0.5]
    if not said:
        raise UserError(f"--gold_of {labeller}: expected somebody who preferred one of a pair, found no such")
    new = [one for one in said if one.gold is None]
    return [NewQuery(one.first, one.second, one.query, task, gold=one.preference) for one in new]


def _pair(line: str, place: str, segments: Segments, task: str) -> NewQuery:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: expected JSON, got {error}") from None
    if isinstance(row, dict) and {"first", "second"} <= row.keys():
        return _of_ids(row, place, segments, task)
    if not isinstance(row, dict) or not {"prompt", "chosen", "rejected"} <= row.keys():
        got = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        expected = "prompt, chosen and rejected, or first, second and preference"
        raise UserError(f"{place}: expected {expected}, got {got or 'nothing'}")
    context = list(_messages(row["prompt"], "prompt", place, "user"))
    replies = [_reply(context, row[name], name, place) for name in ("chosen", "rejected")]
    if replies[0].text == replies[1].text:
        raise UserError(f"{place}: expected two different replies, got {replies[0].text!r} twice")
    first, second = (segments.add(reply) for reply in replies)
    return NewQuery(first, second, task=task, gold=1.0)


def _of_ids(row: Mapping[str, Any], place: str, segments: Segments, task: str) -> NewQuery:
    first, second, preference = row["first"], row["second"], row.get("preference")
    if preference not in (0, 0.5, 1) or isinstance(preference, bool):
        raise UserError(f"{place}: expected a preference of 1, 0 or 0.5, got {preference!r}")
    for id in (first, second):
        if not isinstance(id, str) or id not in segments:
            raise UserError(f"{place}: expected the id of a segment in {segments.folder}, got {id!r}")
    return NewQuery(first, second, task=task, gold=float(preference))


def _reply(context: list[dict[str, str]], told: Any, name: str, place: str) -> Reply:
    messages = list(_messages(told, name, place, "assistant"))
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = [message["role"] for message in messages]
        raise UserError(f"{place}: expected one message of the assistant as {name}, got {roles}")
    return Reply(context, messages[0]["content"], {"gold": True})


def _messages(told: Any, name: str, place: str, role: str) -> Iterator[dict[str, str]]:
    """A text is one message of `role`."""
    for message in [{"role": role, "content": told}] if isinstance(told, str) else _list(told, name, place):
        if not _is_message(message):
            raise UserError(f"{place}: {name}: expected messages with role and content, got {message!r}")
        text = said(message)
        if HALF.search(message["role"] + text):
            expected = "expected text without halves of characters (lone surrogates)"
            raise UserError(f"{place}: {name}: {expected}, got {text!r}")
        yield {"role": message["role"], "content": text}


def _is_message(told: Any) -> bool:
    """With a text, or with calls of tools and maybe none."""
    if not isinstance(told, dict) or not isinstance(told.get("role"), str):
        return False
    return isinstance(told.get("content"), str) or (
        told.get("content") is None and bool(told.get("tool_calls"))
    )


def _list(told: Any, name: str, place: str) -> list[Any]:
    if not isinstance(told, list):
        raise UserError(f"{place}: {name}: expected a text or a list of messages, got {told!r}")
    return told
