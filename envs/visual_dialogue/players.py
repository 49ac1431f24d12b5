"""Scripted askers, from the optimal to a random one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from envs.text_world import Message, Player
from envs.visual_dialogue.answers import OPEN_QUESTIONS, POLAR_QUESTIONS, QUESTIONS, read_question
from envs.visual_dialogue.bots import answers_of, fitting, information
from envs.visual_dialogue.rules import ROUNDS
from envs.visual_dialogue.search import ASKED, NOTHING, solved

EQUAL = 1e-9


def rounds_of(messages: list[Message]) -> list[tuple[str, str]]:
    """Questions with their answers; the caption comes before them."""
    texts = [message["content"] for message in messages[1:]]
    return list(zip(texts[::2], texts[1::2], strict=False))


def scenes_left(messages: list[Message]) -> np.ndarray:
    """(POOL,) bool: the scenes that agree with the caption and the answers."""
    fits = fitting(messages[0]["content"])
    for asked, told in rounds_of(messages):
        question = read_question(asked)
        if question is not None:  # who knows the scenes learns from a hedge, too
            fits = fits & (answers_of(question) == told)
    return fits


class Greedy:
    """The question of a list whose answer says most about the scene, and with probability `slip` any question
    at all; where none says anything, any of the list."""

    def __init__(self, questions: tuple[str, ...], seed: int, *, slip: float = 0.0) -> None:
        self.questions, self.slip = questions, slip
        self.chance = random.Random(f"asker {seed}")

    def __call__(self, messages: list[Message]) -> str:
        if self.chance.random() < self.slip:
            return self.chance.choice(QUESTIONS)
        left = scenes_left(messages)
        says = [information(left, text) for text in self.questions]
        return self.chance.choice(
            [q for q, s in zip(self.questions, says, strict=True) if s > max(says) - EQUAL]
        )


class Optimal:
    """The question that is best for the rest of the dialogue under a kind of reward, by search."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.chance = kind, random.Random(f"asker {seed}")

    def __call__(self, messages: list[Message]) -> str:
        known = solved(messages[0]["content"], self.kind)
        heard, alive, left = known.everyone, known.begins, ROUNDS
        for asked, told in rounds_of(messages):
            text = _BY_MEANING.get(read_question(asked), NOTHING)
            if text != NOTHING:
                heard, alive = known.after(heard, alive, text, told)
            left -= 1
        if not alive:  # a caption or an answer that no scene gives
            return self.chance.choice(OPEN_QUESTIONS)
        return self.chance.choice(known.best(heard, alive, left))


_BY_MEANING = {read_question(text): text for text in ASKED}
HABITS = {"polar": 0.4, "open": 0.2, "random": 0.4}  # shares of the dialogues in the logs
SLIP = 0.2  # questions in the logs that are just any


class Mixed:
    """The behaviour policy of the logs: each dialogue has one habit, and slips."""

    def __init__(self, seed: int) -> None:
        self.habit = random.Random(f"habit {seed}").choices(list(HABITS), list(HABITS.values()))[0]
        self.asker = ASKERS[self.habit](seed, slip=SLIP)

    def __call__(self, messages: list[Message]) -> str:
        return self.asker(messages)


ASKERS: dict[str, Callable[..., Any]] = {
    "informative": partial(Greedy, QUESTIONS),
    "open": partial(Greedy, OPEN_QUESTIONS),
    "polar": partial(Greedy, POLAR_QUESTIONS),
    "random": lambda seed, slip=0.0: Greedy(QUESTIONS, seed, slip=1.0),
}


def players(kind: str) -> dict[str, Callable[[int], Player]]:
    """Players by name, each made of a seed; the optimal one knows the kind of reward."""
    return {"optimal": partial(Optimal, kind), **ASKERS, "mixed": Mixed}
