"""The rows of a data directory as a method learns from them: rewards shifted, outcomes told from rewards that
nobody gave, and rewards in units of how far returns spread."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.missing import to_go, unrated
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods.method import Method

LEVEL = 0.01  # of the mean reward: rewards that differ by less are told


def said_counts(rows: Sequence[Row], vocabulary: int) -> Tensor:
    """(V,) how often each token is said in the replies."""
    said = np.concatenate([np.empty(0, np.int32), *(row.input_ids[row.assistant] for row in rows)])
    return torch.from_numpy(np.bincount(said, minlength=vocabulary))


def shifted(rows: Sequence[Row], shift: float) -> Sequence[Row]:
    """The rows with `shift` added to every known reward."""
    return rows if not shift else [row.with_rewards(lambda rewards: rewards + shift) for row in rows]


def outcomes(rows: Sequence[Row], train_rows: Sequence[Row]) -> Sequence[Row]:
    """The rows with 0 for the replies before a known outcome, where all rewards of the training split are
    outcomes.

    Where only last replies have a reward, it is that of the conversation and the replies before it earned 0;
    anywhere else a missing reward is one that nobody gave.
    """
    rated = [~np.isnan(row.all_rewards) for row in train_rows]
    if any(row_rated[:-1].any() for row_rated in rated) or not any(
        len(row_rated) > 1 and row_rated[-1] for row_rated in rated
    ):
        return rows
    if rows is train_rows:
        warnings.warn(
            "only last replies have a reward: it is taken for the conversation's, and the replies before it "
            "earned 0",
            stacklevel=3,
        )
    return [row if np.isnan(row.all_rewards[-1:]).any() else row.with_rewards(np.nan_to_num) for row in rows]


def single(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows with rewards in float32, as batches hold them."""
    return [row.with_rewards(lambda rewards: rewards.astype(np.float32)) for row in rows]


def in_units(rows: Sequence[Row], unit: float) -> Sequence[Row]:
    """The rows with rewards in units of `unit`, which is a power of two or anything else: a float32 divided
    by it and rounded once."""
    return rows if unit == 1 else single([row.with_rewards(lambda rewards: rewards / unit) for row in rows])


def spread_of_returns(rows: Sequence[Row]) -> tuple[float, float]:
    """(standard deviation, mean) of what followed each reply to the end of its conversation, undiscounted;
    what has no known reward counts nothing.

    The spread is the unit that values are learned in, so that nothing depends on the unit of rewards; where
    all returns are equal it is their size, or 1 when they are 0.
    """
    returns = _known_returns(rows)
    spread, level = (float(returns.std()), float(returns.mean())) if len(returns) else (0.0, 0.0)
    if spread <= 1e-6 * abs(level):
        spread = abs(level) or 1.0
    return spread, level


def warn_of_outliers(rows: Sequence[Row]) -> None:
    """Says so where a few returns make nearly all of the spread that values are learned in."""
    returns = _known_returns(rows)
    if not len(returns):
        return
    low, high = np.quantile(returns, [0.01, 0.99])
    others = returns[(returns >= low) & (returns <= high)].std()
    if 0 < others < returns.std() / 10:
        warnings.warn(
            f"few returns make nearly all of their spread, {returns.std():.3g}: but for one in fifty they "
            f"lie between {low:.3g} and {high:.3g} and differ by {others:.2g}. Values are learned in units "
            "of the whole spread, in which what these differ by hardly counts; where the few are no rewards "
            "to strive for, leave them out or run prepare with --normalise rank",
            stacklevel=3,
        )


def _known_returns(rows: Sequence[Row]) -> np.ndarray:
    """What followed each reply to the end of its conversation, undiscounted, where anything is known."""
    returns = np.concatenate([to_go(row.all_rewards.astype(np.float64))[: len(row.rewards)] for row in rows])
    return returns[~np.isnan(returns)]


def replies_to_go(rows: Sequence[Row]) -> float:
    """How many replies with a known reward there are from a reply on, itself included, to the end of its
    conversation: the mean over the replies that `spread_of_returns` counts, or 1 where there are none."""
    counts = [np.cumsum(~np.isnan(row.all_rewards[::-1]))[::-1][: len(row.rewards)] for row in rows]
    known = np.concatenate(counts)
    known = known[known > 0]
    return float(known.mean()) if len(known) else 1.0


def _rounded(number: float, error: float) -> str:
    """With as many digits as make no difference of a tenth of `error`."""
    return f"{round(number, 1 - math.floor(math.log10(error))):.15g}"


def check_rewards(method: Method, rows: Sequence[Row]) -> None:
    """Rewards that say nothing are refused; rewards that say only how long a conversation was are pointed
    out."""
    if not method.needs_rewards:
        return
    values = np.concatenate([row.rewards for row in rows])
    rewards = values[~np.isnan(values)].astype(np.float64)
    if not rewards.any():
        raise UserError(
            f"{type(method).__name__} learns from rewards, and all {len(values)} replies of the training "
            f"split have reward 0 or none{unrated(values)}: run prepare with --rewards.NAME WEIGHT (its "
            "manifest.json lists what the logs carry), or train bc"
        )
    if (rewards == rewards[0]).all():
        warnings.warn(
            f"every reply of the training split earned {rewards[0]:g}: all there is to learn is how long "
            "conversations get",
            stacklevel=3,
        )
    elif rewards.std() < LEVEL * abs(rewards.mean()):
        warnings.warn(
            f"rewards are {rewards.mean():g} and differ by {rewards.std():.2g}: with so high a level what "
            "is learned is above all how long conversations get; "
            f"--reward_shift {_rounded(-rewards.mean(), rewards.std())} takes it off",
            stacklevel=3,
        )
