"""Training of task policies: what a run writes, and its first stage, imitation.
rl_dialog/cluster/task_policy.py reinforces from there.

    checkpoint-<epoch>/    config.json, model.safetensors, metrics.json; in the latest trainer/, to resume
    best, latest           names of checkpoints; the best has most success on the validation goals
    metrics.jsonl, tensorboard/

An epoch of imitation is a pass over the demonstrations, of reinforcement a batch of the simulator's turns.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rl_dialog.data.files import write_atomically, write_json, write_text_atomically
from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig, GreedyActs
from rl_dialog.models.adversarial_reward import AdversarialReward
from rl_dialog.training.imitation import Imitation, imitate
from rl_dialog.training.logger import Log, logged
from rl_dialog.training.optim import load_optimizer, save_optimizer
from rl_dialog.training.task_settings import TaskSettings

VALIDATION = 1_000_000  # number of the first validation conversation: far from those of a final evaluation


class Experts(Protocol):
    """Expert turns, dialog after dialog: states (N, S), actions (N, A) and the number of each turn's dialog
    (N,).
    """

    states: np.ndarray
    actions: np.ndarray
    dialogs: np.ndarray

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TaskTraining:
    """What both stages of a run share.

    Args:
        seed: networks, and the conversations to learn from.
        experts: gives the turns to imitate.
        validate: a policy's figures on the validation goals, see `validation_figures`.
        about: what a tracker shows of the run.
    """

    folder: Path
    seed: int
    experts: Callable[[], Experts]
    validate: Callable[[ActPolicy], dict[str, float]]
    save_total_limit: int = 3
    report_to: str = "tensorboard"
    quiet: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    def logged(self, first_epoch: int = 0) -> AbstractContextManager[Log]:
        """`log(epoch, metrics)`, shown while the block lasts."""
        more = {"report_to": self.report_to, "settings": self.about, "quiet": self.quiet}
        return logged(self.folder, first_step=first_epoch, **more)


def training_of(
    settings: TaskSettings,
    folder: Path,
    experts: Callable[..., Experts],
    play: Callable[[Sequence[int], GreedyActs], Iterable[Any]],
    *,
    quiet: bool = False,
) -> TaskTraining:
    """The training that these settings ask for.

    Args:
        experts: gives the turns to imitate, of conversations of this `seed`.
        play: what conversations with these numbers and this policy come to.
    """
    goals = range(VALIDATION, VALIDATION + settings.eval_episodes)

    def validate(policy: ActPolicy) -> dict[str, float]:
        return validation_figures(play(goals, GreedyActs(policy)))

    # conversations that nobody else learns from or is measured with
    demonstrations = partial(experts, seed=2**31 + settings.train_seed)
    limits = {name: getattr(settings, name) for name in ("save_total_limit", "report_to")}
    about = {"policy": settings.policy, "train_seed": settings.train_seed}
    seed = settings.train_seed
    return TaskTraining(folder, seed, demonstrations, validate, **limits, quiet=quiet, about=about)


def validation_figures(outcomes: Iterable[Any]) -> dict[str, float]:
    """Means over conversations: success, complete, turns and return."""
    outcomes = list(outcomes)
    columns = {"success": "success", "complete": "complete", "turns": "turns", "return": "total"}
    return {
        f"eval/{name}": float(np.mean([getattr(outcome, key) for outcome in outcomes]))
        for name, key in columns.items()
    }


def train_by_imitation(
    training: TaskTraining, policy: ActPolicy, settings: Imitation
) -> tuple[ActPolicy, dict[str, Any]]:
    """Trains `policy` in place on the experts' turns; the policy, and what became of the training.

    Raises UserError, OSError.
    """
    experts = training.experts()
    with training.logged() as log:
        write = lambda epoch, metrics: log(epoch, _named(metrics))  # noqa: E731
        turns = experts.states, experts.actions, experts.dialogs
        best = imitate(policy, *turns, settings, seed=training.seed, log=write)
        epoch = int(best.get("epoch", 0))
        metrics = _named(best) | training.validate(policy)
    checkpoints = Checkpoints(training.folder, training.save_total_limit)
    checkpoints.save(epoch, policy, metrics)
    return policy.eval(), {
        "epoch": epoch,
        "demonstrations": len(experts),
        "checkpoint": str(checkpoints.best_folder),
    }


def imitated(
    training: TaskTraining, settings: Imitation, shape: ActPolicyConfig, start: ActPolicy | None = None
) -> tuple[ActPolicy, dict[str, Any]]:
    """`start`, or a new policy of this shape, after imitation."""
    torch.manual_seed(training.seed)
    return train_by_imitation(training, start or ActPolicy(shape), settings)


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"train/{name}": value for name, value in metrics.items()}


class Checkpoints:
    """Those of a run's folder, and how far it is. `resume` goes on with what is there."""

    def __init__(self, folder: Path, limit: int, *, resume: bool = False) -> None:
        self.folder, self.limit = folder, limit
        self.best, self.best_success, self.epoch = "", -1.0, 0
        if not resume or not (folder / "latest").is_file():
            return
        path = self.latest / "trainer" / "progress.json"
        try:
            progress = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            remedy = "start anew with --overwrite"
            raise UserError(
                f"{path}: expected the state of a run to resume, found no such file; {remedy}"
            ) from error
        self.epoch, self.best, self.best_success = (
            progress["epoch"],
            progress["best"],
            progress["best_success"],
        )

    @property
    def best_folder(self) -> Path:
        return self.folder / self.best

    @property
    def best_epoch(self) -> int:
        return int(self.best.rsplit("-", 1)[1])

    @property
    def latest(self) -> Path:
        return self.folder / (self.folder / "latest").read_text(encoding="utf-8").strip()

    def save(
        self,
        epoch: int,
        policy: ActPolicy,
        metrics: Mapping[str, float],
        save_trainer: Callable[[Path], None] | None = None,
        reward: AdversarialReward | None = None,
    ) -> None:
        """Writes the checkpoint of an epoch, and which one is the best."""
        name = f"checkpoint-{epoch}"
        if metrics["eval/success"] > self.best_success:
            self.best, self.best_success = name, metrics["eval/success"]

        def fill(directory: Path) -> None:
            policy.save_pretrained(directory)
            write_json(directory / "metrics.json", {"epoch": epoch, **metrics})
            if save_trainer is None:
                return
            save_trainer(directory / "trainer")
            if reward is not None:
                _save_reward(reward, directory / "trainer")
            progress = {"epoch": epoch, "best": self.best, "best_success": self.best_success}
            write_json(directory / "trainer" / "progress.json", progress)

        write_atomically(self.folder / name, fill)
        write_text_atomically(self.folder / "latest", name)
        write_text_atomically(self.folder / "best", self.best)
        checkpoints = sorted(
            self.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1])
        )
        for old in checkpoints[:-1]:
            shutil.rmtree(old / "trainer", ignore_errors=True)  # only the latest can be resumed
        for old in checkpoints[: -self.limit]:
            if old.name != self.best:
                shutil.rmtree(old)

    def load(self, load_trainer: Callable[[Path], None], reward: AdversarialReward | None) -> None:
        """The state of optimizers, and of a learned reward, as they were."""
        load_trainer(self.latest / "trainer")
        if reward is not None:
            _load_reward(reward, self.latest / "trainer")


def _save_reward(reward: AdversarialReward, directory: Path) -> None:
    save_file(
        {**reward.state_dict(), "generator": reward.generator.get_state()}, directory / "reward.safetensors"
    )
    save_optimizer(reward.optimizer, directory / "reward_optimizer.safetensors")


def _load_reward(reward: AdversarialReward, directory: Path) -> None:
    tensors = load_file(directory / "reward.safetensors")
    reward.generator.set_state(tensors.pop("generator"))
    reward.load_state_dict(tensors)
    load_optimizer(reward.optimizer, directory / "reward_optimizer.safetensors")
