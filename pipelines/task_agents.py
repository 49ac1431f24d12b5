"""The agents of envs/multiwoz with what this project trains inside: task policies, language understanding,
language models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from envs.multiwoz import RulePolicy, Simulator
from envs.multiwoz.agents import Understand
from envs.multiwoz.matcher import matchers
from envs.multiwoz.rollout import Respond, one_by_one

if TYPE_CHECKING:  # what the rule policy and templates do without is imported where it is needed
    from transformers import PreTrainedTokenizerBase

    from rl_dialog.models.act_policy import ActPolicyConfig
    from rl_dialog.models.policy import Policy


def shape_of(simulator: Simulator) -> ActPolicyConfig:
    """The policy that fits a world."""
    from rl_dialog.models.act_policy import ActPolicyConfig

    vectors = simulator.vectors
    return ActPolicyConfig(vectors.state_size, vectors.action_size, vocabulary=vectors.vocabulary)


def responder(name: str, simulator: Simulator) -> Respond | None:
    """What `rule` or the checkpoint of a task policy says, state by state; None for another checkpoint, such
    as a language model's.

    Raises UserError for a task policy of another world.
    """
    if name == "rule":
        return RulePolicy(simulator.world.database, simulator.options).respond
    from rl_dialog.models.act_policy import ActPolicy, GreedyActs, is_act_policy
    from rl_dialog.models.checkpoint import resolve

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
    from rl_dialog.models.nlu import load_nlu

    return load_nlu(name).reader(other)


def language_model(name: str, *, beta: float | None = None) -> tuple[Policy, PreTrainedTokenizerBase]:
    """The language model of a run or a checkpoint, and its tokenizer.

    Raises UserError where there is none.
    """
    from transformers.utils import logging as transformers_logging

    from rl_dialog.data.tokenize import load_tokenizer
    from rl_dialog.evaluation.generation import load_for_decoding
    from rl_dialog.evaluation.runs import existing
    from rl_dialog.models.checkpoint import resolve

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    place = resolve(existing(name))
    return load_for_decoding(place, beta=beta), load_tokenizer(place)
