"""A policy talks in a world, learns from what came of it, and stays near its prior.

    python -m pipelines.online --model_name_or_path runs/bc --env small_talk --method rloo \\
        --output_dir runs/online
    python -m pipelines.online --model_name_or_path runs/bc --contexts data/mine --rewards.learned 1 \\
        --scorers reward_model=runs/reward --max_steps 100 --output_dir runs/rlhf
    python -m pipelines.online --model_name_or_path runs/bc --contexts data/mine --self_play \\
        --opponent_lag -1 --rewards.question 0.2 --rewards.repetition 0.5 --rewards.reply_sentiment 0.3 \\
        --output_dir runs/talks
    python -m pipelines.online --model_name_or_path runs/bc --users http://localhost:8000/v1 \\
        --personas people.txt --rewards.answer_length 1 --output_dir runs/users
    python -m pipelines.online --model_name_or_path runs/nim --env 'textarena:Nim-v0?opponent=self' \\
        --self_play --output_dir runs/champion
    python -m pipelines.online --model_name_or_path runs/bc --env small_talk \\
        --preferences.labeller people --output_dir runs/preferred

Each round plays `--groups` groups of `--group_size` episodes (a group has one conversation partner) and
learns from them; `rl_dialog/training/online.py` is the loop. The frozen prior is the checkpoint that it
starts from. Every episode stays as a Dialog in `rollouts/`, which `prepare` reads like any log; checkpoints
are those of `train`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from envs import text_env
from envs.adapters.endpoint_users import users_of
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import check_device, device, wants_gpus
from rl_dialog.cluster.online import on_actors
from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError, room_for
from rl_dialog.evaluation.checkpoints import MakeEnv
from rl_dialog.evaluation.online_checks import check_run, check_start, roles_learned
from rl_dialog.evaluation.online_run import (
    OnlineRun,
    absolute,
    absolute_scorers,
    contexts_of,
    decoding_of,
    judge_of,
    load_trainer,
    model_of,
    returns_of,
    with_absolute_paths,
)
from rl_dialog.evaluation.rollouts import Judge
from rl_dialog.methods import ONLINE
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.device import named_device
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelled_reward import LabelledReward
from rl_dialog.preferences.labelled_settings import LabelledRewardSettings
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, claimed, require, run
from rl_dialog.training.logger import following
from rl_dialog.training.start import Report, noting

CHOICES = {"method": ONLINE}
CHANGEABLE = (  # by --resume: how long, how fast and with what it is watched, but not what is learned
    *("max_steps", "eval_steps", "save_steps", "logging_steps", "save_total_limit", "env_episodes"),
    *("per_device_train_batch_size", "batch_size", "num_workers", "device", "model_name_or_path", "prior"),
    *("users", "user_concurrency", "user_timeout"),
    *("num_learners", "max_failures", "preferences"),
)


@dataclass(frozen=True)
class OnlineConfig(OnlineRun, ResumableOutput, OnCluster, OnDevice):
    """Who learns, where, and how."""

    preferences: LabelledRewardSettings = field(default_factory=LabelledRewardSettings)
    """learn from what people prefer of the policy's conversations, which they are asked while it learns"""


def main(config: OnlineConfig) -> dict[str, Any]:
    """Plays and learns; returns the return before and after, and the checkpoint paths."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    check(config)
    worlds, judge = worlds_of(config), judge_of(config)
    resumed = config.resume and Path(config.output_dir).is_dir()
    with (
        claimed(config, "online", free=CHANGEABLE, choices=CHOICES) as out,
        nullcontext() if config.quiet else following(out),
        room_for(out),
        emptied_if_refused(out, resumed=resumed),
    ):
        if config.num_learners:
            result = learn_on_workers(from_anywhere(config))
        else:
            result = learn(config, out, worlds, judge, named_device(config.device))
    before, after = returns_of(out)
    returns = {"return_before": before, "return": after}
    return {"output_dir": str(out), **returns, **result, "rollouts": str(out / "rollouts")}


@contextmanager
def emptied_if_refused(out: Path, *, resumed: bool) -> Iterator[None]:
    """A run that is refused before it has played a round leaves its folder to the corrected command: a world
    may say only when it is played how many roles it has. What was there before, and what was answered
    meanwhile, is kept."""
    try:
        yield
    except UserError as error:
        if (out / "latest").is_file() or any((out / "rollouts").glob("*")):
            raise
        if resumed or _is_answered(out):
            raise UserError(f"{error}. All in {out} is kept: go on with --resume") from error
        shutil.rmtree(out)
        raise


def _is_answered(out: Path) -> bool:
    """Is there an answer in the label log of the run?"""
    if not (out / "labels.db").is_file():
        return False
    log = LabelLog(RunFiles(out).own_labels, create=False)
    answers, *_ = log.state()
    log.close()
    return answers > 0


def worlds_of(config: OnlineConfig) -> tuple[MakeEnv, MakeEnv]:
    """What is learned in, and what the return is measured in. Raises UserError."""
    if config.env:
        return text_env(config.env), text_env(config.eval_env or config.env)
    if config.contexts:
        return contexts_of(config)
    how = {"model": config.user_model, "turns": config.user_turns, "seconds": config.user_timeout}
    return users_of(config.users, config.personas, concurrency=config.user_concurrency, **how)


def learn(
    config: OnlineConfig,
    out: Path,
    worlds: tuple[MakeEnv, MakeEnv],
    judge: Judge | None,
    device: torch.device,
    *,
    report: Report | None = None,
) -> dict[str, Any]:
    """What one learner does, with actors that play where there are any; of several the first one has them."""
    labelled = labelled_reward_of(config, out)
    learned = {} if labelled is None else {"watch": labelled.meet, "about_rewards": labelled.figures_now}
    loaded = {"judge": labelled or judge, **learned, "report": report, "device": device}
    trainer = load_trainer(config, out, *worlds, **loaded)
    start = resolve(config.model_name_or_path)
    start = str(Path(start).absolute()) if Path(start).exists() else start  # actors start elsewhere
    where = {"device": config.device, "address": config.address or None, "rounds": config.max_steps}
    workers = 0 if trainer.rank else config.num_workers
    with on_actors(trainer.play, model_of(config, start), workers, **where) as play:
        trainer.play = play
        return trainer.train()


def labelled_reward_of(config: OnlineConfig, out: Path) -> LabelledReward | None:
    """What asks people about the conversations and learns from their answers, where they are asked; of
    several learners the first one asks, because it plays."""
    if not config.preferences.is_asked:
        return None
    how = {"total_rounds": config.max_steps, "group_size": config.group_size, "seed": config.seed}
    how |= {"start": config.model_name_or_path, "decoding": decoding_of(config), "device": config.device}
    how |= {"world_pays": bool(config.env)}
    return LabelledReward(config.preferences, out, **how)


def learn_on_workers(config: OnlineConfig) -> dict[str, Any]:
    """The same by Ray Train workers, started again from the latest checkpoint when one of them dies."""
    # a second of imports, which learning here does without
    from rl_dialog.cluster.train import WorkerGroup, fit

    cpus, out = config.cpus_per_worker, Path(config.output_dir)
    with connect(config.address or None, num_cpus=(config.num_learners + config.num_workers) * cpus + 1):
        use_gpu = wants_gpus(config.device, config.num_learners)
        config = replace(config, device=config.device if use_gpu else "cpu")
        fit(learn_worker, config, WorkerGroup(config.num_learners, cpus, use_gpu, config.max_failures), out)
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def learn_worker(config: OnlineConfig, *, report: Report | None = None) -> dict[str, Any]:
    """What one Ray Train worker does; runs without Ray too, then on the device that the flag means."""
    load_quietly()
    out = Path(config.output_dir)
    where = device() if "WORLD_SIZE" in os.environ and config.device != "cpu" else named_device(config.device)
    with noting([], out), room_for(out):
        result = learn(config, out, worlds_of(config), judge_of(config), where, report=report)
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(out / "result.json", result)
    return result


def from_anywhere(config: OnlineConfig) -> OnlineConfig:
    """With absolute paths: workers do not share the driver's working directory."""
    asked = config.preferences
    places = {"scorers": absolute_scorers(asked.scorers)}
    places |= {"model_name_or_path": absolute(asked.model_name_or_path)}
    out = str(Path(config.output_dir).absolute())
    return replace(with_absolute_paths(config), output_dir=out, preferences=replace(asked, **places))


def check(config: OnlineConfig) -> None:
    """What can be known to fail before the run is begun. Raises UserError."""
    require(
        config,
        model_name_or_path="the policy to start from, a run folder or a checkpoint directory",
        output_dir="a folder for the run",
    )
    check_device(config.device, config.address)
    check_settings(config)
    check_start(config)
    if config.preferences.is_asked:
        config.preferences.check_models(config.model_name_or_path)


def check_trial(config: OnlineConfig) -> None:
    """The same of a trial of a sweep, before there is what it starts from. Raises UserError."""
    check_settings(config)
    if config.num_workers:
        raise UserError(
            f"--num_workers {config.num_workers} among the flags of online: expected none, because a trial "
            "plays in its own processes (tune --num_workers, which are its learners)"
        )


def check_settings(config: OnlineConfig) -> None:
    """What needs nothing that the settings name, apart from worlds. Raises UserError."""
    check_run(config, labelled=config.preferences.is_asked)
    if config.preferences.is_asked:
        sizes = {"groups": config.groups, "group_size": config.group_size}
        config.preferences.check(**sizes, roles=roles_learned(config), world_pays=bool(config.env))
    for name in (config.env, config.eval_env):
        if name:
            text_env(name)


if __name__ == "__main__":
    run(OnlineConfig, main, choices=CHOICES)
