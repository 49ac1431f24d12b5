"""Taskmaster 1-4: dialogs ({conversation_id, utterances: [{speaker, text}]}) and the rated replies of
Taskmaster 3 and 4 ({conversation_id, context, generation, reward}, where context and generation are JSON
inside a string).

A rated reply is a Dialog of its own: the context cannot be trained on (`weight` 0) and the generation is the
only reply. An agent's API call is an assistant message whose text is the JSON of {"api": ...}; the answer of
the API is a tool message. `meta.group` is the first thing the user said: the ids are per row, so this is what
keeps the rows of one conversation in one split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.openai import context_only
from rl_dialog.data.formats.records import Record, dialogs, mismatch, records
from rl_dialog.data.schema import Dialog, DialogError

REWARD_KEYS = {"conversation_id", "context", "generation"}
NUMBER = re.compile(r"(?<![a-z])(?:taskmaster|tm)[-_ ]?([1-4])(?!\d)", re.IGNORECASE)
FIRST_FILES = ("self-dialogs", "woz-dialogs", "sample")


def matches(head: Head) -> bool:
    return any(
        record.keys() >= REWARD_KEYS or {"conversation_id", "utterances"} <= record.keys()
        for record in head.records
    )


def corpus(head: Head) -> str | None:
    ending = "-reward" if any(record.keys() >= REWARD_KEYS for record in head.records) else ""
    numbers = NUMBER.findall("/".join(head.path.parts[-4:]))  # ".../TM-3-2020/reward/reward_00.json"
    if numbers:
        return f"taskmaster{numbers[-1]}{ending}"
    if "instruction_id" in head.keys and head.path.name.startswith(FIRST_FILES):
        return "taskmaster1"
    topics = " ".join(str(record.get("vertical") or record.get("context")) for record in head.records).lower()
    for word, number in (("coffee", 4), ("movie", 3)):
        if word in topics:
            return f"taskmaster{number}{ending}"
    return f"taskmaster{ending}"


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(log, records(log, max_line_bytes=max_line_bytes), lambda record: [_dialog(log, record)])


def _dialog(log: LogFile, record: Record) -> Dialog:
    row = record.value
    if isinstance(row, dict) and row.keys() >= REWARD_KEYS:
        return _rated(log, record)
    if not isinstance(row, dict) or not isinstance(row.get("utterances"), list):
        raise mismatch(
            "",
            "conversation_id with utterances, or with context and generation",
            sorted(row) if isinstance(row, dict) else row,
        )
    where = f"dialog {row.get('conversation_id')!r}"
    goal = {key: row[key] for key in ("scenario", "instructions") if row.get(key)}
    return Dialog(
        id=row.get("conversation_id"),
        messages=[
            _utterance(turn, f"{where}, utterance {number}") for number, turn in enumerate(row["utterances"])
        ],
        source=log.corpus,
        goal=goal or None,
        meta={key: row[key] for key in ("vertical", "instruction_id") if row.get(key)},
    )


def _utterance(turn: Any, where: str) -> dict[str, Any]:
    role = str(turn.get("speaker")).lower() if isinstance(turn, dict) else None
    if role not in ("user", "assistant"):
        raise mismatch(where, "an utterance whose `speaker` is user or assistant", turn)
    fields = {"api": turn.get("annotations"), "apis": turn.get("apis"), "segments": turn.get("segments")}
    annotations = {name: value for name, value in fields.items() if value}
    return {"role": role, "content": turn.get("text")} | ({"annotations": annotations} if annotations else {})


def _rated(log: LogFile, record: Record) -> Dialog:
    row = record.value
    conversation = row["conversation_id"]
    where = f"dialog {conversation!r}"
    if row.get("reward") is None:
        raise mismatch(where, "a number as `reward`", sorted(row))
    turns = _inner_json(row["context"], f"{where}, context")
    if not isinstance(turns, list):
        raise mismatch(f"{where}, context", "a list of turns", turns)
    context = [_turn(turn, f"{where}, context turn {number}") for number, turn in enumerate(turns)]
    reply = _turn(_inner_json(row["generation"], f"{where}, generation"), f"{where}, generation")
    if reply["role"] != "assistant":
        raise mismatch(f"{where}, generation", "a turn of the agent", row["generation"])
    name = f"{conversation}:{log.stem}:{record.number}"
    first_text = next((message["content"] for message in context if message["role"] == "user"), name)
    meta = {"conversation_id": conversation, "group": first_text}
    return Dialog(
        id=name,
        messages=[*context_only(context), reply | {"reward": row["reward"]}],
        source=log.corpus,
        meta=meta,
    )


def _inner_json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DialogError(f"{where}: expected JSON inside the string, got invalid JSON: {error}") from error


def _turn(turn: Any, where: str) -> dict[str, str]:
    role = turn.get("role") if isinstance(turn, dict) else None
    if role == "user" and "text" in turn:
        return {"role": "user", "content": turn["text"]}
    if role == "agent" and "text" in turn:
        return {"role": "assistant", "content": turn["text"]}
    if role == "agent" and "api" in turn:
        return {"role": "assistant", "content": json.dumps({"api": turn["api"]}, ensure_ascii=False)}
    if role == "api" and "response" in turn:
        return {"role": "tool", "content": json.dumps(turn["response"], ensure_ascii=False)}
    raise mismatch(where, "a turn of user (text), agent (text or api) or api (response)", turn)
