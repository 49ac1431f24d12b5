"""The agents of envs/multiwoz with what this project trains inside: task policies, language understanding,
language models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from envs.multiwoz import MultiWOZText, Options, RulePolicy, Simulator
from envs.multiwoz.agents import Meeting, Reads, Understand
from envs.multiwoz.matcher import matchers
from envs.multiwoz.rollout import Respond, one_by_one
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding, load_for_decoding
from rl_dialog.evaluation.runs import existing
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig, GreedyActs, is_act_policy
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.nlu import load_nlu
from rl_dialog.models.policy import Policy


@dataclass(frozen=True)
class InWorld:
    """Whom the system meets."""

    world: str = ""
    """the folder with MultiWOZ's files, or module:name, a function of your own that returns a World; by
    default a generated town"""
    options: Options = Options()
    """how users, goals, rewards and measures behave"""


def shape_of(simulator: Simulator) -> ActPolicyConfig:
    """The policy that fits a world."""
    vectors = simulator.vectors
    return ActPolicyConfig(vectors.state_size, vectors.action_size, vocabulary=vectors.vocabulary)


def responder(name: str, simulator: Simulator) -> Respond | None:
    """What `rule` or the checkpoint of a task policy says, state by state; None for another checkpoint, such
    as a language model's.

    Raises UserError for a task policy of another world.
    """
    if name == "rule":
        return RulePolicy(simulator.world.database, simulator.options).respond
    place = Path(resolve(name))
    if not is_act_policy(place):
        return None
    return one_by_one(simulator, GreedyActs(ActPolicy.from_pretrained(place, expected=shape_of(simulator))))


def reader(name: str, side: str, simulator: Simulator) -> Understand | None:
    """What the user or the system reads the other with: nothing (`acts`), the `templates` backwards, or what
    `fit_nlu` wrote.
    """
    other = "system" if side == "user" else "user"
    if name == "acts":
        return None
    if name == "templates":
        return matchers(simulator.world)[other].understand
    return load_nlu(name).reader(other)


def language_model(name: str, *, beta: float | None = None) -> tuple[Policy, PreTrainedTokenizerBase]:
    """The language model of a run or a checkpoint, and its tokenizer.

    Raises UserError where there is none.
    """
    load_quietly()
    place = resolve(existing(name))
    return load_for_decoding(place, beta=beta), load_tokenizer(place)


def language_model_meetings(
    model: tuple[Policy, PreTrainedTokenizerBase],
    simulator: Simulator,
    reads: Reads,
    episodes: int,
    decoding: Decoding,
    *,
    seed: int = 0,
    batch_size: int = 64,
) -> Iterator[Meeting]:
    """Conversations of a language model and its tokenizer, `batch_size` of them stepped together."""
    policy, tokenizer = model
    for start in range(0, episodes, batch_size):
        worlds: list[MultiWOZText] = []

        def make_env(worlds: list[MultiWOZText] = worlds) -> MultiWOZText:
            worlds.append(MultiWOZText(simulator, user_nlu=reads["user"], system_nlu=reads["system"]))
            return worlds[-1]

        numbers = range(start, min(start + batch_size, episodes))
        play_episodes(policy, tokenizer, make_env, numbers, decoding, seed=seed, batch_size=batch_size)
        yield from (world.meeting for world in worlds)
