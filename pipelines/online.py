"""A policy talks in a world, learns from what came of it, and stays near its prior.

    python -m pipelines.online --checkpoint runs/bc --env small_talk --method rloo --output_dir runs/online
    python -m pipelines.online --checkpoint runs/bc --contexts data/mine --rewards.learned 1 \
        --scorers reward_model=runs/reward --max_steps 100 --output_dir runs/rlhf

Each round plays `--groups` groups of `--group_size` episodes (a group has one conversation partner) and
learns from them; `rl_dialog/training/online.py` is the loop. The frozen prior is the checkpoint that it
starts from. Every episode stays as a Dialog in `rollouts/`, which `prepare` reads like any log; checkpoints
are those of `train`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging as transformers_logging

from envs import text_env
from rl_dialog.errors import room_for
from rl_dialog.evaluation.online_run import OnlineRun, check_run, contexts_of, load_trainer, returns_of
from rl_dialog.methods import ONLINE
from rl_dialog.models.device import named_device
from rl_dialog.run import OnDevice, ResumableOutput, at_least, claim_output, require, run
from rl_dialog.training.logger import following

CHOICES = {"method": ONLINE}
CHANGEABLE = (  # by --resume: how long, how fast and with what it is watched, but not what is learned
    *("max_steps", "eval_steps", "save_steps", "logging_steps", "save_total_limit", "env_episodes"),
    *("per_device_train_batch_size", "batch_size", "device", "checkpoint", "prior"),
)


@dataclass(frozen=True)
class OnlineConfig(OnlineRun, ResumableOutput, OnDevice):
    """Who learns, where, and how."""


def main(config: OnlineConfig) -> dict[str, Any]:
    """Plays and learns; returns the return before and after, and the checkpoint paths."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    check(config)
    make_env, held_out = [text_env(config.env)] * 2 if config.env else contexts_of(config)
    out = claim_output(config, "online", free=CHANGEABLE, choices=CHOICES)
    with nullcontext() if config.quiet else following(out), room_for(out):
        trainer = load_trainer(config, out, make_env, held_out, device=named_device(config.device))
        result = trainer.train()
    before, after = returns_of(out)
    returns = {"return_before": before, "return": after}
    return {"output_dir": str(out), **returns, **result, "rollouts": str(out / "rollouts")}


def check(config: OnlineConfig) -> None:
    """What can be known to fail before anything is loaded. Raises UserError."""
    require(
        config,
        checkpoint="the policy to start from, a run folder or a checkpoint directory",
        output_dir="a folder for the run",
    )
    at_least(
        config,
        max_steps=1, groups=1, group_size=1, batch_size=1, env_episodes=1, per_device_train_batch_size=1,
        num_iterations=1, num_mini_batches=1, warmup_steps=0, eval_steps=0, save_steps=0, logging_steps=1,
        save_total_limit=1, max_grad_norm=0, seed=0, value_unit=0,
    )  # fmt: skip
    check_run(config)


if __name__ == "__main__":
    run(OnlineConfig, main, choices=CHOICES)
