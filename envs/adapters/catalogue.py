"""Which games and tasks run on this machine, and what they are like: the table of CATALOGUE.md."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from envs.adapters import Adapter, reasoning_gym_world, textarena_game
from envs.adapters.logs import played
from envs.conformance import check_world
from envs.text_world import play
from rl_dialog.data.schema import failure_of
from rl_dialog.errors import UserError

EPISODES = 8  # behind a mean
SECONDS = 40.0  # for a game, after which it is given up
LEFT_OUT = ("players", "logs", "references", "drawing", "other process")
TWICE = 3  # episodes that a second process plays too, whose hashes of strings differ


@dataclass(frozen=True)
class Row:
    """What was found of a world."""

    name: str
    why_not: str = ""  # it does not run here
    faults: tuple[str, ...] = ()  # of the contract
    players: int = 1
    replies: float = 0.0  # of the policy, per episode
    returned: float | None = None  # mean return of the random mover
    scripted: tuple[tuple[str, float], ...] = ()  # of players that know the game: name, mean return
    failed: float = 0.0  # share of the episodes that failed
    at_a_loss: bool = False  # the random mover finds no first move that the game takes
    steps_per_second: float = 0.0  # replies of the policy, the other players' moves included
    episodes: str = field(default="", repr=False)  # a digest of the first ones


def measure(name: str, episodes: int = EPISODES) -> Row:
    """What a world is like, in this process."""
    make = Adapter(name)
    try:
        world = make()
        found = check_world(make, but=LEFT_OUT) if episodes > TWICE else []
    except UserError as error:
        return Row(name, why_not=str(error).partition(": expected ")[2] or str(error))
    except Exception as error:
        return Row(name, why_not=f"{type(error).__name__}: {error}"[:200])
    faults = tuple(f"{each.check}: {each.fault[:160]}" for each in found if each.fault)
    began, games = time.perf_counter(), [played(make, seed) for seed in range(episodes)]
    seconds = time.perf_counter() - began
    replies = [len(game.infos) for game in games]
    totals = [total for game in games for total in game.returns.values() if total is not None]
    said = json.dumps([[d.messages for d in game.dialogs.values()] for game in games[:TWICE]])
    return Row(
        name,
        faults=faults,
        players=getattr(getattr(world, "game", None), "players", 1),
        replies=float(np.mean(replies)),
        returned=float(np.mean(totals)) if totals else None,
        scripted=_scripted(make, episodes) if episodes > TWICE else (),
        failed=float(np.mean([game.end == "failed" for game in games])),
        at_a_loss=_at_a_loss(world),
        steps_per_second=sum(replies) / seconds,
        episodes=sha256(said.encode()).hexdigest(),
    )


def _scripted(make: Adapter, episodes: int) -> tuple[tuple[str, float], ...]:
    """The mean returns of the players that know the game."""
    found = []
    for name, player in make().scripted_players().items() if hasattr(make(), "scripted_players") else ():
        games = [play(make(), player(seed), seed=seed) for seed in range(episodes if name != "random" else 0)]
        totals = [total for game in games for total in game.returns.values() if total is not None]
        found += [(name, float(np.mean(totals)))] if totals else []
    return tuple(found)


def _at_a_loss(world: Any) -> bool:
    """Whether a random mover's first moves are refused: as an opponent it would lose by itself."""
    if not hasattr(world, "random_move"):
        return False
    for seed in range(TWICE):
        _, info = world.reset(seed=seed)
        if failure_of(info) is None and world.game.legal(world.random_move(random.Random(seed))):
            return False
    return True


def measured(names: Iterable[str], episodes: int = EPISODES, seconds: float = SECONDS) -> Iterator[Row]:
    """A row for each name. Each is measured in a process of its own, which is ended when it takes too
    long."""
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    names = list(names)
    _load({name.partition(":")[0] for name in names})
    for name in names:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(there, name, episodes))
        process.start()
        there.close()
        try:
            row = here.recv() if here.poll(seconds) else Row(name, f"not done after {seconds:g} s")
        except EOFError:
            row = Row(name, "its process died")
        process.kill()
        process.join()
        yield row


def _load(kinds: set[str]) -> None:
    """Imports the libraries once, so that the processes of `measured` have them."""
    for kind, load in (("textarena", textarena_game.library), ("reasoning_gym", reasoning_gym_world.library)):
        if kind in kinds:
            with contextlib.suppress(UserError):  # each world says so
                load()


def _send(place: Any, name: str, episodes: int) -> None:
    place.send(measure(name, episodes))


def differing(rows: Sequence[Row], seconds: float = SECONDS) -> set[str]:
    """The names whose episodes are others in a process with other hashes of strings."""
    runs = {row.name: row.episodes for row in rows if row.episodes}
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-m", "envs.adapters", "--digests", *runs]
    limit = seconds * (1 + len(runs))
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=limit)
    again = json.loads(out.stdout.splitlines()[-1])
    return {name for name, digest in runs.items() if again.get(name) != digest}


def table(rows: Sequence[Row], others: set[str]) -> str:
    """The rows that run as a table of Markdown, and why the rest does not."""
    heads = ("world", "players", "replies", "random", "scripted", "replies/s", "notes")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in (row for row in rows if not row.why_not):
        notes = [*row.faults, *(["another process plays other episodes"] if row.name in others else [])]
        notes += [f"{row.failed:.0%} of the episodes failed"] if row.failed else []
        notes += ["the random mover finds no first move"] if row.at_a_loss else []
        mean = "unscored" if row.returned is None else f"{row.returned:.2f}"
        told = "; ".join(notes).replace("|", "/").replace("\n", " ")
        known = ", ".join(f"`{name}` {returned:.2f}" for name, returned in row.scripted)
        counts = row.players, f"{row.replies:.1f}", mean, known, f"{row.steps_per_second:.0f}"
        cells = (row.name, *counts, told)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    missing = [f"- `{row.name}`: {' '.join(row.why_not.split())[:160]}" for row in rows if row.why_not]
    return "\n".join([*lines, *(["", "Not on this machine:", "", *missing] if missing else [])])


def summary(rows: Sequence[Row], others: set[str]) -> dict[str, dict[str, int]]:
    """Of each library how many worlds there are, get to an end here, and keep the contract."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        found = counts.setdefault(row.name.partition(":")[0], {"worlds": 0, "run": 0, "keep_the_contract": 0})
        runs = not row.why_not and row.failed < 1
        found["worlds"] += 1
        found["run"] += runs
        found["keep_the_contract"] += runs and not (row.faults or row.name in others)
    return counts


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for other programs."""
    return [asdict(row) for row in rows]
