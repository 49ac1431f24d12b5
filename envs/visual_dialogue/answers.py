"""How a question is understood, and the answer that a scene gives to it.

A question is about one attribute: open (`what colour is it?` -> the value) or polar (`is it red?` -> yes or
no). What is hidden or not understood gets a hedge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from envs.visual_dialogue.scenes import ATTRIBUTES, OUTDOORS, Scene, value, where

# The first of these words in a text says of which kind the question is.
POLAR = {"is", "isn't", "are", "aren't", "was", "were", "do", "does", "did", "can", "could", "has", "have"}
OPEN = {"what", "what's", "where", "where's", "how", "who", "who's", "which", "whose"}
UNCLEAR = "i can't understand that"
HIDDEN = "i can't tell"
HEDGES = (UNCLEAR, HIDDEN)  # answers that tell the questioner nothing

# What an open question does not find out where the photo is blurred; a polar one does.
FAINT = ("place", "colour", "count", "weather", "person")
_WORDING = {
    "one": "1",
    "two": "2",
    "three": "looks like 3",
    "small": "fairly small",
    "large": "fairly large",
    "man": "a man",
    "woman": "a woman",
    "child": "a child",
}

# Words that name an attribute, and words beside the values themselves that mean some of them.
ABOUT = {
    "object": "object objects thing animal",
    "place": "where where's place room location taken",
    "colour": "colour color colours colors",
    "count": "many number",
    "size": "big size tall",
    "weather": "weather sky",
    "person": "who who's person people anyone anybody human",
}
MEANS: dict[str, tuple[str, tuple[str, ...]]] = {
    "outdoors": ("place", OUTDOORS),
    "outside": ("place", OUTDOORS),
    "indoors": ("place", tuple(p for p in ATTRIBUTES["place"] if p not in OUTDOORS)),
    "inside": ("place", tuple(p for p in ATTRIBUTES["place"] if p not in OUTDOORS)),
    "sunny": ("weather", ("sun",)),
    "cloudy": ("weather", ("clouds",)),
    "rainy": ("weather", ("rain",)),
    "raining": ("weather", ("rain",)),
    "snowy": ("weather", ("snow",)),
    "snowing": ("weather", ("snow",)),
    "big": ("size", ("large",)),
    "little": ("size", ("small",)),
    "1": ("count", ("one",)),
    "2": ("count", ("two",)),
    "3": ("count", ("three",)),
    **dict.fromkeys(("people", "person", "anyone", "anybody"), ("person", ("man", "woman", "child"))),
    **{word: (name, (word,)) for name in ABOUT for word in ATTRIBUTES[name]},
}
REMEMBERED = 1 << 14  # texts whose meaning is kept; a server and a long training meet any number of them
_WORD = re.compile(r"[a-z0-9]+(?:['’][a-z]+)?")


@dataclass(frozen=True)
class Question:
    """What was asked: an attribute, and for a polar question the values that make the answer yes."""

    attribute: str
    values: tuple[str, ...] | None = None  # None: an open question

    @property
    def polar(self) -> bool:
        return self.values is not None


@lru_cache(maxsize=REMEMBERED)
def read_question(text: str) -> Question | None:
    """The question that a text is; None for what is not understood: no question word, nothing that is asked
    about, or several things at once (`is it red or blue?`)."""
    said = [word.replace("’", "'") for word in _WORD.findall(text[:400].lower())]
    first = next((word for word in said if word in POLAR or word in OPEN), None)
    if first is None:
        return None
    if first in OPEN:
        named = {name for name, words in ABOUT.items() for word in words.split() if word in said}
        return Question(named.pop()) if len(named) == 1 else None
    meant = {MEANS[word] for word in said if word in MEANS}
    if {name for name, _ in meant} > {"object"}:  # is the dog red?
        meant = {each for each in meant if each[0] != "object"}
    return Question(*meant.pop()) if len(meant) == 1 else None


def answer(scene: Scene, question: Question | None) -> str:
    """What is answered about a scene."""
    if question is None:
        return UNCLEAR
    if question.attribute == "weather" and value(scene, "place") not in OUTDOORS:
        return HIDDEN
    word = value(scene, question.attribute)
    if question.values is not None:
        return "yes" if word in question.values else "no"
    if question.attribute in FAINT and value(scene, "photo") == "blurred":
        return HIDDEN
    return _WORDING.get(word, word)


# A question for everything that can be asked: what scripted players say, and all that a search needs to try.
_OPEN = {
    "place": "where is it?",
    "colour": "what colour is it?",
    "count": "how many are there?",
    "size": "how big is it?",
    "weather": "what is the weather like?",
    "person": "who is there?",
}
_POLAR = {
    "place": ["is it outdoors?", *(f"is it {where(word)}?" for word in ATTRIBUTES["place"])],
    "colour": [f"is it {word}?" for word in ATTRIBUTES["colour"]],
    "count": ["is there one?", "are there two?", "are there three?"],
    "size": ["is it small?"],
    "weather": ["is it sunny?", "is it cloudy?", "is it raining?", "is it snowing?"],
    "person": ["is anyone there?", "is there a man?", "is there a woman?", "is there a child?"],
}
OPEN_QUESTIONS = tuple(_OPEN.values())
POLAR_QUESTIONS = tuple(text for texts in _POLAR.values() for text in texts)
QUESTIONS = OPEN_QUESTIONS + POLAR_QUESTIONS
