"""Simulated dialogs in words that say more than a good system and a content user would: material for language
understanding.
"""

from __future__ import annotations

from collections.abc import Iterator

from envs.multiwoz.agents import Session, SystemAgent, UserAgent, played
from envs.multiwoz.channel import Channel
from envs.multiwoz.environment import Simulator
from envs.multiwoz.options import Options
from envs.multiwoz.rollout import dialog_of
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.world import World
from rl_dialog.data.schema import Dialog

NOISE = 0.3  # on both sides' acts in every other dialog


def varied_dialogs(world: World, count: int, *, templates: str, seed: int) -> Iterator[Dialog]:
    """The rule policy with simulated users, worded by `templates` (see World.speakers)."""
    speakers = world.speakers(templates)
    mistakes = Channel(world.system_acts, world.values, NOISE)
    for number in range(count):
        simulator = Simulator(world, Options(noise=NOISE * (number % 2)))
        rule = RulePolicy(world.database, simulator.options).respond
        policy = (
            rule if number % 2 == 0 else lambda state, rng, rule=rule: mistakes.passed(rule(state, rng), rng)
        )
        session = Session(UserAgent(simulator), SystemAgent(simulator, policy))
        (meeting,) = session.play([(seed, 0, 0, number)])
        yield dialog_of(played(meeting, simulator, number), speakers)
