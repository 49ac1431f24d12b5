"""Watch a policy that `prefer` trained: films of its episodes, and the predicted against the true reward.

Into the output folder, by default `play/CHECKPOINT` in the run's, go

    episode-<i>.gif (or .mp4)   the first `films` episodes: what was seen before each action, the action, both
        rewards and their sums
    episode-<i>.png             both rewards of its steps, and their sums
    returns.png                 both returns of all episodes
    steps.csv                   every step of every episode: action and both rewards
    play.json                   the figures, and both returns of every episode
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs import vectors_of, with_options
from rl_dialog.config import read_yaml
from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation.control_episodes import ControlEpisode, headline, play_control
from rl_dialog.evaluation.control_report import write_episodes
from rl_dialog.evaluation.films import MOST_GIF_FPS, mp4_library
from rl_dialog.models.control_policy import ControlPolicy, shape_of
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.preferences.earlier_runs import environment_options
from rl_dialog.preferences.run_files import find_checkpoint, find_reward
from rl_dialog.run import at_least, claim_output

if TYPE_CHECKING:
    from pipelines.play import PlayConfig


def watch_control(config: PlayConfig) -> dict[str, Any]:
    """Plays, writes, and returns headline figures. Raises UserError for what does not fit, ImportError
    without a library."""
    _check(config)
    checkpoint, folder = find_checkpoint(config.checkpoint)
    make_envs = _make_envs(config, folder)
    drawn = {"pictures": config.films} if getattr(make_envs.func, "is_drawn_when_seen", False) else {}
    envs = make_envs(config.episodes, worker=0, **drawn)
    try:
        shape = shape_of(envs)
        policy = ControlPolicy.from_pretrained(checkpoint, expected=shape)
        reward_folder = _reward_folder(config, checkpoint, folder)
        reward = RewardModel.from_pretrained(reward_folder, expected=shape) if reward_folder else None
        shown = f"reward     {reward_folder or 'none there: only the true one is shown'}"
        _say(config, f"checkpoint {checkpoint}\n{shown}")
        out = folder / "play" / checkpoint.name if folder else checkpoint / "play"
        out = claim_output(replace(config, output_dir=config.output_dir or str(out)), "play")
        how = {"seed": config.seed, "greedy": not config.sampled, "reward": reward, "quiet": config.quiet}
        shown = {"draw": envs.draw, "drawn": config.films, "most_frames": config.film_steps}
        episodes = play_control(policy, envs, **how, **shown)
        fps = config.fps or envs.frames_per_second
        films = {"films": config.films, "format": _format(config), "fps": fps}
        names = getattr(envs, "action_names", ())
        write_episodes(out, episodes, **films, names=names, say=lambda text: _say(config, text))
    finally:
        envs.close()
    figures = {
        "checkpoint": str(checkpoint),
        "reward": str(reward_folder) if reward else None,
        **headline(episodes),
    }
    settings = {"greedy": not config.sampled, "seed": config.seed}
    write_json(out / "play.json", {**figures, **settings, "each": [_returns(one) for one in episodes]})
    return {**figures, "output_dir": str(out)}


def _returns(episode: ControlEpisode) -> dict[str, Any]:
    both = {"return": episode.true_return, "predicted_return": episode.predicted_return}
    return {"steps": len(episode.rewards), **both}


def _check(config: PlayConfig) -> None:
    at_least(config, episodes=1, films=0, film_steps=1, fps=0, seed=0)
    if _format(config) == "svg":
        raise UserError("--format svg: expected gif or mp4, an SVG is drawn of worlds in words")
    if _format(config) == "gif" and config.fps > MOST_GIF_FPS:
        most = f"a GIF has at most {MOST_GIF_FPS} frames per second, got {config.fps}"
        raise UserError(f"--fps: {most}: expected fewer, or --format mp4")
    if _format(config) == "mp4" and config.films:
        mp4_library()


def _format(config: PlayConfig) -> str:
    return config.format or "gif"


def _make_envs(config: PlayConfig, folder: Path | None) -> Any:
    """The environment that the flags say, else the run's."""
    settings = read_yaml(str(folder / "prefer.yaml")) if folder else {}
    if not config.env and "env" not in settings:
        where = f"{config.checkpoint} has no run's prefer.yaml around it that says where its policy plays"
        raise UserError(f"expected --env: {where}")
    own = environment_options(settings) if config.env in ("", settings.get("env")) else ""
    options = config.env_options or own
    if "absorbed_steps=" in options and not config.env_options:
        # to the time limit, or the reward's own return of an episode would depend on how long it is
        options = with_options(config.env or settings["env"], options, {"absorbed_steps": 0})
    return vectors_of(config.env or settings["env"], options)


def _reward_folder(config: PlayConfig, checkpoint: Path, folder: Path | None) -> Path | None:
    """The folder of the reward model that is meant; None: the run has none."""
    if config.reward_model or folder is None:
        return Path(config.reward_model) if config.reward_model else None
    path, deleted = find_reward(folder, checkpoint if checkpoint.samefile(config.checkpoint) else None)
    if deleted:
        was = f"the reward of version {deleted}, which this checkpoint was trained on, was deleted"
        _say(config, f"{was}: the newest is shown")
    return path


def _say(config: PlayConfig, text: str) -> None:
    if not config.quiet:
        print(text, file=sys.stderr, flush=True)
