"""Play in any world: a checkpoint, scripted players, or you; and logs of what was played.

    python -m pipelines.play --env wordle --player optimal --episodes 1000     # mean return, error and ends
    python -m pipelines.play --env toy_maze --player random=3 half=1 --episodes 2000 --logs logs.jsonl
        # logs to train on, each player with its share of the episodes
    python -m pipelines.play --env wordle --player person                       # you, in this terminal
    python -m pipelines.play --env toy_maze --player optimal --watch 1          # an episode as it goes on
    python -m pipelines.play --env "textarena:Nim-v0?opponent=self" --roles player_0=runs/a player_1=perfect
        # each role of a world of several by its own player: checkpoints, scripted players, you
    python -m pipelines.play --env wordle --checkpoint runs/ilql --beta 0 2 4 8 --output_dir runs/played
    python -m pipelines.play --checkpoint runs/dot                              # what `prefer` trained

In a world of words (--env, envs/README.md) episodes of a checkpoint are played in batches, and what was read
of a conversation stays in the cache. Episode i of a seed is the same for every player, whatever the batch
size and number of workers. Into the output folder go

    dialogs.jsonl        every episode as a Dialog with its rewards, which `prepare` reads (or in --logs)
    play.json            mean return, standard error and ends by player
    PLAYER/episode-<i>.svg (or .gif)    the first `films` episodes: what the world draws, what was said and
                         earned

What `prefer` trained plays in its own world: films, and the predicted reward beside the true one
(rl_dialog/preferences/README.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import CONTROL, ENVS, PREFIXES, is_plain, text_env
from envs.adapters.chat_endpoint import checked_address
from envs.adapters.endpoint_player import WithEndpoints
from envs.gymnasium_vector import known
from pipelines.play_control import watch_control
from rl_dialog.cluster.gpus import check_device
from rl_dialog.cluster.playing import PlaySettings, check_players, play_rounds, rounds_of, with_person
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.tally import table
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import resolve
from rl_dialog.own import own
from rl_dialog.run import OnCluster, OnDevice, Output, at_least, claim_output, progress, run


@dataclass(frozen=True)
class PlayConfig(PlaySettings, Output, OnCluster, OnDevice):
    """Who plays, where, and how it is shown."""

    env_options: str = ""
    """policies of `prefer` only: arguments of the environment, `observations=position,continuous=true`; by
    default the run's"""
    reward_model: str = ""
    """policies of `prefer` only: folder of a reward model; by default the run's: the newest, of a checkpoint
    the one that it was trained on last"""
    film_steps: int = 3000
    """policies of `prefer` only: most steps of a film; episodes are played to their ends"""
    sampled: bool = False
    """policies of `prefer` only: draw actions as in training; otherwise the most probable ones are taken"""
    fps: int = 0
    """policies of `prefer` only: frames per second of films; 0: the environment's own speed"""


# Settings that only one of the two kinds of worlds has.
IN_WORDS = ("player", "roles", "beta", "logs", "watch", "num_workers", "address", "batch_size", "device")
OF_PREFER = ("env_options", "reward_model", "film_steps", "sampled", "fps")


def main(config: PlayConfig) -> dict[str, Any]:
    """Plays, writes what is asked for, and returns headline figures. Raises UserError for what does not
    fit."""
    in_words = talks(config)
    default, decoding = PlayConfig(), tuple(Decoding.__dataclass_fields__)
    for name in OF_PREFER if in_words else (*IN_WORDS, *decoding):
        if getattr(config, name) != getattr(default, name):
            kind = "a world in words" if in_words else "a policy of `prefer`"
            raise UserError(f"--{name} does not apply to {kind}: leave it out")
    if not in_words:
        return watch_control(config)
    load_quietly()
    endpoints = re.findall(r"https?://[^\s=]+", " ".join((*config.player, *config.roles)))
    for address in endpoints:
        checked_address("--player", address)
    make_env = text_env(config.env)
    return _play_text(config, WithEndpoints(make_env, tuple(endpoints)) if endpoints else make_env)


def talks(config: PlayConfig) -> bool:
    """Whether it is a world in words that is played, and not one of `prefer`."""
    scripted = bool(config.player or config.roles)
    if scripted or not config.env:
        return scripted
    if config.env.partition(":")[0] in PREFIXES:
        return True
    if known(config.env):
        return False
    if ":" in config.env:
        found = own(config.env, "env")
        if is_plain(found):  # of words or of numbers: who plays tells
            return _writes(config.checkpoint)
        return not hasattr(found, "clip_length")
    if (plain := config.env.partition("?")[0]) in ENVS:
        return plain not in CONTROL
    folder = Path(config.checkpoint)  # an unknown name: whose are the names that it is near to?
    return not any((place / "prefer.yaml").is_file() for place in (folder, folder.parent))


def _writes(checkpoint: str) -> bool:
    """Whether it is a language model's, which has a tokenizer."""
    try:
        return bool(checkpoint) and Path(resolve(checkpoint), "tokenizer_config.json").is_file()
    except UserError:  # of a run without a checkpoint: its own verb says so
        return False


def _play_text(config: PlayConfig, make_env: Callable[[], Any]) -> dict[str, Any]:
    """Plays in a world of words."""
    at_least(config, episodes=1, films=0, seed=0, batch_size=1, num_workers=0, watch=0)
    check_players(config, quiet=config.quiet)
    check_device(config.device, config.address)
    rounds = rounds_of(config, make_env)
    logs = Path(config.logs).absolute() if config.logs else None
    if logs and logs.is_dir():
        raise UserError(f"--logs: expected a file, got the folder {logs}: name a file in it")
    if logs and logs.exists() and not config.overwrite:
        raise UserError(f"--logs: {logs} is there already: choose another file, or --overwrite")
    out = claim_output(config, "play", written=["logs"]) if config.output_dir else None
    logs = logs or (out / "dialogs.jsonl" if out else None)
    total = len(rounds) * config.episodes
    quiet = config.quiet or bool(config.watch) or with_person(config)
    where = {"out": out, "logs": logs, "device": config.device, "address": config.address or None}
    with progress("play", total, "episodes", quiet=quiet) as step:
        book = play_rounds(config, make_env, rounds, **where, step=step)
    if not config.quiet:
        print(table(book.tallies))
    paths = {"dialogs": logs and str(logs), "films": book.films, "output_dir": out and str(out)}
    return book.figures() | paths


if __name__ == "__main__":
    run(PlayConfig, main)
