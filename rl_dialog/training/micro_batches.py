"""Which rows an update learns from, drawn regardless of their lengths, and the micro-batches of like lengths
that it is computed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rl_dialog.data.beginnings import PASS


def epoch_order(count: int, batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """The updates of one epoch: all rows in random order, whatever their lengths; the last update is filled
    up from the epoch's first rows."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return list(np.concatenate([order, np.resize(order, -count % batch_size)]).reshape(-1, batch_size))


def like_lengths(rows: Sequence[int], lengths: Mapping[int, int], size: int) -> Iterator[Sequence[int]]:
    """Cuts `rows`, which rise in length, into micro-batches of at most `size`, and where padding would cost
    more than a pass of its own."""
    start, real = 0, 0
    for end, row in enumerate(rows):
        padding = lengths[row] * (end - start) - real
        if end > start and (end - start == size or (padding > PASS and padding > real / 4)):
            yield rows[start:end]
            start, real = end, 0
        real += lengths[row]
    yield rows[start:]
