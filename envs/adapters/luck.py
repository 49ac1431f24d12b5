"""Chance of one's own for code that draws from the generators of the process."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np

LOCK = threading.RLock()  # one at a time has the generators of the process


class _Nowhere(io.TextIOBase):
    """Swallows what games print: the last line of a command's output is its result."""

    def write(self, text: str) -> int:
        return len(text)


NOWHERE = _Nowhere()


@contextlib.contextmanager
def own_luck(number: int, *, with_numpy: bool = False) -> Iterator[None]:
    """Inside, `random` (and numpy's generator where asked, which costs 150 microseconds) draws what follows
    from `number`, and nothing is printed; afterwards all is as it was. Threads take turns."""
    with LOCK:
        state, out = random.getstate(), sys.stdout
        numbers = np.random.get_state() if with_numpy else None
        random.seed(number)
        if with_numpy:
            np.random.seed(number % 2**32)
        sys.stdout = NOWHERE
        try:
            yield
        finally:
            sys.stdout = out
            random.setstate(state)
            if numbers is not None:
                np.random.set_state(numbers)
