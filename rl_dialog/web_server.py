"""A web server in a thread, for a process that has other things to do."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn

from rl_dialog.errors import UserError


def listening(host: str, port: int) -> socket.socket:
    """A socket at the address (port 0: any free one). Raises UserError where it is not free or not this
    machine's."""
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        place.close()
        address = f"{host}:{port}: {error}"
        raise UserError(
            f"expected an address of this machine with a free port, got {address}; --port names another"
        ) from None
    return place


def url_of(host: str, port: int) -> str:
    """The address as browsers take it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WebServer:
    """Serves an application from a thread until `close`. `url` is where."""

    def __init__(self, app: Any, place: socket.socket, *, drain: float = 5.0) -> None:
        """place: what `listening` returned. drain: seconds that running requests have at the end."""
        self._place, self._drain = place, drain
        self.url = url_of(*place.getsockname()[:2])
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(drain))
        )
        # In the main thread it would end the process by the signal it got.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [place]}, name=self.url, daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.close()
                raise UserError(f"the page at {self.url} did not start within 30 s; the log has the reason")
            time.sleep(0.01)

    def alive(self) -> bool:
        """Does it still serve?"""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends it, once its running requests are answered."""
        self._server.should_exit = True
        self._thread.join(2 * self._drain + 5)
        self._place.close()
