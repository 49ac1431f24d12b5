"""How the assistant spoke: rewards read from the reply and the assistant's earlier turns. They apply to every
reply."""

from __future__ import annotations

import hashlib

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.scorers import INSULT_LEVEL, INSULT_LIST, NO_MODEL, VADER, Scorer
from rl_dialog.rewards.words import QUESTION_WORDS, content_words, meaningful, parts, words

QUESTION_MARKS = "?\uff1f\u061f"  # ASCII, fullwidth, Arabic


def question(dialog: Dialog) -> list[float]:
    """0, 0.5 or 1: half for a question mark, half for an English question word as a word of its own ("show"
    is none)."""
    values = []
    for i in dialog.replies:
        text = dialog.messages[i]["content"] or ""
        marked = any(mark in text for mark in QUESTION_MARKS)
        values.append(0.5 * marked + 0.5 * (not QUESTION_WORDS.isdisjoint(parts(text))))
    return values


def repetition(dialog: Dialog) -> list[float]:
    """0, -1, -2, ...: minus the number of distinct content words of the reply that the assistant already used
    in this dialog."""
    values, used_words = [], set()
    replies = set(dialog.replies)
    for i, message in enumerate(dialog.messages):
        if message["role"] != "assistant":
            continue
        reply_words = content_words(message["content"] or "")
        if i in replies:
            values.append(float(-len(reply_words & used_words)))
        used_words |= reply_words
    return values


def inner_repetition(dialog: Dialog) -> list[float]:
    """0, -1, -2, ...: minus the number of content words of the reply that it has said already."""
    reply_words = [meaningful(dialog.messages[i]["content"] or "") for i in dialog.replies]
    return [float(len(set(words_said)) - len(words_said)) for words_said in reply_words]


def reply_length(dialog: Dialog) -> list[float]:
    """How many words the reply has."""
    return [float(len(words(dialog.messages[i]["content"] or ""))) for i in dialog.replies]


def reply_sentiment(dialog: Dialog, *, sentiment: Scorer = VADER) -> list[float]:
    """-1..1: how the reply itself feels."""
    return [sentiment(dialog.messages[i]["content"] or "") for i in dialog.replies]


def toxicity(dialog: Dialog, *, toxicity: Scorer = INSULT_LIST) -> list[float]:
    """0..-1: minus how toxic the reply is."""
    return [0.0 - toxicity(dialog.messages[i]["content"] or "") for i in dialog.replies]


def toxicity_level(dialog: Dialog, *, toxicity_level: Scorer = INSULT_LEVEL) -> list[float]:
    """0, -1 or -2: minus the level of the reply: safe, sensitive, toxic."""
    return [0.0 - toxicity_level(dialog.messages[i]["content"] or "") for i in dialog.replies]


def toxicity_noised(dialog: Dialog, *, toxicity_level: Scorer = INSULT_LEVEL) -> list[float]:
    """0 or -2: as `toxicity_level`, but level 1 becomes 0 or 2 by a coin that the text decides, so that it
    falls the same way every time."""
    texts = [dialog.messages[i]["content"] or "" for i in dialog.replies]
    levels = [toxicity_level(text) for text in texts]
    return [
        0.0 - (2 * _coin(text) if level == 1 else level) for text, level in zip(texts, levels, strict=True)
    ]


def predicted_upvotes(dialog: Dialog, *, upvotes: Scorer = NO_MODEL) -> list[float | None]:
    """1 where a model gives the reply a probability of at least 1/2 to be voted up, else -1. Does not apply
    without a model (`--scorers upvotes=DIR`)."""
    if upvotes is NO_MODEL:
        return [None] * len(dialog.replies)
    texts = [dialog.messages[i]["content"] or "" for i in dialog.replies]
    return [1.0 if upvotes(text) >= 0.5 else -1.0 for text in texts]


def _coin(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0] & 1
