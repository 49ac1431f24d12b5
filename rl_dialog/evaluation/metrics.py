"""Figures of texts and of orderings. Each is defined with its formula in README.md."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from rl_dialog.data.missing import to_go
from rl_dialog.data.pairs import said
from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation.intervals import Measure
from rl_dialog.rewards.words import words

if TYPE_CHECKING:  # it brings models, which figures of texts do not need
    from rl_dialog.rewards.similarity import Similarity

CLICK = "click"  # what a similarity above a threshold stands for
NEAR = 0.8  # two replies whose sets of words have this Jaccard similarity say the same


def distinct(texts: Sequence[str], n: int) -> float:
    """Different n-grams of words / all n-grams, over all texts together; NaN without any. It falls as more
    texts are counted."""
    grams = [gram for text in texts for gram in ngrams(words(text), n)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n neighbours."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def inner_repetition(text: str, n: int = 3) -> tuple[int, int]:
    """(n-grams of the text that it already had, all its n-grams)."""
    grams = ngrams(words(text), n)
    return len(grams) - len(set(grams)), len(grams)


def repeats(earlier: Sequence[str], text: str) -> bool:
    """Is `text` the same as one of the `earlier` replies, or nearly (Jaccard similarity of their sets of
    words at least NEAR)?"""
    vocabulary = set(words(text))
    return any(reply == text or _jaccard(vocabulary, set(words(reply))) >= NEAR for reply in earlier)


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a and b else 0.0


def text_measures(
    dialogs: Sequence[Dialog], tokens: Sequence[Sequence[int]], finished: Sequence[Sequence[bool]]
) -> dict[str, Measure]:
    """Length, repetition and diversity of generated replies; one unit per dialog. `tokens` and `finished`
    have one number per reply."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    texts = [[dialog.messages[i]["content"] or "" for i in dialog.replies] for dialog in dialogs]
    for replies, lengths, ended in zip(texts, tokens, finished, strict=True):
        inner = [inner_repetition(text) for text in replies]
        count = len(replies)
        rows["tokens"].append((sum(lengths), count))
        rows["words"].append((sum(len(words(text)) for text in replies), count))
        rows["repeated"].append((sum(repeats(replies[:i], text) for i, text in enumerate(replies)), count))
        rows["rep_3"].append((sum(again for again, _ in inner), sum(total for _, total in inner)))
        rows["empty"].append((sum(not text.strip() for text in replies), count))
        rows["unfinished"].append((sum(not end for end in ended), count))
        rows["replies"].append((count, 1))
    measures = {name: _measure(pairs) for name, pairs in rows.items()}
    flat = [text for replies in texts for text in replies]
    return measures | {f"distinct_{n}": Measure.whole(distinct(flat, n)) for n in (1, 2)}


def reward_measures(values: Mapping[str, Sequence[Sequence[float | None]]]) -> dict[str, Measure]:
    """Mean of each reward over the replies it applies to; one unit per dialog. `values`: reward -> dialog ->
    one number per reply, or None."""
    measures = {}
    for name, dialogs in values.items():
        applied = [[value for value in row if value is not None] for row in dialogs]
        measures[f"reward/{name}"] = _measure([(sum(row), len(row)) for row in applied])
    return measures


def answer_measures(
    dialogs: Sequence[str],
    answers: Sequence[str],
    references: Sequence[str],
    similarities: Mapping[str, Similarity],
) -> dict[str, Measure]:
    """Mean similarity of each answer to what the log has in its place; one unit per dialog, which `dialogs`
    names for each answer."""
    if not answers:
        return {}
    _, owner = np.unique(np.array(dialogs), return_inverse=True)
    count = np.bincount(owner).astype(float)
    return {
        f"answer/{name}": Measure(np.bincount(owner, function(answers, references)), count)
        for name, function in similarities.items()
    }


@dataclass(frozen=True)
class Pairs:
    """Pairs of replies to one context with different outcomes. P pairs; replies are numbered through all
    dialogs in order."""

    better: np.ndarray  # (P,) int64
    worse: np.ndarray  # (P,) int64
    context: np.ndarray  # (P,) int64
    contexts: int


def find_pairs(dialogs: Sequence[Dialog], *, most_per_context: int = 200) -> Pairs:
    """All pairs of different replies that follow the same messages and have different outcomes.

    A reply's outcome is the sum of the known rewards from it to the end of its dialog: its own reward where
    it is the last. Replies of whose outcome nothing is known are left out, and so are
    pairs beyond `most_per_context`.
    """
    by_context: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    number = 0
    for dialog in dialogs:
        rewards = np.array([dialog.messages[i].get("reward") for i in dialog.replies], float)  # None is NaN
        for place, (i, outcome) in enumerate(zip(dialog.replies, to_go(rewards).tolist(), strict=True)):
            if not math.isnan(outcome):
                context = "\n".join(map(said, dialog.messages[:i]))
                by_context[context].append((outcome, said(dialog.messages[i]), number + place))
        number += len(rewards)
    pair_lists = [list(islice(_pairs_of(replies), most_per_context)) for replies in by_context.values()]
    pair_lists = [pairs for pairs in pair_lists if pairs]
    flat = [(better, worse, context) for context, pairs in enumerate(pair_lists) for better, worse in pairs]
    columns = np.array(flat, dtype=np.int64).reshape(-1, 3).T
    return Pairs(*columns, contexts=len(pair_lists))


def _pairs_of(replies: Sequence[tuple[float, str, int]]) -> Iterator[tuple[int, int]]:
    """All of them, in an order of chance in which each reply has met one partner more before any has met two
    more."""
    count = len(replies)
    order = np.random.default_rng(count).permutation(count)
    for step in range(1, count // 2 + 1):
        for place in range(count if 2 * step < count else step):
            outcome, text, i = replies[order[place]]
            other_outcome, other_text, j = replies[order[(place + step) % count]]
            if abs(outcome - other_outcome) > 1e-9 and text != other_text:
                yield (i, j) if outcome > other_outcome else (j, i)


def pairwise_accuracy(scores: np.ndarray, pairs: Pairs) -> Measure:
    """Share of pairs whose better reply has the higher score, ties counting half; one unit per context.
    `scores` has one number per reply."""
    better, worse = scores[pairs.better], scores[pairs.worse]
    is_scored = ~(np.isnan(better) | np.isnan(worse))
    right = np.where(better == worse, 0.5, (better > worse).astype(float))
    count = np.bincount(pairs.context, is_scored.astype(float), minlength=pairs.contexts)
    return Measure(
        np.bincount(pairs.context, np.where(is_scored, right, 0.0), minlength=pairs.contexts), count
    )


def _measure(pairs: Sequence[tuple[float, float]]) -> Measure:
    columns = np.array(pairs, dtype=float).reshape(-1, 2).T
    return Measure(columns[0], columns[1])
