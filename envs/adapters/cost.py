"""What the adapter adds to a step of TextArena: the same moves through its own interface and through ours."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from envs.adapters.luck import own_luck
from envs.adapters.names import parsed
from envs.adapters.textarena_game import made
from envs.adapters.textarena_world import TextArenaWorld

EPISODES, ROUNDS = 20, 15


def cost(name: str) -> dict[str, Any]:
    """Microseconds of this process per move of the game alone, with the adapter, and of the adapter: medians
    over rounds in which both take turns. All roles are played, so that no opponent is in the figure. In a
    game with dice the two play other games."""
    plain, options = parsed(name)
    options |= {"opponent": "self"}
    world = TextArenaWorld(plain, options)
    games = [_recorded(world, seed) for seed in range(EPISODES)]
    rounds = [(_alone(world, plain, games), _adapted(world, games)) for _ in range(ROUNDS)]
    moves = sum(map(len, games))
    alone, ours = (statistics.median(each) / moves * 1e6 for each in zip(*rounds, strict=True))
    added = statistics.median(b - a for a, b in rounds) / moves * 1e6
    figures = {"game_alone": alone, "with_adapter": ours, "adapter": added}
    return {"env": name, "moves": moves} | {f"{key}_us": round(value, 1) for key, value in figures.items()}


def _recorded(world: TextArenaWorld, seed: int) -> list[str]:
    """The moves of an episode of random movers."""
    world.reset(seed=seed)
    chance = random.Random(seed)
    for _ in range(world.max_turns):
        _, _, terminated, truncated, _ = world.step(world.random_move(chance))
        if terminated or truncated:
            break
    return world.game.actions


def _alone(world: TextArenaWorld, name: str, games: list[list[str]]) -> float:
    """Seconds of the moves in TextArena's loop: the observation, then the move."""
    seconds = 0.0
    for seed, moves in enumerate(games):
        with own_luck(seed, with_numpy=True):
            env = made(name, world.game.options)
            env.reset(num_players=world.game.players, seed=seed)
            began = time.process_time()
            for move in moves:
                env.get_observation()
                done, _ = env.step(action=move)
                if done:  # other dice than those of the adapter's
                    env.reset(num_players=world.game.players, seed=seed)
            seconds += time.process_time() - began
    return seconds


def _adapted(world: TextArenaWorld, games: list[list[str]]) -> float:
    seconds = 0.0
    for seed, moves in enumerate(games):
        world.reset(seed=seed)
        began = time.process_time()
        for move in moves:
            world.step(move)
        seconds += time.process_time() - began
    return seconds
