"""What teachers say of each message (rewards/teachers.py), beside the tokens of a row.

    message        user "hi"            assistant "hello"
    token          <u>   hi   <end>     <a>   hello   <end>
    place          .     .    0         .     .       1        the last token of a message

A hierarchical model that has read the token at a message's place, the one by which the template ends it,
predicts what the teachers said of that message (models/message_heads.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Taught:
    """Of M messages. E labels of an emotion, D numbers of an embedding; 0 without such a teacher."""

    # (M,) int32: of a dialog, which of its messages; of a row, the index of each message's last token
    places: np.ndarray
    emotions: np.ndarray  # (M, E) float32: a distribution each
    embeddings: np.ndarray  # (M, D) float16: rows of tokens are a few hundred bytes, of vectors kilobytes

    def at(self, chosen: np.ndarray, places: np.ndarray) -> Taught:
        """Some of the messages, with other places."""
        return Taught(places.astype(np.int32), self.emotions[chosen], self.embeddings[chosen])


def sizes(teachers: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """(E, D) of the teachers as a manifest describes them."""
    labels = teachers.get("emotion", {}).get("labels", ())
    return len(labels), int(teachers.get("embedding", {}).get("size", 0))


def in_rows(
    taught: Taught,
    starts: Sequence[int],
    ends: Sequence[int],
    windows: Sequence[tuple[int, int, int]],
) -> list[Taught]:
    """The messages of a dialog in its rows. Each is in one row only, the first that has all of it: what rows
    repeat as context must not count twice.

    starts, ends: the first token of each of the dialog's messages, and one past the one that ends it.
    windows: of each row how many tokens of the beginning stand in front, the first token behind these, and
    the row's length.
    """
    first_token, end = np.asarray(starts)[taught.places], np.asarray(ends)[taught.places]
    rows, known = [], -1
    for system, start, length in windows:
        whole = (first_token >= start) & (end + system - start <= length) & (taught.places > known)
        chosen = np.flatnonzero(whole)
        rows.append(taught.at(chosen, end[chosen] - 1 + system - start))
        known = int(taught.places[chosen].max(initial=known))
    return rows
