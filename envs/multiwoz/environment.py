"""Conversations with the simulated user: one, or many at once, by acts or by vectors.

    simulator = Simulator(load_world("data/multiwoz"), Options())
    talk = simulator.start((0, 0, 0, 7))                     # seeds: base, worker, environment, episode
    reward = simulator.step(talk, [["Inform", "Hotel", "Choice", "9"]])
    talk.done, simulator.outcome(talk)

A `Conversation` is the whole state of one dialog: it can be pickled, and whatever else is stepped beside it
makes no difference to it. `MultiWOZ` is the Gymnasium environment of one conversation after the other,
`MultiWOZVector` steps many.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs.multiwoz.acts import Act, Acts, checked
from envs.multiwoz.channel import Channel
from envs.multiwoz.evaluator import Evaluator, Record
from envs.multiwoz.goals import Goal, checked_goal, copied
from envs.multiwoz.options import Options
from envs.multiwoz.tracker import DialogState, Tracker
from envs.multiwoz.user import AgendaUser, UserState, complete
from envs.multiwoz.vectors import Vectoriser
from envs.multiwoz.world import World, load_world
from rl_dialog.errors import UserError

Seeds = tuple[int, int, int, int]  # base, worker, environment, episode
SUCCESS, FAILURE, TURN, DOMAIN = 80.0, -40.0, -1.0, 5.0
DONE_SO_FAR = 40.0  # the original's reward for every turn in which the task is done


@dataclass(slots=True)
class Conversation:
    """The whole state of one dialog."""

    seeds: Seeds
    user: UserState
    state: DialogState  # what the system sees
    record: Record
    rng: random.Random  # the system's chance: the rule policy's choices, the makes of taxis
    noise: random.Random | None = None  # the channel's chance; None where nothing is lost
    user_acts: Acts = ()  # the user's last turn as it was meant
    turns: int = 0  # system turns so far
    acts: int = 0  # acts in them
    total: float = 0.0  # the return so far
    rewarded: set[str] = field(default_factory=set)  # domains that have earned their reward

    @property
    def done(self) -> bool:
        return self.user.done

    @property
    def goal(self) -> Goal:
        return self.user.goal


@dataclass(frozen=True)
class Outcome:
    """How a conversation went; numbers that do not apply to its goal are None."""

    success: bool
    success_strict: bool
    complete: bool
    book_rate: float | None
    inform_precision: float | None
    inform_recall: float | None
    inform_f1: float | None
    final_goal: float
    turns: int
    total: float
    domains: dict[str, bool]  # goal domain -> its own success
    by_domain: dict[
        str, dict[str, float | None]
    ]  # goal domain -> its own book_rate, inform_precision, inform_recall, inform_f1


class Simulator:
    """The rules of one world under one set of options; it holds nothing of a dialog."""

    def __init__(self, world: World, options: Options | None = None) -> None:
        self.world, self.options = world, options or Options()
        self.users = AgendaUser(world.values, self.options)
        self.tracker = Tracker(world.database, world.values, self.options)
        self.evaluator = Evaluator(world.database, self.options)
        self.vectors = Vectoriser(world.database, world.user_acts, world.system_acts, self.options)
        self.channel = Channel(world.user_acts, world.values, self.options.noise)

    def start(self, seeds: Seeds, goal: Mapping[str, Any] | None = None) -> Conversation:
        """A new conversation, in which the user has spoken first. Raises GoalError for an impossible goal."""
        user = self.user(seeds, goal)
        talk = Conversation(
            seeds, user, self.tracker.start(), Record(user.goal), stream(seeds, "system"), self.noise(seeds)
        )
        talk.user_acts = self.users.respond(user, ())
        self.evaluator.user_said(talk.record, talk.user_acts)
        self.tracker.user_said(talk.state, self.channel.passed(talk.user_acts, talk.noise))
        return talk

    def user(self, seeds: Seeds, goal: Mapping[str, Any] | None = None) -> UserState:
        """A user who has said nothing yet. Raises GoalError for an impossible goal."""
        rng = stream(seeds, "user")
        own_goal = (
            self.world.goals.sample(rng, self.options)
            if goal is None
            else copied(checked_goal(goal, self.world.database))
        )
        return self.users.start(own_goal, rng)

    def noise(self, seeds: Seeds) -> random.Random | None:
        """The chance by which acts are lost on their way to the system; None without noise."""
        return stream(seeds, "noise") if self.options.noise else None

    def step(self, talk: Conversation, acts: Iterable[Sequence[str]]) -> float:
        """The system speaks and the user answers: the reward. Raises ActError for malformed acts, ResetNeeded
        after the end."""
        return self.advance(talk, checked(acts, side="system"))

    def advance(self, talk: Conversation, acts: Acts) -> float:
        """`step` for acts that are known to be well formed."""
        if talk.user.done:
            raise gymnasium.error.ResetNeeded(
                "expected a running conversation, got a turn after the user's goodbye; start a new one"
            )
        self.tracker.system_said(talk.state, acts)
        user_acts = self.users.respond(talk.user, acts)
        reward = self.judge(talk, acts, user_acts)
        self.tracker.user_said(talk.state, self.channel.passed(user_acts, talk.noise))
        return reward

    def judge(self, talk: Conversation, system_acts: Acts, user_acts: Acts) -> float:
        """The reward of a turn in which the user heard the system's acts and answered; the tracker is told by
        the caller."""
        self.evaluator.system_said(talk.record, system_acts, talk.state)
        self.evaluator.user_said(talk.record, user_acts)
        talk.user_acts = user_acts
        talk.turns += 1
        talk.acts += len(system_acts)
        reward = self._reward(talk, len(system_acts))
        talk.total += reward
        return reward

    def _reward(self, talk: Conversation, acts: int) -> float:
        options, done = self.options, talk.user.done
        if options.reward == "per_turn":
            if self.evaluator.success(talk.record):
                return DONE_SO_FAR
            return DOMAIN if self.evaluator.domain_success(talk.record, talk.record.domain) else TURN
        if options.reward == "user":
            return (SUCCESS if complete(talk.goal) else FAILURE) if done else TURN
        if done:
            reward = SUCCESS if self.evaluator.success(talk.record) else FAILURE
        else:
            reward = -options.act_penalty * acts if options.act_penalty else TURN
        if options.reward == "terminal_domain":
            for domain in talk.goal:
                if domain not in talk.rewarded and self.evaluator.domain_success(talk.record, domain):
                    talk.rewarded.add(domain)
                    reward += DOMAIN
        return reward

    def outcome(self, talk: Conversation) -> Outcome:
        """How the conversation stands, or ended."""
        rule, record = self.evaluator, talk.record
        scores = rule.information(record).scores or (None, None, None)
        success = rule.success(record)
        return Outcome(
            success=success,
            success_strict=success and record.strict,
            complete=complete(talk.goal),
            book_rate=rule.book_rate(record),
            inform_precision=scores[0],
            inform_recall=scores[1],
            inform_f1=scores[2],
            final_goal=rule.final_goal(record),
            turns=talk.turns,
            total=talk.total,
            domains={domain: rule.domain_success(record, domain) for domain in talk.goal},
            by_domain={domain: rule.figures(record, domain) for domain in talk.goal},
        )


class MultiWOZ(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """Conversations one after the other; the system is the agent.

    Observations are {"obs": float32 (340,), "action_mask": int8 (209,)}, an action has 209 bits. `step_acts`
    takes acts instead. `info` of the first observation has `goal`, of the last `outcome` (the fields of
    `Outcome`). A user that gives up or runs out of turns says goodbye, so every end is `terminated`.

    Args:
        world: a World, or the folder of one; "" is the generated town.
        worker, env: the place of this environment among others of one run; with `reset(seed=...)` they decide
            what happens.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, world: World | str | Path = "", options: Options | Mapping[str, Any] | None = None, *,
                 worker: int = 0, env: int = 0, render_mode: str | None = None) -> None:  # fmt: skip
        if render_mode not in (None, "ansi"):
            raise UserError(f"expected render_mode None or 'ansi', got {render_mode!r}")
        self.render_mode = render_mode
        self.simulator = simulator_of(world, options)
        vectors = self.simulator.vectors
        self.observation_space, self.action_space = spaces(vectors)
        self.worker, self.env, self.base, self.episode = worker, env, 0, 0
        self.talk: Conversation | None = None
        self.transcript: list[tuple[str, Acts]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The next conversation; a seed starts its own numbering of conversations. `options={"goal": ...}`
        sets the user's goal."""
        super().reset(seed=seed)
        if unknown := set(options or ()) - {"goal"}:
            raise UserError(f"expected no options but goal, got {sorted(unknown)}")
        if seed is not None:
            self.base, self.episode = seed, 0
        self.talk = self.simulator.start(
            (self.base, self.worker, self.env, self.episode), (options or {}).get("goal")
        )
        self.episode += 1
        self.transcript = [("user", self.talk.user_acts)]
        return self._observation(), {"goal": copied(self.talk.goal)}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Sets the bits of `action`. Raises ResetNeeded without a running conversation, UserError for a wrong
        shape."""
        talk = self._running()
        return self._advance(self.simulator.vectors.acts(action, talk.state, talk.rng))

    def step_acts(
        self, acts: Iterable[Sequence[str]]
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """`step` with acts. Raises ActError where they are none."""
        self._running()
        return self._advance(checked(acts, side="system"))

    def render(self) -> str | None:
        """The conversation so far, one line per turn."""
        return (
            "\n".join(f"{side:>6}: {shown(acts)}" for side, acts in self.transcript)
            if self.render_mode == "ansi"
            else None
        )

    def _running(self) -> Conversation:
        if self.talk is None or self.talk.done:
            raise gymnasium.error.ResetNeeded("expected a running conversation; call reset first")
        return self.talk

    def _advance(self, acts: Acts) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        talk = self.talk
        reward = self.simulator.advance(talk, acts)
        self.transcript += [("system", acts), ("user", talk.user_acts)]
        info = {"outcome": asdict(self.simulator.outcome(talk))} if talk.done else {}
        return self._observation(), reward, talk.done, False, info

    def _observation(self) -> dict[str, np.ndarray]:
        vectors, state = self.simulator.vectors, self.talk.state
        return {"obs": vectors.states([state])[0], "action_mask": vectors.mask(state).copy()}


class MultiWOZVector(VectorEnv):
    """`num_envs` conversations stepped together; environment i numbers its conversations by itself, so the
    others make no difference to it.

    As in Gymnasium's own vector environments, the step after an end ignores that environment's action and
    starts its next conversation, with reward 0. `infos["outcome"]` has the outcomes of the conversations that
    just ended, `infos["_outcome"]` says which. Observations are new arrays.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int,
        world: World | str | Path = "",
        options: Options | Mapping[str, Any] | None = None,
        *,
        worker: int = 0,
    ) -> None:
        if num_envs < 1:
            raise UserError(f"expected at least one environment, got {num_envs}")
        self.num_envs, self.worker = num_envs, worker
        self.simulator = simulator_of(world, options)
        self.single_observation_space, self.single_action_space = spaces(self.simulator.vectors)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.base = 0
        self.episodes = [0] * num_envs
        self.talks: list[Conversation] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A new conversation in every environment; a seed starts the numbering anew. There are no options."""
        if options:
            raise UserError(f"expected no options, got {sorted(options)}")
        if seed is not None:
            self.base, self.episodes = seed, [0] * self.num_envs
        self.talks = [self._next(i) for i in range(self.num_envs)]
        return self._observations(), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One action per environment # (N, 209). Raises UserError for another shape."""
        vectors = self.simulator.vectors
        if np.shape(actions) != (self.num_envs, vectors.action_size):
            raise UserError(
                f"expected actions of shape ({self.num_envs}, {vectors.action_size}), got {np.shape(actions)}"
            )
        if not self.talks:
            raise gymnasium.error.ResetNeeded("expected running conversations; call reset first")
        pairs = zip(self.talks, actions, strict=True)
        return self.step_acts(
            [None if talk.done else vectors.acts(bits, talk.state, talk.rng) for talk, bits in pairs]
        )

    def step_acts(
        self, turns: Sequence[Acts | None]
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """`step` with acts that are known to be well formed; None for conversations that have ended."""
        rewards, ended = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        infos: dict[str, Any] = {}
        for i, (talk, acts) in enumerate(zip(self.talks, turns, strict=True)):
            if talk.done:
                self.talks[i] = self._next(i)
                continue
            rewards[i] = self.simulator.advance(talk, acts)
            if talk.done:
                ended[i] = True
                infos = self._add_info(infos, {"outcome": self.simulator.outcome(talk)}, i)
        return self._observations(), rewards, ended, np.zeros(self.num_envs, bool), infos

    def _next(self, i: int) -> Conversation:
        talk = self.simulator.start((self.base, self.worker, i, self.episodes[i]))
        self.episodes[i] += 1
        return talk

    def _observations(self) -> dict[str, np.ndarray]:
        states = [talk.state for talk in self.talks]
        return {
            "obs": self.simulator.vectors.states(states),
            "action_mask": self.simulator.vectors.masks(states),
        }


def simulator_of(world: World | str | Path, options: Options | Mapping[str, Any] | None) -> Simulator:
    """A Simulator from what configs hold: a folder's name and plain values. Raises TypeError for an unknown
    option."""
    if isinstance(options, Mapping):
        options = Options(**options)
    return Simulator(world if isinstance(world, World) else load_world(world), options)


def spaces(vectors: Vectoriser) -> tuple[Dict, MultiBinary]:
    """The observation and the action space of one conversation."""
    observation = Dict(
        {
            "obs": Box(0.0, 1.0, (vectors.state_size,), np.float32),
            "action_mask": MultiBinary(vectors.action_size),
        }
    )
    return observation, MultiBinary(vectors.action_size)


def stream(seeds: Seeds, role: str) -> random.Random:
    """The chance of one side in one conversation: a hash of the seeds, so that neighbouring numbers have
    nothing in common.

    Python's generator and not numpy's, because a single draw from it takes a tenth of the time.
    """
    digest = blake2b(f"{role}:{':'.join(map(str, seeds))}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


def shown(acts: Iterable[Act]) -> str:
    """Acts as one line of text."""
    return "; ".join(
        "-".join((domain, intent, slot)) + (f"={value}" if value not in ("none", "?") else "")
        for intent, domain, slot, value in acts
    )
