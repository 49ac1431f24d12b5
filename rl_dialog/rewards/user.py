"""How the user answered: rewards read from the user's turn after a reply. They do not apply where the user never answered."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.words import words

if TYPE_CHECKING:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

LONGEST_ANSWER = 30  # words; longer answers earn no more


def sentiment(dialog: Dialog) -> list[float | None]:
    """-1..1: VADER's compound score of the user's answer (English)."""
    return [None if answer is None else vader().polarity_scores(answer)["compound"] for answer in answers(dialog)]


def answer_length(dialog: Dialog) -> list[float | None]:
    """0..1: how many words the user answered, 30 or more being 1."""
    return [None if answer is None else min(len(words(answer)), LONGEST_ANSWER) / LONGEST_ANSWER for answer in answers(dialog)]


def answers(dialog: Dialog) -> list[str | None]:
    """What the user said between each reply and the next assistant message, None where that is nothing."""
    found: list[str | None] = []
    for i in dialog.replies:
        said = []
        for message in dialog.messages[i + 1 :]:
            if message["role"] == "assistant":
                break
            if message["role"] == "user":
                said.append(message["content"] or "")
        found.append("\n".join(said) if said else None)
    return found


@cache
def vader() -> SentimentIntensityAnalyzer:
    """The lexicon, read once per process."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ImportError("the reward `sentiment` needs VADER: pip install vaderSentiment") from error
    return SentimentIntensityAnalyzer()
