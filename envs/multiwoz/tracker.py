"""The system's memory of the dialog: what the user wants so far, and which rows of the databases fit.

`Tracker` is the rule and holds nothing of a dialog; a dialog is a `DialogState`. Slots are overwritten and
never cleared, as the user corrects itself by saying the new value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, Acts
from envs.multiwoz.database import Database
from envs.multiwoz.options import Options
from envs.multiwoz.values import Values
from rl_dialog.errors import UserError

# Constraints by domain, in the order of the state vector's bits.
SEMI = {
    "attraction": ("type", "name", "area"),
    "restaurant": ("food", "pricerange", "name", "area"),
    "train": ("leaveAt", "destination", "day", "arriveBy", "departure"),
    "hotel": ("name", "area", "parking", "pricerange", "stars", "internet", "type"),
    "taxi": ("leaveAt", "destination", "departure", "arriveBy"),
    "hospital": ("department",),
    "police": (),
}
BOOK = {
    "hotel": ("people", "day", "stay"),
    "restaurant": ("people", "day", "time"),
    "train": ("people", "trainID"),
}
ROWED = (
    "attraction",
    "restaurant",
    "train",
    "hotel",
)  # the domains whose number of fitting rows the state vector shows
KIND = {
    (domain, act): (GOAL_DOMAIN[domain], slot, "semi" if slot in SEMI[GOAL_DOMAIN[domain]] else "book")
    for domain, table in GOAL_SLOT.items()
    if domain != "Booking"
    for act, slot in table.items()
    if slot in SEMI[GOAL_DOMAIN[domain]] or slot in BOOK.get(GOAL_DOMAIN[domain], ())
}


@dataclass(slots=True)
class DialogState:
    """What a system policy sees."""

    semi: dict[str, dict[str, str]] = field(default_factory=dict)  # goal domain -> constraints given so far
    book: dict[str, dict[str, str]] = field(default_factory=dict)  # goal domain -> booking slots given so far
    booked: dict[str, str] = field(default_factory=dict)  # goal domain -> reference
    requested: dict[str, set[str]] = field(
        default_factory=dict
    )  # goal domain -> slots that the user asked for
    rows: dict[str, int] = field(default_factory=dict)  # goal domain -> the rows that fit, as a bit set
    domain: str = ""  # goal domain that the user spoke of last
    user_acts: Acts = ()
    system_acts: Acts = ()
    terminated: bool = False


class Tracker:
    """The rule that reads both sides' acts."""

    def __init__(self, database: Database, values: Values, options: Options) -> None:
        self.values, self.options = values, options
        self.tables = database.tables
        self.everything = {domain: table.everything for domain, table in database.tables.items()}

    def start(self) -> DialogState:
        """The state before anything was said: every row fits."""
        return DialogState(rows=dict(self.everything))

    def user_said(self, state: DialogState, acts: Acts) -> None:
        """Takes in the user's turn."""
        state.user_acts = acts
        changed = set()
        for intent, domain, slot, value in acts:
            if intent == "Inform":
                state.domain = GOAL_DOMAIN[domain]
                if kind := KIND.get((domain, slot)):
                    name, long, part = kind
                    if part == "book":
                        state.book.setdefault(name, {})[long] = value
                    else:
                        state.semi.setdefault(name, {})[long] = self.values.noted(name, long, value)
                        changed.add(name)
            elif intent == "Request":
                state.domain = GOAL_DOMAIN[domain]
                state.requested.setdefault(state.domain, set()).add(GOAL_SLOT[domain].get(slot, slot))
            elif intent == "bye" and self.options.set_terminated:
                state.terminated = True
        for name in changed:
            if name in self.tables:
                state.rows[name] = self.tables[name].match(state.semi[name].items())

    def correct(self, state: DialogState, domain: str, slot: str, value: str) -> None:
        """Overwrites what is noted of a slot, or forgets it where the value is "". Raises UserError for a
        slot that has no note."""
        slots_by_part = {"semi": SEMI.get(domain, ()), "book": BOOK.get(domain, ())}
        part = next((part for part, slots in slots_by_part.items() if slot in slots), None)
        if part is None:
            slots = ", ".join((*slots_by_part["semi"], *slots_by_part["book"]))
            raise UserError(f"expected a slot of {domain}, one of {slots}, got {slot!r}" if slots else
                             f"expected a domain, one of {', '.join(SEMI)}, got {domain!r}")  # fmt: skip
        noted = getattr(state, part).setdefault(domain, {})
        noted.pop(slot, None)
        if value:
            noted[slot] = value
        if part == "semi" and domain in self.tables:
            state.rows[domain] = self.tables[domain].match(noted.items())

    def system_said(self, state: DialogState, acts: Acts) -> None:
        """Takes in the system's own turn."""
        state.system_acts = acts
        if not self.options.set_booked:
            return
        for intent, domain, slot, value in acts:
            if slot == "Ref" and intent in ("Book", "OfferBooked"):
                state.booked.setdefault(state.domain if domain == "Booking" else GOAL_DOMAIN[domain], value)


def belief_state(state: DialogState) -> dict[str, dict[str, dict]]:
    """The state in the corpus's form, with an empty string in every slot that was not given."""
    belief = {}
    for domain, slots in SEMI.items():
        semi, book = state.semi.get(domain, {}), state.book.get(domain, {})
        bookings = [{"reference": state.booked[domain]}] if domain in state.booked else []
        belief[domain] = {
            "semi": {slot: semi.get(slot, "") for slot in slots},
            "book": {
                "booked": bookings,
                **{slot: book.get(slot, "") for slot in BOOK.get(domain, ()) if slot != "trainID"},
            },
        }
    return belief
