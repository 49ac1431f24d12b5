"""Was the task done? Booking rate, precision and recall of the information, and success, kept up to date act
by act.

`Evaluator` is the rule and holds nothing of a dialog; a dialog is a `Record`. It reads the user's own goal
object: the answers that the user wrote into it count, and so do the wishes that it gave up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, Acts
from envs.multiwoz.database import Database, Table, each, minutes
from envs.multiwoz.goals import DAYS, Goal
from envs.multiwoz.options import Options
from envs.multiwoz.tracker import DialogState

INFORMS = frozenset(("Inform", "Recommend", "OfferBook", "OfferBooked"))
BY_REFERENCE = frozenset(("hotel", "restaurant", "train"))  # domains booked by the number of a row
TAXI = -1  # in place of the number of a booked row
POSTCODE = re.compile(r"cb\d{2,3}[a-z]{2}|pe296fl")
CLOCK = re.compile(r"([01]?\d|2[0-4]):[0-5]\d")
TRAIN_ID = re.compile(r"tr\d{4}")
REQUESTABLE = {
    "attraction": ("postcode", "phone", "address", "entrance fee", "area", "type"),
    "restaurant": ("address", "postcode", "phone", "pricerange", "food", "area"),
    "train": ("price", "duration", "leaveAt", "arriveBy", "trainID"),
    "hotel": ("address", "postcode", "phone", "pricerange", "internet", "parking", "area", "type", "stars"),
    "taxi": ("car type", "phone"),
    "hospital": ("postcode", "phone", "address"),
    "police": ("postcode", "phone", "address"),
}
# The original compares names of acts with names of goals, so only slots that have the same name (in lower
# case) in both can be found superfluous.
SAME_NAME = frozenset(("area", "type", "stars", "food", "phone", "internet", "parking"))


@dataclass(slots=True)
class Record:
    """What the evaluator remembers of one dialog."""

    goal: Goal  # the user's own
    domain: str = ""  # goal domain that was mentioned last
    booked: dict[str, int] = field(default_factory=dict)  # goal domain -> row
    informed: dict[str, set[str]] = field(
        default_factory=dict
    )  # goal domain -> slots that the system gave a valid value for
    invalid: int = 0  # acts with a value that cannot be one
    strict: bool = True  # every booking so far was made for the people, day and time of the goal


@dataclass(frozen=True, slots=True)
class Information:
    """Counts of slots: requested and given, given for nothing (or invalid), requested and not given."""

    true_positive: int
    false_positive: int
    false_negative: int

    @property
    def scores(self) -> tuple[float, float, float] | None:
        """Precision, recall and F1; None where nothing was requested."""
        tp, fp, fn = self.true_positive, self.false_positive, self.false_negative
        if tp + fn == 0:
            return None
        if tp == 0:
            return 0.0, 0.0, 0.0
        precision, recall = tp / (tp + fp), tp / (tp + fn)
        return precision, recall, 2 * precision * recall / (precision + recall)


class Evaluator:
    """The rule that counts."""

    def __init__(self, database: Database, options: Options) -> None:
        self.database = database
        rows = [row for table in database.tables.values() for row in table.rows]
        self.valid = _forms(
            {row["area"] for row in rows if "area" in row},
            {row["pricerange"] for row in rows if "pricerange" in row},
        )
        countable = (lambda slot: True) if options.unrequested == "goal_names" else SAME_NAME.__contains__
        self.countable = {
            domain: frozenset(filter(countable, slots)) for domain, slots in REQUESTABLE.items()
        }

    def user_said(self, record: Record, acts: Acts) -> None:
        """Takes in the user's turn."""
        for _, domain, _, _ in acts:
            if domain != "general":
                record.domain = GOAL_DOMAIN[domain]

    def system_said(self, record: Record, acts: Acts, state: DialogState | None = None) -> None:
        """Takes in the system's turn; `state` is what the system believed, for strict success."""
        for intent, domain, slot, value in acts:
            if domain == "general":
                continue
            name = GOAL_DOMAIN[domain]
            if slot == "Ref":
                self._take_booking(record, intent, name, value, state)
            elif (
                domain != "Booking"
                and intent in INFORMS
                and (long := GOAL_SLOT[domain].get(slot))
                and long != "choice"
            ):
                if self.is_valid(name, long, value):
                    record.informed.setdefault(name, set()).add(long)
                    if long == "car type":
                        record.booked.setdefault("taxi", TAXI)
                else:
                    record.invalid += 1
            if domain != "Booking":
                record.domain = name

    def _take_booking(
        self, record: Record, intent: str, name: str, value: str, state: DialogState | None
    ) -> None:
        if name == "booking" and intent == "Book":
            name = record.domain
        elif name != "train" or intent not in ("OfferBooked", "Inform"):
            return
        if (
            name not in BY_REFERENCE
            or len(value) != 8
            or not value.isdecimal()
            or int(value) >= len(self.database[name].rows)
        ):
            return
        if name not in record.booked:
            record.booked[name] = int(value)
            booking = record.goal.get(name, {}).get("book", {})
            belief = state.book.get(name, {}) if state else {}
            record.strict &= all(belief.get(slot) == value for slot, value in booking.items())

    def is_valid(self, domain: str, slot: str, value: str) -> bool:
        """Can this be a value of the slot at all? Whether it is true, the goal's answers tell."""
        form = self.valid.get(slot)
        if (
            form is None
            or (slot == "phone" and domain == "restaurant")
            or (slot == "pricerange" and domain == "attraction")
        ):
            return True
        return form(value.strip().lower())

    # --- what it comes to

    def information(self, record: Record, only: str = "") -> Information:
        """The counts, of all domains of the goal or of one."""
        tp = fn = 0
        fp = 0 if only else record.invalid
        for domain, goal in record.goal.items():
            if only and domain != only:
                continue
            requested, informed = goal.get("reqt", {}).keys(), record.informed.get(domain, frozenset())
            tp += len(requested & informed)
            fn += len(requested - informed)
            fp += len((informed & self.countable[domain]) - requested - goal["info"].keys())
        return Information(tp, fp, fn)

    def figures(self, record: Record, domain: str) -> dict[str, float | None]:
        """Book rate, precision, recall and F1 of one domain. Acts with impossible values count against the
        whole dialog only."""
        scores = self.information(record, domain).scores or (None, None, None)
        names = ("inform_precision", "inform_recall", "inform_f1")
        return {"book_rate": self.book_rate(record, domain), **dict(zip(names, scores, strict=True))}

    def book_rate(self, record: Record, only: str = "") -> float | None:
        """Mean over the bookings wanted of the share of constraints that the booked row meets; None where
        none is wanted."""
        rates = []
        for domain, goal in record.goal.items():
            if goal.get("book") and goal["info"] and only in ("", domain):
                rate = self._booking(record, domain, goal["info"])
                if rate is not None:
                    rates.append(rate)
        return sum(rates) / len(rates) if rates else None

    def _booking(self, record: Record, domain: str, info: dict[str, str]) -> float | None:
        slots = [slot for slot in info if slot not in ("destination", "departure")]
        if not slots:
            return None
        row = record.booked.get(domain)
        if row is None:
            return 0.0
        if row == TAXI:
            return 1.0
        values = self.database[domain].rows[row]
        return sum(_meets(slot, values.get(slot), info[slot]) for slot in slots) / len(slots)

    def final_goal(self, record: Record) -> float:
        """Share of domains where some row (the booked one, if there is one) meets the constraints and the
        answers that the user got."""
        met_count = sum(self._final(record, domain) for domain in record.goal)
        return met_count / len(record.goal)

    def _final(self, record: Record, domain: str) -> bool:
        if domain not in self.database:
            return True  # taxis
        goal, table = record.goal[domain], self.database[domain]
        rows = table.match(goal["info"].items())
        if (booked := record.booked.get(domain)) is not None:
            rows &= 1 << booked
        return any(_answered_by(table, row, goal.get("reqt", {})) for row in each(rows))

    def success(self, record: Record) -> bool:
        """All bookings fit, all requests were answered, and the answers belong to a row that fits."""
        return self.done(record) and self.final_goal(record) == 1

    def domain_success(self, record: Record, domain: str) -> bool:
        """The same for one domain, without a look at what the answers were."""
        return domain in record.goal and self.done(record, domain)

    def done(self, record: Record, only: str = "") -> bool:
        """Bookings and requests only, of all domains or of one."""
        counts = self.information(record, only)
        if counts.false_negative:
            return False
        book = self.book_rate(record, only)
        return book == 1 if book is not None else counts.true_positive > 0


def _forms(areas: set[str], ranges: set[str]) -> dict[str, Callable[[str], bool]]:
    """Goal slot -> is a value of the right form? Slots that are not here take any value."""

    def one_of(*choices: str) -> Callable[[str], bool]:
        return frozenset(choices).__contains__

    def clock(value: str) -> bool:
        return CLOCK.fullmatch(value) is not None

    yes_or_no = one_of("yes", "no", "none")
    return {
        "area": one_of(*areas),
        "arriveBy": clock,
        "leaveAt": clock,
        "day": one_of(*DAYS),
        "duration": lambda value: "minute" in value,
        "internet": yes_or_no,
        "parking": yes_or_no,
        "phone": lambda value: len(value) == 11 and value.isdecimal(),
        "price": lambda value: "pound" in value,
        "pricerange": one_of(*ranges),
        "postcode": lambda value: POSTCODE.fullmatch(value) is not None,
        "stars": lambda value: len(value) == 1 and value.isdecimal(),
        "trainID": lambda value: TRAIN_ID.fullmatch(value) is not None,
    }


def _meets(slot: str, row_value: object, goal_value: str) -> bool:
    if slot in ("leaveAt", "arriveBy"):
        a, b = minutes(row_value), minutes(goal_value)
        return a is not None and b is not None and (a >= b if slot == "leaveAt" else a <= b)
    return isinstance(row_value, str) and row_value.strip().lower() == goal_value.strip().lower()


def _answered_by(table: Table, row: int, answers: dict[str, str]) -> bool:
    return all(table.resembles(row, slot, value) for slot, value in answers.items())
