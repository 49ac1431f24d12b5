"""Wordle with words: the world, its scripted players and their logs. envs/README.md describes it, and
`python -m envs.wordle --help` the command."""

from envs.wordle.logs import KINDS, write_logs
from envs.wordle.policies import POLICIES
from envs.wordle.world import Wordle

__all__ = ["KINDS", "POLICIES", "Wordle", "write_logs"]
