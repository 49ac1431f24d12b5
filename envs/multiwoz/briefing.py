"""A goal in plain English, for people who play the user.

>>> print(briefing({"hotel": {"info": {"area": "east"}, "reqt": {"phone": "?"}}}))
You are looking for a hotel. The area should be east. Ask for the phone number.
"""

from __future__ import annotations

from envs.multiwoz.goals import DomainGoal, Goal

OPENINGS = {
    "attraction": "You are looking for a place to visit.",
    "hotel": "You are looking for a hotel.",
    "restaurant": "You are looking for a restaurant.",
    "train": "You are looking for a train.",
    "taxi": "You need a taxi.",
    "hospital": "You are looking for a hospital.",
    "police": "You need the police.",
}
CONSTRAINTS = {  # those that do not read well as "The {slot} should be {value}."
    "name": "It is called {}.",
    "stars": "It should have {} stars.",
    "food": "It should serve {} food.",
    "pricerange": "The price range should be {}.",
    "destination": "You want to go to {}.",
    "departure": "You start from {}.",
    "leaveAt": "You do not want to leave before {}.",
    "arriveBy": "You want to be there by {}.",
    "day": "You travel on {}.",
}
YES_OR_NO = {"internet": "internet", "parking": "parking"}
SLOTS = {
    "phone": "phone number",
    "pricerange": "price range",
    "leaveAt": "time of departure",
    "arriveBy": "time of arrival",
    "trainID": "train number",
}


def briefing(goal: Goal, *, bold: bool = False) -> str:
    """What the user wants, one line per domain in order; values in <b></b> with `bold`."""
    return "\n".join(" ".join(_sentences(domain, goal, bold)) for domain in goal)


def _sentences(domain: str, goal: Goal, bold: bool) -> list[str]:
    parts = goal[domain]
    failing, info = parts.get("fail_info"), parts["info"]
    sentences = [
        OPENINGS[domain],
        *(_constraint(slot, value, bold) for slot, value in (failing or info).items()),
    ]
    if domain == "taxi" and "destination" not in info:
        back = " You come from the place before it." if "departure" not in info else ""
        sentences.append(f"It should bring you to the last place of this list.{back}")
    if failing:
        changed = [
            _constraint(slot, value, bold) for slot, value in info.items() if failing.get(slot) != value
        ]
        sentences.append(f"If there is none: {' '.join(changed)}")
    if "reqt" in parts:
        sentences.append(f"Ask for the {_listed([SLOTS.get(slot, slot) for slot in parts['reqt']])}.")
    if "book" in parts:
        sentences.append(_booking(parts, parts.get("fail_book") or parts["book"], bold))
        if "fail_book" in parts:
            sentences.append(f"If that fails: {_booking(parts, parts['book'], bold)}")
    return sentences


def _constraint(slot: str, value: str, bold: bool) -> str:
    if slot in YES_OR_NO:
        return f"It should {'' if value == 'yes' else 'not '}have {YES_OR_NO[slot]}."
    value = _shown(value, bold)
    return CONSTRAINTS[slot].format(value) if slot in CONSTRAINTS else f"The {slot} should be {value}."


def _booking(parts: DomainGoal, book: dict[str, str], bold: bool) -> str:
    phrases = {
        "people": "for {} people",
        "stay": "for {} nights",
        "time": "at {}",
        "day": "on {}" if "time" in book else "from {}",
    }
    wishes = [phrases[slot].format(_shown(book[slot], bold)) for slot in phrases if slot in book]
    return f"Book it {', '.join(wishes)}."


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _shown(value: str, bold: bool) -> str:
    return f"<b>{value}</b>" if bold else value
