"""Ratios over units, their bootstrap intervals, and paired differences."""

import numpy as np
import pytest

from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import Measure, difference, estimate, unpaired_difference


def test_measure_is_a_ratio_of_sums():
    assert Measure(np.array([1.0, 5.0]), np.array([1.0, 3.0])).value == 6 / 4
    assert Measure(np.array([2.0, 4.0]), np.array([2.0, 4.0]), exponential=True).value == pytest.approx(np.e)
    assert Measure.mean([1.0, None, 3.0, float("nan")]).value == 2.0
    assert np.isnan(Measure.mean([None]).value)


def test_several_runs_pool_their_sums():
    found = estimate([Measure.mean([0.0, 1.0]), Measure.mean([2.0, 3.0])])
    assert (found.value, found.runs, found.units) == (1.5, 2, 2)
    assert found.low < 1.5 < found.high


def test_nothing_to_resample_gives_no_interval():
    one = estimate([Measure.whole(0.5)])
    assert (one.value, one.low, one.high) == (0.5, None, None)
    assert estimate([Measure.mean([None, None])]) is None
    infinite = estimate([Measure(np.array([np.inf, 1.0]), np.ones(2), exponential=True)])
    assert infinite.value == np.inf
    assert infinite.low is None


def test_the_rounding_of_sums_is_no_difference():
    """Ten rewards of 0.1 and one of 1 are the same return, though their sums differ in the last digit."""
    tenths, one = Measure.mean([sum([0.1] * 10)] * 64), Measure.mean([1.0] * 64)
    for found in (difference([tenths] * 3, [one] * 3), unpaired_difference(tenths, Measure.mean([1.0] * 63))):
        assert found.triple == [0.0, None, None]
    small = difference([Measure.mean([1e-20, 2e-20, 4e-20])], [Measure.mean([1e-20, 1e-20, 1e-20])])
    assert small.low < small.value < small.high  # whatever the unit
    worst = Measure.mean([np.inf, 1.0])
    assert difference([worst], [Measure.mean([1.0, 1.0])]).value == np.inf
    assert difference([worst], [worst]) is None


def test_one_run_has_the_interval_of_its_units():
    values = np.random.default_rng(0).normal(size=400)
    found = estimate([Measure.mean(values)])
    half = 1.96 * values.std(ddof=1) / np.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_the_interval_covers_the_truth_in_about_95_of_100_experiments():
    """Runs differ (0.5), conversations differ for every run alike (1.0), and single outcomes differ (1.0);
    the truth is 0."""
    rng = np.random.default_rng(1)
    hits, experiments, runs, units = 0, 300, 10, 40
    for number in range(experiments):
        table = (
            rng.normal(scale=0.5, size=(runs, 1))
            + rng.normal(size=(1, units))
            + rng.normal(size=(runs, units))
        )
        found = estimate([Measure.mean(row) for row in table], replicates=400, seed=number)
        hits += found.low <= 0 <= found.high
    assert 0.89 <= hits / experiments <= 0.99


def test_a_bootstrap_that_takes_conversations_for_independent_would_miss_their_shared_luck():
    rng = np.random.default_rng(2)
    shared = rng.normal(size=(1, 30))
    found = estimate([Measure.mean(row) for row in np.repeat(shared, 8, axis=0)])
    alone = estimate([Measure.mean(shared[0])])
    assert found.high - found.low == pytest.approx(
        alone.high - alone.low, rel=0.15
    )  # eight identical runs say no more than one


def test_pairing_removes_the_luck_of_the_conversations():
    luck = np.random.default_rng(3).normal(scale=5.0, size=200)
    change = difference([Measure.mean(luck + 0.3)], [Measure.mean(luck)])
    assert change.value == pytest.approx(0.3)
    assert change.low == pytest.approx(0.3)
    assert change.high == pytest.approx(0.3)
    unpaired = estimate([Measure.mean(luck)])
    assert unpaired.high - unpaired.low > 1.0


def test_the_same_seed_gives_the_same_interval():
    runs = [Measure.mean(np.random.default_rng(i).normal(size=20)) for i in range(3)]
    assert estimate(runs, seed=5) == estimate(runs, seed=5)
    assert estimate(runs, seed=5) != estimate(runs, seed=6)


def test_units_must_agree():
    with pytest.raises(UserError, match="met the same units, got 2 and 3"):
        difference([Measure.mean([1, 2])], [Measure.mean([1, 2, 3])])
    with pytest.raises(UserError, match="at least one run"):
        estimate([])
