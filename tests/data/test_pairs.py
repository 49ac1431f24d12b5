"""Pairs of replies to the same messages, mined and read back."""

from __future__ import annotations

import json

import pytest

from rl_dialog.data.pairs import mine_pairs, widest_pairs
from rl_dialog.data.readers import find_logs, read_log
from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import apply_rewards, choose_rewards


def talk(name, *turns):
    """user text, (reply, reward), user text, ..."""
    messages = [
        {"role": "user", "content": turn}
        if isinstance(turn, str)
        else {"role": "assistant", "content": turn[0], "reward": turn[1]}
        for turn in turns
    ]
    return Dialog(id=name, messages=messages)


DIALOGS = [
    talk("a", "hi", ("hello", 1.0), "how?", ("well", 0.0)),
    talk("b", "hi", ("go away", -1.0)),
    talk("c", "hi", ("hello", 1.0), "how?", ("badly", 5.0)),
    talk("d", "hi", ("hey", 0.5)),
    talk("e", "bye", ("bye", 3.0)),
]


def texts(pairs):
    return [
        (
            pair["chosen"][0]["content"],
            pair["rejected"][0]["content"],
            pair["chosen_reward"] - pair["rejected_reward"],
        )
        for pair in pairs
    ]


def test_pairs_by_the_reply_s_own_reward():
    """To "hi": hello 1, hey .5, go away -1 (the second hello is the same reply); to "hi, hello, how?": badly
    5, well 0."""
    found = list(mine_pairs(lambda: DIALOGS))
    assert texts(found) == [
        ("hello", "go away", 2.0),
        ("hey", "go away", 1.5),
        ("hello", "hey", 0.5),
        ("badly", "well", 5.0),
    ]
    assert found[0]["prompt"] == [{"role": "user", "content": "hi"}] and found[0]["ids"] == ["a", "b"]
    assert [message["content"] for message in found[3]["prompt"]] == ["hi", "hello", "how?"]


def test_pairs_by_what_came_of_it():
    """ "hello" leads to 1 + 0 and to 1 + 5, which is 3.5 on average."""
    assert texts(mine_pairs(lambda: DIALOGS, by="to_go"))[:3] == [
        ("hello", "go away", 4.5),
        ("hello", "hey", 3.0),
        ("hey", "go away", 1.5),
    ]


def test_a_reply_is_worth_what_it_earned_on_average():
    """ "hey" had luck the first time and "hello" none: .25 and .75, in whichever order they come."""
    said = [("hey", 1.0), ("hello", 0.0), *[("hey", 0.0), ("hello", 1.0)] * 3]
    dialogs = [talk(str(i), "hi", reply) for i, reply in enumerate(said)]
    for order in (dialogs, dialogs[::-1]):
        assert texts(mine_pairs(order.copy)) == [("hello", "hey", 0.5)]


def test_replies_that_call_tools_are_told_apart_and_kept():
    def calls(city, number):
        function = {"name": "weather", "arguments": city}
        return {
            "content": None,
            "tool_calls": [{"id": str(number), "type": "function", "function": function}],
        }

    said = [calls("Rome", 0), calls("Oslo", 1), calls("Rome", 2), {"content": "no idea"}]
    dialogs = [talk(str(i), "hi", ("", r), "so?", ("ok", r)) for i, r in enumerate((3.0, 0.0, 1.0, -1.0))]
    for dialog, reply in zip(dialogs, said, strict=True):
        dialog.messages[1] |= reply
    found = list(mine_pairs(lambda: dialogs))
    rome, oslo = ({"role": "assistant"} | reply | {"content": ""} for reply in said[:2])
    no = {"role": "assistant", "content": "no idea"}
    assert [(pair["chosen"], pair["rejected"]) for pair in found[:3]] == [
        ([rome], [no]),
        ([rome], [oslo]),
        ([oslo], [no]),
    ]
    assert found[0]["chosen_reward"] == 2.0 and len(found) == 3  # after Rome both said the same


def test_margin_and_most_per_context():
    assert texts(mine_pairs(lambda: DIALOGS, margin=1.6)) == [
        ("hello", "go away", 2.0),
        ("badly", "well", 5.0),
    ]
    assert texts(mine_pairs(lambda: DIALOGS, most_per_context=1)) == [
        ("hello", "go away", 2.0),
        ("badly", "well", 5.0),
    ]


def test_replies_without_a_reward_make_no_pair():
    silent = Dialog(
        id="x", messages=[{"role": "user", "content": "bye"}, {"role": "assistant", "content": "no"}]
    )
    assert not list(mine_pairs(lambda: [silent, DIALOGS[4]]))
    silent.messages[1] |= {"reward": None, "rewards": {"question": 0.0}}  # as prepare writes a weight of 0
    assert not list(mine_pairs(lambda: [silent, DIALOGS[4]]))
    silent.messages[1]["reward"] = 0.0
    assert len(list(mine_pairs(lambda: [silent, DIALOGS[4]]))) == 1


def test_what_came_of_it_is_what_is_known_of_it():
    """Outcomes 2 (nothing said of the reply itself), 0 + 1 and nothing at all: one pair, of the first two."""
    dialogs = [
        talk("a", "hi", ("hello", None), "how?", ("well", 2.0)),
        talk("b", "hi", ("hey", 0.0), "what?", ("that", None), "so?", ("this", 1.0)),
        talk("c", "hi", ("away", None), "go!", ("no", None)),
    ]
    assert texts(mine_pairs(lambda: dialogs, by="to_go")) == [("hello", "hey", 1.0)]
    assert texts(mine_pairs(lambda: dialogs)) == []


def test_a_component_without_a_weight_changes_no_pair():
    """Votes 1, -1 and none; `question` applies to all replies."""
    found = []
    for weights in ({"vote": 1.0}, {"vote": 1.0, "question": 0.0}):
        dialogs = [talk(str(i), "hi", (text, None)) for i, text in enumerate(("who?", "no", "why?"))]
        for dialog, vote in zip(dialogs, (1, -1, None), strict=True):
            dialog.messages[1] |= {} if vote is None else {"feedback": {"vote": vote}}
            apply_rewards(dialog, choose_rewards(weights), weights)
        found.append(list(mine_pairs(dialogs.copy)))
    assert found[0] == found[1] and texts(found[0]) == [("who?", "no", 2.0)]


def test_the_file_is_read_back_as_preferences(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in mine_pairs(lambda: DIALOGS)))
    logs, bad, _ = find_logs([str(path)], reader=None)
    found = list(read_log(logs[0], max_line_bytes=1 << 20))
    assert not bad and len(found) == 8 and logs[0].reader == "trl"
    again = list(mine_pairs(lambda: found))
    assert {(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in again} >= {
        ("hello", "go away"),
        ("badly", "well"),
    }
    assert again[0]["chosen_reward"] == pytest.approx(1.0)


def test_the_widest_of_many_are_those_of_all():
    """Checked against all pairs; twenty thousand replies to one message make no millions of them."""
    rewards = [(float((7 * n) % 41),) for n in range(41)]
    every = sorted((one[0] - other[0] for one in rewards for other in rewards if one > other), reverse=True)
    found = widest_pairs(rewards, margin=0.0, most=5)
    assert [better[0] - worse[0] for better, worse in found] == every[:5]
    assert len(widest_pairs([(float(n),) for n in range(20_000)], margin=0.0, most=8)) == 8
