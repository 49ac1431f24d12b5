"""Rewards read from the user's answer."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.user import (
    answer_characters,
    answer_length,
    answers,
    laughter,
    questions,
    sentiment,
    sentiment_slope,
    sentiment_sum,
    sentiment_transition,
    sentiment_variance,
    word_similarity,
)


def dialog(*turns):
    return Dialog(id="d", messages=[{"role": role, "content": content} for role, content in turns])


def test_an_answer_is_everything_the_user_says_before_the_assistant_speaks_again():
    talk = dialog(
        ("user", "hi"),
        ("assistant", "a"),
        ("user", "one"),
        ("user", "two"),
        ("assistant", "b"),
        ("tool", "42"),
        ("assistant", "c"),
        ("user", ""),
    )
    assert answers(talk) == ["one\ntwo", None, ""]


def test_sentiment_is_vaders_compound_score_of_the_answer():
    praise = "VADER is smart, handsome, and funny."
    talk = dialog(
        ("assistant", "I hate this"),
        ("user", praise),
        ("assistant", "ok"),
        ("user", ""),
        ("assistant", "bye"),
    )
    assert sentiment(talk) == [
        0.8316,
        0.0,
        None,
    ]  # the score that VADER's own documentation gives for this sentence


def test_answer_length_counts_words_up_to_thirty():
    talk = dialog(
        ("assistant", "a"),
        ("user", "I don't know , really !"),
        ("assistant", "b"),
        ("user", "word " * 45),
        ("assistant", "c"),
    )
    assert answer_length(talk) == [pytest.approx(4 / 30), 1.0, None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("你好吗？", 3),
        ("ラーメンが好き", 7),
        ("안녕하세요 반갑습니다", 2),
        ("I like 北京 a lot", 6),
        ("Wie geht's dir?", 3),
        ("...", 0),
        ("", 0),
    ],
)
def test_answer_length_in_scripts_with_and_without_spaces(text, words):
    assert answer_length(dialog(("assistant", "a"), ("user", text))) == [pytest.approx(words / 30)]


def test_a_question_is_everything_the_user_said_since_the_assistant_last_spoke():
    talk = dialog(
        ("assistant", "a"),
        ("user", "one"),
        ("tool", "42"),
        ("user", "two"),
        ("assistant", "b"),
        ("assistant", "c"),
    )
    assert questions(talk) == [None, "one\ntwo", None]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("hahaha", 3),
        ("ha", 1),
        ("Haha, so funny, haha", 4),
        ("HAHAHAHAHAHA", 4),
        ("ahahah", 2),
        ("bwahaha", 2),
        ("haaaha", 2),
        ("what do you have", 0),  # the original counts 2
        ("that shape, Harry", 0),
        ("", 0),
    ],
)
def test_laughter_counts_has_in_words_that_are_laughter(answer, value):
    assert laughter(dialog(("assistant", "a"), ("user", answer), ("assistant", "b"))) == [value, None]


def test_answer_characters():
    assert answer_characters(
        dialog(
            ("assistant", "a"),
            ("user", " hi there \n"),
            ("assistant", "b"),
            ("user", "你好"),
            ("assistant", "c"),
        )
    ) == [
        8,
        2,
        None,
    ]


def test_word_similarity_is_the_share_of_the_reply_that_the_answer_takes_up():
    """dogs, where: of the reply's five words only "dogs" carries meaning, is no question word and comes
    back."""
    talk = dialog(
        ("assistant", "where do the dogs sleep"),
        ("user", "where? dogs bark"),
        ("assistant", "..."),
        ("user", "dogs"),
        ("assistant", "dogs"),
    )
    assert word_similarity(talk) == [pytest.approx(1 / 5), 0.0, None]


GOOD, BAD = "I love it, great!", "I hate it, terrible!"


def test_feelings_of_a_conversation():
    """VADER gives +g to the good and -b to the bad turn. Answers g, -b, 0 at replies 0, 1, 2: slope (g + b) /
    (0 - 1), variance around the mean."""
    (g,), (b,) = (sentiment(dialog(("assistant", "a"), ("user", text)))[:1] for text in (GOOD, BAD))
    assert g > 0.8 and b < -0.7
    talk = dialog(
        ("user", BAD),
        ("assistant", "a"),
        ("user", GOOD),
        ("assistant", "b"),
        ("user", BAD),
        ("assistant", "c"),
        ("user", "so"),
        ("assistant", "d"),
    )
    assert sentiment_transition(talk) == [pytest.approx(g - b), pytest.approx(b - g), pytest.approx(-b), None]
    assert sentiment_sum(talk) == [pytest.approx(-b)] * 4
    assert sentiment_slope(talk) == [pytest.approx((g - b) / (0 - 1))] * 4
    mean = (g + b) / 3
    assert sentiment_variance(talk) == [pytest.approx(((g - mean) ** 2 + (b - mean) ** 2 + mean**2) / 3)] * 4


def test_feelings_of_a_conversation_that_nobody_answered():
    alone = dialog(("user", GOOD), ("assistant", "a"))
    for reward in (sentiment_transition, sentiment_sum, sentiment_variance, sentiment_slope):
        assert reward(alone) == [None]
    even = dialog(("user", GOOD), ("assistant", "a"), ("user", GOOD), ("assistant", "b"), ("user", GOOD))
    assert (
        sentiment_slope(even) == [0.0, 0.0]
        and sentiment_variance(even) == [0.0, 0.0]
        and sentiment_sum(even) == [0.0, 0.0]
    )
