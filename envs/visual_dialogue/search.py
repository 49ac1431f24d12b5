"""The best return and who attains it, exactly: a search over what an asker who knows the pool can know.

Every text is one of finitely many questions or not understood. After some rounds the asker knows two sets of
scenes: those that agree with what the questioner heard (its idea of the picture, and so the rank of every
scene, depends on them alone), and those of them whose dialogue would still be going on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from envs.visual_dialogue.answers import HEDGES, OPEN_QUESTIONS, POLAR_QUESTIONS, UNCLEAR, read_question
from envs.visual_dialogue.bots import NEAR, answers_of, fitting, undecided_pictures
from envs.visual_dialogue.rules import PENALTY, ROUNDS, SHARE, fires
from envs.visual_dialogue.scenes import captions, features

NOTHING = "what object is it?"  # every caption tells it: a question that says nothing and is never penalised
ASKED = (*OPEN_QUESTIONS, *POLAR_QUESTIONS, NOTHING)
EQUAL = 1e-9  # values that differ by less are equal
Outcome = tuple[float, int, int]  # the reward summed over scenes, those that agree, those that go on


def members(scenes: int) -> Iterator[int]:
    """The numbers in a set, which is the bits of an integer."""
    while scenes:
        lowest = scenes & -scenes
        yield lowest.bit_length() - 1
        scenes ^= lowest


class Caption:
    """The dialogues behind one caption under one kind of reward. Scene i is the i-th that fits the caption;
    sets of scenes are the bits of an integer."""

    def __init__(self, caption: str, kind: str) -> None:
        self.kind = kind
        self.places = np.flatnonzero(fitting(caption))
        pictures = set(undecided_pictures())
        own = [captions()[place] == caption and place in pictures for place in self.places.tolist()]
        self.everyone = (1 << len(self.places)) - 1
        self.begins = sum(1 << i for i, has in enumerate(own) if has)  # the scenes that are told so
        self.sides = {text: self._sides(text) for text in ASKED}
        self.heard: dict[int, list[int]] = {}
        self.known: dict[tuple[int, int, int], float] = {}

    def _sides(self, text: str) -> list[tuple[str, int]]:
        told = answers_of(read_question(text))[self.places].tolist()
        return [
            (said, sum(1 << i for i, own in enumerate(told) if own == said)) for said in sorted(set(told))
        ]

    def ranks(self, heard: int) -> list[int]:
        """Each scene's rank when the questioner thinks it is one of these."""
        if heard not in self.heard:
            idea = features()[self.places[list(members(heard))]].mean(0)
            distances = ((features() - idea) ** 2).sum(1)
            own = distances[self.places] - NEAR
            self.heard[heard] = (1 + np.searchsorted(np.sort(distances), own)).tolist()
        return self.heard[heard]

    def outcomes(self, heard: int, alive: int, text: str, left: int) -> tuple[Outcome, ...]:
        """What each answer to a question leads to, over the scenes of `alive`."""
        first, found = self.ranks(self.everyone), []
        for said, side in self.sides[text]:
            if both := alive & side:
                agrees = heard if said in HEDGES else heard & side
                now = self.ranks(agrees)
                stays = [i for i in members(both) if now[i] > SHARE * first[i]] if left > 1 else []
                paid = -len(stays) + PENALTY * fires(self.kind, said) * both.bit_count()
                found.append((paid, agrees, sum(1 << i for i in stays)))
        return tuple(found)

    def after(self, heard: int, alive: int, text: str, told: str) -> tuple[int, int]:
        """What is known after an answer, where the dialogue goes on."""
        side = alive & dict(self.sides[text]).get(told, 0)
        heard = heard if told in HEDGES else heard & dict(self.sides[text]).get(told, 0)
        if not side:
            return heard, 0
        first, now = self.ranks(self.everyone), self.ranks(heard)
        return heard, sum(1 << i for i in members(side) if now[i] > SHARE * first[i])

    def value(self, heard: int, alive: int, left: int) -> float:
        """The best sum of returns over the scenes of `alive`, with so many rounds left."""
        if not alive or not left:
            return 0.0
        if (heard, alive, left) not in self.known:
            best = -np.inf
            for paid, outcomes in self.ways(heard, alive, left):
                if paid <= best + EQUAL:
                    break  # what follows is worth at most 0
                best = max(best, self.worth(outcomes, left, enough=best))
            self.known[heard, alive, left] = best
        return self.known[heard, alive, left]

    def ways(self, heard: int, alive: int, left: int) -> list[tuple[float, tuple[Outcome, ...]]]:
        """What may be asked, without questions that lead to the same, by what is earned at once."""
        distinct = dict.fromkeys(self.outcomes(heard, alive, text, left) for text in ASKED)
        return sorted(((sum(paid for paid, *_ in each), each) for each in distinct), key=lambda way: -way[0])

    def worth(self, outcomes: tuple[Outcome, ...], left: int, *, enough: float = -np.inf) -> float:
        """What is earned at once and afterwards; no more than `enough` where it cannot be."""
        total = sum(paid for paid, *_ in outcomes)
        for _, heard, going in outcomes:
            if total <= enough + EQUAL:
                break
            total += self.value(heard, going, left - 1)
        return total

    def best(self, heard: int, alive: int, left: int) -> list[str]:
        """The best questions; more than one where they tie."""
        worths = {text: self.worth(self.outcomes(heard, alive, text, left), left) for text in ASKED}
        return [text for text, worth in worths.items() if worth > max(worths.values()) - EQUAL]


@cache
def solved(caption: str, kind: str) -> Caption:
    """The search behind a caption; kept."""
    fires(kind, UNCLEAR)  # the kind is known
    return Caption(caption, kind)


@cache
def optimum(kind: str) -> float:
    """The best mean return over the pool."""
    dialogues = [solved(caption, kind) for caption in sorted(set(captions()))]
    total = sum(each.value(each.everyone, each.begins, ROUNDS) for each in dialogues)
    return total / len(undecided_pictures())
