"""How the user answered: rewards read from the user's turn after a reply. They do not apply where the user
never answered."""

from __future__ import annotations

import re

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.scorers import VADER, Scorer
from rl_dialog.rewards.words import QUESTION_WORDS, content_words, parts, words

LONGEST_ANSWER = 30  # words; longer answers earn no more
LOUDEST_LAUGH = 4  # "ha"s; more earn no more
LAUGH = re.compile(
    r"[bmw]{0,2}a*h*(?:ha+)+h*"
)  # a word that is nothing but laughter: haha, hahah, ahaha, bwahaha


def sentiment(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float | None]:
    """-1..1: how the user's answer feels."""
    return [None if answer is None else sentiment(answer) for answer in answers(dialog)]


def answer_length(dialog: Dialog) -> list[float | None]:
    """0..1: how many words the user answered, 30 or more being 1."""
    return [
        None if answer is None else min(len(words(answer)), LONGEST_ANSWER) / LONGEST_ANSWER
        for answer in answers(dialog)
    ]


def answer_characters(dialog: Dialog) -> list[float | None]:
    """How many characters the user answered, spaces at the ends left out."""
    return [None if answer is None else float(len(answer.strip())) for answer in answers(dialog)]


def laughter(dialog: Dialog) -> list[float | None]:
    """0..4: how many "ha"s the user answered in words that are laughter ("hahaha" is 3, "what have" 0)."""
    return [
        None if answer is None else float(min(_laughs(answer), LOUDEST_LAUGH)) for answer in answers(dialog)
    ]


def _laughs(text: str) -> int:
    return sum(word.count("ha") for word in parts(text) if LAUGH.fullmatch(word))


def word_similarity(dialog: Dialog) -> list[float | None]:
    """0..1: the share of the reply's words that carry meaning and that the user takes up in the answer; 0 for
    a reply without words."""
    values = []
    for i, answer in zip(dialog.replies, answers(dialog), strict=True):
        reply = dialog.messages[i]["content"] or ""
        meaningful_words = content_words(reply)
        shared = (meaningful_words & content_words(answer or "")) - QUESTION_WORDS
        values.append(
            None if answer is None else len(shared) / max(len(words(reply)), len(meaningful_words), 1)
        )  # "o'clock" is one word of two parts
    return values


def sentiment_transition(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float | None]:
    """-2..2: the sentiment of the answer minus that of what the user said before the reply. Does not apply
    without either."""
    turns = zip(questions(dialog), answers(dialog), strict=True)
    return [
        None if before is None or after is None else sentiment(after) - sentiment(before)
        for before, after in turns
    ]


def sentiment_sum(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float | None]:
    """The sum of the conversation's sentiment transitions, the same for all replies; does not apply where
    there is none."""
    changes = [change for change in sentiment_transition(dialog, sentiment=sentiment) if change is not None]
    return [sum(changes) if changes else None] * len(dialog.replies)


def sentiment_variance(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float | None]:
    """0..1: the (population) variance of the sentiment of the conversation's answers, the same for all
    replies."""
    felt = [sentiment(answer) for answer in answers(dialog) if answer is not None]
    return [float(np.var(felt)) if felt else None] * len(dialog.replies)


def sentiment_slope(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float | None]:
    """(highest - lowest) / (number of the reply with the highest - number of that with the lowest) of the
    answers' sentiment, the first of equals.

    The same for all replies: positive where the user ended happier. 0 where all answers feel the same.
    """
    felt = [(sentiment(answer), t) for t, answer in enumerate(answers(dialog)) if answer is not None]
    if not felt:
        return [None] * len(dialog.replies)
    (low, first), (high, last) = min(felt), max(felt, key=lambda pair: (pair[0], -pair[1]))
    return [(high - low) / (last - first) if last != first else 0.0] * len(dialog.replies)


def questions(dialog: Dialog) -> list[str | None]:
    """What the user said between the assistant message before each reply and the reply, None where that is
    nothing."""
    turns = _said_behind(dialog)
    turns_before = dict(zip(list(turns)[1:], turns.values(), strict=False))
    return [turns_before[i] for i in dialog.replies]


def answers(dialog: Dialog) -> list[str | None]:
    """What the user said between each reply and the next assistant message, None where that is nothing."""
    turns = _said_behind(dialog)
    return [turns[i] for i in dialog.replies]


def _said_behind(dialog: Dialog) -> dict[int, str | None]:
    """Assistant message -> what the user said between it and the next one, None for nothing; -1 is the
    beginning of the dialog."""
    turns_behind: dict[int, list[str]] = {-1: []}
    latest = -1
    for i, message in enumerate(dialog.messages):
        if message["role"] == "assistant":
            latest, turns_behind[i] = i, []
        elif message["role"] == "user":
            turns_behind[latest].append(message["content"] or "")
    return {i: "\n".join(turns) if turns else None for i, turns in turns_behind.items()}
