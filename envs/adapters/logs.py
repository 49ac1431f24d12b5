"""Logs and reference returns of players that know nothing of the world, for worlds behind an adapter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.adapters.random_player import RandomTalker
from envs.text_world import ALONE, Played, Player, play
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError

REFERENCES = 32  # episodes: looking for moves that a game takes may need seconds in each


def player_of(world: Any, seed: int) -> Player:
    """Who plays when nobody else does: a random mover in games, in tasks somebody who knows every other
    answer."""
    chance = random.Random(f"player {seed}")
    if hasattr(world, "random_move"):
        return lambda messages: world.random_move(chance)
    if hasattr(world, "known_answer"):
        return lambda messages: world.known_answer(right=chance.random() < 0.5)
    return RandomTalker(seed)


def played(make_world: Callable[[], Any], seed: int) -> Played:
    """The episode of a seed, by that player."""
    world = make_world()
    return play(world, player_of(world, seed), seed=seed)


def write_logs(make_world: Callable[[], Any], path: str | Path, *, dialogs: int, seed: int) -> None:
    """`dialogs` episodes, one JSON line each; episodes that failed are left out, and of worlds with several
    roles each role's Dialog is one. Raises UserError where more than three in four fail, and for tasks that
    know no answers."""
    world = make_world()
    if hasattr(world, "tells_answers") and not world.tells_answers():
        name = getattr(make_world, "__name__", "world")
        expected = "a task that knows answers, for logs of somebody who knows every other one"
        fix = "let a model play (`play --checkpoint`, `--player http://...`), or a player of your own"
        raise UserError(f"env {name!r}: expected {expected}, got one that only scores them: {fix}")
    write_jsonl(_dialogs(make_world, dialogs, seed), path)


def _dialogs(make_world: Callable[[], Any], count: int, seed: int) -> list[Dialog]:
    found: list[Dialog] = []
    name, failed = getattr(make_world, "__name__", "world"), ""
    for number in range(4 * count):
        episode = played(make_world, (seed << 32) + number)
        if episode.end == "failed":
            failed = str(next(iter(episode.dialogs.values())).meta["failed"])
        for role, dialog in episode.dialogs.items() if episode.end != "failed" else ():
            end = "" if role == ALONE else f"-{role}"
            found.append(replace(dialog, id=f"{name}-{seed}-{number:06d}{end}", source=name))
        if len(found) >= count:
            return found[:count]
    got = f"{len(found)} from {4 * count} episodes: the others failed, as with: {failed}"
    raise UserError(f"env {name!r}: expected {count} dialogs, got {got}")


def reference_returns(make_world: Callable[[], Any], episodes: int, seed: int) -> dict[str, list[float]]:
    """The returns of a random mover in a game for one policy, at most `REFERENCES` of them; nothing for other
    worlds."""
    if not hasattr(make_world(), "random_move"):
        return {}
    returns = [
        total
        for number in range(min(episodes, REFERENCES))
        for total in played(make_world, (seed << 32) + number).returns.values()
        if total is not None
    ]
    return {"random legal": returns} if returns else {}
