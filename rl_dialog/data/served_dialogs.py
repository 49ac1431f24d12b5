"""The turns of served chats to Dialogs.

A turn is what was said since its parent's reply (`prompt`) and the `reply` to it. Regenerated replies, edited
messages and n > 1 choices make the turns of a chat a tree:

    turn 1: hi -> Hello ----- turn 2: joke? -> No.          Dialog chat-1      hi, Hello, joke?, No.
                         '--- turn 3: joke? -> Knock knock  Dialog chat-1#2    hi, Hello (weight 0), joke?,
                                                                               Knock knock

Every leaf is a Dialog, and every reply is trained on once: in the first Dialog that holds it. Assistant
messages of a prompt are the client's words (weight 0, `"said_by": "client"`): a reply that was stopped
half-way, or one that no model ever said. An edit, a human's better reply, makes one more Dialog, in which it
is the only reply.

A request that names no chat is a chat of its own with its whole history. Those of one key and user that
continue each other by their text are a thread, which is read as one tree: its Dialogs are the longest of
them, with the votes that the shorter ones got.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from rl_dialog.data.schema import Dialog

SOURCE = "served"
CLIENT = "client"  # who said an assistant message that no model of ours did


class Chat(Protocol):
    """A row of the table of chats, as far as it is read here."""

    number: int
    id: str
    key: str
    user: str
    model: str
    assigned: bool
    propensity: float | None
    consent: str | None
    ratings: dict[str, float] | None
    comments: str
    created: float


class Turn(Protocol):
    """A row of the table of turns, as far as it is read here."""

    number: int  # a parent's is lower than its children's
    chat: int
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


def chat_dialogs(
    chats: Sequence[Chat], turns: Sequence[Turn], repeated: Container[int] = ()
) -> Iterator[Dialog]:
    """The Dialogs of the chats of one thread, mostly a single one: one per leaf in the order in which the
    leaves were served, then one per edit. Ratings and comments stand in the newest branch of their chat
    alone: it is the conversation that was rated, and a rating counts once. So does what a key and user vote
    on one conversation: of the turns `repeated` the vote is kept as `repeated_vote`."""
    found, known = {chat.number: chat for chat in chats}, {turn.number: turn for turn in turns}
    inner = {turn.parent for turn in turns}
    of_chat: defaultdict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        of_chat[turn.chat].append(turn)
    rated = {newest_branch(own)[-1].number for own in of_chat.values()}
    trained: set[int] = set()
    leaves: Counter[int] = Counter()  # of each chat, so far
    for leaf in (turn for turn in turns if turn.number not in inner):
        path, chat = branch(leaf, known), found[leaf.chat]
        leaves[leaf.chat] += 1
        yield Dialog(
            id=chat.id if leaves[leaf.chat] == 1 else f"{chat.id}#{leaves[leaf.chat]}",
            messages=list(_messages(path, context=trained, repeated=repeated)),
            source=SOURCE,
            meta=_meta(chats[0], found[path[0].chat], leaf, chat)
            | _ratings([found[turn.chat] for turn in path if turn.number in rated]),
        )
        trained.update(turn.number for turn in path)
        rated.difference_update(trained)
    yield from (_edited(chats[0], found, turn, known) for turn in turns if turn.edit is not None)


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
    """A turn and those of the `known` before it, oldest first."""
    path = [leaf]
    while path[-1].parent in known:
        path.append(known[path[-1].parent])
    return path[::-1]


def _messages(
    path: Sequence[Turn], *, context: Container[int], repeated: Container[int] = ()
) -> Iterator[dict[str, Any]]:
    """What was said on a path; the replies of the turns `context` are not trained on."""
    said, before = 0, None
    for turn in path:
        prompt = turn.prompt if before in (None, turn.chat) else turn.prompt[said:]
        yield from map(_by_client, prompt)
        vote = "repeated_vote" if turn.number in repeated else "vote"
        yield _reply(turn, context=turn.number in context, vote=vote)
        said, before = said + len(prompt) + 1, turn.chat


def _reply(turn: Turn, *, context: bool, vote: str) -> dict[str, Any]:
    given = {name: value for name, value in ((vote, turn.vote), ("edit", turn.edit)) if value is not None}
    return {
        "role": "assistant",
        "content": turn.reply,
        **({"feedback": given} if given else {}),
        **({"weight": 0} if context else {}),
        "model": turn.model,
        "checkpoint": turn.checkpoint,
        "completion": turn.completion,
        "seconds": turn.seconds,
    }


def _by_client(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a request. What it says for the assistant was not served as it stands there."""
    return {**message, "weight": 0, "said_by": CLIENT} if message["role"] == "assistant" else message


def _edited(thread: Chat, found: dict[int, Chat], turn: Turn, known: dict[int, Turn]) -> Dialog:
    path, chat = branch(turn, known), found[turn.chat]
    *before, _ = _messages(path, context=known)
    reply = {"role": "assistant", "content": turn.edit, "feedback": {"vote": 1, "edited": True}}
    return Dialog(
        id=f"{chat.id}#edit-{turn.number}",
        messages=[*before, reply],
        source=SOURCE,
        meta=_meta(thread, found[path[0].chat], turn, chat),
    )


def _meta(thread: Chat, first: Chat, leaf: Turn, chat: Chat) -> dict[str, Any]:
    known = {
        "thread": thread.id,
        "user": chat.user,
        "key": chat.key,
        "model": leaf.model,
        "assigned": bool(chat.assigned),
        "drawn": chat.model if chat.assigned else None,
        "propensity": chat.propensity,
        "checkpoint": leaf.checkpoint,
        "method": leaf.method,
        "settings": leaf.settings,
        "consent": chat.consent,
        "started": datetime.fromtimestamp(first.created, UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in known.items() if value not in (None, "", {})}


def _ratings(chats: Sequence[Chat]) -> dict[str, Any]:
    """What was said of these chats, the last word where several say something."""
    ratings = {name: value for chat in chats for name, value in (chat.ratings or {}).items()}
    comments = [chat.comments for chat in chats if chat.comments]
    return ({"ratings": ratings} if ratings else {}) | ({"comments": comments[-1]} if comments else {})
