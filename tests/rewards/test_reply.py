"""Rewards read from the assistant's own words."""

from __future__ import annotations

import re
import time

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.reply import inner_repetition, question, repetition, reply_length, reply_sentiment
from rl_dialog.rewards.words import _WORD


def said(*replies):
    asked = {"role": "user", "content": "dogs what?"}
    return Dialog(
        id="d", messages=[m for reply in replies for m in (asked, {"role": "assistant", "content": reply})]
    )


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("how are you ?", 1.0),
        ("show me ?", 0.5),
        ("tell me how", 0.5),
        ("What's up?", 1.0),
        ("你好吗？", 0.5),
        ("somewhat nowhere", 0.0),
        ("WHY", 0.5),
        ("what? what? why?", 1.0),
        ("", 0.0),
    ],
)
def test_question_is_half_a_mark_and_half_a_word_of_its_own(reply, value):
    assert question(said(reply)) == [value]


def test_repetition_counts_content_words_used_in_earlier_replies():
    assert repetition(said("dogs run", "dogs eat dogs")) == [0.0, -1.0]
    assert repetition(said("Dogs run.", "cats sleep", "the DOGS run and cats run")) == [0.0, 0.0, -3.0]


def test_repetition_does_not_count_function_words_or_the_users_words():
    assert repetition(said("I am at the station", "you are at the airport", "dogs")) == [0.0, 0.0, 0.0]


def test_asking_the_same_question_again_is_repetition():
    assert repetition(said("where are you?", "where are they?")) == [0.0, -1.0]


def test_repetition_without_spaces_compares_neighbouring_characters():
    assert repetition(said("我喜欢狗", "我喜欢猫")) == [0.0, -2.0]  # 我喜 and 喜欢


def test_context_counts_as_used_but_has_no_reward_of_its_own():
    talk = said("dogs run", "dogs eat")
    talk.messages[1]["weight"] = 0
    assert repetition(talk) == [-1.0]


def test_inner_repetition_counts_content_words_said_again_in_the_reply():
    assert inner_repetition(said("dogs and the dogs and dogs", "cats eat dogs", "", "where where?")) == [
        -2.0,
        0.0,
        0.0,
        -1.0,
    ]


def test_reply_length_counts_words():
    assert reply_length(said("I don't know , really !", "", "你好吗？")) == [4.0, 0.0, 3.0]


def test_vowel_signs_and_accents_are_part_of_their_word():
    """Hindi, Tamil, Arabic and Hebrew with their signs, Latin with a combining accent, a dotted capital."""
    texts = ("नमस्ते दुनिया", "தமிழ் மொழி", "مَرْحَبًا بك", "שָׁלוֹם לך", "cafe\u0301 noir", "İyi gün")
    assert reply_length(said(*texts)) == [2.0] * len(texts)
    assert repetition(said("नमस्ते", "नमक", "नमस्ते")) == [0.0, 0.0, -1.0]
    assert reply_length(said("1\ufe0f\u20e3 ok \u2764\ufe0f")) == [2.0]  # signs of emoji are none


def test_words_are_found_about_as_fast_as_plain_ones():
    text = "the quick brown fox, schön daß wir's haben; привет как дела " * 500

    def seconds(pattern):
        began = time.perf_counter()
        pattern.findall(text)
        return time.perf_counter() - began

    taken = [[seconds(pattern) for pattern in (_WORD, re.compile(r"\w+"))] for _ in range(7)]
    ours, plain = (min(column) for column in zip(*taken, strict=True))
    assert ours < 4 * plain


def test_reply_sentiment_is_vader_s_of_the_reply():
    assert reply_sentiment(said("VADER is smart, handsome, and funny.", "")) == [0.8316, 0.0]
