"""Watch a policy that `prefer` trained: films of its episodes, and the predicted against the true reward.

    python -m pipelines.play --checkpoint runs/dot                                          the latest checkpoint and the newest reward of a run
    python -m pipelines.play --checkpoint runs/dot/checkpoint-57600 --sampled               an earlier one, with the reward that it was trained on
    python -m pipelines.play --checkpoint runs/dot --reward_model runs/other/reward/3             what another reward makes of it
    python -m pipelines.play --checkpoint policy --env pong --format mp4                    a checkpoint without a run around it; MP4 needs PyAV

Into `out` go

    episode-<i>.gif (or .mp4)   the first `films` episodes: what was seen before each action, the action, both rewards and their sums
    episode-<i>.png             both rewards of its steps, and their sums
    returns.png                 both returns of all episodes
    steps.csv                   every step of every episode: action and both rewards
    play.json                   the figures, and both returns of every episode
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipelines.prefer_settings import PreferConfig, make_envs
from rl_dialog.config import read_yaml
from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation.control_episodes import ControlEpisode, correlation, play_control
from rl_dialog.evaluation.control_plots import episode_plot, returns_plot
from rl_dialog.evaluation.films import MOST_GIF_FPS, action_text, film, mp4_library, save_gif, save_mp4
from rl_dialog.evaluation.intervals import Measure, estimate
from rl_dialog.models.control_policy import ControlPolicy, ControlPolicyConfig, shape_of
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.preferences.roles import newest_version
from rl_dialog.run import Output, claim_output, run


@dataclass(frozen=True)
class PlayConfig(Output):
    """Whose episodes, and how they are shown."""

    checkpoint: str = ""
    """folder of a run, or of one of its checkpoints, or of a checkpoint without a run"""
    env: str = ""
    """moving_dot, pong, enduro or atari; by default the run's"""
    env_options: str = ""
    """arguments of the environment, `observations=position,continuous=true`; by default the run's"""
    reward_model: str = ""
    """folder of a reward model; by default the run's: the newest, of a checkpoint the one that it was trained on last"""
    episodes: int = 20
    """that are played, all at once"""
    films: int = 3
    """of them that are drawn and plotted"""
    film_steps: int = 3000
    """of a film at most; episodes are played to their ends"""
    sampled: bool = False
    """actions are drawn as in training; otherwise the most probable ones"""
    seed: int = 0
    """of the episodes and of sampled actions"""
    format: Literal["gif", "mp4"] = "gif"
    """of films"""
    fps: int = 0
    """frames per second of films; 0: the environment's own speed"""


def main(config: PlayConfig) -> dict[str, Any]:
    """Plays, writes, and returns headline figures. Raises UserError for what does not fit, ImportError without an environment's or MP4's library."""
    _check(config)
    checkpoint, folder = find_checkpoint(config.checkpoint)
    envs = make_envs(_environment(config, folder))(config.episodes, worker=0)
    try:
        shape = shape_of(envs)
        policy = ControlPolicy.from_pretrained(checkpoint, expected=shape)
        reward_folder = _find_reward(config, checkpoint, folder)
        reward = _load_reward(reward_folder, shape) if reward_folder else None
        told = f"reward     {reward_folder}" if reward else "reward     none there: only the true one is shown"
        _say(config, f"checkpoint {checkpoint}\n{told}")
        more = {"draw": envs.draw, "drawn": config.films, "most_frames": config.film_steps, "quiet": config.quiet}
        episodes = play_control(policy, envs, seed=config.seed, greedy=not config.sampled, reward=reward, **more)
        out = Path(config.output_dir) if config.output_dir else folder / "play" / checkpoint.name if folder else checkpoint / "play"
        claim_output(replace(config, output_dir=str(out)), "play")
        _write(config, out, episodes, getattr(envs, "action_names", ()), config.fps or envs.frames_per_second)
    finally:
        envs.close()
    found = {"checkpoint": str(checkpoint), "reward": str(reward_folder) if reward else None, **figures(episodes)}
    each = [{"steps": len(one.rewards), "return": one.true_return, "predicted_return": one.predicted_return} for one in episodes]
    write_json(out / "play.json", {**found, "greedy": not config.sampled, "seed": config.seed, "each": each})
    return {**found, "output_dir": str(out)}


def find_checkpoint(given: str) -> tuple[Path, Path | None]:
    """The folder of the checkpoint that is meant, and of the run around it. Raises UserError where there is none."""
    path = Path(given) if Path(given).name not in ("", "..") else Path(given).resolve()  # whose parent is not in its text
    if given and (path / "config.json").is_file():
        return path, path.parent if (path.parent / "prefer.yaml").is_file() else None
    if given and (path / "latest").is_file():
        return path / (path / "latest").read_text(encoding="utf-8").strip(), path
    if given and (path / "prefer.yaml").is_file():
        raise UserError(f"--checkpoint: {path} holds a run that has saved no policy yet; `prefer` does so every --save_every rounds and at its end")
    raise UserError(f"--checkpoint: expected the folder of a run of `prefer` or of a checkpoint, got {given!r}, which holds neither")


def figures(episodes: Sequence[ControlEpisode]) -> dict[str, Any]:
    """Of episodes: the mean true return with its 95 % interval, the predicted one, and correlations over all steps and over episodes."""
    returns = [each.true_return for each in episodes]
    mean = estimate([Measure.mean(returns)])
    found = {"episodes": len(episodes), "steps": sum(len(each.rewards) for each in episodes), "return": round(mean.value, 3)}
    found["return_interval"] = None if mean.low is None else [round(mean.low, 3), round(mean.high, 3)]
    if episodes[0].predicted is None:
        return found
    predicted = np.array([each.predicted_return for each in episodes])
    true_steps, predicted_steps = (np.concatenate([getattr(each, name) for each in episodes]) for name in ("rewards", "predicted"))
    both = {"step_correlation": correlation(true_steps, predicted_steps), "return_correlation": correlation(np.array(returns), predicted)}
    found["predicted_return"] = round(float(predicted.mean()), 3)
    return found | {name: None if value is None else round(value, 3) for name, value in both.items()}


def _check(config: PlayConfig) -> None:
    for name, least in {"episodes": 1, "films": 0, "film_steps": 1, "fps": 0, "seed": 0}.items():
        if getattr(config, name) < least:
            raise UserError(f"expected --{name} of at least {least}, got {getattr(config, name)}")
    if config.format == "gif" and config.fps > MOST_GIF_FPS:
        raise UserError(f"--fps: a GIF has at most {MOST_GIF_FPS} frames per second, got {config.fps}: expected fewer, or --format mp4")
    if config.format == "mp4" and config.films:
        mp4_library()


def _environment(config: PlayConfig, folder: Path | None) -> PreferConfig:
    """The environment that the flags say, else the run's."""
    settings = read_yaml(str(folder / "prefer.yaml")) if folder else {}
    if not config.env and "env" not in settings:
        raise UserError(f"expected --env: {config.checkpoint} has no run's prefer.yaml around it that says where its policy plays")
    own = settings.get("env_options", "") if config.env in ("", settings.get("env")) else ""
    return PreferConfig(env=config.env or settings["env"], env_options=config.env_options or own)


def _find_reward(config: PlayConfig, checkpoint: Path, folder: Path | None) -> Path | None:
    """The folder of the reward model that is meant; None: the run has none."""
    if config.reward_model or folder is None:
        return Path(config.reward_model) if config.reward_model else None
    progress = checkpoint / "trainer" / "progress.json"
    one = checkpoint.samefile(config.checkpoint) and progress.is_file()
    version = json.loads(progress.read_text(encoding="utf-8")).get("reward_version", 0) if one else 0
    if version and (folder / "reward" / str(version)).is_dir():
        return folder / "reward" / str(version)
    newest = newest_version(folder / "reward")
    if version and newest:
        _say(config, f"the reward of version {version}, which this checkpoint was trained on, was deleted: the newest is shown")
    return folder / "reward" / str(newest) if newest else None


def _load_reward(folder: Path, shape: ControlPolicyConfig) -> RewardModel:
    reward = RewardModel.from_pretrained(folder)
    told = lambda each: f"observations {each.observation} and {each.actions} {'discrete' if each.discrete else 'continuous'} actions"  # noqa: E731
    needs, has = told(shape), told(reward.config)
    if needs != has:
        raise UserError(f"{folder}: expected a reward model for {needs}, got one for {has}: it was fitted in another environment")
    return reward


def _write(config: PlayConfig, out: Path, episodes: Sequence[ControlEpisode], names: Sequence[str], fps: int) -> None:
    save = save_gif if config.format == "gif" else save_mp4
    for i, episode in enumerate(episodes[: config.films]):
        _say(config, f"drawing    {out / f'episode-{i}.{config.format}'}")
        save(out / f"episode-{i}.{config.format}", film(episode, names), fps)
        (out / f"episode-{i}.png").write_bytes(episode_plot(episode, f"episode {i}"))
    if episodes[0].predicted is not None:
        (out / "returns.png").write_bytes(returns_plot(episodes, f"{len(episodes)} episodes"))
    with (out / "steps.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["episode", "step", "action", "reward", *(["predicted"] if episodes[0].predicted is not None else [])])
        for i, episode in enumerate(episodes):
            columns = [episode.rewards.tolist()] + ([] if episode.predicted is None else [episode.predicted.tolist()])
            for step, values in enumerate(zip(*columns, strict=True)):
                rows.writerow([i, step + 1, action_text(episode.actions[step], names), *values])


def _say(config: PlayConfig, text: str) -> None:
    if not config.quiet:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(PlayConfig, main)
