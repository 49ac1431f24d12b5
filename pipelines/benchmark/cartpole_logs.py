"""Logs of CartPole, which an online Q-learner leaves in four buffers, and the measure of a policy in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from envs.cart_pole import LIMIT, cart_poles
from pipelines.benchmark.cartpole_learners import (
    Q_LEARNING,
    SAMPLES,
    Act,
    Columns,
    Learner,
    Networks,
    Transitions,
    greedy,
)

BUFFERS = ("full", "concurrent", "expert", "noisy")
LENGTH, WINDOW, NOISE = (
    10_000,
    2_000,
    0.3,
)  # transitions in a buffer and in the sliding window; the noisy expert's share of random actions
EPISODES = 50  # that measure a policy

Seen = Callable[[Transitions, Tensor], None]  # the logs so far and the K numbers of transitions in them


def record(
    act: Callable[[Tensor], Tensor], count: int, length: int, *, seed: int, seen: Seen | None = None
) -> Transitions:
    """Transitions of `count` poles under act: (K, 4) -> (K,).

    `seen(transitions, sizes)` is called after every step.
    """
    env, first_states = cart_poles(count, seed=seed)
    observations = torch.from_numpy(first_states)
    logs, sizes, fresh = (
        Transitions.empty(count, length),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.bool),
    )
    while int(sizes.min()) < length:
        actions = act(observations)
        step = env.step(actions.numpy())
        following, terminated, cut = (torch.from_numpy(step[i]) for i in (0, 2, 3))
        k = (
            (~fresh & (sizes < length)).nonzero().squeeze(1)
        )  # the step after an episode's end only resets, whatever the action
        values = observations, actions, following, terminated, terminated | cut
        for f, value in zip(fields(Transitions), values, strict=True):
            getattr(logs, f.name)[k, sizes[k]] = value[k]
        sizes[k] += 1
        observations, fresh = following, terminated | cut
        if seen is not None:
            seen(logs, sizes)
    return logs


@torch.no_grad()
def returns(act: Act, count: int, *, seed: int, episodes: int = EPISODES) -> Tensor:
    """(K,) the mean return of each network's policy; every policy starts from the same states with the same
    luck.
    """
    env, first_states = cart_poles(count * episodes, seed=seed)
    observations, draws = torch.from_numpy(first_states), torch.Generator().manual_seed(seed)
    alive, total = torch.ones(count * episodes, dtype=torch.bool), torch.zeros(count * episodes)
    for _ in range(LIMIT):
        probabilities = act(observations.view(count, episodes, 4)).flatten(0, 1)
        actions = (torch.rand(len(alive), generator=draws) < probabilities[:, 1]).long()
        following, _, terminated, cut, _ = env.step(actions.numpy())
        total += alive
        alive &= ~torch.from_numpy(terminated | cut)
        observations = torch.from_numpy(following)
    return total.view(count, episodes).mean(1)


def explore(seeds: int, *, seed: int) -> tuple[Transitions, Networks]:
    """The full buffer of each seed's online Q-learner and the learner as it was when it did best."""
    torch.manual_seed(seed)
    learner = Learner(Q_LEARNING, Networks(seeds))
    best, score, step = copy.deepcopy(learner.online), torch.full((seeds,), -1.0), 0
    nothing = torch.zeros(seeds, LENGTH)

    def act(observations: Tensor) -> Tensor:
        with torch.no_grad():
            return _perturbed(
                greedy(learner.online)(observations[:, None])[:, 0].argmax(-1), max(0.02, 1 - step / 3000)
            )

    def seen(logs: Transitions, sizes: Tensor) -> None:
        nonlocal step, score
        step += 1
        if step > 500:
            columns = (torch.rand(seeds, 2 * SAMPLES) * sizes[:, None]).long()
            learner.update(logs, columns, progress=min(1.0, step / LENGTH), prior_logp=nothing)
        if step % 500 == 0:
            new_score = returns(greedy(learner.online), seeds, seed=seed + step)
            with torch.no_grad():
                for best_weight, current in zip(best.parameters(), learner.online.parameters(), strict=True):
                    best_weight[new_score > score] = current[new_score > score]
            score = torch.maximum(score, new_score)

    return record(act, seeds, LENGTH, seed=seed, seen=seen), best.eval()


def _perturbed(actions: Tensor, share: float) -> Tensor:
    return torch.where(torch.rand(len(actions)) < share, torch.randint(0, 2, actions.shape), actions)


def collect(seeds: int, *, seed: int) -> Transitions:
    """The four buffers of every seed, in the order of BUFFERS: 4 x seeds logs."""
    full, expert = explore(seeds, seed=seed)

    def acting(share: float) -> Callable[[Tensor], Tensor]:
        return lambda observations: _perturbed(greedy(expert)(observations[:, None])[:, 0].argmax(-1), share)

    with torch.no_grad():
        clean, noisy = (
            record(acting(share), seeds, LENGTH, seed=seed + 1 + i) for i, share in enumerate((0.0, NOISE))
        )
    return Transitions.stack([full, full, clean, noisy])


def columns_of(seeds: int, steps: int, *, seed: int) -> Columns:
    """Which transitions step after step learns from: any of its buffer, in `concurrent` those of the window
    where the data stood at that time.
    """
    draws = torch.Generator().manual_seed(seed)

    def columns(step: int) -> Tensor:
        shares = torch.rand(len(BUFFERS) * seeds, SAMPLES, generator=draws)
        columns = shares * LENGTH
        columns[seeds : 2 * seeds] = shares[seeds : 2 * seeds] * WINDOW + (LENGTH - WINDOW) * step / steps
        return columns.long()

    return columns
