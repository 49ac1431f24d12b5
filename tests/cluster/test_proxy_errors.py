"""What Ray Serve's proxies say themselves, in the form that clients know."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rl_dialog.cluster.serve import ProxyErrors


def told(status: int | None, kind: bytes, body: bytes, *more: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """(status, body) that a client gets of an application that answers so; of status None nothing comes."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if status is None:
            return
        headers = [(b"content-type", kind), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    got: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        got.append(message)

    asyncio.run(ProxyErrors(application)({"type": "http"}, None, send))
    return got[0]["status"], b"".join(message.get("body", b"") for message in got)


@pytest.mark.parametrize("status", [None, 404, 408, 500, 503])
def test_what_serve_says_is_a_reason_to_try_again(status: int | None) -> None:
    got, body = told(status, b"text/plain", b"Request 7 timed out after 330.0s.")
    assert got == 503 and json.loads(body)["error"]["code"] == "replica_failed"


@pytest.mark.parametrize("status", [200, 404, 408, 500])
def test_what_a_replica_says_stays(status: int) -> None:
    assert told(status, b"application/json", b'{"a": 1}') == (status, b'{"a": 1}')
    if status < 400:
        assert told(status, b"text/html", b"<html>") == (status, b"<html>")
    assert told(404, b"text/plain", b"Not Found", (b"content-length", b"9")) == (404, b"Not Found")
