"""Rewards that are missing: NaN in arrays, null in files. A reply that nobody rated has not earned 0."""

from __future__ import annotations

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
