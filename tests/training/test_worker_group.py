"""Which worker of a run a process is."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from rl_dialog.training.worker_group import WORKERS, patient_group, place_in_group, wait_for_the_first


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


def test_who_waits_for_the_first_one_is_more_patient(monkeypatch) -> None:  # noqa: ANN001
    """A round of online learning, or an evaluation, may take longer than torch's half an hour. The group is
    made where all begin, not where the first one is away already."""
    made, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how) or new_group(**how))
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    try:
        assert place_in_group() == (0, 1) and len(made) == 1
        wait_for_the_first()
        patience = patient_group()._get_backend(torch.device("cpu")).options._timeout
        assert patience >= timedelta(hours=12) and len(made) == 1
    finally:
        dist.destroy_process_group()
