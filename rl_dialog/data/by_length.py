"""Rows of similar length share a batch, so that little of it is padding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any


def batches(lengths: Sequence[Any], size: int) -> Iterator[list[int]]:
    """All places, the shortest first, `size` at a time. Instead of a length it may be a tuple that breaks
    ties."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    yield from (order[start : start + size] for start in range(0, len(order), size))


def shuffled_batches(
    lengths: Sequence[Any], size: int, rng: random.Random, *, pool: int = 16
) -> list[list[int]]:
    """All places once, in random batches of similar length: each run of `pool` batches is sorted by
    itself."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    shuffled = []
    for start in range(0, len(order), pool * size):
        run = order[start : start + pool * size]
        shuffled += [[run[i] for i in places] for places in batches([lengths[i] for i in run], size)]
    rng.shuffle(shuffled)
    return shuffled
