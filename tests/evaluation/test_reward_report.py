"""The reward report's figures by hand; the whole report is written in tests/pipelines/test_prepare.py."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation.reward_report import _sums, auc, human_labels, reward_table
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.hacks import try_hacks


def test_auc_counts_pairs():
    """Good 3, 1; bad 2, 1, 0: of six pairs 3 wins all three, 1 wins one and ties one: 4.5 / 6."""
    scores, good = np.array([3.0, 1.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False, False])
    assert auc(scores, good) == pytest.approx(4.5 / 6)
    assert auc(-scores, good) == pytest.approx(1.5 / 6)
    assert np.isnan(auc(scores, np.ones(5, bool)))


def test_weights_count_replies_several_times():
    rng = np.random.default_rng(0)
    scores, good, weights = rng.integers(0, 5, 40).astype(float), rng.random(40) < 0.4, rng.integers(0, 4, 40)
    assert auc(scores, good, weights) == pytest.approx(auc(np.repeat(scores, weights), np.repeat(good, weights)))


def reply(**fields):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "rewards": {}, "reward": 0.0, **fields}]
    return Dialog(id="d", messages=messages)


def test_a_missing_reward_is_no_zero_in_the_table():
    voted = reply(rewards={"vote": 1.0}, reward=2.0)
    table = reward_table([reply(reward=None), reply(reward=0.0), voted], ["vote"])
    np.testing.assert_array_equal(table["sum"], [np.nan, 0, 2])
    np.testing.assert_array_equal(table["vote"], [np.nan, np.nan, 1])


def test_a_hack_changes_no_reward_that_nobody_gave():
    """The sum of nothing is missing for the logged reply and for the hacked one, so nothing is won."""
    how = {"weights": {"vote": 1.0, "question": 0.0}, "normalisers": {}}
    total = partial(_sums, rewards={name: REWARDS[name] for name in how["weights"]}, **how)
    assert [total(reply()), total(reply(feedback={"vote": -1}))] == [[None], [-1.0]]
    assert try_hacks([reply()], {"sum": total}) == {"sum": {}}


def test_labels_are_votes_or_logged_numbers_of_two_kinds():
    votes = [reply(feedback={"vote": vote}) for vote in (1, -1, 0)] + [reply()]
    what, good, known = human_labels(votes)
    assert (what, good.tolist(), known.tolist()) == ("vote", [True, False, False, False], [True, True, False, False])
    what, good, known = human_labels([reply(rewards={"logged": value}) for value in (1.0, 0.0)] + [reply()])
    assert (what, good.tolist(), known.tolist()) == ("logged", [True, False, False], [True, True, False])
    assert human_labels([reply(rewards={"logged": value}) for value in (1.0, 0.0, 0.5)]) is None
    assert human_labels([reply()]) is None
