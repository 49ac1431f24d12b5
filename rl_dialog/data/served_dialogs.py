"""The turns of a served chat to Dialogs.

A turn is what was said since its parent's reply (`prompt`) and the `reply` to it. Regenerated replies, edited
messages and n > 1 choices make the turns of a chat a tree:

    turn 1: hi -> Hello ----- turn 2: joke? -> No.          Dialog chat-1      hi, Hello, joke?, No.
                         '--- turn 3: joke? -> Knock knock  Dialog chat-1#2    hi, Hello (weight 0), joke?,
                                                                               Knock knock

Every leaf is a Dialog, and every reply is trained on once: in the first Dialog that holds it. Assistant
messages of a prompt are the client's words (weight 0). An edit, a human's better reply, makes one more
Dialog, in which it is the only reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from rl_dialog.data.schema import Dialog

SOURCE = "served"


class Chat(Protocol):
    """A row of the table of chats, as far as it is read here."""

    id: str
    key: str
    user: str
    model: str
    assigned: bool
    consent: str | None
    ratings: dict[str, float] | None
    comments: str
    created: float


class Turn(Protocol):
    """A row of the table of turns, as far as it is read here."""

    number: int  # a parent's is lower than its children's
    parent: int | None
    completion: str
    choice: int
    model: str
    checkpoint: str
    method: str
    settings: dict[str, Any]
    prompt: list[dict[str, Any]]
    reply: str
    seconds: float
    vote: int | None
    edit: str | None


def chat_dialogs(chat: Chat, turns: Sequence[Turn]) -> Iterator[Dialog]:
    """One Dialog per leaf in the order in which the leaves were served, then one per edit. Ratings and
    comments stand in the newest branch alone: it is the conversation that was rated, and a rating counts
    once."""
    known = {turn.number: turn for turn in turns}
    inner = {turn.parent for turn in turns}
    newest = [turn.number for turn in newest_branch(turns)[-1:]]
    trained: set[int] = set()
    for count, leaf in enumerate((turn for turn in turns if turn.number not in inner), 1):
        path = branch(leaf, known)
        yield Dialog(
            id=chat.id if count == 1 else f"{chat.id}#{count}",
            messages=[
                message for turn in path for message in _exchange(turn, context=turn.number in trained)
            ],
            source=SOURCE,
            meta=_meta(chat, leaf, rated=leaf.number in newest),
        )
        trained.update(turn.number for turn in path)
    yield from (_edited(chat, turn, known) for turn in turns if turn.edit is not None)


def newest_branch(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of the conversation as it stands: those that lead to the reply served last (of several
    choices the first)."""
    if not turns:
        return []
    newest = max(turns, key=lambda turn: turn.number)
    first = min(
        (turn for turn in turns if turn.completion == newest.completion), key=lambda turn: turn.choice
    )
    return branch(first, {turn.number: turn for turn in turns})


def branch(leaf: Turn, known: dict[int, Turn]) -> list[Turn]:
    """A turn and those before it, oldest first."""
    path = [leaf]
    while path[-1].parent is not None:
        path.append(known[path[-1].parent])
    return path[::-1]


def _exchange(turn: Turn, *, context: bool) -> Iterator[dict[str, Any]]:
    yield from _prompt(turn)
    given = {name: value for name, value in (("vote", turn.vote), ("edit", turn.edit)) if value is not None}
    yield {
        "role": "assistant",
        "content": turn.reply,
        **({"feedback": given} if given else {}),
        **({"weight": 0} if context else {}),
        "model": turn.model,
        "checkpoint": turn.checkpoint,
        "completion": turn.completion,
        "seconds": turn.seconds,
    }


def _prompt(turn: Turn) -> list[dict[str, Any]]:
    return [
        {**message, "weight": 0} if message["role"] == "assistant" else message for message in turn.prompt
    ]


def _edited(chat: Chat, turn: Turn, known: dict[int, Turn]) -> Dialog:
    *before, _ = branch(turn, known)
    context = [message for earlier in before for message in _exchange(earlier, context=True)]
    reply = {"role": "assistant", "content": turn.edit, "feedback": {"vote": 1, "edited": True}}
    meta = _meta(chat, turn, rated=False)
    return Dialog(
        id=f"{chat.id}#edit-{turn.number}",
        messages=[*context, *_prompt(turn), reply],
        source=SOURCE,
        meta=meta,
    )


def _meta(chat: Chat, leaf: Turn, *, rated: bool) -> dict[str, Any]:
    known = {
        "user": chat.user,
        "key": chat.key,
        "model": leaf.model,
        "assigned": bool(chat.assigned),
        "drawn": chat.model if chat.assigned else None,
        "checkpoint": leaf.checkpoint,
        "method": leaf.method,
        "settings": leaf.settings,
        "ratings": chat.ratings if rated else None,
        "comments": chat.comments if rated else "",
        "consent": chat.consent,
        "started": datetime.fromtimestamp(chat.created, UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in known.items() if value not in (None, "", {})}
