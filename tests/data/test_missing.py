"""Rewards that are missing, by hand."""

import warnings

import numpy as np
import pytest

from rl_dialog.data.missing import judged_by, to_go, unrated

NAN = np.nan


def test_what_is_known_of_what_follows(make_row):
    """Rewards ?, 1, ?, 2, ?: the first two lead to 3, the next two to 2, the last to nobody knows what."""
    rewards = np.array([NAN, 1, NAN, 2, NAN], np.float32)
    np.testing.assert_array_equal(to_go(rewards), np.array([3, 3, 2, 2, NAN], np.float32))
    assert to_go(rewards).dtype == np.float32 and len(to_go(rewards[:0])) == 0
    np.testing.assert_array_equal(make_row([9, 1, 9, 1], [(1, 1, NAN), (3, 3, 0.0)]).returns, [0, 0])
    np.testing.assert_array_equal(make_row([9, 1, 9, 1], [(1, 1, NAN), (3, 3, NAN)]).returns, [NAN, NAN])


def test_how_many_are_unrated():
    assert unrated(np.array([0.0, 1.0])) == ""
    assert unrated(np.array([NAN] * 1500 + [1.0])) == " (1,500 of 1,501 have no reward)"


@pytest.mark.parametrize(
    ("dialogs", "by", "told"),
    [
        ([(0, 0, 1), (0, -1)], "to_go", "5 of 5 replies have a reward;"),  # success at the end
        ([(-1, 2, 0), (1, 0, 0)], "to_go", "6 of 6"),  # what costs first may pay later
        ([(-1, NAN, 1), (-1, 1)], "to_go", "4 of 5"),  # nearly all are rated
        ([(NAN, NAN, 1), (NAN, NAN)], "to_go", "1 of 5 replies have a reward, all of them last ones;"),
        ([(1, NAN, NAN), (NAN, NAN, 1)], "reply", "2 of 6"),  # votes, few of them
        ([(NAN, 1), (1, NAN)], "reply", "2 of 4"),
        ([(NAN, NAN)], "reply", "0 of 2"),
        ([(3,), (-1,)], "reply", ""),  # both are the same
    ],
)
def test_replies_are_judged_by_what_follows_unless_few_are_rated(dialogs, by, told):
    rewards = [np.array(dialog, np.float32) for dialog in dialogs]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert judged_by("auto", "to_go", rewards, who="kto") == by
        assert judged_by("reply", "to_go", rewards, who="kto") == "reply"
    assert [f"kto judges by {by}: {told}" in str(warning.message) for warning in warned] == [True] * bool(
        told
    )
