"""Fits the reward model to labelled pairs of clips.

    trainer = RewardTrainer(RewardModel(config), RewardTraining(), seed=0)
    trainer.set_labels(labels, segments)   # of a LabelLog; the oldest beyond max_labels are forgotten
    metrics = trainer.fit(epochs=200)      # passes over the labels
    trainer.calibrate()                    # the normaliser: mean 0 over the steps of the newest labels' clips
    trainer.save(folder)                   # and .load: weights, optimizer, chance, and how far it is

Each member of the ensemble sees its own resample of the labels (bagging): label i counts Poisson(1) times for
member m, drawn once from the ids, so that the share of labels that a member sees is 1 - 1/e, new labels
change nothing about the old ones, and a resumed run sees the same. Validation labels, whose clips are in no
training label, are never trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_dialog.errors import UserError
from rl_dialog.models.reward_model import RewardModel, preference_loss
from rl_dialog.preferences.segments import Clip, compact, restored
from rl_dialog.training.optim import load_optimizer, save_optimizer

ENOUGH = 0.25  # of the nats that could be gained: from here on a reward is followed at full speed
UNSURE = 0.5  # nats: P = .62
FEW = 8  # labels that prefer something: fewer confirm nothing
TEMPERATURES = tuple(2.0 ** (k / 2) for k in range(-6, 9))  # of which the best is taken
LEAST_L2, MOST_L2 = 1e-7, 10.0  # the adaptive coefficient never becomes 0, from where it could not rise


class Labelled(Protocol):
    """What is needed of a label: two clips, and P(first preferred)."""

    query: str
    first: str
    second: str
    preference: float | None  # None: incomparable; such labels are left out
    validation: bool


@dataclass(frozen=True)
class RewardTraining:
    """How the reward is fitted. Raises UserError for a number out of its range."""

    learning_rate: float = 1e-3
    """learning rate of Adam"""
    batch_size: int = 32
    """pairs per update"""
    noise: float = 0.1
    """share of answers that are taken to be random: they bound what one label can do"""
    label_smoothing: float = 0.0
    """how far certain answers move towards .5"""
    bagging: bool = True
    """a resample of the labels for each member; with one member there is nothing to resample"""
    l2: float = 0.0
    """coefficient of the sum of squared weights; with adaptive_l2 where it starts"""
    adaptive_l2: bool = False
    """raise l2 while the validation loss is more than l2_high times the training loss, lower it while it is
    less than l2_low times"""
    l2_low: float = 1.1
    """adaptive_l2 lowers l2 below this ratio of validation to training loss (Christiano et al. 2017: 1.1)"""
    l2_high: float = 1.5
    """adaptive_l2 raises l2 above this ratio of validation to training loss (Christiano et al. 2017: 1.5)"""
    l2_step: float = 1.5
    """the factor by which adaptive_l2 changes it after a pass"""
    max_labels: int = 3000
    """the newest so many are trained on, and a quarter as many validate"""
    patience: int = 0
    """passes without a better loss on validation labels after which fitting stops; the best pass's weights
    are kept. 0, or where no more passes are to be made: all are made, and the last is kept"""
    begin_unsure: bool = False
    """before the first fit, make predictions so small that the model is sure of no label: what a new network
    says, summed over a long clip, is large, and a label that it is sure is wrong it takes to be random"""
    even_ties: bool = False
    """ties count no more, all together, than the labels that prefer something, and none of them is taken to
    be random: clips that were called equally good are pulled together however far apart they are"""
    confirm: bool = False
    """the policy follows the reward as fast as labels confirm it that it was not fitted to; one that explains
    none of them moves it at `least_pace`"""
    least_pace: float = 0.0
    """with confirm: how fast a reward is followed that no label confirms. People are asked about the same
    behaviour as long as the policy waits, so it might wait for ever"""
    curious: bool = False
    """with confirm: as far as labels do not confirm the reward, the policy earns what its members disagree
    on, and so goes where nothing is known yet. Where all labels are ties it finds what makes a difference.
    A single member disagrees with nobody"""

    def __post_init__(self) -> None:
        if (
            self.batch_size < 1
            or self.max_labels < 1
            or self.patience < 0
            or not 0 < self.learning_rate < math.inf
            or not (0 <= self.noise < 1 and 0 <= self.label_smoothing < 1)
        ):
            raise UserError(
                "expected batch_size and max_labels of at least 1, a positive learning rate, no negative "
                f"patience, noise and smoothing in [0, 1), got {self}"
            )
        if not self.l2 >= 0 or not 0 < self.l2_low <= self.l2_high or not self.l2_step > 1:
            raise UserError(
                f"expected l2 of at least 0, 0 < l2_low <= l2_high, and l2_step above 1, got {self}"
            )


class RewardTrainer:
    """A reward model with its optimizer and its labels, on the model's device. Everything random depends on
    `seed`."""

    def __init__(self, model: RewardModel, settings: RewardTraining | None = None, *, seed: int = 0) -> None:
        self.model, self.settings, self.seed, self.device = (
            model,
            settings or RewardTraining(),
            seed,
            model.mean.device,
        )
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.settings.learning_rate)
        self.updates, self.epochs = 0, 0
        self.l2 = max(self.settings.l2, LEAST_L2) if self.settings.adaptive_l2 else self.settings.l2
        self.clips: dict[str, dict[str, np.ndarray]] = {}  # compact, see segments.py
        self.train_pairs: list[Labelled] = []
        self.validation_pairs: list[Labelled] = []

    def set_labels(self, labels: Sequence[Labelled], segments: Mapping[str, Clip]) -> None:
        """Takes the newest `max_labels` comparable labels, and the clips that they need from `segments` if
        they are new."""
        comparable = [label for label in labels if label.preference is not None]
        self.train_pairs = [label for label in comparable if not label.validation][
            -self.settings.max_labels :
        ]
        self.validation_pairs = [label for label in comparable if label.validation][
            -max(1, self.settings.max_labels // 4) :
        ]
        ids = {
            id for label in (*self.train_pairs, *self.validation_pairs) for id in (label.first, label.second)
        }
        kept_clips = {id: clip for id, clip in self.clips.items() if id in ids}
        self.clips = kept_clips | {id: _arrays(segments[id]) for id in ids if id not in kept_clips}

    def fit(self, epochs: int = 1) -> dict[str, float]:
        """So many passes over the training labels; metrics of the last. Raises UserError where there is no
        label to learn from."""
        if not self.train_pairs:
            raise UserError(
                "expected labels to learn from, got none but incomparable ones or those for validation"
            )
        pairs = _Pairs(
            self.train_pairs, self.clips, self._counts(self.train_pairs), self.settings.label_smoothing
        )
        held_out = (
            _Pairs(self.validation_pairs, self.clips, None, self.settings.label_smoothing)
            if self.validation_pairs
            else None
        )
        self._fit_scale(pairs)
        if self.settings.begin_unsure and not self.updates:
            self._begin_unsure(pairs)
        metrics = self._passes(pairs, held_out, epochs)
        if self.settings.confirm:
            metrics |= self._confirm(pairs, held_out)
        else:
            self.model.confirmed.fill_(1.0)  # also where it was measured before
        return metrics | {"updates": self.updates, "training_labels": len(self.train_pairs), "l2": self.l2}

    def _passes(self, pairs: _Pairs, held_out: _Pairs | None, epochs: int) -> dict[str, float]:
        """Over the training labels, until validation labels say enough; metrics of the pass that is kept."""
        settings, metrics = self.settings, {}
        patient = 0 < settings.patience < epochs  # a few passes over what is known are no overfitting
        best, since, weights = math.inf, 0, None
        for epoch in range(epochs):
            metrics = self._epoch(pairs)
            if held_out and (settings.adaptive_l2 or patient or epoch == epochs - 1):
                metrics |= {f"validation_{name}": value for name, value in self.evaluate(held_out).items()}
                self._steer_l2(metrics)
            if not (held_out and patient):
                continue
            since += 1
            if metrics["validation_loss"] < best:
                best, since, kept = metrics["validation_loss"], 0, metrics
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
            if since >= settings.patience:
                break
        if weights:
            self.model.load_state_dict(weights)
            metrics = kept
        return metrics

    def _fit_scale(self, pairs: _Pairs) -> None:
        """What observations are normalised by: those of the training labels' clips, padding left out."""
        if self.model.observations is not None:
            seen = np.concatenate([restored(clip)[: clip["steps"]] for clip in pairs.arrays])
            self.model.observations.replace(torch.from_numpy(seen).to(self.device))

    @torch.no_grad()
    def _begin_unsure(self, pairs: _Pairs) -> None:
        """The last layers shrink until the returns of two clips differ by `UNSURE` (root of the mean square
        over the labels)."""
        sides = [self._returns(pairs, rows) for rows in torch.arange(len(pairs)).split(128)]
        difference = torch.cat([one - other for one, other in sides], 1)  # (M, labels)
        shrunk = (UNSURE / difference.square().mean(1).sqrt().clamp(min=UNSURE))[:, None, None]
        self.model.layers[-1].weight.mul_(shrunk)
        self.model.layers[-1].bias.mul_(shrunk)

    @torch.no_grad()
    def _confirm(self, pairs: _Pairs, held_out: _Pairs | None) -> dict[str, float]:
        """How much of the labels it explains that it was not fitted to: validation labels, and those that
        bagging kept from a member, as far as this member goes.

        With the temperature that suits these labels best, the loss is compared with that of knowing nothing,
        ln 2; ties, of which nothing else can be known, are left out. The share of ln 2 that is gained, less a
        standard error, is what is confirmed, and `ENOUGH` of it is all.
        """
        parts = [self._unseen(pairs, pairs.counts == 0)]
        if held_out:
            parts.append(self._unseen(held_out, torch.ones(len(self.model.mean), len(held_out), dtype=bool)))
        difference, preferred = (torch.cat(each) for each in zip(*parts, strict=True))
        gains = {t: self._gains(difference / t, preferred) for t in TEMPERATURES}
        temperature = max(gains, key=lambda t: gains[t].mean().nan_to_num(-1.0).item())
        gained, n = gains[temperature], len(preferred)
        sure = (gained.mean() - gained.std() / math.sqrt(n)).item() if n >= FEW else 0.0
        confirmed = min(1.0, max(0.0, sure / math.log(2)) / ENOUGH)
        self.model.confirmed.fill_(confirmed)
        return {"confirmed": confirmed, "temperature": temperature, "unseen_labels": n}

    def _gains(self, difference: Tensor, preferred: Tensor) -> Tensor:
        """Nats by which each label is better explained than by knowing nothing."""
        zero = torch.zeros_like(difference)
        return math.log(2) - preference_loss(difference, zero, preferred, noise=self.settings.noise)

    def _unseen(self, pairs: _Pairs, unseen: Tensor) -> tuple[Tensor, Tensor]:
        """Differences of returns, means over the members that did not see a label # (M, labels), of labels
        that prefer something and that some member did not see; and these."""
        self.model.eval()
        rows = torch.arange(len(pairs)).split(128)
        sides = [self._returns(pairs, each) for each in rows]
        difference = torch.cat([(one - other).cpu() for one, other in sides], 1)  # (M, labels)
        mean = (difference * unseen).sum(0) / unseen.sum(0).clamp(min=1)
        decided = (pairs.preferences != 0.5) & unseen.any(0)
        return mean[decided], pairs.preferences[decided]

    @torch.no_grad()
    def evaluate(self, pairs: _Pairs) -> dict[str, float]:
        """Of the ensemble's mean return: loss and accuracy without ties, the share of ties, and the
        calibration error, all per label."""
        self.model.eval()
        difference = torch.cat(
            [
                (a - b).mean(0).cpu()
                for a, b in (self._returns(pairs, rows) for rows in torch.arange(len(pairs)).split(128))
            ]
        )
        loss = preference_loss(
            difference, torch.zeros_like(difference), pairs.preferred, noise=self.settings.noise
        ).mean()
        metrics = {"loss": loss.item(), "tie_share": float((pairs.preferences == 0.5).float().mean())}
        decided = pairs.preferences != 0.5
        if decided.any():
            right = ((difference > 0) == (pairs.preferences > 0.5))[decided].float()
            metrics |= {
                "accuracy": right.mean().item(),
                "calibration_error": _calibration_error(difference[decided], pairs.preferences[decided]),
            }
        return metrics

    def returns(self, clips: Sequence[Clip]) -> np.ndarray:
        """`clip_returns` of the model # (M, clips)"""
        return clip_returns(self.model, clips)

    def calibrate(self, labels: int = 100) -> None:
        """The normaliser from the steps of the clips of the newest training labels, padding left out."""
        newest = dict.fromkeys(
            id for label in self.train_pairs[-labels:] for id in (label.first, label.second)
        )
        clips = [self.clips[id] for id in newest]
        observations = np.concatenate([restored(clip)[: clip["steps"]] for clip in clips])
        actions = np.concatenate([clip["actions"][: clip["steps"]] for clip in clips])
        self.model.fit_normaliser(
            torch.from_numpy(observations).to(self.device), torch.from_numpy(actions).to(self.device)
        )

    def save(self, directory: str | Path, *, version: int = 0) -> None:
        """Writes the model as `save_pretrained` does, and beside it what is needed to go on."""
        directory = Path(directory)
        self.model.save_pretrained(directory, version=version)
        save_optimizer(self.optimizer, directory / "optimizer.safetensors")
        state = {"updates": self.updates, "epochs": self.epochs, "l2": self.l2, "version": version}
        (directory / "trainer.json").write_text(json.dumps(state) + "\n", encoding="utf-8")

    def load(self, directory: str | Path) -> int:
        """The inverse of `save`; the version. Labels are not part of it. Raises UserError for another
        shape."""
        directory = Path(directory)
        saved = RewardModel.from_pretrained(directory)
        # Earlier versions cut no actions. No weight depends on it.
        if replace(saved.config, action_limit=self.model.config.action_limit) != self.model.config:
            raise UserError(
                f"{directory}: expected a reward model of the shape {self.model.config}, got {saved.config}"
            )
        self.model.load_state_dict(saved.state_dict())
        load_optimizer(self.optimizer, directory / "optimizer.safetensors")
        state = json.loads((directory / "trainer.json").read_text(encoding="utf-8"))
        self.updates, self.epochs, self.l2 = state["updates"], state["epochs"], state["l2"]
        return state["version"]

    def _epoch(self, pairs: _Pairs) -> dict[str, float]:
        """One pass. Its order and its dropout depend on the seed and the number of passes so far, so that a
        resumed run repeats them."""
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + self.epochs)
            losses = [
                self._update(pairs, rows) * len(rows)
                for rows in torch.randperm(len(pairs)).split(self.settings.batch_size)
            ]
        self.epochs += 1
        return {"loss": sum(losses) / len(pairs)}

    def _update(self, pairs: _Pairs, rows: Tensor) -> float:
        first_returns, second_returns = self._returns(pairs, rows)
        preferred, counts = pairs.preferred[rows].to(self.device), pairs.counts[:, rows].to(self.device)
        noise, weights = self._weights(pairs, rows)
        loss = preference_loss(
            first_returns, second_returns, preferred.expand_as(first_returns), noise=noise
        )  # (M, B)
        loss = (loss * counts * weights).sum() / (len(rows) * len(loss))
        penalty = (
            self.l2
            * sum((p**2).sum() for name, p in self.model.named_parameters() if name.endswith("weight"))
            if self.l2
            else 0.0
        )
        self.optimizer.zero_grad()
        (loss + penalty).backward()
        self.optimizer.step()
        self.updates += 1
        return loss.item()

    def _weights(self, pairs: _Pairs, rows: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """The share of random answers that is reckoned with, and the weight, of each label # (B,)"""
        if not self.settings.even_ties:
            return self.settings.noise, 1.0
        is_tie = (pairs.preferences[rows] == 0.5).to(self.device)
        return torch.where(is_tie, 0.0, self.settings.noise), torch.where(is_tie, pairs.tie_weight, 1.0)

    def _returns(self, pairs: _Pairs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides in one pass; dropout has a mask of its own for every step of both."""
        returns = self.model.returns(*(tensor.to(self.device) for tensor in pairs.clips(rows)))
        return returns[:, : len(rows)], returns[:, len(rows) :]

    def _counts(self, pairs: Sequence[Labelled]) -> Tensor:
        """How often each label counts for each member # (M, labels)"""
        members = self.model.config.members
        if not self.settings.bagging or members == 1:
            return torch.ones(members, len(pairs))
        counts = [
            np.random.default_rng([self.seed, *label.query.encode()]).poisson(1.0, members) for label in pairs
        ]
        return torch.from_numpy(np.array(counts, np.float32).T.copy())

    def _steer_l2(self, metrics: Mapping[str, float]) -> None:
        if not self.settings.adaptive_l2:
            return
        ratio = metrics["validation_loss"] / max(metrics["loss"], 1e-8)
        factor = (
            self.settings.l2_step
            if ratio > self.settings.l2_high
            else 1 / self.settings.l2_step
            if ratio < self.settings.l2_low
            else 1.0
        )
        self.l2 = min(max(self.l2 * factor, LEAST_L2), MOST_L2)


def clip_returns(model: RewardModel, clips: Sequence[Clip]) -> np.ndarray:
    """Sums of each member's raw rewards over the clips' steps, for the choice of queries # (M, clips)"""
    model.eval()
    with torch.inference_mode():
        parts = [_stacked([_arrays(clip) for clip in clips[i : i + 128]]) for i in range(0, len(clips), 128)]
        returns = [model.returns(*(tensor.to(model.mean.device) for tensor in part)) for part in parts]
    return torch.cat(returns, 1).cpu().numpy()


class _Pairs:
    """Labels as tensors. Vectors are stacked once; pictures stay compact and are put together batch by
    batch."""

    def __init__(
        self,
        labels: Sequence[Labelled],
        clips: Mapping[str, dict[str, np.ndarray]],
        counts: Tensor | None,
        smoothing: float,
    ) -> None:
        self.ids = [(label.first, label.second) for label in labels]
        self.preferences = torch.tensor([label.preference for label in labels], dtype=torch.float32)
        self.preferred = self.preferences * (1 - smoothing) + smoothing / 2
        ties = int((self.preferences == 0.5).sum())
        self.tie_weight = min(1.0, max(len(labels) - ties, FEW) / max(ties, 1))
        self.counts = counts
        numbers = {id: i for i, id in enumerate(dict.fromkeys(id for pair in self.ids for id in pair))}
        self.arrays = [clips[id] for id in numbers]
        self.sides = torch.tensor(
            [[numbers[first], numbers[second]] for first, second in self.ids]
        )  # (labels, 2)
        small = all("observations" in arrays for arrays in self.arrays)
        self.stacked = _stacked(self.arrays) if small else None

    def __len__(self) -> int:
        return len(self.ids)

    def clips(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Observations, actions and steps of the first clips, then the second ones # (2 B, ...)"""
        numbers = self.sides[rows].T.flatten()
        if self.stacked:
            return tuple(tensor[numbers] for tensor in self.stacked)
        return _stacked([self.arrays[i] for i in numbers.tolist()])


def _arrays(clip: Clip) -> dict[str, Any]:
    return {**compact(clip.observations), "actions": clip.actions, "steps": clip.steps}


def _stacked(clips: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    observations = np.stack([restored(clip) for clip in clips])
    actions = np.stack([clip["actions"] for clip in clips])
    return (
        torch.from_numpy(observations),
        torch.from_numpy(actions),
        torch.tensor([clip["steps"] for clip in clips]),
    )


def _calibration_error(difference: Tensor, preferences: Tensor) -> float:
    """Mean distance between what the model is sure of and how often it is right, over ten bins of P, weighted
    by their labels."""
    p = torch.sigmoid(difference)
    bins = (p * 10).long().clamp(max=9)
    gaps = [
        ((p[bins == b] - preferences[bins == b]).mean().abs() * (bins == b).sum()).item()
        for b in range(10)
        if (bins == b).any()
    ]
    return sum(gaps) / len(p)
