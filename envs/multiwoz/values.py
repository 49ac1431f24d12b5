"""One spelling for each value: what the user makes of the system's values, and the state tracker of the
user's.

Both compare with the values that occur in the world (`value_dict.json`) and keep what they cannot place as it
is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

TIME = re.compile(r"\b(\d{1,2}):(\d{2})\b")
TRAIN = re.compile(r"\btr\s?(\d{4})\b")
PRICE = re.compile(r"(\d+(?:\.\d+)?)\s?pounds?")
DURATION = re.compile(r"(\d+)\s?minutes?")
MEMO = 1 << 16  # remembered spellings; the memory starts anew beyond


class Values:
    """The values of the world by (goal domain, slot)."""

    def __init__(self, table: Mapping[str, Mapping[str, Iterable[Any]]]) -> None:
        self.by_slot = {
            (domain, slot.lower()): {
                value.strip().lower(): value.strip().lower()
                for value in values
                if isinstance(value, str) and value.strip()
            }
            for domain, slots in table.items()
            for slot, values in slots.items()
        }
        self._heard: dict[tuple[str, str, str], str] = {}
        self._noted: dict[tuple[str, str, str], str] = {}

    def heard(self, domain: str, slot: str, value: str) -> str:
        """What the user understands of a value that the system said."""
        return self._remembered(self._heard, self._understand, (domain, slot, value))

    def noted(self, domain: str, slot: str, value: str) -> str:
        """What the tracker writes down of a value that the user said."""
        return self._remembered(self._noted, self._place, (domain, slot, value))

    @staticmethod
    def _remembered(memo: dict[tuple[str, str, str], str], rule: Any, key: tuple[str, str, str]) -> str:
        spelling = memo.get(key)
        if spelling is None:
            if len(memo) >= MEMO:
                memo.clear()
            spelling = memo[key] = rule(*key)
        return spelling

    def _understand(self, domain: str, slot: str, value: str) -> str:
        value = value.strip().lower()
        if slot in ("parking", "internet") and value == "none":
            return "yes"
        known_values = self.by_slot.get((domain, slot.lower()), {})
        if value in known_values or not known_values or TIME.fullmatch(value):
            return value
        for known_value in known_values:
            for a, b in ((value, known_value), (value.replace(" ", ""), known_value.replace(" ", ""))):
                if a and (a in b or b in a):
                    return known_value
        return known_values.get(value.replace(" 's", "'s").replace(" - ", "-"), value)

    def _place(self, domain: str, slot: str, value: str) -> str:
        value = value.strip().lower()
        known_values = self.by_slot.get((domain, slot.lower()), {})
        if value in known_values or value == "dontcare":
            return value
        for spelling in (value, *_spellings(value)):
            if spelling in known_values:
                return spelling
            if inside := [name for name in known_values if len(spelling) > 1 and spelling in name]:
                return inside[0]
        allowed = 3 if len(value) >= 15 else 2 if len(value) >= 10 else 0
        for name in known_values if allowed else ():
            if edits(value, name, limit=allowed) <= allowed:
                return name
        return _by_form(slot, value)


def _spellings(value: str) -> Iterable[str]:
    yield value.replace(" 's", "'s")
    yield value.replace(" - ", "-")
    yield value.replace("-", " ")
    yield value.replace("center", "centre")
    yield value.replace("centre", "center")
    yield value.removeprefix("the ")
    yield f"the {value}"


def _by_form(slot: str, value: str) -> str:
    """Values that are recognised by their form."""
    if slot in ("leaveAt", "arriveBy", "time") and (match := TIME.search(value)):
        return f"{int(match[1]):02d}:{match[2]}"
    if slot == "trainID" and (match := TRAIN.search(value)):
        return f"tr{match[1]}"
    if slot == "price" and (match := PRICE.search(value)):
        return f"{match[1]} pounds"
    if slot == "duration" and (match := DURATION.search(value)):
        return f"{match[1]} minutes"
    return value


def edits(a: str, b: str, *, limit: int) -> int:
    """The least number of characters to change, add or delete between two texts; anything above `limit` may
    come as `limit` + 1."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        previous, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (letter != other)))
        if min(row) > limit:
            return limit + 1
    return row[-1]
