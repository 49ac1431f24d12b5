"""Cloning everything: the control that tf_top, dt and ilql are compared with on candidates (tf_all of Sodhi
et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from rl_dialog.methods.bc import BC


@dataclass(frozen=True)
class TFAll(BC):
    """Cloning of all replies, good and bad: the control for tf_top.

    Cross-entropy on every reply, whoever wrote it and whatever it earned: the loss of `bc`, for data with
    several replies to a context.
    """
