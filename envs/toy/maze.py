"""The double-T maze of LMRL-Gym: find the goal from any of 25 cells, seeing where one is or only the walls.

LMRL's: 10 x 13 cells of which 26 are free, goal (8, 6), four moves, 0 for the reply that reaches the goal, -1
for any other, -4 for one that is no move, 100 replies; 25 starts at a mean distance of 7.84, at most 12, so
that the best return is -6.84. These figures leave one maze of this shape. The words are ours, and so is what
its recipe of logs (15 % a sub-optimal solver, 85 % random, confined to parts of the maze) leaves open.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from envs.text_world import Message, Played, play
from envs.toy.process import Outcome, TextProcess, told

PICTURE = """\
#############
#.....#.....#
###.#####.###
###.#####.###
###.#####.###
###.......###
######.######
######.######
######.######
#############"""
FREE = {(r, c) for r, row in enumerate(PICTURE.splitlines()) for c, mark in enumerate(row) if mark == "."}
GOAL = (8, 6)
SOLVERS, SLIPS = 0.15, 0.2  # share of the logs, and of their moves that are any move
PARTS = [  # that a logged walk keeps to, with the cell that its solver goes for: the way on to the goal
    ({cell for cell in FREE if cell[0] >= 4}, GOAL),
    ({cell for cell in FREE if cell[0] <= 5 and cell[1] <= 5 and cell != (5, 4) and cell != (5, 5)}, (5, 3)),
    ({cell for cell in FREE if cell[0] <= 5 and cell[1] >= 7 and cell != (5, 7) and cell != (5, 8)}, (5, 9)),
]
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

Cell = tuple[int, int]


class DoubleT(TextProcess):
    """Fully observed: the user says the goal, the place and the walls beside it."""

    max_turns = 100

    def starts(self) -> list[tuple[float, Cell]]:
        return [(1 / (len(FREE) - 1), cell) for cell in sorted(FREE - {GOAL})]

    def line(self, state: Cell) -> str:
        place = f"The goal is at {GOAL[0]}, {GOAL[1]}. You are at {state[0]}, {state[1]}."
        return f"{place} {walls(state)}"

    def moves(self, state: Cell) -> list[str]:
        return [f"move {name}" for name in STEPS]

    def outcomes(self, state: Cell, move: str) -> list[Outcome]:
        after = beside(state, move.removeprefix("move "))
        return [(1.0, 0.0, None) if after == GOAL else (1.0, -1.0, after)]

    def blunder(self, state: Cell) -> Outcome:
        return 1.0, -4.0, state

    def draw(self) -> str:
        """The maze with the goal G and the player @."""
        rows = [list(row) for row in PICTURE.splitlines()]
        rows[GOAL[0]][GOAL[1]] = "G"
        row, column = self.state or GOAL
        rows[row][column] = "@"
        return "\n".join("".join(row) for row in rows)

    @classmethod
    def logged(cls, dialogs: int, seed: int) -> Iterator[Played]:
        """Walks that keep to one part of the maze: 15 % of a solver with slips, cut off where the part's way
        to the goal leaves it, and 85 % at random, up to 100 replies. No dialog leads from the upper parts to
        the goal, so that its way has to be put together."""
        for number in range(dialogs):
            chance = random.Random(f"{seed} {number}")
            walker = Walker(
                cls(), PARTS[number % len(PARTS)], solves=chance.random() < SOLVERS, chance=chance
            )
            played = play(walker.world, walker, seed=walker.begin())
            yield told(played, player="solver" if walker.solves else "random")


class HiddenDoubleT(DoubleT):
    """Partially observed: the user says the walls only; where that is follows from the way so far."""

    def line(self, state: Cell) -> str:
        return walls(state)


def walls(cell: Cell) -> str:
    """The sides of a cell that are closed."""
    closed = [name for name in STEPS if beside(cell, name) == cell]
    return f"Walls: {', '.join(closed) or 'none'}."


def beside(cell: Cell, name: str) -> Cell:
    """The cell that a step leads to: the same one where there is a wall."""
    after = cell[0] + STEPS[name][0], cell[1] + STEPS[name][1]
    return after if after in FREE else cell


class Walker:
    """Who wrote a dialog of the logs: it sees the maze and keeps to its part."""

    def __init__(
        self, world: DoubleT, part: tuple[set[Cell], Cell], *, solves: bool, chance: random.Random
    ) -> None:
        self.world, (self.cells, self.target), self.solves, self.chance = world, part, solves, chance
        self.distance = distances(self.target, self.cells)

    def begin(self) -> int:
        """A seed whose episode begins inside the part, and not where its solver wants to be."""
        while True:
            seed = self.chance.getrandbits(62)
            self.world.reset(seed=seed)
            if self.world.state in self.cells - {self.target}:
                return seed

    def __call__(self, messages: list[Message]) -> str:
        after = {name: beside(self.world.state, name) for name in STEPS}
        names = [name for name in STEPS if after[name] in self.cells]
        if self.solves and self.chance.random() >= SLIPS:
            names = [min(names, key=lambda name: self.distance[after[name]])]
        name = self.chance.choice(names)
        if self.solves and after[name] == self.target:
            self.world.max_turns = self.world.turns + 1  # the log is cut where the part ends
        return f"move {name}"


def distances(goal: Cell, cells: set[Cell] = FREE) -> dict[Cell, int]:
    """Cell -> the fewest moves to a goal without leaving these cells."""
    found, frontier = {goal: 0}, [goal]
    for cell in frontier:  # grows while it is read: breadth first
        new = [
            a for a in dict.fromkeys(beside(cell, name) for name in STEPS) if a in cells and a not in found
        ]
        found |= dict.fromkeys(new, found[cell] + 1)
        frontier += new
    return found
