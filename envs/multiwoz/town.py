"""A town that nobody lives in: places, trains and wishes made up from a seed, in the form of the published
files.

It is what runs without a download, and small: 30 hotels, 60 restaurants, 40 attractions, about 1,100 trains.
The way of asking and the difficulty are like those of MultiWOZ, the numbers are not: results on one say
nothing about the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from envs.multiwoz.acts import ACT_DOMAIN, ACT_SLOT, BOOKED_SLOTS, GOAL_SLOT
from envs.multiwoz.evaluator import REQUESTABLE
from envs.multiwoz.goals import DAYS
from envs.multiwoz.templates import WORDS
from envs.multiwoz.tracker import SEMI
from envs.multiwoz.world import World, build_world

HUB = "millbrook"
TOWNS = ("ashcombe", "brinley", "coldharbour", "dunmere", "eastwick", "fernhill", "garside", "holloway")
AREAS = ("centre", "east", "north", "south", "west")
RANGES = ("cheap", "moderate", "expensive")
FOODS = (
    "italian",
    "indian",
    "chinese",
    "french",
    "greek",
    "thai",
    "mexican",
    "japanese",
    "turkish",
    "spanish",
    "lebanese",
    "korean",
)
SIGHTS = ("museum", "park", "theatre", "cinema", "gallery", "swimming pool", "concert hall", "castle")
WARDS = (
    "cardiology",
    "radiology",
    "neurology",
    "paediatrics",
    "surgery",
    "maternity",
    "oncology",
    "eye clinic",
    "burns unit",
    "physiotherapy",
)
FIRST = (
    "amber",
    "birch",
    "copper",
    "dove",
    "elm",
    "falcon",
    "golden",
    "harbour",
    "ivory",
    "juniper",
    "king's",
    "linden",
    "marble",
    "north",
    "old oak",
)
LAST = {
    "hotel": ("lodge", "inn", "house", "rooms"),
    "restaurant": ("kitchen", "table", "grill", "garden", "tavern"),
    "attraction": ("place", "hall", "corner", "gate"),
}
STREETS = (
    "bridge street",
    "canal walk",
    "high street",
    "mill lane",
    "orchard road",
    "quarry hill",
    "station road",
    "willow avenue",
)
MAKES = ("hatchback", "saloon", "estate", "minivan", "cabriolet")
CONSTRAINTS = {  # which constraints come together, and how often
    "attraction": {"area|type": 4, "type": 3, "area": 2, "name": 2},
    "hotel": {
        "area|pricerange|type": 4,
        "area|parking|stars": 3,
        "internet|pricerange|stars": 3,
        "area|internet|pricerange|type": 3,
        "name": 3,
    },
    "restaurant": {
        "area|food": 4,
        "area|food|pricerange": 4,
        "area|pricerange": 3,
        "food|pricerange": 3,
        "name": 2,
    },
    "train": {"day|departure|destination|leaveAt": 1, "arriveBy|day|departure|destination": 1},
    "taxi": {
        "leaveAt": 5,
        "arriveBy": 4,
        "departure|destination|leaveAt": 2,
        "arriveBy|departure|destination": 2,
    },
    "hospital": {"department": 1},
    "police": {"": 1},
}
ORDERS = {
    "restaurant": 9, "hotel": 8, "train": 6, "attraction": 5, "taxi": 3, "hospital": 2, "police": 2,
    "restaurant|hotel": 6, "hotel|restaurant": 4, "train|hotel": 6, "hotel|train": 6, "restaurant|train": 6,
    "train|attraction": 5, "attraction|restaurant": 5, "hotel|attraction": 5,
    "restaurant|attraction|taxi": 4, "hotel|restaurant|taxi": 4, "attraction|hotel|taxi": 4,
}  # fmt: skip
REQUESTS = {
    "restaurant": 0.25,
    "hotel": 0.2,
    "train": 0.3,
    "attraction": 0.35,
    "hospital": 0.6,
    "police": 0.6,
    "taxi": 1.0,
}  # odds of each slot
BOOKINGS = {"restaurant": 0.4, "hotel": 0.45, "train": 0.35}


def generate_town(seed: int = 0, *, user_sentences: Mapping[str, tuple[str, ...]] | None = None) -> World:
    """The world of a seed; the same seed is the same town everywhere. Its users say `user_sentences`, by
    default USER_SENTENCES."""
    rng = random.Random(seed)
    rows = {
        "attraction": _places("attraction", 40, rng),
        "hotel": _places("hotel", 30, rng),
        "restaurant": _places("restaurant", 60, rng),
        "train": _trains(rng),
        "hospital": [{"department": ward, **_contact(rng)} for ward in WARDS],
        "police": [{"name": "millbrook police station", **_contact(rng)}],
    }
    goal_model = _goal_model(rows)
    user, system = _user_tokens(goal_model), _system_tokens()
    return build_world(
        f"generated town {seed}",
        rows,
        taxi_types=list(MAKES),
        goal_model=goal_model,
        values={domain: _values(table) for domain, table in rows.items()},
        user_tokens=user,
        system_tokens=system,
        sentences={
            "user": _sentences(user, user_sentences or USER_SENTENCES),
            "system": _sentences(system, SYSTEM_SENTENCES),
        },
    )


# --- places and trains


def _places(domain: str, count: int, rng: random.Random) -> list[dict[str, str]]:
    names = [f"the {a} {b}" for a, b in product(FIRST, LAST[domain])]
    return [{"name": name, **_place(domain, rng), **_contact(rng)} for name in rng.sample(names, count)]


def _place(domain: str, rng: random.Random) -> dict[str, str]:
    area, price = rng.choice(AREAS), rng.choice(RANGES)
    if domain == "restaurant":
        return {"area": area, "pricerange": price, "food": rng.choice(FOODS), "type": "restaurant"}
    if domain == "hotel":
        kind = rng.choice(("guesthouse", "hotel"))
        comfort = {
            "internet": rng.choice(("yes", "yes", "no")),
            "parking": rng.choice(("yes", "yes", "no")),
            "stars": rng.choice("0234"),
        }
        return {"area": area, "pricerange": price, "type": kind, **comfort, "takesbookings": "yes"}
    return {
        "area": area,
        "type": rng.choice(SIGHTS),
        "entrance fee": rng.choice(("free", "3 pounds", "5 pounds", "?")),
        "pricerange": "?",
    }


def _contact(rng: random.Random) -> dict[str, str]:
    digits = "".join(rng.choice("0123456789") for _ in range(6))
    letters = "".join(rng.choice("abdefghjlnpqrstuwxyz") for _ in range(2))
    return {
        "address": f"{rng.randint(1, 120)} {rng.choice(STREETS)}",
        "phone": f"01223{digits}",
        "postcode": f"cb{rng.randint(10, 59)}{letters}",  # the form that the evaluator takes for a postcode
    }


def _trains(rng: random.Random) -> list[dict[str, str]]:
    rows = []
    for town in TOWNS:
        duration, price, offset = rng.randint(17, 110), rng.randint(8, 60), rng.randint(0, 59)
        for (departure, destination), day, hour in product(((HUB, town), (town, HUB)), DAYS, range(5, 23, 2)):
            leaves = 60 * hour + offset
            times = {
                "leaveAt": _clock(leaves),
                "arriveBy": _clock(leaves + duration),
                "duration": f"{duration} minutes",
            }
            number = f"TR{1000 + len(rows)}"
            rows.append(
                {
                    "trainID": number,
                    "day": day,
                    "departure": departure,
                    "destination": destination,
                    **times,
                    "price": f"{price}.00 pounds",
                }
            )
    return rows


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _values(rows: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    by_slot: dict[str, dict[str, None]] = {}
    for row in rows:
        for slot, value in row.items():
            by_slot.setdefault(slot.lower(), {})[value.lower()] = None
    return {slot: list(values) for slot, values in by_slot.items()}


# --- wishes


def _goal_model(rows: Mapping[str, list[dict[str, str]]]) -> dict[str, Any]:
    quarters = [_clock(minutes) for minutes in range(8 * 60, 22 * 60, 15)]
    names = [row["name"] for domain in ("attraction", "hotel", "restaurant") for row in rows[domain]]
    taxi = {"leaveAt": quarters, "arriveBy": quarters, "departure": names, "destination": names}
    book = {"people": list("12345678"), "day": list(DAYS), "stay": list("12345"), "time": quarters}
    model: dict[str, Any] = {
        "domain_ordering_dist": ORDERS,
        "slots_combination_dist": {},
        "ind_slot_dist": {},
        "ind_slot_value_dist": {},
    }
    model["book_dist"] = {domain: BOOKINGS.get(domain, 0.0) for domain in CONSTRAINTS}
    for domain, combinations in CONSTRAINTS.items():
        total = sum(combinations.values())
        slots = [slot for slot in SEMI[domain] if any(slot in key.split("|") for key in combinations)]
        odds = {
            slot: sum(n for key, n in combinations.items() if slot in key.split("|")) / total
            for slot in slots
        }
        support = {slot: _support(domain, slot, rows, taxi) for slot in slots}
        booking_odds = {slot: BOOKINGS[domain] for slot in BOOKED_SLOTS.get(domain, ())}
        reqt = dict.fromkeys(REQUESTABLE[domain], REQUESTS[domain])
        model["slots_combination_dist"][domain] = {"info": combinations, "reqt": {"|".join(reqt): 1}}
        model["ind_slot_dist"][domain] = {"info": odds, "reqt": reqt, "book": booking_odds}
        model["ind_slot_value_dist"][domain] = {
            "info": {slot: dict.fromkeys(values, 1.0) for slot, values in support.items()},
            "book": {slot: dict.fromkeys(book[slot], 1.0) for slot in booking_odds},
        }
    return model


def _support(
    domain: str, slot: str, rows: Mapping[str, list[dict[str, str]]], taxi: Mapping[str, list[str]]
) -> list[str]:
    if domain == "taxi" or slot in ("leaveAt", "arriveBy"):
        return taxi[slot]
    return sorted({row[slot] for row in rows[domain]})


# --- tokens and sentences


def _user_tokens(model: Mapping[str, Any]) -> list[str]:
    tokens = {f"general-{intent}-none-none" for intent in ("bye", "greet", "thank")}
    for domain, kinds in model["ind_slot_dist"].items():
        name = ACT_DOMAIN[domain]
        names = ACT_SLOT[name]
        tokens |= {f"{name}-Inform-none-none"} | {
            f"{name}-Inform-{names[slot]}-1" for kind in ("info", "book") for slot in kinds[kind]
        }
        tokens |= {f"{name}-Request-{names[slot]}-?" for slot in kinds["reqt"]}
    return sorted(tokens)


def _system_tokens() -> list[str]:
    tokens = {f"general-{intent}-none-none" for intent in ("bye", "greet", "reqmore", "welcome")}
    for domain, slots in GOAL_SLOT.items():
        constraints = [
            slot for slot, long in slots.items() if domain != "Booking" and long in SEMI[domain.lower()]
        ]
        if domain == "Booking":
            tokens |= {f"Booking-{intent}-none-none" for intent in ("Book", "Inform", "NoBook")} | {
                f"Booking-Book-{slot}-1" for slot in slots
            }
            tokens |= {f"Booking-Request-{slot}-?" for slot in ("Day", "People", "Stay", "Time")}
            continue
        inform_slots = [
            slot
            for slot in slots
            if slot not in ("Stay", "People")
            and not (domain in ("Hotel", "Restaurant") and slot in ("Day", "Time"))
        ]
        tokens |= {f"{domain}-Inform-{slot}-1" for slot in inform_slots}
        tokens |= {f"{domain}-Request-{slot}-?" for slot in constraints}
        if domain in ("Attraction", "Hotel", "Restaurant"):
            tokens |= {
                f"{domain}-Recommend-{slot}-1" for slot in inform_slots if slot not in ("Choice", "Ref")
            }
            tokens |= {f"{domain}-Inform-Name-2", f"{domain}-Inform-Name-3", f"{domain}-Select-none-none"}
        if domain in ("Attraction", "Hotel", "Restaurant", "Train"):
            tokens |= {f"{domain}-NoOffer-{slot}-1" for slot in constraints} | {f"{domain}-NoOffer-none-none"}
        if domain == "Train":
            tokens |= {
                f"Train-{intent}-{slot}-1"
                for intent in ("OfferBook", "OfferBooked")
                for slot in (*constraints, "Id", "Ref", "Ticket")
            }
            tokens |= {"Train-OfferBook-none-none", "Train-Request-People-?"}
    return sorted(tokens)


USER_SENTENCES = {
    "Inform": (
        "I would like the {word} to be {value}.",
        "The {word} should be {value}.",
        "{value} as the {word}, please.",
    ),
    "Inform-none": (
        "I am looking for {a} {domain}.",
        "Can you help me with {a} {domain}?",
        "Next I need {a} {domain}.",
    ),
    "Request": ("What is the {word}?", "Could you tell me the {word}?", "I also need the {word}."),
    "bye": ("That is all, goodbye.", "Thanks for your help. Bye."),
    "greet": ("Hello.", "Good day."),
    "thank": ("Thank you.", "Thanks a lot."),
}
SYSTEM_SENTENCES = {
    "Inform": ("The {word} is {value}.", "Its {word}: {value}.", "For the {word} I have {value}."),
    "Inform-none": ("What would you like to know about the {domain}?",),
    "Recommend": ("How about this one: {word} {value}?", "I can recommend one whose {word} is {value}."),
    "Request": ("What {word} do you have in mind?", "Do you have a preference for the {word}?"),
    "NoOffer": ("There is nothing with the {word} {value}.", "I found none where the {word} is {value}."),
    "NoOffer-none": ("I found no {domain} like that.",),
    "NoBook-none": ("That booking did not work, I am afraid.",),
    "Book": ("Booked, the {word} is {value}.", "It is reserved, {word} {value}."),
    "Book-none": ("Your booking is made.",),
    "OfferBook": ("I can book you one, {word} {value}.",),
    "OfferBook-none": ("Shall I book it?",),
    "OfferBooked": ("Your tickets are booked, {word} {value}.",),
    "bye": ("Goodbye.", "Have a good time."),
    "greet": ("Hello, what can I do for you?",),
    "reqmore": ("Anything else?", "What else can I do for you?"),
    "welcome": ("You are welcome.",),
}


def _sentences(
    tokens: Iterable[str], patterns: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, list[str]]]:
    """Templates for all tokens that there is a pattern for."""
    templates: dict[str, dict[str, list[str]]] = {}
    for token in tokens:
        domain, intent, slot, _ = token.split("-")
        kind = f"{intent}-none" if slot == "none" and domain != "general" else intent
        value = f"#{domain}-{intent}-{slot}#".upper()
        word, about = WORDS.get(slot, slot.lower()), "booking" if domain == "Booking" else domain.lower()
        a = "an" if about[0] in "aeiou" else "the" if about == "police" else "a"
        if kind in patterns:
            templates.setdefault(f"{domain}-{intent}", {})[slot] = [
                pattern.format(word=word, value=value, domain=about, a=a) for pattern in patterns[kind]
            ]
    return templates
