"""What rows begin with alike: which rows read it for which, and when it does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from rl_dialog.data import beginnings
from rl_dialog.data.beginnings import shared_beginnings


@pytest.fixture(autouse=True)
def free_passes(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(beginnings, "PASS", 0)


def padded(rows) -> np.ndarray:  # noqa: ANN001
    """With -1."""
    width = max(map(len, rows))
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows])


def test_groups_have_a_reader_each() -> None:
    """Two prompts of three tokens, one of two rows and one of three: 3 x 3 tokens are saved, where the two
    that all have would save 2 x 4."""
    rows = [[1, 2, 3, 9, 9], [1, 2, 4, 9], [1, 2, 3, 8], [1, 2, 4, 7], [1, 2, 4, 5, 6, 7]]
    found = shared_beginnings(padded(rows))
    assert found.length == 3 and len(found.rows) == 2
    for row, which in zip(rows, found.of, strict=True):
        assert rows[found.rows[which]][:3] == row[:3]


def test_a_long_beginning_of_few_rows_and_a_short_one_of_many() -> None:
    rules = [7] * 5
    rows = [[*rules, 1, 1, 1, 1, 2], [*rules, 1, 1, 1, 1, 3], *([*rules, k, 0, 0, 0, 0] for k in (4, 5, 6))]
    found = shared_beginnings(padded(rows))
    assert (found.length, len(found.rows), found.of.tolist()) == (5, 1, [0] * 5)  # 5 x 4 against 9 x 1


def test_the_longest_row_keeps_a_token_of_its_own() -> None:
    found = shared_beginnings(padded([[5, 6, 7], [5, 6, 7]]))
    assert (found.length, len(found.rows)) == (2, 1)
    assert shared_beginnings(padded([[5], [5]])) is None


def test_a_short_row_stands_in_nobodys_way() -> None:
    """It is read alone, or with its equals."""
    long = [7] * 8
    found = shared_beginnings(padded([[*long, 1], [3, 4], [*long, 2], [3, 4], [*long, 1], [3]]))
    assert found.length == 8 and len(found.rows) == 3
    assert found.of[0] == found.of[2] == found.of[4] and found.of[1] == found.of[3] != found.of[5]


def test_rows_without_anything_in_common_and_one_alone() -> None:
    assert shared_beginnings(padded([[1, 2, 3], [2, 2, 3]])) is None
    assert shared_beginnings(padded([[1, 2, 3]])) is None


def test_what_a_pass_costs_must_be_saved(monkeypatch) -> None:  # noqa: ANN001
    rows = padded([[1] * 9] * 3)
    monkeypatch.setattr(beginnings, "PASS", 16)
    assert shared_beginnings(rows) is None  # 8 tokens, not read in two rows
    monkeypatch.setattr(beginnings, "PASS", 15)
    assert shared_beginnings(rows).length == 8
