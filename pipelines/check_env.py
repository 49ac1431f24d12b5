"""Does a world keep the contract of worlds to talk in?

    python -m pipelines.check_env --env my_worlds:House

The contract is in envs/text_world.py. Episodes are played in every way that the verbs play them: twice from
one seed, in any order, side by side, from a snapshot, after pickling, in another process; what the class
brings by choice (scripted players, an optimum, a drawing, logs) is tried as well. Ends with status 2 when a
check finds a fault.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from envs import text_env
from envs.conformance import check_world
from rl_dialog.cluster.time_limit import TookTooLong, time_limit
from rl_dialog.errors import UserError
from rl_dialog.run import Quiet, require, run


@dataclass(frozen=True)
class CheckEnvConfig(Quiet):
    """Which world."""

    env: str = ""
    """module:Class of your own, the name of a world that is here, or textarena:NAME, reasoning_gym:NAME,
    openenv:URL (envs/README.md)"""
    seconds: float = 120.0
    """most that one check may take: a world that waits for ever has a fault"""


def main(config: CheckEnvConfig) -> dict[str, Any]:
    """Checks, prints what was found, and returns it. Raises UserError for a world with faults."""
    require(config, env="module:Class, or the name of a world")
    if not 0 < config.seconds < float("inf"):
        raise UserError(f"--seconds: expected a number above 0, got {config.seconds:g}")
    findings = check_world(text_env(config.env), limit=lambda: within(config.seconds))
    for each in () if config.quiet else findings:
        print(
            f"{each.check:<15} {each.fault and 'fault: ' + each.fault or each.note or 'ok'}", file=sys.stderr
        )
    faults = [f"{each.check}: {each.fault}" for each in findings if each.fault]
    if faults:
        known = f"{len(faults)} of {len(findings)} checks found a fault"
        raise UserError(f"env {config.env!r}: {known}. {'; '.join(faults)}. envs/README.md has the contract")
    return {
        "env": config.env,
        "checks": len(findings),
        "notes": {e.check: e.note for e in findings if e.note},
    }


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises UserError where the block takes longer."""
    try:
        with time_limit(seconds):
            yield
    except TookTooLong:
        expected = f"a check that is done within {seconds:g} s (--seconds)"
        raise UserError(f"expected {expected}, got one that is not: does a step wait for ever?") from None


if __name__ == "__main__":
    run(CheckEnvConfig, main)
