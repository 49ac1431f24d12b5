"""A player behind an OpenAI-compatible endpoint, as `serve` gives a checkpoint one. OPENAI_API_KEY in the
environment is the key, where the endpoint asks for one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import httpx

from envs.text_world import Message

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
        """The reply. Raises httpx.HTTPError where the endpoint does not give one in time."""
        asked = {"model": self._model(), "messages": messages, "seed": (self.seed + len(messages)) % 2**31}
        answer = httpx.post(f"{self._root}/chat/completions", json=asked, headers=_key(), timeout=SECONDS)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"] or ""

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
