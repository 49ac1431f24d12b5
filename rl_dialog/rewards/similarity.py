"""How similar a candidate reply is to a reference reply: plain functions of two texts, from words or from a
model.

    score = similarity("token_f1")
    score(["it costs 5 pounds"], ["the ticket costs 5 pounds"])    # one float per pair, 1 = the same

README.md ("Similarity to a reference") defines each. Words need nothing; the others import what they need
when they are chosen.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rl_dialog.errors import UserError
from rl_dialog.rewards.coherence import cosine, extrema, greedy
from rl_dialog.rewards.words import UNSPACED, words

Similarity = Callable[
    [Sequence[str], Sequence[str]], list[float]
]  # (candidates, references) -> one float each
Pairs = list[tuple[str, str]]  # (candidate, reference), neither of them empty


def similarity(name: str, *, path: str = "") -> Similarity:
    """The similarity of that name. `path`: its WordNet folder, encoder or BLEURT checkpoint, where it needs
    one.

    A pair with an empty text (nothing but spaces) scores 0, or 1 when both are empty; libraries leave that
    undefined. Raises UserError for an unknown name, a missing `path` or one that the similarity does not
    read, and ImportError for a missing library.
    """
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, SIMILARITY_NAMES, n=1)
        raise UserError(
            f"unknown similarity {name!r}: expected one of "
            f"{', '.join(SIMILARITY_NAMES)}.{f' Did you mean {near[0]}?' if near else ''}"
        )
    make, reads = _MAKERS[name]
    if name in NEEDS_PATH and not path:
        raise UserError(f"similarity {name}: expected {reads} as its path (--similarity_path), got none")
    if path and not reads:
        raise UserError(f"similarity {name}: expected no path, because it reads no files, got {path!r}")
    function = make(path) if reads else make()

    def score(candidates: Sequence[str], references: Sequence[str]) -> list[float]:
        pairs = list(zip(candidates, references, strict=True))
        scored = [
            i for i, (candidate, reference) in enumerate(pairs) if candidate.strip() and reference.strip()
        ]
        values = [float(not candidate.strip() and not reference.strip()) for candidate, reference in pairs]
        for i, value in zip(scored, function([pairs[i] for i in scored]) if scored else (), strict=True):
            if not math.isfinite(value):
                raise UserError(f"similarity {name}: expected a finite number, got {value} for {pairs[i]}")
            values[i] = float(value)
        return values

    return score


def _token_f1() -> Callable[[Pairs], list[float]]:
    return lambda pairs: [token_f1(candidate, reference) for candidate, reference in pairs]


def token_f1(candidate: str, reference: str) -> float:
    """F1 of the two bags of words: 2 |A n B| / (|A| + |B|), words as often as they occur in both. Texts
    without words are equal or not."""
    mine, theirs = Counter(words(candidate)), Counter(words(reference))
    total = mine.total() + theirs.total()
    if not total:
        return float(candidate.strip() == reference.strip())
    return 2 * (mine & theirs).total() / total


def _chrf() -> Callable[[Pairs], list[float]]:
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    return lambda pairs: [
        min(metric.sentence_score(candidate, [reference]).score / 100, 1.0) for candidate, reference in pairs
    ]


def _bleu() -> Callable[[Pairs], list[float]]:
    from sacrebleu.metrics import BLEU

    metric = BLEU(
        effective_order=True
    )  # up to 4-grams, fewer where a text has fewer words; a precision of 0 is smoothed ("exp")
    apart = partial(re.compile(f"([{UNSPACED}])").sub, r" \1 ")  # 13a would take such a sentence for one word
    return lambda pairs: [
        min(metric.sentence_score(apart(candidate), [apart(reference)]).score / 100, 1.0)
        for candidate, reference in pairs
    ]


def _meteor(path: str) -> Callable[[Pairs], list[float]]:
    from rl_dialog.rewards.meteor import Meteor

    meteor = Meteor(path)
    return lambda pairs: [meteor(candidate, reference) for candidate, reference in pairs]


def _embedding(path: str) -> Callable[[Pairs], list[float]]:
    from rl_dialog.rewards.encoder import Encoder, cosine

    encoder = Encoder(path)
    return lambda pairs: cosine(encoder, pairs)


def _bert_score(path: str) -> Callable[[Pairs], list[float]]:
    from rl_dialog.rewards.encoder import Encoder, greedy_f1

    encoder = Encoder(path)
    return lambda pairs: greedy_f1(encoder, pairs)


def _bleurt(path: str) -> Callable[[Pairs], list[float]]:
    from rl_dialog.rewards.encoder import Regression

    return Regression(path)


def _by_words(compare: Callable[[Any, Any], float]) -> Callable[[str], Callable[[Pairs], list[float]]]:
    """Texts compared by the vectors of their words. Where one has no word that is known, they are equal or
    not."""

    def make(path: str) -> Callable[[Pairs], list[float]]:
        from rl_dialog.rewards.word_vectors import word_vectors

        vectors_of = word_vectors(path)

        def score(pairs: Pairs) -> list[float]:
            candidates, references = (vectors_of([pair[side] for pair in pairs]) for side in (0, 1))
            return [
                compare(mine, theirs) if len(mine) and len(theirs) else float(one.strip() == other.strip())
                for mine, theirs, (one, other) in zip(candidates, references, pairs, strict=True)
            ]

        return score

    return make


def _emotion(path: str) -> Callable[[Pairs], list[float]]:
    from rl_dialog.rewards.teachers import make_teachers

    teacher = make_teachers([f"emotion={path}" if path else "emotion"])["emotion"]

    def score(pairs: Pairs) -> list[float]:
        if not pairs:
            return []
        candidates, references = (teacher.ask([pair[side] for pair in pairs]) for side in (0, 1))
        return [cosine(mine, theirs) for mine, theirs in zip(candidates, references, strict=True)]

    return score


_average = _by_words(lambda mine, theirs: cosine(mine.mean(0), theirs.mean(0)))
_extrema = _by_words(lambda mine, theirs: cosine(extrema(mine), extrema(theirs)))
_greedy = _by_words(lambda mine, theirs: (greedy(mine, theirs) + greedy(theirs, mine)) / 2)
_VECTORS = "word vectors (a text file such as GloVe's, or a model's folder, whose input embeddings are read)"
_ENCODER = "an encoder (a folder with a transformers model, or a hub name such as roberta-large)"
_MAKERS: dict[
    str, tuple[Callable[..., Callable[[Pairs], list[float]]], str]
] = {  # name -> how to make it, what its path is
    "token_f1": (_token_f1, ""),
    "chrf": (_chrf, ""),
    "bleu": (_bleu, ""),
    "meteor": (
        _meteor,
        ("a WordNet folder for its synonyms (Debian: apt-get install wordnet-base, then /usr/share/wordnet)"),
    ),
    "average": (_average, _VECTORS),
    "extrema": (_extrema, _VECTORS),
    "greedy": (_greedy, _VECTORS),
    "emotion": (_emotion, "a classifier (a folder with a transformers model, or a hub name)"),
    "embedding": (_embedding, _ENCODER),
    "bert_score": (_bert_score, _ENCODER),
    "bleurt": (_bleurt, "a BLEURT checkpoint (a folder with a transformers sequence-regression model)"),
}
SIMILARITY_NAMES: tuple[str, ...] = tuple(_MAKERS)
NEEDS_PATH = frozenset(("meteor", "embedding", "bert_score", "bleurt"))  # the others read none, or need not
