"""The databases: immutable, indexed, answering with sets of row numbers instead of copies.

A set of rows is an `int` whose bit i is row i: `&` intersects, `bit_count()` counts, and nothing is built
that nobody reads.

    table = database["restaurant"]
    rows = table.match([("food", "indian"), ("area", "centre")])
    rows.bit_count()                    # 9
    table.rows[first(rows)]["name"]     # "curry garden"

A constraint holds for a row that lacks the slot or has "?" there, and is dropped when its value means
"anything" or cannot be compared. `leaveAt` and `arriveBy` are bounds ("not before", "not after"); everything
else is equality without regard to case and outer blanks.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import accumulate
from operator import or_
from typing import Any

Row = Mapping[str, Any]
Constraint = tuple[str, str]

ANYTHING = frozenset(("", "dont care", "not mentioned", "don't care", "dontcare", "do n't care"))
UNKNOWN = "?"  # a row's way to say that a value is not known
FUZZY_RATIO = 60  # per cent of likeness from which an answer counts as the row's value
TAXI_DIGITS = 11


class Equal(dict):
    """Value -> the rows that have it, or have none."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.open = sum(
            1 << i for i, value in enumerate(values) if not isinstance(value, str) or value == UNKNOWN
        )
        for i, value in enumerate(values):
            if isinstance(value, str) and value != UNKNOWN:
                key = value.strip().lower()
                self[key] = self.get(key, self.open) | 1 << i

    def __missing__(self, value: str) -> int:
        return self.get(value.strip().lower(), self.open)


class Bound:
    """Time -> the rows at or after it (`later`), or at or before it."""

    def __init__(self, values: list[Any], *, later: bool) -> None:
        times = [minutes(value) for value in values]
        self.everything = (1 << len(values)) - 1
        self.open = sum(1 << i for i, time in enumerate(times) if time is None)
        by_time: dict[int, int] = {}
        for i, time in enumerate(times):
            if time is not None:
                by_time[time] = by_time.get(time, 0) | 1 << i
        self.times, self.later = sorted(by_time), later
        order = self.times[::-1] if later else self.times
        sums = list(accumulate((by_time[time] for time in order), or_, initial=self.open))
        self.sums = (
            sums[::-1] if later else sums
        )  # later: entry i has the rows at times[i] and after; else those before times[i]

    def __getitem__(self, value: str) -> int:
        time = minutes(value)
        if time is None:
            return self.everything
        return self.sums[bisect_left(self.times, time) if self.later else bisect_right(self.times, time)]


class Table:
    """One domain's rows and their index."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        self.everything = (1 << len(self.rows)) - 1
        slots = dict.fromkeys(slot for row in self.rows for slot in row)
        self.columns: dict[str, Equal | Bound] = {}
        for slot in slots:
            values = [row.get(slot) for row in self.rows]
            timed = slot in ("leaveAt", "arriveBy")
            self.columns[slot] = Bound(values, later=slot == "leaveAt") if timed else Equal(values)

    def match(self, constraints: Iterable[Constraint]) -> int:
        """The rows that meet all constraints, as a bit set."""
        rows = self.everything
        for slot, value in constraints:
            if value in ANYTHING:
                continue
            column = self.columns.get(slot)
            if column is not None:
                rows &= column["centre" if value == "center" and slot == "area" else value]
        return rows

    def resembles(self, row: int, slot: str, value: str) -> bool:
        """Is `value` nearly what the row says? True where either says nothing."""
        row_value = self.rows[row].get(slot)
        if value in ANYTHING or not isinstance(row_value, str) or row_value == UNKNOWN:
            return True
        row_value, value = row_value.strip().lower(), value.strip().lower()
        return row_value == value or likeness(row_value, value) >= FUZZY_RATIO


class Database:
    """The tables by goal domain; taxis have no rows, they come by chance."""

    def __init__(self, tables: Mapping[str, Iterable[Row]], *, taxi_types: Iterable[str]) -> None:
        self.tables = {domain: Table(rows) for domain, rows in tables.items()}
        self.taxi_types = tuple(taxi_types)

    def __getitem__(self, domain: str) -> Table:
        return self.tables[domain]

    def __contains__(self, domain: str) -> bool:
        return domain in self.tables

    def taxi(self, rng: random.Random) -> dict[str, str]:
        """A taxi: its make and a phone number."""
        make = self.taxi_types[int(rng.random() * len(self.taxi_types))]
        return {
            "car type": make,
            "phone": "".join(str(1 + int(rng.random() * 9)) for _ in range(TAXI_DIGITS)),
        }


def first(rows: int) -> int:
    """The lowest row of a set that is not empty."""
    return (rows & -rows).bit_length() - 1


def each(rows: int) -> Iterator[int]:
    """The rows of a set in order."""
    while rows:
        low = rows & -rows
        yield low.bit_length() - 1
        rows ^= low


def nth(rows: int, number: int) -> int:
    """Row `number` of a set, from 0. Raises IndexError where there are fewer."""
    for i, row in enumerate(each(rows)):
        if i == number:
            return row
    raise IndexError(f"expected more than {number} rows, got {rows.bit_count()}")


def reference(row: int) -> str:
    """A booking's reference: the number of the row in its whole table, eight digits."""
    return f"{row:08d}"


def minutes(value: Any) -> int | None:
    """A time such as "17:45" as a number that grows with it (HHMM); None for anything else."""
    if not isinstance(value, str):
        return None
    hour, colon, minute = value.strip().partition(":")
    return int(hour) * 100 + int(minute) if colon and hour.isdecimal() and minute.isdecimal() else None


@lru_cache(maxsize=1 << 16)
def likeness(a: str, b: str) -> int:
    """How well the shorter of two texts fits somewhere in the longer, 0 to 100: twice the matching characters
    over both lengths, best position."""
    short, long = sorted((a, b), key=len)
    if not short:
        return 0
    matcher = SequenceMatcher(None, "", short, autojunk=False)
    best = 0.0
    for start in range(len(long) - len(short) + 1):
        matcher.set_seq1(long[start : start + len(short)])
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best:
            best = max(best, matcher.ratio())
    return round(100 * best)
