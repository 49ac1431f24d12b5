"""Playing in worlds of words, for `pipelines.play`: who plays which episodes, and where they are written."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

from rl_dialog.cluster.rollout import CHUNK, CheckpointPlayer, players
from rl_dialog.data.files import write_json, write_text_atomically
from rl_dialog.errors import UserError, room_for
from rl_dialog.evaluation.drawings import frames_of, moving_svg, save_gif
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.generation import Decoding, check_strength
from rl_dialog.evaluation.players import PERSON, ScriptedPlay, cast_of
from rl_dialog.evaluation.roles import OTHERS, RolePlay, roles_of
from rl_dialog.evaluation.runs import nearest
from rl_dialog.evaluation.tally import Tally
from rl_dialog.models.checkpoint import method_name, read_method, resolve
from rl_dialog.serving.table import Shown, ShownRoles, Typist, person_plays_roles, play_person

AHEAD = 4  # batches that are played before their episodes are written
Rounds = dict[str, tuple[Any, ...]]  # who plays all the episodes, by name, and what its player is told


@dataclass(frozen=True)
class PlaySettings(Decoding):
    """Who plays, where, and how it is shown."""

    checkpoint: str = ""
    """run folder (its best checkpoint) or checkpoint directory; of `prefer`, also one without a run"""
    player: tuple[str, ...] = ()
    """instead of a checkpoint: scripted players of the world by name, with shares (random=3 half=1) or
    alike, module:Class for your own, http://HOST:PORT/v1 for a model that is served, or person"""
    roles: tuple[str, ...] = ()
    """who plays each role of a world of several: player_0=runs/ilql player_1=random; a checkpoint, or who
    can be a --player; others=WHO plays the roles that are not named"""
    env: str = ""
    """small_talk, wordle, toy_maze, ... (envs/README.md), or module:Class for your own; of `prefer` by
    default the run's"""
    episodes: int = 20
    """episodes of each checkpoint and beta, or of all players together"""
    seed: int = 0
    """seed of the episodes, of players and of what is sampled"""
    beta: tuple[float, ...] = ()
    """play once with each of these, for a checkpoint whose method has a beta; by default with its own"""
    batch_size: int = 128
    """conversations of a checkpoint in step"""
    num_workers: int = 0
    """Ray actors that play; 0 plays in this process. The result is the same"""
    logs: str = ""
    """file for the Dialogs; by default dialogs.jsonl in the output folder"""
    watch: int = 0
    """show the first so many episodes in the terminal as they go on"""
    films: int = 3
    """episodes that are drawn, into the output folder"""
    format: Literal["", "svg", "gif", "mp4"] = ""
    """format of the films: svg (the default) or gif of worlds in words, gif (the default) or mp4 of the
    others"""


def play_rounds(
    config: PlaySettings,
    make_env: Callable[[], Any],
    rounds: Rounds,
    *,
    out: Path | None,
    logs: Path | None,
    device: str,
    address: str | None,
    step: Callable[[int], Any],
) -> Book:
    """Plays; writes Dialogs into `logs`, films and figures into `out`, where they are given. `step` hears of
    every episode."""
    began = time.perf_counter()
    with _written(logs) as file:
        book = Book(config, out, file)
        for name, episode in _played(config, make_env, rounds, bool(out), device, address):
            book.enter(name, episode)
            step(int(episode.opens))  # an episode of several roles is there once for each
    book.seconds = time.perf_counter() - began
    if out:
        write_json(out / "play.json", book.figures())
    return book


def check_players(config: PlaySettings, *, quiet: bool) -> None:
    """Raises UserError for settings that do not go together."""
    Decoding.of(config).check()
    given = [name for name in ("checkpoint", "player", "roles") if getattr(config, name)]
    if len(given) != 1:
        got = " and ".join(f"--{name}" for name in given) or "neither"
        several = "--roles says it of a world of several roles"
        raise UserError(f"expected --checkpoint or --player, who plays, got {got}; {several}")
    if not config.env:
        raise UserError("expected --env: the world that is played, small_talk, wordle, ... or module:Class")
    if config.format == "mp4":
        raise UserError("--format mp4: expected svg or gif, the formats of worlds in words")
    if config.beta and not config.checkpoint:
        raise UserError("--beta: expected a --checkpoint, whose method has one; scripted players have none")
    for beta in config.beta:
        check_strength(beta)
    if PERSON in config.player and len(config.player) > 1:
        raise UserError(f"--player: expected person alone, got {' '.join(config.player)}")
    if (config.watch or with_person(config)) and (config.num_workers or quiet):
        raise UserError("expected no --num_workers and no --quiet where episodes are shown in the terminal")


def with_person(config: PlaySettings) -> bool:
    """Whether somebody at the keyboard takes part."""
    return PERSON in config.player or any(role.partition("=")[2] == PERSON for role in config.roles)


def rounds_of(config: PlaySettings, make_env: Callable[[], Any]) -> Rounds:
    """Who plays all the episodes, by name, and what its player is told: checkpoint, beta, decoding. Scripted
    players are told nothing, and say by episode who they are."""
    if not config.checkpoint:
        if config.roles:
            roles_of(config.roles, make_env)
        elif PERSON not in config.player:
            cast_of(config.player, make_env)  # raises for an unknown name now, and not on a worker
        return {"": ()}
    name = Path(os.path.abspath(config.checkpoint)).name  # of `.` and `..` too, which are no names of films
    directory, decoding = resolve(config.checkpoint), Decoding.of(config)
    if Path(directory).exists():
        directory = str(Path(directory).absolute())  # workers start in another folder
    method = read_method(directory)
    if not config.beta:
        return {name: (directory, None, decoding)}
    if not method.acts_with_beta:
        known = f"{config.checkpoint} was trained with {method_name(method)}, which has none: leave it out"
        if not Path(directory).exists():
            known = f"found no folder {config.checkpoint}, and a model of a hub has none"
        raise UserError(f"--beta: expected a method with a beta, {known}")
    if len(set(config.beta)) < len(config.beta):
        raise UserError(f"--beta: expected each once, got {' '.join(f'{beta:.15g}' for beta in config.beta)}")
    return {f"{name} beta {beta:.15g}": (directory, beta, decoding) for beta in config.beta}


def _played(
    config: PlaySettings,
    make_env: Callable[[], Any],
    rounds: Rounds,
    filmed: bool,
    device: str,
    address: str | None,
) -> Iterator[tuple[str, Episode]]:
    """Every episode with the name of who played it, in order."""
    numbers, drawn = range(config.episodes), range(config.films if filmed else 0)
    if PERSON in config.player:
        yield from ((PERSON, each) for each in play_person(make_env, numbers, seed=config.seed, drawn=drawn))
        return
    if config.roles:
        yield from _roles_played(config, make_env, drawn, device, address)
        return
    if config.checkpoint:
        make = partial(CheckpointPlayer, make_env, "auto" if config.num_workers else device, keep_caches=True)
        size, seeds = AHEAD * config.batch_size, (config.seed, config.batch_size)
    else:
        make, size, seeds = partial(ScriptedPlay, make_env, config.player), CHUNK, (config.seed,)
    if config.num_workers:
        size = min(CHUNK, max(1, -(-config.episodes // config.num_workers)))
    watched, rest = numbers[: config.watch], numbers[config.watch :]
    with players(make, config.num_workers, device=device, address=address) as play:
        for name, told in rounds.items():
            first = play(watched, *told, *seeds, drawn, Shown(), size=1) if config.watch else ()
            for episode in chain(first, play(rest, *told, *seeds, drawn, size=size)):
                yield name or episode.dialog.meta["player"], episode


def _roles_played(
    config: PlaySettings, make_env: Callable[[], Any], drawn: range, device: str, address: str | None
) -> Iterator[tuple[str, Episode]]:
    """Every episode of a world of several roles, as each role saw it, with `role=who` as the name."""
    numbers, roles, decoding = range(config.episodes), roles_of(config.roles, make_env), Decoding.of(config)
    if with_person(config):
        typist = Typist()
        play = RolePlay(make_env, roles, decoding, device, person=typist)
        played = person_plays_roles(play, numbers, config.seed, drawn, typist)
        yield from ((_role_name(episode), episode) for episode in played)
        return
    where = "auto" if config.num_workers else device, str(Path.cwd())
    make = partial(RolePlay, make_env, roles, decoding, *where)
    how = config.seed, config.batch_size, drawn
    watched, rest = numbers[: config.watch], numbers[config.watch :]
    with players(make, config.num_workers, device=device, address=address) as play:
        first = play(watched, *how, ShownRoles(), size=1) if config.watch else ()
        spoke: set[str] = set()
        for episode in chain(first, play(rest, *how, size=CHUNK)):
            yield _role_name(episode), episode
            spoke |= {episode.dialog.meta["role"]} if episode.end != "failed" else set()
    silent = " ".join(sorted(set(roles) - spoke - {OTHERS})) if spoke else ""
    others = sorted(spoke - set(roles))
    if silent and any(nearest(role, others) for role in silent.split()):  # somebody spoke in its place
        got, expected = ", ".join(sorted(spoke)), f"roles that speak in {config.env}"
        raise UserError(f"--roles {silent}: expected {expected}, which are {got}")
    if silent:
        print(f"never spoke in these episodes: {silent}", file=sys.stderr, flush=True)


def _role_name(episode: Episode) -> str:
    return f"{episode.dialog.meta['role']}={episode.dialog.meta['player']}"


class Book:
    """Where episodes are entered: the figures by player, the Dialogs, the films."""

    def __init__(self, config: PlaySettings, out: Path | None, file: TextIO | None) -> None:
        self.config, self.out, self.file = config, out, file
        self.tallies: dict[str, Tally] = {}
        self.films: list[str] = []
        self.played = 0  # episodes; those of several roles are entered once for each
        self.seconds = 0.0  # that the playing took

    def enter(self, name: str, episode: Episode) -> None:
        """One more episode, which is not kept."""
        self.tallies.setdefault(name, Tally()).add(episode)
        self.played += episode.opens
        dialog, number = episode.dialog, f"{self.config.seed}-{episode.index:06d}"
        who = re.sub(r"[^\w.-]+", "_", name) or "player"
        dialog.id = f"{dialog.source}-{number}-{who}"
        # Episodes of one number begin alike, and only they, where the world does not put more together:
        # `prepare` keeps them in one split.
        dialog.meta = {"player": name, "group": f"{dialog.source}-{number}", **dialog.meta}
        if self.file:
            self.file.write(dialog.to_json() + "\n")
        if self.out and episode.drawings:
            path = self.out / who / f"episode-{episode.index}.{self.config.format or 'svg'}"
            path.parent.mkdir(exist_ok=True)
            if path.suffix == ".gif":
                save_gif(path, frames_of(episode))
            else:
                write_text_atomically(path, moving_svg(frames_of(episode)))
            self.films.append(str(path))

    def figures(self) -> dict[str, Any]:
        """The figures of each player, and of all together where there is one or they shared the episodes."""
        names = sorted(self.tallies)
        together = next(iter(self.tallies.values()), Tally()) if len(names) < 2 else Tally()
        if self.config.player and len(names) > 1:
            for tally in self.tallies.values():
                together.join(tally)
        own = together.figures() if len(names) < 2 or self.config.player else {}
        return {
            "env": self.config.env,
            **own,
            "players": {name: self.tallies[name].figures() for name in self.tallies},
            "seconds": round(self.seconds, 2),
            "episodes_per_second": round(self.played / self.seconds, 2),
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
