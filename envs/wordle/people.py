"""Games of people, from the coloured squares that they share:

    Wordle 215 3/6

    ⬛🟨⬛⬛🟩
    🟩⬛🟨⬛🟩
    🟩🟩🟩🟩🟩

The words are not told. They are fitted: a guess for each row that has its colours against one answer.
"""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from envs.wordle.colours import CODES, LENGTH, WON, code, colour_codes, letters
from envs.wordle.logs import Logged
from envs.wordle.policies import game_chance
from envs.wordle.rules import MALFORMED, TRIES, State, first_guesses
from envs.wordle.words import Words
from rl_dialog.errors import UserError

SQUARES = {"🟩": "g", "🟧": "g", "🟨": "y", "🟦": "y", "⬛": "b", "⬜": "b"}
THOUSANDS = ".,'\u2019 \u00a0\u2009\u202f"  # what stands before the last three digits, by country
VARIATION = "\ufe0f"  # says only that the sign before it is a picture
ANSWERS_KEPT = 4096  # answers whose table of guesses by colours is kept


def squares(state: State) -> str:
    """What a person would share of a game."""
    signs = {"g": "🟩", "y": "🟨", "b": "⬛"}
    tries = len(state.guesses) if state.won else "X"
    rows = ("".join(map(signs.get, colours)) for colours in state.colours if colours != MALFORMED)
    return "\n".join([f"Wordle {tries}/{TRIES}", "", *rows])


def read_grid(text: str) -> tuple[str, ...]:
    """The longest run of lines of five squares, as colours; empty where it is no whole game: one to six rows,
    all green in the last one only, or six without."""
    runs: list[list[str]] = [[]]
    for line in text.replace(VARIATION, "").splitlines():
        row = "".join(SQUARES.get(sign, "?") for sign in line.strip())
        if len(row) == LENGTH and "?" not in row:
            runs[-1].append(row)
        elif runs[-1]:
            runs.append([])
    longest = max(runs, key=len)
    won = longest.index(WON) + 1 if WON in longest else TRIES
    return tuple(longest) if len(longest) == won <= TRIES else ()


def puzzle_number(text: str) -> int | None:
    """The day's number: `Wordle 215 3/6`, `Wordle 1,216 3/6`, with whatever stands between thousands."""
    found = re.search(rf"Wordle\s+#?(\d{{1,3}}(?:[{THOUSANDS}]\d{{3}})+|\d+)[.,]*\s", text)
    return int(re.sub(r"\D", "", found[1])) if found else None


class Fitter:
    """Finds words behind colours. `guesses` are the words that people try, with the vocabulary's."""

    def __init__(self, words: Words, guesses: Iterable[str] = ()) -> None:
        self.words = words
        self.guesses = sorted({*guesses, *words.words})
        self.letters = letters(self.guesses)
        self.by_colours = lru_cache(ANSWERS_KEPT)(self._by_colours)

    def fit(self, rows: tuple[str, ...], chance: random.Random, answer: str | None = None) -> State | None:
        """A game with these colours: of a random answer that allows them all, or of the one that is given.
        None where there is none."""
        answers = list(self.words.words) if answer is None else [answer]
        while answers:  # drawn without putting back
            place = int(chance.random() * len(answers))
            answers[place], answers[-1] = answers[-1], answers[place]
            order, ends = self.by_colours(answers.pop())
            spans = [(ends[code(row)], ends[code(row) + 1]) for row in rows]
            if all(start < end for start, end in spans):
                said = tuple(self.guesses[order[chance.randrange(start, end)]] for start, end in spans)
                return first_guesses(self.words, State(self.words.every, said, rows), len(rows))
        return None

    def _by_colours(self, answer: str) -> tuple[np.ndarray, list[int]]:
        """The guesses in the order of their colours' codes, and where each code begins."""
        codes = colour_codes(self.letters, letters([answer]), self.words.colouring)[:, 0]
        order = np.argsort(codes, kind="stable")
        ends = np.searchsorted(codes, np.arange(CODES + 1), sorter=order)
        return order, ends.tolist()


def people_games(
    texts: Iterable[str],
    words: Words,
    seed: int,
    *,
    guesses: Iterable[str] = (),
    answers: Mapping[int, str] | None = None,
) -> Iterator[Logged]:
    """A game for each text with a whole one in it that some word allows. `answers` are those of the days that
    the texts name; without it any answer will do, and texts of other days are left out with it. Raises
    UserError for answers that are no words of the vocabulary."""
    fitter = Fitter(words, guesses)
    if unknown := sorted({*(answers or {}).values()} - words.known):
        raise UserError(f"answers: expected words of the vocabulary, got {', '.join(unknown[:5])}")

    def games() -> Iterator[Logged]:
        for index, text in enumerate(texts):
            rows, answer = read_grid(text), answers.get(puzzle_number(text)) if answers else None
            if rows and (answer or not answers):
                state = fitter.fit(rows, game_chance(seed, index), answer)
                if state is not None:
                    yield Logged(state, "people", {"group": f"{seed}-{index}"})

    return games()


def read_texts(path: str | Path, column: str = "text") -> Iterator[str]:
    """The texts in a column of a CSV file with a header. Raises UserError where there is no such column."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            if column not in (lines.fieldnames or ()):
                has = ", ".join(lines.fieldnames or ()) or "none"
                raise UserError(
                    f"{path}: expected a column {column!r} with the texts, got {has} (see --column)"
                )
            for line in lines:
                yield line[column] or ""
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: expected a CSV file with a header ({error})") from error


def read_answers(path: str | Path) -> dict[int, str]:
    """The answers of days, a line with number and word each. Raises UserError for anything else."""
    try:
        lines = [
            line.split() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected lines with a number and a word each ({error})") from error
    wrong = [line for line in lines if len(line) != 2 or not line[0].isdecimal()]
    if wrong or not lines:
        got = repr(" ".join(wrong[0])) if wrong else "nothing"
        raise UserError(f"{path}: expected a number and a word per line, got {got}")
    return {int(number): word.lower() for number, word in lines}
