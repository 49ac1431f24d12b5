"""What people or the data itself said about a reply or a whole conversation."""

from __future__ import annotations

import math

from rl_dialog.data.schema import Dialog, DialogError, is_number


def vote(dialog: Dialog) -> list[float | None]:
    """-1, 0 or 1: the thumb a human gave this reply (`feedback.vote`). Does not apply where nobody voted.

    Raises DialogError for a vote that is not one of the three.
    """
    values: list[float | None] = []
    for i in dialog.replies:
        thumb = dialog.messages[i].get("feedback", {}).get("vote")
        if thumb is not None and (isinstance(thumb, bool) or thumb not in (-1, 0, 1)):
            raise DialogError(
                f"dialog {dialog.id!r}, message {i}: expected feedback.vote to be -1, 0 or 1, got {thumb!r}"
            )
        values.append(None if thumb is None else float(thumb))
    return values


def upvotes(dialog: Dialog) -> list[float | None]:
    """1 where more people voted for the reply than against it (`feedback.score` above 0), else -1. Does not
    apply where the score is unknown.

    Raises DialogError for a score that is not a number.
    """
    values: list[float | None] = []
    for i in dialog.replies:
        score = dialog.messages[i].get("feedback", {}).get("score")
        if score is not None and not is_number(score):
            where = f"dialog {dialog.id!r}, message {i}"
            raise DialogError(
                f"{where}: expected feedback.score to be a finite number, got {str(score)[:100]}"
            )
        values.append(None if score is None else 1.0 if score > 0 else -1.0)
    return values


def rating(dialog: Dialog, *, name: str | None = None) -> list[float | None]:
    """A human's rating of the whole conversation, in the rating's own unit, on the last reply; does not apply
    to the replies before.

    `meta["ratings"]` is {name: number}; `name` picks one of them, without it their mean counts. Ratings that
    are not finite numbers are left out. Raises DialogError where their sum is infinite.
    """
    ratings = dialog.meta.get("ratings")
    finite = (
        {key: value for key, value in ratings.items() if is_number(value)}
        if isinstance(ratings, dict)
        else {}
    )
    picked = [value for key, value in finite.items() if name in (None, key)]
    values: list[float | None] = [None] * len(dialog.replies)
    if picked and values:
        values[-1] = sum(picked) / len(picked)
        if math.isinf(values[-1]):
            raise DialogError(f"dialog {dialog.id!r}: expected ratings that can be added up, got inf")
    return values


def logged(dialog: Dialog) -> list[float | None]:
    """The message's own `reward` as the log has it: a human 0/1, an environment's reward, an outcome. Does
    not apply where there is none."""
    values = [dialog.messages[i].get("reward") for i in dialog.replies]
    return [None if value is None else float(value) for value in values]
