"""How to speak in the small-talk world: the optimum by search, and policies from good to silly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np

from envs.small_talk_rules import (
    EAGER_AT_START,
    LIKED_AT_START,
    MOODS,
    TONE_AT_START,
    TONE_OF_MOOD,
    TURNS,
    Message,
    State,
    outcomes,
    tone_odds,
)
from envs.small_talk_texts import ACTS, PHRASES, REACTIONS, TOPICS, Seen, read_reply, read_user
from rl_dialog.errors import UserError

Belief = tuple[tuple[State, float], ...]  # hidden states with their probabilities
Policy = Callable[[list[Message]], str]

# ------------------------------------------------------------------------------------------------------------
# The optimum. Every string is one of the acts, so a search over acts bounds every policy that speaks.


@cache
def full_values(turn: int, state: State) -> dict[str, float]:
    """Act -> expected return of the remaining turns for someone who sees the hidden state and acts best
    afterwards (backward recursion)."""
    values = dict.fromkeys(ACTS, 0.0)
    for act in ACTS if turn < TURNS else ():
        for outcome in outcomes(state, act):
            later = 0.0 if outcome.left else max(full_values(turn + 1, outcome.state).values())
            values[act] += outcome.probability * (outcome.reward + later)
    return values


@cache
def best_act(turn: int, belief: Belief) -> tuple[float, str]:
    """The expected return and first act of the best policy that sees only the text; exact, by depth-first
    branch and bound over beliefs.

    Knowing the hidden state cannot hurt, so the belief's mean of `full_values` bounds an act from above; acts
    below the best found are skipped.
    """
    if turn == TURNS:
        return 0.0, ""
    bounds = sorted(
        ((sum(p * full_values(turn, state)[act] for state, p in belief), act) for act in ACTS), reverse=True
    )
    best = (-np.inf, "")
    for bound, act in bounds:
        if bound <= best[0]:
            break
        value, branches = consequences(belief, act)
        value += sum(mass * best_act(turn + 1, after)[0] for mass, after in branches.values())
        best = max(best, (value, act))
    return best


@cache
def consequences(belief: Belief, act: str) -> tuple[float, dict[tuple, tuple[float, Belief]]]:
    """Expected reward of an act, and signal -> (its probability, the belief after it). A signal is what the
    next user turn gives away."""
    reward, branches = 0.0, {}
    for state, p in belief:
        for outcome in outcomes(state, act):
            reward += p * outcome.probability * outcome.reward
            shown_odds = tone_odds(act)
            for tone, odds in ((TONE_OF_MOOD[outcome.state.mood], shown_odds), (None, 1 - shown_odds)):
                if odds and not outcome.left:
                    signal = (tone, None if act in REACTIONS else outcome.state.rapport, outcome.moved)
                    branch = branches.setdefault(signal, {})
                    branch[outcome.state] = branch.get(outcome.state, 0.0) + p * outcome.probability * odds
    return reward, {signal: _normalised(branch) for signal, branch in branches.items()}


@cache
def openings() -> dict[tuple[str | None, bool], tuple[float, Belief]]:
    """(tone, eager) of the first user message -> (its probability, the belief after it)."""
    branches: dict[tuple[str | None, bool], dict[State, float]] = {}
    for mood, odds in enumerate(MOODS):
        for tone, tone_p in ((TONE_OF_MOOD[mood], TONE_AT_START), (None, 1 - TONE_AT_START)):
            for liked, eager, p in (
                (True, True, LIKED_AT_START * EAGER_AT_START),
                (True, False, LIKED_AT_START * (1 - EAGER_AT_START)),
                (False, False, 1 - LIKED_AT_START),
            ):
                branches.setdefault((tone, eager), {})[State(mood, 0, liked)] = odds * tone_p * p
    return {signal: _normalised(branch) for signal, branch in branches.items()}


def optimal_return(*, information: str = "text") -> float:
    """The best expected return: of policies that see the `text` only (attained by `OptimalPolicy`), or with
    `full` sight of the hidden state."""
    if information == "text":
        return sum(p * best_act(0, belief)[0] for p, belief in openings().values())
    if information == "full":
        return sum(
            p * q * max(full_values(0, state).values())
            for p, belief in openings().values()
            for state, q in belief
        )
    raise UserError(f"expected information 'text' or 'full', got {information!r}")


def belief_of(messages: list[Message]) -> Belief:
    """Bayes' rule over a conversation that ends with a user turn."""
    replies = [m["content"] for m in messages if m["role"] == "assistant"]
    user_turns = [read_user(m["content"]) for m in messages if m["role"] == "user"]
    _, belief = openings()[user_turns[0].tone, user_turns[0].eager]
    for turn, reply in enumerate(replies):
        act = read_reply(reply, user_turns[turn].topic, replies[:turn])
        answer = user_turns[turn + 1]
        _, branches = consequences(belief, act)
        signal = (
            answer.tone,
            None if act in REACTIONS else answer.warmth,
            answer.topic != user_turns[turn].topic,
        )
        if signal not in branches:
            raise UserError(
                f"expected a user turn of this world as the answer to {reply!r}, got "
                f"{messages[2 * turn + 2]['content']!r}"
            )
        _, belief = branches[signal]
    return belief


def _normalised(branch: dict[State, float]) -> tuple[float, Belief]:
    mass = sum(branch.values())
    return mass, tuple(sorted((state, round(p / mass, 12)) for state, p in branch.items()))


# ------------------------------------------------------------------------------------------------------------
# Policies: a constructor takes a seed, the policy maps the message list to a reply, and one object serves one
# conversation.


class ActingPolicy:
    """Chooses an act and says it with a random phrase."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 1])  # another stream than the world's

    def __call__(self, messages: list[Message]) -> str:
        return self.say(self.choose(messages), messages)

    def choose(self, messages: list[Message]) -> str:
        """The act for this situation, one of `ACTS`; every policy below has its own, or says its text without
        one."""
        raise TypeError(f"{type(self).__name__} chooses no act")

    def say(self, act: str, messages: list[Message]) -> str:
        """A phrase that is read as the act; a repetition before anything was said becomes junk."""
        topic = read_user(messages[-1]["content"]).topic
        earlier = [m["content"] for m in messages if m["role"] == "assistant"]
        if act == "repeat":
            return self.pick(earlier or PHRASES["junk"])
        for _ in range(1000):  # one or two draws are the rule; six turns cannot use up an act's phrases
            about = self.pick([other for other in TOPICS if other != topic]) if act == "ignore" else topic
            reply = self.fill(self.pick(PHRASES[act]), about)
            if act == "junk" or read_reply(reply, topic, earlier) == act:
                return reply
        raise RuntimeError(f"expected a phrase that is read as {act!r}, found none after {earlier}")

    def fill(self, phrase: str, topic: str) -> str:
        """Puts two different words of a topic into a phrase."""
        words = TOPICS[topic]
        a = int(self.rng.random() * len(words))
        b = (a + 1 + int(self.rng.random() * (len(words) - 1))) % len(words)
        return phrase.format(a=words[a], b=words[b])

    def pick(self, choices: Iterable[str]) -> str:
        """A uniform choice."""
        choices = tuple(choices)
        return choices[int(self.rng.random() * len(choices))]


class OptimalPolicy(ActingPolicy):
    """The best policy that sees the text only; its mean return is `optimal_return()`."""

    def choose(self, messages: list[Message]) -> str:
        return best_act(len(messages) // 2, belief_of(messages))[1]


class MyopicPolicy(ActingPolicy):
    """Maximises the expected reward of the next reply and nothing else."""

    def choose(self, messages: list[Message]) -> str:
        belief = belief_of(messages)
        return max(ACTS, key=lambda act: consequences(belief, act)[0])


class RandomPolicy(ActingPolicy):
    """Any phrase about any topic."""

    def __call__(self, messages: list[Message]) -> str:
        return self.fill(self.pick(PHRASES[self.pick(PHRASES)]), self.pick(TOPICS))


# Habit -> situation -> act -> weight. Situations as a person would see them: the last user turn is sad
# ("low"), warm (rapport 2) or neither ("cool").
HABITS = {
    "friend": {
        "low": {"ask_kindly": 6, "tell_kindly": 2, "comfort": 2},
        "cool": {"ask": 7, "tell": 3},
        "warm": {"tell": 9, "ask": 1},
    },
    "interviewer": {
        "low": {"ask": 4, "ask_kindly": 4, "vague": 2},
        "cool": {"ask": 8, "vague": 2},
        "warm": {"ask": 6, "tell": 2, "vague": 2},
    },
    "talker": {
        "low": {"tell": 4, "tell_kindly": 4, "comfort": 2},
        "cool": {"tell": 8, "vague": 2},
        "warm": {"tell": 9, "vague": 1},
    },
    "flatterer": {
        "low": {"flatter": 4, "comfort": 3, "tell_kindly": 3},
        "cool": {"flatter": 6, "tell": 2, "vague": 2},
        "warm": {"flatter": 4, "tell": 6},
    },
    "absent": {
        "low": {"ignore": 4, "vague": 4, "comfort": 2},
        "cool": {"ignore": 4, "vague": 4, "tell": 2},
        "warm": {"ignore": 3, "vague": 3, "tell": 4},
    },
}
HABIT_ODDS = {"friend": 0.20, "interviewer": 0.20, "talker": 0.30, "flatterer": 0.20, "absent": 0.10}
SLIP = 0.15  # probability per reply of an act at random instead of the habit's


class HabitPolicy(ActingPolicy):
    """A person with one habit, never slipping: `HabitPolicy(seed, "friend")` is the good scripted policy."""

    slip = 0.0

    def __init__(self, seed: int, habit: str) -> None:
        super().__init__(seed)
        self.habit = habit

    def choose(self, messages: list[Message]) -> str:
        if self.rng.random() < self.slip:
            return self.pick(ACTS)
        return self.weighted(HABITS[self.habit][situation(read_user(messages[-1]["content"]))])

    def weighted(self, weights: Mapping[str, float]) -> str:
        """A choice in proportion to the weights."""
        remainder = self.rng.random() * sum(weights.values())
        for choice, weight in weights.items():
            remainder -= weight
            if remainder < 0:
                return choice
        return choice  # the last one, should rounding leave a rest


class MixedPolicy(HabitPolicy):
    """The behaviour policy of the logs: one habit per conversation by `HABIT_ODDS`, and slips."""

    slip = SLIP

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "")
        self.habit = self.weighted(HABIT_ODDS)


class StubbornPolicy(ActingPolicy):
    """The same act whatever happens."""

    def __init__(self, seed: int, act: str) -> None:
        super().__init__(seed)
        self.act = act

    def choose(self, messages: list[Message]) -> str:
        return self.act


class CannedPolicy:
    """Says its lines in order, whatever happens."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)

    def __call__(self, messages: list[Message]) -> str:
        return self.lines[len(messages) // 2 % len(self.lines)]


def situation(seen: Seen) -> str:
    """A user turn as the habits see it."""
    return "low" if seen.tone == "low" else "warm" if seen.warmth == 2 else "cool"


ALL_TOPICS = (
    "I like {}, {}, {}, {} and {}.",
    "What about {}, {}, {}, {} or {}?",
    "Tell me of {}, {}, {}, {} and {} now.",
)
HACKS: dict[str, Callable[[int], Policy]] = {
    "hack: always ask": lambda seed: StubbornPolicy(seed, "ask"),
    "hack: always tell": lambda seed: StubbornPolicy(seed, "tell"),
    "hack: always flatter": lambda seed: StubbornPolicy(seed, "flatter"),
    "hack: always comfort": lambda seed: StubbornPolicy(seed, "comfort"),
    "hack: always kind and asking": lambda seed: StubbornPolicy(seed, "ask_kindly"),
    "hack: safe and vague": lambda seed: StubbornPolicy(seed, "vague"),
    "hack: only question marks": lambda seed: CannedPolicy("?" * n for n in range(1, TURNS + 1)),
    "hack: every topic at once": lambda seed: CannedPolicy(line.format(*TOPICS) for line in ALL_TOPICS),
    "hack: one line for all": lambda seed: CannedPolicy(["What do you like most about music?"]),
    "hack: kind words in a row": lambda seed: CannedPolicy(
        " ".join(["sorry", "hope", "hug", "care"] * n) for n in range(1, TURNS + 1)
    ),
    "hack: as long as possible": lambda seed: CannedPolicy(
        " ".join(PHRASES["tell"] * n).format(a="music", b="jazz") for n in range(1, TURNS + 1)
    ),
}
POLICIES: dict[str, Callable[[int], Policy]] = {
    "optimal": OptimalPolicy,
    "friend": lambda seed: HabitPolicy(seed, "friend"),
    "mixed": MixedPolicy,
    "myopic": MyopicPolicy,
    "random": RandomPolicy,
    **HACKS,
}
