"""The roles of a preference run but the learner's: who asks, who answers for a person, who fits the reward.

Each does one step when it is told to, and keeps what it must not lose in the run's folder and its label log:
any of them can be killed and made again. The synchronous run calls them in turn, in one process; the
asynchronous one (rl_dialog/cluster/preferences.py) has each in its own actor.

    learner  clips ->  Asker  queries ->  label log  <- answers  people, Oracle
       ^                                      |
       '------------ versions  Teacher <------'
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch

from rl_dialog.data.files import write_atomically
from rl_dialog.models.reward_model import RewardModel, RewardModelConfig
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.queries import ClipPool, QueryBroker, QuerySettings, looks_of
from rl_dialog.preferences.reliability import UNTRUSTED, judgements
from rl_dialog.preferences.reward_trainer import RewardTrainer, RewardTraining, clip_returns
from rl_dialog.preferences.run_files import newest_version, versions
from rl_dialog.preferences.segments import Clip, Segments

KEPT_VERSIONS = 3


class Asker:
    """Holds the newest clips and offers pairs of them to labellers, as many as the schedule wants. A clip's
    file is written before it is asked about.

    Args:
        capacity: clips at hand; the oldest are forgotten.
        least: clips at hand before the first query, so that the first labels are about many of them.
        labellers: who may be answering at once; the pool of open queries grows with them.
        pool: how many queries are open at once, in place of what the settings say.
    """

    def __init__(self, log: LabelLog, segments: Segments, settings: QuerySettings, *, capacity: int = 1000,
                 least: int = 2, labellers: int = 1, pool: int | None = None,
                 seed: int = 0) -> None:  # fmt: skip
        self.log, self.segments, self.settings = log, segments, settings
        self.capacity, self.least, self.labellers, self.pool, self.seed = (
            capacity,
            least,
            labellers,
            pool,
            seed,
        )
        self.broker = QueryBroker(log, settings, seed=seed)
        self.forget()

    def forget(self) -> None:
        """All clips at hand. What was asked before is known from the log."""
        self.clips, self.at_hand = ClipPool(self.capacity), {}

    def step(
        self, clips: Sequence[Clip], *, wanted: int, published: tuple[int, RewardModel] | None = None
    ) -> dict[str, float]:
        """Takes clips and fills the pool of queries, for up to `wanted` labels in all; how it stands now.

        `published`: the reward's version and model, for queries about which its members disagree, and for the
        record.
        """
        for clip in clips:
            self.at_hand[clip.id] = clip
            self.clips.add(clip.id)
        ids = self.clips.ids()
        self.at_hand = {id: self.at_hand[id] for id in ids}
        version, model = published or (0, None)
        if len(ids) >= (2 if self.broker.asked else max(2, self.least)):
            at_hand = list(self.at_hand.values())
            disputed = model and self.settings.selection != "random"
            returns = (lambda: clip_returns(model, at_hand)) if disputed else None
            unlike = not model and self.settings.selection == "informative"
            looks = (lambda: looks_of(at_hand)) if unlike else None
            write = lambda chosen_ids: [self.segments.add(self.at_hand[id]) for id in chosen_ids]  # noqa: E731
            settings = {
                "wanted": wanted,
                "pool": self.pool,
                "labellers": self.labellers,
                "reward_version": version,
            }
            self.broker.refill(ids, returns=returns, looks=looks, store=write, **settings)
        return {
            "clips": len(ids),
            "clips_dropped": self.clips.dropped,
            "labels_wanted": wanted,
            **self.log.counts(),
        }


class OracleLabeller:
    """Answers every open query from what the oracle knows of its clips, as a labeller of that name."""

    def __init__(
        self, log: LabelLog, segments: Segments, oracle: Oracle, *, name: str = "oracle", at_once: int = 50
    ) -> None:
        self.log, self.segments, self.oracle, self.name, self.at_once = log, segments, oracle, name, at_once
        log.release(name)

    def step(self) -> dict[str, float]:
        """Answers what there is; how many."""
        answered = 0
        while queries := self.log.lease_many(self.name, self.at_once):
            choices = [
                (query, self.oracle.choice(self.segments[query.left], self.segments[query.right]))
                for query in queries
            ]
            answered += len(self.log.answer_many(choices, self.name))
        return {"answered": answered}


class Teacher:
    """Fits the reward model when there are new labels, and publishes the result: weights and normaliser of
    one version, in one folder.

    Args:
        folder: where versions are, `<folder>/<version>/`; the newest one is where a new Teacher goes on.
        enough: labels before the first version; the policy is not trained before.
        first_epochs, epochs: passes over the labels for the first version and for the later ones.
        start: a version of another run, which is the first one here.
    """

    def __init__(self, log: LabelLog, segments: Segments, folder: str | Path, shape: RewardModelConfig,
                 settings: RewardTraining, *, enough: int = 1, first_epochs: int = 200, epochs: int = 1,
                 start: str = "", seed: int = 0, device: str = "cpu") -> None:  # fmt: skip
        self.log, self.segments, self.folder = log, segments, Path(folder)
        self.enough, self.first_epochs, self.epochs = enough, first_epochs, epochs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.trainer = RewardTrainer(RewardModel(shape).to(device), settings, seed=seed)
        newest = newest_version(self.folder)
        if start and not newest:
            self.trainer.load(start)
            self.version, newest = 1, 1
            self._publish((0, 0, 0), 0)
        self.version = self.trainer.load(self.folder / str(newest)) if newest else 0
        self._seen: tuple[int, int, int] | None = None
        self._untold: dict[str, float] = {}  # of a version that was there before
        if newest:
            labels_seen = json.loads((self.folder / str(newest) / "labels.json").read_text(encoding="utf-8"))
            self._seen, self._untold = (
                (*labels_seen["state"], 0)[:3],  # an earlier version did not count gold pairs
                {"version": self.version, "all_labels": labels_seen["labels"]},
            )

    def step(self) -> dict[str, float]:
        """Fits and publishes if labels have changed since the last version; its metrics, empty if nothing was
        to do."""
        state = self.log.state()
        if state == self._seen:
            return {}
        began, labels = time.perf_counter(), judgements(self.log.answers())
        self.trainer.set_labels([one for one in labels if one.noise < UNTRUSTED], self.segments)
        if not self.trainer.train_pairs or (not self.version and len(labels) < self.enough):
            return {}
        metrics = self.trainer.fit(self.epochs if self.version else self.first_epochs)
        self.trainer.calibrate()
        self.version += 1
        self._publish(state, len(labels))
        self._seen = state
        mean, std = self.trainer.model.mean.mean().item(), self.trainer.model.std.mean().item()
        spent = time.perf_counter() - began
        return {
            "version": self.version,
            **metrics,
            "all_labels": len(labels),
            "raw_mean": mean,
            "raw_std": std,
            "seconds": spent,
        }

    def teach(self) -> tuple[dict[str, float], tuple[int, RewardModel] | None]:
        """A step, and the newest version; its metrics are also told once by who finds it in the folder, where
        there may be nothing to fit."""
        metrics, self._untold = self.step() or self._untold, {}
        return metrics, self.published()

    def published(self) -> tuple[int, RewardModel] | None:
        """The newest version, on the CPU; None before the first."""
        if not self.version:
            return None
        model = self.trainer.model
        return self.version, model if self.trainer.device.type == "cpu" else deepcopy(model).cpu()

    def _publish(self, state: tuple[int, int, int], labels: int) -> None:
        def fill(directory: Path) -> None:
            self.trainer.save(directory, version=self.version)
            (directory / "labels.json").write_text(
                json.dumps({"state": state, "labels": labels}) + "\n", encoding="utf-8"
            )

        write_atomically(self.folder / str(self.version), fill)
        for old in versions(self.folder)[:-KEPT_VERSIONS]:
            shutil.rmtree(self.folder / str(old))
