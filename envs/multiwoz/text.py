"""The world in words: messages in, a reply out, for language models and whoever else writes.

    env = MultiWOZText()
    messages, info = env.reset(seed=0)      # user: I am looking for a hotel. The area should be east.
                                              system: hotel: 6 fit; Area east
    reply = "There are [hotel_choice] hotels. How about [hotel_name]?"
    messages, reward, terminated, truncated, info = env.step(reply)

After each turn of the user stands a system message with what the tracker knows. A reply may name values by
placeholders, which are filled in from the databases before the user reads it (`lexical.py` has both). The
user reads with the templates of the world backwards (`matcher.py`) or with an NLU.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import gymnasium

from envs.multiwoz.agents import EndToEndAgent, Meeting, Message, Session, Understand, UserAgent
from envs.multiwoz.environment import Simulator, simulator_of
from envs.multiwoz.matcher import matchers
from envs.multiwoz.options import Options
from envs.multiwoz.templates import Speaker
from envs.multiwoz.world import World
from rl_dialog.errors import UserError

MAX_CHARACTERS = 2000  # of a sampled action; a reply may be longer
ROLES = ("system", "user", "assistant")


class Messages(gymnasium.spaces.Space[list[Message]]):
    """Non-empty message lists in OpenAI's form."""

    def contains(self, x: Any) -> bool:
        if not isinstance(x, list) or not x:
            return False
        return all(
            isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in x
        )

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        domain = ("hotel", "restaurant", "train")[self.np_random.integers(3)]
        return [{"role": "user", "content": f"I am looking for a {domain}."}]

    @property
    def is_np_flattenable(self) -> bool:
        return False


class MultiWOZText(gymnasium.Env[list[Message], str]):
    """Conversations in words one after the other; the system is the agent.

    Rewards are those of `Options.reward`; a user that gives up or runs out of turns says goodbye, so every
    end is `terminated`. `info` of the first observation has `goal`; of a step `heard`, the acts that the user
    understood, and `text`, the reply as it read it; of the last one `outcome` (the fields of `Outcome`).
    `step` takes any string; `action_space` is narrower because gymnasium's `Text` needs an alphabet to sample
    from.

    Args:
        world: a World, the folder of one, or "" for the generated town; or a Simulator, which has its
            options.
        user_nlu: how the user reads, (text, what was said before) -> acts; by default the templates
            backwards.
        system_nlu: how the tracker behind the system messages reads the user; by default it is told the
            user's acts, less what `Options.noise` takes.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, world: World | Simulator | str | Path = "",
                 options: Options | Mapping[str, Any] | None = None, *, user_nlu: Understand | None = None,
                 system_nlu: Understand | None = None, render_mode: str | None = None) -> None:  # fmt: skip
        if render_mode not in (None, "ansi"):
            raise UserError(f"expected render_mode None or 'ansi', got {render_mode!r}")
        if isinstance(world, Simulator) and options is not None:
            raise UserError("expected options with a world, got some beside a Simulator, which has its own")
        self.made_of = world, options, user_nlu, system_nlu, render_mode
        self.render_mode = render_mode
        self.observation_space = Messages()
        self.action_space = gymnasium.spaces.Text(
            min_length=0, max_length=MAX_CHARACTERS, charset=string.printable
        )
        simulator, understand = _shared(world, options, own_nlu=user_nlu is not None)
        user = UserAgent(
            simulator, nlu=user_nlu or understand, nlg=Speaker(simulator.world.templates["user"], side="user")
        )
        self.simulator, self.agent = simulator, EndToEndAgent(simulator, _nobody, nlu=system_nlu)
        self.session = Session(user, self.agent)
        self.base, self.episode = 0, 0
        self.meeting: Meeting | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """The next conversation; a seed starts its own numbering of conversations. `options={"goal": ...}`
        sets the user's goal."""
        super().reset(seed=seed)
        if unknown := set(options or ()) - {"goal"}:
            raise UserError(f"expected no options but goal, got {sorted(unknown)}")
        if seed is not None:
            self.base, self.episode = seed, 0
        self.meeting = self.session.start((self.base, 0, 0, self.episode), (options or {}).get("goal"))
        self.episode += 1
        self.turn = self.session.listen(self.meeting)
        return self._observation(), {"goal": self.meeting.goal}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """The user reads the reply and answers. Raises ResetNeeded without a running conversation, TypeError
        for what is no string."""
        if self.meeting is None or self.meeting.done:
            raise gymnasium.error.ResetNeeded("expected a running conversation; call reset first")
        if not isinstance(reply, str):
            raise TypeError(f"expected the reply as a string, got {type(reply).__name__}")
        turn = self.agent.speak(self.meeting.system, self.turn, reply)
        reward = self.session.answer(self.meeting, turn)
        self.turn = self.session.listen(self.meeting)
        info: dict[str, Any] = {"heard": self.meeting.user.turns[-1].understood, "text": turn.text}
        if self.meeting.done:
            info["outcome"] = asdict(self.simulator.outcome(self.meeting.talk))
        return self._observation(), reward, self.meeting.done, False, info

    def snapshot(self) -> Any:
        """The conversation, without the world that it takes place in."""
        return copy.deepcopy((self.base, self.episode, self.meeting, getattr(self, "turn", None)))

    def restore(self, saved: Any) -> None:
        """Goes back to a snapshot."""
        self.base, self.episode, self.meeting, self.turn = copy.deepcopy(saved)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes its own world from what this one was made of, and goes on."""
        return _made_again, (self.made_of, self.snapshot())

    def render(self) -> str | None:
        """The conversation so far as both sides read it, one line per turn."""
        if self.render_mode != "ansi" or self.meeting is None:
            return None
        return "\n".join(
            f"{('user', 'system')[i % 2]:>6}: {text}" for i, text in enumerate(self.meeting.user.words)
        )

    def _observation(self) -> list[Message]:
        return [dict(message) for message in self.meeting.system.messages]


def _made_again(made_of: tuple[Any, ...], saved: Any) -> MultiWOZText:
    world, options, user_nlu, system_nlu, render_mode = made_of
    nlus = {"user_nlu": user_nlu, "system_nlu": system_nlu}
    made = MultiWOZText(world, options, **nlus, render_mode=render_mode)
    made.restore(saved)
    return made


def _nobody(messages: list[Message]) -> str:
    raise RuntimeError("expected the reply as the action of a step")


def _shared(world: Any, options: Any, *, own_nlu: bool) -> tuple[Simulator, Understand | None]:
    """The simulator and the reader of templates; those of a folder's name are made once, as an environment is
    made for each conversation."""
    if isinstance(world, str | Path) and not isinstance(options, Mapping):
        return _of_folder(str(world), options or Options())
    simulator = world if isinstance(world, Simulator) else simulator_of(world, options)
    return simulator, None if own_nlu else matchers(simulator.world)["system"].understand


@lru_cache(maxsize=4)
def _of_folder(folder: str, options: Options) -> tuple[Simulator, Understand]:
    simulator = simulator_of(folder, options)
    return simulator, matchers(simulator.world)["system"].understand
