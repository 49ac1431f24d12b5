"""Words back to acts where the words are templates: the sentences of a `Speaker`, read backwards.

    understand = matchers(world)["system"].understand
    understand("It is in the east. Its phone number is 01223316074.", ["I need a hotel ."])

It is exact where the templates are: a sentence that can only mean one act is read as that act. Where several
acts have the same sentence ("The address is ..." is said of hotels and museums) it takes, in this order, the
act whose value occurs in the world, whose domain is the one in hand (that of the other sentences, else of
what was said before), which the world's vocabulary has, and a plain Inform before other intents. Sentences
that are no template of the side mean nothing. Sentences for whole groups of acts (`auto` templates) are not
read; what `fit_nlu` trains reads them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, NONE, SYSTEM_INTENTS, USER_INTENTS, Act, Acts
from envs.multiwoz.templates import GENERAL, WORDS, Speaker, finished
from envs.multiwoz.values import TIME
from envs.multiwoz.world import World

VALUE = "\ue000"  # in place of a value while templates become patterns
BREAK = re.compile(r"(?<=[.?!]) ")
CHOICES = re.compile(r"Do you prefer (.+) as the (.+)\?", re.IGNORECASE)
OF_ANY_SLOT = ("?", NONE, "dontcare", "no", "unknown")
LONGEST = 5  # sentences of one template at most
RANK = ("Inform", "Request", "Recommend", "Book", "OfferBook", "OfferBooked", "NoOffer", "NoBook", "Select")


class Pattern(NamedTuple):
    """One wording and the act it stands for; the act's value is VALUE where the words name it."""

    act: Act
    words: re.Pattern[str] | None  # None for a wording without a value
    anchor: str  # the longest piece of text in it, in lower case
    literal: int  # characters that are not the value


class Reading(NamedTuple):
    """A piece of text as an act."""

    act: Act
    literal: int


def matchers(world: World) -> dict[str, Matcher]:
    """The readers of both sides' sentences, "user" and "system"; each looks for the domain in hand in the
    other's too."""
    readers = {side: Matcher(world, side=side) for side in ("user", "system")}
    readers["user"].partner, readers["system"].partner = readers["system"], readers["user"]
    return readers


class Matcher:
    """The reader of one side's sentences, the user's or the system's."""

    def __init__(self, world: World, *, side: str) -> None:
        speaker = Speaker(world.templates[side], side=side)
        self.vocabulary = {
            parts[:3] for parts in (world.user_acts if side == "user" else world.system_acts).parts
        }
        self.values = _values(world)
        self.whole: dict[str, list[Act]] = {}  # wordings without a value
        self.patterns: list[Pattern] = []
        for act in _sayable(side):
            for wording in speaker.wordings(act):
                self._add(act, wording)
        self.side, self.partner = side, self
        self._read = lru_cache(maxsize=1 << 12)(self._readings)
        self._split = lru_cache(maxsize=1 << 12)(self._segments)

    def __reduce__(self) -> tuple:
        raise TypeError(
            "expected a world to make a Matcher from in each process, got a Matcher to copy between processes"
        )

    def understand(self, text: str, context: Sequence[str] = ()) -> Acts:
        """The acts in a turn; `context` is what was said before it by both sides in turn, oldest first."""
        segments = self._split(" ".join(text.split()))
        domain = _domain(segments)
        for back, earlier in enumerate(reversed(context)):
            domain = domain or (self if back % 2 else self.partner).mentioned(earlier)
        acts: list[Act] = []
        for readings in segments:
            acts += self._likeliest(readings, domain)
        return tuple(dict.fromkeys(acts))

    def mentioned(self, text: str) -> str:
        """The domain that a text is about; "" where that is not clear."""
        return _domain(self._split(" ".join(text.split())))

    # --- from templates to patterns

    def _add(self, act: Act, wording: str) -> None:
        if VALUE not in wording:
            unsaid = "yes" if act[2] in ("Parking", "Internet") else NONE
            self.whole.setdefault(wording.lower(), []).append(
                (*act[:3], unsaid if act[3] == VALUE else act[3])
            )
            return
        parts = wording.split(VALUE)
        groups = ["(.+?)"] + ["\\1"] * (len(parts) - 2)
        words = "".join(re.escape(part) + group for part, group in zip(parts, [*groups, ""], strict=True))
        self.patterns.append(
            Pattern(act, re.compile(words, re.IGNORECASE), max(parts, key=len).lower(), sum(map(len, parts)))
        )

    # --- from text to acts

    def _segments(self, text: str) -> tuple[tuple[Reading, ...], ...]:
        """The text cut into pieces that are templates, so that as few characters as possible are left over
        and the pieces are as long as possible."""
        sentences = BREAK.split(text) if text else []
        best: list[tuple[int, int, tuple]] = [
            (0, 0, ())
        ]  # after each sentence: characters left over, pieces, readings
        for end in range(1, len(sentences) + 1):
            options = []
            for start in range(max(0, end - LONGEST), end):
                piece = " ".join(sentences[start:end])
                leftover, pieces, readings = best[start]
                if piece_readings := self._read(piece):
                    options.append((leftover, pieces + 1, (*readings, piece_readings)))
                elif end - start == 1:
                    options.append((leftover + len(piece), pieces + 1, readings))
            best.append(min(options, key=lambda option: option[:2]))
        return best[-1][2]

    def _readings(self, piece: str) -> tuple[Reading, ...]:
        """All acts that a piece of text may stand for."""
        lowered = piece.lower()
        readings = [Reading(act, len(piece)) for act in self.whole.get(lowered, ())]
        for act, words, anchor, literal in self.patterns:
            if anchor in lowered and (match := words.fullmatch(piece)):
                value, bare = match[1], not any(map(str.isalpha, anchor))
                if not (bare or BREAK.search(value)) or self._listed(act, value):
                    readings.append(Reading((*act[:3], act[3].replace(VALUE, value)), literal))
        if self.side == "system" and (match := CHOICES.fullmatch(piece)):
            readings += [
                Reading(("Select", domain, slot, match[1]), len(piece))
                for domain in GOAL_SLOT
                for slot in GOAL_SLOT[domain]
                if _word(slot) == match[2]
            ]
        return tuple(readings)

    def _likeliest(self, readings: tuple[Reading, ...], domain: str) -> list[Act]:
        act = min(readings, key=lambda reading: self._doubt(reading, domain)).act
        intent, about, slot, value = act
        if intent == "Select" and slot != NONE:
            return [(intent, about, slot, choice) for choice in re.split(r", | or ", value)]
        return [act]

    def _doubt(self, reading: Reading, domain: str) -> tuple:
        intent, about, slot, value = reading.act
        return (
            not self._is_known(reading.act, value),
            about not in (domain, "Booking", "general"),
            (intent, about, slot) not in self.vocabulary,
            -reading.literal,
            slot == "Ref" and intent != "Book",
            RANK.index(intent) if intent in RANK else -1,
        )

    def _is_known(self, act: Act, value: str) -> bool:
        """Does the value occur in the world as one of the slot? True where the world has no list of them."""
        if (act[1], act[2]) not in self.values or value in OF_ANY_SLOT or TIME.fullmatch(value):
            return True
        return self._listed(act, value) or value.lower().startswith(("same ", "the same", "in the same"))

    def _listed(self, act: Act, value: str) -> bool:
        return value.lower() in self.values.get((act[1], act[2]), ())


def _domain(segments: Sequence[tuple[Reading, ...]]) -> str:
    """The domain that most pieces have that can have only one; else that one that all ambiguous pieces have
    in common, if there is just one."""
    sets = [{reading.act[1] for reading in readings} - {"general", "Booking"} for readings in segments]
    sure = Counter(next(iter(domains)) for domains in sets if len(domains) == 1)
    if sure:
        return sure.most_common(1)[0][0]
    shared = set.intersection(*filter(None, sets)) if any(sets) else set()
    return next(iter(shared)) if len(shared) == 1 else ""


def _sayable(side: str) -> Iterator[Act]:
    """Every act that a side can word, a Select aside; VALUE where it has a value of its own, and the values
    that have words of their own."""
    intents = USER_INTENTS if side == "user" else SYSTEM_INTENTS
    yield from ((intent, "general", NONE, NONE) for intent in sorted(intents & GENERAL.keys()))
    for domain, slots in GOAL_SLOT.items():
        if domain == "Booking" and side == "user":
            continue
        for intent in sorted(intents - GENERAL.keys()):
            yield intent, domain, NONE, "?" if intent == "Request" else NONE
            if intent == "Select":
                continue
            for slot in (*slots, "Open") if side == "system" else slots:
                yield intent, domain, slot, "?" if intent == "Request" else VALUE
                if intent != "Request":
                    yield from ((intent, domain, slot, value) for value in ("dontcare", NONE, "no"))
            if intent == "Inform" and side == "user":
                yield from (
                    (intent, domain, slot, value) for slot, value in (("Choice", "any"), ("NotBook", NONE))
                )
                yield intent, domain, "Price", f"in the same{VALUE}"


def _values(world: World) -> dict[tuple[str, str], frozenset[str]]:
    """(act domain, act slot) -> the values of the world; a slot without a list is not there."""
    values = {}
    for domain, slots in GOAL_SLOT.items():
        for slot, long in slots.items():
            if slot_values := world.values.by_slot.get((GOAL_DOMAIN[domain], long.lower())):
                values[domain, slot] = frozenset(
                    finished(value)[:-1].lower() for value in slot_values
                )  # punctuated as in sentences
    return values


def _word(slot: str) -> str:
    return WORDS.get(slot, slot.lower())
