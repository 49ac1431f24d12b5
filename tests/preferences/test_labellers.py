"""The oracle: answers by hand, chances by count."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_dialog.errors import UserError
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.segments import Clip, Reply


def clip(*rewards, mark=0):
    """A clip of these true rewards; `mark` makes it another one."""
    steps = len(rewards)
    return Clip(
        np.full((steps, 2), mark, np.float32),
        np.zeros(steps, np.int64),
        np.asarray(rewards, np.float32),
        steps,
    )


def pairs(first, second, number=10_000):
    """So many pairs of different clips of these rewards."""
    return [(clip(*first, mark=2 * n), clip(*second, mark=2 * n + 1)) for n in range(number)]


def answers(oracle, asked):
    return np.array([oracle.preference(*pair) for pair in asked])


def test_the_larger_sum_wins_and_equal_sums_tie():
    three, one, other = clip(1, 1, 1), clip(1, 0, 0, mark=1), clip(0, 0, 1, mark=2)
    oracle = Oracle()
    assert [oracle.preference(*pair) for pair in ((three, one), (one, three), (one, other))] == [
        1.0,
        0.0,
        0.5,
    ]
    assert [oracle.choice(*pair) for pair in ((three, one), (one, three), (one, other))] == [
        "left",
        "right",
        "tie",
    ]
    assert Oracle(ties=2.0).choice(three, one) == "tie" and Oracle(ties=1.9).choice(three, one) == "left"


def test_sums_of_many_rewards_tie_in_whatever_order_they_came():
    rewards = np.random.default_rng(0).permutation(np.repeat([0.25, -1.0, 0.5], 40))
    assert Oracle().preference(clip(*rewards), clip(*rewards[::-1], mark=1)) == 0.5


def test_values_by_hand():
    assert Oracle(discount=0.5).value(clip(1, 1, 1)) == 1.75
    assert Oracle(discount=0.0).value(clip(3, 1, 1)) == 3.0
    assert Oracle(discount=0.5).choice(clip(0, 0, 3), clip(1, 0, 0, mark=1)) == "right"
    padded = Clip(np.zeros((4, 1), np.float32), np.zeros(4, np.int64), np.array([1, 2, 0, 0], np.float32), 2)
    assert Oracle().value(padded) == 3.0


@pytest.mark.parametrize(
    ("given", "difference", "probability"),
    [
        ({"temperature": 1.0}, 2, 0.880797),
        ({"temperature": 1.0}, -2, 0.119203),
        ({"temperature": 2.0}, 2, 0.731059),
        ({"temperature": 1.0, "threshold": 3.0}, 40, 0.952574),
        ({"temperature": 1.0}, 1000, 1.0),
        ({"temperature": 1.0}, 0, 0.5),
        ({}, 0.1, 1.0),
        ({}, -0.1, 0.0),
        ({"ties": None}, 0, 0.5),
        ({"ties": 1.0, "temperature": 1.0}, 0.9, 0.5),
    ],
)
def test_probabilities_by_hand(given, difference, probability):
    assert Oracle(**given).probability(clip(difference), clip(0, mark=1)) == pytest.approx(
        probability, abs=1e-6
    )


def test_no_probability_is_certain_above_temperature_0():
    assert 0 < Oracle(temperature=1.0).probability(clip(-1e6), clip(0, mark=1)) == 1 / (1 + math.exp(50))


def test_answers_are_drawn_with_their_probability():
    assert answers(Oracle(temperature=1.0), pairs([2], [0], 3000)).mean() == pytest.approx(
        0.880797, abs=0.024
    )  # four standard deviations
    assert answers(Oracle(temperature=1.0), pairs([0], [2], 3000)).mean() == pytest.approx(
        0.119203, abs=0.024
    )
    coins = answers(Oracle(temperature=1.0, ties=None), pairs([1], [1], 3000))
    assert set(coins) == {0.0, 1.0} and coins.mean() == pytest.approx(0.5, abs=0.037)
    assert answers(Oracle(ties=None), pairs([1], [1], 3000)).mean() == pytest.approx(0.5, abs=0.037)


def test_a_tenth_of_noise_turns_a_twentieth_round():
    given = answers(Oracle(noise=0.1), pairs([1], [0]))
    assert set(given) == {0.0, 1.0} and (given == 0).mean() == pytest.approx(0.05, abs=0.01)
    ties = answers(Oracle(noise=0.1), pairs([1], [1]))
    assert (ties == 0.5).mean() == pytest.approx(0.9, abs=0.012) and (ties == 0).mean() == pytest.approx(
        0.05, abs=0.01
    )
    assert answers(Oracle(noise=1.0), pairs([1], [0], 3000)).mean() == pytest.approx(0.5, abs=0.037)


@pytest.mark.parametrize(
    "oracle",
    [Oracle(temperature=1.0, ties=None), Oracle(noise=0.5), Oracle(ties=None)],
    ids=["softmax", "noise", "ties"],
)
def test_an_answer_depends_on_the_pair_and_the_seed_alone(oracle):
    asked = pairs([1], [1], 200)
    given = answers(oracle, asked)
    turned = answers(oracle, [pair[::-1] for pair in asked])
    assert (given == 1 - turned).all(), "whichever side it is shown on"
    assert (answers(oracle, asked[::-1])[::-1] == given).all(), "in whatever order"
    again = Oracle(**vars(oracle))
    assert (answers(again, asked) == given).all(), "after a restart"
    assert (answers(Oracle(**vars(oracle) | {"seed": 1}), asked) != given).any()


def test_replies_need_a_truth():
    context = [{"role": "user", "content": "hello"}]
    long, short = Reply(context, "hello, how are you?"), Reply(context, "hi")
    oracle = Oracle(truth=lambda reply: float(len(reply.text)))
    assert (oracle.choice(long, short), oracle.choice(short, long), oracle.probability(long, short)) == (
        "left",
        "right",
        1.0,
    )
    with pytest.raises(UserError, match="truth of replies"):
        Oracle().preference(long, short)
    with pytest.raises(UserError, match="finite number"):
        Oracle(truth=lambda reply: float("nan")).preference(long, short)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("noise", 1.1),
        ("noise", -0.1),
        ("discount", 1.5),
        ("threshold", 0.0),
        ("ties", -1.0),
    ],
)
def test_settings_that_mean_nothing(name, value):
    with pytest.raises(UserError, match=f"{name}: expected"):
        Oracle(**{name: value})
