"""The roles of a preference run but the learner's: who asks, who answers for a person, who fits the reward.

Each does one step when it is told to, and keeps what it must not lose in the run's folder and its label log: any of them can be killed and made
again. The synchronous run calls them in turn, in one process; the asynchronous one (rl_dialog/cluster/preferences.py) has each in its own actor.

    learner  clips ->  Asker  queries ->  label log  <- answers  people, Oracle
       ^                                      |
       '------------ versions  Teacher <------'
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import torch

from rl_dialog.data.files import write_atomically
from rl_dialog.models.reward_model import RewardModel, RewardModelConfig
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.reward_trainer import RewardTrainer, RewardTraining
from rl_dialog.preferences.segments import Segments

KEPT_VERSIONS = 3
REFERENCE = 100  # labels whose clips the normaliser is made from: the newest ones


class Teacher:
    """Fits the reward model when there are new labels, and publishes the result: weights and normaliser of one version, in one folder.

    Args:
        folder: where versions are, `<folder>/<version>/`; the newest one is where a new Teacher goes on.
        enough: comparable labels (for training) before the first version; the policy is not trained before.
        first_epochs, epochs: passes over the labels for the first version and for the later ones.
    """

    def __init__(self, log: LabelLog, segments: Segments, folder: str | Path, shape: RewardModelConfig, settings: RewardTraining, *,
                 enough: int = 1, first_epochs: int = 200, epochs: int = 1, seed: int = 0) -> None:  # fmt: skip
        self.log, self.segments, self.folder = log, segments, Path(folder)
        self.enough, self.first_epochs, self.epochs = enough, first_epochs, epochs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.trainer = RewardTrainer(RewardModel(shape), settings, seed=seed)
        newest = newest_version(self.folder)
        self.version = self.trainer.load(self.folder / str(newest)) if newest else 0
        self._seen: tuple[int, int] | None = None
        if newest:
            self._seen = tuple(json.loads((self.folder / str(newest) / "labels.json").read_text(encoding="utf-8"))["state"])

    def step(self) -> dict[str, float]:
        """Fits and publishes if labels have changed since the last version; its metrics, empty if nothing was to do."""
        state = self.log.state()
        if state == self._seen:
            return {}
        began, labels = time.perf_counter(), self.log.labels()
        self.trainer.set_labels(labels, self.segments)
        if len(self.trainer.train_pairs) < (1 if self.version else self.enough):
            return {}
        metrics = self.trainer.fit(self.epochs if self.version else self.first_epochs)
        newest = dict.fromkeys(id for label in self.trainer.train_pairs[-REFERENCE:] for id in (label.first, label.second))
        self.trainer.calibrate(self.segments[id] for id in newest)
        self.version += 1
        self._publish(state)
        self._seen = state
        mean, std = self.trainer.model.mean.mean().item(), self.trainer.model.std.mean().item()
        spent = time.perf_counter() - began
        return {"version": self.version, **metrics, "all_labels": len(labels), "raw_mean": mean, "raw_std": std, "seconds": spent}

    def published(self) -> tuple[int, RewardModel] | None:
        """The newest version, None before the first."""
        return (self.version, self.trainer.model) if self.version else None

    def _publish(self, state: tuple[int, int]) -> None:
        def fill(directory: Path) -> None:
            self.trainer.save(directory, version=self.version)
            (directory / "labels.json").write_text(json.dumps({"state": state}) + "\n", encoding="utf-8")

        write_atomically(self.folder / str(self.version), fill)
        for old in versions(self.folder)[:-KEPT_VERSIONS]:
            shutil.rmtree(self.folder / str(old))


def versions(folder: Path) -> list[int]:
    """The published ones, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.is_dir() else []


def newest_version(folder: str | Path) -> int:
    """0: none."""
    return max(versions(Path(folder)), default=0)

