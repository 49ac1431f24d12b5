"""Wordle to talk in: the user says `wordle`, the assistant guesses, the user answers with five colours."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from envs.wordle.logs import write_logs
from envs.wordle.policies import POLICIES, Player, play
from envs.wordle.rules import Message, State, after, draw_target, messages_of, read_guess
from envs.wordle.terminal import grid
from envs.wordle.words import SHIPPED, Words, load_words, well_formed


class Wordle:
    """Five letters, six tries, -1 for each guess but the one that wins; every end is a real one.

    A class of one's own plays another list or the newspaper's rule, and is used as `--env module:Class`:

        class Published(Wordle):
            word_list = "wordle_official.txt"
            colouring = "official"
    """

    word_list: str | Path = SHIPPED  # a file with a word per line
    colouring = "simple"

    def __init__(self) -> None:
        self.words = self.vocabulary()
        self.state: State | None = None

    @classmethod
    def vocabulary(cls) -> Words:
        """The words that may be the target. Raises UserError for a list without words of five letters."""
        return load_words(cls.word_list, cls.colouring)

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """A new game, which depends on the seed and the replies only."""
        self.chance = random.Random(seed)
        self.state = State(self.words.every)
        return messages_of(self.state), {"left": len(self.words)}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Colours a guess. `info` has, for analysis only, how many words are `left`, whether the guess was
        `well_formed`, and whether it is in the `vocabulary`. Raises RuntimeError after the end."""
        if self.state is None or self.state.over:
            raise RuntimeError("expected a running game, got a reply outside of one; call reset first")
        guess = read_guess(reply)
        target = draw_target(self.words, self.state, self.chance.random())
        self.state = after(self.words, self.state, reply, target)
        info = {"left": self.state.left.bit_count(), "well_formed": well_formed(guess)}
        info["vocabulary"] = guess in self.words.known
        reward = 0.0 if self.state.won else -1.0
        return messages_of(self.state), reward, self.state.over, False, info

    def draw(self) -> str:
        """The grid so far, in the colours of a terminal."""
        return grid(self.state or State(self.words.every))

    @classmethod
    def scripted_players(cls) -> dict[str, Callable[[int], Player]]:
        """Scripted players by name: each is made of a seed and maps messages to a guess."""
        return {name: partial(Player, cls.vocabulary(), name) for name in POLICIES}

    @classmethod
    def reference_returns(cls, episodes: int, seed: int) -> dict[str, list[float]]:
        """Of the policy behind the logs and of the best scripted one."""
        words = cls.vocabulary()
        lines = {"behaviour policy": "mixture", "information gain": "optimal"}
        return {
            line: [float(play(words, name, seed=seed, index=i).total) for i in range(episodes)]
            for line, name in lines.items()
        }

    @classmethod
    def write_logs(
        cls, path: str | Path, *, dialogs: int, seed: int, kind: str = "mixture"
    ) -> dict[str, Any]:
        """Logs of one kind (`logs.KINDS`), a Dialog per line; returns what they are like."""
        return write_logs(path, dialogs=dialogs, seed=seed, kind=kind, words=cls.vocabulary())
