"""The 2019 columns with their defects, beside what we compute."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.compat_2019 import COMPAT_2019


def talk(*turns):
    """user, assistant, user, assistant, ..."""
    return Dialog(id="d", messages=[{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)])


@pytest.mark.parametrize(
    ("name", "turns", "then", "now"),
    [
        ("laughter", ("hi", "a", "what do you have", "b"), [2, 0], [0, None]),
        ("laughter", ("hi", "a", "hahahahahaha", "b"), [4, 0], [4, None]),
        ("laughter", ("hi", "a", "HAHA", "b"), [0, 0], [2, None]),
        ("cheerful", ("hi", "I am unhappy"), [1], [0]),
        ("cheerful", ("hi", "I am not happy"), [1], [0]),
        ("cheerful", ("hi", "HAPPY"), [0], [1]),
        ("supportive", ("hi", "well you re right"), [1], [1]),
        ("politeness", ("hi", "he was pleased"), [1], [0]),
        ("compliments", ("hi", "i like your hat"), [1], [0]),
        ("you", ("hi", "a young man"), [1], [0]),
        ("question", ("hi", "how are you ?"), [1], [1]),
        ("question", ("hi", "show me ?"), [0.5], [0.5]),
        ("question", ("hi", "What's up?"), [0.5], [1]),
        ("answer_length", ("hi", "a", "I don't know , really !", "b"), [6, 0], [4 / 30, None]),
        ("answer_length", ("hi", "a", "", "b"), [1, 0], [0, None]),
        ("answer_length", ("hi", "a", "word " * 40, "b"), [30, 0], [1, None]),
        ("answer_characters", ("hi", "a", " hi ", "b"), [4, 0], [2, None]),
        ("conversation_length", ("hi", "a", "b", "c", "d", "e"), [2.85, 3, 0], [2.85, 3, 0]),
        ("vote", ("hi", "a"), [0], [None]),
    ],
)
def test_then_and_now(name, turns, then, now):
    dialog = talk(*turns)
    assert COMPAT_2019[name][0](dialog) == [pytest.approx(value) for value in then]
    assert REWARDS[name](dialog) == [value if value is None else pytest.approx(value) for value in now]


def test_every_column_is_a_reward_of_ours():
    assert set(COMPAT_2019) <= set(REWARDS)
    assert all(kind in ("none", "zscore", "min_max") for _, kind in COMPAT_2019.values())
