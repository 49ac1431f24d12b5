"""Turns with the dialogue acts in them, and where in the text the acts' values stand: what language
understanding is trained on.

An act is `(intent, domain, slot, value)`. Annotations give values without places, so `located` looks for
them:

    located("Two rooms in the east , please",
            [("Inform", "Hotel", "Area", "east"), ("Inform", "Hotel", "Parking", "yes")])
    -> spans [(17, 21, ("Inform", "Hotel", "Area"))], whole [("Inform", "Hotel", "Parking", "yes")]

Acts whose value is not in the text, or is none at all (requests, goodbyes), are about the sentence as a
whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_dialog.data.letters import LETTER, MARK, UNSPACED
from rl_dialog.data.schema import Dialog

Act = tuple[str, str, str, str]  # intent, domain, slot, value
Tag = tuple[str, str, str]  # an act whose value stands in the text
Span = tuple[int, int, Tag]  # characters start..end
SIDES = ("user", "system")
REST = re.compile(rf"(?:{LETTER}|{MARK})*+")  # of a word
ALONE = re.compile(f"[{UNSPACED}]")  # a word by itself
NO_TEXT = frozenset(("?", "none", "dontcare", "yes", "no", "any", ""))  # values that are not looked for


@dataclass(frozen=True)
class LabelledTurn:
    """One turn of a dialog."""

    text: str
    side: str  # who says it: user or system
    context: tuple[str, ...]  # what was said before, oldest first
    acts: tuple[Act, ...]
    dialog: str = ""  # the dialog's id


def labelled_turns(
    dialogs: Iterable[Dialog],
    acts_of: Callable[[Mapping[str, Any]], Iterable[Act] | None],
    *,
    without: re.Pattern[str],
) -> Iterator[LabelledTurn]:
    """The turns of the users and assistants for which `acts_of` knows acts, with what was said before each.

    Texts that `without` finds something in are context only: placeholders teach no values.
    """
    sides = {"user": "user", "assistant": "system"}
    for dialog in dialogs:
        earlier: list[str] = []
        for message in dialog.messages:
            if message["role"] not in sides:
                continue
            text, acts = message["content"] or "", acts_of(message)
            if acts is not None and not without.search(text):
                yield LabelledTurn(text, sides[message["role"]], tuple(earlier), tuple(acts), dialog.id)
            earlier.append(text)


def located(text: str, acts: Iterable[Act]) -> tuple[list[Span], list[Act]]:
    """(spans in order of their place, acts about the whole sentence). Longer values are placed first; equal
    ones in the order of the acts.

    A value is found as whole words, else as the beginning of a word ("moderate" in "moderately"), which the
    span then covers.
    """
    spans: list[Span] = []
    sentence_acts: list[Act] = []
    for act in sorted(acts, key=lambda act: -len(act[3])):
        place = None if act[3].lower() in NO_TEXT else _place(text, act[3], spans)
        if place is None:
            sentence_acts.append((*act[:3], act[3].lower()))
        else:
            spans.append((*place, act[:3]))
    return sorted(spans), sentence_acts


def _place(text: str, value: str, spans: Sequence[Span]) -> tuple[int, int] | None:
    words = r"\s+".join(map(re.escape, value.split()))
    if not words:
        return None
    found = [match.span(1) for match in re.finditer(f"(?=({words}))", text, re.IGNORECASE)]
    begun = [(start, end) for start, end in found if not start or _is_border(text, start - 1, start)]
    whole = [(start, end) for start, end in begun if end == len(text) or _is_border(text, end, end - 1)]
    for place in (*whole, *((start, REST.match(text, end).end()) for start, end in begun)):
        if all(place[1] <= start or place[0] >= end for start, end, _ in spans):
            return place
    return None


def _is_border(text: str, beside: int, inside: int) -> bool:
    """Whether a word ends between the character `inside` a value and the one beside it."""
    return REST.match(text, beside, beside + 1).end() == beside or ALONE.match(text, inside) is not None
