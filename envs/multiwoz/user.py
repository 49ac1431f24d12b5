"""The user: an agenda of things to say, worked off from the top of a stack.

At the start the stack holds the constraints of every domain, the first domain on top and the goodbye at the
bottom. What the system says pushes new items (corrections, answers, questions), and each turn pops a few
items of one kind. The user leaves when the goal is reached, when it gives up, or when `max_turn` is over.

`AgendaUser` is the rule and holds nothing of a dialog; a dialog is a `UserState`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from envs.multiwoz.acts import (
    ACT_DOMAIN,
    ACT_SLOT,
    BOOKED_SLOTS,
    BOOKING_NAMES,
    BYE,
    GOAL_DOMAIN,
    HEARD_SLOT,
    NONE,
    Act,
    Acts,
)
from envs.multiwoz.database import minutes
from envs.multiwoz.goals import PLACES, DomainGoal, Goal
from envs.multiwoz.options import Options
from envs.multiwoz.values import Values

Item = tuple[str, str, str, str]  # kind (inform, request, bye), goal domain, goal slot, value

LEAVE: Item = ("bye", "general", NONE, NONE)
UNSURE = frozenset(
    ("?", "dontcare", NONE, "no")
)  # answers that do not count as answers unless they are quoted
FEW = frozenset(("0", "zero", "1", "one"))
ANY, DONTCARE, NOT_BOOK, CHOICE = "any", "dontcare", "NotBook", "choice"
INFORMS = frozenset(("Inform", "Recommend", "OfferBook", "OfferBooked", "Book"))
REFUSALS = frozenset(("NoOffer", "NoBook"))
SAME = {
    "people": "the same",
    "day": "the same day",
    "area": "same area as the {}",
    "pricerange": "in the same price range as the {}",
}
WITHOUT_NUMBER = 10  # booking slots said at once when nothing was pushed
# Goal slot -> the user's name for it in an act.
SAID_SLOT = {
    domain: {**ACT_SLOT[name], NONE: NONE, NOT_BOOK: NOT_BOOK, CHOICE: "Choice"}
    for domain, name in ACT_DOMAIN.items()
}


@dataclass(slots=True)
class UserState:
    """One user in one dialog."""

    goal: Goal
    rng: random.Random
    stack: list[Item]  # the last item is on top
    turn: int = 0
    pushed: int = 0  # items pushed in this turn
    domain: str = ""  # goal domain that is being talked about
    done: bool = False


Heard = list[tuple[str, str, list[tuple[str, str]]]]  # goal domain, intent, slots with values


class AgendaUser:
    """The rule by which users speak."""

    def __init__(self, values: Values, options: Options) -> None:
        self.values, self.options = values, options

    def start(self, goal: Goal, rng: random.Random) -> UserState:
        """A user who has said nothing yet; the goal is the user's own from now on, answers are written into
        it."""
        user = UserState(goal, rng, [LEAVE])
        for domain in reversed(goal):
            constraints = _current(goal[domain], "info")
            slots = list(constraints)
            rng.shuffle(slots)
            for slot in slots:
                self._place(user, ("inform", domain, slot, constraints[slot]))
            self._place(user, ("inform", domain, NONE, NONE))
        return user

    def respond(self, user: UserState, system_acts: Acts) -> Acts:
        """What the user says next; the first time to nothing. `user.done` is true after the goodbye."""
        user.turn += 2
        user.pushed = 0
        if user.turn > self.options.max_turn:
            user.stack = [LEAVE]
        elif self._listen(user, system_acts):
            self._plan(user)
            if complete(user.goal):
                user.stack = [LEAVE]
        acts = self._say(user)
        user.done = not user.stack
        return acts

    # --- the system's turn

    def _listen(self, user: UserState, acts: Acts) -> bool:
        """Pushes what the system's acts call for; False when the user gives up."""
        groups = self._understood(user, acts)
        for domain, _, _ in groups:
            if domain in user.goal:
                user.domain = domain
        groups = [
            (user.domain if domain == "booking" else domain, intent, slots, domain == "booking")
            for domain, intent, slots in groups
        ]
        groups = [group for group in groups if group[0] in user.goal]
        for domain, intent, _, _ in groups:
            if intent in REFUSALS and self._refused(user, domain, "info" if intent == "NoOffer" else "book"):
                user.stack = [LEAVE]
                return False
        for domain, intent, slots, _ in groups:
            if intent in INFORMS:
                self._informed(user, domain, intent, slots)
            elif intent == "Request":
                for slot, _ in slots:
                    self._asked(user, domain, slot)
            elif intent == "Select":
                self._offered(user, domain, slots)
        for domain, intent, slots, booking in groups:
            if intent in ("Inform", "Recommend") and any(slot == "name" for slot, _ in slots):
                self._remove(user, ("inform", domain, CHOICE))
            offer = intent == "OfferBook" and self.options.not_book_after_offer
            if (booking or offer) and "book" not in user.goal[domain]:
                self._push(user, ("inform", domain, NOT_BOOK, NONE))
        return True

    def _understood(self, user: UserState, acts: Acts) -> Heard:
        """The acts in the user's terms, grouped by domain and intent; slots that the user does not know are
        not heard."""
        groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for intent, domain, slot, value in acts:
            if domain == "general":
                continue
            name = GOAL_DOMAIN[domain]
            if slot == "Choice" and value.lower() in ("0", "zero"):
                groups.setdefault((name, "NoOffer"), []).append((NONE, NONE))
                continue
            user_slot = NONE if slot == NONE else HEARD_SLOT[domain].get(slot)
            if user_slot is None:
                continue
            about = name if name != "booking" else user.domain
            user_value = (
                "?"
                if intent == "Request"
                else value
                if user_slot == NONE
                else self.values.heard(about, user_slot, value)
            )
            groups.setdefault((name, intent), []).append((user_slot, user_value))
        return [(domain, intent, slots) for (domain, intent), slots in groups.items()]

    def _informed(self, user: UserState, domain: str, intent: str, slots: list[tuple[str, str]]) -> None:
        goal, right = user.goal[domain], True
        requested = goal.get("reqt", {})
        for slot, value in slots:
            if slot == CHOICE:
                if value not in FEW:
                    self._push(user, ("inform", domain, CHOICE, ANY))
            elif slot in requested:
                if not self._pending(user, domain):
                    self._answered(user, domain, slot, value)
            else:
                right &= self._accepted(user, domain, slot, value)
        if intent in ("Book", "OfferBooked") and right and "booked" in goal:
            goal["booked"] = "yes"

    def _accepted(self, user: UserState, domain: str, slot: str, value: str) -> bool:
        """Compares a value with the goal and corrects the system where they differ."""
        goal = user.goal[domain]
        for wish in (_current(goal, "info"), _current(goal, "book")):
            if slot in wish:
                if contradicts(slot, value, wish[slot]):
                    self._push(user, ("inform", domain, slot, wish[slot]))
                    return False
                return True
        return True

    def _answered(self, user: UserState, domain: str, slot: str, value: str) -> None:
        self._remove(user, ("request", domain, slot))
        user.goal[domain]["reqt"][slot] = f'"{value}"' if value in UNSURE else value

    def _asked(self, user: UserState, domain: str, slot: str) -> None:
        goal = user.goal[domain]
        if slot in goal.get("reqt", {}) or slot == NONE:
            return
        for part in ("fail_info", "info", "fail_book", "book"):
            if slot in goal.get(part, {}):
                self._push(user, ("inform", domain, slot, goal[part][slot]))
                return
        value = DONTCARE
        if domain == "taxi" and slot in ("destination", "departure"):
            value = _place_of(user.goal, 1 if slot == "destination" else 2)
        self._push(user, ("inform", domain, slot, value))

    def _refused(self, user: UserState, domain: str, part: str) -> bool:
        """No such place, or no such booking: fall back to the second wish; True when there is none and the
        user gives up."""
        goal = user.goal[domain]
        failing = goal.pop(f"fail_{part}", None)
        if failing:
            for slot, value in goal.get(part, {}).items():
                if failing.get(slot) != value:
                    self._push(user, ("inform", domain, slot, value))
            return False
        return bool(goal.get("reqt" if part == "info" else "book"))

    def _offered(self, user: UserState, domain: str, slots: list[tuple[str, str]]) -> None:
        """The system offers a choice of values."""
        goal = user.goal[domain]
        for slot, value in slots:
            if slot == CHOICE and value not in FEW:
                self._push(user, ("inform", domain, CHOICE, ANY))
        offers = [(slot, value) for slot, value in slots if slot not in (CHOICE, NONE)]
        if not offers:
            return
        slot = offers[0][0]
        for wish in (_current(goal, "info"), _current(goal, "book")):
            if slot in wish:
                self._push(user, ("inform", domain, slot, wish[slot]))
                return
        if not self._pending(user, domain):
            slot, value = offers[int(user.rng.random() * len(offers))]
            self._push(user, ("inform", domain, slot, value))
            if slot in goal.get("reqt", {}):
                self._answered(user, domain, slot, value)

    # --- the user's turn

    def _plan(self, user: UserState) -> None:
        """Turns to the first domain that is not finished: ask what is open, and when all is answered,
        book."""
        for domain, goal in user.goal.items():
            open_slots = [slot for slot, value in goal.get("reqt", {}).items() if value in UNSURE]
            if open_slots:
                if not self._pending(user, domain) and not any(
                    item[0] == "request" and item[1] == domain for item in user.stack
                ):
                    for slot in open_slots:
                        self._push(user, ("request", domain, slot, "?"))
                return
            if goal.get("booked", "yes") in UNSURE:
                if not any(item[0] == "inform" and item[1] == domain for item in user.stack):
                    for slot, value in _current(goal, "book").items():
                        self._push(user, ("inform", domain, slot, value))
                return

    def _say(self, user: UserState) -> Acts:
        """Pops items of one kind from the top until at least one can be said."""
        acts: Acts = ()
        stack = user.stack
        while stack and not acts:
            kind, domain, slot, value = stack.pop()
            if kind == "bye":
                return (BYE,)
            items = [(slot, value)]
            bookings = kind == "inform" and slot in BOOKING_NAMES
            for _ in range(self._number(user, bookings, value) - 1):
                alike = (
                    stack
                    and stack[-1][:2] == (kind, domain)
                    and (not bookings or stack[-1][2] in BOOKING_NAMES)
                )
                if not alike or (kind, slot) == ("request", "name"):  # everything else depends on the name
                    break
                _, _, slot, value = stack.pop()
                items.append((slot, value))
            acts = _acts(kind, domain, items)
            user.domain = domain
        return acts

    def _number(self, user: UserState, bookings: bool, value: str) -> int:
        """How many items may be said; the item with `value` is already off the stack."""
        if bookings:
            return user.pushed or WITHOUT_NUMBER
        values = (
            [value, *(item[3] for item in user.stack[len(user.stack) - user.pushed + 1 :])]
            if user.pushed
            else []
        )
        return (
            self.options.max_initiative
            if all(pushed_value == DONTCARE for pushed_value in values)
            else user.pushed
        )

    # --- the stack

    def _push(self, user: UserState, item: Item) -> None:
        """On top, in place of an item about the same; counts towards this turn's items."""
        self._remove(user, item)
        self._place(user, item)
        user.pushed += 1

    def _place(self, user: UserState, item: Item) -> None:
        """On top; what later domains share with it may become "the same"."""
        _, domain, slot, value = item
        phrase = SAME.get(slot)
        if phrase is not None:
            for i, other in enumerate(user.stack):
                if other[2] == slot and other[3] == value and user.rng.random() < self.options.coref_prob:
                    user.stack[i] = (*other[:3], phrase.format(domain))
        user.stack.append(item)

    @staticmethod
    def _remove(user: UserState, item: tuple[str, ...]) -> None:
        key = item[:3]
        if any(other[:3] == key for other in user.stack):
            user.stack = [other for other in user.stack if other[:3] != key]

    @staticmethod
    def _pending(user: UserState, domain: str) -> bool:
        """Has the user still to name a constraint of this domain?"""
        bookable = BOOKED_SLOTS.get(domain, ())  # a train's day is a constraint, a hotel's is not
        return any(
            item[0] == "inform" and item[1] == domain and item[2] not in bookable and item[2] != CHOICE
            for item in user.stack
        )


def complete(goal: Goal) -> bool:
    """Has the user, in its own view, an answer to every request and every booking?"""
    for parts in goal.values():
        if parts.get("booked", "yes") in UNSURE:
            return False
        for value in parts.get("reqt", {}).values():
            if value in UNSURE:
                return False
    return True


def contradicts(slot: str, value: str, goal_value: str) -> bool:
    """Does the system's value go against the user's? Times are bounds."""
    if slot in ("arriveBy", "leaveAt"):
        a, b = minutes(value), minutes(goal_value)
        if a is not None and b is not None:
            return a > b if slot == "arriveBy" else a < b
    return value != goal_value


def _current(goal: DomainGoal, part: str) -> dict[str, str]:
    """The wish that holds at the moment: the one that has to fail, as long as it has not."""
    return goal.get(f"fail_{part}") or goal.get(part, {})


def _place_of(goal: Goal, back: int) -> str:
    """The last (1) or last but one (2) place before the taxi: its name if the user knows it."""
    order = list(goal)
    places = [domain for domain in order[: order.index("taxi")] if domain in PLACES]
    if len(places) < back:
        return DONTCARE
    return goal[places[-back]]["info"].get("name", f"the {places[-back]}")


def _acts(kind: str, domain: str, items: list[tuple[str, str]]) -> Acts:
    """Items as acts; slots without a name for the user are not said."""
    names, acts = SAID_SLOT[domain], list[Act]()
    for slot, value in items:
        if slot in names:
            acts.append(
                (
                    "Inform" if kind == "inform" else "Request",
                    ACT_DOMAIN[domain],
                    names[slot],
                    value if kind == "inform" else "?",
                )
            )
    return tuple(acts)
