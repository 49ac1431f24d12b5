"""A player that knows no game: it says what it has read in brackets, and changes of it, until the game takes
one for a move.

Moves of TextArena stand in brackets, `[4]` or `[attack 0 1]`, and the prompts show some. A proposal is one of
those texts, or one with other numbers and letters in the same places. The game is asked whether it would take
it (`legal`), and the first that it would take is played: a mover that is random but not uniform. After
`TRIALS` refusals the last proposal is played as it is, and TextArena's own allowance for errors applies.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from envs.text_world import Message

TRIALS, DRAWS = 40, 400
LATEST = 8  # messages that are read for moves
SNIPPET = re.compile(r"\[[^\[\]\n]{1,40}\]")
PART = re.compile(r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|(?<![A-Za-z])[a-h](?=\d)")
PLACES = "XYZNMRCIJK"  # letters that prompts write for numbers: [swap X Y]
SPEAKER = re.compile(r"\[(GAME|Player ?\d*)\]")
NOTHING = ("[pass]", "yes", "no", "[1]", "[0]")


def snippets(messages: list[Message]) -> list[str]:
    """What stands in brackets in the latest messages and the first one, the newest first, each once."""
    found: dict[str, None] = {}
    for message in (*messages[: -LATEST - 1 : -1], *messages[:1]):  # the prompt explains the moves
        if message["role"] != "assistant":
            found |= dict.fromkeys(SNIPPET.findall(SPEAKER.sub("", message["content"] or "")))
    return [each for each in found if any(letter.isalnum() for letter in each)]


def propose(texts: list[str], chance: random.Random) -> str:
    """One of the texts, every other time with other numbers and letters."""
    text = chance.choice(texts or NOTHING)
    if chance.random() < 0.5:
        return text
    highest = max([9, *(int(number) for each in texts for number in re.findall(r"\d{1,3}", each))])

    def another(part: re.Match[str]) -> str:
        if part[0].isdigit():
            return str(chance.randint(0, chance.choice((3, 9, highest))))
        if part[0].upper() in PLACES and chance.random() < 0.7:
            return str(chance.randint(0, 3))
        letters = "abcdefgh" if chance.random() < 0.7 else "abcdefghijklmnopqrstuvwxyz"
        letter = chance.choice(letters)
        return letter.upper() if part[0].isupper() else letter

    return PART.sub(another, text)


def random_move(messages: list[Message], chance: random.Random, legal: Callable[[str], bool]) -> str:
    """A move that the game would take, if `TRIALS` proposals hold one."""
    texts, tried, proposal = snippets(messages), set(), ""
    for _ in range(DRAWS):
        proposal = propose(texts, chance)
        if proposal in tried:
            continue
        tried.add(proposal)
        if legal(proposal):
            return proposal
        if len(tried) == TRIALS:
            break
    return proposal


class RandomTalker:
    """The same without a game to ask: what a client can do who sees the messages alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, messages: list[Message]) -> str:
        return propose(snippets(messages), random.Random(f"{self.seed} {len(messages)}"))
