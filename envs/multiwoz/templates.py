"""Acts in words, from templates: one sentence for each act, or for a whole group where the world has one.

    Speaker(world.templates["user"], side="user").say(acts, rng)  "I need a hotel. It should be in the east."

A template is a sentence with `#DOMAIN-INTENT-SLOT#` in place of the value. Acts without one get a plain
sentence, so that everything can be said.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping

from envs.multiwoz.acts import NONE, Act
from rl_dialog.errors import UserError

Templates = Mapping[str, Mapping[str, list[str]]]  # Domain-Intent -> slot -> sentences

WORDS = {
    "Addr": "address",
    "Arrive": "arrival time",
    "Car": "car",
    "Choice": "number of choices",
    "Depart": "departure",
    "Dest": "destination",
    "Fee": "entrance fee",
    "Id": "train number",
    "Leave": "departure time",
    "Post": "postcode",
    "Price": "price range",
    "Ref": "reference number",
    "Stay": "number of nights",
    "People": "number of people",
    "Ticket": "ticket price",
}
PLACEHOLDER = re.compile(r"#\w+-\w+-\w+#")
REFUSALS = ("NoOffer", "NoBook")
NO_BOOKING = ("I do not want to book it yet.", "No booking for now, please.")
ANY_OF_THEM = ("Any of them will do.", "I have no preference, just pick one.")
SPECIAL = ("no", NONE, "dontcare", "any")  # values that templates for whole groups cannot take
PLAIN = {
    "NoOffer": "There is no such {}.",
    "NoBook": "I could not book it.",
    "Book": "It is booked.",
    "OfferBook": "Shall I book it?",
}
GENERAL = {
    "bye": "Goodbye.",
    "greet": "Hello.",
    "reqmore": "Is there anything else?",
    "welcome": "You are welcome.",
    "thank": "Thank you.",
}


class Speaker:
    """One side's voice; it holds nothing of a dialog.

    Args:
        templates: sentences for single acts, by slot.
        groups: sentences for a whole group, by its sorted slots joined with ";" and ended by one; tried
            first.
    """

    def __init__(self, templates: Templates, *, side: str, groups: Templates | None = None) -> None:
        if side not in ("user", "system"):
            raise UserError(f"expected side user or system, got {side!r}")
        self.templates, self.groups, self.side = templates, groups or {}, side

    def say(self, acts: Iterable[Act], rng: random.Random) -> str:
        """A turn in words; "" for no acts."""
        by_group: dict[tuple[str, str], list[Act]] = {}
        for act in sorted(acts, key=_order):
            if act[3] == "?" and act[0] != "Request":  # the databases' way to say that nobody knows
                act = (*act[:3], "unknown")
            by_group.setdefault((act[1], act[0]), []).append(act)
        sentences = [
            sentence
            for (domain, intent), group in by_group.items()
            for sentence in self._group(domain, intent, group, rng)
        ]
        return " ".join(finished(sentence) for sentence in sentences)

    def _group(self, domain: str, intent: str, acts: list[Act], rng: random.Random) -> list[str]:
        if intent == "Select":
            return self._choices(domain, acts)
        has_slot = any(act[2] != NONE for act in acts)
        slots = sorted(act[2] for act in acts if act[2] != NONE or not has_slot)
        key = "".join(f"{slot};" for slot in slots)
        special = any(slot != NONE and value in SPECIAL for _, _, slot, value in acts)
        if not special and (sentences := self.groups.get(f"{domain}-{intent}", {}).get(key)):
            return [_filled(_pick(sentences, rng), acts)]
        single_acts = [act for act in acts if act[2] != NONE or not has_slot or self.side == "user"]
        return [self._single(act, rng) for act in single_acts]

    def wordings(self, act: Act) -> list[str]:
        """All sentences that may stand for a single act that is no Select, as `say` puts them."""
        return [
            finished(sentence)
            for sentence in self._fixed(act)
            or [_filled(template, [act]) for template in self._templates(act)]
        ]

    def _single(self, act: Act, rng: random.Random) -> str:
        fixed = self._fixed(act)
        if not fixed:
            return _filled(_pick(self._templates(act), rng), [act])
        return fixed[0] if len(fixed) == 1 else _pick(fixed, rng)

    def _templates(self, act: Act) -> list[str]:
        intent, domain, slot, _ = act
        return self.templates.get(f"{domain}-{intent}", {}).get(slot, [])

    def _fixed(self, act: Act) -> list[str] | tuple[str, ...]:
        """The sentences for an act that no template is used for; none where there are templates."""
        intent, domain, slot, value = act
        if domain == "general":
            return [] if self._templates(act) else [GENERAL.get(intent, "Okay.")]
        if slot == "NotBook":
            return NO_BOOKING
        if slot == "Choice" and value == "any":
            return ANY_OF_THEM
        word = WORDS.get(slot, slot.lower())
        if intent != "Request" and slot != NONE:
            if value == "dontcare":
                return [f"I do not care about the {word}."]
            if value == NONE:
                return [f"I do not know the {word}."]
            if slot in ("Parking", "Internet") and intent in ("Inform", "Recommend") and value == "no":
                return [f"I do not need {word}." if self.side == "user" else f"There is no {word}."]
            if value.startswith("in the same"):
                return [f"It should be {value}."]
        return [] if self._templates(act) else [self._plain(act, word)]

    def _plain(self, act: Act, word: str) -> str:
        intent, domain, slot, value = act
        about = "booking" if domain == "Booking" else domain.lower()
        if intent == "Request":
            return f"What is the {word} of the {about}?"
        if slot == NONE:
            if intent in PLAIN:
                return PLAIN[intent].format(about)
            return (
                f"I need something: the {about}."
                if self.side == "user"
                else f"What would you like to know about the {about}?"
            )
        if intent in REFUSALS:
            return f"There is none with the {word} {value}."
        return f"The {word} is {value}."

    def _choices(self, domain: str, acts: list[Act]) -> list[str]:
        by_slot: dict[str, list[str]] = {}
        for _, _, slot, value in acts:
            by_slot.setdefault(slot, []).append(value)
        sentences = []
        for slot, values in by_slot.items():
            word = WORDS.get(slot, slot.lower())
            listed = f"{', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else values[0]
            sentences.append(
                f"Which {domain.lower()} do you prefer?"
                if slot == NONE
                else f"Do you prefer {listed} as the {word}?"
            )
        return sentences


def _order(act: Act) -> tuple:
    """General acts, then by domain: refusals, the name, other information, questions, the rest."""
    intent, domain, slot, _ = act
    if intent in REFUSALS:
        rank = 0
    elif intent == "Request":
        rank = 3
    elif intent in ("Inform", "Recommend"):
        rank = 1 if slot in ("Name", NONE) else 2
    else:
        rank = 4
    return domain != "general", domain, rank


def _pick(choices: list[str] | tuple[str, ...], rng: random.Random) -> str:
    return choices[int(rng.random() * len(choices))]


def _filled(template: str, acts: list[Act]) -> str:
    """The template with the acts' values, in order where a slot comes more than once."""
    for intent, domain, slot, value in acts:
        template = template.replace(f"#{domain}-{intent}-{slot}#".upper(), value, 1)
    values = {f"#{domain}-{intent}-{slot}#".upper(): value for intent, domain, slot, value in acts}
    return PLACEHOLDER.sub(lambda match: values.get(match[0].upper(), ""), template)


def finished(sentence: str) -> str:
    """With a capital letter and a full stop."""
    sentence = " ".join(sentence.split())
    for mark in ".,?!":
        sentence = sentence.replace(f" {mark}", mark)
    sentence = sentence[:1].upper() + sentence[1:]
    return sentence if sentence.endswith((".", "?", "!")) else sentence + "."
