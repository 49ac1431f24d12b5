"""How well a judge (a reward model, a likelihood, a rule) agrees with what people said of replies. Arrays in, figures out.

    accuracy      share of preferences without ties that the judge has right; equal scores count half
    chosen_good   of the replies to one context that the judge puts first, the share that people called good; equal scores share the place
    random_good   the same for a reply chosen by chance: the share of good ones among all
    auc           how often a good reply of any context scores above a bad one of any

`log_odds_measures` and `calibration` are for models whose score differences are log-odds.
The unit of every interval is the conversation, since pairs within one are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_dialog.evaluation.intervals import Measure

BINS = 5  # of calibration, from "cannot tell" (.5) to "sure" (1)


def pair_accuracy(first: np.ndarray, second: np.ndarray, preferred: np.ndarray, unit: np.ndarray) -> Measure:
    """Scores of both sides (P,), P(first preferred) (P,), and the number of each pair's conversation (P,)."""
    decided = preferred != 0.5
    right = np.where(first == second, 0.5, (first > second) == (preferred > 0.5))
    return _per_unit(right[decided], unit[decided], unit)


def choice_measures(contexts: Sequence[tuple[np.ndarray, np.ndarray]], unit: np.ndarray) -> dict[str, Measure]:
    """(scores (N,), good (N,)) of the replies to each of C contexts, and the number of each context's conversation (C,)."""
    chosen = [good[scores == scores.max()].mean() for scores, good in contexts]
    at_random = [good.mean() for _, good in contexts]
    return {"chosen_good": _per_unit(np.array(chosen), unit, unit), "random_good": _per_unit(np.array(at_random), unit, unit)}


def log_odds_measures(difference: np.ndarray, preferred: np.ndarray, unit: np.ndarray, *, noise: float) -> dict[str, Measure]:
    """Of score differences (P,): the loss per label that was trained on, and the share of ties."""
    with np.errstate(divide="ignore"):  # the logarithm of no noise
        log_p, log_not_p = (np.logaddexp(np.log1p(-noise) - np.logaddexp(0, -apart), np.log(noise / 2)) for apart in (difference, -difference))
    loss = -preferred * log_p - (1 - preferred) * log_not_p
    return {"loss": _per_unit(loss, unit, unit), "tie_share": _per_unit((preferred == 0.5).astype(float), unit, unit)}


def calibration(difference: np.ndarray, preferred: np.ndarray) -> tuple[float | None, list[dict[str, Any]]]:
    """(error, bins) over labels without ties: how sure the model is of the side that it prefers, and how often that is right.

    The error is the mean distance of the two, weighted by labels (ECE); None without a label.
    """
    decided = preferred != 0.5
    sure = 1 / (1 + np.exp(-np.abs(difference[decided])))
    right = ((difference > 0) == (preferred > 0.5))[decided].astype(float)
    place = np.minimum(((sure - 0.5) * 2 * BINS).astype(int), BINS - 1)
    bins = [
        {"labels": int((place == b).sum()), "sure": round(float(sure[place == b].mean()), 4), "right": round(float(right[place == b].mean()), 4)}
        for b in range(BINS)
        if (place == b).any()
    ]
    total = sum(row["labels"] for row in bins)
    error = sum(row["labels"] * abs(row["sure"] - row["right"]) for row in bins) / total if total else None
    return error, bins


def _per_unit(values: np.ndarray, unit: np.ndarray, every: np.ndarray) -> Measure:
    """The mean of all values, whose units are drawn again together."""
    count = int(every.max()) + 1 if len(every) else 1
    place = unit.astype(int)
    return Measure(np.bincount(place, values, minlength=count), np.bincount(place, minlength=count).astype(float))
