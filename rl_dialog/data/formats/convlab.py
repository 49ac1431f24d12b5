"""ConvLab-3's unified format: data.zip or data/dialogues.json, an array of {dataset, data_split, dialogue_id,
turns: [{speaker, utterance, ...}]}.

Of the annotations `emotion`, the non-empty `dialogue_acts` and the filled slots of `state` are kept; database
results and bookings are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.records import Record, compact, dialogs, mismatch, records, split_of
from rl_dialog.data.schema import Dialog

ROLES = {"user": "user", "system": "assistant"}
ANNOTATIONS = ("emotion", "dialogue_acts", "state")
META = ("domains", "original_id", "terminated_by", "finished")


def matches(head: Head) -> bool:
    return any(
        {"dialogue_id", "turns"} <= record.keys() and "data_split" in record for record in head.records
    )


def corpus(head: Head) -> str | None:
    corpora = [str(record["dataset"]) for record in head.records if record.get("dataset")]
    return corpora[0] if corpora else None


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(log, records(log, max_line_bytes=max_line_bytes), lambda record: [_dialog(log, record)])


def _dialog(log: LogFile, record: Record) -> Dialog:
    row = record.value
    if not isinstance(row, dict) or not {"dialogue_id", "turns"} <= row.keys():
        raise mismatch(
            "", "an object with dialogue_id and turns", sorted(row) if isinstance(row, dict) else row
        )
    where = f"dialog {row['dialogue_id']!r}"
    if not isinstance(row["turns"], list):
        raise mismatch(where, "a list as `turns`", row["turns"])
    return Dialog(
        id=row["dialogue_id"],
        messages=[_message(turn, f"{where}, turn {number}") for number, turn in enumerate(row["turns"])],
        source=row.get("dataset") or log.corpus,
        split=split_of(row.get("data_split"), f"{where}, `data_split`"),
        goal=row.get("goal"),
        meta={key: row[key] for key in META if row.get(key) is not None},
    )


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or turn.get("speaker") not in ROLES:
        raise mismatch(
            where,
            "a turn whose `speaker` is user or system",
            turn.get("speaker") if isinstance(turn, dict) else turn,
        )
    message = {"role": ROLES[turn["speaker"]], "content": turn.get("utterance")}
    annotations = compact({key: turn.get(key) for key in ANNOTATIONS})
    return message | ({"annotations": annotations} if annotations else {})
