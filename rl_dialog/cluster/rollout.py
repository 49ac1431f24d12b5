"""Conversations on many workers: actors that each hold a player and step their share of the episodes in one
batch.

What an episode looks like depends on its number and the seed alone, so any number of workers gives the same
episodes, and one that a killed worker had begun is played again by whoever is free.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
import torch

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import wants_gpus
from rl_dialog.cluster.waiting import cpus_of_cluster
from rl_dialog.errors import UserError
from rl_dialog.models.device import named_device

if TYPE_CHECKING:
    from rl_dialog.evaluation.episodes import Episode, Watch
    from rl_dialog.evaluation.generation import Decoding

CHUNK = (
    64  # episodes a worker plays at a time: enough for a full batch, few enough that all workers end together
)
STALLED = 600.0  # seconds without a finished chunk after which the rollouts are given up
LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)  # the worker, or what it had returned
STARTING = -1  # what a worker does before it plays; else the first episode of its chunk

DEATHS = 3  # of the workers that played one chunk, after which it is taken for what kills them

Player = Callable[..., Sequence[Any]]  # (episode numbers, *what play_chunks passes on) -> what became of each


@ray.remote
class Worker:
    """Holds a player, once it has one."""

    def start(self, make_player: Callable[[], Player], threads: int) -> None:
        torch.set_num_threads(threads)
        self.player = make_player()

    def play(self, episodes: Sequence[int], *arguments: Any) -> Sequence[Any]:
        """What the player returns."""
        return self.player(episodes, *arguments)


class Workers:
    """`num_workers` persistent actors with a player each, as a context manager. Uses the Ray of this process,
    or a local one that ends with it.

    Whoever has a place on the cluster plays: a worker that comes late joins then, and where one dies (or its
    node goes) its chunk goes to the next that is free, and a successor joins when it finds a place.
    """

    def __init__(
        self,
        make_player: Callable[[], Player],
        num_workers: int,
        *,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        address: str | None = None,
    ) -> None:
        if num_workers < 1:
            raise UserError(f"expected at least one rollout worker, got {num_workers}")
        self.make_player, self.num_workers, self.address = make_player, num_workers, address
        self.cpus, self.gpus = cpus_per_worker, gpus_per_worker
        self.free: list[Any] = []
        self.starting: dict[Any, Any] = {}  # what each worker that is not free yet is doing -> the worker
        self.leaving: dict[Any, Any] = {}  # likewise, of those that still play what nobody waits for
        self.deaths: Counter[int] = Counter()  # by the first episode of the chunk; STARTING
        self.resources = ExitStack()

    def __enter__(self) -> Self:
        cpus = max(self.num_workers, os.cpu_count() or 1)
        self.resources.enter_context(connect(self.address, num_cpus=cpus))
        for _ in range(self.num_workers):
            self._start_another()
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in (*self.free, *self.starting.values(), *self.leaving.values()):
            ray.kill(worker)
        self.resources.close()

    def play_chunks(
        self, chunks: Sequence[Sequence[int]], *arguments: Any, stalled: float = STALLED
    ) -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
        """Each chunk of episode numbers with what became of them, in the order in which they are done.

        Raises TimeoutError when no worker finishes anything for `stalled` seconds, UserError for a chunk that
        kills its workers, and what a player raised.
        """
        waiting, done, last = list(reversed(chunks)), 0, time.monotonic()
        running: dict[Any, tuple[Any, Sequence[int]]] = {}
        try:
            while waiting or running:
                while waiting and self.free:
                    worker, chunk = self.free.pop(), waiting.pop()
                    running[worker.play.remote(chunk, *arguments)] = worker, chunk
                ready, _ = ray.wait([*running, *self.starting, *self.leaving], timeout=5.0)
                if not ready and time.monotonic() - last > stalled:
                    raise TimeoutError(self._stalled(stalled, done, len(chunks)))
                for result in ready:
                    if result not in running:
                        self._join(result)
                        continue
                    worker, chunk = running.pop(result)
                    played = self._outcome(result, worker, chunk[0])
                    if played is None:
                        waiting.append(chunk)
                        continue
                    yield chunk, played
                    done, last = done + 1, time.monotonic()
        finally:  # who is left playing is free when it has finished
            self.leaving |= {result: worker for result, (worker, _) in running.items()}

    def _start_another(self) -> None:
        worker = Worker.options(num_cpus=self.cpus, num_gpus=self.gpus).remote()
        self.starting[worker.start.remote(self.make_player, max(1, int(self.cpus)))] = worker

    def _join(self, result: Any) -> None:
        if result in self.starting:
            self._outcome(result, self.starting.pop(result), STARTING)
            return
        worker = self.leaving.pop(result)
        try:
            ray.get(result)
        except LOST:
            ray.kill(worker)
            self._start_another()
            return
        except ray.exceptions.RayTaskError:
            pass  # nobody waits for it
        self.free.append(worker)

    def _outcome(self, result: Any, worker: Any, what: int) -> Any:
        """What the worker returned, which is free now; None where it died, and another is started.

        Raises UserError where that is the how-manieth death over the same, and what it raised.
        """
        try:
            outcome = _result(result)
        except LOST as error:
            ray.kill(worker)  # one that is out of reach may still run
            self.deaths[what] += 1
            if self.deaths[what] >= DEATHS:
                doing = "starting" if what == STARTING else f"playing the episodes from {what} on"
                reason = " ".join(str(error).split())[:500]
                raise UserError(f"{DEATHS} rollout workers died {doing}: {reason}") from error
            self._start_another()
            return None
        except Exception:
            if what == STARTING:
                ray.kill(worker)
            else:  # it has a player, which may do better with something else
                self.free.append(worker)
            raise
        self.free.append(worker)
        self.deaths.pop(what, None)
        return outcome

    def _stalled(self, seconds: float, done: int, chunks: int) -> str:
        counts = f"{self.num_workers} rollout workers ({len(self.starting)} of them not started)"
        return f"waited {seconds:.0f} s for {counts}; {done} of {chunks} chunks are done. {cpus_of_cluster()}"


class Rollouts(Workers):
    """Workers that play a language model's checkpoint in a text environment."""

    def __init__(
        self,
        make_env: Callable[[], Any],
        num_workers: int,
        *,
        cpus_per_worker: float = 1.0,
        use_gpu: bool = False,
        address: str | None = None,
    ) -> None:
        device = "auto" if use_gpu else "cpu"  # auto: the GPU that Ray gave the worker
        what = {"cpus_per_worker": cpus_per_worker, "gpus_per_worker": float(use_gpu), "address": address}
        super().__init__(lambda: CheckpointPlayer(make_env, device), num_workers, **what)

    def play(
        self,
        checkpoint: str | Path,
        episodes: Sequence[int],
        decoding: Decoding,
        *,
        seed: int = 0,
        beta: float | None = None,
        batch_size: int = 128,
        stalled: float = STALLED,
    ) -> list[Episode]:
        """The numbered episodes in the order given. Raises TimeoutError when no worker finishes anything for
        `stalled` seconds."""
        size = min(CHUNK, batch_size, -(-len(episodes) // self.num_workers))
        by_index: dict[int, Episode] = {}
        for _, played in self.play_chunks(
            split(episodes, size), str(checkpoint), beta, decoding, seed, batch_size, stalled=stalled
        ):
            by_index |= {episode.index: episode for episode in played}
        return [by_index[index] for index in episodes]


class CheckpointPlayer:
    """A language model's checkpoint in a text world; holds one policy at a time."""

    def __init__(self, make_env: Callable[[], Any], device: str, *, keep_caches: bool = False) -> None:
        """keep_caches: as `play_episodes` has it."""
        self.make_env, self.device, self.keep_caches = make_env, named_device(device), keep_caches
        self.loaded, self.policy, self.tokenizer = None, None, None

    def __call__(
        self,
        episodes: Sequence[int],
        checkpoint: str,
        beta: float | None,
        decoding: Decoding,
        seed: int,
        batch_size: int,
        drawn: Container[int] = (),
        watch: Watch | None = None,
    ) -> list[Episode]:
        # Here, because players of other worlds, in many processes, would import transformers for nothing.
        from rl_dialog.data.tokenize import load_tokenizer
        from rl_dialog.evaluation.episodes import play_episodes
        from rl_dialog.evaluation.generation import load_for_decoding
        from rl_dialog.models.checkpoint import resolve

        if self.loaded != (checkpoint, beta):
            self.policy, self.tokenizer = (
                load_for_decoding(checkpoint, beta=beta).to(self.device),
                load_tokenizer(resolve(checkpoint)),
            )
            self.loaded = checkpoint, beta
        how = {"seed": seed, "batch_size": batch_size, "keep_caches": self.keep_caches}
        shown = {"drawn": drawn, "watch": watch}
        return play_episodes(self.policy, self.tokenizer, self.make_env, episodes, decoding, **how, **shown)


def split(episodes: Sequence[int], size: int = CHUNK) -> list[list[int]]:
    """Chunks of `size`, the last one maybe smaller. Which episodes share a chunk does not depend on the
    number of workers."""
    return [list(episodes[start : start + size]) for start in range(0, len(episodes), size)]


def play_in_order(
    make_player: Callable[[], Player],
    episodes: Sequence[int],
    *arguments: Any,
    num_workers: int,
    size: int = CHUNK,
    address: str | None = None,
) -> Iterator[Any]:
    """What becomes of each episode, in their order, each as soon as those before it are done too; without
    workers this process plays."""
    with players(make_player, num_workers, address=address) as play:
        yield from play(episodes, *arguments, size=size)


@contextmanager
def players(
    make_player: Callable[[], Player],
    num_workers: int,
    *,
    device: str = "cpu",
    address: str | None = None,
) -> Iterator[Callable[..., Iterator[Any]]]:
    """`play(episodes, *arguments, size=CHUNK)`, as often as one likes with the same players: what becomes of
    each episode, in their order. With workers these are Ray actors, with a GPU each where `device` says so
    and the cluster has them; without this process plays."""
    if not num_workers:
        alone = make_player()
        yield lambda episodes, *arguments, size=CHUNK: (
            outcome for chunk in split(episodes, size) for outcome in alone(chunk, *arguments)
        )
        return
    with connect(address, num_cpus=max(num_workers, os.cpu_count() or 1)):
        gpus = float(device != "cpu" and wants_gpus(device, num_workers))
        with Workers(make_player, num_workers, gpus_per_worker=gpus, address=address) as workers:
            yield partial(_in_order, workers)


def _in_order(workers: Workers, episodes: Sequence[int], *arguments: Any, size: int = CHUNK) -> Iterator[Any]:
    chunks, finished = split(episodes, size), {}
    following = iter(chunks)
    chunk = next(following, None)
    for played, result in workers.play_chunks(chunks, *arguments):
        finished[played[0]] = result
        while chunk is not None and chunk[0] in finished:
            yield from finished.pop(chunk[0])
            chunk = next(following, None)


def _result(reference: Any) -> Sequence[Any]:
    """What a worker returned; raises the user's own error instead of Ray's wrapper around it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, UserError | OSError) else error
        raise cause from error
