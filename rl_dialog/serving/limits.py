"""What a client may ask of a server: requests per minute and bytes per request."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rl_dialog.serving.protocol import ApiError

Knows = Callable[[Request], Awaitable[Any]]
Refuse = Callable[[Request, Any], Awaitable[Response]]


class RateLimit:
    """A token bucket per API key: `per_minute` requests at once, refilled evenly."""

    KEYS = 10_000  # buckets kept; the one that was used longest ago goes first

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # key -> (tokens left, when that was so)

    def take(self, key: str, per_minute: int) -> float:
        """Takes a request out of the bucket: 0, or the seconds to wait when it is empty."""
        now = self._clock()
        left, since = self._buckets.pop(key, (float(per_minute), now))
        left = min(per_minute, left + (now - since) * per_minute / 60)
        wait = 0.0 if left >= 1 else (1 - left) * 60 / per_minute
        self._buckets[key] = (left if wait else left - 1, now)
        if len(self._buckets) > self.KEYS:
            del self._buckets[next(iter(self._buckets))]
        return math.ceil(wait)


class BodyLimit:
    """ASGI middleware: reading a body of more than `most` bytes ends in 413, however it is sent."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        too_long = announced.isdigit() and int(announced[:20]) > self.most
        read = 0

        async def limited() -> dict[str, Any]:
            nonlocal read
            message = {} if too_long else await receive()
            read += len(message.get("body", b""))
            if too_long or read > self.most:
                raise HTTPException(413, f"expected at most {self.most} bytes in a request")
            return message

        await self.app(scope, limited if scope["type"] == "http" else receive, send)


class KeyBeforeBody:
    """ASGI middleware: a request with a body is asked who sends it before any of the body is read. FastAPI
    would read it first.

    `knows` gets the request and raises ApiError for strangers; `refuse` makes the response of that.
    """

    def __init__(self, app: Any, knows: Knows, refuse: Refuse) -> None:
        self.app, self.knows, self.refuse = app, knows, refuse

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
            request = Request(scope)
            try:
                await self.knows(request)
            except ApiError as error:
                await (await self.refuse(request, error))(scope, receive, send)
                return
        await self.app(scope, receive, send)
