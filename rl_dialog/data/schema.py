"""The Dialog: one record that is a log line, a Parquet row, an offline trajectory, a rollout and a served
chat.

A message is a plain dict in OpenAI's form, `{"role", "content"}`, so that chat templates and clients take it
as it is. Assistant messages may also carry

    reward    float or null    what this reply earned: the data's own reward, or the weighted sum that
                               `prepare` wrote. Null or absent: nobody knows, which is not 0
    rewards   {name: float}    the named components behind `reward`
    feedback  {...}            what a human said about this reply: {"vote": -1 | 0 | 1}, an edit, ...
    weight    0 or 1           OpenAI's field: 0 keeps the reply as context and never trains on it

Other keys are kept untouched. A Dialog is written as one JSON line (`to_json`) or one Parquet row (`to_row`)
and comes back equal.
"""

from __future__ import annotations

import itertools
import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl_dialog.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
SPLITS = ("train", "validation", "test")
ENDS = ("terminated", "truncated", "failed", "unscored")  # of an episode; the first two have a return
TEXT = "text that UTF-8 and JSON can hold (no lone surrogate, NaN or value that is not JSON)"

# Column names equal the JSON keys. Free-form values (goal, meta, and what a message carries beyond its text)
# are JSON text inside Parquet, because Arrow's structs would turn absent keys into nulls and mixed types into
# errors.
ARROW_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("truncated", pa.bool_()),
        (
            "messages",
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("extra", pa.string())])),
        ),
        ("goal", pa.string()),
        ("meta", pa.string()),
    ]
)


class DialogError(UserError):
    """A record that is not a valid Dialog; the message says what was expected, what came and where."""


def row_meta(other: Mapping[str, Any]) -> dict[str, Any]:
    """What a row has beside the fields of a Dialog, for its `meta`. A `group` of its own, as "control" of an
    experiment, becomes `log_group`: `meta.group` decides splits."""
    return {"log_group" if key == "group" else key: value for key, value in other.items()}


@dataclass
class Dialog:
    """One conversation. Raises `DialogError` when built from anything that is not one."""

    id: str
    messages: list[dict[str, Any]]
    source: str = ""  # which corpus or log it came from
    split: str | None = None  # as declared by the data; `prepare` decides the final one
    truncated: bool = False  # True: cut off, not finished, so the value after the last reply is bootstrapped
    goal: Any = None  # what the user wanted (task-oriented corpora)
    meta: dict[str, Any] = field(
        default_factory=dict
    )  # {"ratings": {"quality": 5, ...}, "outcome": 8.0, "group": ..., anything}

    def __post_init__(self) -> None:
        where = f"dialog {self.id!r}"
        _expect(isinstance(self.id, str) and self.id != "", where, "a non-empty string as `id`", self.id)
        _expect(
            isinstance(self.messages, list) and self.messages,
            where,
            "a non-empty list as `messages`",
            self.messages,
        )
        _expect(isinstance(self.source, str), where, "a string as `source`", self.source)
        _expect(
            self.split is None or self.split in SPLITS,
            where,
            f"`split` to be one of {SPLITS} or null",
            self.split,
        )
        _expect(isinstance(self.truncated, bool), where, "true or false as `truncated`", self.truncated)
        _expect(isinstance(self.meta, dict), where, "an object as `meta`", self.meta)
        for number, message in enumerate(self.messages):
            if wrong := _wrong_with(message):
                _expect(False, f"{where}, message {number}", *wrong)
        around = {"id": self.id, "source": self.source, "goal": self.goal, "meta": self.meta}
        if not _encodable([around, self.messages]):
            _expect(_encodable(around), where, TEXT, around)
            number = next(number for number, message in enumerate(self.messages) if not _encodable(message))
            _expect(False, f"{where}, message {number}", TEXT, self.messages[number])
        self.messages = [
            m if "content" in m else {**m, "content": None} for m in self.messages
        ]  # OpenAI leaves it out beside tool_calls

    @property
    def replies(self) -> list[int]:
        """Indices of the assistant messages that count as replies (`weight` 0 marks context)."""
        return [
            i for i, m in enumerate(self.messages) if m["role"] == "assistant" and m.get("weight", 1) != 0
        ]

    def to_json(self) -> str:
        """One JSON line, without the fields that hold their default."""
        record: dict[str, Any] = {"id": self.id, "messages": self.messages}
        defaults = {"source": "", "split": None, "truncated": False, "goal": None, "meta": {}}
        record |= {
            key: getattr(self, key) for key, default in defaults.items() if getattr(self, key) != default
        }
        return json.dumps(record, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Dialog:
        """The inverse of `to_json`. Raises DialogError for anything else."""
        try:
            record = json.loads(line)
        except (
            ValueError,
            RecursionError,
        ) as error:  # JSONDecodeError is a ValueError, and so is a number of 5000 digits
            raise DialogError(f"expected one JSON object per line, got invalid JSON: {error}") from error
        return cls.from_record(record)

    @classmethod
    def from_record(cls, record: Any) -> Dialog:
        """A parsed JSON object to a Dialog; keys that are not Dialog fields go to `meta` (`row_meta`)."""
        _expect(isinstance(record, dict), "record", "a JSON object", record)
        fields = {key: record[key] for key in cls.__dataclass_fields__ if key in record}
        missing = [key for key in ("id", "messages") if key not in fields]
        _expect(
            not missing, f"record {record.get('id', '?')!r}", "the keys `id` and `messages`", list(record)
        )
        extra = row_meta({key: value for key, value in record.items() if key not in fields})
        _expect(
            isinstance(fields.get("meta", {}), dict),
            f"dialog {fields['id']!r}",
            "an object as `meta`",
            fields.get("meta"),
        )
        return cls(**{**fields, "meta": fields.get("meta", {}) | extra})

    def to_row(self) -> dict[str, Any]:
        """A Parquet row of `ARROW_SCHEMA`."""
        messages = [{"role": m["role"], "content": m["content"], "extra": _extra(m)} for m in self.messages]
        return {
            "id": self.id,
            "source": self.source,
            "split": self.split,
            "truncated": self.truncated,
            "messages": messages,
            "goal": _dump(self.goal),
            "meta": _dump(self.meta),
        }

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Dialog:
        """The inverse of `to_row`; other columns of the row are ignored."""
        messages = [
            {"role": m["role"], "content": m["content"], **json.loads(m["extra"])} for m in row["messages"]
        ]
        return cls(
            id=row["id"],
            messages=messages,
            source=row["source"],
            split=row["split"],
            truncated=row["truncated"],
            goal=json.loads(row["goal"]),
            meta=json.loads(row["meta"]),
        )


def failure_of(info: Mapping[str, Any]) -> str | None:
    """Why a world broke, its `info["failed"]`. None where it did not: worlds that always have the key say
    None or False."""
    why = info.get("failed")
    return None if why is False else why


def end_of(rewards: Iterable[float | None], *, terminated: bool, failed: bool) -> str:
    """Which of `ENDS` an episode came to: `failed` where its world broke, `unscored` where nobody knows what
    a reply earned. Neither is an episode that earned 0, so neither has a return."""
    if failed:
        return "failed"
    if any(reward is None for reward in rewards):
        return "unscored"
    return "terminated" if terminated else "truncated"


@dataclass
class View:
    """What one role of a world saw, said and earned. In worlds of several roles each has its own: what it
    said is the assistant's."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: dict[int, float | None] = field(default_factory=dict)  # index of a reply -> what it earned
    early: float | None = 0.0  # earned before the role said anything

    def see(self, messages: Sequence[dict[str, Any]], where: str) -> None:
        """Takes a newer view. Raises UserError, which says `where`, for one that rewrites what was seen or
        said."""
        before = len(self.messages)
        if messages[:before] != self.messages:
            got = str(messages[max(0, before - 2) :])[:200]
            raise UserError(f"{where}: expected messages that begin with those before, got {got}")
        self.messages = list(messages)

    def say(self, messages: Sequence[dict[str, Any]], where: str) -> None:
        """Takes the view that its reply led to. Raises UserError, which says `where`, if the reply was not
        added."""
        before = len(self.messages)
        added = messages[before:]
        if messages[:before] != self.messages or not added or added[0]["role"] != "assistant":
            expected = "expected step to return the conversation so far with the reply added"
            raise UserError(f"{where}: {expected}, got {str(messages[-2:])[:200]}")
        self.messages = list(messages)
        self.rewards[before], self.early = self.early, 0.0

    def earn(self, reward: float | None) -> None:
        """Adds to what the last reply earned; once it is unknown it stays so."""
        last = max(self.rewards, default=None)
        before = self.early if last is None else self.rewards[last]
        total = None if reward is None or before is None else before + float(reward)
        if last is None:
            self.early = total
        else:
            self.rewards[last] = total

    def marked(self) -> list[dict[str, Any]]:
        """The messages of a Dialog: replies with rewards, and of weight 1 whatever the world says; assistant
        messages that are the world's own words have weight 0."""
        marked = []
        for i, message in enumerate(self.messages):
            if i in self.rewards:
                message = {key: value for key, value in message.items() if key != "weight"}
                message["reward"] = self.rewards[i]
            elif message["role"] == "assistant":
                message = {**message, "weight": 0}
            marked.append(dict(message))
        return marked


def said(message: Mapping[str, Any]) -> str:
    """What a message says: its text, and behind it the JSON of the tools that it calls, as our chat template
    writes them."""
    calls = message.get("tool_calls")
    return (message.get("content") or "") + (json.dumps(calls, ensure_ascii=False) if calls else "")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return False


def can_be_encoded(text: str) -> bool:
    """Whether UTF-8 has it: half of a character (a lone surrogate) goes into no tokenizer and no file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def harmless(text: str) -> str:
    """The text for a terminal: what it would obey, which can clear the screen and more, is shown as an
    escape."""
    text = text.replace("\r\n", "\n")
    obeyed = {c for c in text if unicodedata.category(c) == "Cc"} - {"\n", "\t"}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in obeyed})


def to_table(dialogs: Sequence[Dialog]) -> pa.Table:
    """Many dialogs as rows of `ARROW_SCHEMA`, what `to_row` gives of each, but a column at a time, which is
    faster."""
    messages = [message for dialog in dialogs for message in dialog.messages]
    columns = {
        "role": [message["role"] for message in messages],
        "content": [message["content"] for message in messages],
        "extra": [_extra(message) for message in messages],
    }
    message_type = ARROW_SCHEMA.field("messages").type
    structs = pa.StructArray.from_arrays(
        [pa.array(column, pa.string()) for column in columns.values()], fields=list(message_type.value_type)
    )
    starts = pa.array(
        itertools.accumulate((len(dialog.messages) for dialog in dialogs), initial=0), pa.int32()
    )
    values = {
        name: [getattr(dialog, name) for dialog in dialogs] for name in ("id", "source", "split", "truncated")
    }
    values |= {name: [_dump(getattr(dialog, name)) for dialog in dialogs] for name in ("goal", "meta")}
    arrays = {name: pa.array(column, ARROW_SCHEMA.field(name).type) for name, column in values.items()}
    arrays["messages"] = pa.ListArray.from_arrays(starts, structs, type=message_type)
    return pa.table([arrays[name] for name in ARROW_SCHEMA.names], schema=ARROW_SCHEMA)


def write_jsonl(dialogs: Iterable[Dialog], path: str | Path) -> int:
    """Writes one Dialog per line, returns how many. Raises UserError where no file can be made."""
    count = 0
    try:
        Path(path).open("a").close()
    except (IsADirectoryError, NotADirectoryError, FileNotFoundError, PermissionError) as error:
        expected = "expected a file in a folder that is there"
        raise UserError(f"{path}: {expected}, got: {error.strerror}") from error
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for dialog in dialogs:
            file.write(dialog.to_json() + "\n")
            count += 1
    return count


def read_jsonl(path: str | Path) -> Iterator[Dialog]:
    """Reads what `write_jsonl` wrote; the first bad line raises DialogError (logs of unknown quality go
    through `data/readers.py`)."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield Dialog.from_json(line.decode("utf-8"))
            except (DialogError, UnicodeDecodeError) as error:
                raise DialogError(f"{path}:{number}: {error}") from error


def _wrong_with(message: Any) -> tuple[str, Any] | None:
    """What was expected of a message and what came; None for a good one."""
    if not isinstance(message, dict):
        return "an object", message
    role, content, rewards = message.get("role"), message.get("content"), message.get("rewards")
    if role not in ROLES:
        return f"`role` to be one of {ROLES}", role
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        return "a string as `content`", content
    if not _number_or_none(message.get("reward")):
        return "a finite number or null as `reward`", message["reward"]
    if "rewards" in message and not (
        isinstance(rewards, dict) and all(map(_number_or_none, rewards.values()))
    ):
        return "{name: finite number} as `rewards`", rewards
    if "feedback" in message and not isinstance(message["feedback"], dict):
        return "an object as `feedback`", message["feedback"]
    if message.get("weight", 1) not in (0, 1):
        return "`weight` to be 0 or 1", message["weight"]
    if role != "assistant" and (rewards or message.get("reward") is not None):
        return "rewards on assistant messages only", f"a reward on a {role} message"
    return None


def _extra(message: dict[str, Any]) -> str:
    """What a message carries beyond its text."""
    return (
        "{}"
        if len(message) == 2
        else _dump({key: value for key, value in message.items() if key not in ("role", "content")})
    )


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)


def _encodable(value: Any) -> bool:
    try:
        _dump(value).encode("utf-8")
    except (ValueError, TypeError):  # UnicodeEncodeError is a ValueError
        return False
    return True


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # json.dumps would make a new one every time


def _dump(value: Any) -> str:
    return _ENCODER.encode(value)


def _expect(condition: Any, where: str, expected: str, got: Any) -> None:
    if not condition:
        shown = "NaN" if isinstance(got, float) and math.isnan(got) else repr(got)  # as JSON writes it
        raise DialogError(
            f"{where}: expected {expected}, got {shown if len(shown) <= 200 else shown[:200] + '...'}"
        )
