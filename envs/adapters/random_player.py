"""A player that knows no game: it says what it has read that looks like a move, and changes of it, until the
game takes one.

Moves of TextArena stand in brackets, `[4]` or `[attack 0 1]`, and the prompts show some, or how they are
written: `[row col]`, `[<number>]`, `[Propose] $X.XX`. A proposal is one of those texts, or one with other
numbers, letters or words in the same places; words are those of lists and tables. The game is asked whether
it would take it (`legal`), and the first that it would take is played: a mover that is random but not
uniform. After `TRIALS` refusals the last proposal is played as it is, and TextArena's own allowance for
errors applies.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envs.text_world import Message

TRIALS, DRAWS = 400, 4000
LATEST = 8  # messages that are read for moves
# What stands in brackets, one pair within them, and an amount or a code that may follow: [Propose] $X.XX
SNIPPET = re.compile(r"\[((?:[^\[\]\n]|\[[^\[\]\n]{0,20}\]){1,60})\](?: (\$[\w.]+|[A-Z]{4,}\b))?")
PART = re.compile(r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|(?<![A-Za-z])[a-h](?=\d)")
COUNT = re.compile(r"\d+|(?<![A-Za-z])[A-Z](?![A-Za-z0-9])")  # numbers, and letters that stand for them
WORD = re.compile(r"<[^<>]*>|[A-Za-z_]{2,}")
CODE = re.compile(r"(?<=\] )[A-Z]{4,}|(?<![A-Za-z])X+(?![A-Za-z])")
PLACES = "XYZNMRCIJK"  # letters that prompts write for numbers: [swap X Y]
SPEAKER = re.compile(r"\[(GAME|Player ?\d*)\]")
LISTED = re.compile(r"\b\w+(?:, \w+)+")  # red, blue, green; \b: a long word is read once
NOTHING = ("[pass]", "yes", "no", "[1]", "[0]")


@dataclass(frozen=True)
class Heard:
    """What messages show that may be part of a move."""

    snippets: tuple[str, ...]  # in brackets, each once, the newest first
    words: tuple[str, ...] = ()  # of lists and tables
    numbers: tuple[int, ...] = ()

    @property
    def highest(self) -> int:
        return max((9, *self.numbers))


def heard(messages: list[Message]) -> Heard:
    """What the latest messages and the first one show: the prompt explains the moves."""
    found: dict[str, None] = {}
    words: dict[str, None] = {}
    numbers: dict[int, None] = {}
    for message in (*messages[: -LATEST - 1 : -1], *messages[:1]):
        if message["role"] == "assistant":
            continue
        text = SPEAKER.sub("", message["content"] or "")
        for inside, tail in SNIPPET.findall(text):
            found |= dict.fromkeys([f"[{inside}]", *([f"[{inside}] {tail}"] if tail else [])])
        rows = "\n".join(line for line in text.splitlines() if "|" in line)
        words |= dict.fromkeys(re.findall(r"[A-Za-z]{2,}", " ".join([rows, *LISTED.findall(text)])))
        numbers |= dict.fromkeys(int(number) for number in re.findall(r"(?<!\d)\d{1,3}(?!\d)", text))
    snippets = tuple(each for each in found if any(letter.isalnum() for letter in each))
    return Heard(snippets, tuple(words), tuple(numbers))


def propose(known: Heard, chance: random.Random) -> str:
    """One of the snippets, every other time changed, or a word of a list in brackets."""
    if not known.snippets and known.words and chance.random() < 0.7:
        return f"[{chance.choice(known.words)}]"
    text = chance.choice(known.snippets or NOTHING)
    if chance.random() < 0.5:
        return text
    change = chance.choice((_parts, _parts, _filled, _shared_out))
    return change(_coded(text, chance), known, chance)


def _number(known: Heard, chance: random.Random) -> str:
    return str(chance.randint(0, chance.choice((3, 9, known.highest))))


def _parts(text: str, known: Heard, chance: random.Random) -> str:
    """Other numbers and letters, all or some; now and then letters stay, or are all taken for numbers."""
    letters_are = chance.choice(("letters", "letters", "themselves", "numbers"))
    share = chance.choice((0.5, 1.0))

    def another(part: re.Match[str]) -> str:
        if chance.random() > share:
            return part[0]
        if part[0].isdigit():
            return _number(known, chance)
        if letters_are == "themselves":
            return part[0]
        if letters_are == "numbers" or (part[0].upper() in PLACES and chance.random() < 0.7):
            return str(chance.randint(0, 3))
        letters = "abcdefgh" if chance.random() < 0.7 else "abcdefghijklmnopqrstuvwxyz"
        letter = chance.choice(letters)
        return letter.upper() if part[0].isupper() else letter

    return PART.sub(another, text)


def _filled(text: str, known: Heard, chance: random.Random) -> str:
    """Words are places for numbers, for letters where they say so, or for words: `[row col X]`. The first may
    be what to do: `[swap row col]`."""
    from_lists = known.words and chance.random() < 0.5
    keeps = chance.random() < 0.3 and len(WORD.findall(text)) > 1
    seen = 0

    def filled(word: re.Match[str]) -> str:
        nonlocal seen
        seen += 1
        if keeps and seen == 1:
            return word[0]
        if from_lists:
            return chance.choice(known.words)
        return chance.choice("abcdefghijklmnopqrstuvwxyz") if "letter" in word[0] else _number(known, chance)

    return WORD.sub(filled, text)


def _shared_out(text: str, known: Heard, chance: random.Random) -> str:
    """Numbers that make up one that was told: `[A4 B2 C2]` of 8 units."""
    places = len(COUNT.findall(text))
    total = chance.choice(known.numbers or (1,))
    cuts = sorted(chance.randint(0, total) for _ in range(places - 1))
    counts = iter(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    return COUNT.sub(lambda part: str(next(counts)), text)


def _coded(text: str, chance: random.Random) -> str:
    """Other codes: digits for `$X.XX`, and letters of the first five for `CCAACCCC`."""

    def another(code: re.Match[str]) -> str:
        letters = "0123456789" if set(code[0]) == {"X"} else "ABCDE"
        return "".join(chance.choices(letters, k=len(code[0])))

    return CODE.sub(another, text) if "] " in text else text


def random_move(messages: list[Message], chance: random.Random, legal: Callable[[str], bool]) -> str:
    """A move that the game would take, if `TRIALS` proposals hold one."""
    known, tried, proposal = heard(messages), set(), ""
    for _ in range(DRAWS):
        proposal = propose(known, chance)
        if proposal in tried:
            continue
        tried.add(proposal)
        if legal(proposal):
            return proposal
        if len(tried) == TRIALS:
            break
    return proposal


class RandomTalker:
    """The same without a game to ask: what a client can do who sees the messages alone. Where `play` gives it
    the world its moves are legal."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, messages: list[Message]) -> str:
        return propose(heard(messages), self._chance(messages))

    def in_world(self, world: Any) -> Callable[[list[Message]], str]:
        """A random mover that asks the game."""
        return lambda messages: world.random_move(self._chance(messages))

    def _chance(self, messages: list[Message]) -> random.Random:
        return random.Random(f"{self.seed} {len(messages)}")
