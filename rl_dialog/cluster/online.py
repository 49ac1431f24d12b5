"""Rounds of online learning on Ray: actors that play whole groups of episodes with the weights of a version.

    learner    round k:   publish version k   ask for round k + staleness   wait for round k   learn
    actors                play what was asked for, each unit with the version that its round is played with

What a unit of episodes becomes follows from its numbers and the weights alone, so any number of actors plays
the same, and what a killed one had begun is played once, by another or by its successor. Nothing is thrown
away for its age: a round is not begun before its version is there.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import ray
from torch import Tensor

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import wants_gpus
from rl_dialog.cluster.rollout import STALLED, Workers
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.rollouts import Playing, Rollouts
from rl_dialog.evaluation.self_play import Opponent
from rl_dialog.methods import BC
from rl_dialog.models.checkpoint import steering_of
from rl_dialog.models.device import named_device
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.versions import Versions, take_weights, weights_of

Task = tuple[Sequence[int], tuple[Any, ...]]  # numbers of episodes, and what the player is told besides
LOOK = 0.2  # seconds between two looks for new work while all actors are busy


class GroupPlayer:
    """What an actor holds: the language model of the run's start, which takes the weights of any version."""

    def __init__(self, model: ModelConfig, playing: Playing, device: str) -> None:
        """model: what the run starts from, adapters included."""
        self.playing, self.tokenizer = playing, load_tokenizer(model.model_name_or_path)
        self.policy = Policy(load_lm(model, self.tokenizer), BC(), model)
        self.policy.steering = steering_of(model.model_name_or_path)
        self.policy.to(named_device(device)).eval()
        self.version, self.opponent = -1, None

    def __call__(
        self,
        episodes: Sequence[int],
        version: int,
        weights: Mapping[str, np.ndarray],
        other: int | None,
        other_weights: Mapping[str, np.ndarray] | None,
    ) -> list[Episode]:
        """The episodes of a unit, played by `version`, against the version `other` where there is a copy."""
        if self.version != version:
            take_weights(self.policy, weights)
            self.version = version
        if other is None:
            return self.playing(self.policy, self.tokenizer, episodes)
        self.opponent = self.opponent or Opponent(self.policy)
        opponent = self.opponent.at(other, other_weights)
        return self.playing(self.policy, self.tokenizer, episodes, opponent)


class RolloutActors(Workers):
    """Workers that are handed tasks by a thread, so that they go on playing while the learner learns."""

    def __init__(self, make_player: Callable[[], Any], num_workers: int, **more: Any) -> None:
        super().__init__(make_player, num_workers, **more)
        self.waiting: deque[Task] = deque()
        self.running: dict[Any, tuple[Any, Task]] = {}  # what each busy actor returns -> it and its task
        self.done: dict[int, Sequence[Any]] = {}  # first episode of a task -> what became of it
        self.error: BaseException | None = None
        self.changed, self.ended, self.last = threading.Condition(), False, time.monotonic()

    def __enter__(self) -> Self:
        super().__enter__()
        self.thread = threading.Thread(target=self._work, name="rollout actors", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *given: Any) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        self.thread.join(STALLED)
        self.starting |= {result: worker for result, (worker, _) in self.running.items()}
        super().__exit__(*given)

    def ask(self, tasks: Sequence[Task]) -> None:
        """Puts tasks behind those that wait."""
        with self.changed:
            self.waiting.extend(tasks)
            self.last = time.monotonic()
            self.changed.notify_all()

    def outcome(self, first: int, *, stalled: float = STALLED) -> Sequence[Any]:
        """What became of the task that begins with the episode `first`, once.

        Raises TimeoutError when no actor finishes anything for `stalled` seconds, UserError for a task that
        kills its actors, and what a player raised.
        """
        began = time.monotonic()
        with self.changed:
            while first not in self.done:
                if self.error is not None:
                    raise self.error
                if time.monotonic() - max(began, self.last) > stalled:
                    waiting = len(self.waiting) + len(self.running)
                    raise TimeoutError(self._stalled(stalled, len(self.done), len(self.done) + waiting))
                self.changed.wait(5.0)
            return self.done.pop(first)

    def _work(self) -> None:
        try:
            while not self.ended:
                self._look()
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _look(self) -> None:
        """Hands out what waits to who is free, and takes what is ready."""
        with self.changed:
            while self.waiting and self.free:
                worker, task = self.free.pop(), self.waiting.popleft()
                chunk, arguments = task
                self.running[worker.play.remote(chunk, *arguments)] = worker, task
            busy = [*self.running, *self.starting]
            if not busy:
                self.changed.wait(LOOK)
                return
        ready, _ = ray.wait(busy, timeout=LOOK)
        for result in ready:
            if result not in self.running:
                self._join(result)
                continue
            worker, task = self.running.pop(result)
            played = self._outcome(result, worker, task[0][0])
            with self.changed:
                if played is None:  # who played it is gone: it comes first
                    self.waiting.appendleft(task)
                    continue
                self.done[task[0][0]], self.last = played, time.monotonic()
                self.changed.notify_all()


@dataclass
class RoundsOnActors:
    """Plays the rounds of a run on actors: a `Source` of Rollouts. Rounds up to `staleness` ahead of the one
    that is asked for are begun; none behind the last."""

    actors: RolloutActors
    units: Callable[[int], list[list[int]]]
    versions: Versions
    against_copy: bool
    rounds: int

    def __post_init__(self) -> None:
        self.begun: dict[int, list[list[int]]] = {}  # step -> its units
        self.stored: dict[int, Any] = {}  # version -> its weights in the object store

    def __call__(self, policy: Policy, step: int) -> list[Episode]:
        """The episodes of round `step`, in order."""
        ahead = range(step, min(step + self.versions.staleness + 1, self.rounds))
        for number in ahead:
            if number not in self.begun:
                self._begin(number, policy, step)
        needed = {self.versions.played(k) for k in ahead} | {self.versions.opponent(k) for k in ahead}
        self.stored = {version: stored for version, stored in self.stored.items() if version in needed}
        return [each for unit in self.begun.pop(step) for each in self.actors.outcome(unit[0])]

    def _begin(self, number: int, policy: Policy, step: int) -> None:
        version = self.versions.played(number)
        other = self.versions.opponent(number) if self.against_copy else None
        weights = self._stored(version, policy, step)
        told = (version, weights, other, None if other is None else self._stored(other, policy, step))
        self.begun[number] = self.units(number)
        self.actors.ask([(unit, told) for unit in self.begun[number]])

    def _stored(self, version: int, policy: Policy, step: int) -> Any:
        if version not in self.stored:
            weights = self.versions.kept.get(version) if version != step else weights_of(policy)
            self.stored[version] = ray.put(_arrays(weights))
        return self.stored[version]


@contextmanager
def on_actors(
    play: Rollouts, model: ModelConfig, num_workers: int, *, rounds: int, device: str, address: str | None
) -> Iterator[Rollouts]:
    """`play` with its episodes played by so many Ray actors, each with a GPU where `device` says so and the
    cluster has them; 0 plays in this process."""
    if not num_workers:
        yield play
        return
    units = len(play.units(0))
    if units < num_workers:
        warnings.warn(
            f"a round is played in {units} parts, so that only {units} of {num_workers} workers have work at "
            "a time: a smaller --batch_size makes more parts",
            stacklevel=2,
        )
    cpus = play.threads
    with connect(address, num_cpus=num_workers * cpus + 1):
        gpus = float(device != "cpu" and wants_gpus(device, num_workers))
        playing, where = play.playing, "auto" if gpus else "cpu"
        more = {"cpus_per_worker": float(cpus), "gpus_per_worker": gpus, "address": address}
        with RolloutActors(lambda: GroupPlayer(model, playing, where), num_workers, **more) as actors:
            source = RoundsOnActors(actors, play.units, play.versions, play.opponent is not None, rounds)
            yield replace(play, source=source)


def _arrays(weights: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() for name, value in weights.items()}
