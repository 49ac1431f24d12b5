"""Many conversations with one policy, and what they come to.

    everything = list(play(simulator, RulePolicy(world.database, options).respond, seed=0, episodes=1000))
    everything = list(play_together(simulator, by_bits(simulator, GreedyActs(network)), seed=0,
                                    episodes=1000))
    everything = Player("", options)(range(1000), GreedyActs(network), 0)

A policy is a function of the dialog state and a source of chance; it may not remember anything between its
turns. A network answers all conversations in progress in one pass.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from envs.multiwoz.acts import Acts
from envs.multiwoz.environment import Conversation, Outcome, Simulator, stream
from envs.multiwoz.evaluator import Evaluator
from envs.multiwoz.goals import Goal, copied
from envs.multiwoz.options import Options
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.templates import Speaker
from envs.multiwoz.tracker import DialogState
from envs.multiwoz.world import load_world
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError

Respond = Callable[[DialogState, random.Random], Acts]
RespondTogether = Callable[[Sequence[Conversation]], Sequence[Acts]]
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]  # states (N, 340) and masks (N, 209) to bits (N, 209)


@dataclass(slots=True)
class Played:
    """A conversation with all that was said."""

    episode: int
    goal: Goal  # as it was at the start; the user changes its own
    talk: Conversation
    turns: list[tuple[str, Acts]] = field(default_factory=list)  # ("user" or "system", acts), the user first
    rewards: list[float] = field(default_factory=list)  # one per system turn
    outcome: Outcome | None = None
    words: list[str] = field(
        default_factory=list
    )  # the turns as they were said, where they were said in words


def play(
    simulator: Simulator, respond: Respond, *, seed: int, episodes: int, together: int = 64, first: int = 0
) -> Iterator[Played]:
    """Conversations `first`, `first + 1`, ... of a seed in order, up to `together` of them in progress at a
    time, which changes nothing about any."""
    return play_together(
        simulator,
        lambda talks: [respond(talk.state, talk.rng) for talk in talks],
        seed=seed,
        episodes=episodes,
        together=together,
        first=first,
    )


def play_together(
    simulator: Simulator,
    respond: RespondTogether,
    *,
    seed: int,
    episodes: int,
    together: int = 64,
    first: int = 0,
) -> Iterator[Played]:
    """`play` with a policy that answers all conversations in progress at once."""
    if together < 1:
        raise UserError(f"expected at least one conversation at a time, got {together}")
    waiting, running = iter(range(first, first + episodes)), []
    finished: dict[int, Played] = {}
    following = first
    while True:
        running += [
            _begun(simulator, seed, episode)
            for _, episode in zip(range(together - len(running)), waiting, strict=False)
        ]
        if not running:
            return
        for played, acts in zip(running, respond([played.talk for played in running]), strict=True):
            talk = played.talk
            played.rewards.append(simulator.advance(talk, acts))
            played.turns += [("system", acts), ("user", talk.user_acts)]
            if talk.done:
                played.outcome = simulator.outcome(talk)
                finished[played.episode] = played
        running = [played for played in running if not played.talk.done]
        while following in finished:
            yield finished.pop(following)
            following += 1


def by_bits(simulator: Simulator, choose: Choose) -> RespondTogether:
    """A policy over vectors as one over conversations."""
    vectors = simulator.vectors

    def respond(talks: Sequence[Conversation]) -> list[Acts]:
        states = [talk.state for talk in talks]
        bits = choose(vectors.states(states), vectors.masks(states))
        return [vectors.acts(row, talk.state, talk.rng) for row, talk in zip(bits, talks, strict=True)]

    return respond


def one_by_one(simulator: Simulator, choose: Choose) -> Respond:
    """A policy over vectors as one over dialog states."""
    vectors = simulator.vectors

    def respond(state: DialogState, rng: random.Random) -> Acts:
        return vectors.acts(choose(vectors.states([state]), vectors.masks([state]))[0], state, rng)

    return respond


class Player:
    """One world and its users; plays numbered conversations with the policy that it is given, the rule policy
    for None."""

    def __init__(self, world: str | Path, options: Options, *, together: int = 64) -> None:
        self.world = (
            str(Path(world).absolute()) if world else ""
        )  # workers do not share our working directory
        self.simulator, self.together = Simulator(load_world(self.world), options), together
        self.rule = RulePolicy(self.simulator.world.database, options)

    @property
    def maker(self) -> Callable[[], Player]:
        """Makes the same player in another process."""
        return partial(Player, self.world, self.simulator.options, together=self.together)

    def __call__(self, episodes: Sequence[int], choose: Choose | None, seed: int) -> list[Played]:
        """Conversations with consecutive numbers, in their order."""
        numbers = {"seed": seed, "episodes": len(episodes), "together": self.together, "first": episodes[0]}
        if choose is None:
            return list(play(self.simulator, self.rule.respond, **numbers))
        return list(play_together(self.simulator, by_bits(self.simulator, choose), **numbers))


def published_scores(
    played: Iterable[Played], simulator: Simulator
) -> list[tuple[float, float, float] | None]:
    """Precision, recall and F1 of each conversation as the original counts unrequested slots; None where
    nothing was requested."""
    evaluator = Evaluator(simulator.world.database, replace(simulator.options, unrequested="act_names"))
    return [evaluator.information(conversation.talk.record).scores for conversation in played]


def _begun(simulator: Simulator, seed: int, episode: int) -> Played:
    talk = simulator.start((seed, 0, 0, episode))
    return Played(episode, copied(talk.goal), talk, [("user", talk.user_acts)])


def transcripts_hash(played: Iterable[Played]) -> str:
    """SHA-256 over goals and acts of conversations in order: equal for equal conversations, however they were
    computed."""
    digest = hashlib.sha256()
    for conversation in played:
        digest.update(
            json.dumps([conversation.episode, conversation.goal, conversation.turns], sort_keys=True).encode()
        )
    return digest.hexdigest()


def dialog_of(played: Played, speakers: dict[str, Speaker] | None = None) -> Dialog:
    """A conversation with each reply's reward and each message's acts.

    In its own words where it was spoken in words, else worded by the speakers if there are any.
    """
    rng, rewards = stream(played.talk.seeds, "words"), iter(played.rewards)
    messages, words = [], iter(played.words)
    for side, acts in played.turns:
        text = next(words, None)
        if text is None:
            text = speakers[side].say(acts, rng) if speakers else "; ".join("-".join(act) for act in acts)
        message: dict[str, Any] = {
            "role": "assistant" if side == "system" else "user",
            "content": text,
            "acts": [list(act) for act in acts],
        }
        if side == "system":
            message["reward"] = next(rewards)
        messages.append(message)
    base, worker, env, episode = played.talk.seeds
    return Dialog(
        id=f"multiwoz-{base}-{worker}-{env}-{episode:06d}",
        messages=messages,
        source="multiwoz-simulated",
        goal=played.goal,
        meta={"outcome": asdict(played.outcome), "seeds": list(played.talk.seeds)},
    )
