"""A reward of your own: a function from a dialog to one number for each of its replies, or None where it does
not apply.

    python -m pipelines.prepare --logs chats/ --output_dir data/chats
        --rewards.rl_dialog.rewards.example:names_the_user 1

A copy of this file, say `my_rewards.py` in the folder where the command starts, is
`--rewards.my_rewards:names_the_user 1`.
"""

from __future__ import annotations

from rl_dialog.data.schema import Dialog


def names_the_user(dialog: Dialog) -> list[float | None]:
    """1 for a reply with the user's name in it (`"user_name"` in the dialog's meta), 0 for another; None
    where it is unknown."""
    name = dialog.meta.get("user_name")
    return [
        None if name is None else float(name in (dialog.messages[i]["content"] or "")) for i in dialog.replies
    ]
