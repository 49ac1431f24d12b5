"""The SQL store of served chats: what was said, by which model with which settings, and what people thought
of it.

    store = Store("sqlite:///chats.db")              # or postgresql://user:password@host/database
    chat = store.add_turns(messages, [(reply, "stop", {"prompt": 9, "completion": 4})], model=...,
                           completion="chatcmpl-1", ...)
    store.feedback("chatcmpl-1", vote=1)
    for dialog in store.dialogs(): ...               # python -m pipelines.prepare --logs sqlite:///chats.db

A function that changes something has committed when it returns: what it acknowledged is there after a kill or
a power cut. Threads and processes may use one database at once, each process with a Store of its own. Clients
see only the chats of their own API key.

store_tables.py has the columns, database.py opens the database, storable.py says which values it takes,
served_dialogs.py how turns become Dialogs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, true, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from rl_dialog.data.database import database_url, open_database, shown_url, truncate_wal
from rl_dialog.data.schema import Dialog
from rl_dialog.data.served_dialogs import chat_dialogs, newest_branch
from rl_dialog.data.storable import (
    check_storable,
    edit_of,
    is_storable,
    name_of,
    ratings_of,
    request_messages,
    vote_of,
)
from rl_dialog.data.store_tables import CHATS, KEYS, METADATA, TURNS
from rl_dialog.errors import UserError

UNSET: Any = object()  # an argument that was not given, where None means "take it away"
ANSWERS_SEARCHED = 8  # assistant messages of a request, from its end, that are looked up as replies of ours
CHATS_AT_ONCE = 100  # read in one transaction
REQUESTS_PER_MINUTE = 60  # of a new key


@dataclass(frozen=True)
class Key:
    """An API key, as far as the store knows it."""

    name: str
    requests_per_minute: int
    created: float
    revoked: float | None = None


class Store:
    """The chats in one database. Its tables are made where they are missing; without `create` (to read)
    nothing is.

    Raises UserError for a database that cannot be used or a value that cannot be stored, KeyError for what is
    not there or belongs to another key.
    """

    def __init__(self, url: str | URL, *, create: bool = True) -> None:
        url = database_url(url)
        self.name = shown_url(url)  # without passwords
        self._engine = open_database(url, METADATA, create=create)
        self._writer = self._engine.execution_options(writes=True)
        # Threads that wait for SQLite's own lock sleep in ever longer steps: sixteen of them take five times
        # as long as one after the other.
        self._turn = threading.Lock() if url.drivername == "sqlite" else nullcontext()
        snapshot = (
            {}
            if url.drivername == "sqlite"
            else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        )
        self._reader = self._engine.execution_options(**snapshot)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that changes something."""
        with self._turn, self._writer.begin() as connection:
            yield connection

    def start_chat(
        self, *, key: str = "", user: str = "", model: str, assigned: bool = False, consent: str | None = None
    ) -> str:
        """A chat without turns; its id."""
        row = _new_chat(key=key, user=user, model=model, assigned=assigned, consent=consent)
        with self._writing() as connection:
            connection.execute(insert(CHATS).values(row))
        return row["id"]

    def add_turns(
        self,
        messages: list[dict[str, Any]],
        replies: Sequence[tuple[str, str, dict[str, int]]],
        *,
        chat: str | None = None,
        key: str = "",
        user: str = "",
        model: str,
        checkpoint: str,
        method: str,
        settings: dict[str, Any],
        completion: str,
        seconds: float,
    ) -> str:
        """Stores a request's messages and its replies, (text, finish_reason, tokens) per choice; the id of
        the chat. A completion that is there already is left as it is, so a call may be repeated.

        The turn goes on from the reply that ends the last assistant message of `messages`, if the same key
        was given it in the same conversation: in `chat`, or without one in the latest chat of this key and
        user, which then continues. Otherwise it begins anew, in `chat` or in a new chat.
        """
        said = request_messages(messages)
        made = {
            "completion": name_of(completion, "completion"),
            "model": model,
            "checkpoint": checkpoint,
            "method": method,
            "settings": settings,
        }
        turns = [
            _turn(said, reply, choice, made | {"seconds": seconds}) for choice, reply in enumerate(replies)
        ]
        if not turns:
            raise UserError("expected at least one reply, got none")
        begun = _new_chat(key=key, user=user, model=model, assigned=False, consent=None)
        try:
            return self._add(said, turns, chat, begun)
        except IntegrityError:  # another process has just stored this completion
            return self._add(said, turns, chat, begun)

    def _add(
        self, said: list[dict[str, Any]], turns: list[dict[str, Any]], chat: str | None, begun: dict[str, Any]
    ) -> str:
        with self._writing() as connection:
            if stored := _chat_of(connection, turns[0]["completion"], begun["key"]):
                return stored
            into = None if chat is None else _own_chat(connection, chat, begun["key"])
            parent, known = _parent(connection, said, into, begun)
            if into is None and parent is not None:
                into = connection.execute(
                    select(CHATS).where(CHATS.c.number == parent.chat).with_for_update()
                ).first()  # None: deleted meanwhile
            if into is None:
                parent = None
                into = connection.execute(insert(CHATS).values(begun).returning(CHATS)).one()
            place = {
                "chat": into.number,
                "parent": parent and parent.number,
                "prompt": said[known:] if parent else said,
            }
            connection.execute(insert(TURNS), [turn | place for turn in turns])
            _touch(connection, into.number)
            return into.id

    def chat(self, chat: str, *, key: str = "") -> dict[str, Any]:
        """A chat as its user sees it: what is known of it, and the messages of the newest branch."""
        with self._reader.begin() as connection:
            found = _own_chat(connection, chat, key, lock=False)
            turns = connection.execute(
                select(TURNS).where(TURNS.c.chat == found.number).order_by(TURNS.c.number)
            ).all()
        known = {
            name: getattr(found, name)
            for name in ("id", "created", "user", "model", "assigned", "consent", "ratings", "comments")
        }
        return known | {
            "messages": [message for turn in newest_branch(turns) for message in (*turn.prompt, _reply(turn))]
        }

    def model_of(self, chat: str, *, key: str = "") -> str:
        """The model that a chat was given."""
        with self._reader.begin() as connection:
            return _own_chat(connection, chat, key, lock=False).model

    def feedback(
        self,
        completion: str,
        choice: int = 0,
        *,
        key: str = "",
        vote: int | None = UNSET,
        edit: str | None = UNSET,
    ) -> None:
        """A thumb (-1, 0, 1) for a reply, what it should have been, or both; None takes it away."""
        given = {} if vote is UNSET else {"vote": vote_of(vote)}
        given |= {} if edit is UNSET else {"edit": edit_of(edit)}
        with self._writing() as connection:
            turn = _own_turn(connection, completion, choice, key)
            if given:
                connection.execute(update(TURNS).where(TURNS.c.number == turn.number).values(given))
                _touch(connection, turn.chat)

    def rate(
        self, chat: str, ratings: dict[str, float], comments: str = "", *, key: str = ""
    ) -> dict[str, Any]:
        """Ratings of the whole chat, and comments, in addition to those it has; {"ratings", "comments"} as
        they stand now."""
        given = ratings_of(ratings)
        check_storable(comments, "comments")
        with self._writing() as connection:
            found = _own_chat(connection, chat, key)
            stored = {
                "ratings": (found.ratings or {}) | given or None,
                "comments": comments or found.comments,
            }
            connection.execute(update(CHATS).where(CHATS.c.number == found.number).values(stored))
            _touch(connection, found.number)
        return stored

    def delete_user(self, user: str, *, key: str = "") -> int:
        """Deletes a user's chats with their turns; how many chats. An SQLite file's text is overwritten,
        PostgreSQL's goes with the next VACUUM."""
        if not user:
            raise UserError(
                "expected the name of a user, got none: chats without a user cannot be told apart"
            )
        if not is_storable(user):
            return 0
        with self._writing() as connection:
            deleted = connection.execute(
                delete(CHATS).where(CHATS.c.key == key, CHATS.c.user == user)
            ).rowcount
        truncate_wal(self._engine)
        return deleted

    def counts(self) -> dict[str, int]:
        """{"chats", "turns", "votes", "ratings"}."""
        counted = {
            "chats": (CHATS, true()),
            "turns": (TURNS, true()),
            "votes": (TURNS, TURNS.c.vote.is_not(None)),
        }
        counted["ratings"] = (CHATS, CHATS.c.ratings.is_not(None))
        columns = [
            select(func.count()).select_from(table).where(which).scalar_subquery().label(name)
            for name, (table, which) in counted.items()
        ]
        with self._reader.begin() as connection:
            return connection.execute(select(*columns)).one()._asdict()

    def dialogs(self, first: int | None = None, last: int | None = None) -> Iterator[Dialog]:
        """The Dialogs of the chats numbered `first` to `last`, in the order of the chats; memory stays
        flat."""
        for chat, turns in self.chats(first, last):
            yield from chat_dialogs(chat, turns)

    def chats(
        self, first: int | None = None, last: int | None = None, *, last_turn: int | None = None
    ) -> Iterator[tuple[Row, list[Row]]]:
        """(chat, its turns) for every chat with turns among `first` to `last`, in the order of the numbers.

        `last_turn` leaves out later turns, so that several readers see one state of a store in use. No
        transaction is open while the caller works.
        """
        done = (first or 0) - 1
        while batch := self._batch(done, last, last_turn):
            yield from batch
            done = batch[-1][0].number

    def _batch(self, done: int, last: int | None, last_turn: int | None) -> list[tuple[Row, list[Row]]]:
        early = true() if last_turn is None else TURNS.c.number <= last_turn
        limits = [early, TURNS.c.chat > done] + ([] if last is None else [TURNS.c.chat <= last])
        numbers = select(TURNS.c.chat).where(*limits).distinct().order_by(TURNS.c.chat).limit(CHATS_AT_ONCE)
        chats = select(CHATS).where(CHATS.c.number.in_(numbers)).order_by(CHATS.c.number)
        with self._reader.begin() as connection:
            found: dict[int, tuple[Row, list[Row]]] = {
                chat.number: (chat, []) for chat in connection.execute(chats)
            }
            if found:
                turns = (
                    select(TURNS)
                    .where(TURNS.c.chat.between(min(found), max(found)), early)
                    .order_by(TURNS.c.number)
                )
                for turn in connection.execute(turns):
                    found[turn.chat][1].append(turn)
        return list(found.values())

    def ranges(self, size: int) -> tuple[list[tuple[int, int]], int]:
        """The numbers of the chats with turns as (first, last) of `size` chats each, and the last turn's
        number (0 without any)."""
        chats = (
            select(TURNS.c.chat, func.row_number().over(order_by=TURNS.c.chat).label("position"))
            .group_by(TURNS.c.chat)
            .subquery()
        )
        starts = select(chats.c.chat).where((chats.c.position - 1) % size == 0).order_by(chats.c.chat)
        with self._reader.begin() as connection:
            firsts = list(connection.scalars(starts))
            last, last_turn = connection.execute(
                select(func.max(TURNS.c.chat), func.max(TURNS.c.number))
            ).one()
        return (
            list(zip(firsts, [*(first - 1 for first in firsts[1:]), last], strict=bool(firsts))),
            last_turn or 0,
        )

    def extent(self) -> dict[str, Any]:
        """How far the store has come: {"chats", "turns", "last_chat", "last_turn", "updated"}."""
        chats = select(
            func.count().label("chats"),
            func.max(CHATS.c.number).label("last_chat"),
            func.max(CHATS.c.updated).label("updated"),
        )
        turns = select(func.count().label("turns"), func.max(TURNS.c.number).label("last_turn"))
        with self._reader.begin() as connection:
            return connection.execute(chats).one()._asdict() | connection.execute(turns).one()._asdict()

    def add_key(self, name: str, *, requests_per_minute: int = REQUESTS_PER_MINUTE) -> str:
        """A new API key, shown here and never again. The name of a revoked key may be given anew: the new key
        sees the chats of the old one."""
        name_of(name, "name of a key")
        if (
            isinstance(requests_per_minute, bool)
            or not isinstance(requests_per_minute, int)
            or requests_per_minute < 1
        ):
            raise UserError(
                f"expected a whole number of at least 1 as requests_per_minute, got {requests_per_minute!r}"
            )
        key = "sk-rl-" + secrets.token_urlsafe(32)
        row = {
            "name": name,
            "hash": _key_hash(key),
            "requests_per_minute": requests_per_minute,
            "created": time.time(),
            "revoked": None,
        }
        try:
            with self._writing() as connection:
                connection.execute(delete(KEYS).where(KEYS.c.name == name, KEYS.c.revoked.is_not(None)))
                connection.execute(insert(KEYS).values(row))
        except IntegrityError:
            raise UserError(
                f"expected a new name for the key, got {name!r}, which there is: revoke that key first, or "
                "choose another name"
            ) from None
        return key

    def find_key(self, plaintext: str) -> Key | None:
        """The key that a client sent; None for an unknown and for a revoked one."""
        with self._reader.begin() as connection:
            row = connection.execute(
                _KEY.where(KEYS.c.hash == _key_hash(plaintext), KEYS.c.revoked.is_(None))
            ).first()
        return row and Key(*row)

    def revoke_key(self, name: str) -> None:
        """From now on `find_key` does not know it; its chats stay."""
        with self._writing() as connection:
            revoked = func.coalesce(KEYS.c.revoked, time.time())
            known = (
                is_storable(name)
                and connection.execute(
                    update(KEYS).where(KEYS.c.name == name).values(revoked=revoked)
                ).rowcount
            )
        if not known:
            raise KeyError(
                f"expected the name of a key, got {name!r}; there are "
                f"{', '.join(key.name for key in self.keys()) or 'none'}"
            )

    def keys(self) -> list[Key]:
        """All keys by name, the revoked ones too."""
        with self._reader.begin() as connection:
            return [Key(*row) for row in connection.execute(_KEY.order_by(KEYS.c.name))]


_KEY = select(KEYS.c.name, KEYS.c.requests_per_minute, KEYS.c.created, KEYS.c.revoked)


def conversation_hash(messages: Sequence[dict[str, Any]]) -> str:
    """SHA-256 of who said what, in order; nothing else of a message counts."""
    said = json.dumps(
        [[message["role"], message["content"]] for message in messages],
        ensure_ascii=False,
        separators=(",", ":"),
    )
    return hashlib.sha256(said.encode()).hexdigest()


def _parent(
    connection: Connection, said: list[dict[str, Any]], into: Row | None, begun: dict[str, Any]
) -> tuple[Row | None, int]:
    """The turn that the messages go on from, and how many of them it knows: the latest of our replies among
    them. Behind it there may be assistant messages that are not ours: a reply that was stopped half-way, or
    that the client changed."""
    place = CHATS.c.id == into.id if into else CHATS.c.user == begun["user"]
    turns = (
        select(TURNS.c.number, TURNS.c.chat)
        .join(CHATS)
        .where(CHATS.c.key == begun["key"], place)
        .order_by(TURNS.c.number.desc())
        .limit(1)
    )
    answered = [end for end, message in enumerate(said, 1) if message["role"] == "assistant"]
    for end in reversed(answered[-ANSWERS_SEARCHED:]):
        if parent := connection.execute(
            turns.where(TURNS.c.conversation == conversation_hash(said[:end]))
        ).first():
            return parent, end
    return None, 0


def _chat_of(connection: Connection, completion: str, key: str) -> str | None:
    """The chat in which a completion is stored."""
    row = connection.execute(
        select(CHATS.c.id, CHATS.c.key).join(TURNS).where(TURNS.c.completion == completion)
    ).first()
    if row and row.key != key:
        raise UserError(
            f"expected a new completion id, got {completion!r}, which is stored for another API key"
        )
    return row and row.id


def _own_chat(connection: Connection, chat: str, key: str, *, lock: bool = True) -> Row:
    """Locked against deletion until the transaction ends."""
    query = select(CHATS).where(CHATS.c.id == chat, CHATS.c.key == key)
    row = (
        connection.execute(query.with_for_update() if lock else query).first() if is_storable(chat) else None
    )
    if row is None:
        raise KeyError(f"expected the id of a chat of this API key, got {chat!r}")
    return row


def _own_turn(connection: Connection, completion: str, choice: int, key: str) -> Row:
    """Its chat is locked against deletion until the transaction ends."""
    query = (
        select(TURNS.c.number, TURNS.c.chat)
        .join(CHATS)
        .where(TURNS.c.completion == completion, TURNS.c.choice == choice, CHATS.c.key == key)
    )
    known = is_storable(completion) and isinstance(choice, int) and 0 <= choice < 2**31
    row = connection.execute(query.with_for_update(of=CHATS)).first() if known else None
    if row is None:
        raise KeyError(
            f"expected the id of a completion of this API key and one of its choices, got {completion!r}, "
            f"choice {choice!r}"
        )
    return row


def _touch(connection: Connection, chat: int) -> None:
    connection.execute(update(CHATS).where(CHATS.c.number == chat).values(updated=time.time()))


def _new_chat(*, key: str, user: str, model: str, assigned: bool, consent: str | None) -> dict[str, Any]:
    name_of(key, "key", least=0)
    name_of(user, "user", least=0)
    check_storable([model, consent], "model or consent")
    now = time.time()
    who = {"id": "chat-" + secrets.token_hex(12), "key": key, "user": user}
    return who | {
        "model": model,
        "assigned": assigned,
        "consent": consent,
        "ratings": None,
        "comments": "",
        "created": now,
        "updated": now,
    }


def _turn(
    said: list[dict[str, Any]], reply: tuple[str, str, dict[str, int]], choice: int, made: dict[str, Any]
) -> dict[str, Any]:
    text, finish_reason, tokens = reply
    if not isinstance(text, str):
        raise UserError(f"expected a text as the reply of choice {choice}, got {text!r}")
    row = made | {
        "choice": choice,
        "reply": text,
        "finish_reason": finish_reason,
        "tokens": tokens,
        "vote": None,
        "edit": None,
    }
    for name, value in row.items():
        check_storable(value, name)
    return row | {
        "conversation": conversation_hash([*said, {"role": "assistant", "content": text}]),
        "created": time.time(),
    }


def _reply(turn: Row) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": turn.reply,
        "completion": turn.completion,
        "choice": turn.choice,
    }
    return message | {
        name: value for name, value in (("vote", turn.vote), ("edit", turn.edit)) if value is not None
    }


def _key_hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
