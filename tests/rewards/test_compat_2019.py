"""The 2019 columns with their defects, beside what we compute."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.compat_2019 import COMPAT, COMPAT_2019, SELF_PLAY_2019
from rl_dialog.rewards.scorers import EMOJI_WEIGHTS, Scorer


def talk(*turns):
    """user, assistant, user, assistant, ..."""
    return Dialog(
        id="d",
        messages=[{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)],
    )


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
        ("question", ("hi", "What's up?"), [1], [1]),  # it lower-cased, and its tokenizer cut contractions
        ("question", ("hi", "Who? me (why)"), [1], [1]),
        ("question", ("hi", "tell me how."), [0.5], [0.5]),
        ("question", ("hi", "a how-to, somewhat"), [0], [0.5]),
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


FELT = Scorer(
    "felt",
    lambda texts: [{"glad": 0.5, "sad": -0.5, "_": 0.1, "bot": 0.3}.get(text, 0.0) for text in texts],
    0.0,
)


@pytest.mark.parametrize(
    ("name", "turns", "values"),
    [
        ("sentiment", ("glad", "a", "sad", "b", "", "c", "glad", "d"), [-0.5, 0, 0.5, 0]),
        (
            "sentiment_transition",
            ("glad", "a", "sad", "b", "", "c"),
            [-1.0, 0.1 + 0.5, 0.0],
        ),  # "_" for what is empty or missing
        ("sentiment_sum", ("glad", "a", "sad", "b"), [-1.0 + 0.6] * 2),
        ("sentiment_slope", ("hi", "a", "sad", "b", "glad", "c"), [1.0] * 3),  # (-0.5 - 0.5) / (0 - 1)
        (
            "sentiment_slope",
            ("hi", "a", "sad", "b", "sad", "c"),
            [0.25] * 3,
        ),  # the last row's 0 is the highest: (-0.5 - 0) / (0 - 2)
        (
            "sentiment_slope",
            ("", "a", "glad", "b", "sad", "c", "glad", "d", "sad", "e"),
            [1.0] * 5,
        ),  # the first -0.5, the last 0.5: -1 / (1 - 2)
        ("sentiment_slope", ("hi", "a"), [0.0]),
    ],
)
def test_columns_of_sentiment_by_hand(name, turns, values):
    assert COMPAT_2019[name][0](talk(*turns), sentiment=FELT) == [pytest.approx(value) for value in values]


def test_a_uniform_emoji_softmax_scores_as_in_2019():
    uniform = Scorer("uniform", lambda texts: [sum(EMOJI_WEIGHTS.values()) / 64] * len(texts), 0.0)
    assert COMPAT_2019["sentiment"][0](talk("hi", "a", "b", "c"), sentiment=uniform) == [0.0703125, 0.0]


@pytest.mark.parametrize(
    ("name", "turns", "values"),
    [
        ("you", ("hi", "you and your young", "so", "no"), [3, 0]),
        ("question", ("hi", "show me ?", "so", "how", "and", "you?"), [1, 0, 0]),
        ("sentiment", ("hi", "a", "glad", "b", "glad <unk>"), [0.5, -0.5]),
        ("sentiment", ("hi", "a"), [0.1]),
        ("reply_sentiment", ("hi", "bot", "so", "bot <unk>"), [0.3, -0.5]),
        ("toxicity", ("hi", "you idiot", "so", "you idiot are depressed", "oh", "fine"), [-1, -0.2, 0]),
        ("reply_length", ("hi", "well , i don't know !"), [4]),
    ],
)
def test_self_play_by_hand(name, turns, values):
    function = SELF_PLAY_2019[name][0]
    scorer = {"sentiment": FELT} if "sentiment" in name else {}
    assert function(talk(*turns), **scorer) == [pytest.approx(value) for value in values]


def test_every_column_is_a_reward_of_ours():
    for known in COMPAT.values():
        assert set(known) <= set(REWARDS)
        assert all(kind in ("none", "zscore", "min_max") for _, kind in known.values())
