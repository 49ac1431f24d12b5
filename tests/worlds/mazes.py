"""A maze and a walk in words, drawn from a seed: small worlds whose best return is known exactly.

    python -m tests.worlds.mazes maze --logs maze.jsonl --episodes 2500 --seed 1

Other worlds of the same kind are `partial(Maze, seed=3, size=4)` or `lambda: Walk(seed=5, scale=10.0)`.
"""

from __future__ import annotations

import random

from tests.worlds import text_game
from tests.worlds.text_game import Game, Outcome, choose, play_episode, player_return, write_logs

__all__ = ["GAMES", "Maze", "Walk", "choose", "play_episode", "player_return", "write_logs"]

Cell = tuple[int, int]
STEPS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
PLACES = ["bakery", "bridge", "castle", "chapel", "cinema", "farm", "forge", "garden", "harbour", "inn"]
PLACES += ["library", "mill", "museum", "orchard", "palace", "pier", "quarry", "school", "stable", "tower"]
PATHS = ["amber", "blue", "green", "grey", "red", "white"]


class Maze(Game):
    """A square maze with walls from `seed`; every episode starts in another cell and ends at the goal.

    A reply costs `cost`, also when it runs into a wall or is no move; the one that reaches the goal is free.
    `openings` is the share of walls taken out of a maze that has one single way between any two cells.
    """

    discount = 1.0

    def __init__(
        self, seed: int = 0, size: int = 6, cost: float = 1.0, openings: float = 0.2, show_walls: bool = True
    ) -> None:
        chance = random.Random(f"maze {seed}")
        self.size, self.cost, self.show_walls = size, cost, show_walls
        self.horizon = self.limit
        self.cells = [(row, column) for row in range(size) for column in range(size)]
        self.goal = chance.choice(self.cells)
        self.open = self._dig(chance)
        beside = {frozenset((a, b)) for a in self.cells for b in self._beside(a)}
        walls = sorted(beside - self.open, key=sorted)
        self.open |= set(chance.sample(walls, round(openings * len(walls))))

    def _beside(self, cell: Cell) -> list[Cell]:
        found = [(cell[0] + down, cell[1] + right) for down, right in STEPS.values()]
        return [(row, column) for row, column in found if 0 <= row < self.size and 0 <= column < self.size]

    def _dig(self, chance: random.Random) -> set[frozenset[Cell]]:
        """The passages of a maze with one way between any two cells: a walk that backs out of dead ends."""
        passages, seen, way = set(), {self.cells[0]}, [self.cells[0]]
        while way:
            new = [cell for cell in self._beside(way[-1]) if cell not in seen]
            if not new:
                way.pop()
                continue
            way.append(chance.choice(new))
            seen.add(way[-1])
            passages.add(frozenset(way[-2:]))
        return passages

    def start(self, chance: random.Random) -> Cell:
        return chance.choice([cell for cell in self.cells if cell != self.goal])

    def line(self, state: Cell) -> str:
        walls = [name for name in STEPS if self._go(state, name) == state]
        place = f"at {state[0]},{state[1]}"
        return f"{place}; walls {', '.join(walls) or 'none'}" if self.show_walls else place

    def moves(self, state: Cell) -> list[str]:
        return [f"go {name}" for name in STEPS]

    def outcomes(self, state: Cell, move: str) -> list[Outcome]:
        after = self._go(state, move.removeprefix("go "))
        return [(1.0, 0.0, None) if after == self.goal else (1.0, -self.cost, after)]

    def blunder(self, state: Cell) -> tuple[float, Cell]:
        return -self.cost, state

    def _go(self, cell: Cell, name: str) -> Cell:
        after = cell[0] + STEPS[name][0], cell[1] + STEPS[name][1]
        return after if frozenset((cell, after)) in self.open else cell


class Walk(Game):
    """A walk between places with names, always towards the end: each path pays a reward drawn from `seed`.

    There are `size` places, from each two or three paths to one of the next three, and the last two are the
    end. Rewards are normal with standard deviation `scale`. With probability `slip` a walker takes another
    path of the place than the named one. A reply that names no path costs `scale` and goes nowhere.
    """

    discount = 1.0

    def __init__(self, seed: int = 0, size: int = 12, scale: float = 1.0, slip: float = 0.0) -> None:
        if not 4 <= size <= len(PLACES):
            raise ValueError(f"expected between 4 and {len(PLACES)} places, got {size}")
        chance = random.Random(f"walk {seed}")
        self.scale, self.slip = scale, slip
        self.limit = self.horizon = size
        self.places = chance.sample(PLACES, size)
        self.paths: list[dict[str, tuple[float, int]]] = []
        for place in range(size - 2):
            names = sorted(chance.sample(PATHS, chance.choice((2, 3))))
            ahead = [min(place + chance.randint(1, 3), size - 1) for _ in names]
            pay = [round(chance.gauss(0, 1), 2) * scale for _ in names]
            self.paths.append(dict(zip(names, zip(pay, ahead, strict=True), strict=True)))

    def start(self, chance: random.Random) -> int:
        return chance.randrange(2)

    def line(self, state: int) -> str:
        return f"{self.places[state]}: {', '.join(self.moves(state))}"

    def moves(self, state: int) -> list[str]:
        return list(self.paths[state])

    def outcomes(self, state: int, move: str) -> list[Outcome]:
        paths = self.paths[state]
        odds = {name: self.slip / (len(paths) - 1) if name != move else 1 - self.slip for name in paths}
        return [
            (odds[name], reward, after if after < len(self.paths) else None)
            for name, (reward, after) in paths.items()
            if odds[name] > 0
        ]

    def blunder(self, state: int) -> tuple[float, int]:
        return -self.scale, state


GAMES = {"maze": Maze, "walk": Walk}

if __name__ == "__main__":
    text_game.main(GAMES, __doc__.splitlines()[0])
