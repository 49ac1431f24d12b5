"""Rewards of a conversation as a whole."""

from __future__ import annotations

from rl_dialog.data.schema import Dialog

DISCOUNT = 0.95  # of the conversation's length, per reply before the last but one (Jaques et al. 2019)


def conversation_length(dialog: Dialog, *, discount: float = DISCOUNT) -> list[float]:
    """N discount^(N-2-t) on reply t of N, 0 on the last one: how long the user stayed, told to all replies
    but the one they left after.

    Context replies (weight 0) are not counted. It is a discounted return already: with gamma < 1 it is
    discounted twice, as in the original.
    """
    count = len(dialog.replies)
    return [count * discount ** (count - 2 - t) for t in range(count - 1)] + [0.0] * (count > 0)
