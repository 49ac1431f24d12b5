"""How figures are shown."""

import pytest

from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.summary import Figure, figure_of, shown

RETURN = figure_of("return")


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
        # rewards in thousandths, in ten thousandths, in millionths, and in thousands
        (Estimate(0.05, 0.04, 0.06, 1, 9), RETURN, False, "0.050 [0.040, 0.060]"),
        (Estimate(1.35e-4, -1.62e-4, 4.2e-4, 1, 9), RETURN, False, "0.00014 [-0.00016, 0.00042]"),
        (Estimate(-1e-6, -3e-6, 2e-6, 1, 9), RETURN, True, "-0.0000010 [-0.0000030, +0.0000020]"),
        (Estimate(2e-8, None, None, 1, 9), figure_of("ope/fqe_td"), False, "2.00e-08"),
        (Estimate(4.5e-4, None, None, 1, 9), figure_of("reward/polite"), False, "0.00045"),
        (Estimate(0.003, -1.5, 2.0, 1, 9), RETURN, True, "+0.00 [-1.50, +2.00]"),
        (Estimate(2306.67, 2000.0, 2600.0, 1, 9), RETURN, False, "2307 [2000, 2600]"),
        (Estimate(0.0, 0.0, 0.0, 1, 9), RETURN, False, "0.00 [0.00, 0.00]"),
        (Estimate(1e-17, -1e-17, 1e-17, 1, 9), RETURN, True, "+0.00 [+0.00, +0.00]"),  # of rounding
    ],
)
def test_estimates_as_text(value, figure, signed, text):
    assert shown(value, figure, signed=signed) == text
