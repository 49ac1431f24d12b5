"""The rule system: answers from the databases, asks for what it lacks, books when the user names the details.

It sees the dialog state and nothing of the goal, and succeeds in about 97 of 100 dialogs; what it cannot do
is to resolve "the same day".
"""

from __future__ import annotations

import random

from envs.multiwoz.acts import ACT_SLOT, GOAL_DOMAIN, GOAL_SLOT, NONE, Act, Acts
from envs.multiwoz.database import Database, Table, first, nth, reference
from envs.multiwoz.options import Options
from envs.multiwoz.tracker import SEMI, DialogState

BOOKING_CALLS = {
    "Train": {"People"},
    "Restaurant": {"Time", "Day", "People"},
    "Hotel": {"Stay", "Day", "People"},
}  # user informs that ask to book
THANKS_BACK = 0.3  # probability of "you are welcome" after a goodbye
ANYTHING_ELSE = 0.5  # probability of "anything else?" after a booking
# Probability of each of two more things in a recommendation. Of the original only "up to two" was on record;
# at this value precision and the share of dialogs whose answers are about different rows come out as they
# were measured with it.
MENTION = 0.2
TRAIN_NEEDS = ("day", "destination", "departure")  # and one of the times
TIMES = (("Leave",), ("Arrive",), ("Leave", "Arrive"))
TIME_ODDS = (0.33, 0.66)  # the first, else the second, else both
UNKNOWN = "unknown"


class RulePolicy:
    """The rule; it holds nothing of a dialog."""

    def __init__(self, database: Database, options: Options) -> None:
        self.database, self.options = database, options

    def respond(self, state: DialogState, rng: random.Random) -> Acts:
        """The system's turn; what it says depends on the user's last turn, the belief state and chance."""
        groups: dict[tuple[str, str], list[str]] = {}
        for intent, domain, slot, _ in state.user_acts:
            groups.setdefault((domain, intent), []).append(slot)
        acts: list[Act] = []
        for (domain, intent), slots in groups.items():
            if domain == "general":
                acts += _courtesy(intent, rng)
                continue
            if (
                intent == "Inform"
                and not BOOKING_CALLS.get(domain, set()).isdisjoint(slots)
                and (rows := state.rows[GOAL_DOMAIN[domain]])
            ):
                return self._book(rows, rng)
            if domain == "Taxi":
                acts += self._taxi(state, rng)
            elif domain == "Train":
                acts += self._train(state, intent, slots, rng)
            else:
                acts += self._venue(state, domain, intent, slots, rng)
        return tuple(acts) or (("greet", "general", NONE, NONE),)

    @staticmethod
    def _book(rows: int, rng: random.Random) -> Acts:
        booking: Act = ("Book", "Booking", "Ref", reference(first(rows)))
        return (booking, ("reqmore", "general", NONE, NONE)) if rng.random() < ANYTHING_ELSE else (booking,)

    def _taxi(self, state: DialogState, rng: random.Random) -> list[Act]:
        constraints = state.semi.get("taxi", {})
        if "leaveAt" not in constraints and "arriveBy" not in constraints:
            times = ("Leave", "Arrive")[: 1 + int(rng.random() * 2)]
            return [("Request", "Taxi", slot, "?") for slot in times]
        if self.options.taxi_places and (
            missing := [slot for slot in ("departure", "destination") if slot not in constraints]
        ):
            return [("Request", "Taxi", ACT_SLOT["Taxi"][slot], "?") for slot in missing]
        taxi = self.database.taxi(rng)
        return [("Inform", "Taxi", "Car", taxi["car type"]), ("Inform", "Taxi", "Phone", taxi["phone"])]

    def _train(self, state: DialogState, intent: str, slots: list[str], rng: random.Random) -> list[Act]:
        constraints, rows = state.semi.get("train", {}), state.rows["train"]
        missing = [ACT_SLOT["Train"][slot] for slot in TRAIN_NEEDS if slot not in constraints]
        if "leaveAt" not in constraints and "arriveBy" not in constraints:
            draw = rng.random()
            missing += TIMES[sum(draw >= odds for odds in TIME_ODDS)]
        if missing:
            return [("Request", "Train", slot, "?") for slot in missing]
        if not rows:
            return _listed("NoOffer", "Train", constraints)
        if intent == "Request":
            return _answers(self.database["train"], "Train", slots, first(rows))
        return _listed("OfferBook", "Train", constraints)

    def _venue(
        self, state: DialogState, domain: str, intent: str, slots: list[str], rng: random.Random
    ) -> list[Act]:
        name = GOAL_DOMAIN[domain]
        constraints, rows, table = state.semi.get(name, {}), state.rows[name], self.database[name]
        if not rows:
            return _listed("NoOffer", domain, constraints)
        if intent == "Request":
            return _answers(table, domain, slots, first(rows))
        count = rows.bit_count()
        if count == 1:
            subset = _some(SEMI[name], rng, least=1)
            return _answers(table, domain, [ACT_SLOT[domain][slot] for slot in subset], first(rows))
        return [
            ("Inform", domain, "Choice", str(count)),
            *_recommendation(table, domain, nth(rows, int(rng.random() * count)), rng),
        ]


def _courtesy(intent: str, rng: random.Random) -> list[Act]:
    if intent == "bye":
        welcome = [("welcome", "general", NONE, NONE)] if rng.random() < THANKS_BACK else []
        return [("bye", "general", NONE, NONE), *welcome]
    return [("welcome", "general", NONE, NONE)] if intent == "thank" else []


def _listed(intent: str, domain: str, constraints: dict[str, str]) -> list[Act]:
    """An act about all the constraints."""
    return [(intent, domain, ACT_SLOT[domain][slot], value) for slot, value in constraints.items()] or [
        (intent, domain, NONE, NONE)
    ]


def _answers(table: Table, domain: str, slots: list[str], row: int) -> list[Act]:
    """What a row says about the slots."""
    values = table.rows[row]
    return [
        (
            "Inform",
            domain,
            slot,
            _text(values.get(GOAL_SLOT[domain].get(slot, slot)) if slot != "Ref" else reference(row)),
        )
        for slot in slots
    ]


def _recommendation(table: Table, domain: str, row: int, rng: random.Random) -> list[Act]:
    """The row's name and up to two other things about it."""
    values = table.rows[row]
    about = [
        act for act, slot in GOAL_SLOT[domain].items() if act != "Name" and isinstance(values.get(slot), str)
    ]
    extras = rng.sample(about, sum(rng.random() < MENTION for _ in range(min(2, len(about)))))
    slots = [*(["Name"] if "name" in values else []), *extras]
    return [("Recommend", domain, act, values[GOAL_SLOT[domain][act]]) for act in slots]


def _some(slots: tuple[str, ...], rng: random.Random, *, least: int) -> list[str]:
    """A random subset of a random size."""
    if not slots:
        return []
    return rng.sample(slots, least + int(rng.random() * (len(slots) - least + 1)))


def _text(value: object) -> str:
    return value if isinstance(value, str) else UNKNOWN
