"""Filtered behaviour cloning: imitate only what went well (tf_top of the ASAPP paper, %BC of Snell et al.
2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rl_dialog.data.missing import judged_by, unrated
from rl_dialog.data.tokenize import Row, rewards_of_dialogs
from rl_dialog.errors import UserError
from rl_dialog.methods.bc import BC


@dataclass(frozen=True)
class TFTop(BC):
    """Cloning of the best replies alone.

    Cross-entropy on the replies that pass a filter; the others stay as context. L = -mean log pi(a|s) over
    what is left.
    """

    by: Literal["auto", "reply", "dialog"] = "auto"
    """judge a reply by its own reward, or by the sum of the known rewards of its dialog (from the window it
    is in, where a dialog is longer than max_length); auto: by dialog, unless most replies are unrated"""
    threshold: float | None = None
    """keep what earned at least this much"""
    fraction: float = 0.5
    """without a threshold: keep this share of the rated replies, the best ones (rounded down, at least one;
    equals by lot, a row at a time)"""

    def prepare(
        self, train: Sequence[Row], validation: Sequence[Row], tokenizer: Any
    ) -> tuple[list[Row], list[Row]]:
        """The rows with only the kept replies to learn from; of validation those that are as good as the
        worst one kept, so that its loss is of what is to be said.

        What has no reward (a reply; by dialog, a row without a rated reply) is never kept: nothing says that
        it went well. Raises UserError when the filter cannot tell replies apart, or none passes.
        """
        if not 0 < self.fraction <= 1:
            raise UserError(f"expected a fraction in (0, 1], got {self.fraction}")
        by = judged_by(self.by, "dialog", rewards_of_dialogs(train), who="tf_top")
        scores = _scores(train, by)
        flat = np.concatenate(scores)
        known_scores = flat[~np.isnan(flat)]
        if len(np.unique(known_scores)) < 2:
            problem = (
                f"every {by} earned {known_scores[0]:g}" if len(known_scores) else f"no {by} has a reward"
            )
            reason = f"{problem}{unrated(flat)}, so none is better"
            raise UserError(f"tf_top: {reason}: prepare with rewards that differ, or train bc")
        if self.threshold is not None:
            keeps = flat >= self.threshold  # NaN is not
            if not keeps.any():
                best = f"(the best one {known_scores.max():g}){unrated(flat)}"
                raise UserError(
                    f"tf_top: no {by} earned {self.threshold:g} or more {best}: lower --method.threshold"
                )
        else:
            keeps = np.zeros(len(flat), bool)
            # Logs are often in the order of something: the first of the equal ones would be no fair sample.
            drawn = np.random.default_rng(0).permutation(len(train)).repeat([len(s) for s in scores])
            best_first = np.lexsort((drawn, -flat))  # NaN comes last
            keeps[best_first[: max(1, int(self.fraction * len(known_scores)))]] = True
        row_keeps = np.split(keeps, np.cumsum([len(s) for s in scores])[:-1])
        as_good = [score >= flat[keeps].min() for score in _scores(validation, by)]
        return _kept(train, row_keeps), _kept(validation, as_good)


def _scores(rows: Sequence[Row], by: str) -> list[np.ndarray]:
    """Of each row (R,) what its replies are judged by."""
    return [row.rewards if by == "reply" else row.returns[:1].repeat(len(row.rewards)) for row in rows]


def _kept(rows: Sequence[Row], keeps: Sequence[np.ndarray]) -> list[Row]:
    return [_only(row, keep) for row, keep in zip(rows, keeps, strict=True) if keep.any()]


def _only(row: Row, keep: np.ndarray) -> Row:
    """The row with the other replies' tokens no longer written by us."""
    starts = np.concatenate([[-1], row.reply_ends[:-1]]) + 1
    assistant = row.assistant.copy()
    for start, end in zip(starts[~keep], row.reply_ends[~keep], strict=True):
        assistant[start : end + 1] = False
    return replace(row, assistant=assistant, reply_ends=row.reply_ends[keep], rewards=row.rewards[keep])
