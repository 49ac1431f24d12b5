"""Dialogs survive JSONL and Parquet unchanged, and anything that is not one is refused with what was
expected, what came and where."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.data.schema import ARROW_SCHEMA, Dialog, DialogError, read_jsonl, said, to_table, write_jsonl
from rl_dialog.errors import UserError

USER = {"role": "user", "content": "hi"}
CALL = [
    {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Kraków"}'}}
]


def reply(content="hello", **extra):
    return {"role": "assistant", "content": content, **extra}


DIALOGS = [
    Dialog(id="plain", messages=[USER, reply()]),
    Dialog(
        id="newlines",
        messages=[
            {"role": "user", "content": "a\nb\r\nc\rd\u2028e\u2029f\x85g\x0bh\x0ci"},
            reply("\n"),
            reply("\t \n"),
        ],
    ),
    Dialog(
        id="unicode",
        messages=[
            {"role": "user", "content": "😀 👩‍👩‍👧 日本語 ok é e\u0301 \ufeff \x00 \U0010ffff"},
            reply('한국어 — “quoted” \\ " /'),
        ],
    ),
    Dialog(
        id="empty strings",
        messages=[{"role": "system", "content": ""}, {"role": "user", "content": ""}, reply("")],
        source="",
        goal="",
        meta={"": ""},
    ),
    Dialog(
        id="NA",
        messages=[
            {"role": "user", "content": "NA"},
            reply("null"),
            reply("NaN"),
            reply("None"),
            reply("nan"),
        ],
        source="NA",
        goal="null",
    ),
    Dialog(
        id="rewards",
        messages=[
            USER,
            reply(reward=None),
            reply(reward=0),
            reply(reward=-0.1, rewards={"vote": 1, "length": None, "a b": 1e-300}),
        ],
    ),
    Dialog(
        id="feedback",
        messages=[
            USER,
            reply(feedback={"vote": -1, "edit": "better\n", "tags": ["rude", None]}, weight=0),
            reply(weight=1),
        ],
    ),
    Dialog(
        id="tools",
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": CALL},
            {"role": "tool", "content": "21 °C", "tool_call_id": "call_1"},
            reply(),
        ],
    ),
    Dialog(
        id="unknown keys",
        messages=[
            {**USER, "name": "ann", "時": 3, "logprobs": {"x": [0.25, None, True, "1"]}},
            reply(refusal=None, n=10**30),
        ],
    ),
    Dialog(
        id="all fields",
        messages=[USER, reply()],
        source="s",
        split="validation",
        truncated=True,
        goal={"taxi": [1, 2.5, None, "x"]},
        meta={"ratings": {"quality": 5}, "outcome": 8.0, "group": "g", "list": []},
    ),
    Dialog(id="falsy goal", messages=[USER], goal=0),
]


@pytest.mark.parametrize("dialog", DIALOGS, ids=lambda d: d.id)
def test_json_round_trip(dialog):
    line = dialog.to_json()
    assert "\n" not in line
    assert Dialog.from_json(line) == dialog
    assert _types(Dialog.from_json(line)) == _types(dialog)


@pytest.mark.parametrize("dialog", DIALOGS, ids=lambda d: d.id)
def test_row_round_trip(dialog):
    assert Dialog.from_row(dialog.to_row()) == dialog
    assert _types(Dialog.from_row(dialog.to_row())) == _types(dialog)


def test_jsonl_file_round_trip(tmp_path):
    path = tmp_path / "dialogs.jsonl"
    assert write_jsonl(iter(DIALOGS), path) == len(DIALOGS)
    assert path.read_bytes().count(b"\n") == len(DIALOGS)
    assert list(read_jsonl(path)) == DIALOGS


@pytest.mark.parametrize("place", [".", "nowhere/dialogs.jsonl", "file/dialogs.jsonl"])
def test_a_place_where_no_file_can_be_is_said(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="expected a file in a folder that is there"):
        write_jsonl(DIALOGS, tmp_path / place)


def test_parquet_round_trip(tmp_path):
    """Through a real file, so that Arrow's own types (and not Python's) are what survives; other columns are
    ignored."""
    path = tmp_path / "dialogs.parquet"
    table = to_table(DIALOGS)
    assert table.equals(pa.Table.from_pylist([d.to_row() for d in DIALOGS], schema=ARROW_SCHEMA))
    pq.write_table(table.append_column("input_ids", pa.array([[1, 2]] * len(DIALOGS))), path)
    back = [Dialog.from_row(row) for row in pq.read_table(path).to_pylist()]
    assert back == DIALOGS
    assert [_types(d) for d in back] == [_types(d) for d in DIALOGS]


def test_json_leaves_defaults_out_and_keeps_text_readable():
    assert (
        Dialog(id="d", messages=[{"role": "user", "content": "日本"}]).to_json()
        == '{"id": "d", "messages": [{"role": "user", "content": "日本"}]}'
    )


def test_a_tool_call_without_content_is_one_with_null_content():
    """OpenAI's API leaves `content` out; the caller's own dict stays as it was."""
    message = {"role": "assistant", "tool_calls": CALL}
    dialog = Dialog(id="d", messages=[USER, message])
    assert dialog.messages[1] == {"role": "assistant", "content": None, "tool_calls": CALL}
    assert Dialog.from_row(dialog.to_row()) == dialog == Dialog.from_json(dialog.to_json())
    assert "content" not in message


def test_unknown_keys_of_a_record_go_to_meta():
    dialog = Dialog.from_json(
        '{"id": "d", "messages": [{"role": "user", "content": "x"}], "rating": 4, "meta": {"a": 1}}'
    )
    assert dialog.meta == {"a": 1, "rating": 4}


def test_replies_are_assistant_messages_of_weight_one():
    messages = [reply(), USER, reply(weight=0), reply(weight=1), {"role": "tool", "content": ""}]
    assert Dialog(id="d", messages=messages).replies == [0, 3]


BAD_DIALOGS = {
    "empty id": (dict(id="", messages=[USER]), ["non-empty string as `id`", "''"]),
    "number as id": (dict(id=7, messages=[USER]), ["non-empty string as `id`", "got 7"]),
    "no messages": (dict(id="d1", messages=[]), ["'d1'", "non-empty list as `messages`", "got []"]),
    "text as messages": (dict(id="d1", messages="hi"), ["'d1'", "non-empty list as `messages`", "got 'hi'"]),
    "null source": (dict(id="d1", messages=[USER], source=None), ["a string as `source`", "got None"]),
    "unknown split": (dict(id="d1", messages=[USER], split="dev"), ["`split`", "'validation'", "got 'dev'"]),
    "text as truncated": (
        dict(id="d1", messages=[USER], truncated="no"),
        ["true or false as `truncated`", "got 'no'"],
    ),
    "list as meta": (dict(id="d1", messages=[USER], meta=[1]), ["an object as `meta`", "got [1]"]),
    "NaN in meta": (
        dict(id="d1", messages=[USER], meta={"score": math.nan}),
        ["'d1'", "UTF-8 and JSON", "'score': nan"],
    ),
    "surrogate in goal": (
        dict(id="d1", messages=[USER], goal="\ud83d"),
        ["'d1'", "surrogate", r"'goal': '\ud83d'"],
    ),
    "a set as goal": (dict(id="d1", messages=[USER], goal={1, 2}), ["'d1'", "JSON", "{1, 2}"]),
}
BAD_MESSAGES = {
    "not an object": ("hello", ["an object", "got 'hello'"]),
    "no role": ({"content": "x"}, ["`role`", "got None"]),
    "unknown role": ({"role": "bot", "content": "x"}, ["`role`", "'assistant'", "got 'bot'"]),
    "unhashable role": ({"role": ["user"], "content": "x"}, ["`role`", "got ['user']"]),
    "no content": ({"role": "user"}, ["a string as `content`", "got None"]),
    "null content": (reply(None), ["a string as `content`", "got None"]),
    "null content, no calls": (reply(None, tool_calls=[]), ["a string as `content`", "got None"]),
    "number as content": (reply(3), ["a string as `content`", "got 3"]),
    "content parts": (reply([{"type": "text", "text": "x"}]), ["a string as `content`", "'type': 'text'"]),
    "lone surrogate": (reply("bad \ud83d half"), ["UTF-8", "surrogate", r"bad \ud83d half"]),
    "surrogate in an unknown key": (reply(note="\udc00"), ["UTF-8", r"'note': '\udc00'"]),
    "NaN in an unknown key": (reply(logprob=math.nan), ["JSON", "'logprob': nan"]),
    "bytes": (reply(raw=b"x"), ["JSON", "b'x'"]),
    "NaN reward": (reply(reward=math.nan), ["finite number or null as `reward`", "got NaN"]),
    "infinite reward": (reply(reward=-math.inf), ["finite number or null as `reward`", "got -inf"]),
    "reward no float holds": (reply(reward=10**400), ["finite number or null as `reward`", "got 1000"]),
    "text as reward": (reply(reward="1"), ["finite number or null as `reward`", "got '1'"]),
    "boolean reward": (reply(reward=True), ["finite number or null as `reward`", "got True"]),
    "list as rewards": (reply(rewards=[1]), ["{name: finite number} as `rewards`", "got [1]"]),
    "NaN in rewards": (reply(rewards={"vote": math.nan}), ["as `rewards`", "{'vote': nan}"]),
    "text as feedback": (reply(feedback="up"), ["an object as `feedback`", "got 'up'"]),
    "weight a half": (reply(weight=0.5), ["`weight` to be 0 or 1", "got 0.5"]),
    "reward on a user": ({**USER, "reward": 1.0}, ["assistant messages only", "a reward on a user message"]),
    "rewards on a tool": (
        {"role": "tool", "content": "x", "rewards": {"vote": 1}},
        ["assistant messages only", "a reward on a tool message"],
    ),
}


@pytest.mark.parametrize(("fields", "parts"), BAD_DIALOGS.values(), ids=BAD_DIALOGS.keys())
def test_a_bad_dialog_is_refused(fields, parts):
    with pytest.raises(DialogError) as error:
        Dialog(**fields)
    _says(error, ["expected", "got", *parts])


@pytest.mark.parametrize(("message", "parts"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_bad_message_is_refused_with_its_place(message, parts):
    with pytest.raises(DialogError) as error:
        Dialog(id="d7", messages=[USER, message])
    _says(error, ["dialog 'd7', message 1: expected", "got", *parts])


def test_user_messages_may_carry_a_null_reward():
    assert Dialog(id="d", messages=[{**USER, "reward": None}]).messages[0]["reward"] is None


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(DialogError) as error:
        Dialog(id="d", messages=[{"role": "user", "content": ["x" * 5000]}])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["invalid JSON"]),
        ("", ["invalid JSON"]),
        ('{"id": "d", "messages": [], "x": ' + "1" * 5000 + "}", ["invalid JSON"]),
        ("[" * 100_000, ["invalid JSON"]),
        ("[1]", ["a JSON object", "[1]"]),
        ("null", ["a JSON object", "None"]),
        ('{"id": "d"}', ["'d'", "`messages`", "['id']"]),
        ('{"messages": []}', ["'?'", "`id`", "['messages']"]),
        (
            '{"id": "d", "messages": [{"role": "user", "content": "x"}], "meta": null}',
            ["'d'", "`meta`", "None"],
        ),
        (
            '{"id": "d", "messages": [{"role": "assistant", "content": "x", "reward": NaN}]}',
            ["message 0", "`reward`", "NaN"],
        ),
        (
            '{"id": "d", "messages": [{"role": "assistant", "content": "x", "reward": 1e400}]}',
            ["message 0", "`reward`", "inf"],
        ),
        ('{"id": "d", "messages": [{"role": "user", "content": "\\ud800"}]}', ["message 0", "surrogate"]),
    ],
)
def test_a_bad_line_is_refused(line, parts):
    with pytest.raises(DialogError) as error:
        Dialog.from_json(line)
    _says(error, ["expected", *parts])


@pytest.mark.parametrize(
    "bad", [b"nonsense", b"", b'{"id": "d", "messages": [{"role": "user", "content": "caf\xe9"}]}']
)
def test_a_bad_line_of_a_file_is_named_by_file_and_number(tmp_path, bad):
    path = tmp_path / "log.jsonl"
    path.write_bytes(DIALOGS[0].to_json().encode() + b"\n" + bad + b"\n")
    lines = read_jsonl(path)
    assert next(lines) == DIALOGS[0]
    with pytest.raises(DialogError, match=r"log\.jsonl:2: "):
        next(lines)


def test_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(d.to_json().encode() + b"\r\n" for d in DIALOGS))
    assert list(read_jsonl(path)) == DIALOGS


def _types(dialog):
    """1 == 1.0 == True in Python, but not in a file: the JSON text tells them apart."""
    return json.dumps(dialog.__dict__, sort_keys=True)


def _says(error, parts):
    for part in parts:
        assert part in str(error.value), f"expected {part!r} in {error.value}"


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_message_that_calls_tools_says_its_calls(nothing):
    """Half of the clients write "" where the others write null."""
    calls = json.dumps(CALL, ensure_ascii=False)
    assert said(reply(nothing, tool_calls=CALL)) == calls
    assert said(reply("wait", tool_calls=CALL)) == f"wait{calls}" and said(reply("")) == ""
