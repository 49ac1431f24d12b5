"""Twenty questions and guess-my-city with an oracle of rules: ask until one knows, then guess.

LMRL-Gym's rewards: -1 for a question and for a wrong guess, 0 for the right guess, which ends the game; after
20 it is over. There a language model answers about 158 objects in 17 categories, or 100 cities; here a table
(`objects.py`) does, a smaller one, so that the best return is known exactly. Things, questions and words are
ours.
"""

from __future__ import annotations

import re
from functools import cache

from envs.toy.objects import CITIES, CITY_QUESTIONS, OBJECT_QUESTIONS, OBJECTS
from envs.toy.process import Belief, Outcome, TextProcess

MOST = 20  # questions and guesses

State = tuple[str, str, int]  # the thing, what was answered last, questions so far


class GuessingGame(TextProcess):
    """A thing is thought of, each as likely as any other. Every reply is one question, one guess or neither:
    it is read by the words that name a question and by the things' names, and one of them must be there."""

    things: dict[str, dict[str, str]] = {}  # name -> question -> answer
    questions: dict[str, str] = {}  # the word that names it -> how a player asks
    opening = ""
    max_turns = MOST
    habits = (0.0, 0.5, 0.9)

    def starts(self) -> list[tuple[float, State]]:
        return [(1 / len(self.things), (thing, self.opening, 0)) for thing in self.things]

    def line(self, state: State) -> str:
        return state[1]

    def moves(self, state: State) -> list[str]:
        return [*self.questions.values(), *(f"Is it {_named(thing)}?" for thing in self.things)]

    def read(self, state: State, reply: str) -> str | None:
        """The word of the question, or the thing that is guessed; None for nothing and for several."""
        said = f" {' '.join(re.findall(r'[a-z]+', reply.lower()))} "
        found = [word for word in (*self.questions, *self.things) if f" {word} " in said]
        return found[0] if len(found) == 1 else None

    def outcomes(self, state: State, move: str) -> list[Outcome]:
        """The same for every way to say a move, which is therefore given as it is read."""
        thing, _, asked = state
        if move == thing:
            return [(1.0, 0.0, None)]
        answer = self.things[thing].get(move, "No.")
        return [(1.0, -1.0, (thing, answer, asked + 1) if asked + 1 < MOST else None)]

    def blunder(self, state: State) -> Outcome:
        thing, _, asked = state
        after = (thing, "I do not understand.", asked + 1)
        return 1.0, -1.0, after if asked + 1 < MOST else None

    @classmethod
    def solution(cls, discount: float = 1.0) -> Questioning:
        """The best questions, by an exact search over what may still be meant."""
        return _solved(cls)


class TwentyQuestions(GuessingGame):
    """Questions are answered by yes or no."""

    things, questions = OBJECTS, OBJECT_QUESTIONS
    opening = "I am thinking of something. Ask me, or guess."


class GuessMyCity(GuessingGame):
    """Questions are open: which continent, which language."""

    things, questions = CITIES, CITY_QUESTIONS
    opening = "I am thinking of a city. Ask me, or guess."


class Questioning:
    """Best play, exactly. Sets of things are bit masks.

    Guesses can wait: let a player guess before it asks what tells other things apart. Asking first costs the
    guessed thing one reply more, and saves one wherever the answer rules the guess out, which is at least one
    thing as likely. So some best player asks first and guesses then, and a set of n things that no further
    question is worth costs (n - 1) / 2 replies.
    """

    def __init__(self, game: type[GuessingGame]) -> None:
        self.names = list(game.things)
        self.asked = game.questions
        self.sides: dict[str, list[int]] = {}  # question -> a set of things for each answer
        for question in game.questions:
            answers: dict[str, int] = {}
            for i, name in enumerate(self.names):
                answer = game.things[name][question]
                answers[answer] = answers.get(answer, 0) | 1 << i
            self.sides[question] = list(answers.values())
        self.known: dict[int, float] = {}

    def value(self, possible: int) -> float:
        """The expected return of the best player who knows that it is one of these."""
        if possible not in self.known:
            worths = (self.worth(possible, question) for question in self.asked)
            self.known[possible] = max([-(possible.bit_count() - 1) / 2, *worths])
        return self.known[possible]

    def worth(self, possible: int, question: str) -> float:
        """The same after asking this question now; minus infinity where the answer is known."""
        parts = [part for side in self.sides[question] if (part := possible & side)]
        if len(parts) < 2:
            return float("-inf")
        return -1 + sum(part.bit_count() * self.value(part) for part in parts) / possible.bit_count()

    def best_return(self) -> float:
        """The expected return of the best player from the start."""
        return self.value((1 << len(self.names)) - 1)

    def best(self, belief: Belief, left: int) -> list[str]:
        """The best questions, or guesses where none is worth it."""
        possible = sum(1 << self.names.index(thing) for (thing, _, _), _ in belief)
        best = self.value(possible)
        ask = [self.asked[name] for name in self.asked if self.worth(possible, name) > best - 1e-9]
        guesses = [f"Is it {_named(thing)}?" for (thing, _, _), _ in belief]
        return ask or guesses


@cache
def _solved(game: type[GuessingGame]) -> Questioning:
    return Questioning(game)


def _named(thing: str) -> str:
    """A thing as it is guessed; cities have no article."""
    if thing in CITIES:
        return thing.title()
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"
