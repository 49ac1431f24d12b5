"""The labelling page from a thread: for an actor, and for a process that serves the page alone."""

from __future__ import annotations

from typing import Any

from rl_dialog.errors import UserError
from rl_dialog.web_server import WebServer, listening


class PageServer(WebServer):
    """The page, until `close`. Raises UserError for an address that is not free or not this machine's."""

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """port 0: any free one."""
        super().__init__(app, listening(host, port))

    def step(self) -> dict[str, Any]:
        """As a role of a run: where it serves. Raises UserError where it does not any more."""
        if not self.alive():
            raise UserError(f"the page at {self.url} ended by itself")
        return {"url": self.url}

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
