"""Rewards read from the user's answer."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.user import answer_length, answers, sentiment


def dialog(*turns):
    return Dialog(id="d", messages=[{"role": role, "content": content} for role, content in turns])


def test_an_answer_is_everything_the_user_says_before_the_assistant_speaks_again():
    talk = dialog(
        ("user", "hi"), ("assistant", "a"), ("user", "one"), ("user", "two"), ("assistant", "b"), ("tool", "42"), ("assistant", "c"), ("user", "")
    )
    assert answers(talk) == ["one\ntwo", None, ""]


def test_sentiment_is_vaders_compound_score_of_the_answer():
    praise = "VADER is smart, handsome, and funny."
    talk = dialog(("assistant", "I hate this"), ("user", praise), ("assistant", "ok"), ("user", ""), ("assistant", "bye"))
    assert sentiment(talk) == [0.8316, 0.0, None]  # the score that VADER's own documentation gives for this sentence


def test_answer_length_counts_words_up_to_thirty():
    talk = dialog(("assistant", "a"), ("user", "I don't know , really !"), ("assistant", "b"), ("user", "word " * 45), ("assistant", "c"))
    assert answer_length(talk) == [pytest.approx(4 / 30), 1.0, None]


@pytest.mark.parametrize(
    ("text", "words"),
    [("你好吗？", 3), ("ラーメンが好き", 7), ("안녕하세요 반갑습니다", 2), ("I like 北京 a lot", 6), ("Wie geht's dir?", 3), ("...", 0), ("", 0)],
)
def test_answer_length_in_scripts_with_and_without_spaces(text, words):
    assert answer_length(dialog(("assistant", "a"), ("user", text))) == [pytest.approx(words / 30)]
