"""A player behind an OpenAI-compatible endpoint, as `serve` gives a checkpoint one. OPENAI_API_KEY in the
environment is the key, where the endpoint asks for one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx

from envs.text_world import Message
from rl_dialog.errors import UserError

SECONDS = 60.0  # for a reply, after which the episode has failed


@dataclass(frozen=True)
class EndpointPlayer:
    """Answers through POST /chat/completions; the seed of a reply comes from the episode's."""

    address: str  # http://host:port/v1
    seed: int = 0

    def of_seed(self, seed: int) -> EndpointPlayer:
        """The player of an episode."""
        return replace(self, seed=seed % 2**31)

    def __call__(self, messages: list[Message]) -> str:
        """The reply. Raises UserError where the endpoint does not give one in time."""
        try:
            seed = (self.seed + len(messages)) % 2**31
            asked = {"model": self._model(), "messages": messages, "seed": seed}
            answer = httpx.post(f"{self._root}/chat/completions", json=asked, headers=_key(), timeout=SECONDS)
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]["content"] or ""
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            expected = f"a reply of an OpenAI-compatible endpoint within {SECONDS:g} s"
            got = f"{type(error).__name__}: {error}"
            raise UserError(f"player {self.address}: expected {expected}, got {got}") from error

    @property
    def _root(self) -> str:
        return self.address.rstrip("/")

    def _model(self) -> str:
        models = httpx.get(f"{self._root}/models", headers=_key(), timeout=SECONDS)
        models.raise_for_status()
        return models.json()["data"][0]["id"]


def _key() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class WithEndpoints:
    """The constructor of a world whose scripted players are also those behind some addresses."""

    make_world: Callable[[], Any]
    addresses: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return getattr(self.make_world, "__name__", "world")

    def __call__(self) -> Any:
        """A world."""
        return self.make_world()

    def scripted_players(self) -> dict[str, Callable[[int], Any]]:
        """The world's own, and one for each address."""
        world = self.make_world if hasattr(self.make_world, "scripted_players") else self.make_world()
        known = world.scripted_players() if hasattr(world, "scripted_players") else {}
        return {**known, **{address: EndpointPlayer(address).of_seed for address in self.addresses}}
