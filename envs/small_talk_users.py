"""Users of the small-talk world at a real server: they talk over HTTP, vote on replies and rate the chat,
several at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from envs.small_talk_world import SmallTalk, conversation_seed

PATIENCE = 120.0  # seconds without a finished request after which a crowd gives up
CONSENT = "I am simulated, and I agree."


@dataclass(frozen=True)
class Server:
    """Where to talk, and the key for it."""

    url: str
    key: str


@dataclass(frozen=True)
class Talk:
    """One conversation, as the world knows it."""

    chat: str
    total: float  # the world's return, which no server ever sees
    votes: int
    requests: int


class Crowd:
    """Users who talk to a server, `at_once` at a time, from the beginning to the end of a `with` block.

    User `number` of a seed is always the same person, and asks for replies drawn from the same stream. At the
    end of the block nobody new comes, and those who talk finish; after an error they stop at once.
    """

    def __init__(self, server: Server, numbers: Iterable[int], *, at_once: int, seed: int) -> None:
        self.talks: list[Talk] = []
        self._numbers, self._seed = iter(numbers), seed
        self._lock, self._closed, self._stopped = threading.Lock(), threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._alive = time.monotonic()
        self._http = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {server.key}"}, timeout=PATIENCE / 2
        )
        self._threads = [
            threading.Thread(target=self._come, name=f"user {i}", daemon=True) for i in range(at_once)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._closed.set()
        if kind:
            self._stopped.set()
        try:
            self.finish()
        except BaseException:
            if not kind:
                raise
        finally:
            self._stopped.set()
            self._http.close()

    def finish(self) -> list[Talk]:
        """Waits until everybody has come and gone; their talks.

        Raises what a user met, TimeoutError when nothing happens any more.
        """
        while any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(timeout=0.1)
            if time.monotonic() - self._alive > PATIENCE:
                self._stopped.set()
                raise TimeoutError(
                    f"waited {PATIENCE:g} s for the server to answer users; {len(self.talks)} had finished"
                )
        if self._errors:
            raise RuntimeError(f"a user's request failed: {self._errors[0]}") from self._errors[0]
        return self.talks

    def _come(self) -> None:
        """One seat: user after user, until there are no more."""
        while not self._closed.is_set() and not self._stopped.is_set():
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            try:
                if talk := self._talk(number):
                    self.talks.append(talk)
            except Exception as error:
                self._errors.append(error)
                self._stopped.set()

    def _talk(self, number: int) -> Talk | None:
        """One conversation from greeting to rating; None when it was stopped."""
        world, seed = SmallTalk(), conversation_seed(10_000 + self._seed, number)
        messages, _ = world.reset(seed=seed)
        user, total, votes, requests = f"user-{number}", 0.0, 0, 2
        chat = self._post("/v1/chats", user=user, consent=CONSENT)["id"]
        while not world.finished:
            if self._stopped.is_set():
                return None
            request = {
                "model": "assigned",
                "chat_id": chat,
                "messages": messages,
                "user": user,
                "seed": (seed + len(messages)) % 2**63,
            }
            answer = self._post("/v1/chat/completions", **request)
            messages, reward, _, _, info = world.step(answer["choices"][0]["message"]["content"])
            total, requests = total + reward, requests + 1
            if "vote" in info:
                self._post("/v1/feedback", completion_id=answer["id"], vote=info["vote"])
                votes, requests = votes + 1, requests + 1
        self._post(f"/v1/chats/{chat}/ratings", quality=1 + info["hidden"]["mood"])
        return Talk(chat, total, votes, requests)

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        self._alive = time.monotonic()
        if answer.is_error:
            raise RuntimeError(f"POST {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()
