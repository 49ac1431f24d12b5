"""Rows of tokens that begin alike: replies to one prompt, episodes of a game with long rules. What they begin
with is read once for all of them, where that saves more than one more pass through the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PASS = 512  # tokens that a model reads while one more pass through it costs what passes cost


class Beginnings(NamedTuple):
    """C different beginnings of one length that B rows have."""

    length: int  # in tokens
    rows: np.ndarray  # (C,) int64: a row with each of them
    of: np.ndarray  # (B,) int64: which of them each row has


def shared_beginnings(rows: Sequence[Sequence[int]]) -> Beginnings | None:
    """The beginnings by which most tokens are saved, shorter than any row; None where too few are."""
    longest = min(map(len, rows)) - 1
    if (len(rows) - 1) * longest <= PASS:
        return None
    ids = np.array([row[:longest] for row in rows])
    order = np.array(sorted(range(len(rows)), key=lambda i: ids[i].tobytes()))
    differs = ids[order[1:]] != ids[order[:-1]]  # neighbours have the longest beginnings in common
    alike = np.where(differs.any(1), differs.argmax(1), longest)
    saved = np.sort(alike)[::-1] * np.arange(1, len(rows))
    if saved.max() <= PASS:
        return None
    length = int(np.sort(alike)[::-1][saved.argmax()])
    new = np.append(True, alike < length)
    of = np.empty(len(rows), np.int64)
    of[order] = new.cumsum() - 1
    return Beginnings(length, order[new], of)
