"""Wordle in a terminal: the grid in colours, and a person as a policy."""

from __future__ import annotations

from collections.abc import Callable

from envs.wordle.policies import Policy
from envs.wordle.rules import MALFORMED, TRIES, State
from envs.wordle.words import Words

PAINT = {"g": "\x1b[30;42m", "y": "\x1b[30;43m", "b": "\x1b[97;100m"}
PLAIN = "\x1b[0m"


def grid(state: State) -> str:
    """The guesses on the colours of a terminal, a line each, and dots for the tries that are left."""
    lines = []
    for guess, colours in zip(state.guesses, state.colours, strict=True):
        if colours == MALFORMED:
            lines.append(f"{guess[:40]!r} is no guess")
        else:
            letters = zip(guess.strip().upper(), colours, strict=True)
            lines.append("".join(f"{PAINT[colour]} {letter} {PLAIN}" for letter, colour in letters))
    return "\n".join(lines + [" . " * 5] * (TRIES - len(state.guesses)))


class Person:
    """Whoever sits at the keyboard. An empty line asks for a hint, where there is a policy that gives one."""

    def __init__(
        self,
        words: Words,
        hint: Policy | None = None,
        *,
        read: Callable[[str], str] = input,
        say: Callable[[str], None] = print,
    ) -> None:
        self.words, self.hint, self.read, self.say = words, hint, read, say

    def __call__(self, state: State) -> str:
        self.say(f"\n{grid(state)}\n{state.left.bit_count()} words are left")
        while not (guess := self.read("guess: ").strip()):
            self.say(f"perhaps {self.hint(state)}" if self.hint else "five letters")
        return guess
