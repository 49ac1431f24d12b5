"""Fixed English words of the assistant: compliments, politeness, support, cheer, and speaking about the user.
They apply to every reply."""

from __future__ import annotations

import re
from functools import cache

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.words import parts

# fmt: off
COMPLIMENTS = (
    "you are beautiful", "you are so beautiful", "you're beautiful", "you are the best", "you're the best",
    "i like you", "you're a good", "i love the way you",
)
POLITENESS = (
    "if i may", "may i", "please", "thanks", "no worries", "if you don't mind", "have a great day",
    "i'm sorry",
)
CHEERFUL = (
    "nice to hear", "happy", "excited", "really nice", "glad", "the best", "great", "good time",
    "looking forward", "beautiful",
)
SUPPORTIVE = (
    "you're right", "you are right", "you're not alone", "you are not alone", "congrats",
    "that's a good idea", "that is a good idea", "you'll be fine", "you will be fine", "you'll be okay",
    "you will be okay", "you'll get it", "you will get it", "it will get better",
    "sorry you're going through", "sorry you are going through this", "if it makes you feel better",
    "if it makes you feel any better", "keep your head up", "keep it up", "i'm in a similar situation",
    "i am in a similar situation", "happy for you", "i'm in the same boat", "i am in the same boat",
    "if you feel like you need to vent",
)
# fmt: on
NEGATIONS = frozenset(
    ("not", "t", "no", "never", "nor", "neither", "nobody", "nothing", "cannot", "without", "hardly")
)  # t: don't, can't
REACH = 3  # words before a phrase in which a negation turns it around: "not really very happy"
_CLAUSE = re.compile(r"[.!?;:,\n\u2026\u3002\uff0c\uff01\uff1f]+")


def compliments(dialog: Dialog) -> list[float]:
    """1 where the reply compliments the user, else 0."""
    return [_says(reply, COMPLIMENTS) for reply in _replies(dialog)]


def politeness(dialog: Dialog) -> list[float]:
    """1 where the reply is polite, else 0."""
    return [_says(reply, POLITENESS) for reply in _replies(dialog)]


def cheerful(dialog: Dialog) -> list[float]:
    """1 where the reply is cheerful, else 0."""
    return [_says(reply, CHEERFUL) for reply in _replies(dialog)]


def supportive(dialog: Dialog) -> list[float]:
    """1 where the reply supports the user, else 0."""
    return [_says(reply, SUPPORTIVE) for reply in _replies(dialog)]


def you(dialog: Dialog) -> list[float]:
    """1 where the reply speaks about the user: "you" as a word of its own ("you're" too, "your" and "young"
    not), else 0."""
    return [float("you" in parts(reply)) for reply in _replies(dialog)]


def _replies(dialog: Dialog) -> list[str]:
    return [dialog.messages[i]["content"] or "" for i in dialog.replies]


def _says(text: str, phrases: tuple[str, ...]) -> float:
    """1.0 if a clause of `text` holds one of the phrases as whole words, and no negation stands shortly
    before it."""
    by_first_word = _by_first_word(phrases)
    if by_first_word.keys().isdisjoint(parts(text)):
        return 0.0
    for clause in map(parts, _CLAUSE.split(text)):
        for start, word in enumerate(clause):
            for phrase in by_first_word.get(word, ()):
                if clause[start : start + len(phrase)] == phrase and NEGATIONS.isdisjoint(
                    clause[max(start - REACH, 0) : start]
                ):
                    return 1.0
    return 0.0


@cache
def _by_first_word(phrases: tuple[str, ...]) -> dict[str, list[tuple[str, ...]]]:
    by_word: dict[str, list[tuple[str, ...]]] = {}
    for phrase in phrases:
        by_word.setdefault(parts(phrase)[0], []).append(parts(phrase))
    return by_word
