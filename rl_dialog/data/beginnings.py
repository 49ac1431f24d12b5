"""Rows of tokens that begin alike: replies to one prompt, episodes of a game with long rules. What they begin
with is read once for all of them, where that saves more than one more pass through the model takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PASS = 512  # tokens that cost about as much as one more pass through a model (measured on a CPU)


class Beginnings(NamedTuple):
    """C different beginnings of one length that B rows have."""

    length: int  # in tokens
    rows: np.ndarray  # (C,) int64: a row with each of them
    of: np.ndarray  # (B,) int64: which of them each row has


def shared_beginnings(ids: np.ndarray) -> Beginnings | None:
    """The beginnings by which most tokens are saved of rows (B, T), padded on the right; shorter than T. None
    where too few are. A row that is shorter than they are shares its beginning with its equals only."""
    rows, longest = ids.shape[0], ids.shape[1] - 1
    if rows < 2 or longest < 1:
        return None
    order = np.array(sorted(range(rows), key=lambda i: ids[i].tobytes()))
    differs = ids[order[1:], :longest] != ids[order[:-1], :longest]
    alike = np.where(differs.any(1), differs.argmax(1), longest)  # what neighbours have in common
    falling = np.sort(alike)[::-1]
    saved = falling * np.arange(1, rows)
    if saved.max() <= PASS:
        return None
    length = int(falling[saved.argmax()])
    new = np.append(True, alike < length)
    of = np.empty(rows, np.int64)
    of[order] = new.cumsum() - 1
    return Beginnings(length, order[new], of)
