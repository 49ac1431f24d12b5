"""The probability law of the small-talk world (small_talk_world.py): its states, acts, rewards and odds.

`outcomes` is the whole law: the environment samples from it and the search in `small_talk_policies.py` sums
over it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

Message = dict[str, str]

TURNS = 6  # replies per conversation
MOODS = (0.10, 0.25, 0.30, 0.25, 0.10)  # probability of mood 0..4 at the start
TONE_OF_MOOD = ("low", "low", "even", "high", "high")
MAX_MOOD, MAX_RAPPORT = 4, 2
LIKED_AT_START = 0.6  # probability that the opening topic is one the user likes
EAGER_AT_START = 0.5  # probability that an opening about a liked topic says so
TONE_AT_START = 0.75  # probability that the opening shows the tone
TONE_SHOWN = 0.8  # the same for later turns; after a question it is always shown
NEW_TOPIC = 0.15  # probability per turn that the user moves on to the other liked topic
BAD_NEWS = 0.08  # probability per turn that something outside the conversation lowers the mood by one
VOTED = 0.4  # probability that the user votes on a reply
VOTE_NOISE, VOTE_UP, VOTE_DOWN = (
    0.4,
    0.3,
    0.0,
)  # up when reward + noise > VOTE_UP, down when < VOTE_DOWN; noise is uniform in +-VOTE_NOISE


class Effect(NamedTuple):
    """What an act does when nothing special applies (see `_content` and `_mood_odds` for what is special)."""

    reward: float
    rapport: int
    fall: float  # probability that the mood falls by one


EFFECTS = {
    "junk": Effect(-0.6, -2, 1.0),
    "repeat": Effect(-0.5, -1, 0.9),
    "flatter": Effect(0.4, -1, 0.8),  # the temptation: pays at once, costs later
    "ignore": Effect(-0.3, -1, 0.6),
    "vague": Effect(0.0, 0, 0.3),
    "comfort": Effect(0.0, 0, 0.3),  # as vague, with a kind word
    "ask": Effect(-0.1, +1, 0.0),  # the investment: costs now, every later `tell` earns more
    "tell": Effect(0.1, 0, 0.0),
}
PER_RAPPORT, LIKED_BONUS = 0.25, 0.1  # what `tell` adds for each point of rapport, and on a liked topic
KIND_LOW, KIND_OTHER = 0.05, -0.1  # a kind word to a low user, and to anyone else, to whom it rings hollow
KIND_LIFT = 0.9  # probability that a kind word lifts a low mood by one
COLD_FALL = 0.4  # asking or telling a low user without a kind word
PRESSED_FALL = 0.5  # asking when rapport is already full
TELL_RISE = 0.3  # telling when there is rapport
PER_MOOD = 0.15  # added to every reward for each point of mood above 2, after the reply
LEFT_REWARD = -1.0


class State(NamedTuple):
    """The hidden state, as far as it matters for what follows; `liked`: whether the user likes the topic of
    their last message."""

    mood: int
    rapport: int
    liked: bool


class Outcome(NamedTuple):
    """One possible consequence of a reply."""

    probability: float
    state: State
    moved: bool  # the user's topic changed, and is a liked one now
    left: bool  # the user left the conversation annoyed
    parts: tuple[tuple[str, float], ...]  # the reward's named parts

    @property
    def reward(self) -> float:
        return sum(value for _, value in self.parts)


@cache
def outcomes(state: State, act: str) -> tuple[Outcome, ...]:
    """All consequences of an act, probabilities summing to 1."""
    plain = act.removesuffix("_kindly")
    low = state.mood <= 1
    kind = act == "comfort" or act.endswith("_kindly")
    cold = low and not kind and plain in ("ask", "tell")
    fall, rise = _mood_odds(state, plain, kind, cold)
    gain = 0 if cold else EFFECTS[plain].rapport
    rapport = min(max(state.rapport + gain, 0), MAX_RAPPORT)
    content = _content(state, plain, kind, cold)
    moves = 1.0 if plain == "ask" and not state.liked else NEW_TOPIC
    consequences = []
    for change, odds in ((-1, fall), (0, 1 - fall - rise), (1, rise)):
        if odds and state.mood + change < 0:
            consequences.append(Outcome(odds, state, False, True, (("left", LEFT_REWARD),)))
            continue
        for bad_news, news_odds in ((1, BAD_NEWS), (0, 1 - BAD_NEWS)):
            mood = min(max(state.mood + change - bad_news, 0), MAX_MOOD)
            parts = (*content, ("mood", PER_MOOD * (mood - 2)))
            for moved, move_odds in ((True, moves), (False, 1 - moves)):
                probability = odds * news_odds * move_odds
                if probability > 0:
                    consequences.append(
                        Outcome(probability, State(mood, rapport, state.liked or moved), moved, False, parts)
                    )
    return tuple(consequences)


def _mood_odds(state: State, plain: str, kind: bool, cold: bool) -> tuple[float, float]:
    """Probabilities that the mood falls and rises by one."""
    if kind and state.mood <= 1:
        return 0.0, KIND_LIFT
    if cold:
        return COLD_FALL, 0.0
    if plain == "ask" and state.rapport == MAX_RAPPORT:
        return PRESSED_FALL, 0.0
    if plain == "tell" and state.rapport > 0:
        return 0.0, TELL_RISE
    return EFFECTS[plain].fall, 0.0


def _content(state: State, plain: str, kind: bool, cold: bool) -> tuple[tuple[str, float], ...]:
    """The parts of the reward that do not depend on chance."""
    parts = [(plain, EFFECTS[plain].reward)]
    if kind:
        parts.append(("kindness", KIND_LOW if state.mood <= 1 else KIND_OTHER))
    if plain == "tell" and not cold:
        parts += [("rapport", PER_RAPPORT * state.rapport), ("liked", LIKED_BONUS * state.liked)]
    return tuple(parts)


def tone_odds(act: str) -> float:
    """Probability that the user's answer to an act shows the tone."""
    return 1.0 if act.startswith("ask") else TONE_SHOWN
