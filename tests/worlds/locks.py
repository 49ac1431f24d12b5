"""Three doors in a row, opened by codes of six letters: a small world whose replies are words of several
tokens that begin alike, and whose best return is known exactly.

Other worlds of the same kind are `partial(Locks, seed=3)`.
"""

from __future__ import annotations

import random

from tests.worlds.text_game import Game, Outcome

HALLS, DOORS, CODES, LENGTH = 8, 3, 6, 6
SLIP = 0.1  # probability that a door leads to any hall

Place = tuple[int, int]  # the door, and the hall it is in


class Locks(Game):
    """Every code opens every door, and leads to a hall of its own; the last door pays most.

    What a code pays and where it leads are drawn from `seed`, for every door and hall apart. `scale` is the
    unit of what is paid.
    """

    horizon = DOORS
    discount = 1.0

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        chance = random.Random(f"locks {seed}")
        words: set[str] = set()
        while len(words) < CODES:
            words.add("".join(chance.choices("abc", k=LENGTH)))
        self.codes = sorted(words)
        keys = [(door, hall, code) for door in range(DOORS) for hall in range(HALLS) for code in self.codes]
        self.leads = {key: chance.randrange(HALLS) for key in keys}
        self.pays = {key: scale * chance.gauss(0, 1.0 if key[0] == DOORS - 1 else 0.2) for key in keys}
        self.scale = scale

    def start(self, chance: random.Random) -> Place:
        return 0, chance.randrange(HALLS)

    def line(self, state: Place) -> str:
        return f"door {state[0]} hall {state[1]}"

    def moves(self, state: Place) -> list[str]:
        return self.codes

    def outcomes(self, state: Place, move: str) -> list[Outcome]:
        door, _ = state
        pay, leads = self.pays[*state, move], self.leads[*state, move]
        if door == DOORS - 1:
            return [(1.0, pay, None)]
        odds = {hall: SLIP / HALLS for hall in range(HALLS)}
        odds[leads] += 1 - SLIP
        return [(probability, pay, (door + 1, hall)) for hall, probability in odds.items()]

    def blunder(self, state: Place) -> tuple[float, None]:
        return -2.0 * self.scale, None
