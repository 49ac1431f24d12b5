"""Votes, ratings and the log's own rewards."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.rewards.human import logged, rating, upvotes, vote


def dialog(*replies, **fields):
    messages = [
        m
        for reply in replies
        for m in ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", **reply})
    ]
    return Dialog(id="d", messages=messages, **fields)


def test_votes_are_read_per_reply_and_do_not_apply_where_nobody_voted():
    voted = dialog(
        {"feedback": {"vote": 1}},
        {},
        {"feedback": {"vote": -1}},
        {"feedback": {"edit": "hey"}},
        {"feedback": {"vote": 0}},
    )
    assert vote(voted) == [1.0, None, -1.0, None, 0.0]


@pytest.mark.parametrize("given", [2, "up", True, 0.5, 10**400], ids=lambda given: repr(given)[:9])
def test_a_vote_that_is_none_of_the_three_is_an_error_that_names_the_dialog(given):
    with pytest.raises(UserError, match="dialog 'd', message 1: expected feedback.vote to be -1, 0 or 1"):
        vote(dialog({"feedback": {"vote": given}}))


def test_upvotes_are_the_sign_of_the_score():
    """0 is no vote up; where the score is unknown nobody knows."""
    scored = [{"feedback": {"score": score}} for score in (12, 1, 0, -3, 0.5)]
    assert upvotes(dialog(*scored, {}, {"feedback": {"vote": 1}})) == [1.0, 1.0, -1.0, -1.0, 1.0, None, None]


@pytest.mark.parametrize("given", ["12", True, [], {}, 10**400], ids=lambda given: repr(given)[:9])
def test_a_score_that_is_no_number_is_an_error_that_names_the_dialog(given):
    with pytest.raises(UserError, match="dialog 'd', message 1: expected feedback.score to be a finite"):
        upvotes(dialog({"feedback": {"score": given}}))


def test_replies_of_weight_zero_have_no_reward():
    assert vote(dialog({"weight": 0, "feedback": {"vote": 1}}, {"feedback": {"vote": -1}})) == [-1.0]


def test_a_rating_is_the_mean_of_the_ratings_or_the_named_one_on_the_last_reply():
    rated = dialog(
        {},
        {},
        meta={"ratings": {"quality": 5, "fluency": 2, "comment": "nice", "again": True, "huge": 10**400}},
    )
    assert rating(rated) == [None, 3.5]
    assert rating(rated, name="fluency") == [None, 2.0]
    assert rating(rated, name="empathy") == [None, None]
    assert rating(dialog({})) == [None]


def test_logged_is_the_messages_own_reward():
    assert logged(dialog({"reward": 8}, {}, {"reward": None}, {"reward": -0.5})) == [8.0, None, None, -0.5]
