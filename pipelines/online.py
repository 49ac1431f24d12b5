"""A policy talks in a world, learns from what came of it, and stays near its prior.

    python -m pipelines.online --checkpoint runs/bc --env small_talk --method rloo --output_dir runs/online
    python -m pipelines.online --checkpoint runs/bc --contexts data/mine --rewards.learned 1 \\
        --scorers reward_model=runs/reward --max_steps 100 --output_dir runs/rlhf
    python -m pipelines.online --checkpoint runs/bc --contexts data/mine --self_play --opponent_lag -1 \\
        --rewards.question 0.2 --rewards.repetition 0.5 --rewards.reply_sentiment 0.3 --output_dir runs/talks
    python -m pipelines.online --checkpoint runs/bc --users http://localhost:8000/v1 --personas people.txt \\
        --rewards.answer_length 1 --output_dir runs/users
    python -m pipelines.online --checkpoint runs/nim --env 'textarena:Nim-v0?opponent=self' --self_play \\
        --output_dir runs/champion

Each round plays `--groups` groups of `--group_size` episodes (a group has one conversation partner) and
learns from them; `rl_dialog/training/online.py` is the loop. The frozen prior is the checkpoint that it
starts from. Every episode stays as a Dialog in `rollouts/`, which `prepare` reads like any log; checkpoints
are those of `train`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from envs import text_env
from envs.adapters.endpoint_users import users_of
from rl_dialog.cluster.online import on_actors
from rl_dialog.errors import room_for
from rl_dialog.evaluation.checkpoints import MakeEnv
from rl_dialog.evaluation.online_run import (
    OnlineRun,
    check_run,
    contexts_of,
    judge_of,
    load_trainer,
    model_of,
    returns_of,
)
from rl_dialog.methods import ONLINE
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.device import named_device
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, at_least, claim_output, require, run
from rl_dialog.training.logger import following

CHOICES = {"method": ONLINE}
CHANGEABLE = (  # by --resume: how long, how fast and with what it is watched, but not what is learned
    *("max_steps", "eval_steps", "save_steps", "logging_steps", "save_total_limit", "env_episodes"),
    *("per_device_train_batch_size", "batch_size", "num_workers", "device", "checkpoint", "prior"),
    *("users", "user_concurrency", "user_timeout"),
)


@dataclass(frozen=True)
class OnlineConfig(OnlineRun, ResumableOutput, OnCluster, OnDevice):
    """Who learns, where, and how."""


def main(config: OnlineConfig) -> dict[str, Any]:
    """Plays and learns; returns the return before and after, and the checkpoint paths."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    check(config)
    make_env, held_out = worlds_of(config)
    judge = judge_of(config)
    out = claim_output(config, "online", free=CHANGEABLE, choices=CHOICES)
    with nullcontext() if config.quiet else following(out), room_for(out):
        how = {"judge": judge, "device": named_device(config.device)}
        trainer = load_trainer(config, out, make_env, held_out, **how)
        start = resolve(config.checkpoint)
        start = str(Path(start).absolute()) if Path(start).exists() else start  # actors start elsewhere
        where = {"device": config.device, "address": config.address or None}
        where["rounds"] = config.max_steps
        with on_actors(trainer.play, model_of(config, start), config.num_workers, **where) as play:
            trainer.play = play
            result = trainer.train()
    before, after = returns_of(out)
    returns = {"return_before": before, "return": after}
    return {"output_dir": str(out), **returns, **result, "rollouts": str(out / "rollouts")}


def worlds_of(config: OnlineConfig) -> tuple[MakeEnv, MakeEnv]:
    """What is learned in, and what the return is measured in. Raises UserError."""
    if config.env:
        return text_env(config.env), text_env(config.eval_env or config.env)
    if config.contexts:
        return contexts_of(config)
    how = {"model": config.user_model, "turns": config.user_turns, "seconds": config.user_timeout}
    return users_of(config.users, config.personas, concurrency=config.user_concurrency, **how)


def check(config: OnlineConfig) -> None:
    """What can be known to fail before anything is loaded. Raises UserError."""
    require(
        config,
        checkpoint="the policy to start from, a run folder or a checkpoint directory",
        output_dir="a folder for the run",
    )
    at_least(
        config,
        max_steps=1, groups=1, group_size=1, batch_size=0, env_episodes=1, self_play_turns=1,
        user_turns=1, user_concurrency=1,
        num_workers=0, cpus_per_worker=1, max_staleness=0, lora_r=1, lora_alpha=1,
        per_device_train_batch_size=1,
        num_iterations=1, num_mini_batches=1, warmup_steps=0, eval_steps=0, save_steps=0, logging_steps=1,
        save_total_limit=1, max_grad_norm=0, seed=0, value_unit=0,
        target_kl=0, kl_gain=0, supervised_weight=0,
    )  # fmt: skip
    check_run(config)


if __name__ == "__main__":
    run(OnlineConfig, main, choices=CHOICES)
