"""What users of the 2018 reproduction type: names of its modes and flags, carried over to ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from rl_dialog.preferences.settings import PreferenceRun

MODES = {
    "train_policy_with_preferences": "train",
    "gather_initial_prefs": "gather",
    "pretrain_reward_predictor": "pretrain",
    "train_policy_with_original_rewards": "original-rewards",
}


@dataclass(frozen=True)
class OriginalNames(PreferenceRun):
    """A preference run that may be told in the original's words."""

    synthetic_prefs: bool = False
    """the original's name of --labeller oracle"""
    million_timesteps: float | None = None
    """the original's way to say --steps"""
    lr: float | None = None
    """the original's name of the learning rate"""
    ent_coef: float | None = None
    """the original's name of the weight of the policy's entropy"""
    lr_zero_million_timesteps: float | None = None
    """the original's way to say lr_zero_steps"""

    @property
    def given_steps(self) -> int | None:
        """The steps in either's words."""
        return self.steps if self.million_timesteps is None else int(self.million_timesteps * 1e6)


R = TypeVar("R", bound=OriginalNames)


def in_our_names(run: R) -> R:
    """The same run, told in our words alone."""
    given = {"learning_rate": run.lr, "entropy_coeff": run.ent_coef}
    if run.lr_zero_million_timesteps is not None:
        given["lr_zero_steps"] = int(run.lr_zero_million_timesteps * 1e6)
    given = {name: value for name, value in given.items() if value is not None}
    originals = ("lr", "ent_coef", "lr_zero_million_timesteps", "million_timesteps")
    return replace(
        run,
        mode=MODES.get(run.mode, run.mode),
        labeller="oracle" if run.synthetic_prefs else run.labeller,
        steps=run.given_steps,
        ppo=replace(run.ppo, **given),
        a2c=replace(run.a2c, **given),
        synthetic_prefs=False,
        **dict.fromkeys(originals),
    )
