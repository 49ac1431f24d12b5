"""Rewards that are missing, by hand."""

import numpy as np

from rl_dialog.data.missing import to_go, unrated

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
