"""Figures of texts and orderings by hand arithmetic."""

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation.metrics import (
    answer_measures,
    distinct,
    find_pairs,
    inner_repetition,
    pairwise_accuracy,
    repeats,
    reward_measures,
    text_measures,
)


def dialog(*turns, id="d", truncated=False):
    """dialog(("user", "hi"), ("assistant", "hello", 1.0), ...)"""
    messages = [
        {"role": turn[0], "content": turn[1]} | ({"reward": turn[2]} if len(turn) > 2 else {})
        for turn in turns
    ]
    return Dialog(id, messages, truncated=truncated)


def test_distinct_n():
    texts = ["a b a b", "a b c"]
    assert distinct(texts, 1) == 3 / 7  # a b c of a b a b a b c
    assert distinct(texts, 2) == 3 / 5  # ab ba bc of ab ba ab ab bc; no bigram crosses two texts
    assert np.isnan(distinct(["", "!"], 1))


def test_repetition():
    assert inner_repetition("a b c a b c a") == (2, 5)  # abc bca cab abc bca
    assert inner_repetition("a b") == (0, 0)
    assert repeats(["Do you like music?"], "do you like MUSIC")
    assert repeats(["a b c d e f g h i"], "a b c d e f g h i j")  # 9 of 10 words shared
    assert not repeats(["a b c d"], "a b c e")  # 3 of 5
    assert repeats([""], "")
    assert not repeats([], "hello")


def test_text_measures():
    talks = [
        dialog(("user", "u"), ("assistant", "a b"), ("user", "u"), ("assistant", "a b")),
        dialog(("user", "u"), ("assistant", "")),
    ]
    found = text_measures(talks, [[4, 6], [0]], [[True, True], [False]])
    expected = {
        "tokens": 10 / 3,
        "words": 4 / 3,
        "repeated": 1 / 3,
        "empty": 1 / 3,
        "unfinished": 1 / 3,
        "replies": 3 / 2,
        "distinct_1": 2 / 4,
    }
    assert {name: found[name].value for name in expected} == pytest.approx(expected)
    assert np.isnan(found["rep_3"].value)


def test_rewards_count_where_they_apply():
    found = reward_measures({"own": [[1.0, 4.0], [None]], "never": [[None, None], [None]]})
    assert found["reward/own"].value == 2.5
    assert found["reward/own"].denominator.tolist() == [2, 0]
    assert np.isnan(found["reward/never"].value)


def test_pairs_share_a_context_and_differ_in_outcome():
    talks = [
        dialog(("user", "coffee"), ("assistant", "sure", 1.0)),  # reply 0
        dialog(("user", "coffee"), ("assistant", "no", 0.0)),  # reply 1
        dialog(("user", "coffee"), ("assistant", "what", 0.0)),  # reply 2
        dialog(("user", "tea"), ("assistant", "no", 0.0)),  # reply 3: alone
        dialog(
            ("user", "coffee"), ("assistant", "sure", 0.0)
        ),  # reply 4: the text of reply 0, so no critic can tell them apart
    ]
    pairs = find_pairs(talks)
    assert set(zip(pairs.better.tolist(), pairs.worse.tolist(), strict=True)) == {(0, 1), (0, 2)}
    assert pairs.contexts == 1


def test_of_many_pairs_every_reply_is_in_as_many():
    """The first 200 in order would all have the first reply in them."""
    talks = [dialog(("user", "hi"), ("assistant", f"reply {n}", float(n))) for n in range(150)]
    pairs = find_pairs(talks)
    assert len(pairs.better) == 200 and (pairs.better > pairs.worse).all()
    assert len(set(zip(pairs.better.tolist(), pairs.worse.tolist(), strict=True))) == 200
    met = np.bincount(np.concatenate([pairs.better, pairs.worse]), minlength=150)
    assert met.min() >= 2 and met.max() <= 4
    assert len(find_pairs(talks[:20]).better) == 190  # all of them, where they are fewer


def test_the_outcome_of_a_reply_is_what_follows_it():
    quick = dialog(("user", "hi"), ("assistant", "flatter", 0.4), ("user", "bah"), ("assistant", "bye", -1.0))
    slow = dialog(("user", "hi"), ("assistant", "ask", -0.1), ("user", "oh"), ("assistant", "tell", 0.5))
    pairs = find_pairs([quick, slow])
    assert (pairs.better.tolist(), pairs.worse.tolist()) == (
        [2],
        [0],
    )  # 0.4 beats -0.1 at once, -0.6 loses to 0.4 in the end


def test_an_outcome_of_which_nothing_is_known_is_in_no_pair():
    """Known of the replies to "hi": 1 (said of the reply after it), 0, and of the third one nothing."""
    talks = [
        dialog(("user", "hi"), ("assistant", "later", None), ("user", "so"), ("assistant", "yes", 1.0)),
        dialog(("user", "hi"), ("assistant", "now", 0.0), ("user", "so"), ("assistant", "no", None)),
        dialog(("user", "hi"), ("assistant", "never", None), ("user", "so"), ("assistant", "no")),
    ]
    pairs = find_pairs(talks)
    assert (pairs.better.tolist(), pairs.worse.tolist()) == ([0], [2])


def test_replies_that_call_tools_are_pairs_by_what_they_call():
    """What follows different calls has different contexts."""
    talks = []
    for place, text, reward in (("Rome", "warm", 1.0), ("Oslo", "cold", 0.0)):
        call = {"id": place, "type": "function", "function": {"name": "go", "arguments": place}}
        messages = [
            {"role": "user", "content": "where?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reward": reward},
            {"role": "tool", "content": "there"},
            {"role": "assistant", "content": text, "reward": reward},
        ]
        talks.append(Dialog(place, messages))
    pairs = find_pairs(talks)
    assert (pairs.better.tolist(), pairs.worse.tolist()) == ([0], [2])


def test_pairwise_accuracy():
    talks = [
        dialog(("user", "c"), ("assistant", text, reward))
        for text, reward in (("good", 1.0), ("bad", 0.0), ("worse", 0.0))
    ]
    talks += [
        dialog(("user", "t"), ("assistant", text, reward)) for text, reward in (("fine", 2.0), ("poor", 1.0))
    ]
    pairs = find_pairs(talks)
    measure = pairwise_accuracy(np.array([0.5, 0.1, 0.9, 0.3, 0.3]), pairs)  # right, wrong; tie
    assert measure.numerator.tolist() == [1.0, 0.5]
    assert measure.denominator.tolist() == [2.0, 1.0]
    assert measure.value == 0.5
    assert (
        pairwise_accuracy(np.array([0.5, 0.1, np.nan, 1.0, 0.0]), pairs).value == 1.0
    )  # what has no score is left out


def test_answers_against_the_log_are_means_over_dialogs_units():
    """Two contexts of dialog a and one of b: lengths 2, 4 and 9 less those of the log, 1 each."""
    longer = {
        "longer": lambda answers, logged: [len(a) - len(b) for a, b in zip(answers, logged, strict=True)]
    }
    measures = answer_measures(["a", "b", "a"], ["ab", "abcdefghi", "abcd"], ["x", "y", "z"], longer)
    measure = measures["answer/longer"]
    assert measure.numerator.tolist() == [1 + 3, 8] and measure.denominator.tolist() == [2, 1]
    assert measure.value == 4
    assert answer_measures([], [], [], longer) == {}
