"""A player behind an OpenAI-compatible endpoint, as `serve` gives a checkpoint one (`chat_endpoint.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envs.adapters.chat_endpoint import ChatEndpoint
from envs.text_world import Message


@dataclass(frozen=True)
class EndpointPlayer:
    """Answers through POST /chat/completions; the seed of a reply comes from the episode's."""

    address: str  # http://host:port/v1
    seed: int = 0

    def of_seed(self, seed: int) -> EndpointPlayer:
        """The player of an episode."""
        return replace(self, seed=seed % 2**31)

    def __call__(self, messages: list[Message]) -> str:
        """The reply, which may be empty. Raises EndpointError where the endpoint does not give one in
        time."""
        how = {"seed": self.seed + len(messages), "may_be_empty": True}
        return ChatEndpoint(self.address).answer(messages, **how).text
