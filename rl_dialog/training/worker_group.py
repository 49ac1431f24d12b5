"""Which of the workers of a run this process is, and how they wait for one another."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

from torch import distributed as dist

WORKERS = "RL_DIALOG_WORKERS"  # how many there are, told to each before it begins
# Seconds after which a worker that waits for others fails. Where all do the same it is torch's own half an
# hour: one that takes longer waits for something else itself, and would for ever. What the first does alone,
# such as playing a round of a large model, may take longer; for that the others wait in another group. When
# one dies or fails, Ray ends the others at once.
TOGETHER, FOR_THE_FIRST = 1800.0, 24 * 3600.0


def place_in_group() -> tuple[int, int]:
    """(rank, number of workers). Raises RuntimeError in one that began while its group was already being
    ended, because another one died: it would take itself for the only one, go on alone, and leave checkpoints
    of another run until somebody ends it."""
    if dist.is_initialized():
        patient_group()  # here all are there
        return dist.get_rank(), dist.get_world_size()
    if (count := int(os.environ.get(WORKERS, "1"))) > 1:
        raise RuntimeError(f"expected a group of {count} workers, which has ended before this one began")
    return 0, 1


def wait_for_the_first() -> None:
    """For what the first worker does alone."""
    dist.barrier(patient_group())


def patient_group() -> dist.ProcessGroup:
    """All workers, when they wait for the first. It is made of all of them at once, where it is asked for
    first."""
    return _patient(dist.group.WORLD)


@cache
def _patient(workers: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=FOR_THE_FIRST))
