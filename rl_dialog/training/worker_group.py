"""Which of the workers of a run this process is."""

from __future__ import annotations

import os

from torch import distributed as dist

WORKERS = "RL_DIALOG_WORKERS"  # how many there are, told to each before it begins


def place_in_group() -> tuple[int, int]:
    """(rank, number of workers). Raises RuntimeError in one that began while its group was already being
    ended, because another one died: it would take itself for the only one, go on alone, and leave checkpoints
    of another run until somebody ends it."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (count := int(os.environ.get(WORKERS, "1"))) > 1:
        raise RuntimeError(f"expected a group of {count} workers, which has ended before this one began")
    return 0, 1
