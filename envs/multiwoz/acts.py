"""Dialogue acts: what both sides say, before it is worded. And the names that the rest of the folder shares.

An act is a tuple of four strings `(intent, domain, slot, value)`, a turn is a sequence of acts:

    ("Inform", "Hotel", "Area", "east")
    ("Request", "Hotel", "Phone", "?")
    ("bye", "general", "none", "none")

Acts name slots in short (`Addr`, `Post`); goals, belief states and databases have longer names (`address`,
`postcode`). `GOAL_SLOT` leads from the first to the second. The act domain `Booking` stands for whatever
domain the dialog is in.

A turn without its values is a set of tokens `Domain-Intent-Slot-V`. V is `?` in requests, `none` without a
slot, and else counts the acts of one domain, intent and slot from 1: `Hotel-Inform-Name-2` is the second name
of the turn. A `Vocabulary` numbers the tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_dialog.errors import UserError

Act = tuple[str, str, str, str]  # intent, domain, slot, value
Acts = tuple[Act, ...]

NONE = "none"
SIDE = {"user": "user", "assistant": "system"}  # of a message's role
ANYWHERE = (
    NONE,
    "Choice",
    "NotBook",
    "Open",
)  # slots that any domain's acts may have, though not every listener knows them
BYE: Act = ("bye", "general", NONE, NONE)

# Act slot -> name in goals, belief states and databases.
GOAL_SLOT: dict[str, dict[str, str]] = {
    "Attraction": {
        "Area": "area",
        "Type": "type",
        "Name": "name",
        "Fee": "entrance fee",
        "Addr": "address",
        "Post": "postcode",
        "Phone": "phone",
        "Price": "pricerange",
        "Choice": "choice",
    },
    "Hotel": {
        "Type": "type",
        "Parking": "parking",
        "Price": "pricerange",
        "Internet": "internet",
        "Area": "area",
        "Stars": "stars",
        "Name": "name",
        "Stay": "stay",
        "Day": "day",
        "People": "people",
        "Addr": "address",
        "Post": "postcode",
        "Phone": "phone",
        "Ref": "Ref",
        "Choice": "choice",
    },
    "Restaurant": {
        "Food": "food",
        "Price": "pricerange",
        "Area": "area",
        "Name": "name",
        "Time": "time",
        "Day": "day",
        "People": "people",
        "Phone": "phone",
        "Post": "postcode",
        "Addr": "address",
        "Ref": "Ref",
        "Choice": "choice",
    },
    "Train": {
        "Dest": "destination",
        "Day": "day",
        "Arrive": "arriveBy",
        "Depart": "departure",
        "Leave": "leaveAt",
        "People": "people",
        "Time": "duration",
        "Ticket": "price",
        "Id": "trainID",
        "Ref": "Ref",
        "Choice": "choice",
    },
    "Taxi": {
        "Leave": "leaveAt",
        "Dest": "destination",
        "Depart": "departure",
        "Arrive": "arriveBy",
        "Car": "car type",
        "Phone": "phone",
    },
    "Hospital": {"Department": "department", "Addr": "address", "Post": "postcode", "Phone": "phone"},
    "Police": {"Addr": "address", "Post": "postcode", "Phone": "phone", "Name": "name"},
    "Booking": {
        "Day": "day",
        "Name": "name",
        "People": "people",
        "Ref": "Ref",
        "Stay": "stay",
        "Time": "time",
    },
}
# What the system says about a booking comes as `Booking`; the user hears nothing in, say, Hotel-Inform-Stay.
HEARD_SLOT = {
    domain: {
        act: slot
        for act, slot in table.items()
        if domain not in ("Hotel", "Restaurant") or act not in ("Stay", "Day", "People", "Time")
    }
    for domain, table in GOAL_SLOT.items()
}
ACT_SLOT = {domain: {slot: act for act, slot in table.items()} for domain, table in GOAL_SLOT.items()}

DOMAINS = tuple(domain for domain in GOAL_SLOT if domain != "Booking")
GOAL_DOMAIN = {domain: domain.lower() for domain in GOAL_SLOT}
ACT_DOMAIN = {name: domain for domain, name in GOAL_DOMAIN.items()}
BOOKED_SLOTS = {
    "hotel": ("stay", "day", "people"),
    "restaurant": ("time", "day", "people"),
    "train": ("people",),
}
BOOKING_NAMES = frozenset(("people", "day", "stay", "time"))  # by name alone: a train's day counts too

USER_INTENTS = frozenset(("Inform", "Request", "bye", "greet", "thank"))
SYSTEM_INTENTS = frozenset(
    (
        "Inform",
        "Request",
        "Recommend",
        "Select",
        "NoOffer",
        "Book",
        "NoBook",
        "OfferBook",
        "OfferBooked",
        "bye",
        "greet",
        "reqmore",
        "welcome",
    )
)
GENERAL_INTENTS = frozenset(("bye", "greet", "reqmore", "welcome", "thank"))


class ActError(UserError):
    """Acts that are none; the message says what was expected, what came and where."""


def checked(acts: Iterable[Any], *, side: str) -> Acts:
    """Acts from outside as tuples. `side` is "user" or "system". Raises ActError for a wrong shape, an
    unknown intent, domain or slot."""
    intents = USER_INTENTS if side == "user" else SYSTEM_INTENTS
    if isinstance(acts, str) or not isinstance(acts, Iterable):
        raise ActError(f"expected a list of acts [intent, domain, slot, value], got {acts!r:.80}")
    tuples = []
    for number, act in enumerate(acts):
        where = f"{side} act {number} {act!r:.120}"
        if (
            isinstance(act, str)
            or not isinstance(act, Sequence)
            or len(act) != 4
            or not all(isinstance(part, str) for part in act)
        ):
            raise ActError(f"{where}: expected four strings [intent, domain, slot, value]")
        intent = act[0]
        if intent not in intents:
            raise ActError(
                f"{where}: expected an intent of the {side}, {', '.join(sorted(intents))}, got "
                f"{intent!r}.{nearest(intent, intents)}"
            )
        _check_place(act, side, where)
        tuples.append(tuple(act))
    return tuple(tuples)


def _check_place(act: Sequence[str], side: str, where: str) -> None:
    """The domain and the slot of an act with a known intent."""
    intent, domain, slot, _ = act
    if domain == "general" or intent in GENERAL_INTENTS:
        if domain != "general" or intent not in GENERAL_INTENTS:
            raise ActError(
                f"{where}: expected the domain general with {', '.join(sorted(GENERAL_INTENTS))}, and "
                "with these only"
            )
    elif domain not in GOAL_SLOT or (domain == "Booking" and side == "user"):
        names = [name for name in GOAL_SLOT if side == "system" or name != "Booking"]
        raise ActError(
            f"{where}: expected a domain, one of {', '.join([*names, 'general'])}, got "
            f"{domain!r}.{nearest(domain, names)}"
        )
    elif slot not in GOAL_SLOT[domain] and slot not in ANYWHERE:
        names = [*GOAL_SLOT[domain], NONE]
        raise ActError(
            f"{where}: expected a slot of {domain}, one of {', '.join(names)}, got "
            f"{slot!r}.{nearest(slot, names)}"
        )


def nearest(word: Any, names: Iterable[str]) -> str:
    """The end of a message, ` Did you mean X?`, or nothing."""
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(str(word).lower(), lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[close[0]]}?" if close else ""


def from_corpus(grouped: Mapping[str, Any]) -> Acts:
    """The corpora's form, {"Hotel-Inform": [["Area", "east"], ...]}, as acts, sorted by slot within each key.
    Raises ActError."""
    if not isinstance(grouped, Mapping):
        raise ActError(
            f'expected an object such as {{"Hotel-Inform": [["Area", "east"]]}}, got {grouped!r:.80}'
        )
    acts: list[Act] = []
    for key, pairs in grouped.items():
        domain, dash, intent = str(key).partition("-")
        if not (domain and dash and intent):
            raise ActError(f"expected keys of the form Domain-Intent, got {key!r}")
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise ActError(f"{key}: expected a list of [slot, value], got {pairs!r:.80}")
        acts += [
            (intent, domain, str(slot), str(value))
            for slot, value in sorted(pairs, key=lambda pair: str(pair[0]))
        ]
    return tuple(acts)


def acts_of(message: Mapping[str, Any]) -> Acts | None:
    """The acts of a log's message, ours or a corpus's annotation; None where it has neither. Acts that no
    side says are left out."""
    if "acts" in message:
        acts: Iterable[Act] = [tuple(act) for act in message["acts"]]
    elif "dialogue_acts" in message.get("annotations", {}):
        acts = from_corpus(message["annotations"]["dialogue_acts"])
    else:
        return None
    valid_acts: list[Act] = []
    for act in acts:
        try:
            valid_acts += checked([act], side=SIDE[message["role"]])
        except ActError:
            continue
    return tuple(valid_acts)


def tokens(acts: Iterable[Act]) -> list[str]:
    """A turn without its values, one token per act."""
    names, counts = [], {}
    for intent, domain, slot, _ in acts:
        if intent == "Request" or slot == NONE:
            last = "?" if intent == "Request" else NONE
        else:
            last = counts[intent, domain, slot] = counts.get((intent, domain, slot), 0) + 1
        names.append(f"{domain}-{intent}-{slot}-{last}")
    return names


class Vocabulary:
    """Tokens by number; the number is the position in a vector.

    Raises ActError for tokens that are not `Domain-Intent-Slot-V` and for repeated ones.
    """

    def __init__(self, names: Iterable[str], *, where: str = "vocabulary") -> None:
        self.tokens = tuple(names)
        self.index = {token: number for number, token in enumerate(self.tokens)}
        self.parts: list[
            tuple[str, str, str, int]
        ] = []  # intent, domain, slot, running number (0 where the token has none)
        places: dict[tuple[str, str, str], dict[int, int]] = {}
        for number, token in enumerate(self.tokens):
            parts = token.split("-")
            if len(parts) != 4 or not all(parts) or not (parts[3] in ("?", NONE) or parts[3].isdecimal()):
                raise ActError(
                    f"{where}, line {number + 1}: expected Domain-Intent-Slot-V with V a number, ? or none, "
                    f"got {token!r}"
                )
            if self.index[token] != number:
                raise ActError(
                    f"{where}, line {self.index[token] + 1}: {token!r} stands there for the second time; "
                    "delete one of the lines"
                )
            domain, intent, slot, last = parts
            running = int(last) if last.isdecimal() else 0
            self.parts.append((intent, domain, slot, running))
            places.setdefault((intent, domain, slot), {})[max(running, 1)] = number
        self._places = {
            key: tuple(numbers.get(i) for i in range(1, max(numbers) + 1)) for key, numbers in places.items()
        }

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple:
        return Vocabulary, (self.tokens,)

    def positions(self, acts: Iterable[Act]) -> list[int]:
        """The numbers of a turn's tokens; acts that the vocabulary lacks are left out."""
        numbers, counts = [], {}
        for act in acts:
            key = act[:3]
            places = self._places.get(key)
            if places is None:
                continue
            running = counts.get(key, 0)
            counts[key] = running + 1
            if running < len(places) and places[running] is not None:
                numbers.append(places[running])
        return numbers
