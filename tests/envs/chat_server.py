"""A real HTTP server that answers chat completions as a test says: well, late, wrongly or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], Any]  # a request -> a text, or what `Raw` holds


class Raw:
    """What a server sends instead of a chat completion."""

    def __init__(self, body: str | bytes | Iterator[bytes], status: int = 200, **headers: str) -> None:
        self.body, self.status, self.headers = body, status, headers


class ChatServer:
    """`requests` are those for completions, `keys` the Authorization of each."""

    def __init__(self, script: Script, models: Any) -> None:
        self.script, self.models = script, models
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""


@contextmanager
def chat_server(script: Script, models: Any = ("people",)) -> Iterator[ChatServer]:
    """Runs until the block ends."""
    told = ChatServer(script, models)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            listed = told.models
            listed = {"data": [{"id": name} for name in listed]} if isinstance(listed, tuple) else listed
            self._send(Raw(json.dumps(listed)) if self.path == "/v1/models" else Raw("no", 404))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            told.requests.append(request)
            told.keys.append(self.headers.get("authorization"))
            said = told.script(request) if self.path == "/v1/chat/completions" else Raw("no", 404)
            if isinstance(said, str):
                message = {"role": "assistant", "content": said}
                said = Raw(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))
            self._send(said)

        def _send(self, said: Raw) -> None:
            try:
                pieces = [said.body] if isinstance(said.body, str | bytes) else said.body
                self.send_response(said.status)
                for name, value in said.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Connection", "close")
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece.encode() if isinstance(piece, str) else piece)
                    self.wfile.flush()
            except OSError:  # who asked did not wait
                pass
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield told
        finally:
            server.shutdown()
            thread.join(120)
