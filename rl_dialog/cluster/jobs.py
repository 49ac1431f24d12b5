"""Many calls on one Ray: each in a process of one core (and `gpus` GPUs), as many at a time as there are
cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

WAITING = 60.0  # seconds without a finished call after which the caller hears that; then twice as long


def each(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    waiting: Callable[[int], None],
    after: Sequence[int | None] = (),
    retries: int = 2,
    gpus: float = 0,
) -> Iterator[tuple[int, Any]]:
    """Calls `work(item)` on every item and yields (position, what it returned) in the order of finishing. Ray
    must be running.

    `after`: for each item the position of an earlier one, or None, on whose end it waits; what that one
    raised is yielded for it too. A process that dies is replaced up to `retries` times; what `work` raises,
    or the last death, is yielded in place of a value, so that one item does not stop the others.
    `waiting(unfinished)` is called when nothing has finished for `WAITING` seconds, then for twice as long,
    and so on.
    """
    remote, shared = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=retries)(_call), ray.put(work)
    calls: list[Any] = []
    for item, first in zip(items, after or [None] * len(items), strict=True):
        calls.append(remote.remote(shared, item, None if first is None else calls[first]))
    running = {call: position for position, call in enumerate(calls)}
    patience = WAITING
    while running:
        ready, _ = ray.wait(list(running), timeout=patience)
        if not ready:
            waiting(len(running))
        patience = WAITING if ready else 2 * patience
        for reference in ready:
            yield running.pop(reference), _result(reference)


def _call(work: Callable[[Any], Any], item: Any, _: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    return work(item)


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return error.cause or error
    except ray.exceptions.RayError as error:
        return error
