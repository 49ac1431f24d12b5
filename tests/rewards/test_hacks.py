"""Scripted replies that bad rewards pay for."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.hacks import HACKS, LONG, Outcome, try_hacks


def talk(number=0):
    turns = ("where is it?", "dogs bark in the park", "I love parks", "cats sleep")
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return Dialog(id=f"d{number}", messages=messages)


def test_what_the_hacks_say():
    said = {name: write(talk()) for name, write in HACKS.items()}
    assert all(len(replies) == 2 for replies in said.values())
    assert said["copies the user"] == ["where is it?", "I love parks"]
    assert said["says one thing"] == ["dogs bark in the park"] * 2
    assert said["says nothing"] == ["", ""]
    assert [len(reply.split()) for reply in said["goes on and on"]] == [LONG, LONG]


@pytest.mark.parametrize(
    ("name", "falls", "stands"),
    [
        ("question", {"always asks"}, {"says nothing", "goes on and on", "praises"}),
        ("reply_length", {"goes on and on", "praises"}, {"says nothing", "copies the user"}),
        ("cheerful", {"praises"}, {"always asks", "says nothing"}),
        ("politeness", {"praises"}, {"always asks"}),
        ("repetition", set(), {"goes on and on", "says one thing"}),
    ],
)
def test_which_rewards_fall_for_them(name, falls, stands):
    found = try_hacks([talk(i) for i in range(3)], {name: REWARDS[name]})[name]
    assert falls <= {hack for hack, outcome in found.items() if outcome.falls_for}
    assert not any(found[hack].falls_for for hack in stands)


def test_what_the_user_answers_is_not_known():
    """The logged answer stands behind every hack, so rewards of the user's side see no change."""
    rewards = {
        name: REWARDS[name] for name in ("sentiment", "answer_length", "laughter", "conversation_length")
    }
    for outcomes in try_hacks([talk()], rewards).values():
        assert all(outcome == Outcome(0.0, 0.0, 0.0) for outcome in outcomes.values())


def test_shares_and_changes_by_hand():
    """Logged lengths 5 and 2; the user's turns have 3 and 3 words: one loses 2, one wins 1."""
    outcome = try_hacks([talk()], {"reply_length": REWARDS["reply_length"]})["reply_length"][
        "copies the user"
    ]
    assert outcome == Outcome(wins=0.5, loses=0.5, change=-0.5) and not outcome.falls_for


def test_a_reward_that_applies_nowhere_has_no_outcome():
    assert try_hacks([talk()], {"vote": REWARDS["vote"]}) == {"vote": {}}
