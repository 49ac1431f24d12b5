"""Figures of many episodes, in any unit of rewards, and of none."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.tally import Tally, table


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_unit_of_rewards_costs_no_digit(unit: float) -> None:
    tally = Tally(returns=[1 * unit, 2 * unit, 4 * unit])
    tally.ends["terminated"] = 3
    found = tally.figures()
    assert found["return"] == pytest.approx(7 / 3 * unit, rel=1e-5)
    assert found["stderr"] == pytest.approx(math.sqrt(7 / 3 / 3) * unit, rel=1e-5)
    _, mean, error, *_ = table({"me": tally}).split("\n")[1].split()
    assert float(mean) == pytest.approx(7 / 3 * unit, rel=0.01)
    assert float(error) == pytest.approx(math.sqrt(7 / 3 / 3) * unit, rel=0.01)


def test_equal_returns_have_no_error() -> None:
    assert Tally(returns=[0.1 + 0.2] * 7).figures()["stderr"] == 0


def test_nobody_played() -> None:
    assert Tally().figures()["return"] is None
    assert table({}).startswith("player") and "\n" not in table({})
    assert table({"me": Tally()}).split()[-7:-4] == ["-", "-", "0"]


def test_why_episodes_failed() -> None:
    tally = Tally()
    said = [{"role": "user", "content": "Hello?"}]
    for number, end in enumerate(("terminated", "failed", "failed")):
        meta = {"failed": "a server\n is away"} if end == "failed" else {}
        tally.add(Episode(number, Dialog(str(number), said, meta=meta), [], end))
    assert tally.figures()["failures"] == {"a server is away": 2}
    assert table({"me": tally}).split("\n")[-1] == "me: 2 failed: a server is away"


def test_names_that_a_terminal_draws_wide_keep_the_columns_in_line():
    lines = table({"達人": Tally(), "でたらめ": Tally(), "ann": Tally()}).splitlines()
    assert len({cell_len(line) for line in lines}) == 1
