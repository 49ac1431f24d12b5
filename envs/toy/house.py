"""Text navigation: put the stale food into the fridge.

LMRL-Gym's task, a reward of 1 for the reply that reaches the goal and 0 for any other. Its house comes from
another program; this one, with eight rooms, and its words are ours.
"""

from __future__ import annotations

from envs.toy.process import Outcome, TextProcess

DOORS = {
    "hall": {"north": "bedroom", "east": "living room", "south": "garden", "west": "kitchen"},
    "kitchen": {"east": "hall", "north": "pantry"},
    "pantry": {"south": "kitchen"},
    "bedroom": {"south": "hall", "east": "bathroom"},
    "bathroom": {"west": "bedroom"},
    "living room": {"west": "hall", "north": "study"},
    "study": {"south": "living room"},
    "garden": {"north": "hall"},
}
FOOD, HAND, FRIDGE = "stale bread", "your hand", "kitchen"

State = tuple[str, str, bool]  # room of the player, of the food (or the hand), whether the fridge is open

MAP = """\
  pantry   bedroom - bathroom
    |         |
  kitchen -  hall - living room - study
              |
            garden"""


class House(TextProcess):
    """Fully observed: the user says the room, its doors, where the food is and whether the fridge is open.

    The food lies in any room but the kitchen. A reply that is no move changes nothing. After 30 replies the
    episode is truncated.
    """

    max_turns = 30
    haste = 0.99
    habits = (0.0, 0.0, 0.2)

    def starts(self) -> list[tuple[float, State]]:
        places = [(room, food, False) for room in DOORS for food in DOORS if food != FRIDGE]
        return [(1 / len(places), place) for place in places]

    def line(self, state: State) -> str:
        room, food, is_open = state
        return f"{_room(state)} The {FOOD} is in {_place(food)}. The fridge is {_fridge(is_open)}."

    def moves(self, state: State) -> list[str]:
        room, food, is_open = state
        moves = [f"go {side}" for side in DOORS[room]]
        moves += [f"take {FOOD}"] if food == room else []
        moves += ["open fridge"] if room == FRIDGE and not is_open else []
        moves += [f"put {FOOD} in fridge"] if room == FRIDGE and is_open and food == HAND else []
        return moves

    def outcomes(self, state: State, move: str) -> list[Outcome]:
        room, food, is_open = state
        if move.startswith("put"):
            return [(1.0, 1.0, None)]
        if move.startswith("go"):
            room = DOORS[room][move.removeprefix("go ")]
        return [
            (1.0, 0.0, (room, HAND if move.startswith("take") else food, is_open or move == "open fridge"))
        ]

    def blunder(self, state: State) -> Outcome:
        return 1.0, 0.0, state

    def draw(self) -> str:
        """The map, the player's room in capitals."""
        room = self.state[0] if self.state else FRIDGE
        return MAP.replace(room, room.upper())


class HiddenHouse(House):
    """Partially observed: the food is seen where one is and in one's hand only, the fridge in the kitchen."""

    def line(self, state: State) -> str:
        room, food, is_open = state
        seen = [f"The {FOOD} is in {_place(food)}."] if food in (room, HAND) else []
        seen += [f"The fridge is {_fridge(is_open)}."] if room == FRIDGE else []
        return " ".join([_room(state), *seen])


def _room(state: State) -> str:
    return f"You are in the {state[0]}. Doors: {', '.join(DOORS[state[0]])}."


def _place(food: str) -> str:
    return food if food == HAND else f"the {food}"


def _fridge(is_open: bool) -> str:
    return "open" if is_open else "closed"
