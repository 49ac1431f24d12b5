"""METEOR (Banerjee and Lavie 2005, with the weights of Lavie and Agarwal 2007): unigrams matched exactly, by
stem, then by WordNet synonym."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from rl_dialog.errors import UserError
from rl_dialog.rewards.words import words

ALPHA, BETA, GAMMA = (
    0.9,
    3.0,
    0.5,
)  # weight of recall in the mean; power and weight of the penalty for fragments

PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
ENDINGS = {  # inflected ending -> ending of the base form, per part of speech: WordNet's rules of detachment
    "noun": (
        ("s", ""),
        ("ses", "s"),
        ("ves", "f"),
        ("xes", "x"),
        ("zes", "z"),
        ("ches", "ch"),
        ("shes", "sh"),
        ("men", "man"),
        ("ies", "y"),
    ),
    "verb": (
        ("s", ""),
        ("ies", "y"),
        ("es", "e"),
        ("es", ""),
        ("ed", "e"),
        ("ed", ""),
        ("ing", "e"),
        ("ing", ""),
    ),
    "adj": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adv": (),
}


class Meteor:
    """(1 - gamma (chunks / matches)^beta) P R / (alpha P + (1 - alpha) R) for P = matches / candidate words
    and R = matches / reference words.

    A chunk is a run of matches that are neighbours in both texts. Raises UserError for a folder without
    WordNet, UserError without a stemmer.
    """

    def __init__(self, wordnet: str | Path) -> None:
        self.wordnet = WordNet(wordnet)
        try:
            import snowballstemmer
        except ImportError as error:
            raise UserError("similarity meteor needs a stemmer: pip install snowballstemmer") from error
        self.stem = lru_cache(maxsize=100_000)(snowballstemmer.stemmer("english").stemWord)

    def __call__(self, candidate: str, reference: str) -> float:
        mine, theirs = words(candidate), words(reference)
        if not mine or not theirs:
            return float(candidate.strip() == reference.strip())
        matched = self.align(mine, theirs)
        if not matched:
            return 0.0
        precision, recall = len(matched) / len(mine), len(matched) / len(theirs)
        chunks = sum(1 for i, j in matched.items() if matched.get(i - 1) != j - 1)
        mean = precision * recall / (ALPHA * precision + (1 - ALPHA) * recall)
        return (1 - GAMMA * (chunks / len(matched)) ** BETA) * mean

    def align(self, mine: list[str], theirs: list[str]) -> dict[int, int]:
        """{position in `mine`: position in `theirs`}: in each stage the longest runs first, so that there are
        few chunks."""
        matched: dict[int, int] = {}
        for same in (lambda a, b: a == b, lambda a, b: self.stem(a) == self.stem(b), self.wordnet.synonyms):
            free, unmatched = (
                set(range(len(mine))) - matched.keys(),
                set(range(len(theirs))) - set(matched.values()),
            )
            pairs = {(i, j) for i in free for j in unmatched if same(mine[i], theirs[j])}
            while pairs:
                run = _longest_run(pairs)
                matched |= run
                pairs = {(i, j) for i, j in pairs if i not in run and j not in run.values()}
        return matched


def _longest_run(pairs: set[tuple[int, int]]) -> dict[int, int]:
    """The longest diagonal of neighbouring pairs, the earliest among equals."""
    best: tuple[int, int, int] = (0, 0, 0)  # length, -i, -j
    for i, j in pairs:
        length = 1
        while (i + length, j + length) in pairs:
            length += 1
        best = max(best, (length, -i, -j))
    length, i, j = best[0], -best[1], -best[2]
    return {i + n: j + n for n in range(length)}


class WordNet:
    """Which words share a synset, from the index.* and *.exc files of a WordNet folder. Raises UserError
    where they are missing."""

    def __init__(self, folder: str | Path) -> None:
        missing = [
            f"index.{part}" for part in PARTS_OF_SPEECH if not (Path(folder) / f"index.{part}").is_file()
        ]
        if missing:
            raise UserError(
                f"{folder}: expected a WordNet folder with index.noun, index.verb, index.adj and index.adv, "
                f"missing {', '.join(missing)}; on Debian: apt-get install wordnet-base, then "
                "/usr/share/wordnet"
            )
        self.index = {part: _read_index(Path(folder) / f"index.{part}") for part in PARTS_OF_SPEECH}
        self.exceptions = {part: _read_exceptions(Path(folder) / f"{part}.exc") for part in PARTS_OF_SPEECH}
        self.synsets: Callable[[str], frozenset[tuple[str, str]]] = lru_cache(maxsize=100_000)(self._synsets)

    def synonyms(self, one: str, other: str) -> bool:
        """Do the two words, as they are or in a base form, stand in one synset?"""
        return not self.synsets(one).isdisjoint(self.synsets(other))

    def _synsets(self, word: str) -> frozenset[tuple[str, str]]:
        return frozenset(
            (part, offset)
            for part in PARTS_OF_SPEECH
            for form in self._forms(word, part)
            for offset in self.index[part].get(form, ())
        )

    def _forms(self, word: str, part: str) -> set[str]:
        bases = {
            word[: -len(ending)] + base
            for ending, base in ENDINGS[part]
            if word.endswith(ending) and len(word) > len(ending)
        }
        return {word, *self.exceptions[part].get(word, bases)}


def _read_index(path: Path) -> dict[str, tuple[str, ...]]:
    """Lines `lemma pos synsets pointers ...pointer symbols... senses tagged ...offsets...`; the licence's
    lines begin with two spaces."""
    offsets = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("  "):
            fields = line.split()
            offsets[fields[0]] = tuple(fields[-int(fields[2]) :])
    return offsets


def _read_exceptions(path: Path) -> dict[str, list[str]]:
    """Lines `inflected base [base ...]`."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {inflected: bases for inflected, *bases in map(str.split, lines)}
