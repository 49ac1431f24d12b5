"""MultiWOZ as published: 2.0/2.1 (one object id -> {goal, log}, even turns are the user's, plain or zipped)
and 2.2 (train|dev|test/dialogues_*.json, arrays of {dialogue_id, services, turns: [{speaker, utterance,
frames}]}), whose layout SGD shares.

The belief state and the dialog acts are kept as `annotations`, without their empty slots; span positions are
not.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.records import Record, compact, dialogs, mismatch, records, split_of
from rl_dialog.data.schema import Dialog

SPEAKERS = {"USER": "user", "SYSTEM": "assistant"}
DIALOG_NAME = re.compile(r"(?:MUL|PMUL|SNG|SSNG|WOZ)\w*\.json$")
SPLIT_WORD = re.compile(r"(?:^|[^a-z])(train|dev|valid|val|test)(?:[^a-z]|$)")


def matches(head: Head) -> bool:
    return _is_by_id(head) or any(
        {"dialogue_id", "services", "turns"} <= record.keys() for record in head.records
    )


def corpus(head: Head) -> str | None:
    if _is_by_id(head):
        turns = next(iter(head.top.values()))["log"]
        return (
            "multiwoz21"
            if any(isinstance(turn, dict) and "dialog_act" in turn for turn in turns)
            else "multiwoz20"
        )
    return (
        "multiwoz22"
        if any(DIALOG_NAME.search(str(record.get("dialogue_id"))) for record in head.records)
        else "sgd"
    )


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    splits = _listed_splits(log)
    file_records = records(log, max_line_bytes=max_line_bytes, object_depth=1)
    return dialogs(
        log,
        file_records,
        lambda record: [_by_id(log, record, splits) if _has_key(record) else _by_turns(log, record)],
    )


def _is_by_id(head: Head) -> bool:
    dialog = next(iter(head.top.values()), None) if isinstance(head.top, dict) and head.top else None
    return isinstance(dialog, dict) and isinstance(dialog.get("log"), list) and "goal" in dialog


def _has_key(record: Record) -> bool:
    return bool(record.path) and isinstance(record.path[0], str)


def _by_id(log: LogFile, record: Record, splits: dict[str, str]) -> Dialog:
    name = str(record.path[0])
    where, row = f"dialog {name!r}", record.value
    if not isinstance(row, dict) or not isinstance(row.get("log"), list):
        raise mismatch(where, "an object with goal and log", row)
    messages = []
    for number, turn in enumerate(row["log"]):
        if not isinstance(turn, dict) or "text" not in turn:
            raise mismatch(f"{where}, turn {number}", "an object with the key `text`", turn)
        annotations = compact({"dialogue_acts": turn.get("dialog_act"), "state": turn.get("metadata")})
        messages.append(_message("assistant" if number % 2 else "user", turn["text"], annotations))
    split = splits.get(name, _split_in_name(PurePosixPath(log.name).name) if not splits else "train")
    return Dialog(
        id=name.removesuffix(".json"), messages=messages, source=log.corpus, split=split, goal=row.get("goal")
    )


def _by_turns(log: LogFile, record: Record) -> Dialog:
    row = record.value
    if not isinstance(row, dict) or not {"dialogue_id", "turns"} <= row.keys():
        raise mismatch(
            "", "an object with dialogue_id and turns", sorted(row) if isinstance(row, dict) else row
        )
    where = f"dialog {row['dialogue_id']!r}"
    messages = []
    for number, turn in enumerate(row["turns"]):
        speaker = str(turn.get("speaker")).upper() if isinstance(turn, dict) else None
        if speaker not in SPEAKERS:
            raise mismatch(f"{where}, turn {number}", "a turn whose `speaker` is USER or SYSTEM", turn)
        messages.append(_message(SPEAKERS[speaker], turn.get("utterance"), _frames(turn.get("frames") or [])))
    split = _split_in_name(Path(log.name).absolute().parent.name)
    meta = {"domains": row["services"]} if row.get("services") else {}
    return Dialog(
        id=str(row["dialogue_id"]).removesuffix(".json"),
        messages=messages,
        source=log.corpus,
        split=split,
        meta=meta,
    )


def _message(role: str, text: Any, annotations: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": text} | ({"annotations": annotations} if annotations else {})


def _frames(frames: list[dict[str, Any]]) -> dict[str, Any]:
    state = {frame["service"]: (frame.get("state") or {}).get("slot_values") for frame in frames}
    acts = {frame["service"]: frame.get("actions") for frame in frames}
    return compact({"dialogue_acts": acts, "state": state})


def _split_in_name(name: str) -> str | None:
    match = SPLIT_WORD.search(name.lower())
    return split_of(match[1]) if match else None


def _listed_splits(log: LogFile) -> dict[str, str]:
    """data.json holds every dialog; valListFile and testListFile beside it name those that are not for
    training."""
    if PurePosixPath(log.name).name != "data.json":
        return {}
    splits = {}
    for split in ("val", "test"):
        for suffix in ("json", "txt"):
            text = _beside(log, f"{split}ListFile.{suffix}")
            names = json.loads(text) if text.lstrip().startswith("[") else text.split()
            splits |= {name: split_of(split) for name in names}
    return splits


def _beside(log: LogFile, name: str) -> str:
    """The text of a file in the same folder or zip; "" where there is none."""
    if log.member is None:
        path = Path(log.path).with_name(name)
        return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
    member = PurePosixPath(log.member).with_name(name).as_posix()
    with zipfile.ZipFile(log.path) as archive:
        return archive.read(member).decode("utf-8-sig") if member in archive.namelist() else ""
