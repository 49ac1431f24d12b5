"""Playing in worlds of words: who plays which episodes, and where they are written."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from envs import CONTROL, ENVS, PREFIXES
from rl_dialog.cluster.rollout import CHUNK, CheckpointPlayer, players
from rl_dialog.data.files import write_json, write_text_atomically
from rl_dialog.errors import UserError, room_for
from rl_dialog.evaluation.drawings import frames_of, moving_svg
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.players import PERSON, ScriptedPlay, cast_of
from rl_dialog.evaluation.tally import Tally, table
from rl_dialog.models.checkpoint import method_name, read_method, resolve
from rl_dialog.own import own
from rl_dialog.run import at_least, claim_output, progress
from rl_dialog.serving.table import Shown, play_person

if TYPE_CHECKING:
    from pipelines.play import PlayConfig

AHEAD = 4  # batches that are played before their episodes are written


def talks(config: PlayConfig) -> bool:
    """Whether it is a world in words that is played, and not one of `prefer`."""
    if config.player or not config.env:
        return bool(config.player)
    if config.env.partition(":")[0] in PREFIXES:
        return True
    if ":" in config.env:
        return not hasattr(own(config.env, "env"), "clip_length")
    if config.env in ENVS:
        return config.env not in CONTROL
    folder = Path(config.checkpoint)  # an unknown name: whose are the names that it is near to?
    return not any((place / "prefer.yaml").is_file() for place in (folder, folder.parent))


def play_text(config: PlayConfig, make_env: Callable[[], Any]) -> dict[str, Any]:
    """Plays; writes Dialogs, films and figures where they are asked for; returns the figures."""
    _check(config)
    rounds = _rounds(config, make_env)
    logs = Path(config.logs).absolute() if config.logs else None
    if logs and logs.exists() and not config.overwrite:
        raise UserError(f"--logs: {logs} is there already: choose another file, or --overwrite")
    out = claim_output(config, "play") if config.output_dir else None
    logs = logs or (out / "dialogs.jsonl" if out else None)
    began, shown = time.perf_counter(), bool(config.watch) or PERSON in config.player
    total = len(rounds) * config.episodes
    with (
        _written(logs) as file,
        progress("play", total, "episodes", quiet=config.quiet or shown) as step,
    ):
        book = _Book(config, out, file)
        for name, episode in _played(config, make_env, rounds):
            book.enter(name, episode)
            step(1)
    figures = book.figures(time.perf_counter() - began)
    if not config.quiet:
        print(table(book.tallies))
    if out:
        write_json(out / "play.json", figures)
    return figures | {
        "dialogs": str(logs) if logs else None,
        "films": book.films,
        "output_dir": str(out) if out else None,
    }


def _check(config: PlayConfig) -> None:
    """Raises UserError for settings that do not go together."""
    at_least(config, episodes=1, films=0, seed=0, batch_size=1, num_workers=0, watch=0)
    Decoding.of(config).check()
    if bool(config.checkpoint) == bool(config.player):
        got = "both" if config.player else "neither"
        raise UserError(f"expected --checkpoint or --player, who plays, got {got}")
    if not config.env:
        raise UserError("expected --env: the world that is played, small_talk, wordle, ... or module:Class")
    if config.format not in ("", "svg"):
        raise UserError(f"--format {config.format}: expected svg, the format of worlds in words")
    if config.beta and not config.checkpoint:
        raise UserError("--beta: expected a --checkpoint, whose method has one; scripted players have none")
    if PERSON in config.player and len(config.player) > 1:
        raise UserError(f"--player: expected person alone, got {' '.join(config.player)}")
    if (config.watch or PERSON in config.player) and (config.num_workers or config.quiet):
        raise UserError("expected no --num_workers and no --quiet where episodes are shown in the terminal")


def _rounds(config: PlayConfig, make_env: Callable[[], Any]) -> dict[str, tuple[Any, ...]]:
    """Who plays all the episodes, by name, and what its player is told: checkpoint, beta, decoding. Scripted
    players are told nothing, and say by episode who they are."""
    if not config.checkpoint:
        if PERSON not in config.player:
            cast_of(config.player, make_env)  # raises for an unknown name now, and not on a worker
        return {"": ()}
    name = Path(config.checkpoint).name or "checkpoint"
    directory, decoding = resolve(config.checkpoint), Decoding.of(config)
    if Path(directory).exists():
        directory = str(Path(directory).absolute())  # workers start in another folder
    method = read_method(directory)
    if not config.beta:
        return {name: (directory, None, decoding)}
    if not method.acts_with_beta:
        trained = f"{config.checkpoint} was trained with {method_name(method)}, which has none"
        raise UserError(f"--beta: expected a method with a beta, {trained}: leave it out")
    return {f"{name} beta {beta:g}": (directory, beta, decoding) for beta in config.beta}


def _played(
    config: PlayConfig, make_env: Callable[[], Any], rounds: dict[str, tuple[Any, ...]]
) -> Iterator[tuple[str, Episode]]:
    """Every episode with the name of who played it, in order."""
    numbers, drawn = range(config.episodes), range(config.films if config.output_dir else 0)
    if PERSON in config.player:
        yield from ((PERSON, each) for each in play_person(make_env, numbers, seed=config.seed, drawn=drawn))
        return
    if config.checkpoint:
        device = "auto" if config.num_workers else config.device
        make = partial(CheckpointPlayer, make_env, device, keep_caches=True)
        size, seeds = AHEAD * config.batch_size, (config.seed, config.batch_size)
    else:
        make, size, seeds = partial(ScriptedPlay, make_env, config.player), CHUNK, (config.seed,)
    if config.num_workers:
        size = min(CHUNK, max(1, -(-config.episodes // config.num_workers)))
    watched, rest = numbers[: config.watch], numbers[config.watch :]
    where = {"device": config.device, "address": config.address or None}
    with players(make, config.num_workers, **where) as play:
        for name, told in rounds.items():
            first = play(watched, *told, *seeds, drawn, Shown(), size=1) if config.watch else ()
            for episode in chain(first, play(rest, *told, *seeds, drawn, size=size)):
                yield name or episode.dialog.meta["player"], episode


class _Book:
    """Where episodes are entered: the figures by player, the Dialogs, the films."""

    def __init__(self, config: PlayConfig, out: Path | None, file: TextIO | None) -> None:
        self.config, self.out, self.file = config, out, file
        self.tallies: dict[str, Tally] = {}
        self.films: list[str] = []

    def enter(self, name: str, episode: Episode) -> None:
        """One more episode, which is not kept."""
        self.tallies.setdefault(name, Tally()).add(episode)
        dialog, number = episode.dialog, f"{self.config.seed}-{episode.index:06d}"
        who = re.sub(r"[^\w.-]+", "_", name) or "player"
        dialog.id = f"{dialog.source}-{number}-{who}"
        # Episodes of one number begin alike, and only they: `prepare` keeps them in one split.
        dialog.meta |= {"player": name, "group": f"{dialog.source}-{number}"}
        if self.file:
            self.file.write(dialog.to_json() + "\n")
        if self.out and episode.drawings:
            path = self.out / who / f"episode-{episode.index}.svg"
            path.parent.mkdir(exist_ok=True)
            write_text_atomically(path, moving_svg(frames_of(episode)))
            self.films.append(str(path))

    def figures(self, seconds: float) -> dict[str, Any]:
        """The figures of each player, and of all together where there is one or they shared the episodes."""
        names = sorted(self.tallies)
        played = sum(sum(tally.ends.values()) for tally in self.tallies.values())
        together = next(iter(self.tallies.values()), Tally()) if len(names) < 2 else Tally()
        if self.config.player and len(names) > 1:
            for tally in self.tallies.values():
                together.join(tally)
        own = together.figures() if len(names) < 2 or self.config.player else {}
        return {
            "env": self.config.env,
            **own,
            "players": {name: self.tallies[name].figures() for name in self.tallies},
            "seconds": round(seconds, 2),
            "episodes_per_second": round(played / seconds, 2),
        }


@contextmanager
def _written(path: Path | None) -> Iterator[TextIO | None]:
    """A file that is there as a whole at the end, or not at all."""
    if path is None:
        yield None
        return
    half = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with room_for(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with half.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
