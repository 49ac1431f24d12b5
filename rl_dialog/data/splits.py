"""Train, validation or test? A stable hash decides, so the answer never depends on order, machine or the
other dialogs."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from typing import Literal

from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.errors import UserError

SplitBy = Literal["first_turn", "dialog"]


def split_key(dialog: Dialog, by: SplitBy = "first_turn") -> str:
    """What must stay on one side: `meta["group"]` where there is one, else everything up to and including
    the first user turn.

    Two replies with the same context share its first user turn, so they get the same key and never straddle
    splits, whether they come from one conversation stored as many rows (rated replies, preference pairs) or
    from two. System prompts are left out: they often hold per-user details. Case, punctuation and spacing of
    that turn make no difference ("What's up?", "whats up"), except where it has nothing else. By dialog, for
    logs that all begin alike: all of its messages, so that only equal ones stay together; of a preference
    pair's dialog those before the reply, without which there is no pair; and of a served chat
    `meta["thread"]`, which its edits and redrawn replies have too. Groups, threads, turns and dialogs have
    keys apart.
    """
    if dialog.meta.get("group") is not None:
        return f"group\0{dialog.meta['group']}"
    if by == "dialog" and dialog.meta.get("thread") is not None:
        return f"thread\0{dialog.meta['thread']}"
    if by == "dialog":
        paired = "pair" in dialog.meta and "preferred" in dialog.meta
        messages = dialog.messages[: dialog.replies[0] if paired and dialog.replies else None]
        return f"dialog\0{json.dumps([(m['role'], m['content']) for m in messages])}"
    first_user = next((m["content"] or "" for m in dialog.messages if m["role"] == "user"), "")
    return f"user\0{_folded(first_user)}"


def _folded(text: str) -> str:
    """Without case and punctuation: an apostrophe joins, other marks part words."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    bare = "".join("" if c in "'’" else " " if unicodedata.category(c)[0] == "P" else c for c in plain)
    return " ".join(bare.split()) or " ".join(plain.split())


def assign_split(
    dialog: Dialog,
    validation: float,
    test: float,
    *,
    seed: int = 0,
    by: SplitBy = "first_turn",
) -> str:
    """One of SPLITS. `validation` and `test` are shares of the keys (0..1); raises UserError when they leave
    nothing to train on."""
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise UserError(
            f"expected shares >= 0 with validation + test < 1, got validation={validation} and test={test}"
        )
    draw = drawn(split_key(dialog, by), seed=seed)
    train, held_out, final = SPLITS
    return final if draw < test else held_out if draw < test + validation else train


def drawn(key: str, *, seed: int) -> float:
    """A number from 0 to 1 that is always the same for a key."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
