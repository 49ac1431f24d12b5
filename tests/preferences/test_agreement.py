"""Krippendorff's alpha by hand arithmetic, and who is suspected of carelessness."""

from __future__ import annotations

import numpy as np
import pytest

from rl_dialog.preferences.agreement import alpha, at_most, disagreement, doubts


def test_alpha_by_hand():
    """Three pairs, two people: (1, 1), (1, 0), (0, 0). Coincidences: 1-1 and 0-0 two each, 1-0 and 0-1 one
    each, 3 answers of each value. Observed 2/6, expected 2 * 3 * 3 / (6 * 5) = 3/5, alpha = 1 - 5/9."""
    units = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    for distance in ("nominal", "interval", "ordinal"):  # of two values all distances are the same
        assert alpha(units, distance=distance).value == pytest.approx(4 / 9), distance


def test_a_tie_is_nearer_than_the_opposite():
    """(1, .5) and (0, 0): four answers, n = {0: 2, .5: 1, 1: 1}. Nominal: observed 2/4, expected
    (16 - 4 - 1 - 1) / 12 = 10/12, alpha = 1 - .6. Interval: observed .5 / 4 = .125, expected
    2 (2 * .25 + 2 * 1 + 1 * .25) / 12 = 5.5 / 12, alpha = 1 - 3/11. Ordinal: ranks 1, 2.5, 3.5; observed
    2/4, expected 2 (2 * 2.25 + 2 * 6.25 + 1) / 12 = 3, alpha = 5/6."""
    units = [[1.0, 0.5], [0.0, 0.0]]
    assert alpha(units, distance="nominal").value == pytest.approx(0.4)
    assert alpha(units, distance="interval").value == pytest.approx(8 / 11)
    assert alpha(units, distance="ordinal").value == pytest.approx(5 / 6)


def test_a_unit_with_three_answers_weighs_by_its_answers():
    """(1, 1, 0) and (0, 0): of the first, 1-1 meet 2 / 2 times, 1-0 and 0-1 2 / 2 each; observed 2/5, n1 = 2,
    n0 = 3, expected 2 * 6 / 20 = 3/5, alpha = 1/3."""
    assert alpha([[1.0, 1.0, 0.0], [0.0, 0.0]]).value == pytest.approx(1 / 3)


def test_where_alpha_says_nothing():
    assert alpha([]) is None and alpha([[1.0], [0.0]]) is None
    assert alpha([[1.0, 1.0], [1.0, 1.0]]) is None, "chance would agree as well"
    assert alpha([[0.5, 0.5], [0.5, 0.5]], symmetric=True) is None


def test_which_segment_is_first_does_not_matter():
    """Nine pairs that two people see alike and one that they do not; logs have the better one first. If that
    meant something, chance would agree on .9 of such pairs, too, and alpha were 0. In both orders there are
    40 answers, 20 of each: observed 2/20, expected 2 * 20 * 20 / (40 * 39) = 20/39, alpha = 1 - 39/200."""
    units = [[1.0, 1.0]] * 9 + [[1.0, 0.0]]
    turned = [[1 - value for value in unit] if n % 2 else unit for n, unit in enumerate(units)]
    for distance in ("nominal", "interval", "ordinal"):
        found = alpha(units, distance=distance, symmetric=True)
        assert found.value == pytest.approx(1 - 39 / 200)
        assert (
            found == alpha(turned, distance=distance, symmetric=True)
            and found.low < found.value <= found.high
        )
    assert alpha(units).value == pytest.approx(0)
    assert alpha([[1.0, 1.0]] * 3, symmetric=True).value == 1, "people who agree about everything"


def test_in_both_orders_it_is_krippendorffs_own_of_units_and_their_mirror_images():
    rng = np.random.default_rng(1)
    units = [rng.choice([0.0, 0.5, 1.0], rng.integers(2, 5), p=[0.1, 0.2, 0.7]).tolist() for _ in range(40)]
    mirrored = [[1 - value for value in unit] for unit in units]
    for distance in ("nominal", "interval", "ordinal"):
        both = alpha(units + mirrored, distance=distance)
        assert alpha(units, distance=distance, symmetric=True).value == pytest.approx(both.value)


def test_alpha_of_coins_is_nought_and_its_interval_covers():
    rng = np.random.default_rng(0)
    found = alpha(rng.choice([0.0, 1.0], (2000, 2)).tolist())
    assert abs(found.value) < 0.06 and found.low < 0 < found.high and found.pairs == 2000
    truth = rng.choice([0.0, 1.0], 2000)
    wrong = rng.random((2000, 2)) < 0.1
    found = alpha(np.abs(truth[:, None] - wrong).tolist())
    assert found.value == pytest.approx(0.64, abs=0.04), "(1 - 2 e)^2"
    assert found.low < 0.64 < found.high and found.high - found.low < 0.1


def test_the_share_of_people_who_differ():
    assert disagreement([1.0]) == 0 and disagreement([1.0, 1.0]) == 0 and disagreement([1.0, 0.5]) == 1
    assert disagreement([1.0, 1.0, 0.0]) == pytest.approx(2 / 3)


def test_a_binomial_by_hand():
    assert at_most(0, 3, 0.5) == pytest.approx(1 / 8) and at_most(1, 3, 0.5) == pytest.approx(4 / 8)
    assert at_most(3, 3, 0.9) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"gold": 12, "gold_right": 5}, ["right on 5 of 12 gold pairs"]),
        ({"gold": 12, "gold_right": 9}, []),
        ({"gold": 2, "gold_right": 0}, []),
        ({"sides": 20, "left_share": 0.9}, ["left in 18 of 20 answers, where half is expected"]),
        ({"sides": 20, "left_share": 0.1}, ["right in 18 of 20 answers, where half is expected"]),
        ({"sides": 20, "left_share": 0.6}, []),
        ({"labels": 20, "seconds": 0.4}, ["0.4 seconds from pair to answer"]),
        ({"labels": 20, "seconds": 4.0}, []),
        ({"sides": 3000, "left_share": 0.5, "gold": 1500, "gold_right": 1300}, []),  # comb() is no float
        ({"sides": 3000, "left_share": 0.6}, ["left in 1800 of 3000 answers, where half is expected"]),
        ({"labels": 0, "seconds": None, "left_share": None, "sides": 0, "gold": 0, "gold_right": 0}, []),
    ],
)
def test_what_is_doubted(figures, found):
    assert doubts(figures) == found


def test_attentive_labellers_are_seldom_doubted():
    rng = np.random.default_rng(0)
    figures = [
        {"gold": 20, "gold_right": int(rng.binomial(20, 0.85)), "sides": 100}
        | {"left_share": rng.binomial(100, 0.5) / 100, "seconds": 5.0, "labels": 100}
        for _ in range(500)
    ]
    assert sum(bool(doubts(one)) for one in figures) < 0.03 * len(figures)
