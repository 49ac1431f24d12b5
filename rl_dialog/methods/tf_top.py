"""Filtered behaviour cloning: imitate only what went well (tf_top of the ASAPP paper, %BC of Snell et al.
2022)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rl_dialog.data.missing import unrated
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods.bc import BC


@dataclass(frozen=True)
class TFTop(BC):
    """Cloning of the best replies alone.

    Cross-entropy on the replies that pass a filter; the others stay as context. L = -mean log pi(a|s) over
    what is left.
    """

    by: Literal["auto", "reply", "dialog"] = "auto"
    """judge a reply by its own reward, or by the sum of the known rewards of its row (a dialog, or a window
    of one that is longer than max_length); auto: by dialog where only the last replies of dialogs earn
    anything"""
    threshold: float | None = None
    """keep what earned at least this much"""
    fraction: float = 0.5
    """without a threshold: keep this share of the rated replies, the best ones (rounded down, at least one;
    equals in the order of the data)"""

    def prepare(
        self, train: Sequence[Row], validation: Sequence[Row], tokenizer: Any
    ) -> tuple[list[Row], Sequence[Row]]:
        """The training rows with only the kept replies to learn from; validation stays whole.

        What has no reward (a reply; by dialog, a row without a rated reply) is never kept: nothing says that
        it went well. Raises UserError when the filter cannot tell replies apart, or none passes.
        """
        if not 0 < self.fraction <= 1:
            raise UserError(f"expected a fraction in (0, 1], got {self.fraction}")
        by, why = (self.by, "") if self.by != "auto" else way_to_judge(train)
        if why:
            warnings.warn(f"tf_top judges by {by}: {why}; --method.by says otherwise", stacklevel=2)
        scores = [row.rewards if by == "reply" else row.returns[:1].repeat(len(row.rewards)) for row in train]
        flat = np.concatenate(scores)
        known = flat[~np.isnan(flat)]
        if len(np.unique(known)) < 2:
            said = f"every {by} earned {known[0]:g}" if len(known) else f"no {by} has a reward"
            why = f"{said}{unrated(flat)}, so none is better"
            raise UserError(f"tf_top: {why}: prepare with rewards that differ, or train bc")
        if self.threshold is not None:
            kept = flat >= self.threshold  # NaN is not
            if not kept.any():
                best = f"(the best one {known.max():g}){unrated(flat)}"
                raise UserError(
                    f"tf_top: no {by} earned {self.threshold:g} or more {best}: lower --method.threshold"
                )
        else:
            kept = np.zeros(len(flat), bool)
            best_first = np.argsort(-flat, kind="stable")  # NaN comes last
            kept[best_first[: max(1, int(self.fraction * len(known)))]] = True
        parts = np.split(kept, np.cumsum([len(s) for s in scores])[:-1])
        return [_only(row, keep) for row, keep in zip(train, parts, strict=True) if keep.any()], validation


def way_to_judge(train: Sequence[Row]) -> tuple[str, str]:
    """What replies are best judged by, and why.

    Where only the last reply of a dialog earns something, all that its own reward says of a reply is whether
    it was the last one. A cost that all others have alike tells no more, a missing reward (NaN) nothing.
    """
    several = [row.rewards for row in train if len(row.rewards) > 1]
    if not several:
        return "reply", ""  # both are the same
    before = np.concatenate([rewards[:-1] for rewards in several])
    last = np.array([rewards[-1] for rewards in several])
    usual = min(before[0], 0.0) if (before == before[0]).all() else 0.0
    own, at_end = (int((~np.isnan(part) & (part != 0) & (part != usual)).sum()) for part in (before, last))
    which = f"{len(before)} replies before the last ones of their dialogs"
    if at_end and not own:
        return "dialog", f"the {which} earned {f'{usual:g} each' if usual else 'nothing'}"
    return "reply", f"{own} of the {which} earned something"


def _only(row: Row, keep: np.ndarray) -> Row:
    """The row with the other replies' tokens no longer written by us."""
    starts = np.concatenate([[-1], row.reply_ends[:-1]]) + 1
    assistant = row.assistant.copy()
    for start, end in zip(starts[~keep], row.reply_ends[~keep], strict=True):
        assistant[start : end + 1] = False
    return Row(row.input_ids, assistant, row.reply_ends[keep], row.rewards[keep], row.truncated)
