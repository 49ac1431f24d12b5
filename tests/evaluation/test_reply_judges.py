"""Judges of replies against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from rl_dialog.evaluation.intervals import difference, estimate
from rl_dialog.evaluation.reply_judges import (
    calibration,
    choice_measures,
    log_odds_measures,
    not_surely_better,
    pair_accuracy,
)
from rl_dialog.models.reward_model import preference_loss


def test_accuracy_leaves_ties_out_and_halves_equal_scores():
    """Two ties, one right, one wrong, one undecided: (1 + 0 + 1/2) / 3."""
    first, second = np.array([0.0, 9.0, 2.0, 2.0, 1.0]), np.array([5.0, 0.0, 1.0, 1.0, 1.0])
    found = pair_accuracy(first, second, np.array([0.5, 0.5, 1.0, 0.0, 1.0]), np.arange(5))
    assert found.value == pytest.approx(0.5) and found.denominator.sum() == 3
    perfect = pair_accuracy(np.array([0.0, 0.0, 1.0]), np.zeros(3), np.array([0.5, 0.5, 1.0]), np.arange(3))
    assert perfect.value == 1  # labels {tie, tie, first}, perfect on the one that says something


def test_the_loss_is_that_of_training_and_of_the_specification():
    """Values of Bradley and Terry's loss, with and without 10 % noise, for a first reply that is
    preferred."""
    apart = np.array([0.0, 2.0, -5.0, -10.0])
    for noise, losses in (
        (0.0, [0.693147, 0.126928, 5.006715, 10.000045]),
        (0.1, [0.693147, 0.171124, 2.881983, 2.994915]),
    ):
        each = [
            log_odds_measures(apart[i : i + 1], np.ones(1), np.zeros(1), noise=noise)["loss"].value
            for i in range(4)
        ]
        assert each == pytest.approx(losses, abs=1e-6)
    assert log_odds_measures(np.array([-1000.0]), np.ones(1), np.zeros(1), noise=0.0)[
        "loss"
    ].value == pytest.approx(1000)
    apart, preferred = (
        np.random.default_rng(0).normal(0, 3, 50),
        np.random.default_rng(1).choice([0, 0.5, 1], 50),
    )
    measures = log_odds_measures(apart, preferred, np.arange(50), noise=0.1)
    trained = (
        preference_loss(torch.tensor(apart), torch.zeros(50), torch.tensor(preferred), noise=0.1)
        .mean()
        .item()
    )
    assert measures["loss"].value == pytest.approx(trained) and measures["tie_share"].value == np.mean(
        preferred == 0.5
    )


def test_the_choice_among_replies_to_one_context():
    """In one context the best is good, in the other a good and a bad share the first place."""
    contexts = [
        (np.array([3.0, 1.0, 2.0]), np.array([1.0, 0.0, 0.0])),
        (np.array([5.0, 5.0]), np.array([0.0, 1.0])),
    ]
    found = choice_measures(contexts, np.array([0, 1]))
    assert found["chosen_good"].value == pytest.approx((1 + 0.5) / 2)
    assert found["random_good"].value == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_calibration():
    """Sure to 0.88 in all, right in half of them; what was 50:50 is as sure as it is right."""
    error, bins = calibration(np.array([2.0, 2.0, -2.0, -2.0]), np.array([1.0, 0.0, 0.0, 1.0]))
    assert error == pytest.approx(0.880797 - 0.5, abs=1e-4) and bins == [
        {"labels": 4, "sure": 0.8808, "right": 0.5}
    ]
    assert calibration(np.array([2.0]), np.array([0.5])) == (None, [])
    one_bin = [{"labels": 4, "sure": 0.5, "right": 0.5}]
    assert calibration(np.zeros(4), np.ones(4)) == (0, one_bin)  # who cannot tell says so
    rng = np.random.default_rng(0)
    apart = rng.normal(0, 2, 20_000)
    error, _ = calibration(apart, (rng.random(20_000) < 1 / (1 + np.exp(-apart))).astype(float))
    assert error < 0.02


def test_calibration_of_a_model_that_knows_of_random_labels():
    """One in five labels is random: scores that say what is right are as sure of labels as they are right,
    and never surer than 0.9."""
    rng = np.random.default_rng(0)
    apart = rng.normal(0, 3, 20_000)
    right = rng.random(20_000) < 1 / (1 + np.exp(-apart))
    told = np.where(rng.random(20_000) < 0.2, rng.random(20_000) < 0.5, right).astype(float)
    error, bins = calibration(apart, told, noise=0.2)
    assert error < 0.02 and max(row["sure"] for row in bins) < 0.9
    assert calibration(apart, told)[0] > 0.05


def test_the_unit_of_an_interval_is_the_conversation():
    """Pairs of one conversation are alike: ten copies of each are no more evidence."""
    rng = np.random.default_rng(0)
    first, preferred = rng.normal(size=40), np.ones(40)
    alone = estimate([pair_accuracy(first, np.zeros(40), preferred, np.arange(40))])
    copied = estimate(
        [pair_accuracy(first.repeat(10), np.zeros(400), preferred.repeat(10), np.arange(40).repeat(10))]
    )
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high))


def test_judges_are_compared_on_the_same_conversations():
    """Only one of them met decided pairs in every unit, and their measures still fit together."""
    unit, preferred = np.array([0, 1, 2, 3, 4]), np.array([1.0, 0.5, 1.0, 1.0, 0.0])
    good, bad = (
        pair_accuracy(sign * np.array([1.0, 1, 1, 1, -1]), np.zeros(5), preferred, unit) for sign in (1, -1)
    )
    assert difference([good], [bad]).value == 1


def test_the_judges_that_may_be_as_good_are_named():
    """Those over whom the interval of the advantage reaches 0."""
    advantage = {"words": {"accuracy": [0.03, -0.01, 0.08]}, "longer reply": {"accuracy": [0.2, 0.1, 0.3]}}
    advantage |= {"none": {}, "unknown": {"accuracy": None}, "better": {"accuracy": [0.1, None, None]}}
    advantage |= {"equal": {"accuracy": [0.0, None, None]}}
    assert not_surely_better({"advantage": advantage}) == ["words", "equal"]
