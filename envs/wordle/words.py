"""The words that may be the target, and which of them are left: sets of words as the bits of an integer.

Word i is bit i. A guess and its colours allow one set of words, which a few ANDs of precomputed sets give
(the words with this letter here, with at least so many of this letter); what is known after several guesses
is the AND of their sets.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.wordle.colours import CODES, LENGTH, RULES, colour_codes, letters
from rl_dialog.errors import UserError

SHIPPED = Path(__file__).with_name("words.txt")
REMEMBERED = 1 << 16  # sets of words whose best guesses are kept, and guesses with colours whose set is
LISTED = 1 << 14  # sets whose members are kept: they take more room
AT_ONCE = 1 << 20  # guesses times targets that are coloured in one go: tens of megabytes

# Words to begin with: common letters, many vowels.
OPENERS = (
    "alone arise aside cause crane early great heart house later learn least noise ocean other radio raise "
    "ratio react slate stare stone story tears trace train trail under"
)


class Words:
    """A vocabulary and its rule of colours. It never changes: copies are itself."""

    def __init__(self, words: Iterable[str], colouring: str = "simple") -> None:
        """Raises UserError for no words, for what is no word of five letters, and for an unknown rule."""
        self.words, self.colouring = tuple(sorted(set(words))), colouring
        wrong = [word for word in self.words if not well_formed(word)]
        if colouring not in RULES:
            raise UserError(f"colouring: expected one of {', '.join(RULES)}, got {colouring!r}")
        if wrong or not self.words:
            got = ", ".join(map(repr, wrong[:5])) or "none"
            raise UserError(f"expected words of {LENGTH} letters from a to z, got {got}")
        self.known = frozenset(self.words)
        self.letters = letters(self.words)  # (W, 5)
        self.every = (1 << len(self.words)) - 1
        self.openers = sum(1 << i for i, word in enumerate(self.words) if word in OPENERS.split())
        self._here = [[self._bits(self.letters[:, i] == c) for c in range(26)] for i in range(LENGTH)]
        counts = np.stack([(self.letters == c).sum(axis=1) for c in range(26)])  # (26, W)
        self._at_least = [[self._bits(of >= k) for k in range(LENGTH + 2)] for of in counts]
        self.allowed = lru_cache(REMEMBERED)(self._allowed)
        self.members = lru_cache(LISTED)(self._members)
        self.best = lru_cache(REMEMBERED)(self._best)

    def __len__(self) -> int:
        return len(self.words)

    def __deepcopy__(self, memo: Any) -> Words:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return shared, (self.words, self.colouring)

    def _allowed(self, guess: str, colours: str) -> int:
        """The words against which the guess has these colours; none for colours that no word gives."""
        left, shown, black = self.every, Counter(), set()
        for i, (letter, colour) in enumerate(zip(guess, colours, strict=True)):
            c = ord(letter) - ord("a")
            left &= self._here[i][c] if colour == "g" else ~self._here[i][c]
            shown[c] += colour != "b"
            if colour == "b":
                black.add(c)
            elif colour == "y" and c in black and self.colouring == "official":
                return 0  # the first of them would be yellow
        for c, count in shown.items():
            least = count if self.colouring == "official" else min(count, 1)
            left &= self._at_least[c][least]
            if c in black:  # then there are no more of it than were shown; the simple rule shows all or none
                left &= ~self._at_least[c][count + 1 if self.colouring == "official" else 1]
        return left

    def _members(self, left: int) -> tuple[str, ...]:
        """The words of a set, in the order of the alphabet."""
        return tuple(self.words[i] for i in self._places(left))

    def _best(self, left: int) -> tuple[str, ...]:
        """Of the words that are left, the guesses that say most about which of them is the target: the
        highest log n - E log n', n being the words left before and n' after the colours."""
        places = self._places(left)
        if len(places) < 3:  # one guess, or two that say the same
            return self.members(left)
        expected = self._uncertainty(self.letters[places])
        return tuple(self.words[places[k]] for k in np.flatnonzero(expected < expected.min() + 1e-9))

    def _uncertainty(self, these: np.ndarray) -> np.ndarray:
        """n times E log n' of each guess, when the targets are the same n words."""
        size, found = max(1, AT_ONCE // len(these)), []
        for start in range(0, len(these), size):
            codes = colour_codes(these[start : start + size], these, self.colouring)
            rows = CODES * np.arange(len(codes))[:, None]
            sizes = np.bincount((codes + rows).ravel(), minlength=CODES * len(codes)).reshape(-1, CODES)
            found.append((sizes * np.log(np.maximum(sizes, 1))).sum(axis=1))
        return np.concatenate(found)

    def _places(self, left: int) -> np.ndarray:
        """The bits that are set, rising."""
        size = (len(self.words) + 7) // 8
        return np.flatnonzero(
            np.unpackbits(np.frombuffer(left.to_bytes(size, "little"), np.uint8), bitorder="little")
        )

    @staticmethod
    def _bits(chosen: np.ndarray) -> int:
        return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


def well_formed(guess: str) -> bool:
    """Five letters from a to z; what is meant need not be a word."""
    return len(guess) == LENGTH and guess.isascii() and guess.isalpha() and guess.islower()


def read_words(path: str | Path) -> list[str]:
    """The words of five letters from a to z in a file with a word per line, in lower case; others are left
    out, as published lists mix lengths. Raises UserError where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").lower().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a text file with a word per line ({error})") from error
    found = [word for word in lines if re.fullmatch(f"[a-z]{{{LENGTH}}}", word)]
    if not found:
        got = f"{len(lines)} words and none such"
        raise UserError(f"{path}: expected a word of {LENGTH} letters from a to z per line, got {got}")
    return found


@cache
def load_words(path: str | Path = SHIPPED, colouring: str = "simple") -> Words:
    """The vocabulary of a file, by default the one that is shipped; read once."""
    return shared(tuple(sorted(set(read_words(path)))), colouring)


@lru_cache(16)
def shared(words: Sequence[str], colouring: str) -> Words:
    """One object for equal vocabularies, so that what worlds remember is remembered once."""
    return Words(words, colouring)
