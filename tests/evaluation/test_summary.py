"""How figures are shown."""

import pytest

from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.summary import Figure, shown


@pytest.mark.parametrize(
    ("value", "figure", "signed", "text"),
    [
        (Estimate(1.234, 1.1, 1.35, 3, 9), Figure("x"), False, "1.23 [1.10, 1.35]"),
        (Estimate(0.5, 0.451, 0.549, 3, 9), Figure("x", percent=True), False, "50.0 % [45.1, 54.9]"),
        (Estimate(0.05, -0.1, 0.2, 3, 9), Figure("x", percent=True), True, "+5.0 points [-10.0, +20.0]"),
        (Estimate(1234.5, 99.94, float("inf"), 3, 9), Figure("x"), False, "1234 [99.94, inf]"),
        (Estimate(-1e-6, None, None, 1, 1), Figure("x", 4), False, "0.0000"),  # no minus before a zero
        (Estimate(-1e-6, -1.5, 2.0, 1, 1), Figure("x"), True, "+0.00 [-1.50, +2.00]"),
        (None, Figure("x"), False, "-"),
    ],
)
def test_estimates_as_text(value, figure, signed, text):
    assert shown(value, figure, signed=signed) == text
