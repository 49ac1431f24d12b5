"""Play in any world: a checkpoint, scripted players, or you; and logs of what was played.

    python -m pipelines.play --env wordle --player optimal --episodes 1000     mean return, error and ends
    python -m pipelines.play --env toy_maze --player random=3 half=1 --episodes 2000 --logs logs.jsonl
        logs to train on, each player with its share of the episodes
    python -m pipelines.play --env wordle --player person                       you, in this terminal
    python -m pipelines.play --env toy_maze --player optimal --watch 1          an episode as it goes on
    python -m pipelines.play --env wordle --checkpoint runs/ilql --beta 0 2 4 8 --output_dir runs/played
    python -m pipelines.play --checkpoint runs/dot                              what `prefer` trained

In a world of words (--env, envs/README.md) episodes of a checkpoint are played in batches, and what was read
of a conversation stays in the cache. Episode i of a seed is the same for every player, whatever the batch
size and number of workers. Into the output folder go

    dialogs.jsonl        every episode as a Dialog with its rewards, which `prepare` reads (or in --logs)
    play.json            mean return, standard error and ends by player
    PLAYER/episode-<i>.svg    the first `films` episodes, drawn by the world

What `prefer` trained plays in its own world: films, and the predicted reward beside the true one
(rl_dialog/preferences/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils import logging as transformers_logging

from envs import text_env
from pipelines.play_control import watch_control
from pipelines.play_text import play_text, talks
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.run import OnCluster, OnDevice, Output, run


@dataclass(frozen=True)
class PlayConfig(Decoding, Output, OnCluster, OnDevice):
    """Who plays, where, and how it is shown."""

    checkpoint: str = ""
    """run folder (its best checkpoint) or checkpoint directory; of `prefer`, also one without a run"""
    player: tuple[str, ...] = ()
    """instead of a checkpoint: scripted players of the world by name, with shares (random=3 half=1) or
    alike, module:Class for your own, or person"""
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
    """format of the films: svg of worlds in words, gif (the default) or mp4 of the others"""
    env_options: str = ""
    """of `prefer`: arguments of the environment, `observations=position,continuous=true`; by default the
    run's"""
    reward_model: str = ""
    """of `prefer`: folder of a reward model; by default the run's: the newest, of a checkpoint the one that
    it was trained on last"""
    film_steps: int = 3000
    """of `prefer`: most steps of a film; episodes are played to their ends"""
    sampled: bool = False
    """of `prefer`: draw actions as in training; otherwise the most probable ones are taken"""
    fps: int = 0
    """of `prefer`: frames per second of films; 0: the environment's own speed"""


# Settings that only one of the two kinds of worlds has.
IN_WORDS = ("player", "beta", "logs", "watch", "num_workers", "address", "batch_size", "device")
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
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    return play_text(config, text_env(config.env))


if __name__ == "__main__":
    run(PlayConfig, main)
