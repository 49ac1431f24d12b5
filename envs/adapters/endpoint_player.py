"""A player behind an OpenAI-compatible endpoint, as `serve` gives a checkpoint one (`chat_endpoint.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from envs.adapters.chat_endpoint import ChatEndpoint, EndpointError
from envs.text_world import Message
from rl_dialog.errors import UserError


@dataclass(frozen=True)
class EndpointPlayer:
    """Answers through POST /chat/completions; the seed of a reply comes from the episode's."""

    address: str  # http://host:port/v1
    seed: int = 0

    def of_seed(self, seed: int) -> EndpointPlayer:
        """The player of an episode."""
        return replace(self, seed=seed % 2**31)

    def __call__(self, messages: list[Message]) -> str:
        """The reply, which may be empty. Raises UserError where the endpoint does not give one in time."""
        how = {"seed": self.seed + len(messages), "may_be_empty": True}
        try:
            return ChatEndpoint(self.address).answer(messages, **how).text
        except EndpointError as error:
            raise UserError(f"player {error}") from error


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
