"""Normalisers by hand, and what they do with data they were not fitted on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rl_dialog.errors import UserError
from rl_dialog.rewards.normalise import (
    KNOTS,
    Normaliser,
    fit_moments,
    fit_normalisers,
    fit_rank,
    read_kinds,
    weighted_sum,
)
from rl_dialog.rewards.statistics import Statistics


def test_zscore_and_min_max_by_hand():
    """The conversation lengths 2.85, 3, 0 of spec: z = .6521, .7607, -1.4128."""
    x = np.array([2.85, 3.0, 0.0])
    figures = {"mean": x.mean(), "std": x.std(), "low": x.min(), "high": x.max()}
    z, scaled = fit_moments("zscore", **figures), fit_moments("min_max", **figures)
    assert [z(value) for value in x] == pytest.approx([0.6521, 0.7607, -1.4128], abs=5e-5)
    assert [scaled(value) for value in (*x, 6.0)] == pytest.approx([0.95, 1.0, 0.0, 2.0])


def test_rank_counts_half_of_the_equal():
    """Of 1, 1, 1, 3: three are 1, so its rank is 1.5 / 4; 3 has 3 below it and itself half: 3.5 / 4. In
    between a line, outside flat."""
    rank = fit_rank(np.array([1.0, 3.0, 1.0, 1.0]))
    assert [rank(x) for x in (1, 3, 2, 0, 9)] == pytest.approx([0.375, 0.875, 0.625, 0.375, 0.875])


def test_rank_of_many_values_keeps_few_knots():
    values = np.random.default_rng(0).normal(size=50_000) ** 3
    rank = fit_rank(values)
    assert len(rank.values) <= KNOTS
    exact = np.searchsorted(np.sort(values), values[:500]) / len(values)
    assert np.abs([rank(x) for x in values[:500]] - exact).max() < 2e-3


def test_a_component_that_never_varies_is_no_division_by_zero():
    figures = {"mean": 2.0, "std": 0.0, "low": 2.0, "high": 2.0}
    assert fit_moments("zscore", **figures)(2.0) == 0 and fit_moments("min_max", **figures)(2.0) == 0
    assert fit_rank(np.array([2.0, 2.0]))(2.0) == 0.5


@pytest.mark.parametrize("value", [1 / 30, 1 / 3, 13 / 3, -1e9 / 7])
def test_the_rounding_of_sums_is_no_spread(value: float):
    """Three parts of 50 replies are merged; zscore made 1e6 of it."""
    parts = [Statistics.of(np.full((50, 2), value * (1 + 1e-16 * n))) for n in range(3)]
    row = parts[0].merge(parts[1]).merge(parts[2]).summary({"same": 1.0})["components"]["same"]
    assert row["std"] == 0.0
    for kind in ("zscore", "min_max"):
        normaliser = fit_normalisers({kind: kind}, {kind: row}, {})[kind]
        assert abs(normaliser(value)) <= 1e-8 * abs(value)


def test_the_sum_weighs_what_applies():
    normalisers = {"a": Normaliser("zscore", 1.0, 2.0)}
    assert (
        weighted_sum({"a": 5.0, "b": 3.0}, {"a": 0.5, "b": 2.0, "c": 7.0}, normalisers)
        == 0.5 * 2.0 + 2.0 * 3.0
    )
    assert weighted_sum({}, {"a": 1.0}, normalisers) is None
    assert weighted_sum({"b": 3.0}, {"a": 1.0, "b": 0.0}, normalisers) is None  # b is reported, not added
    assert weighted_sum({"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 0.0}, normalisers) == 0.0  # (1 - 1) / 2


def test_manifest_round_trip():
    for normaliser in (Normaliser("zscore", 0.1, 0.3), fit_rank(np.array([0.1, 0.7, 0.7]))):
        assert Normaliser.from_dict(json.loads(json.dumps(normaliser.to_dict()))) == normaliser
    for wrong in (
        {"kind": "zscores"},
        {"kind": "zscore", "scale": 0.0},
        {"kind": "rank"},
        {"kind": "zscore", "slope": 2.0},
    ):
        with pytest.raises(UserError, match="expected a normaliser"):
            Normaliser.from_dict(wrong)


def test_kinds_for_all_and_for_one():
    names = ["vote", "sentiment", "you"]
    assert read_kinds(["zscore", "vote=none", "you=rank"], names) == {"sentiment": "zscore", "you": "rank"}
    assert read_kinds([], names) == read_kinds(["none"], names) == {}
    for wrong, message in (
        ("zscores", "expected one of none, zscore"),
        ("votes=rank", "expected one of the rewards of this run, vote, sent"),
    ):
        with pytest.raises(UserError, match=message):
            read_kinds([wrong], names)
