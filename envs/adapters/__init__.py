"""Worlds that nobody here wrote, by a prefix of their name (README.md):

    textarena:Nim-v0?opponent=random&role=1      a game of TextArena
    reasoning_gym:chain_sum?max_terms=3          a task of reasoning-gym
    openenv:ws://localhost:8000                  a server that speaks OpenEnv's WebSocket protocol

`python -m envs.adapters` writes the catalogue of what works. The libraries are extras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envs.adapters.names import parsed

PREFIXES = ("textarena", "reasoning_gym", "openenv")


@dataclass(frozen=True)
class Adapter:
    """The constructor of a world by its name: small, so that it travels to workers."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self) -> Any:
        """A world. Raises UserError for a name or options that do not exist, and for a missing library."""
        kind, _, rest = self.name.partition(":")
        return _KINDS[kind](rest)

    def write_logs(self, path: Any, *, dialogs: int, seed: int) -> None:
        """Episodes of a player that moves at random, one JSON line each."""
        from envs.adapters.logs import write_logs

        write_logs(self, path, dialogs=dialogs, seed=seed)

    def reference_returns(self, episodes: int, seed: int) -> dict[str, list[float]]:
        """The returns of a player that moves at random, where the world has one."""
        from envs.adapters.logs import reference_returns

        return reference_returns(self, episodes, seed)


def adapter(name: str) -> Adapter:
    """The constructor of a world named with one of `PREFIXES`. Raises UserError where it cannot be made."""
    found = Adapter(name)
    found()
    return found


def _textarena(name: str) -> Any:
    from envs.adapters.textarena_world import TextArenaWorld

    return TextArenaWorld(*parsed(name))


def _reasoning_gym(name: str) -> Any:
    from envs.adapters.reasoning_gym_world import ReasoningGymWorld

    return ReasoningGymWorld(*parsed(name))


def _openenv(name: str) -> Any:
    from envs.adapters.openenv_world import OpenEnvWorld

    return OpenEnvWorld(*parsed(name))


_KINDS: dict[str, Callable[[str], Any]] = {
    "textarena": _textarena,
    "reasoning_gym": _reasoning_gym,
    "openenv": _openenv,
}
