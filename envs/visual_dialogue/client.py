"""The six endpoints of a server of visual dialogue, the published one or ours, by its URL."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from envs.visual_dialogue.bots import GREEDY, Entry, Post
from rl_dialog.errors import UserError

SECONDS = 30.0  # for one answer
LONGEST_ANSWER = 1 << 20  # bytes


class ServerFailed(UserError):
    """A server is not there, too slow, or answers what the protocol does not have."""


class HttpPost:
    """Sends forms to a server. Raises ServerFailed for anything but a JSON value within `seconds`, and
    UserError for what is no URL."""

    def __init__(self, url: str, *, seconds: float = SECONDS) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"server: expected a URL such as http://127.0.0.1:5000, got {url!r}")
        self.url, self.seconds = url.rstrip("/"), seconds

    def __call__(self, endpoint: str, form: Mapping[str, str]) -> Any:
        body = urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(self.url + endpoint, data=body, method="POST")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are near
        try:
            with opener.open(request, timeout=self.seconds) as response:
                return json.loads(self._read(response, endpoint))
        except urllib.error.HTTPError as error:
            with error:
                told = error.read(400).decode("utf-8", "replace").strip()
            raise self._failed(endpoint, f"status {error.code}: {told}") from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            reason = getattr(error, "reason", error)
            raise self._failed(endpoint, f"{type(error).__name__}: {reason}") from error

    def _read(self, response: Any, endpoint: str) -> bytes:
        """The body, before the deadline: a server that sends a byte now and then would never time out."""
        found, deadline = b"", time.monotonic() + self.seconds
        while piece := response.read1(1 << 16):
            found += piece
            if len(found) > LONGEST_ANSWER or time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} bytes and no end of the answer")
        return found

    def _failed(self, endpoint: str, got: str) -> ServerFailed:
        expected = f"an answer of {endpoint} within {self.seconds:g} s"
        return ServerFailed(
            f"server {self.url}: expected {expected}, got {got[:400]}. "
            "`python -m envs.visual_dialogue --serve 127.0.0.1:5000` starts one of scenes"
        )


class Bots:
    """The endpoints as methods, over any transport. Raises ServerFailed for answers of another shape."""

    def __init__(self, post: Post) -> None:
        self.post = post

    def step_rank(self, caption: str, features: Sequence[float], history: list[Entry]) -> tuple[str, float]:
        """The answer to the last question, and what the round changed in percentile."""
        return self._pair("/step_rank", caption, features, history)

    def step(self, caption: str, features: Sequence[float], history: list[Entry]) -> tuple[str, float]:
        """The answer to the last question, and by how much the round lowered the error."""
        return self._pair("/step", caption, features, history)

    def reward_rank(self, caption: str, features: Sequence[float], history: list[Entry]) -> float:
        """The percentile where the history is empty, else what the last round changed in it."""
        return self._number("/fetch_reward_rank", caption, features, history)

    def reward(self, caption: str, features: Sequence[float], history: list[Entry]) -> float:
        """The same of the error."""
        return self._number("/fetch_reward", caption, features, history)

    def answer(self, caption: str, features: Sequence[float], history: list[Entry]) -> str:
        """The answer to the last question."""
        return self._text("/fetch_a_bot_response", _form(history, caption, features))

    def question(self, caption: str, history: list[Entry]) -> str:
        """What the questioner would ask; it does not see the picture."""
        return self._text("/fetch_q_bot_response", _form(history, caption))

    def _pair(
        self, endpoint: str, caption: str, features: Sequence[float], history: list[Entry]
    ) -> tuple[str, float]:
        got = self.post(endpoint, _form(history, caption, features))
        if not (
            isinstance(got, list | tuple) and len(got) == 2 and isinstance(got[0], str) and _finite(got[1])
        ):
            raise ServerFailed(f"{endpoint}: expected [answer, number], got {str(got)[:200]}")
        return got[0], float(got[1])

    def _number(self, endpoint: str, caption: str, features: Sequence[float], history: list[Entry]) -> float:
        got = self.post(endpoint, _form(history, caption, features))
        if not _finite(got):
            raise ServerFailed(f"{endpoint}: expected a number, got {str(got)[:200]}")
        return float(got)

    def _text(self, endpoint: str, form: Mapping[str, str]) -> str:
        got = self.post(endpoint, form)
        if not isinstance(got, str):
            raise ServerFailed(f"{endpoint}: expected a text, got {str(got)[:200]}")
        return got


def _form(history: list[Entry], caption: str, features: Sequence[float] | None = None) -> dict[str, str]:
    form = {"history": json.dumps(history), "caption": caption, "generation_kwargs": json.dumps(GREEDY)}
    return form if features is None else form | {"img_features": json.dumps(list(features))}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
