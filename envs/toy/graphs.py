"""Graphs of two or three states whose learned values are known in closed form (each class has its own).

toy_graph     averages over the logs take the safe way, the best continuation is on the other one
Stitching     the good end and the way to it are in different dialogs
Luck          what looks like a good choice was luck
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from envs.text_world import Played, play
from envs.toy.process import Outcome, TextProcess, told

Table = dict[str, tuple[str, dict[str, list[Outcome]]]]  # state -> what the user says, move -> outcomes


class Graph(TextProcess):
    """A process from a table. A reply that is no move costs `lost` and ends the episode."""

    table: Table = {}
    begin: tuple[str, ...] = ("start",)
    lost = -8.0
    max_turns = 4
    cycle: tuple[tuple[str, ...], ...] = ()  # the replies of the logs' dialogs, over and over

    def starts(self) -> list[tuple[float, str]]:
        return [(1 / len(self.begin), state) for state in self.begin]

    def line(self, state: str) -> str:
        return self.table[state][0]

    def moves(self, state: str) -> list[str]:
        return list(self.table[state][1])

    def outcomes(self, state: str, move: str) -> list[Outcome]:
        return self.table[state][1][move]

    def blunder(self, state: str) -> Outcome:
        return 1.0, self.lost, None

    @classmethod
    def logged(cls, dialogs: int, seed: int) -> Iterator[Played]:
        """The dialogs of `cycle` in another order every time around, so that shares are exact."""
        for number in range(dialogs):
            turn, place = divmod(number, len(cls.cycle))
            order = random.Random(f"{seed} {turn}").sample(range(len(cls.cycle)), len(cls.cycle))
            yield told(cls._retold(cls.cycle[order[place]], f"{seed} {number}"), player="by shares")

    @classmethod
    def _retold(cls, replies: tuple[str, ...], luck: str) -> Played:
        """The first episode, of the seeds that `luck` draws, in which these replies are all moves."""
        chance = random.Random(luck)
        while True:
            said = iter(replies)
            played = play(cls(), lambda _, said=said: next(said), seed=chance.getrandbits(62))
            if all(info["legal"] for info in played.infos):
                return played


class BranchingGraph(Graph):
    """Left is safe and mediocre (-4); right leads to a bridge with the best end (-2) and a worse one (-6).

    In the logs 5 of 11 go left, 6 go right, and of these 1 goes north to -2 and 5 south to -6. With gamma 1
    the tau-expectile at the bridge is -6 + 4 w, w = tau / (tau + 5 (1 - tau)): a greedy learner goes right
    exactly for tau above 5/6, one that averages (tau .5, Monte Carlo) goes left. The optimum is -2.
    """

    table = {
        "start": ("The road forks. Left or right?", {"left": [(1, -4, None)], "right": [(1, 0, "bridge")]}),
        "bridge": ("A bridge. North or south?", {"north": [(1, -2, None)], "south": [(1, -6, None)]}),
    }
    cycle = (("left",),) * 5 + (("right", "north"),) + (("right", "south"),) * 5


class Stitching(Graph):
    """Half of the logs walk from the gate to the hall and miss the prize, half start in the hall and take it.

    V(hall) = tau and Q(gate, go) = gamma tau; whole dialogs never join the two. Optimum 1.
    """

    table = {
        "gate": ("You are at the gate.", {"go": [(1, 0, "hall")]}),
        "hall": ("You are in the hall. Left or right?", {"left": [(1, 0, None)], "right": [(1, 1, None)]}),
    }
    begin = ("gate", "hall")
    cycle = (("go", "left"), ("right",))


class Luck(Graph):
    """A coin is tossed and its side is told; then +1 or -1 is collected. Waiting earns 0.

    The logs toss only. V of the start is 0 for every tau, as the coin is nobody's choice; an expectile of
    returns takes it for one: 2 tau - 1. Optimum 0.
    """

    table = {
        "start": ("Toss or wait?", {"toss": [(0.5, 0, "heads"), (0.5, 0, "tails")], "wait": [(1, 0, None)]}),
        "heads": ("Heads.", {"collect": [(1, 1, None)]}),
        "tails": ("Tails.", {"collect": [(1, -1, None)]}),
    }
    cycle = (("toss", "collect"),)
