"""Fixed words of the assistant: found as words, not as letters, and not when they are denied."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.phrases import (
    CHEERFUL,
    COMPLIMENTS,
    POLITENESS,
    SUPPORTIVE,
    cheerful,
    compliments,
    politeness,
    supportive,
    you,
)


def said(*replies):
    return Dialog(
        id="d",
        messages=[
            m
            for reply in replies
            for m in ({"role": "user", "content": "hi"}, {"role": "assistant", "content": reply})
        ],
    )


@pytest.mark.parametrize(
    ("reward", "phrases"),
    [(compliments, COMPLIMENTS), (politeness, POLITENESS), (cheerful, CHEERFUL), (supportive, SUPPORTIVE)],
)
def test_every_phrase_of_the_list_counts_in_any_spelling(reward, phrases):
    for phrase in phrases:
        loud, curled, cut = (
            phrase.upper(),
            phrase.replace("'", "’"),
            phrase.replace("'", " '"),
        )  # the last as tokenised logs have it
        assert reward(said(phrase, f"Well, {loud}!", f"oh {curled} then", cut)) == [1.0] * 4, phrase


@pytest.mark.parametrize(
    ("reward", "reply", "value"),
    [
        (cheerful, "I am happy", 1),
        (cheerful, "that makes me unhappy", 0),  # the original finds "happy" in it
        (cheerful, "I'm not really very happy", 0),
        (cheerful, "I don't feel great", 0),
        (cheerful, "No, I am happy", 1),  # the denial is a clause of its own
        (cheerful, "I was sad. Not now: great!", 1),
        (cheerful, "a greatly reduced price", 0),
        (politeness, "no worries", 1),
        (politeness, "pleased", 0),
        (politeness, "thanks", 1),
        (supportive, "you are not alone", 1),
        (supportive, "You're right about that", 1),
        (supportive, "your right hand", 0),
        (compliments, "I like your hat", 0),
        (compliments, "I like you", 1),
        (compliments, "I can't say I like you", 0),
        (compliments, "I can't really say that I like you", 1),  # too far away
        (compliments, "I can't say: I like you", 1),
        (compliments, "", 0),
    ],
)
def test_phrases_are_words_that_nobody_denies(reward, reply, value):
    assert reward(said(reply)) == [float(value)]


@pytest.mark.parametrize(
    ("reply", "value"),
    [("You?", 1), ("you're in", 1), ("you 're in", 1), ("your young yoyo", 0), ("thank you", 1), ("", 0)],
)
def test_you_is_a_word_of_its_own(reply, value):
    assert you(said(reply)) == [float(value)]
