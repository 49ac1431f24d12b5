"""The game as a state machine.

Nothing is hidden but chance: at every guess a target is drawn anew from the words that agree with all colours
so far, so that the state is the words that are left and the number of tries. That is the game with one hidden
word, drawn in the beginning, seen through what the player can know.

Any five letters are a guess, a word or not. A malformed guess costs a try and is not coloured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envs.wordle.colours import LENGTH, WON, colour
from envs.wordle.words import Words, well_formed
from rl_dialog.errors import UserError

Message = dict[str, Any]

TRIES = 6
OPENING = "wordle"  # what the world says first
MALFORMED = "?"  # what it says to a guess that is none


@dataclass(frozen=True)
class State:
    """What is known after some guesses."""

    left: int  # the words that may be the target, as a set of `Words`
    guesses: tuple[str, ...] = ()  # as they were said
    colours: tuple[str, ...] = ()  # of each; MALFORMED for those that were not coloured

    @property
    def won(self) -> bool:
        """The last guess was the only word left."""
        return self.colours[-1:] == (WON,)

    @property
    def over(self) -> bool:
        return self.won or len(self.guesses) >= TRIES

    @property
    def total(self) -> int:
        """The return so far: -1 for each guess but the one that wins."""
        return self.won - len(self.guesses)


def read_guess(reply: str) -> str:
    """The guess in a reply: without spaces around it and in lower case."""
    return reply.strip().lower()


def after(words: Words, state: State, reply: str, target: str) -> State:
    """The state once a reply was coloured against a target."""
    guess = read_guess(reply)
    if not well_formed(guess):
        return State(state.left, (*state.guesses, reply), (*state.colours, MALFORMED))
    colours = colour(guess, target, words.colouring)
    left = state.left & words.allowed(guess, colours)
    return State(left, (*state.guesses, reply), (*state.colours, colours))


def first_guesses(words: Words, state: State, count: int) -> State:
    """The state after the first guesses of a game."""
    left = words.every
    for guess, colours in zip(state.guesses[:count], state.colours[:count], strict=True):
        left &= words.every if colours == MALFORMED else words.allowed(read_guess(guess), colours)
    return State(left, state.guesses[:count], state.colours[:count])


def draw_target(words: Words, state: State, number: float) -> str:
    """One of the words that are left, by a uniform number in [0, 1)."""
    left = words.members(state.left)
    return left[int(number * len(left))]


def messages_of(state: State, *, rewards: bool = False) -> list[Message]:
    """The conversation that leads to a state; with `rewards`, what each guess earned."""
    messages: list[Message] = [{"role": "user", "content": OPENING}]
    for number, (guess, colours) in enumerate(zip(state.guesses, state.colours, strict=True), 1):
        earned = {"reward": float(state.won and number == len(state.guesses)) - 1} if rewards else {}
        messages.append({"role": "assistant", "content": guess} | earned)
        messages.append({"role": "user", "content": colours})
    return messages


def read_state(words: Words, messages: list[Message]) -> State:
    """The inverse of `messages_of`. Raises UserError for colours that no word of the vocabulary agrees
    with, and for what is no conversation of this world."""
    guesses = tuple(message["content"] for message in messages[1::2])
    colours = tuple(message["content"] for message in messages[2::2])
    for guess, shown in zip(map(read_guess, guesses), colours, strict=True):
        coloured = well_formed(guess) and len(shown) == LENGTH and set(shown) <= set("gyb")
        if not coloured and shown != MALFORMED:
            raise UserError(f"expected five letters and {LENGTH} of g, y and b, got {guess!r} and {shown!r}")
    state = first_guesses(words, State(words.every, guesses, colours), len(guesses))
    if not state.left:
        shown = ", ".join(map(" ".join, zip(guesses, colours, strict=True)))
        rule = f"colours by the {words.colouring} rule against one of {len(words)} words"
        raise UserError(f"no word agrees with {shown}: expected {rule}")
    return state
