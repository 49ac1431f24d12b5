"""Small talk: a simulated user with a mood, who likes some topics and rewards whoever asks, listens and is
kind.

The world is small enough to be solved exactly and is spoken in text only:

    hidden state   mood 0..4, rapport 0..2, the two topics the user likes
    observation    the message list; the last message is the user's and always names the user's topic
    action         any string; `read_reply` maps it to one of ten acts, and the act alone decides what happens
                   next
    reward         a number in [-1, 1] per reply
    end            after `TURNS` replies the user says goodbye, or earlier when an unhappy user is annoyed
                   once more

The probability law is in `small_talk_rules.py`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from envs.small_talk_policies import POLICIES, Policy, optimal_return
from envs.small_talk_rules import (
    EAGER_AT_START,
    LIKED_AT_START,
    MOODS,
    TONE_AT_START,
    TONE_OF_MOOD,
    TURNS,
    VOTE_DOWN,
    VOTE_NOISE,
    VOTE_UP,
    VOTED,
    Message,
    Outcome,
    State,
    outcomes,
    tone_odds,
)
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


class Messages(gymnasium.spaces.Space[list[Message]]):
    """The observations: non-empty message lists in OpenAI's form (gymnasium's own `Sequence` holds tuples,
    not lists)."""

    def contains(self, x: Any) -> bool:
        if not isinstance(x, list) or not x:
            return False
        return all(
            isinstance(m, dict)
            and m.get("role") in ("user", "assistant")
            and isinstance(m.get("content"), str)
            for m in x
        )

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        topic = list(TOPICS)[self.np_random.integers(len(TOPICS))]
        return [{"role": "user", "content": PLAIN_TOPIC[0].format(a=TOPICS[topic][0])}]

    @property
    def is_np_flattenable(self) -> bool:
        return False


class SmallTalk(gymnasium.Env[list[Message], str]):
    """One conversation. `step` takes any string; `action_space` is narrower because gymnasium's `Text` needs
    an alphabet to sample from.

    Every step draws the same number of uniform numbers, so two policies that get the same seed meet the same
    luck. `info` of a step holds

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
        self.action_space = gymnasium.spaces.Text(
            min_length=0, max_length=MAX_CHARACTERS, charset=string.printable
        )
        self.messages: list[Message] = []
        self.finished = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Starts a conversation, which depends on `seed` and the replies only. There are no options."""
        super().reset(seed=seed)
        if options:
            raise UserError(f"expected no options (this world has none), got {options!r}")
        mood, liked, eager, greets, tone_draw, *draws = self.np_random.random(9).tolist()
        self.topic, second_topic, third_topic, *_ = (
            list(TOPICS)[i] for i in self.np_random.permutation(len(TOPICS))
        )
        self.state = State(
            mood=int(np.searchsorted(np.cumsum(MOODS[:-1]), mood, side="right")),
            rapport=0,
            liked=liked < LIKED_AT_START,
        )
        self.likes = (self.topic, second_topic) if self.state.liked else (second_topic, third_topic)
        words = [_pick(GREETINGS, draws[0])] if greets < 0.5 else []
        words += self._tone_and_topic(
            tone_draw < TONE_AT_START, self.state.liked and eager < EAGER_AT_START, draws[1:]
        )
        self.messages = [{"role": "user", "content": " ".join(words)}]
        self.finished = False
        return self._observation(), {"hidden": self._hidden()}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """The user answers. The horizon is a real end, so it is `terminated`; `truncated` is always false."""
        if self.finished:
            raise gymnasium.error.ResetNeeded(
                "expected a running conversation, got a reply after its end; call reset first"
            )
        if not isinstance(reply, str):
            raise TypeError(f"expected the reply as a string, got {type(reply).__name__}")
        chance, topic, tone_draw, votes, noise, *draws = self.np_random.random(9).tolist()
        earlier = [m["content"] for m in self.messages if m["role"] == "assistant"]
        act = read_reply(reply, self.topic, earlier)
        outcome = _draw(outcomes(self.state, act), chance)
        self.state = outcome.state
        if outcome.moved:
            self.topic = _pick([liked for liked in self.likes if liked != self.topic], topic)
        self.finished = outcome.left or len(earlier) + 1 == TURNS
        self.messages.append({"role": "assistant", "content": reply})
        self.messages.append({"role": "user", "content": self._answer(act, outcome, tone_draw, draws)})
        info = {"act": act, "parts": dict(outcome.parts), "left": outcome.left, "hidden": self._hidden()}
        if votes < VOTED:
            felt = outcome.reward + VOTE_NOISE * (2 * noise - 1)
            info["vote"] = 1 if felt > VOTE_UP else -1 if felt < VOTE_DOWN else 0
        return self._observation(), outcome.reward, self.finished, False, info

    def render(self) -> str | None:
        """The conversation so far, one line per message."""
        return (
            "\n".join(f"{m['role']:>9}: {m['content']}" for m in self.messages)
            if self.render_mode == "ansi"
            else None
        )

    @staticmethod
    def reference_returns(episodes: int, seed: int) -> dict[str, list[float]]:
        """Of the policy behind the logs and the best of those that it is a mixture of, with the same
        conversation partners, and the optimum by search."""
        mixed, friend = (
            returns(POLICIES[name], conversations=episodes, seed=seed).tolist()
            for name in ("mixed", "friend")
        )
        return {"behaviour policy": mixed, "best inside the logs": friend, "optimum": [optimal_return()]}

    @staticmethod
    def scripted_players() -> dict[str, Callable[[int], Policy]]:
        """The scripted policies, from good to silly."""
        return POLICIES

    @staticmethod
    def optimum() -> float:
        """The best mean return of a policy that sees the text."""
        return optimal_return()

    def _observation(self) -> list[Message]:
        return [dict(message) for message in self.messages]

    def _hidden(self) -> dict[str, Any]:
        return {
            "mood": self.state.mood,
            "rapport": self.state.rapport,
            "topic": self.topic,
            "likes": list(self.likes),
        }

    def _answer(self, act: str, outcome: Outcome, tone_draw: float, draws: list[float]) -> str:
        if self.finished:
            return _pick(GOODBYES["left" if outcome.left else TONE_OF_MOOD[self.state.mood]], draws[0])
        phrases = REACTIONS.get(act) or WARMTH.get(self.state.rapport)
        words = [_pick(phrases, draws[0])] if phrases else []
        eager = act.startswith("ask") or outcome.moved
        return " ".join(words + self._tone_and_topic(tone_draw < tone_odds(act), eager, draws[1:]))

    def _tone_and_topic(self, shows_tone: bool, eager: bool, draws: list[float]) -> list[str]:
        tone = [_pick(TONES[TONE_OF_MOOD[self.state.mood]], draws[0])] if shows_tone else []
        return [
            *tone,
            _pick(EAGER_TOPIC if eager else PLAIN_TOPIC, draws[1]).format(
                a=_pick(TOPICS[self.topic], draws[2])
            ),
        ]


class SmallTalkVector:
    """`count` conversations stepped together by lists; conversation i of a seed is the same however many are
    stepped together.

    A finished conversation stays in the lists until the next reset: its reply is ignored, its reward is 0 and
    its info empty.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UserError(f"expected at least one conversation, got {count}")
        self.worlds = [SmallTalk() for _ in range(count)]

    def reset(self, seed: int, *, first: int = 0) -> list[list[Message]]:
        """Starts conversations `first`, `first + 1`, ... of a seed."""
        return [
            world.reset(seed=conversation_seed(seed, first + i))[0] for i, world in enumerate(self.worlds)
        ]

    def step(
        self, replies: Sequence[str | None]
    ) -> tuple[list[list[Message]], list[float], list[bool], list[bool], list[dict[str, Any]]]:
        """One reply per conversation -> observations, rewards, terminated, truncated, infos."""
        if isinstance(replies, str) or len(replies) != len(self.worlds):
            raise UserError(
                f"expected a list of {len(self.worlds)} replies, one per conversation, got {replies!r:.200}"
            )
        steps = [
            (world._observation(), 0.0, True, False, {}) if world.finished else world.step(reply)
            for world, reply in zip(self.worlds, replies, strict=True)
        ]
        return tuple(list(column) for column in zip(*steps, strict=True))


def conversation_seed(seed: int, index: int) -> int:
    """The seed of conversation `index` among those of `seed`: a hash, so that neighbouring seeds share no
    conversations."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)


def play(
    make_policy: Callable[[int], Policy], *, seed: int, index: int
) -> tuple[SmallTalk, list[float], list[dict[str, Any]]]:
    """Conversation `index` of a seed -> the finished world, the rewards and the infos of its replies."""
    world, number = SmallTalk(), conversation_seed(seed, index)
    policy = make_policy(number)
    messages, _ = world.reset(seed=number)
    rewards, infos = [], []
    while not world.finished:
        messages, reward, _, _, info = world.step(policy(messages))
        rewards.append(reward)
        infos.append(info)
    return world, rewards, infos


def returns(make_policy: Callable[[int], Policy], *, conversations: int, seed: int) -> np.ndarray:
    """The undiscounted return of each conversation."""
    return np.array([sum(play(make_policy, seed=seed, index=i)[1]) for i in range(conversations)])


def _pick(choices: Sequence[str], draw: float) -> str:
    return choices[int(draw * len(choices))]


def _draw(choices: Sequence[Outcome], draw: float) -> Outcome:
    for outcome in choices:
        draw -= outcome.probability
        if draw < 0:
            return outcome
    return choices[-1]  # the probabilities sum to 1 up to rounding
