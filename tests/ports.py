"""Ports for servers that are told theirs by number."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

# Below those that the kernel gives to connections and to whoever asks for any port (32768 and above), and
# above those of Ray's workers: nobody takes one between this answer and the start of the server.
FIRST, LAST = 20_000, 32_000
_ours: list[IO[str]] = []  # locks, held until this process ends


def free_port() -> int:
    """A free one, which no other process of tests is given as long as this one lives."""
    locks = Path(tempfile.gettempdir()) / f"rl_dialog_test_ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    numbers = random.Random()  # of its own: each test begins with the same seed
    while True:
        port = numbers.randrange(FIRST, LAST)
        lock = (locks / str(port)).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as place:
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                place.bind(("", port))
        except OSError:
            lock.close()
            continue
        _ours.append(lock)
        return port
