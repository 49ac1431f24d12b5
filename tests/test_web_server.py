"""Where a web server listens, and what it leaves alone."""

import logging

import pytest

from rl_dialog.errors import UserError
from rl_dialog.web_server import WebServer, listening


def test_an_address_is_taken_before_its_server_is_ready():
    """Models take their time to load; a server that is told the same port meanwhile must hear so, or one of
    the two would be ready where nobody can reach it."""
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"a free port, got 127.0.0.1:{port}"):
            listening("127.0.0.1", port)
    listening("127.0.0.1", port).close()


def test_what_the_process_logs_to_stays_open():
    class Kept(logging.StreamHandler):
        closed = False

        def close(self):
            self.closed = True
            super().close()

    async def app(scope, receive, send):
        pass

    handler = Kept()
    WebServer(app, listening("127.0.0.1", 0)).close()
    assert not handler.closed
