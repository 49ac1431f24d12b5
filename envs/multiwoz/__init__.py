"""Task-oriented dialogs against a simulated user: README.md tells the story, environment.py is where to start
reading."""

from envs.multiwoz.environment import MultiWOZ, MultiWOZVector, Outcome, Simulator
from envs.multiwoz.options import ORIGINAL, Options
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.text import MultiWOZText
from envs.multiwoz.world import World, WorldError, load_world

__all__ = [
    "ORIGINAL",
    "MultiWOZ",
    "MultiWOZText",
    "MultiWOZVector",
    "Options",
    "Outcome",
    "RulePolicy",
    "Simulator",
    "World",
    "WorldError",
    "load_world",
]
