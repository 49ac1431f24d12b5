"""A web server in a thread: for a process that has other things to do, such as an actor, and for one that serves the page alone."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn

from rl_dialog.errors import UserError


class PageServer:
    """Serves an application from a thread until `close`. `url` is where. Raises UserError for an address that is not free or not this machine's."""

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """port 0: any free one."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise UserError(f"expected an address of this machine with a free port, got {host}:{port}: {error}; --port names another") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name=f"page at {self.url}", daemon=True)
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

    def step(self) -> dict[str, Any]:
        """As a role of a run: where it serves. Raises UserError where it does not any more."""
        if not self.alive():
            raise UserError(f"the page at {self.url} ended by itself")
        return {"url": self.url}

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, once its running requests are answered."""
        self._server.should_exit = True
        self._thread.join(15)
        self._socket.close()
