"""How a guess is coloured, one at a time or all guesses against all targets.

    g  green    the letter stands there in the target
    y  yellow   the letter stands elsewhere in it
    b  black    it does not

The two rules differ where a guess has a letter twice:

    simple     every such letter is yellow that occurs anywhere: eerie against crane is yyybg. The rule of the
               data sets and papers that play Wordle with language models
    official   each letter of the target pays for one letter of the guess, greens first, then from the left:
               eerie against crane is bbybg. The rule of the game in the newspaper
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np

LENGTH = 5
RULES = ("simple", "official")
WON = "g" * LENGTH
CODES = 3**LENGTH


def colour(guess: str, target: str, rule: str) -> str:
    """The colours of a guess, five of the letters g, y and b."""
    pairs = list(zip(guess, target, strict=True))
    if rule == "simple":
        return "".join("g" if a == b else "y" if a in target else "b" for a, b in pairs)
    unpaid = Counter(b for a, b in pairs if a != b)
    colours = []
    for a, b in pairs:
        paid = a != b and unpaid[a] > 0
        unpaid[a] -= paid
        colours.append("g" if a == b else "y" if paid else "b")
    return "".join(colours)


def letters(words: tuple[str, ...] | list[str]) -> np.ndarray:
    """(W, 5) uint8, a to z as 0 to 25."""
    return np.frombuffer("".join(words).encode(), np.uint8).reshape(-1, LENGTH) - ord("a")


def colour_codes(guesses: np.ndarray, targets: np.ndarray, rule: str) -> np.ndarray:
    """(G, T) uint8: the colours of every guess against every target, both as `letters`, as a number of base
    three (`code`): black 0, yellow 1, green 2, the first letter the highest digit."""
    green = guesses[:, None, :] == targets[None, :, :]  # (G, T, 5)
    if rule == "simple":
        occurs = np.zeros((len(targets), 26), bool)
        occurs[np.arange(len(targets))[:, None], targets] = True
        yellow = occurs[:, guesses].transpose(1, 0, 2)
    else:
        yellow, unpaid = np.zeros_like(green), ~green
        for i in range(LENGTH):
            paid = green[:, :, i]
            for j in range(LENGTH):
                pays = unpaid[:, :, j] & (guesses[:, None, i] == targets[None, :, j]) & ~paid
                unpaid[:, :, j] &= ~pays
                paid = paid | pays
            yellow[:, :, i] = paid
    digits = green.astype(np.uint8) + (yellow | green)
    return (digits * (3 ** np.arange(LENGTH)[::-1]).astype(np.uint8)).sum(axis=2, dtype=np.uint8)


@cache
def code(colours: str) -> int:
    """The number of `colour_codes` for five letters g, y and b."""
    return int(colours.translate(str.maketrans("byg", "012")), base=3)
