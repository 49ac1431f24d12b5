"""Rewards that are missing: NaN in arrays, null in files. A reply that nobody rated has not earned 0."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np


def to_go(rewards: np.ndarray) -> np.ndarray:
    """(R,) the sum of the known rewards from each reply on; NaN where none of them is known."""
    is_rated = ~np.isnan(rewards)
    sums = np.cumsum(np.where(is_rated, rewards, 0)[::-1])[::-1]
    return np.where(np.logical_or.accumulate(is_rated[::-1])[::-1], sums, np.nan).astype(rewards.dtype)


def unrated(rewards: np.ndarray) -> str:
    """` (8,310 of 10,879 have no reward)`, for errors about rewards; empty where all are known."""
    count = int(np.isnan(rewards).sum())
    return f" ({count:,} of {len(rewards):,} have no reward)" if count else ""


def judged_by(
    by: str, wide: str, rewards: Sequence[np.ndarray], *, who: str, flag: str = "--method.by"
) -> str:
    """What `who` judges replies by: `by`, or where that is auto `wide` (what a dialog earned beyond the
    reply) or "reply" (its own reward), which is told with the `flag` that says otherwise. `rewards`: (R,) of
    each dialog.

    What a reply is good for is often earned by later ones: a question costs time, and an answer pays. But
    where most replies were never rated (votes), a sum says above all how many were, unless none but last
    ones are.
    """
    several = [row for row in rewards if len(row) > 1]
    if by != "auto" or not several:
        return "reply" if by == "auto" else by  # of dialogs with one reply both are the same
    rated = ~np.isnan(np.concatenate(several))
    only_last = rated.any() and np.isnan(np.concatenate([row[:-1] for row in several])).all()
    by = wide if only_last or 2 * rated.sum() > len(rated) else "reply"
    told = f"{int(rated.sum())} of {len(rated)} replies have a reward"
    told += ", all of them last ones" if only_last else ""
    warnings.warn(f"{who} judges by {by}: {told}; {flag} says otherwise", stacklevel=3)
    return by
