"""The six endpoints over HTTP: form-encoded POST, JSON reply; an error is {"error": what was expected}."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from envs.visual_dialogue.bots import ENDPOINTS, post
from rl_dialog.errors import UserError

LONGEST_BODY = 1 << 20  # bytes
SECONDS = 30.0  # in which a request has to come in
FORM = "application/x-www-form-urlencoded"


class _Request(BaseHTTPRequestHandler):
    timeout = SECONDS
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "visual_dialogue", ""

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > LONGEST_BODY:
            self.close_connection = True  # the body is not read
            expected = f"expected a Content-Length of at most {LONGEST_BODY} bytes, got {length[:40]!r}"
            return self._say(413 if length.isdigit() else 411, {"error": expected})
        body = self.rfile.read(int(length))
        if path not in ENDPOINTS:
            return self._say(404, {"error": f"expected one of {', '.join(ENDPOINTS)}, got {path[:80]!r}"})
        if self.headers.get_content_type() != FORM:
            return self._say(
                415, {"error": f"expected a form, {FORM}, got {self.headers.get_content_type()}"}
            )
        try:
            form = dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=20))
            return self._say(200, post(path, form))
        except UserError as error:
            return self._say(400, {"error": str(error)})
        except ValueError as error:  # no UTF-8, or too many fields
            return self._say(400, {"error": f"expected a form of UTF-8 texts, got {error}"})

    def do_GET(self) -> None:
        self._say(405, {"error": f"expected POST to one of {', '.join(ENDPOINTS)}, got GET"})

    def _say(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request would drown what matters."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def make_server(host: str, port: int) -> ThreadingHTTPServer:
    """A server that listens; `serve_forever` answers, `shutdown` and `server_close` end it. Port 0 is any
    free one, `server_port` says which. Raises UserError where it cannot listen."""
    try:
        return _Server((host, port), _Request)
    except (OSError, OverflowError) as error:
        raise UserError(f"expected a free address to listen at, got {host}:{port}: {error}") from error


def read_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or a port of this machine. Raises UserError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"expected HOST:PORT such as 127.0.0.1:5000, got {text!r}")
    return host or "127.0.0.1", int(port)
