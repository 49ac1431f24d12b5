"""`benchmark simulate`: system steps/s of the task-oriented simulator on one core, of several workers against
one, and its memory.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from envs.multiwoz import MultiWOZ, MultiWOZVector, RulePolicy, Simulator, load_world
from pipelines.benchmark.measuring import Measured, Result, Seconds, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster.rollout import Workers

PARALLEL = 1000  # conversations whose memory is measured


def measure(config: BenchmarkConfig) -> Result:
    """System steps and their seconds, and the MiB of 1,000 conversations, with the rule policy."""
    world = load_world(config.world)
    contenders = {
        "plain": _one_after_the_other(config, MultiWOZ(world)),
        f"{config.num_envs} at once, acts as bits": _by_vectors(
            config, MultiWOZVector(config.num_envs, world), bits=True
        ),
        f"{config.num_envs} at once": _by_vectors(config, MultiWOZVector(config.num_envs, world), bits=False),
        "without state vectors": _by_acts(config, Simulator(world)),
    }
    seconds = take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    plain = "one conversation after the other through the Gymnasium environment"
    setting = f"{config.steps} system steps, {world.source}; plain: {plain}"
    measured: Measured = {setting: (config.steps, seconds)}
    if config.num_workers:
        setting = f"{config.steps} system steps of each worker, {config.num_envs} conversations at once"
        setting += ", acts as bits; plain: one worker does all"
        measured[setting] = config.num_workers * config.steps, _by_workers(config)
    return speeds(config, measured, memory={"mib_per_1000_conversations": round(memory(Simulator(world)), 1)})


def memory(simulator: Simulator) -> float:
    """MiB of 1,000 conversations in their third turn."""
    policy = RulePolicy(simulator.world.database, simulator.options)

    def begun(episode: int) -> Any:
        talk = simulator.start((0, 0, 0, episode))
        for _ in range(2):
            if not talk.done:
                simulator.advance(talk, policy.respond(talk.state, talk.rng))
        return talk

    begun(0)  # what all share is there before the clock
    tracemalloc.start()
    talks = [begun(episode) for episode in range(PARALLEL)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(talks) * 1000 / 2**20


class _Stepper:
    """A rollout worker's player: a chunk is `steps` system steps with state vectors, masks and evaluator."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self.call = _by_vectors(config, MultiWOZVector(config.num_envs, load_world(config.world)), bits=True)

    def __call__(self, episodes: Sequence[int]) -> Sequence[int]:
        self.call()
        return episodes


def _by_workers(config: BenchmarkConfig) -> Seconds:
    """Seconds of each round in which one worker, or all, do the same chunks of work."""
    config = replace(
        config, world=str(Path(config.world).absolute()) if config.world else ""
    )  # workers do not share our working directory
    chunks = [[number] for number in range(config.num_workers)]
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(Workers(partial(_Stepper, config), n, cpus_per_worker=0.5))
            for name, n in _pools(config.num_workers)
        }
        contenders = {name: partial(_drain, pool, chunks) for name, pool in pools.items()}
        return take_turns(
            contenders, rounds=config.rounds, warmup=max(1, config.warmup)
        )  # the first round loads the worlds


def _pools(workers: int) -> list[tuple[str, int]]:
    return [("plain", 1), (f"{workers} workers", workers)]


def _drain(pool: Workers, chunks: list[list[int]]) -> None:
    for _ in pool.play_chunks(chunks):
        pass


def _one_after_the_other(config: BenchmarkConfig, env: MultiWOZ) -> Callable[[], None]:
    policy = RulePolicy(env.simulator.world.database, env.simulator.options)
    env.reset(seed=config.seed)

    def call() -> None:
        for _ in range(config.steps):
            *_, ended, _, _ = env.step_acts(policy.respond(env.talk.state, env.talk.rng))
            if ended:
                env.reset()

    return call


def _by_vectors(config: BenchmarkConfig, envs: MultiWOZVector, *, bits: bool) -> Callable[[], None]:
    policy, vectors = (
        RulePolicy(envs.simulator.world.database, envs.simulator.options),
        envs.simulator.vectors,
    )
    envs.reset(seed=config.seed)

    def call() -> None:
        remaining = config.steps
        while remaining > 0:
            turns = [None if talk.done else policy.respond(talk.state, talk.rng) for talk in envs.talks]
            remaining -= sum(turn is not None for turn in turns)
            if bits:
                envs.step(np.stack([vectors.bits(turn or ()) for turn in turns]))
            else:
                envs.step_acts(turns)

    return call


def _by_acts(config: BenchmarkConfig, simulator: Simulator) -> Callable[[], None]:
    policy = RulePolicy(simulator.world.database, simulator.options)
    episode = 0

    def call() -> None:
        nonlocal episode
        remaining = config.steps
        while remaining > 0:
            talk = simulator.start((config.seed, 0, 0, episode))
            episode += 1
            while not talk.done:
                simulator.advance(talk, policy.respond(talk.state, talk.rng))
            remaining -= talk.turns

    return call
