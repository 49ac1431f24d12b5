"""What a run of online learning depends on whose reward is learned from labels (labelled_reward.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl_dialog.config import at_least
from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import check_base
from rl_dialog.preferences.reply_fitting import Fitting
from rl_dialog.preferences.reply_queries import value_of
from rl_dialog.preferences.segments import Conversation, Reply
from rl_dialog.preferences.settings import OracleSettings
from rl_dialog.rewards import REWARDS, Reward, choose_rewards
from rl_dialog.rewards.scorers import make_scorers

NEW = "new"  # in place of a model that the reward begins from: a small encoder
PROBE = [
    {"role": "user", "content": "Hello, I would like a table."},
    {"role": "assistant", "content": "Good evening! For how many people shall it be?"},
    {"role": "user", "content": "For two, please. Thank you!"},
]
# What a reward is asked about before anything is played.
PROBES = {
    "conversations": Conversation(PROBE[:1], PROBE[1:]),
    "replies": Reply(PROBE[:1], PROBE[1]["content"]),
}


@dataclass(frozen=True)
class LabelledRewardSettings:
    """Who prefers what, how often they are asked, and how a reward is made of it."""

    labeller: Literal["none", "people", "oracle"] = "none"
    """people: whoever runs `label --run` on the folder of this run. oracle: the world's own reward answers,
    or `answers`. none: nobody is asked, and rewards are the world's or those of --rewards"""
    about: Literal["conversations", "replies"] = "conversations"
    """what is compared: two conversations with the same partner that begin alike, or a reply and another one
    that the policy might have given"""
    answers: str = ""
    """with an oracle, the reward that answers in place of the world's own, as --oracle of prefer_replies; of
    replies the world says nothing, so they need it"""
    scorers: tuple[str, ...] = ()
    """models behind that reward: sentiment=PATH, reward_model=PATH, ..."""
    oracle: OracleSettings = OracleSettings()
    """how an oracle answers"""
    budget: int = 1000
    """labels in all"""
    initial_labels: int = 200
    """labels before the policy learns; they are about the conversations of the first round"""
    schedule: Literal["hyperbolic", "constant"] = "hyperbolic"
    """the rate of the other labels as the policy learns"""
    schedule_scale: float | None = None
    """rounds after which the hyperbolic rate has halved; by default a quarter of them"""
    max_behind: int = 20
    """labels that are wanted by now and may be missing before the policy waits for them; 0: all are waited
    for; -1: it waits for the initial ones alone"""
    refit: float = 0.2
    """the reward is fitted anew when there are more labels than it knows by this share"""
    model_name_or_path: str = ""
    """an encoder, a language model or a run that each reward model begins from; by default the language model
    of the policy's start, which is read once for all replies of a conversation. new: a small new encoder"""
    hidden_size: int = 64
    """width of a new encoder"""
    num_hidden_layers: int = 2
    """layers of a new encoder"""
    vocab_size: int = 4096
    """size of a new encoder's tokenizer"""
    max_length: int = 256
    """tokens of a reply and what was said before it; of longer ones the oldest messages are left out"""
    fitting: Fitting = field(default_factory=Fitting)
    """how it is fitted"""
    validation: float = 0.1
    """share of the conversation partners whose labels it is judged by, and does not learn from"""
    task: str = ""
    """what the labellers are told; by default which conversation, or reply, is better"""

    @property
    def is_asked(self) -> bool:
        """Is anybody?"""
        return self.labeller != "none"

    def base_of(self, start: str) -> str:
        """What each reward model begins from where the policy's start is `start`; empty for a new encoder."""
        return "" if self.model_name_or_path == NEW else self.model_name_or_path or start

    def check_models(self, start: str) -> None:
        """That there are those which it begins from and which answer. Raises UserError."""
        if base := self.base_of(start):
            check_base(base)
        if self.answers:
            self.reward_that_answers()

    def reward_that_answers(self) -> Reward:
        """The one that `answers` names, with its models. Raises UserError for one that there is not, and for
        one of ours that says nothing of what is compared."""
        [reward] = choose_rewards([self.answers], scorers=make_scorers(self.scorers)).values()
        if self.answers in REWARDS and value_of(PROBES[self.about], reward) is None:
            needs = {"conversations": "conversation", "replies": "new reply by itself"}[self.about]
            raise UserError(
                f"--preferences.answers {self.answers}: expected a reward that judges a {needs}, got one "
                "that says nothing of it"
            )
        return reward

    def check(self, *, groups: int, group_size: int, roles: int | None, world_pays: bool) -> None:
        """What can be known to fail before anything is loaded. Raises UserError.

        roles: that the policy learns in each group; None where the world knows. world_pays: has it a reward
        of its own?
        """
        at_least(self, budget=1, initial_labels=1, max_behind=-1, refit=0, max_length=16)
        if not 0 <= self.validation < 1:
            raise UserError(
                f"expected --preferences.validation of at least 0 and below 1, got {self.validation}"
            )
        if self.initial_labels > self.budget:
            raise UserError(
                f"--preferences.initial_labels {self.initial_labels}: expected at most the budget of "
                f"{self.budget}"
            )
        if self.about == "conversations" and group_size < 2:
            raise UserError(
                f"--group_size {group_size}: expected at least 2, because conversations of one group are "
                "compared; --preferences.about replies compares single replies"
            )
        most = groups * group_size * (group_size - 1) // 2 * (roles or 1)
        if self.about == "conversations" and roles and self.initial_labels > most:
            raise UserError(
                f"--preferences.initial_labels {self.initial_labels}: expected at most the pairs of a round, "
                f"{most} in {groups} groups of {group_size}: set --groups higher, or ask for fewer"
            )
        if self.labeller == "oracle" and self.about == "replies" and not self.answers:
            raise UserError(
                "--preferences.labeller oracle: expected --preferences.answers REWARD, which judges replies; "
                "the world's own reward judges conversations"
            )
        if self.labeller == "oracle" and not self.answers and not world_pays:
            raise UserError(
                "--preferences.labeller oracle: expected --preferences.answers REWARD, because nobody pays "
                "where --users talk, or two copies from --contexts"
            )
        if self.labeller != "oracle" and self.answers:
            raise UserError("--preferences.answers: expected --preferences.labeller oracle")
