"""A web server in a thread, for a process that has other things to do.

Whoever connects has to send a request in time, and to read the answer: uvicorn itself waits for ever.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rl_dialog.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts that name this machine
# Who asks for another protocol, as Java's client does for HTTP/2, may be answered in this one (RFC 9110).
# uvicorn's parser would skip the body and hear nothing more of this connection.
UPGRADE = re.compile(rb"(\A|\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
BUT_WEBSOCKET = re.compile(UPGRADE.pattern + rb"(?![ \t]*:[ \t]*websocket[ \t]*(\r\n|\Z))", re.IGNORECASE)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at the address (port 0: any free one). Raises UserError where it is not free or
    not this machine's.

    It listens at once: an address that is only bound is given to a second server, and whichever listens later
    would hear nothing, and say that it is ready. Who connects before the server is ready waits.
    """
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
        place.listen()
    except (OSError, OverflowError) as error:
        place.close()
        address = f"{host}:{port}: {error}"
        raise UserError(
            f"expected an address of this machine with a free port, got {address}; --port names another"
        ) from None
    return place


def url_of(host: str, port: int) -> str:
    """The address as browsers take it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True)
class Patience:
    """How long a server waits for a request, and for how many at a time."""

    head: float = 10.0  # seconds from the connection, or a later request's first byte, to the last header
    body: float = 30.0  # seconds from there to the end of the body
    answer: float = 30.0  # seconds in which a client takes something of an answer that waits for it
    connections: int = 1000
    per_address: int = 250


class PatientProtocol(AutoHTTPProtocol):
    """uvicorn's HTTP. A timer runs while the server waits for the client. More bytes do not set it back."""

    patience: Patience
    other_protocol: re.Pattern[bytes]  # the header that is not passed on
    open_from: Counter[str]  # connections by address

    timer: asyncio.TimerHandle | None = None
    waits_for = ""  # the part of a request that the timer is about; "" while the client waits
    look: asyncio.TimerHandle | None = None  # the next one at what the client takes
    full = False  # its part of the answer waits here: more than the connection holds
    stuck = False  # so it was at the last look, and nothing was taken since

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.open_from[self.address] += 1
        many = len(self.connections) > self.patience.connections
        if many or self.open_from[self.address] > self.patience.per_address:
            self._refuse("503 Service Unavailable")
            return
        self._wait_for("head")
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self._end_timers()
        self._count_out()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._between():
            head, end, rest = data.partition(b"\r\n\r\n")
            data = self.other_protocol.sub(rb"\1x-upgrade", head) + end + rest
        super().data_received(data)
        if (successor := self.transport.get_protocol()) is not self:
            self._hand_over(successor)
            return
        if self.transport.is_closing():
            return
        self._wait_for("head" if self._between() else "body" if self.cycle.more_body else "")

    def _hand_over(self, websocket: asyncio.BaseProtocol) -> None:
        """The connection is a WebSocket from here on, which uvicorn tells when it is lost."""
        self._end_timers()
        lost = websocket.connection_lost

        def connection_lost(error: Exception | None) -> None:
            self._count_out()
            lost(error)

        websocket.connection_lost = connection_lost

    def _end_timers(self) -> None:
        self._wait_for("")
        if self.look is not None:
            self.look.cancel()

    def _count_out(self) -> None:
        self.open_from[self.address] -= 1
        if not self.open_from[self.address]:
            del self.open_from[self.address]

    def _between(self) -> bool:
        """Is the connection between two requests?"""
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = self.stuck = False

    def _look(self) -> None:
        """Ends a connection whose client took nothing from one look to the next. One that was closed is
        still there until its client has taken all."""
        stuck = self.full or self.transport.is_closing()
        if stuck and self.stuck:
            self.transport.abort()
            return
        self.stuck = stuck
        self.look = self.loop.call_later(self.patience.answer, self._look)

    def _wait_for(self, part: str) -> None:
        if part == self.waits_for:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.waits_for, self.timer = part, None
        if part:
            self.timer = self.loop.call_later(getattr(self.patience, part), self._late)

    def _late(self) -> None:
        """The client had its time."""
        if self.cycle is None or not self.cycle.response_started:
            self._refuse("408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: str) -> None:
        head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()


def protocol_with(patience: Patience, *, websockets: bool = False) -> type[PatientProtocol]:
    """For the connections of one server, which keep to `patience`; others are closed. With `websockets` they
    may go on as a WebSocket: then they are counted, and how long they wait is that protocol's affair."""
    other = BUT_WEBSOCKET if websockets else UPGRADE
    own = {"patience": patience, "other_protocol": other, "open_from": Counter()}
    return type("PatientProtocol", (PatientProtocol,), own)


class WebServer:
    """Serves an application from a thread until `close`. `url` is where."""

    def __init__(
        self,
        app: Any,
        place: socket.socket,
        *,
        drain: float = 5.0,
        patience: Patience | None = None,
        websocket_bytes: int = 0,
    ) -> None:
        """place: what `listening` returned. drain: seconds that running requests have at the end.
        websocket_bytes: the largest message of a WebSocket; 0: such connections are answered as HTTP."""
        self._place, self._drain = place, drain
        self.url = url_of(*place.getsockname()[:2])
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol_with(patience or Patience(), websockets=websocket_bytes > 0),
                ws="auto" if websocket_bytes else "none",
                ws_max_size=websocket_bytes,
                log_config=None,  # uvicorn's closes what the process around it logs to
                log_level="warning",
                timeout_graceful_shutdown=int(drain),
            )
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
