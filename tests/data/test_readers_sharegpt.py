"""ShareGPT rows: who speaks, what stands beside the turns, and rows that are refused."""

from __future__ import annotations

import json

import pytest

from rl_dialog.data.readers import find_logs
from tests.data.test_readers import jsonl, one_bad, read, stored, write

HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
BARE = {"conversations": [HUMAN, GPT]}
ARGUMENTS = '{"city": "Zürich"}'
CALL = {"from": "function_call", "value": f'{{"name": "weather", "arguments": {ARGUMENTS}}}'}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
}


@pytest.mark.parametrize("container", ["jsonl", "json", "jsonl.gz", "json.gz", "parquet"])
def test_rows_in_every_container(tmp_path, container):
    path = stored(tmp_path, [{"id": "x_0", **BARE}, BARE], container)
    assert find_logs([str(path)])[0][0].reader == "sharegpt"
    dialogs, bads = read(path)
    assert not bads and [dialog.messages for dialog in dialogs] == [[USER, REPLY]] * 2
    assert [dialog.id for dialog in dialogs] == ["x_0", "rows:2"] and dialogs[0].source == "rows"


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_empty_columns_of_a_preference_are_no_preference(tmp_path, container):
    row = {"id": "x", **BARE, "chosen": None, "rejected": None, "kto_tag": None}
    dialogs, bads = read(stored(tmp_path, [row], container))
    assert not bads and [dialog.messages for dialog in dialogs] == [[USER, REPLY]]


def test_columns_of_turns_are_turns(tmp_path):
    row = {"id": "x", "conversations": {"from": ["human", "gpt"], "value": ["hi", "hello"]}}
    dialogs, bads = read(stored(tmp_path, [row], "parquet"))
    assert not bads and dialogs[0].messages == [USER, REPLY]


@pytest.mark.parametrize("columns", [{"from": None, "value": None}, {"from": ["human"], "value": []}])
def test_columns_that_are_no_turns_spoil_no_other_row(tmp_path, columns):
    rows = {"conversations": columns}, {"conversations": [HUMAN, GPT]}
    dialogs, bads = read(write(tmp_path / "a.jsonl", jsonl(*rows)))
    assert len(dialogs) == 1 and "expected a list of turns" in one_bad(bads).reason


def test_tools_and_the_system_prompt_beside_the_turns(tmp_path):
    turns = [HUMAN, CALL, {"from": "observation", "value": "rain"}, {**GPT, "weight": None}]
    row = {"conversations": turns, "system": "be brief", "tools": "[]"}
    [dialog], bads = read(write(tmp_path / "a.jsonl", jsonl(row)))
    system, rain = {"role": "system", "content": "be brief"}, {"role": "tool", "content": "rain"}
    assert not bads and dialog.messages == [system, USER, CALLED, rain, REPLY]
    assert dialog.meta == {"tools": "[]"} and dialog.replies == [2, 4]
    own = {"conversations": [{"from": "system", "value": "be kind"}, HUMAN, GPT], "system": "be brief"}
    [dialog], _ = read(write(tmp_path / "b.jsonl", jsonl(own)))
    assert dialog.messages[0]["content"] == "be kind" and dialog.meta == {"system": "be brief"}
    several = {**CALL, "value": json.dumps([json.loads(CALL["value"])] * 2)}
    [dialog], _ = read(write(tmp_path / "c.jsonl", jsonl({"conversations": [HUMAN, several]})))
    assert len(dialog.messages[1]["tool_calls"]) == 2


def test_judged_replies(tmp_path):
    pair = {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}}
    (good, poor), bads = read(write(tmp_path / "a.jsonl", jsonl(pair)))
    context = [USER, {**REPLY, "weight": 0}, USER]
    assert not bads and good.messages == [*context, {**REPLY, "reward": 1.0}]
    assert poor.messages == [*context, {"role": "assistant", "content": "no", "reward": 0.0}]
    assert good.meta["pair"] == poor.meta["pair"] == "a:1"
    kto = {"conversations": [HUMAN, GPT, HUMAN, GPT], "kto_tag": False}
    [dialog], _ = read(write(tmp_path / "b.jsonl", jsonl(kto)))
    assert dialog.messages == [*context, {**REPLY, "reward": 0.0, "feedback": {"vote": -1}}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": []}, "a list of turns, each with the keys `from` and `value`"),
        ({"conversations": [HUMAN, {"role": "assistant", "content": "x"}]}, "a list of turns"),
        (
            {"conversations": [HUMAN, {"from": "robot", "value": "x"}]},
            "turn 1: expected one of system, human",
        ),
        ({"conversations": [HUMAN, {"from": "gpt", "value": None}]}, "a string as `content`"),
        (
            {"conversations": [HUMAN, {"from": "function_call", "value": "rain?"}]},
            "turn 1: expected JSON of a",
        ),
        ({"conversations": [HUMAN, GPT], "kto_tag": "yes"}, "true or false as `kto_tag`"),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": "no"}, "rejected: expected a list of turns"),
        ({"messages": [USER, REPLY]}, "expected a JSON object with the key `conversations`"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, said):
    dialogs, bads = read(write(tmp_path / "a.jsonl", jsonl(BARE, row)))
    assert len(dialogs) == 1 and said in one_bad(bads).reason and bads[0].where == "line 2"
