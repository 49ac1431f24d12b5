"""Conversations in words: how both sides read and speak, and a user who meets a system of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envs.multiwoz.agents import Reads, Session, SystemAgent, UserAgent
from envs.multiwoz.channel import Channel
from envs.multiwoz.environment import Simulator
from envs.multiwoz.rollout import Respond
from rl_dialog.errors import UserError


@dataclass(frozen=True)
class InWords:
    """Who meets whom, and how they read each other."""

    system: str = "rule"
    """rule: tracker, hand-written policy and templates; or a run folder or checkpoint, of a task policy (in
    place of the hand-written one) or of a language model"""
    nlu: str = "templates"
    """how both sides read. templates: the templates backwards; acts: nobody reads, acts are passed on; or a
    folder that `fit_nlu` wrote"""
    user_nlu: str = ""
    """the user's, where it is another one"""
    system_nlu: str = ""
    """the system's, where it is another one; a checkpoint reads the words itself, and this one only fills the
    notes that it gets"""
    templates: Literal["manual", "auto_manual"] = "manual"
    """how acts are worded. manual: a sentence for each; auto_manual: one for all acts of a kind where the
    world has one; needs a trained --nlu"""
    placeholders: bool = False
    """the rule system words acts with placeholders, filled in from the databases, as a language model does:
    dialogs to train one on"""
    mistakes: float = 0.0
    """probability that an act of the rule system is dropped, another one, or joined by one more: logs of a
    worse system"""

    @property
    def readers(self) -> dict[str, str]:
        """What each side reads with."""
        return {"user": self.user_nlu or self.nlu, "system": self.system_nlu or self.nlu}

    def check(self) -> None:
        """Raises UserError for sides that cannot understand each other."""
        if self.nlu == "acts" and (self.placeholders or self.user_nlu or self.system_nlu):
            raise UserError("--nlu acts: expected without words: no --placeholders, --user_nlu, --system_nlu")
        if "acts" in (self.user_nlu, self.system_nlu):
            why = "one that speaks in words cannot be heard by one that takes acts"
            raise UserError(f"expected --nlu acts for both sides: {why}")
        if self.templates == "auto_manual" and "templates" in self.readers.values():
            why = "those sentences cannot be read backwards"
            raise UserError(
                f"--templates auto_manual: expected a trained --nlu (pipelines/fit_nlu.py), as {why}"
            )

    def check_language_model(self) -> None:
        """Raises UserError for what only a system of modules can do."""
        if self.placeholders or self.mistakes or self.nlu == "acts" or self.templates == "auto_manual":
            flags = "--placeholders, --mistakes, --nlu acts, --templates auto_manual"
            why = "a language model writes its own words, and hears those that its logs were made of"
            raise UserError(f"{flags}: expected with --system rule or a task policy; {why}")


def session_of_modules(simulator: Simulator, policy: Respond, reads: Reads, settings: InWords) -> Session:
    """A user, and a system with this policy, which makes mistakes where the settings say so."""
    world, respond = simulator.world, policy
    if settings.mistakes:
        wrong = Channel(world.system_acts, world.values, settings.mistakes)
        respond = lambda state, rng: wrong.passed(policy(state, rng), rng)  # noqa: E731
    says = world.speakers(settings.templates) if settings.nlu != "acts" else {"user": None, "system": None}
    user = UserAgent(simulator, nlu=reads["user"], nlg=says["user"])
    words = {"nlu": reads["system"], "nlg": says["system"], "placeholders": settings.placeholders}
    return Session(user, SystemAgent(simulator, respond, **words))
