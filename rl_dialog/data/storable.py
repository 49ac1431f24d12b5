"""What the store takes: values that SQLite and PostgreSQL both hold unchanged. Anything else is a UserError,
and nothing is written."""

from __future__ import annotations

import math
import re
from typing import Any

from rl_dialog.data.formats.openai import chat_messages
from rl_dialog.data.schema import Dialog, is_number
from rl_dialog.errors import UserError

KEPT = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
)  # of a client's message: judgements on replies come from `feedback` alone
NAME_LENGTH = 256  # characters: what PostgreSQL can index
NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def request_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A request's messages as they are stored. Raises UserError (a DialogError) for those that no Dialog
    could hold."""
    checked = Dialog(id="request", messages=chat_messages(messages, "request")).messages
    stored = [{name: message[name] for name in KEPT if name in message} for message in checked]
    for number, message in enumerate(stored):
        check_storable(message, f"message {number}")
    return stored


def vote_of(vote: Any) -> int | None:
    if vote is not None and (type(vote) is not int or vote not in (-1, 0, 1)):
        raise UserError(f"expected -1, 0, 1 or None as a vote, got {vote!r}")
    return vote


def edit_of(edit: Any) -> str | None:
    if edit is not None and not (isinstance(edit, str) and edit.strip()):
        raise UserError(f"expected a text or None as an edit, got {edit!r}")
    check_storable(edit, "edit")
    return edit


def ratings_of(ratings: Any) -> dict[str, float]:
    numbers = ratings.values() if isinstance(ratings, dict) else [None]
    if not all(map(is_number, numbers)):
        raise UserError(f"expected ratings as {{name: number}}, got {str(ratings)[:200]}")
    check_storable(ratings, "ratings")
    return ratings


def name_of(name: Any, what: str, *, least: int = 1) -> str:
    if not isinstance(name, str) or not least <= len(name) <= NAME_LENGTH:
        raise UserError(
            f"expected a text of {least} to {NAME_LENGTH} characters as the {what}, got {str(name)[:60]!r}"
        )
    check_storable(name, what)
    return name


def check_storable(value: Any, what: str) -> None:
    if not is_storable(value):
        limits = "text without NUL characters and lone surrogates, finite numbers"
        raise UserError(
            f"expected as {what} what every database can hold ({limits}), got {repr(value)[:200]}"
        )


def is_storable(value: Any) -> bool:
    """PostgreSQL has no NUL in a text, UTF-8 no lone surrogates, JSON no NaN; SQLite would take some of them
    and break readers later."""
    if isinstance(value, dict):
        return all(
            isinstance(name, str) and is_storable(name) and is_storable(item) for name, item in value.items()
        )
    if isinstance(value, list | tuple):
        return all(map(is_storable, value))
    if isinstance(value, str):
        return not NOT_TEXT.search(value)
    return (
        value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    )
