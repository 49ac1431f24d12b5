"""Who plays: scripted policies from good to hopeless, and games between one of them and chance.

A policy sees the state and returns a guess. `POLICIES` makes one for a game, of the words and a generator of
random numbers; `Player` lets it talk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from envs.wordle.rules import Message, State, after, draw_target, read_state
from envs.wordle.words import Words

Policy = Callable[[State], str]
MakePolicy = Callable[[Words, random.Random], Policy]


@dataclass
class StartWords:
    """An opener that agrees with what is known, else any word that does."""

    words: Words
    chance: random.Random

    def __call__(self, state: State) -> str:
        return self.chance.choice(self.words.members(state.left & self.words.openers or state.left))


@dataclass
class Optimal:
    """The guess that says most about the target, of the words that are left; begins with an opener. It looks
    one guess ahead, so it is good and not truly optimal."""

    words: Words
    chance: random.Random

    def __call__(self, state: State) -> str:
        opening = state.left == self.words.every and self.words.openers
        return self.chance.choice(
            self.words.members(self.words.openers) if opening else self.words.best(state.left)
        )


@dataclass
class Repeat:
    """One of its first guesses once more; any word while there is none."""

    words: Words
    chance: random.Random
    first: int = 2  # how many of them it chooses from

    def __call__(self, state: State) -> str:
        return self.chance.choice(state.guesses[: self.first] or self.words.words)


@dataclass
class RandomMixture:
    """A word that agrees with what is known, with probability `smart`; else any word."""

    words: Words
    chance: random.Random
    smart: float = 1 / 3

    def __call__(self, state: State) -> str:
        smart = self.chance.random() < self.smart
        return self.chance.choice(self.words.members(state.left) if smart else self.words.words)


@dataclass
class Wrong:
    """A word that cannot be the target any more; any word while all can."""

    words: Words
    chance: random.Random

    def __call__(self, state: State) -> str:
        some = state.left != self.words.every
        place = self.chance.randrange(len(self.words))
        while some and state.left >> place & 1:
            place = self.chance.randrange(len(self.words))
        return self.words.words[place]


@dataclass
class Mixture:
    """At each guess `first` with probability `share`, else `second`."""

    chance: random.Random
    share: float
    first: Policy
    second: Policy

    def __call__(self, state: State) -> str:
        return (self.first if self.chance.random() < self.share else self.second)(state)


@dataclass
class MonteCarlo:
    """Lets a policy play `samples` games on from here and guesses as those began that returned most."""

    words: Words
    chance: random.Random
    policy: Policy
    samples: int = 10

    def __call__(self, state: State) -> str:
        returns: dict[str, list[int]] = {}
        for _ in range(self.samples):
            end = play_on(self.words, self.policy, self.chance, state)
            returns.setdefault(end.guesses[len(state.guesses)], []).append(end.total)
        return max(returns, key=lambda guess: fmean(returns[guess]))


POLICIES: dict[str, MakePolicy] = {
    "optimal": Optimal,
    "start words": StartWords,
    "monte carlo": lambda words, chance: MonteCarlo(words, chance, RandomMixture(words, chance, 1.0)),
    "consistent": lambda words, chance: RandomMixture(words, chance, 1.0),
    "half": lambda words, chance: RandomMixture(words, chance, 0.5),
    "mixture": RandomMixture,
    "optimal or random": lambda words, chance: Mixture(
        chance, 0.5, Optimal(words, chance), RandomMixture(words, chance, 0.0)
    ),
    "random": lambda words, chance: RandomMixture(words, chance, 0.0),
    "wrong": Wrong,
    "repeat": Repeat,
}


def game_chance(seed: int, *index: Any) -> random.Random:
    """The generator of one game among those of a seed."""
    return random.Random(" ".join(map(str, (seed, *index))))


def play_on(words: Words, policy: Policy, chance: random.Random, state: State) -> State:
    """The end of a game that goes on from a state."""
    while not state.over:
        guess = policy(state)
        state = after(words, state, guess, draw_target(words, state, chance.random()))
    return state


def play(words: Words, name: str, *, seed: int, index: int) -> State:
    """The end of game `index` of a seed, played by one of `POLICIES`."""
    policy = POLICIES[name](words, game_chance(seed, index, "player"))
    return play_on(words, policy, game_chance(seed, index), State(words.every))


class Player:
    """A policy that talks: the conversation so far -> a guess."""

    def __init__(self, words: Words, name: str, seed: int) -> None:
        self.words, self.policy = words, POLICIES[name](words, game_chance(seed, "player"))

    def __call__(self, messages: list[Message]) -> str:
        return self.policy(read_state(self.words, messages))
