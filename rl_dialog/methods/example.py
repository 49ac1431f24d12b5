"""A method of your own: a frozen dataclass with a loss. This one clones, and holds the policy back from being
too sure of itself.

    python -m pipelines.train --data DATA --output_dir runs/mine --method rl_dialog.methods.example:Smoothed

A copy of this file, say `my_methods.py` in the folder where the command starts, is `--method
my_methods:Smoothed`. `method.py` has all that a method may say of itself: heads with values, a prior, how it
decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_dialog.data.batch import Batch
from rl_dialog.methods.method import Loss, Method, Outputs


@dataclass(frozen=True)
class Smoothed(Method):
    """Cloning with label smoothing: L = (1 - e) NLL + e H(u, pi), u uniform over the vocabulary. Sums over
    the N decisions of a batch."""

    needs_rewards: ClassVar[bool] = False
    smoothing: float = 0.1
    """the share e of the probability that every token gets alike"""

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        total, nll = out.lm.nll(batch.actions)  # nll: the N terms, for metrics, without gradient
        said = out.lm.rows(slice(batch.decisions))  # not the states behind a cut, which only bootstrap
        uniform = -said.dense().log_softmax(-1).mean(-1).sum()
        return Loss((1 - self.smoothing) * total + self.smoothing * uniform, {"nll": nll.sum()})
