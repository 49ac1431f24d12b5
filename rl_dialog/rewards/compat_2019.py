"""Rewards of the 2019 code as it computed them, defects included, to compare with its published runs.

It saw a conversation as exchanges (user, bot, next user), matched letters instead of words, and normalised
over the whole file. With `--compat 2019` prepare takes the functions of its offline columns, and their
normalisers fitted to all splits; with `--compat 2019-self-play` those that its bots earned from each other.
What is wrong with them is in README.md, next to what we do instead. Columns of sentiment have that code's
values with its own classifier of 64 emojis as `--scorers sentiment=PATH`.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import human
from rl_dialog.rewards.conversation import conversation_length
from rl_dialog.rewards.phrases import CHEERFUL, COMPLIMENTS, POLITENESS, SUPPORTIVE
from rl_dialog.rewards.scorers import INSULT_LIST, VADER, Scorer
from rl_dialog.rewards.user import questions
from rl_dialog.rewards.words import QUESTION_WORDS

UNKNOWN = "<unk>"
BETWEEN_TOKENS = re.compile(
    r"\s|[?!,;:@#$%&()\[\]{}<>\"]|--|\.{2,}"
)  # as that code's tokenizer split English; hyphens and slashes do not
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def you(dialog: Dialog) -> list[float]:
    """1 where the letters "you" are in the reply ("yours", "young")."""
    return [float("you" in reply) for reply in _replies(dialog)]


def answer_length(dialog: Dialog) -> list[float]:
    """Pieces between single spaces of the next user turn, at most 30: punctuation counts, an empty turn is 1
    piece, the last reply has 0."""
    return [
        0.0 if answer is None else float(min(len(answer.split(" ")), 30)) for answer in _next_turns(dialog)
    ]


def answer_characters(dialog: Dialog) -> list[float]:
    """Characters of the next user turn, 0 for the last reply."""
    return [float(len(answer or "")) for answer in _next_turns(dialog)]


def laughter(dialog: Dialog) -> list[float]:
    """How often the letters "ha" are in the next user turn ("what do you have": 2), at most 4; 0 for the last
    reply."""
    return [float(min((answer or "").count("ha"), 4)) for answer in _next_turns(dialog)]


def vote(dialog: Dialog) -> list[float]:
    """-1, 0 or 1, 0 where nobody voted. Raises DialogError for any other vote."""
    return [thumb or 0.0 for thumb in human.vote(dialog)]


def question(dialog: Dialog) -> list[float]:
    """Half for "?", half for a question word in any case as a token of its own: "what's" and "What?" have
    one, "show" and "how-to" none."""
    return [
        0.5 * ("?" in reply) + 0.5 * (not QUESTION_WORDS.isdisjoint(_tokens(reply.lower())))
        for reply in _replies(dialog)
    ]


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


def sentiment(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """Of the next user turn, 0 where it is empty and for the last reply."""
    return [sentiment(answer) if answer else 0.0 for answer in _next_turns(dialog)]


def sentiment_transition(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """Of the next user turn minus that of the turn before the reply; what is missing, after the last reply
    too, is the text "_"."""
    turns_before = [turn or "" for turn in questions(dialog)]
    return [
        sentiment(next_turn or "_") - sentiment(turn or "_")
        for turn, next_turn in zip(turns_before, _next_turns(dialog), strict=True)
    ]


def sentiment_sum(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """The sum of the transitions, on every reply."""
    transitions = sentiment_transition(dialog, sentiment=sentiment)
    return [math.fsum(transitions)] * len(transitions)


def sentiment_slope(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """(lowest - highest) / (row of the lowest - row of the highest), the 0 of the last reply included; 0
    where all are equal; on every reply.

    It sorted the rows by sentiment and took both ends: of equals the first row is the lowest and the last row
    the highest. Its sort kept the order of equals in conversations of up to 16 exchanges; of longer ones,
    where it depended on the machine, we keep it too.
    """
    values = [sentiment(answer) if answer else 0.0 for answer in _next_turns(dialog)]
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    low, high = values.index(min(values)), len(values) - 1 - values[::-1].index(max(values))
    return [(values[low] - values[high]) / (low - high)] * len(values)


def you_spoken(dialog: Dialog) -> list[float]:
    """How often the letters "you" are in the reply."""
    return [float(reply.count("you")) for reply in _replies(dialog)]


def question_spoken(dialog: Dialog) -> list[float]:
    """1 where the reply has both "?" and the letters of a question word ("show")."""
    return [
        float("?" in reply and any(word in reply for word in QUESTION_WORDS)) for reply in _replies(dialog)
    ]


def reply_sentiment(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """Of the reply; -0.5 where "<unk>" is in it."""
    return [-0.5 if UNKNOWN in reply else sentiment(reply) for reply in _replies(dialog)]


def answer_sentiment(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """Of the next user turn; -0.5 where "<unk>" is in it."""
    return [
        -0.5 if UNKNOWN in (answer or "") else sentiment(answer or "_")
        for answer in _next_turns(dialog, spoken=True)
    ]


def toxicity(dialog: Dialog, *, toxicity: Scorer = INSULT_LIST) -> list[float]:
    """Minus the probability that the reply is toxic, which is 0.2 where the letters "depressed" are in it."""
    return [-0.2 if "depressed" in reply else 0.0 - toxicity(reply) for reply in _replies(dialog)]


def reply_length(dialog: Dialog) -> list[float]:
    """Words of the reply once its punctuation is removed."""
    return [float(len(reply.translate(NO_PUNCTUATION).split())) for reply in _replies(dialog)]


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
    "sentiment": (sentiment, "zscore"),
    "sentiment_transition": (sentiment_transition, "none"),
    "sentiment_sum": (sentiment_sum, "none"),
    "sentiment_slope": (sentiment_slope, "none"),
}
SELF_PLAY_2019: dict[str, tuple[Callable[[Dialog], list[float]], str]] = {
    "you": (you_spoken, "none"),
    "question": (question_spoken, "none"),
    "sentiment": (answer_sentiment, "none"),
    "reply_sentiment": (reply_sentiment, "none"),
    "toxicity": (toxicity, "none"),
    "reply_length": (reply_length, "none"),
}
COMPAT = {"2019": COMPAT_2019, "2019-self-play": SELF_PLAY_2019}


def _replies(dialog: Dialog) -> list[str]:
    return [dialog.messages[i]["content"] or "" for i in dialog.replies]


def _next_turns(dialog: Dialog, *, spoken: bool = False) -> list[str | None]:
    """The user turn after each reply; after the last one the offline code knew none (None), in self-play
    there is one."""
    turns_after, later = [], ""
    for message in reversed(dialog.messages):
        turns_after.append(later)
        later = (message["content"] or "") if message["role"] == "user" else later
    turns = [turns_after[-1 - i] for i in dialog.replies]
    return turns if spoken else [*turns[:-1], None] if turns else []


def _tokens(text: str) -> set[str]:
    """Words without the full stop behind them and without what a contraction adds ("what's" -> what)."""
    return {piece.partition("'")[0].rstrip(".") for piece in BETWEEN_TOKENS.split(text)}


def _holds(text: str, phrases: tuple[str, ...]) -> float:
    """The phrases as listed, and with a space for the apostrophe ("you re right") as the lists had them."""
    return float(any(phrase in text or phrase.replace("'", " ") in text for phrase in phrases))
