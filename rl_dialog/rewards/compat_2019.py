"""The model-free reward columns of the 2019 code as it computed them, defects included, to compare with its published runs.

It saw a conversation as exchanges (user, bot, next user), matched letters instead of words, and normalised over the whole file. With `--compat 2019`
prepare takes these functions, and their normalisers fitted to all splits. What is wrong with them is in README.md, next to what we do instead.
"""

from __future__ import annotations

from collections.abc import Callable

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.conversation import conversation_length
from rl_dialog.rewards.phrases import CHEERFUL, COMPLIMENTS, POLITENESS, SUPPORTIVE
from rl_dialog.rewards.words import QUESTION_WORDS


def you(dialog: Dialog) -> list[float]:
    """1 where the letters "you" are in the reply ("yours", "young")."""
    return [float("you" in reply) for reply in _replies(dialog)]


def answer_length(dialog: Dialog) -> list[float]:
    """Pieces between single spaces of the next user turn, at most 30: punctuation counts, an empty turn is 1 piece, the last reply has 0."""
    return [0.0 if answer is None else float(min(len(answer.split(" ")), 30)) for answer in _next_turns(dialog)]


def answer_characters(dialog: Dialog) -> list[float]:
    """Characters of the next user turn, 0 for the last reply."""
    return [float(len(answer or "")) for answer in _next_turns(dialog)]


def laughter(dialog: Dialog) -> list[float]:
    """How often the letters "ha" are in the next user turn ("what do you have": 2), at most 4; 0 for the last reply."""
    return [float(min((answer or "").count("ha"), 4)) for answer in _next_turns(dialog)]


def vote(dialog: Dialog) -> list[float]:
    """-1, 0 or 1, 0 where nobody voted."""
    return [float(dialog.messages[i].get("feedback", {}).get("vote") or 0) for i in dialog.replies]


def question(dialog: Dialog) -> list[float]:
    """Half for "?", half for a question word between spaces, in lower case only."""
    return [0.5 * ("?" in reply) + 0.5 * (not QUESTION_WORDS.isdisjoint(reply.split())) for reply in _replies(dialog)]


def compliments(dialog: Dialog) -> list[float]:
    """1 where the letters of a phrase are in the reply, denied or not."""
    return [_holds(reply, COMPLIMENTS) for reply in _replies(dialog)]


def politeness(dialog: Dialog) -> list[float]:
    """As compliments."""
    return [_holds(reply, POLITENESS) for reply in _replies(dialog)]


def cheerful(dialog: Dialog) -> list[float]:
    """As compliments: "unhappy" is cheerful."""
    return [_holds(reply, CHEERFUL) for reply in _replies(dialog)]


def supportive(dialog: Dialog) -> list[float]:
    """As compliments."""
    return [_holds(reply, SUPPORTIVE) for reply in _replies(dialog)]


# Our name of the reward -> the function, and how its column was normalised.
COMPAT_2019: dict[str, tuple[Callable[[Dialog], list[float]], str]] = {
    "you": (you, "min_max"),
    "answer_length": (answer_length, "min_max"),
    "answer_characters": (answer_characters, "min_max"),
    "laughter": (laughter, "zscore"),
    "conversation_length": (conversation_length, "zscore"),
    "vote": (vote, "zscore"),
    "question": (question, "none"),
    "compliments": (compliments, "none"),
    "politeness": (politeness, "none"),
    "cheerful": (cheerful, "none"),
    "supportive": (supportive, "none"),
}


def _replies(dialog: Dialog) -> list[str]:
    return [dialog.messages[i]["content"] or "" for i in dialog.replies]


def _next_turns(dialog: Dialog) -> list[str | None]:
    """The user turn after each reply but the last, None for that."""
    turns = []
    for i in dialog.replies:
        later = (message["content"] or "" for message in dialog.messages[i + 1 :] if message["role"] == "user")
        turns.append(next(later, ""))
    return [*turns[:-1], None] if turns else []


def _holds(text: str, phrases: tuple[str, ...]) -> float:
    """The phrases as listed, and with a space for the apostrophe ("you re right") as the lists had them."""
    return float(any(phrase in text or phrase.replace("'", " ") in text for phrase in phrases))
