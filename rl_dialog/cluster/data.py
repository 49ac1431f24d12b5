"""What prepare's passes over the logs share: a Ray to run on, datasets of one task per table, and the errors
of workers.

    pass 1   files -> read (tasks) -> score and split (actors) -> chunks of scored dialogs on disk, a row of
             figures each                                                                         (scoring.py)
    then     the figures together: statistics, and the key that the splits go by                   (scored.py)
    pass 2   plan of shards -> tokenise (actors, a tokenizer each) -> finished shards on disk      (shards.py)

The driver sees numbers, never texts. Every chunk is named by where it came from (group of files, position in
it), and pass 2 cuts each split's chunks, in that order, into shards of equal size: so the shards do not
depend on how many workers there were or who finished first. Files are read and written by the workers: on
several machines the logs and the output must lie on storage that all of them mount.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from rl_dialog.cluster.waiting import told_what_is_awaited
from rl_dialog.data.tokenize import TemplateError
from rl_dialog.errors import UserError

CHUNK_BYTES = 4 << 20  # what travels between two stages at a time
STARTS = 3  # attempts at a Ray of our own
TOO_SLOW = "timed out during startup"  # what Ray says of a node that took longer than it waits
OBJECT_STORE_BYTES = 256 << 20  # of a Ray that we start: only a few chunks are ever under way


@contextmanager
def connect(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """A Ray to run on: the one this process already uses, else the cluster at `address` or RAY_ADDRESS, else
    a local one that ends with the block.

    Raises UserError for one that does not start or cannot be joined.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    local = (
        {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        if address == "local"
        else {}
    )
    os.environ.setdefault(
        "RAY_BACKEND_LOG_LEVEL", "fatal"
    )  # Ray's C++ side warns about the arguments of Ray Data's own actors
    try:
        if address.rpartition(":")[2].isdigit():
            _answers(address)
        _start(address, local)
    except Exception as error:
        where = (
            "Ray did not start on this machine"
            if local
            else f"expected a running Ray at {address}, could not join it"
        )
        reason = " ".join(str(error).split()) or type(error).__name__
        if "InvalidAuthToken" in str(error.__cause__):
            reason += ": it wants a token, so RAY_AUTH_MODE=token and its file ~/.ray/auth_token are needed"
        raise UserError(f"{where}: {reason[:500]} (RL_DIALOG_DEBUG=1 shows all that it said)") from error
    try:
        with told_what_is_awaited():
            yield
    finally:
        ray.shutdown()


def _start(address: str, local: dict[str, Any]) -> None:
    """Ray gives a node that it starts 30 s, which a busy machine may exceed; what is left of a start that
    took longer ends with this process."""
    for left in reversed(range(STARTS if local else 1)):
        try:
            with _termination_handled_as_before(), _native_stderr_held():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
            return
        except Exception as error:
            if TOO_SLOW not in str(error):
                raise
            if not left:
                raise UserError(
                    f"not within {30 * STARTS} s, in {STARTS} attempts: the machine is too busy; try again "
                    "when less runs on it, or join a Ray that runs (--address)"
                ) from error
            print("Ray did not start within 30 s: once more", file=sys.stderr, flush=True)


def _answers(address: str) -> None:
    """Raises OSError where nothing listens at HOST:PORT: Ray itself would try for minutes without a word."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def _termination_handled_as_before() -> Iterator[None]:
    """Ray puts a handler of its own, which ends the process at once, in the place of one that would save what
    is learned. Where there was none Ray's stays: it shuts Ray down."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _native_stderr_held() -> Iterator[None]:
    """Holds back what Ray's C++ side writes to stderr while it starts (the log level it found); shown with
    RL_DIALOG_DEBUG if the start fails."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            if os.environ.get("RL_DIALOG_DEBUG"):
                held.seek(0)
                os.write(shown, held.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)


def dataset(tables: list[pa.Table]) -> ray.data.Dataset:
    """A dataset with one block, so one task, per table; small blocks keep memory flat."""
    dataset = ray.data.from_arrow(tables)
    context = dataset.context
    context.target_max_block_size = CHUNK_BYTES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = (
        True  # else what a worker raised arrives as text inside a traceback
    )
    return dataset


def stream_tables(dataset: ray.data.Dataset) -> Iterator[pa.Table]:
    """The blocks as they are finished."""
    return iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))


def rows_of(tables: Iterable[pa.Table], *, numpy: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows one by one; the columns in `numpy` as flat arrays, copied so that they do not hold Ray's
    shared memory."""
    for table in tables:
        for batch in table.to_batches():
            plain = batch.drop_columns(list(numpy)).to_pylist() if numpy else batch.to_pylist()
            for i, row in enumerate(plain):
                yield row | {name: batch.column(name)[i].values.to_numpy().copy() for name in numpy}


def pool(concurrency: int | None, work: int, *, kind: str = "CPU") -> ray.data.ActorPoolStrategy:
    """Actors: one per CPU (or GPU), not more than `concurrency` or than there is work for."""
    most = int(ray.cluster_resources().get(kind, 1))
    return ray.data.ActorPoolStrategy(size=max(1, min(concurrency or most, most, work)))


def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


@contextmanager
def errors_of_workers() -> Iterator[None]:
    """What a worker raised, as it raised it: Ray's wrappers and logs hold tracebacks of Ray's own, and a user
    can only fix the cause."""
    logger = logging.getLogger(ray.data.__name__)  # importing it, which `import ray` does not, sets its level
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
        cause: BaseException | None = error
        while cause is not None and not _fixable(cause):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None:
            raise
        message = (
            str(cause).partition("Failed to apply UDF transform")[0].rstrip()
        )  # Ray's advice on retries follows
        raise (type(cause)(message) if type(cause) in (UserError, TemplateError) else cause) from None
    finally:
        logger.setLevel(level)


def _fixable(error: BaseException) -> bool:
    wrapped = isinstance(error, ray.exceptions.RayError | ray.data.exceptions.SystemException)
    return isinstance(error, UserError | OSError) and not wrapped


def peak_kib() -> int:
    """This process's peak resident memory, in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak
