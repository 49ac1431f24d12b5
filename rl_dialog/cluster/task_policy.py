"""Training of task policies: imitation (rl_dialog/training/task_policy.py), and reinforcement from where that
ends."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_dialog.cluster.data import connect
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig
from rl_dialog.models.adversarial_reward import AdversarialReward
from rl_dialog.models.checkpoint import resolve
from rl_dialog.training.policy_gradient import GDPL, PPO
from rl_dialog.training.task_policy import Checkpoints, TaskTraining, imitated
from rl_dialog.training.task_settings import REINFORCED_EPOCHS, TaskSettings

if TYPE_CHECKING:
    from rl_dialog.cluster.rllib import MakeEnvs


@dataclass(frozen=True)
class Reinforcement:
    """How to reinforce, and where.

    Args:
        epochs: batches of turns.
        num_workers: actors that hold conversations; 0: this process.
        num_envs: conversations that each of them steps at a time.
        eval_every: epochs between evaluations, which are also the checkpoints.
    """

    method: PPO
    make_envs: MakeEnvs
    epochs: int = REINFORCED_EPOCHS
    num_workers: int = 0
    num_envs: int = 64
    eval_every: int = 5
    address: str | None = None


def trained(
    training: TaskTraining,
    settings: TaskSettings,
    shape: ActPolicyConfig,
    make_envs: MakeEnvs,
    *,
    resume: bool = False,
    address: str | None = None,
) -> tuple[ActPolicy, dict[str, Any]]:
    """The policy that the settings ask for (the best by success on the validation goals), and what became of
    its training; without epochs the one to start from."""
    start = None
    if settings.model_name_or_path:
        place = resolve(settings.model_name_or_path)
        start = ActPolicy.from_pretrained(place, expected=shape)
        if settings.epochs == 0:
            return start, {"checkpoint": place}
    began = time.perf_counter()
    if settings.policy == "mle":
        policy, figures = imitated(training, settings.imitation, shape, start)
    else:
        where = {"resume": resume, "address": address}
        policy, figures = reinforced(training, settings, shape, make_envs, start, **where)
    return policy, {**figures, "train_seconds": round(time.perf_counter() - began, 1)}


def reinforced(
    training: TaskTraining,
    settings: TaskSettings,
    shape: ActPolicyConfig,
    make_envs: MakeEnvs,
    start: ActPolicy | None = None,
    *,
    resume: bool = False,
    address: str | None = None,
) -> tuple[ActPolicy, dict[str, Any]]:
    """From the latest checkpoint of the run, from `start`, or from what imitation leads to."""
    checkpoints = Checkpoints(training.folder, training.save_total_limit, resume=resume)
    if checkpoints.epoch > settings.reinforced_epochs and not training.quiet:
        why = f"the run has {checkpoints.epoch} epochs already, --epochs is {settings.reinforced_epochs}"
        print(f"note: nothing is trained: {why}", file=sys.stderr, flush=True)
    if checkpoints.epoch:
        start = ActPolicy.from_pretrained(checkpoints.latest, expected=shape)
    elif start is None:
        before = replace(training, folder=training.folder / "imitation")
        start, _ = imitated(before, settings.mle, shape)
    sizes = {name: getattr(settings, name) for name in ("num_workers", "num_envs", "eval_every")}
    how = Reinforcement(settings.method, make_envs, settings.reinforced_epochs, **sizes, address=address)
    return train_by_reinforcement(training, how, start, checkpoints)


def train_by_reinforcement(
    training: TaskTraining, settings: Reinforcement, start: ActPolicy, checkpoints: Checkpoints
) -> tuple[ActPolicy, dict[str, Any]]:
    """Trains a copy of `start`, which is the latest of the checkpoints where there are any.

    Returns the best by success on the validation goals, and what became of the training. Raises UserError,
    OSError.
    """
    from rl_dialog.cluster.rllib import PolicyTrainer  # RLlib loads for seconds

    first, policy = checkpoints.epoch, start
    reward = _learned_reward(training, settings.method)
    shape = {"workers": settings.num_workers, "envs": settings.num_envs, "seed": training.seed}
    shape |= {"first_round": first, "renew_every": settings.eval_every}
    with (
        connect(settings.address, num_cpus=settings.num_workers) if settings.num_workers else nullcontext(),
        PolicyTrainer(policy, settings.make_envs, settings.method, reward=reward, **shape) as trainer,
        training.logged(first) as log,
    ):
        if first:
            checkpoints.load(trainer.load, reward)
        else:
            log(0, metrics := training.validate(policy))
            checkpoints.save(0, policy, metrics, trainer.save, reward)
        for epoch in range(first + 1, settings.epochs + 1):
            began = time.perf_counter()
            sampled = trainer.train() | getattr(reward, "metrics", {})
            metrics = {f"train/{name}": value for name, value in sampled.items()}
            metrics |= {
                "train/seconds": time.perf_counter() - began,
                "train/progress": epoch / settings.epochs,
            }
            if epoch % settings.eval_every == 0 or epoch == settings.epochs:
                policy = trainer.policy()
                metrics |= training.validate(policy)
                checkpoints.save(epoch, policy, metrics, trainer.save, reward)
            log(epoch, metrics)
    best = ActPolicy.from_pretrained(checkpoints.best_folder, expected=start.config)
    return best, {"epoch": checkpoints.best_epoch, "checkpoint": str(checkpoints.best_folder)}


def _learned_reward(training: TaskTraining, method: PPO) -> AdversarialReward | None:
    if not isinstance(method, GDPL):
        return None
    experts = training.experts()
    return AdversarialReward(
        experts.states, experts.actions, experts.dialogs, method.reward, seed=training.seed
    )
