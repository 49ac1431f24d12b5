"""Which worker of a run a process is."""

from __future__ import annotations

import pytest

from rl_dialog.training.worker_group import WORKERS, place_in_group


def test_one_that_is_alone_is_the_first_of_one(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.delenv(WORKERS, raising=False)
    assert place_in_group() == (0, 1)
    monkeypatch.setenv(WORKERS, "1")
    assert place_in_group() == (0, 1)


def test_one_whose_group_has_ended_does_not_go_on_alone(monkeypatch) -> None:  # noqa: ANN001
    """As where another worker is killed while this one still imports its libraries."""
    monkeypatch.setenv(WORKERS, "2")
    with pytest.raises(RuntimeError, match="expected a group of 2 workers"):
        place_in_group()
