"""Scores over many worlds: the scale, the interquartile mean by hand, and whether the interval covers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import trim_mean

from rl_dialog.evaluation.aggregate import Scale, aggregate, interquartile_mean, scale_of


def test_a_scale_goes_from_the_logs_to_the_optimum_or_the_best_player() -> None:
    known = {"behaviour policy": -4.0, "random moves": -9.0, "optimum": -2.0}
    assert scale_of(known) == Scale(-4.0, -2.0, "optimum")
    assert scale_of(known).score(-2.5) == 0.75 and scale_of(known).score(-5.0) == -0.5
    assert scale_of({"behaviour policy": 0.1, "good": 0.9, "mediocre": 0.4}) == Scale(0.1, 0.9, "good")
    for nothing in ({}, {"optimum": 1.0}, {"behaviour policy": 1.0}, {"behaviour policy": 1.0, "good": 1.0}):
        assert scale_of(nothing) is None


def test_the_middle_half_by_hand() -> None:
    """Of 7 scores one is cut off at each end, of 8 two, of 3 none."""
    assert interquartile_mean(np.array([9.0, 1, 2, 3, 4, 5, -100])) == pytest.approx(3.0)
    assert interquartile_mean(np.array([8.0, 7, 6, 5, 4, 3, 2, -90])) == pytest.approx(4.5)
    assert interquartile_mean(np.array([0.0, 1, 5])) == pytest.approx(2.0)


def test_every_world_counts_as_often_as_it_did() -> None:
    """Two worlds whose seeds agree: nothing is drawn that could differ, however far apart the worlds are."""
    found = aggregate([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert (found.value, found.low, found.high, found.runs, found.units) == (0.5, None, None, 3, 2)
    spread = aggregate([[0.0, 0.2], [1.0, 1.0]])
    # IQM of four scores is the mean of the middle two, of which only the larger of the first world's is drawn
    assert (spread.low, spread.value, spread.high) == pytest.approx((0.5, 0.6, 0.6))
    assert aggregate([[], []]) is None and aggregate([[0.3]]).low is None


def test_an_outlier_moves_it_little() -> None:
    scores = [[0.5, 0.6, 0.55], [0.7, 0.65, 0.6], [0.4, 0.5, 0.45]]
    crashed = [*scores[:2], [0.4, 0.5, -50.0]]
    assert abs(aggregate(scores).value - aggregate(crashed).value) < 0.05


def test_it_is_a_trimmed_mean_and_its_interval_covers() -> None:
    """The interquartile mean is scipy's trimmed mean by a quarter, as in rliable; of 200 experiments with 20
    seeds in each of 4 worlds the interval has the true value in about 95 %."""
    rng = np.random.default_rng(3)
    scores = rng.normal(0.6, 0.3, size=(5, 7))
    assert interquartile_mean(scores) == pytest.approx(trim_mean(scores, 0.25, axis=1))
    covered = 0
    for number in range(200):
        drawn = rng.normal(0.5, 0.2, size=(4, 20))  # symmetric: the true value is .5
        found = aggregate(list(drawn), replicates=300, seed=number)
        covered += found.low <= 0.5 <= found.high
    assert 175 <= covered <= 198
