"""Conversations on many workers: actors that each hold a policy and step their share of the episodes in one batch.

What an episode looks like depends on its number and the seed alone (evaluation/generation.py), so any number of workers gives the same episodes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.episodes import Episode, play_episodes
from rl_dialog.evaluation.generation import Decoding, load_for_decoding
from rl_dialog.models.checkpoint import resolve

CHUNK = 64  # episodes a worker plays at a time: enough for a full batch, few enough that all workers end together
STALLED = 600.0  # seconds without a finished chunk after which the rollouts are given up


@ray.remote(max_restarts=2, max_task_retries=2)
class RolloutWorker:
    """Holds one policy at a time; a restarted worker loads it again, because every call names it."""

    def __init__(self, make_env: Callable[[], Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.make_env, self.loaded, self.policy, self.tokenizer = make_env, None, None, None

    def play(self, checkpoint: str, beta: float | None, episodes: Sequence[int], decoding: Decoding, seed: int, batch_size: int) -> list[Episode]:
        """Plays the numbered episodes with a checkpoint's policy."""
        if self.loaded != (checkpoint, beta):
            self.policy, self.tokenizer = load_for_decoding(checkpoint, beta=beta), load_tokenizer(resolve(checkpoint))
            self.loaded = checkpoint, beta
        return play_episodes(self.policy, self.tokenizer, self.make_env, episodes, decoding, seed=seed, batch_size=batch_size)


class Rollouts:
    """`num_workers` persistent actors, as a context manager. Uses the Ray of this process, or a local one that ends with the block."""

    def __init__(self, make_env: Callable[[], Any], num_workers: int, *, cpus_per_worker: float = 1.0, address: str | None = None) -> None:
        if num_workers < 1:
            raise ValueError(f"expected at least one rollout worker, got {num_workers}")
        self.make_env, self.num_workers, self.cpus, self.address = make_env, num_workers, cpus_per_worker, address
        self.workers: list[Any] = []
        self.started = False

    def __enter__(self) -> Rollouts:
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS") or "local"
            local = {"num_cpus": max(self.num_workers, os.cpu_count() or 1), "include_dashboard": False} if address == "local" else {}
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
            self.started = True
        actor = RolloutWorker.options(num_cpus=self.cpus)
        self.workers = [actor.remote(self.make_env, max(1, int(self.cpus))) for _ in range(self.num_workers)]
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self.workers:
            ray.kill(worker)
        if self.started:
            ray.shutdown()

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
        """The numbered episodes in the order given. Raises TimeoutError when no worker finishes anything for `stalled` seconds."""
        size = min(CHUNK, batch_size, -(-len(episodes) // self.num_workers))
        waiting = [list(episodes[start : start + size]) for start in range(0, len(episodes), size)]
        waiting.reverse()
        running: dict[Any, Any] = {}
        found: dict[int, Episode] = {}
        free = list(self.workers)
        last = time.monotonic()
        while waiting or running:
            while waiting and free:
                worker = free.pop()
                running[worker.play.remote(str(checkpoint), beta, waiting.pop(), decoding, seed, batch_size)] = worker
            ready, _ = ray.wait(list(running), timeout=5.0)
            if not ready and time.monotonic() - last > stalled:
                raise TimeoutError(f"waited {stalled:.0f} s for {len(running)} rollout workers playing {checkpoint}; {len(found)} episodes are done")
            for result in ready:
                free.append(running.pop(result))
                found |= {episode.index: episode for episode in _result(result)}
                last = time.monotonic()
        return [found[index] for index in episodes]


def _result(reference: Any) -> list[Episode]:
    """What a worker returned; raises the user's own error instead of Ray's wrapper around it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, ValueError | OSError | ImportError) else error
        raise cause from error
