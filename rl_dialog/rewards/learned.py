"""The reward that a model learned from preferences between replies, or from ratings of them."""

from __future__ import annotations

from rl_dialog.data.schema import Dialog, said
from rl_dialog.rewards.scorers import NO_MODEL, Scorer


def learned(dialog: Dialog, *, reward_model: Scorer = NO_MODEL) -> list[float | None]:
    """What the reward model says of each reply behind everything before it; a difference of d means odds of e^d between two replies to one context.

    Does not apply to a reply that opens the conversation, and to any without a model (`--scorers reward_model=DIR`).
    """
    turns = tuple((message["role"], said(message)) for message in dialog.messages)
    return [reward_model(turns[: i + 1]) if i else None for i in dialog.replies]
