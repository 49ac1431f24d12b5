"""The dataset types of TRL, as plain strings or as lists of messages: prompt/completion,
prompt/chosen/rejected (the prompt may be the prefix that both share), prompt/completion/label (KTO). Rows
with `messages` are the same as OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from rl_dialog.data.formats.head import Head, look
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.openai import (
    chat_dialogs,
    chat_messages,
    context_only,
    judged,
    preference_pair,
    row_fields,
)
from rl_dialog.data.formats.records import Record, csv_rows, dialogs, mismatch, records
from rl_dialog.data.schema import Dialog

TURN = re.compile(
    r"(?:^|\n\n)(Human|Assistant): ?"
)  # transcripts of the HH-RLHF kind, where the prompt is only implied
# Tables in which some rows have no label write 1 and 0 as 1.0 and 0.0, and none as nan or (CSV) as nothing.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
UNLABELLED = ("none", "nan", "")


def matches(head: Head) -> bool:
    shapes = ({"chosen", "rejected"}, {"prompt", "completion"})
    return any(shape <= keys for shape in shapes for keys in (*map(set, head.records), set(head.columns)))


def corpus(head: Head) -> str | None:
    return None


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    # matches() goes by the columns: a table is one by whatever name
    rows = csv_rows if look(log.path, log.member).kind == "text" else records
    return dialogs(log, rows(log, max_line_bytes=max_line_bytes), lambda record: _dialogs(log, record))


def _dialogs(log: LogFile, record: Record) -> list[Dialog]:
    row = record.value
    if isinstance(row, dict) and {"chosen", "rejected"} <= row.keys():
        return _pair(log, record)
    if isinstance(row, dict) and {"prompt", "completion"} <= row.keys():
        return [_completion(log, record)]
    if isinstance(row, dict) and "messages" in row:
        return chat_dialogs(log, record)
    expected = (
        "a row with prompt and completion (and label), or chosen and rejected (and prompt), or messages"
    )
    raise mismatch("", expected, sorted(row) if isinstance(row, dict) else row)


def _completion(log: LogFile, record: Record) -> Dialog:
    row = record.value
    fields = row_fields(log, record, used=("prompt", "completion", "label"))
    where = f"dialog {fields['id']!r}"
    messages = _messages(row["completion"], "assistant", f"{where}, completion")
    judgement: dict[str, Any] = {}
    label = str(row.get("label")).lower()
    if label not in UNLABELLED:
        good = LABELS.get(label)
        if good is None:
            raise mismatch(where, "true or false as `label`", row["label"])
        judgement = {"reward": float(good), "feedback": {"vote": 1 if good else -1}}
    context = context_only(_messages(row["prompt"], "user", f"{where}, prompt"))
    return Dialog(messages=context + judged(messages, where, **judgement), **fields)


def _pair(log: LogFile, record: Record) -> list[Dialog]:
    row = record.value
    fields = row_fields(log, record, used=("prompt", "chosen", "rejected", "messages"))
    where = f"dialog {fields['id']!r}"
    chosen, rejected = row["chosen"], row["rejected"]
    if row.get("prompt") is None:
        return preference_pair(fields, *_implied(chosen, rejected, where))
    prompt = _messages(row["prompt"], "user", f"{where}, prompt")
    chosen, rejected = (
        _messages(row[name], "assistant", f"{where}, {name}") for name in ("chosen", "rejected")
    )
    begins = [*_system_of(chosen), *prompt] if not _system_of(prompt) else prompt
    if all(
        _turns(begins) == _turns(reply[: len(begins)]) for reply in (chosen, rejected)
    ):  # whole conversations beside their prompt, which may lack their system prompt
        return preference_pair(fields, begins, chosen[len(begins) :], rejected[len(begins) :])
    return preference_pair(fields, prompt, chosen, rejected)


def _system_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system messages that they begin with."""
    return list(takewhile(lambda message: message.get("role") == "system", messages))


def _messages(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return chat_messages([value] if isinstance(value, dict) else value, where)


def _implied(chosen: Any, rejected: Any, where: str) -> tuple[list[dict], list[dict], list[dict]]:
    """Without a prompt, what both answers share at the beginning is the prompt."""
    if chosen == rejected:
        raise mismatch(where, "chosen and rejected to differ", chosen)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not (TURN.match(chosen) and TURN.match(rejected)):
            return _shared_text(chosen, rejected)
        chosen, rejected = _transcript(chosen), _transcript(rejected)
    chosen, rejected = (
        chat_messages(chosen, f"{where}, chosen"),
        chat_messages(rejected, f"{where}, rejected"),
    )
    shared = _shared(_turns(chosen), _turns(rejected))
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _shared_text(chosen: str, rejected: str) -> tuple[list[dict], list[dict], list[dict]]:
    """The shared prefix is cut back to the last white space: an answer must not begin inside a word."""
    shared = chosen[: _shared(chosen, rejected)]
    while shared and not shared[-1].isspace():
        shared = shared[:-1]
    prompt = [{"role": "user", "content": shared}] if shared.strip() else []
    cut = len(shared) if prompt else 0
    return prompt, *([{"role": "assistant", "content": reply[cut:]}] for reply in (chosen, rejected))


def _transcript(transcript: str) -> list[dict[str, str]]:
    pieces = TURN.split(transcript)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": text}
        for speaker, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _turns(messages: list[dict]) -> list[tuple]:
    return [(message.get("role"), message["content"]) for message in messages]


def _shared(left: Sequence, right: Sequence) -> int:
    """How many elements both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
