"""ShareGPT rows, {"conversations": [{"from": "human", "value": "..."}, ...]}, with what other trainers added:
the system prompt as `system`, calls of tools and what they gave, `chosen` and `rejected` replies to the
conversation, and `kto_tag`, a verdict on its last reply. Other keys of a row (`tools`, ...) go to `meta`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.openai import context_only, judged, preference_pair, row_fields
from rl_dialog.data.formats.records import Record, dialogs, mismatch, records
from rl_dialog.data.schema import Dialog

ROLES = {
    "system": ("system",),
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "chatgpt", "bing", "bard", "model"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
SPEAKERS = {name: role for role, names in ROLES.items() for name in names}
CALLS = ("function_call", "tool_call")


def matches(head: Head) -> bool:
    return any(_turns(record.get("conversations")) for record in head.records)


def corpus(head: Head) -> str | None:
    return None


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(log, records(log, max_line_bytes=max_line_bytes), lambda record: _dialogs(log, record))


def _turns(value: Any) -> list[dict[str, Any]]:
    """Turns as objects, also from columns of them, as `datasets` once wrote Parquet; nothing for others."""
    if isinstance(value, dict) and {"from", "value"} <= value.keys() and _are_even(value.values()):
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    ours = isinstance(value, list) and all(
        isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in value
    )
    return value if ours else []


def _are_even(columns: Collection[Any]) -> bool:
    return all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1


def _dialogs(log: LogFile, record: Record) -> list[Dialog]:
    row = record.value
    if not isinstance(row, dict) or "conversations" not in row:
        got = sorted(row) if isinstance(row, dict) else row
        raise mismatch("", "a JSON object with the key `conversations`", got)
    fields = row_fields(log, record, used=("conversations", "system", "chosen", "rejected", "kto_tag"))
    where = f"dialog {fields['id']!r}"
    messages = _messages(row["conversations"], where)
    if prompt := row.get("system"):
        if messages[0]["role"] == "system":  # the conversation's own is the one that was used
            fields["meta"]["system"] = prompt
        else:
            messages = [{"role": "system", "content": prompt}, *messages]
    if row.get("chosen") is not None and "rejected" in row:  # tables have empty columns
        replies = (_messages([row[name]], f"{where}, {name}") for name in ("chosen", "rejected"))
        return preference_pair(fields, messages, *replies)
    if (good := row.get("kto_tag")) is not None:
        if not isinstance(good, bool):
            raise mismatch(where, "true or false as `kto_tag`", good)
        verdict = {"reward": float(good), "feedback": {"vote": 1 if good else -1}}
        messages = context_only(messages[:-1]) + judged(messages[-1:], where, **verdict)
    return [Dialog(messages=messages, **fields)]


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    turns = _turns(value)
    if not turns:
        raise mismatch(where, "a list of turns, each with the keys `from` and `value`", value)
    return [_message(turn, f"{where}, turn {number}") for number, turn in enumerate(turns)]


def _message(turn: dict[str, Any], where: str) -> dict[str, Any]:
    name = str(turn["from"]).lower()
    rest = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if name in CALLS:
        return {"role": "assistant", "content": None, "tool_calls": _calls(turn["value"], where)} | rest
    if name not in SPEAKERS:
        raise mismatch(where, f"one of {', '.join((*SPEAKERS, *CALLS))} as `from`", turn["from"])
    return {"role": SPEAKERS[name], "content": turn["value"]} | rest


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls of functions in OpenAI's form, where arguments are JSON text."""
    try:
        calls = json.loads(value)
        calls = calls if isinstance(calls, list) else [calls]
        named = [(call["name"], call.get("arguments", {})) for call in calls]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise mismatch(
            where, "JSON of a call, or a list of them, with `name` and `arguments`", value
        ) from error
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False),
            },
        }
        for name, given in named
    ]
