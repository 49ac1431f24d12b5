"""Behaviour cloning: the baseline every other method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_dialog.data.batch import Batch
from rl_dialog.methods.method import Loss, Method, Outputs


@dataclass(frozen=True)
class BC(Method):
    """Behaviour cloning: it says what the logs say.

    Cross-entropy on the assistant's tokens: L = -mean log pi(a|s). User tokens are context only.
    """

    needs_rewards: ClassVar[bool] = False
    draws_from_posterior: ClassVar[bool] = True

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        total, nll = out.lm.nll(batch.actions)
        return Loss(total, {"nll": nll.sum()})
