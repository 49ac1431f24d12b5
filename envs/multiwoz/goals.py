"""What a user wants: goals, drawn from the statistics of the corpus and possible in the database.

    {"hotel": {"info": {"area": "east"}, "fail_info": {"area": "west"}, "reqt": {"phone": "?"},
               "book": {"people": "3", ...}, "booked": "?"}, ...}

`info` are the constraints, `fail_info` what the user asks for first and has to give up, `reqt` the slots to
ask for (their answers replace the "?"), `book` the wishes for a booking. The order of the domains is the
order of the keys.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Generic, TypeVar

from envs.multiwoz.acts import ACT_DOMAIN, ACT_SLOT, BOOKED_SLOTS, DOMAINS, GOAL_DOMAIN, nearest
from envs.multiwoz.database import Database
from envs.multiwoz.options import Options
from rl_dialog.errors import UserError

T = TypeVar("T")
DomainGoal = dict[str, Any]
Goal = dict[str, DomainGoal]

GOAL_DOMAINS = tuple(GOAL_DOMAIN[domain] for domain in DOMAINS)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
PLACES = ("attraction", "hotel", "restaurant", "police", "hospital")  # where a taxi can go
NAMED = ("attraction", "hotel", "restaurant")  # a goal for these has a name, or other constraints
TIMED = ("taxi", "train")  # these have one time: of leaving or of arriving
FAILS = 100  # failed draws of one slot's value before a goal is drawn anew
RESTARTS = 200
PARTS = ("info", "fail_info", "reqt", "book", "fail_book", "booked")


class GoalError(UserError):
    """A goal that nobody can have or reach; the message says what was expected, what came and where."""


class Draw(Generic[T]):
    """Draws from a list in proportion to weights."""

    def __init__(self, weights: Mapping[T, float]) -> None:
        self.choices = tuple(weights)
        self.sums = list(accumulate(float(weight) for weight in weights.values()))
        if not self.sums or self.sums[-1] <= 0:
            raise UserError(f"expected choices with a positive weight, got {dict(weights)!r:.80}")

    def __call__(self, rng: random.Random) -> T:
        place = bisect_right(self.sums, rng.random() * self.sums[-1])
        return self.choices[min(place, len(self.choices) - 1)]  # rounding can reach the end


class GoalModel:
    """The corpus's statistics, as published, and the sampler.

    Args:
        model: the six tables, tuple keys joined by "|": `domain_ordering_dist`, `slots_combination_dist`,
            `ind_slot_dist`, `ind_slot_value_dist`, `book_dist` (`slots_num_dist` is not used). Raises
            KeyError, TypeError or UserError where they do not have this form.
    """

    def __init__(self, model: Mapping[str, Any], database: Database) -> None:
        self.model, self.database = model, database
        orders = {
            tuple(key.split("|")): float(p)
            for key, p in model["domain_ordering_dist"].items()
            if key and p > 0
        }
        if not orders:
            raise UserError("expected at least one order of domains in domain_ordering_dist")
        unknown = [domain for order in orders for domain in order if domain not in GOAL_DOMAINS]
        if unknown:
            near = nearest(unknown[0], GOAL_DOMAINS)
            raise UserError(
                f"domain_ordering_dist: expected domains out of {', '.join(GOAL_DOMAINS)}, got "
                f"{unknown[0]!r}.{near}"
            )
        self.orders = Draw(orders)
        self.slot_odds = model["ind_slot_dist"]
        self.values: dict[str, dict[str, dict[str, Draw[str]]]] = {}
        self.combinations: dict[tuple[str, str], Draw[tuple[str, ...]]] = {}
        trains = Counter(row[end] for row in database["train"].rows for end in ("departure", "destination"))
        self.hub = max(
            trains, key=trains.__getitem__
        )  # the town itself: every train comes from it or goes there
        self.book_dist = {domain: float(p) for domain, p in model["book_dist"].items()}
        for domain in {domain for order in orders for domain in order}:
            kinds = model["ind_slot_value_dist"][domain]
            self.values[domain] = {
                kind: {slot: Draw(p) for slot, p in kinds[kind].items()}
                for kind in ("info", "book")
                if kind in kinds
            }
            for kind, counts in model["slots_combination_dist"][domain].items():
                weights = {
                    tuple(part for part in key.split("|") if part): float(n) for key, n in counts.items()
                }
                self.combinations[domain, kind] = Draw(weights)
            self._check(domain)

    def _check(self, domain: str) -> None:
        """Is there a value for every slot that a goal of the domain can have? Raises UserError."""
        values, odds = self.values[domain], self.slot_odds[domain]
        combined = self.combinations.get((domain, "info"))
        slots = {slot for combination in combined.choices for slot in combination} if combined else set()
        slots |= {"arriveBy", "leaveAt"} if domain in TIMED else set()
        slots |= {"departure", "destination"} if domain == "taxi" else set()
        needed_slots = {
            "info": slots,
            "book": set(BOOKED_SLOTS.get(domain, ())) if self.book_dist.get(domain) else set(),
        }
        for kind, needed in needed_slots.items():
            for part, entries in (
                ("ind_slot_value_dist", values.get(kind, {})),
                ("ind_slot_dist", odds.get(kind, {})),
            ):
                if missing := sorted(needed - entries.keys()):
                    raise UserError(
                        f"expected {missing[0]!r} in {part}/{domain}/{kind}, found {sorted(entries)}"
                    )
        slot_names = ACT_SLOT[ACT_DOMAIN[domain]]
        if unknown := [
            slot for kind in ("info", "reqt", "book") for slot in odds.get(kind, {}) if slot not in slot_names
        ]:
            raise UserError(
                f"ind_slot_dist/{domain}: expected slots out of {', '.join(slot_names)}, got "
                f"{unknown[0]!r}.{nearest(unknown[0], slot_names)}"
            )
        if (
            domain == "taxi"
            and len({*values["info"]["departure"].choices, *values["info"]["destination"].choices}) < 2
        ):
            raise UserError("ind_slot_value_dist/taxi/info: expected at least two places")

    def sample(self, rng: random.Random, options: Options) -> Goal:
        """One goal. Every info can be met by the database, taxis aside; every domain has a request or a
        booking."""
        while True:
            order = self.orders(rng)
            goal = {domain: self._domain(domain, rng, options) for domain in order}
            if self._join(goal, rng):
                return goal

    def _domain(self, domain: str, rng: random.Random, options: Options) -> DomainGoal:
        for _ in range(RESTARTS):
            goal = self._attempt(domain, rng, options)
            if goal is not None:
                return goal
        raise GoalError(
            f"expected a possible goal for {domain} within {RESTARTS} draws: the goal model's values do not "
            "fit the database"
        )

    def _attempt(self, domain: str, rng: random.Random, options: Options) -> DomainGoal | None:
        """One draw; None where it must be repeated."""
        info = self._info(domain, rng, options)
        if not info and self.values[domain].get("info"):
            return None
        goal: DomainGoal = {"info": info}
        reqt = {slot: "?" for slot in self._requests(domain, rng, options) if slot not in info}
        if reqt:
            goal["reqt"] = reqt
        if rng.random() < self._booking_odds(domain, options):
            goal["book"] = {slot: self.values[domain]["book"][slot](rng) for slot in BOOKED_SLOTS[domain]}
            goal["booked"] = "?"
        if (not reqt and "book" not in goal) or not self._make_possible(domain, goal, rng):
            return None
        return goal

    def _info(self, domain: str, rng: random.Random, options: Options) -> dict[str, str]:
        draws = self.values[domain].get("info", {})
        odds = self.slot_odds[domain].get("info", {})
        if options.info_slots == "combinations" and (domain, "info") in self.combinations:
            slots = list(self.combinations[domain, "info"](rng))
        else:
            slots = [slot for slot in draws if rng.random() < odds[slot]]
        if domain in NAMED and "name" in slots and len(slots) > 1:
            slots = ["name"] if rng.random() < odds["name"] else [slot for slot in slots if slot != "name"]
        if domain in TIMED:
            bound = (
                "arriveBy"
                if rng.random() * (odds["arriveBy"] + odds["leaveAt"]) < odds["arriveBy"]
                else "leaveAt"
            )
            timed = [slot for slot in slots if slot in ("arriveBy", "leaveAt")]
            slots = [slot for slot in slots if slot not in timed] + (timed if len(timed) == 1 else [bound])
        info = {slot: draws[slot](rng) for slot in slots}
        if domain == "train":
            rows = self.database["train"].rows
            row = rows[int(rng.random() * len(rows))]
            info |= {"departure": row["departure"], "destination": row["destination"]}
        if domain == "taxi":
            for slot in ("departure", "destination"):
                info.setdefault(slot, draws[slot](rng))
            while info["departure"] == info["destination"]:
                info["destination"] = draws["destination"](rng)
        return info

    def _requests(self, domain: str, rng: random.Random, options: Options) -> list[str]:
        if options.reqt_slots == "combinations" and (domain, "reqt") in self.combinations:
            return list(self.combinations[domain, "reqt"](rng))
        return [slot for slot, p in self.slot_odds[domain].get("reqt", {}).items() if rng.random() < p]

    def _booking_odds(self, domain: str, options: Options) -> float:
        if domain not in BOOKED_SLOTS or "book" not in self.values[domain]:
            return 0.0
        if options.book_dist == "original":
            return self.book_dist.get(domain, 0.0)
        return max(
            self.slot_odds[domain]["book"].values()
        )  # a booking has all its slots, so each slot's odds are those of a booking

    def _make_possible(self, domain: str, goal: DomainGoal, rng: random.Random) -> bool:
        """Changes one constraint where nothing fits; what was wished for first stays as `fail_info`, except
        for trains."""
        wished = goal["info"]
        if domain not in self.database or self.database[domain].match(wished.items()):
            return True
        slots = list(wished)
        for _ in range(FAILS):
            slot = slots[int(rng.random() * len(slots))]
            support = self.values[domain]["info"][slot].choices
            changed = wished | {slot: support[int(rng.random() * len(support))]}
            if self.database[domain].match(changed.items()):
                goal["info"] = changed
                if domain != "train":
                    goal["fail_info"] = wished
                return True
        return False

    def _join(self, goal: Goal, rng: random.Random) -> bool:
        """Ties the domains of a goal together; False where nothing is left of it."""
        order = list(goal)
        if "taxi" in goal:
            _taxi_between(goal, [domain for domain in order[: order.index("taxi")] if domain in PLACES])
        if (
            "attraction" in goal
            and "restaurant" in goal
            and order.index("attraction") < order.index("restaurant")
        ):
            self._same_area(goal["attraction"]["info"], goal["restaurant"], rng)
        hotel, restaurant = goal.get("hotel", {}).get("book"), goal.get("restaurant", {}).get("book")
        if hotel and restaurant:
            earlier, later = (
                (hotel, restaurant)
                if order.index("hotel") < order.index("restaurant")
                else (restaurant, hotel)
            )
            if rng.random() < 0.5:
                later["people"] = earlier["people"]
            later["day"] = earlier["day"]
        if hotel and "train" in goal:
            self._train_around(hotel, goal)
        return bool(goal)

    def _same_area(self, attraction: dict[str, str], restaurant: DomainGoal, rng: random.Random) -> None:
        if (
            "area" not in attraction
            or "area" not in restaurant["info"]
            or "fail_info" in restaurant
            or rng.random() >= 0.5
        ):
            return
        moved = restaurant["info"] | {"area": attraction["area"]}
        if self.database["restaurant"].match(moved.items()):
            restaurant["info"] = moved

    def _train_around(self, hotel: dict[str, str], goal: Goal) -> None:
        """The train comes on the day the hotel begins, or goes on the day it ends; a goal whose train does
        not exist loses the train."""
        info = goal["train"]["info"]
        if info["destination"] == self.hub:
            info["day"] = hotel["day"]
        elif info["departure"] == self.hub:
            info["day"] = DAYS[(DAYS.index(hotel["day"]) + int(hotel["stay"])) % len(DAYS)]
        if not self.database["train"].match(info.items()):
            del goal["train"]


def _taxi_between(goal: Goal, places: list[str]) -> None:
    """A taxi after a visit goes to the last place and comes from the one before; the user names them when
    asked."""
    if not places:
        return
    info = goal["taxi"]["info"]
    info.pop("destination", None)
    booking = goal[places[-1]].get("book", {})
    if places[-1] == "restaurant" and "time" in booking:
        info.pop("leaveAt", None)
        info["arriveBy"] = booking["time"]
    if len(places) >= 2:
        info.pop("departure", None)


def copied(goal: Goal) -> Goal:
    """A copy to work with: the user writes answers into its goal."""
    return {
        domain: {part: dict(x) if isinstance(x, dict) else x for part, x in parts.items()}
        for domain, parts in goal.items()
    }


def checked_goal(goal: Any, database: Database) -> Goal:
    """A goal from outside as the user takes it; `reqt` may be a list, `domain_ordering` orders the domains,
    `booked` is added.

    Raises GoalError for unknown domains, parts and slots, for a goal that asks for nothing, and for one that
    the database cannot meet.
    """
    if not isinstance(goal, Mapping) or not [key for key in goal if key != "domain_ordering"]:
        raise GoalError(
            f"expected a goal, {{domain: {{info, reqt, book}}}} with at least one domain, got {goal!r:.120}"
        )
    order = goal.get("domain_ordering") or [key for key in goal if key != "domain_ordering"]
    if sorted(order) != sorted(key for key in goal if key != "domain_ordering"):
        raise GoalError(
            f"expected domain_ordering to name each domain of the goal once, got {list(order)} and the "
            f"domains {list(goal)}"
        )
    return {domain: _checked_domain(domain, goal[domain], database) for domain in order}


def _check_slots(domain: str, part: str, slots: Mapping[str, Any]) -> None:
    valid_slots = (
        BOOKED_SLOTS.get(domain, ()) if part.endswith("book") else tuple(ACT_SLOT[ACT_DOMAIN[domain]])
    )
    for slot, value in slots.items():
        if slot not in valid_slots:
            raise GoalError(
                f"goal, {domain}, {part}: expected slots out of {', '.join(valid_slots) or 'none'}, got "
                f"{slot!r}.{nearest(slot, valid_slots)}"
            )
        if not isinstance(value, str):
            raise GoalError(f"goal, {domain}, {part}, {slot}: expected a string, got {value!r}")


def _checked_domain(domain: str, parts: Any, database: Database) -> DomainGoal:
    if domain not in GOAL_DOMAINS:
        raise GoalError(
            f"goal: expected domains out of {', '.join(GOAL_DOMAINS)}, got "
            f"{domain!r}.{nearest(domain, GOAL_DOMAINS)}"
        )
    if not isinstance(parts, Mapping):
        raise GoalError(f"goal, {domain}: expected an object with {', '.join(PARTS)}, got {parts!r:.80}")
    if unknown := [part for part in parts if part not in PARTS]:
        raise GoalError(
            f"goal, {domain}: expected parts out of {', '.join(PARTS)}, got "
            f"{unknown[0]!r}.{nearest(unknown[0], PARTS)}"
        )
    reqt = parts.get("reqt", {})
    reqt = dict(reqt) if isinstance(reqt, Mapping) else dict.fromkeys(reqt, "?")
    goal: DomainGoal = {"info": dict(parts.get("info", {}))}
    goal |= {part: dict(parts[part]) for part in ("fail_info", "book", "fail_book") if parts.get(part)}
    if reqt:
        goal["reqt"] = reqt
    for part, slots in goal.items():
        _check_slots(domain, part, slots)
    if "book" in goal:
        goal["booked"] = parts.get("booked", "?")
    if not reqt and "book" not in goal:
        raise GoalError(
            f"goal, {domain}: expected something to ask for (reqt) or to book (book), got {sorted(parts)}"
        )
    if domain in database and not database[domain].match(goal["info"].items()):
        raise GoalError(
            f"goal, {domain}: expected an info that some row of the database meets, got {goal['info']}; "
            "change or drop a constraint"
        )
    return goal
