"""Moments and correlations of reward components, by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rl_dialog.rewards.normalise import fit_normalisers
from rl_dialog.rewards.statistics import Statistics

NAN = math.nan


def test_figures_of_a_tiny_table_by_hand():
    table = np.array([[1.0, 2.0, 3.0], [2.0, NAN, 2.0], [3.0, 0.0, 3.0], [NAN, NAN, 0.0]])
    summary = Statistics.of(table).summary({"a": 1.0, "b": 1.0})
    a, b = summary["components"]["a"], summary["components"]["b"]
    assert a == {
        "weight": 1.0,
        "mean": 2.0,
        "std": pytest.approx(math.sqrt(2 / 3)),
        "min": 1.0,
        "max": 3.0,
        "coverage": 0.75,
    }
    assert b == {"weight": 1.0, "mean": 1.0, "std": 1.0, "min": 0.0, "max": 2.0, "coverage": 0.5}
    assert summary["sum"] == {
        "mean": 2.0,
        "std": pytest.approx(math.sqrt(1.5)),
        "min": 0.0,
        "max": 3.0,
        "coverage": 1.0,
    }
    # a and b both apply to replies 0 and 2: deviations (-1, 1) and (1, -1)
    assert summary["correlation"]["a"]["b"] == pytest.approx(-1.0)
    # a and the sum share replies 0, 1, 2: deviations (-1, 0, 1) and (1/3, -2/3, 1/3)
    assert summary["correlation"]["a"]["sum"] == pytest.approx(0.0, abs=1e-12)
    assert summary["correlation"]["b"]["sum"] is None  # over replies 0 and 2 the sum is 3 both times


def test_correlation_of_three_points_by_hand():
    # x deviates by (-1, 0, 1), y by (-4/3, -1/3, 5/3): 3 / sqrt(2 * 42/9)
    summary = Statistics.of(np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 4.0]])).summary({"x": 1.0})
    assert summary["correlation"]["x"]["sum"] == pytest.approx(3 / math.sqrt(2 * 42 / 9))
    assert summary["correlation"]["sum"]["x"] == summary["correlation"]["x"]["sum"]


def test_a_component_that_never_applies_or_never_varies_has_no_correlation():
    summary = Statistics.of(np.array([[NAN, 5.0, 1.0], [NAN, 5.0, 2.0]])).summary({"never": 1.0, "same": 0.0})
    assert summary["components"]["never"] == {
        "weight": 1.0,
        "mean": None,
        "std": None,
        "min": None,
        "max": None,
        "coverage": 0.0,
    }
    assert summary["components"]["same"]["std"] == 0.0
    assert set(summary["correlation"]["never"].values()) | set(summary["correlation"]["same"].values()) == {
        None
    }
    json.dumps(summary, allow_nan=False)


def test_a_small_spread_far_from_zero_is_shown():
    """Seconds since 1970."""
    table = np.array([[1_700_000_000.0 + (i % 4 == 0)] for i in range(8)]).repeat(2, axis=1)
    figures = Statistics.of(table).summary({"a": 1.0})["components"]["a"]
    assert figures | {"mean": 1_700_000_000.25, "min": 1_700_000_000, "max": 1_700_000_001} == figures
    assert figures["std"] == pytest.approx(math.sqrt(3) / 4)
    z = fit_normalisers({"a": "zscore"}, {"a": figures}, {})["a"]
    assert [z(value) for value in table[:2, 0]] == pytest.approx([math.sqrt(3), -1 / math.sqrt(3)])


def test_what_never_varies_correlates_with_nothing_whatever_rounding_says():
    """A component of .1 beside one that varies, in chunks whose means of it differ in their last bit."""
    chance = np.random.default_rng(0)
    parts = []
    for n in (333, 1000, 1000, 300):
        other = chance.normal(len(parts), 1, n)
        parts.append(Statistics.of(np.stack([np.full(n, 0.1), other, 0.1 + other], 1)))
    whole = parts[0]
    for part in [*parts[1:], Statistics.of(np.array([[0.9, NAN, 0.9]]))]:
        whole = whole.merge(part)
    found = whole.summary({"a": 1.0, "b": 1.0})["correlation"]
    assert found["a"]["b"] is None is found["b"]["a"] and found["b"]["sum"] == pytest.approx(1)


def test_merging_parts_equals_the_whole_also_far_from_zero_and_after_json():
    table = np.random.default_rng(1).normal(1e6, 1.0, (500, 4))
    table[np.random.default_rng(2).random(table.shape) < 0.3] = NAN
    whole = Statistics.of(table).summary(dict.fromkeys("abc", 1.0))
    merged = Statistics.of(table[:0])
    for part in (table[:7], table[7:8], table[8:400], table[400:]):
        merged = merged.merge(Statistics.from_dict(json.loads(json.dumps(Statistics.of(part).to_dict()))))
    merged = merged.summary(dict.fromkeys("abc", 1.0))
    both = ~np.isnan(table[:, :2]).any(axis=1)
    assert merged["correlation"]["a"]["b"] == pytest.approx(
        np.corrcoef(table[both, 0], table[both, 1])[0, 1], abs=1e-9
    )
    for name in "abc":
        assert merged["components"][name] == pytest.approx(whole["components"][name], rel=1e-9)
