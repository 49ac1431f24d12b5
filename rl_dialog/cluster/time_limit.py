"""How long a worker may spend on one record: what takes longer goes to quarantine instead of holding up the
run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TookTooLong(BaseException):
    """Not an Exception, or a reward that suppresses all of them would go on for ever."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLong inside the block after so many seconds of the clock; 0 is no limit.

    By a signal, which only a main thread gets (Ray runs a worker's tasks there), and between two steps of
    Python: one call of a library that takes an hour is not interrupted.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def too_long(seconds: float, what: str) -> str:
    """The reason in quarantine."""
    return (
        f"expected a record that is {what} within {seconds:g} s, got one that takes longer: raise "
        "--record_seconds, or 0 for no limit"
    )
