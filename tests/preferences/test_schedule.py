"""Annotation rates and label budgets, against the paper's numbers and those of `imitation`."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_dialog.errors import UserError
from rl_dialog.preferences.schedule import AnnotationSchedule


def test_the_rate_of_christiano_et_al():
    schedule = AnnotationSchedule(budget=5500, total_steps=50_000_000, initial=500, scale=5e6)
    assert [schedule.rate(steps) for steps in (0, 5e6, 15e6, 45e6)] == [1, 0.5, 0.25, 0.1]
    assert schedule.labels_wanted(0) == 500 and schedule.labels_wanted(50_000_000) == 5500
    assert (
        schedule.labels_wanted(5_000_000) == 500 + int(5000 * log(2) / log(11)) == 1945
    )  # by integration of the rate
    ratio = [
        schedule.labels_wanted(steps + 100_000) - schedule.labels_wanted(steps) for steps in (0, 45_000_000)
    ]
    assert ratio[1] / ratio[0] == pytest.approx(0.1, abs=0.02)


def test_a_constant_rate():
    schedule = AnnotationSchedule(budget=1000, total_steps=200, initial=100, kind="constant")
    assert [schedule.labels_wanted(steps) for steps in (0, 50, 100, 199, 200, 10**9)] == [
        100,
        325,
        550,
        995,
        1000,
        1000,
    ]
    assert schedule.rate(7) == 1


def test_the_rounds_of_imitation():
    """5,000 comparisons, 5 iterations, a tenth first: 4,500 in proportion to 1 / (1 + t), t = 0, 1/4, ... 1:
    1271.9, 1017.5, 847.9, 726.8, 635.9."""
    schedule = AnnotationSchedule(budget=5000, total_steps=6000, initial=500, iterations=5)
    wanted = [schedule.labels_wanted(steps) for steps in (0, 1000, 2000, 3000, 4000, 5000)]
    assert [later - earlier for earlier, later in zip(wanted, wanted[1:], strict=False)] == [
        1272,
        1017,
        848,
        727,
        636,
    ]
    assert (
        wanted[0] == schedule.labels_wanted(999) == 500 and wanted[-1] == schedule.labels_wanted(6000) == 5000
    )
    even = AnnotationSchedule(budget=100, total_steps=50, iterations=4, kind="constant")
    assert [even.labels_wanted(steps) for steps in range(0, 51, 10)] == [0, 25, 50, 75, 100, 100]
    assert AnnotationSchedule(budget=9, total_steps=10, initial=4, iterations=1).labels_wanted(5) == 9


schedules = st.builds(
    lambda budget, first, steps, kind, scale, rounds: AnnotationSchedule(
        budget, steps, min(first, budget), kind, scale, rounds
    ),
    st.integers(0, 10_000),
    st.integers(0, 1000),
    st.integers(1, 10**8),
    st.sampled_from(["constant", "hyperbolic"]),
    st.none() | st.floats(1e-3, 1e9),
    st.integers(0, 7),
)


@given(schedules, st.lists(st.integers(-5, 2 * 10**8), max_size=20))
def test_never_fewer_than_before_and_never_above_the_budget(schedule, steps):
    wanted = [schedule.labels_wanted(each) for each in sorted(steps)]
    assert wanted == sorted(wanted) and all(schedule.initial <= each <= schedule.budget for each in wanted)
    assert (
        schedule.labels_wanted(0) == schedule.initial
        and schedule.labels_wanted(schedule.total_steps) == schedule.budget
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 11},
        {"initial": -1},
        {"total_steps": 0},
        {"kind": "quadratic"},
        {"scale": 0.0},
        {"iterations": -1},
        {"budget": -1},
    ],
)
def test_what_is_no_schedule(wrong):
    with pytest.raises(UserError, match="expected"):
        AnnotationSchedule(**{"budget": 10, "total_steps": 10} | wrong)
