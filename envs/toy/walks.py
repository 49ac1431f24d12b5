"""Random walks on a directed graph, after trlX's benchmark: learn the shortest way from walks that had none.

21 nodes, an edge with probability .1, node `a` is the goal, at most 10 steps; the return of an episode is its
optimality, (10 - steps) / (10 - fewest steps), paid at the goal, and 0 for one that does not get there. The
numbers are trlX's. The graph is drawn here (another for every `graph_seed`, redrawn until each node reaches
the goal in fewer than 10 steps), and a reply that names no edge ends the walk with 0: our choice.
"""

from __future__ import annotations

import random
import string
from functools import cache

from envs.toy.process import Outcome, TextProcess

NODES = 21
STEPS = 10
EDGE = 0.1  # probability
GOAL = 0
NAMES = string.ascii_lowercase[:NODES]

State = tuple[int, int, int]  # node, steps so far, fewest steps from the first node


class RandomWalks(TextProcess):
    """The user says the node, the reply names the next. A class with another `graph_seed` has another
    graph."""

    graph_seed = 1002
    max_turns = STEPS
    habits = (0.0,)

    def starts(self) -> list[tuple[float, State]]:
        fewest = distances(self.graph_seed)
        return [(1 / (NODES - 1), (node, 0, fewest[node])) for node in range(NODES) if node != GOAL]

    def line(self, state: State) -> str:
        return NAMES[state[0]]

    def moves(self, state: State) -> list[str]:
        return [NAMES[node] for node in graph(self.graph_seed)[state[0]]]

    def outcomes(self, state: State, move: str) -> list[Outcome]:
        (_, steps, fewest), node = state, NAMES.index(move)
        if node == GOAL:
            return [(1.0, (STEPS - steps - 1) / (STEPS - fewest), None)]
        return [(1.0, 0.0, None if steps + 1 == STEPS else (node, steps + 1, fewest))]

    def blunder(self, state: State) -> Outcome:
        return 1.0, 0.0, None

    def draw(self) -> str:
        """The edges, and where the walk is."""
        here = self.state[0] if self.state else GOAL
        edges = graph(self.graph_seed)
        return "\n".join(
            f"{'>' if node == here else ' '} {NAMES[node]} -> "
            + (" ".join(NAMES[after] for after in edges[node]) or "goal")
            for node in range(NODES)
        )


@cache
def graph(seed: int) -> tuple[tuple[int, ...], ...]:
    """The nodes that each node has an edge to; none from the goal."""
    chance = random.Random(f"walks {seed}")
    while True:
        edges = tuple(
            tuple(a for a in range(NODES) if a != node and chance.random() < EDGE) if node != GOAL else ()
            for node in range(NODES)
        )
        if len(_distances(edges)) == NODES and max(_distances(edges).values()) < STEPS:
            return edges


@cache
def distances(seed: int) -> dict[int, int]:
    """Node -> fewest steps to the goal."""
    return _distances(graph(seed))


def _distances(edges: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    found, frontier = {GOAL: 0}, [GOAL]
    for node in frontier:  # grows while it is read: breadth first
        new = [a for a in range(NODES) if node in edges[a] and a not in found]
        found |= dict.fromkeys(new, found[node] + 1)
        frontier += new
    return found
