"""Chat logs in OpenAI's form: {"messages": [...]}, one conversation per line, and its preference rows.

Our own keys are kept where they stand (`reward`, `rewards`, `feedback` and `weight` of a message; `source`,
`split`, `truncated`, `goal` and `meta` of a row), so this also reads what `Dialog.to_json` wrote. Other keys
of a row go to `meta`, its `group` as `log_group`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.records import Record, dialogs, mismatch, records, split_of
from rl_dialog.data.schema import Dialog, DialogError, row_meta

FIELDS = ("id", "source", "split", "truncated", "goal", "meta")
OPTIONAL = ("rewards", "feedback", "weight")  # of a message: null is what tables write for an absent key
PREFERENCE = {"input", "preferred_output", "non_preferred_output"}


def matches(head: Head) -> bool:
    return any("messages" in record or record.keys() >= PREFERENCE for record in head.records)


def corpus(head: Head) -> str | None:
    return None


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(log, records(log, max_line_bytes=max_line_bytes), lambda record: chat_dialogs(log, record))


def chat_dialogs(log: LogFile, record: Record) -> list[Dialog]:
    row = record.value
    if isinstance(row, dict) and row.keys() >= PREFERENCE:
        return _preference(log, record)
    if not isinstance(row, dict) or "messages" not in row:
        raise mismatch(
            "", "a JSON object with the key `messages`", sorted(row) if isinstance(row, dict) else row
        )
    fields = row_fields(log, record, used=("messages",))
    return [Dialog(messages=chat_messages(row["messages"], f"dialog {fields['id']!r}"), **fields)]


def row_fields(log: LogFile, record: Record, *, used: tuple[str, ...]) -> dict[str, Any]:
    """The Dialog fields of a row other than its messages; keys that are neither fields nor `used` go to
    meta."""
    row = record.value
    row_id = row.get("id")
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, str | int)):
        raise mismatch("", "a string or an integer as `id`", row_id)
    fields: dict[str, Any] = {"id": log.dialog_id(record.number) if row_id is None else str(row_id)}
    fields |= {key: row[key] for key in ("source", "truncated", "goal") if row.get(key) is not None}
    fields["source"] = fields.get("source") or log.corpus
    fields["split"] = split_of(row.get("split"), f"dialog {fields['id']!r}, `split`")
    meta = {} if row.get("meta") is None else row["meta"]
    if not isinstance(meta, dict):
        raise mismatch(f"dialog {fields['id']!r}", "an object as `meta`", meta)
    other = {key: value for key, value in row.items() if key not in FIELDS and key not in used}
    return fields | {"meta": meta | row_meta(other)}


def chat_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Messages in our form: `developer` becomes `system`, content given in text parts becomes one text."""
    if not isinstance(value, list):
        raise mismatch(where, "a list of messages", value)
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise mismatch(where, "an object", message)
    converted = {key: value for key, value in message.items() if value is not None or key not in OPTIONAL}
    converted |= {"content": message.get("content")}
    if converted["content"] is None and not message.get("tool_calls"):
        converted["content"] = message.get("refusal")  # what OpenAI's models say instead
    if converted.get("role") == "developer":
        converted["role"] = "system"
    if isinstance(converted["content"], list):
        converted["content"] = "".join(
            _text_part(part, f"{where}, part {number}") for number, part in enumerate(converted["content"])
        )
    return converted


def _text_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        raise DialogError(
            f'{where}: expected {{"type": "text", "text": ...}} (dialogs are text only), got {kind or part!r}'
        )
    return part[kind]


def context_only(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages before the reply in question: their assistant turns were not judged, so they are never
    trained on."""
    return [
        {**message, "weight": 0} if message.get("role") == "assistant" else message for message in messages
    ]


def judged(messages: list[dict[str, Any]], where: str, **judgement: Any) -> list[dict[str, Any]]:
    """A completion with a judgement (`reward`, `feedback`) on its last assistant message."""
    last = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=None)
    if last is None:
        raise mismatch(
            where, "an assistant message in the completion", [message.get("role") for message in messages]
        )
    return [{**message, **judgement} if i == last else message for i, message in enumerate(messages)]


def preference_pair(
    fields: dict[str, Any], context: list[dict], chosen: list[dict], rejected: list[dict]
) -> list[Dialog]:
    """Two Dialogs with one context: the chosen reply earns 1, the rejected one 0."""
    pair = fields["id"]
    pair_dialogs = []
    for name, completion, reward in (("chosen", chosen, 1.0), ("rejected", rejected, 0.0)):
        messages = context_only(context) + judged(completion, f"dialog {pair!r}, {name}", reward=reward)
        meta = fields["meta"] | {"pair": pair, "preferred": name == "chosen"}
        pair_dialogs.append(Dialog(messages=messages, **fields | {"id": f"{pair}#{name}", "meta": meta}))
    return pair_dialogs


def _preference(log: LogFile, record: Record) -> list[Dialog]:
    fields = row_fields(log, record, used=tuple(PREFERENCE))
    where = f"dialog {fields['id']!r}"
    prompt = record.value["input"]
    if not isinstance(prompt, dict) or "messages" not in prompt:
        raise mismatch(where, "`input` with the key `messages`", prompt)
    fields["meta"] |= row_meta({key: value for key, value in prompt.items() if key != "messages"})
    context = chat_messages(prompt["messages"], f"{where}, input")
    chosen, rejected = (
        chat_messages(record.value[key], f"{where}, {key}")
        for key in ("preferred_output", "non_preferred_output")
    )
    return preference_pair(fields, context, chosen, rejected)
