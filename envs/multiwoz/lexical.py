"""Replies without values: `[hotel_name] is in the [hotel_area].`, and the values from the databases in their
places.

A language model that is to name a phone number would have to learn the databases by heart. As in the
literature on MultiWOZ (delexicalisation, Wen et al. 2015, Budzianowski et al. 2018) it writes a placeholder
instead, `[domain_slot]` with the acts' names in lower case, and what comes in its place follows from the
dialog state:

    [hotel_name]       of the first row that fits; [hotel_name_2] of the second; where none fits, what the
                       user wants
    [hotel_choice]     how many rows fit
    [booking_ref]      the reference of the first row that fits in the domain that the user speaks of
    [booking_people]   what the user said for the booking; [hotel_stay], [restaurant_time] and the like too
    [taxi_phone]       of a taxi that happens to come

What the model cannot read off the user's words, how many rows fit and what the system has noted so far, it
gets as a line of text, the `note`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from envs.multiwoz.acts import ACT_SLOT, GOAL_DOMAIN, GOAL_SLOT, NONE, Acts
from envs.multiwoz.database import Database, nth, reference
from envs.multiwoz.tracker import BOOK, DialogState

UNKNOWN = "unknown"  # in place of what neither the databases nor the user has said
# [domain_slot] -> act domain and slot
PLACES = {f"{domain}_{slot}".lower(): (domain, slot) for domain, slots in GOAL_SLOT.items() for slot in slots}
PLACEHOLDER = re.compile(rf"\[({'|'.join(PLACES)})(?:_(\d))?\]", re.IGNORECASE)


def placeholder(domain: str, slot: str, number: int = 1) -> str:
    """What stands for the value of the `number`-th act about a slot."""
    return f"[{domain}_{slot}{f'_{number}' if number > 1 else ''}]".lower()


def delexicalised(acts: Iterable[tuple[str, str, str, str]]) -> Acts:
    """Acts with placeholders as values; questions and acts without a slot stay as they are."""
    placeholder_acts, counts = [], {}
    for intent, domain, slot, value in acts:
        if intent != "Request" and f"{domain}_{slot}".lower() in PLACES:
            counts[domain, slot] = number = counts.get((domain, slot), 0) + 1
            value = placeholder(domain, slot, number)
        placeholder_acts.append((intent, domain, slot, value))
    return tuple(placeholder_acts)


def lexicalised(reply: str, state: DialogState, database: Database, rng: random.Random) -> tuple[str, Acts]:
    """The reply with values, and the acts that book: ("Book", "Booking", "Ref", "00000012"). All placeholders
    of a taxi are about the same one."""
    taxi = database.taxi(rng) if "[taxi_" in reply.lower() else {}
    bookings = []

    def value(match: re.Match[str]) -> str:
        domain, slot = PLACES[match[1].lower()]
        text = _value(domain, slot, int(match[2] or 1), state, database, taxi)
        if slot == "Ref" and text != UNKNOWN:
            bookings.append(("Book", domain, slot, text))
        return text

    text = PLACEHOLDER.sub(value, reply)
    return text, tuple(bookings)


def _value(
    domain: str, slot: str, number: int, state: DialogState, database: Database, taxi: dict[str, str]
) -> str:
    name, long = state.domain if domain == "Booking" else GOAL_DOMAIN[domain], GOAL_SLOT[domain][slot]
    if long in taxi:
        return taxi[long]
    user_value = {**state.book.get(name, {}), **state.semi.get(name, {})}.get(long, UNKNOWN)
    if name not in database or (long in BOOK.get(name, ()) and long != "trainID"):
        return user_value
    rows = state.rows[name]
    if slot == "Choice":
        return str(rows.bit_count())
    if not 1 <= number <= rows.bit_count():
        return user_value
    row = nth(rows, number - 1)
    row_value = reference(row) if slot == "Ref" else database[name].rows[row].get(long)
    return row_value if isinstance(row_value, str) else user_value


def note(state: DialogState, database: Database) -> str:
    """What the system knows about the domain in hand: `hotel: 6 fit; Area east; Stars 4; People 3; booked
    00000012`."""
    name = state.domain
    if not name:
        return "nothing asked yet"
    names = ACT_SLOT[next(domain for domain, goal_domain in GOAL_DOMAIN.items() if goal_domain == name)]
    parts = []
    if name in database:
        count = state.rows[name].bit_count()
        parts.append("none fits" if not count else "one fits" if count == 1 else f"{count} fit")
    parts += [
        f"{names[slot]} {value}"
        for part in (state.semi, state.book)
        for slot, value in part.get(name, {}).items()
        if value != NONE
    ]
    if name in state.booked:
        parts.append(f"booked {state.booked[name]}")
    return f"{name}: {'; '.join(parts)}"
