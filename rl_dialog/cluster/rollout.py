"""Conversations on many workers: actors that each hold a player and step their share of the episodes in one
batch.

What an episode looks like depends on its number and the seed alone, so any number of workers gives the same
episodes, and one that a killed worker had begun is played again by its successor.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import ray
import torch

from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Episode, play_episodes
from rl_dialog.evaluation.generation import Decoding, load_for_decoding
from rl_dialog.models.checkpoint import resolve

CHUNK = (
    64  # episodes a worker plays at a time: enough for a full batch, few enough that all workers end together
)
STALLED = 600.0  # seconds without a finished chunk after which the rollouts are given up

Player = Callable[..., Sequence[Any]]  # (episode numbers, *what play_chunks passes on) -> what became of each


@ray.remote(max_restarts=2, max_task_retries=2)
class Worker:
    """Holds a player; a restarted worker makes it again."""

    def __init__(self, make_player: Callable[[], Player], threads: int) -> None:
        torch.set_num_threads(threads)
        self.player = make_player()

    def play(self, episodes: Sequence[int], *arguments: Any) -> Sequence[Any]:
        """What the player returns."""
        return self.player(episodes, *arguments)


class Workers:
    """`num_workers` persistent actors with a player each, as a context manager. Uses the Ray of this process,
    or a local one that ends with it."""

    def __init__(
        self,
        make_player: Callable[[], Player],
        num_workers: int,
        *,
        cpus_per_worker: float = 1.0,
        address: str | None = None,
    ) -> None:
        if num_workers < 1:
            raise UserError(f"expected at least one rollout worker, got {num_workers}")
        self.make_player, self.num_workers, self.cpus, self.address = (
            make_player,
            num_workers,
            cpus_per_worker,
            address,
        )
        self.workers: list[Any] = []
        self.started = False

    def __enter__(self) -> Self:
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS") or "local"
            local = (
                {"num_cpus": max(self.num_workers, os.cpu_count() or 1), "include_dashboard": False}
                if address == "local"
                else {}
            )
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
            self.started = True
        actor = Worker.options(num_cpus=self.cpus)
        self.workers = [
            actor.remote(self.make_player, max(1, int(self.cpus))) for _ in range(self.num_workers)
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self.workers:
            ray.kill(worker)
        if self.started:
            ray.shutdown()

    def play_chunks(
        self, chunks: Sequence[Sequence[int]], *arguments: Any, stalled: float = STALLED
    ) -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
        """Each chunk of episode numbers with what became of them, in the order in which they are done.

        Raises TimeoutError when no worker finishes anything for `stalled` seconds, and what a player raised.
        """
        waiting = list(reversed(chunks))
        running: dict[Any, tuple[Any, Sequence[int]]] = {}
        free, done, last = list(self.workers), 0, time.monotonic()
        while waiting or running:
            while waiting and free:
                worker, chunk = free.pop(), waiting.pop()
                running[worker.play.remote(chunk, *arguments)] = worker, chunk
            ready, _ = ray.wait(list(running), timeout=5.0)
            if not ready and time.monotonic() - last > stalled:
                raise TimeoutError(
                    f"waited {stalled:.0f} s for {len(running)} rollout workers; {done} of {len(chunks)} "
                    "chunks are done"
                )
            for result in ready:
                worker, chunk = running.pop(result)
                free.append(worker)
                yield chunk, _result(result)
                done, last = done + 1, time.monotonic()


class Rollouts(Workers):
    """Workers that play a language model's checkpoint in a text environment."""

    def __init__(
        self,
        make_env: Callable[[], Any],
        num_workers: int,
        *,
        cpus_per_worker: float = 1.0,
        address: str | None = None,
    ) -> None:
        super().__init__(
            lambda: _CheckpointPlayer(make_env), num_workers, cpus_per_worker=cpus_per_worker, address=address
        )

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
        found: dict[int, Episode] = {}
        for _, played in self.play_chunks(
            split(episodes, size), str(checkpoint), beta, decoding, seed, batch_size, stalled=stalled
        ):
            found |= {episode.index: episode for episode in played}
        return [found[index] for index in episodes]


class _CheckpointPlayer:
    """Holds one policy at a time."""

    def __init__(self, make_env: Callable[[], Any]) -> None:
        self.make_env, self.loaded, self.policy, self.tokenizer = make_env, None, None, None

    def __call__(
        self,
        episodes: Sequence[int],
        checkpoint: str,
        beta: float | None,
        decoding: Decoding,
        seed: int,
        batch_size: int,
    ) -> list[Episode]:
        if self.loaded != (checkpoint, beta):
            self.policy, self.tokenizer = (
                load_for_decoding(checkpoint, beta=beta),
                load_tokenizer(resolve(checkpoint)),
            )
            self.loaded = checkpoint, beta
        return play_episodes(
            self.policy, self.tokenizer, self.make_env, episodes, decoding, seed=seed, batch_size=batch_size
        )


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
    chunks = split(episodes, size)
    with (
        Workers(make_player, num_workers, address=address) if num_workers else nullcontext(make_player())
    ) as players:
        done = (
            players.play_chunks(chunks, *arguments)
            if num_workers
            else ((chunk, players(chunk, *arguments)) for chunk in chunks)
        )
        finished: dict[int, Sequence[Any]] = {}
        following = iter(chunks)
        chunk = next(following, None)
        for played, result in done:
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
