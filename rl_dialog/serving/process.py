"""An engine in a process of its own, so that its steps do not wait for Python's lock behind the threads that
answer HTTP.

    server                                                 engine's process
    EngineProcess.submit  -- ("submit", number, Ask) -->   Engine.submit
    deliver(Piece)        <-- [(number, Piece)], State --  at once what begins or ends a reply, what comes
                                                           between every 20 ms

The two talk over a socket pair that nobody else can open. Where one side dies the other notices at once: the
engine's process ends with its server, and what an engine still had to answer ends with Closed.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakValueDictionary

import torch

from rl_dialog.errors import UserError
from rl_dialog.serving.batch import Ask
from rl_dialog.serving.engine import Closed, EngineStats, Piece, QueueFull, Refused, Ticket, load_engine

PAUSE = 0.02  # seconds between two messages of pieces that nobody waits for
BEAT = 0.5  # seconds between two States, at most
SILENCE = 30.0  # seconds without one after which the process counts as stuck


@dataclass(frozen=True)
class State:
    """How an engine was when it last told."""

    depth: int = 0
    running: int = 0
    healthy: bool = True
    stats: EngineStats = field(default_factory=EngineStats)


class EngineProcess:
    """Engine's face to a server: `submit` from any thread, `close` ends it. What an Engine refuses in
    `submit`, this one delivers.

    Raises UserError for a checkpoint that cannot be loaded or served, as `load_engine` does.
    """

    def __init__(
        self, place: str, *, threads: int = 0, died: Callable[[], None] | None = None, **options: Any
    ) -> None:
        """threads: of torch, 0 leaves it to torch; died: called in a thread when the process ends unasked,
        before requests hear of it; options: those of `load_engine`."""
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-c",
            "import gc; gc.disable(); from rl_dialog.serving.process import main;"  # a quarter sooner, as
            f"gc.freeze(); gc.enable(); main({theirs.fileno()})",  # pipelines/__init__.py tells
        ]
        with theirs:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self._sending, self._closing, self._died = threading.Lock(), False, died
        self._numbers = itertools.count()
        self._open: dict[int, _Request] = {}
        self._state, self._heard = State(), time.monotonic()
        try:
            self._connection.send((place, threads, options))
            told = self._connection.recv()
        except (EOFError, OSError):
            told = UserError(
                f"{place}: the process that was to load it ended with status {self._process.wait()}"
            )
        if isinstance(told, Exception):
            self._connection.close()
            self._process.wait()
            raise told
        self.method, self.context = told
        self._thread = threading.Thread(target=self._listen, name="engine's answers", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask, deliver: Callable[[Piece | Exception], None]) -> _Request:
        """Queues a request. `deliver` is called in a thread with every Piece, or with the exception that
        ended or refused the request (QueueFull, Refused, Closed). Raises Closed."""
        request = _Request(self, next(self._numbers), ask.choices, deliver)
        self._open[request.number] = request
        if self._closing or not self._send("submit", request.number, ask):
            self._open.pop(request.number, None)
            raise Closed("the engine is shutting down")
        return request

    def depth(self) -> int:
        """Requests that wait."""
        return self._state.depth

    def running(self) -> int:
        """Replies under way."""
        return self._state.running

    @property
    def stats(self) -> EngineStats:
        return self._state.stats

    def healthy(self) -> bool:
        """False once the process is gone, ending or silent, or its engine is not healthy."""
        return not self._closing and self._state.healthy and time.monotonic() - self._heard < SILENCE

    def close(self, *, drain: float = 0.0) -> None:
        """Takes no more requests, gives those it has `drain` seconds, ends the others with Closed and the
        process with them."""
        self._closing = True
        self._send("close", 0, drain)
        self._thread.join(timeout=drain + 60)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    def _send(self, *message: Any) -> bool:
        """Whether the process could still be told."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        try:
            while True:
                pieces, self._state = self._connection.recv()
                self._heard = time.monotonic()
                for number, what in pieces:
                    if request := self._open.get(number):
                        request.take(what)
        except (EOFError, OSError):
            pass
        finally:
            unasked, self._closing = not self._closing, True
            # First: a server that ends with its engine would else answer that it is shutting down, and go on
            # to do so to whoever comes until it has ended.
            if unasked and self._died:
                self._died()
            self._state = replace(self._state, depth=0, running=0)
            for request in list(self._open.values()):
                request.take(Closed("the model's process ended"))
            with self._sending:
                self._connection.close()
            self._process.wait()


class _Request:
    """A request on its way. `cancel` may be called from any thread, at any time."""

    def __init__(
        self, engine: EngineProcess, number: int, choices: int, deliver: Callable[[Piece | Exception], None]
    ) -> None:
        self.engine, self.number, self.deliver = engine, number, deliver
        self.open = choices  # that are not finished

    def cancel(self) -> None:
        if self.engine._open.pop(self.number, None):
            self.engine._send("cancel", self.number, None)

    def take(self, what: Piece | Exception) -> None:
        self.open = 0 if isinstance(what, Exception) else self.open - bool(what.finish)
        if not self.open:
            self.engine._open.pop(self.number, None)
        try:
            self.deliver(what)
        except Exception as error:
            logging.getLogger(__name__).warning(
                "a client could not take its tokens, its request is cancelled: %r", error
            )
            self.cancel()


# The engine's process.


class _Outbox:
    """What the engine's thread says, sent by a thread that does not keep it waiting: not by the wait for a
    server that is slow to read, and by taking Python's lock once for several steps of a small model."""

    def __init__(self, connection: Connection, engine: Any) -> None:
        self.connection, self.engine = connection, engine
        self._held: deque[tuple[int, Piece | Exception]] = deque()
        self._silent: set[int] = set()  # requests without a text yet
        self._rings, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def expect(self, number: int) -> None:
        """A request begins."""
        self._silent.add(number)

    def forget(self, number: int) -> None:
        self._silent.discard(number)

    def put(self, number: int, what: Piece | Exception) -> None:
        known = not isinstance(what, Exception) or isinstance(what, QueueFull | Refused | Closed)
        self._held.append(
            (number, what if known else RuntimeError(repr(what)))
        )  # others may not survive the way
        if isinstance(what, Exception) or what.finish or (what.text and number in self._silent):
            self._silent.discard(number)
            self._rings.set()

    def end(self) -> None:
        self._ends = True
        self._rings.set()
        self._thread.join(BEAT + 10)

    def _run(self) -> None:
        ends, engine, told = False, self.engine, 0.0
        while not ends:
            self._rings.wait(PAUSE if engine.running() else BEAT)
            self._rings.clear()
            ends = self._ends  # read before the last pieces are taken
            if not (self._held or ends or time.monotonic() - told >= BEAT):
                continue
            told = time.monotonic()
            state = State(engine.depth(), engine.running(), engine.healthy(), replace(engine.stats))
            try:
                self.connection.send(([self._held.popleft() for _ in range(len(self._held))], state))
            except OSError:  # the server is gone
                return


def _listen(connection: Connection, engine: Any, outbox: _Outbox, drains: queue.SimpleQueue[float]) -> None:
    """Does what the server says. Ends when it says so, and when it is gone."""
    tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()  # the engine forgets those that ended
    try:
        while True:
            kind, number, what = connection.recv()
            if kind == "close":
                drains.put(what)
            elif kind == "cancel" and (ticket := tickets.get(number)):
                ticket.cancel()
                outbox.forget(number)
            elif kind == "submit":
                outbox.expect(number)
                try:
                    tickets[number] = engine.submit(
                        what, lambda piece, number=number: outbox.put(number, piece)
                    )
                except (QueueFull, Refused, Closed) as error:
                    outbox.put(number, error)
    except (EOFError, OSError):
        drains.put(0.0)


def main(descriptor: int) -> None:
    """Loads what the server names and serves it until the server says to end, or is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process of a terminal: the server decides
    connection = Connection(descriptor)
    place, threads, options = connection.recv()
    if threads:
        torch.set_num_threads(threads)
    try:
        engine = load_engine(place, **options)
    except Exception as error:
        connection.send(error if isinstance(error, UserError) else UserError(f"{place}: {error!r}"))
        return
    connection.send((engine.method, engine.context))
    sys.setswitchinterval(
        0.0005
    )  # else each request that comes waits up to 5 ms until the engine's thread lets Python go
    outbox, drains = _Outbox(connection, engine), queue.SimpleQueue()
    threading.Thread(
        target=_listen, args=(connection, engine, outbox, drains), name="requests", daemon=True
    ).start()
    engine.close(drain=drains.get())
    outbox.end()
