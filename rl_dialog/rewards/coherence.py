"""How near the reply is to what the user said: cosines of an encoder's vectors. They do not apply where the
user said nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.scorers import HASHED_WORDS, Scorer
from rl_dialog.rewards.user import answers, questions


def coherence(dialog: Dialog, *, encoder: Scorer = HASHED_WORDS) -> list[float | None]:
    """-1..1: the cosine of the mean vectors of the reply and of what the user said before it."""
    return _compared(dialog, questions(dialog), encoder, _cosine_of(lambda vectors: vectors.mean(0)))


def answer_coherence(dialog: Dialog, *, encoder: Scorer = HASHED_WORDS) -> list[float | None]:
    """-1..1: the cosine of the mean vectors of the reply and of the user's answer."""
    return _compared(dialog, answers(dialog), encoder, _cosine_of(lambda vectors: vectors.mean(0)))


def coherence_extrema(dialog: Dialog, *, encoder: Scorer = HASHED_WORDS) -> list[float | None]:
    """-1..1: as coherence, of each dimension's value farthest from 0 instead of its mean (Forgues et al.
    2014)."""
    return _compared(dialog, questions(dialog), encoder, _cosine_of(extrema))


def coherence_greedy(dialog: Dialog, *, encoder: Scorer = HASHED_WORDS) -> list[float | None]:
    """-1..1: how well each word of the user's is met by the nearest word of the reply, on average (Rus and
    Lintean 2012, this direction only)."""
    return _compared(dialog, questions(dialog), encoder, greedy)


def _compared(
    dialog: Dialog,
    texts: Sequence[str | None],
    encoder: Scorer,
    compare: Callable[[np.ndarray, np.ndarray], float],
) -> list[float | None]:
    """`compare` of the reply's and the user's word vectors (n, H); 0 where either has none that the encoder
    knows."""
    values: list[float | None] = []
    for i, text in zip(dialog.replies, texts, strict=True):
        if text is None:
            values.append(None)
            continue
        reply_vectors, user_vectors = encoder(dialog.messages[i]["content"] or ""), encoder(text)
        values.append(
            compare(reply_vectors, user_vectors) if len(reply_vectors) and len(user_vectors) else 0.0
        )
    return values


def _cosine_of(summary: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda reply_vectors, user_vectors: cosine(summary(reply_vectors), summary(user_vectors))


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """-1..1; 0 where either has no length."""
    length = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(np.clip(left @ right / length, -1, 1)) if length else 0.0


def extrema(vectors: np.ndarray) -> np.ndarray:
    """(H,) of (n, H): per dimension the value of the largest size, the positive one of two equals."""
    high, low = vectors.max(0), vectors.min(0)
    return np.where(high >= -low, high, low)


def greedy(reply_vectors: np.ndarray, user_vectors: np.ndarray) -> float:
    """The mean over the rows of `user_vectors` of the best cosine with a row of `reply_vectors`."""
    lengths = np.linalg.norm(user_vectors, axis=1)[:, None] * np.linalg.norm(reply_vectors, axis=1)[None]
    table = np.divide(user_vectors @ reply_vectors.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return float(np.clip(table.max(1).mean(), -1, 1))
