"""Small talk: a simulated user with a mood, who likes some topics and rewards whoever asks, listens and is kind.

The world is small enough to be solved exactly and is spoken in text only:

    hidden state   mood 0..4, rapport 0..2, the two topics the user likes
    observation    the message list; the last message is the user's and always names the user's topic
    action         any string; `read_reply` maps it to one of ten acts, and the act alone decides what happens next
    reward         a number in [-1, 1] per reply
    end            after `TURNS` replies the user says goodbye, or earlier when an unhappy user is annoyed once more

`outcomes` is the whole probability law: the environment samples from it and the search in `small_talk.py` sums over it.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from envs.small_talk_texts import (
    EAGER_TOPIC,
    GOODBYES,
    GREETINGS,
    MAX_CHARACTERS,
    PLAIN_TOPIC,
    REACTIONS,
    TONES,
    TOPICS,
    WARMTH,
    read_reply,
)
from rl_dialog.errors import UserError

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
VOTE_NOISE, VOTE_UP, VOTE_DOWN = 0.4, 0.3, 0.0  # up when reward + noise > VOTE_UP, down when < VOTE_DOWN; noise is uniform in +-VOTE_NOISE


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
    """The hidden state, as far as it matters for what follows; `liked`: whether the user likes the topic of their last message."""

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
    found = []
    for change, odds in ((-1, fall), (0, 1 - fall - rise), (1, rise)):
        if odds and state.mood + change < 0:
            found.append(Outcome(odds, state, False, True, (("left", LEFT_REWARD),)))
            continue
        for bad_news, news_odds in ((1, BAD_NEWS), (0, 1 - BAD_NEWS)):
            mood = min(max(state.mood + change - bad_news, 0), MAX_MOOD)
            parts = (*content, ("mood", PER_MOOD * (mood - 2)))
            for moved, move_odds in ((True, moves), (False, 1 - moves)):
                probability = odds * news_odds * move_odds
                if probability > 0:
                    found.append(Outcome(probability, State(mood, rapport, state.liked or moved), moved, False, parts))
    return tuple(found)


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


class Messages(gymnasium.spaces.Space[list[Message]]):
    """The observations: non-empty message lists in OpenAI's form (gymnasium's own `Sequence` holds tuples, not lists)."""

    def contains(self, x: Any) -> bool:
        if not isinstance(x, list) or not x:
            return False
        return all(isinstance(m, dict) and m.get("role") in ("user", "assistant") and isinstance(m.get("content"), str) for m in x)

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        topic = list(TOPICS)[self.np_random.integers(len(TOPICS))]
        return [{"role": "user", "content": PLAIN_TOPIC[0].format(a=TOPICS[topic][0])}]

    @property
    def is_np_flattenable(self) -> bool:
        return False


class SmallTalk(gymnasium.Env[list[Message], str]):
    """One conversation. `step` takes any string; `action_space` is narrower because gymnasium's `Text` needs an alphabet to sample from.

    Every step draws the same number of uniform numbers, so two policies that get the same seed meet the same luck. `info` of a step holds

        act     how the reply was read, one of `ACTS`
        parts   {name: value} that sum to the reward
        vote    -1, 0 or 1, only when the user voted on this reply
        left    whether the user left annoyed
        hidden  mood, rapport, topic and likes after the reply: for analysis, not for policies
    """

    metadata = {"render_modes": ["ansi"]}
    state: State
    topic: str  # of the user's last message
    likes: tuple[str, str]

    def __init__(self, render_mode: str | None = None) -> None:
        if render_mode not in (None, "ansi"):
            raise UserError(f"expected render_mode None or 'ansi', got {render_mode!r}")
        self.render_mode = render_mode
        self.observation_space = Messages()
        self.action_space = gymnasium.spaces.Text(min_length=0, max_length=MAX_CHARACTERS, charset=string.printable)
        self.messages: list[Message] = []
        self.finished = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Starts a conversation, which depends on `seed` and the replies only. There are no options."""
        super().reset(seed=seed)
        if options:
            raise UserError(f"expected no options (this world has none), got {options!r}")
        mood, liked, eager, greets, shown, *draws = self.np_random.random(9).tolist()
        self.topic, other, third, *_ = (list(TOPICS)[i] for i in self.np_random.permutation(len(TOPICS)))
        self.state = State(mood=int(np.searchsorted(np.cumsum(MOODS[:-1]), mood, side="right")), rapport=0, liked=liked < LIKED_AT_START)
        self.likes = (self.topic, other) if self.state.liked else (other, third)
        words = [_pick(GREETINGS, draws[0])] if greets < 0.5 else []
        words += self._tone_and_topic(shown < TONE_AT_START, self.state.liked and eager < EAGER_AT_START, draws[1:])
        self.messages = [{"role": "user", "content": " ".join(words)}]
        self.finished = False
        return self._observation(), {"hidden": self._hidden()}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """The user answers. The horizon is a real end, so it is `terminated`; `truncated` is always false."""
        if self.finished:
            raise gymnasium.error.ResetNeeded("expected a running conversation, got a reply after its end; call reset first")
        if not isinstance(reply, str):
            raise TypeError(f"expected the reply as a string, got {type(reply).__name__}")
        chance, topic, shown, votes, noise, *draws = self.np_random.random(9).tolist()
        earlier = [m["content"] for m in self.messages if m["role"] == "assistant"]
        act = read_reply(reply, self.topic, earlier)
        outcome = _draw(outcomes(self.state, act), chance)
        self.state = outcome.state
        if outcome.moved:
            self.topic = _pick([liked for liked in self.likes if liked != self.topic], topic)
        self.finished = outcome.left or len(earlier) + 1 == TURNS
        self.messages.append({"role": "assistant", "content": reply})
        self.messages.append({"role": "user", "content": self._answer(act, outcome, shown, draws)})
        info = {"act": act, "parts": dict(outcome.parts), "left": outcome.left, "hidden": self._hidden()}
        if votes < VOTED:
            felt = outcome.reward + VOTE_NOISE * (2 * noise - 1)
            info["vote"] = 1 if felt > VOTE_UP else -1 if felt < VOTE_DOWN else 0
        return self._observation(), outcome.reward, self.finished, False, info

    def render(self) -> str | None:
        """The conversation so far, one line per message."""
        return "\n".join(f"{m['role']:>9}: {m['content']}" for m in self.messages) if self.render_mode == "ansi" else None

    def _observation(self) -> list[Message]:
        return [dict(message) for message in self.messages]

    def _hidden(self) -> dict[str, Any]:
        return {"mood": self.state.mood, "rapport": self.state.rapport, "topic": self.topic, "likes": list(self.likes)}

    def _answer(self, act: str, outcome: Outcome, shown: float, draws: list[float]) -> str:
        if self.finished:
            return _pick(GOODBYES["left" if outcome.left else TONE_OF_MOOD[self.state.mood]], draws[0])
        first = REACTIONS.get(act) or WARMTH.get(self.state.rapport)
        words = [_pick(first, draws[0])] if first else []
        eager = act.startswith("ask") or outcome.moved
        return " ".join(words + self._tone_and_topic(shown < tone_odds(act), eager, draws[1:]))

    def _tone_and_topic(self, shown: bool, eager: bool, draws: list[float]) -> list[str]:
        tone = [_pick(TONES[TONE_OF_MOOD[self.state.mood]], draws[0])] if shown else []
        return [*tone, _pick(EAGER_TOPIC if eager else PLAIN_TOPIC, draws[1]).format(a=_pick(TOPICS[self.topic], draws[2]))]


class SmallTalkVector:
    """`count` conversations stepped together by lists; conversation i of a seed is the same however many are stepped together.

    A finished conversation stays in the lists until the next reset: its reply is ignored, its reward is 0 and its info empty.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UserError(f"expected at least one conversation, got {count}")
        self.worlds = [SmallTalk() for _ in range(count)]

    def reset(self, seed: int, *, first: int = 0) -> list[list[Message]]:
        """Starts conversations `first`, `first + 1`, ... of a seed."""
        return [world.reset(seed=conversation_seed(seed, first + i))[0] for i, world in enumerate(self.worlds)]

    def step(self, replies: Sequence[str | None]) -> tuple[list[list[Message]], list[float], list[bool], list[bool], list[dict[str, Any]]]:
        """One reply per conversation -> observations, rewards, terminated, truncated, infos."""
        if isinstance(replies, str) or len(replies) != len(self.worlds):
            raise UserError(f"expected a list of {len(self.worlds)} replies, one per conversation, got {replies!r:.200}")
        steps = [
            (world._observation(), 0.0, True, False, {}) if world.finished else world.step(reply)
            for world, reply in zip(self.worlds, replies, strict=True)
        ]
        return tuple(list(column) for column in zip(*steps, strict=True))


def conversation_seed(seed: int, index: int) -> int:
    """The seed of conversation `index` among those of `seed`: a hash, so that neighbouring seeds share no conversations."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)


def _pick(choices: Sequence[str], draw: float) -> str:
    return choices[int(draw * len(choices))]


def _draw(choices: Sequence[Outcome], draw: float) -> Outcome:
    for outcome in choices:
        draw -= outcome.probability
        if draw < 0:
            return outcome
    return choices[-1]  # the probabilities sum to 1 up to rounding
