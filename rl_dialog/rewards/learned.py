"""The reward that a model learned from preferences between replies, or from ratings of them."""

from __future__ import annotations

from rl_dialog.data.schema import Dialog, said
from rl_dialog.rewards.scorers import NO_MODEL, Scorer

# messages before a reply that its model is shown, behind those of the system: it seldom reads so many, and
# all would be a square
LATEST = 512


def learned(dialog: Dialog, *, reward_model: Scorer = NO_MODEL) -> list[float | None]:
    """What the reward model says of each reply behind everything before it; a difference of d means odds of
    e^d between two replies to one context.

    Of a long conversation the model is shown the system prompt and the LATEST messages. Does not apply to a
    reply that opens the conversation, and to any without a model (`--scorers reward_model=DIR`).
    """
    if reward_model is NO_MODEL:
        return [None] * len(dialog.replies)
    turns = tuple((message["role"], said(message)) for message in dialog.messages)
    lead = next((n for n, (role, _) in enumerate(turns) if role != "system"), len(turns))
    return [
        reward_model(turns[:lead] + turns[max(lead, i - LATEST) : i + 1] if i > lead else turns[: i + 1])
        if i
        else None
        for i in dialog.replies
    ]
