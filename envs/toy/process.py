"""What the toy worlds share: a Markov decision process in words, its optimum, its players and its logs.

A subclass says how episodes begin, how a state looks, what may be said and what follows; from that come the
world to talk in (`envs/text_world.py`), the best return by value iteration and the policy that attains it.
Where two states look alike the search goes over beliefs, so that the optimum is that of a player who sees the
words only.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from envs.text_world import Message, Played, Player, play
from rl_dialog.data.schema import Dialog, write_jsonl

State = Any  # hashable
Outcome = tuple[float, float, State]  # probability, reward, next state; None is the end
Belief = tuple[tuple[State, float], ...]  # states that look alike, with their probabilities
SAME = 1e-9  # values that differ by less are equal


class TextProcess:
    """A world to talk in, from a law in words. States are hashable, and all that a subclass says holds for
    every instance of the class."""

    max_turns = 40  # replies after which an unfinished episode is truncated
    haste = 1.0  # discount of the optimal player; below 1 where only the end pays, lest it takes its time
    habits: tuple[float, ...] = (0.0, 0.0, 0.5, 0.9)  # shares of best moves in the logs, dialog by dialog

    def starts(self) -> list[tuple[float, State]]:
        """First states with their probabilities."""
        raise NotImplementedError

    def line(self, state: State) -> str:
        """What the user says in a state."""
        raise NotImplementedError

    def moves(self, state: State) -> list[str]:
        """What may be said; the same in states that look alike."""
        raise NotImplementedError

    def outcomes(self, state: State, move: str) -> list[Outcome]:
        """Everything that a move can lead to."""
        raise NotImplementedError

    def blunder(self, state: State) -> Outcome:
        """What follows a reply that is no move."""
        raise NotImplementedError

    def read(self, state: State, reply: str) -> str | None:
        """The move that a reply is, as `outcomes` takes it; None for none."""
        said = plain(reply)
        return said if said in self.moves(state) else None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        """Begins an episode, which depends on `seed` and the replies only."""
        self.chance = random.Random(seed)
        odds, states = zip(*self.starts(), strict=True)
        self.state = self.chance.choices(states, odds)[0]
        self.turns = 0
        self.messages: list[Message] = [{"role": "user", "content": self.line(self.state)}]
        return self._observation(), {}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """What the reply leads to; `info["legal"]` says whether it was a move. Raises RuntimeError outside of
        an episode."""
        if getattr(self, "state", None) is None:
            raise RuntimeError("expected a running episode, got a reply outside of one; call reset first")
        move = self.read(self.state, reply)
        found = [self.blunder(self.state)] if move is None else self.outcomes(self.state, move)
        _, reward, self.state = self.chance.choices(found, [odds for odds, _, _ in found])[0]
        self.turns += 1
        self.messages.append({"role": "assistant", "content": reply})
        terminated = self.state is None
        if not terminated:
            self.messages.append({"role": "user", "content": self.line(self.state)})
        truncated = not terminated and self.turns >= self.max_turns
        return self._observation(), float(reward), terminated, truncated, {"legal": move is not None}

    def _observation(self) -> list[Message]:
        return [dict(message) for message in self.messages]

    @classmethod
    def solution(cls, discount: float = 1.0) -> Any:
        """What knows the best moves; kept for the class."""
        return _solved(cls, discount)

    @classmethod
    def optimum(cls) -> float:
        """The best mean return within `max_turns`, of a player who sees the words only. Exact."""
        return cls.solution().best_return()

    @classmethod
    def scripted_players(cls) -> dict[str, Callable[[int], Player]]:
        """Scripted players, from the best to a random one."""
        return {
            "optimal": lambda seed: Guided(cls(), 1.0, seed),
            "half": lambda seed: Guided(cls(), 0.5, seed),
            "random": lambda seed: Guided(cls(), 0.0, seed),
        }

    @classmethod
    def logged(cls, dialogs: int, seed: int) -> Iterator[Played]:
        """The episodes of the logs, one after the other; `meta.player` says whose they are."""
        for number in range(dialogs):
            skill = cls.habits[number % len(cls.habits)]
            start = random.Random(f"{seed} {number}").getrandbits(62)
            played = play(cls(), Guided(cls(), skill, start), seed=start)
            yield told(played, player=f"{skill:.0%} best moves")

    @classmethod
    def write_logs(cls, path: str | Path, *, dialogs: int, seed: int) -> dict[str, Any]:
        """Writes Dialogs of mixed quality, one JSON line each; returns their number and mean return."""
        return write_played(cls.logged(dialogs, seed), path, f"{cls.__name__}-{seed}")

    @classmethod
    def reference_returns(cls, episodes: int, seed: int) -> dict[str, list[float]]:
        """Of the logs, of a player that says any move, and the optimum."""
        said = [play(cls(), Guided(cls(), 0.0, i), seed=i) for i in range(seed, seed + episodes)]
        logs = [total for played in cls.logged(episodes, seed) for total in played.returns.values()]
        random_moves = [total for played in said for total in played.returns.values()]
        return {"behaviour policy": logs, "random moves": random_moves, "optimum": [cls.optimum()]}


def write_played(episodes: Iterable[Played], path: str | Path, name: str) -> dict[str, Any]:
    """Writes the Dialogs of episodes of one player, numbered after a name; returns their number and mean
    return."""
    returns: list[float] = []

    def each() -> Iterator[Dialog]:
        for number, played in enumerate(episodes):
            (dialog,), (total,) = played.dialogs.values(), played.returns.values()
            returns.append(total)
            dialog.id = f"{name}-{number:06d}"
            yield dialog

    write_jsonl(each(), path)
    return {"path": str(path), "dialogs": len(returns), "mean_return": sum(returns) / max(len(returns), 1)}


def told(played: Played, **meta: Any) -> Played:
    """The episode with more in its Dialogs' `meta`."""
    for dialog in played.dialogs.values():
        dialog.meta |= meta
    return played


def plain(text: str) -> str:
    """A reply without capitals, line breaks and a full stop."""
    return " ".join(text.lower().split()).rstrip(".!")


# ------------------------------------------------------------------------------------------------------------
# Beliefs and the optimum


def beliefs_of(process: TextProcess, states: list[tuple[float, State]]) -> dict[str, tuple[float, Belief]]:
    """Weighted states by how they look: line -> its probability, and the states that it leaves possible."""
    by_line: dict[str, dict[State, float]] = defaultdict(lambda: defaultdict(float))
    for odds, state in states:
        by_line[process.line(state)][state] += odds
    found = {}
    for line, weights in by_line.items():
        total = sum(weights.values())
        belief = tuple(sorted(((state, round(w / total, 12)) for state, w in weights.items()), key=repr))
        found[line] = total, belief
    return found


def consequences(
    process: TextProcess, belief: Belief, move: str | None
) -> tuple[float, dict[str, tuple[float, Belief]]]:
    """The mean reward of a move, and the beliefs after it by what the user says; None is a blunder."""
    earned, states = 0.0, []
    for state, weight in belief:
        for odds, reward, after in (
            [process.blunder(state)] if move is None else process.outcomes(state, move)
        ):
            earned += weight * odds * reward
            states += [] if after is None else [(weight * odds, after)]
    return earned, beliefs_of(process, states)


class Solution:
    """Value iteration over the beliefs that can be reached, for every number of replies that are left."""

    def __init__(self, process: TextProcess, discount: float = 1.0) -> None:
        self.process, self.discount = process, discount
        self.first = beliefs_of(process, process.starts())
        self.ways: dict[Belief, dict[str | None, Any]] = {}
        todo = [belief for _, belief in self.first.values()]
        while todo:
            belief = todo.pop()
            if belief not in self.ways:
                moves = (*process.moves(belief[0][0]), None)
                self.ways[belief] = {move: consequences(process, belief, move) for move in moves}
                todo += [b for _, after in self.ways[belief].values() for _, b in after.values()]
        self.values = [dict.fromkeys(self.ways, 0.0)]  # by the number of replies left
        while len(self.values) <= process.max_turns:
            level = {belief: max(self._worths(belief, self.values[-1]).values()) for belief in self.ways}
            if level == self.values[-1]:
                break  # more replies change nothing
            self.values.append(level)

    def _worths(self, belief: Belief, later: dict[Belief, float]) -> dict[str | None, float]:
        return {
            move: earned + self.discount * sum(odds * later[after] for odds, after in following.values())
            for move, (earned, following) in self.ways[belief].items()
        }

    def best_return(self) -> float:
        """The expected return of the best player from the start."""
        return sum(odds * self.values[-1][belief] for odds, belief in self.first.values())

    def best(self, belief: Belief, left: int) -> list[str]:
        """The best moves with so many replies left; more than one when they tie."""
        later = self.values[min(left, len(self.values)) - 1]
        worths = {move: worth for move, worth in self._worths(belief, later).items() if move is not None}
        return [move for move, worth in worths.items() if worth > max(worths.values()) - SAME]


@cache
def _solved(cls: type[TextProcess], discount: float) -> Solution:
    return Solution(cls(), discount)


class Guided:
    """A player who makes a best move with probability `skill` and any move otherwise. It knows the law and
    keeps the belief from what was said."""

    def __init__(self, process: TextProcess, skill: float, seed: int) -> None:
        self.process, self.skill, self.chance = process, skill, random.Random(f"player {seed}")
        self.known: list[Message] = []

    def __call__(self, messages: list[Message]) -> str:
        self._hear(messages)
        moves = self.process.moves(self.belief[0][0])
        if self.chance.random() < self.skill:
            left = self.process.max_turns - len(messages) // 2
            moves = self.process.solution(self.process.haste).best(self.belief, left)
        return self.chance.choice(moves)

    def _hear(self, messages: list[Message]) -> None:
        if not self.known or messages[: len(self.known)] != self.known:
            self.belief = beliefs_of(self.process, self.process.starts())[messages[0]["content"]][1]
            self.known = messages[:1]
        for number in range(len(self.known), len(messages), 2):
            move = self.process.read(self.belief[0][0], messages[number]["content"])
            heard = messages[number + 1]["content"]
            self.belief = consequences(self.process, self.belief, move)[1][heard][1]
        self.known = list(messages)
