"""The SQL store of served chats: what was said, by which model with which settings, and what people thought
of it.

    store = Store("sqlite:///chats.db")              # or postgresql://user:password@host/database
    chat = store.add_turns(messages, [(reply, "stop", {"prompt": 9, "completion": 4})], model=...,
                           completion="chatcmpl-1", ...)
    store.feedback("chatcmpl-1", vote=1)
    for dialog in store.dialogs(): ...               # python -m pipelines.prepare --logs sqlite:///chats.db

A function that changes something has committed when it returns: what it acknowledged is there after a kill or
a power cut. Threads and processes may use one database at once, each process with a Store of its own. Clients
see only the chats of their own API key, and a chat is known by its id or by the id of a completion in it,
never by what was said: of two callers who share a key and begin alike neither joins the other's chat.

store_tables.py has the columns, keys.py the keys; database.py opens the database, storable.py says which
values it takes, served_dialogs.py how turns become Dialogs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, true, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from rl_dialog.data.database import database_url, open_database, shown_url, truncate_wal
from rl_dialog.data.keys import Keys
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
from rl_dialog.data.store_tables import CHATS, METADATA, TURNS
from rl_dialog.errors import UserError

UNSET: Any = object()  # an argument that was not given, where None means "take it away"
ANSWERS_SEARCHED = 8  # assistant messages of a request, from its end, that are looked up as replies of ours
ALIKE = 20  # earlier conversations of the same texts among which one is chosen that nothing continues yet
CHATS_AT_ONCE = 100  # read in one transaction


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
        self.keys = Keys(url, create=create)
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
        self.keys.close()

    def ping(self) -> None:
        """Returns once the database has answered. Raises SQLAlchemyError where it cannot."""
        with self._reader.begin() as connection:
            connection.execute(select(CHATS.c.number).limit(1)).first()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that changes something."""
        with self._turn, self._writer.begin() as connection:
            yield connection

    def start_chat(
        self,
        *,
        key: str = "",
        user: str = "",
        model: str,
        propensity: float | None = None,
        consent: str | None = None,
    ) -> str:
        """A chat without turns; its id. `propensity`: the probability with which the server drew the model;
        None where it did not."""
        row = _new_chat(key=key, user=user, model=model, propensity=propensity, consent=consent)
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
        propensity: float | None = None,
        checkpoint: str,
        method: str,
        settings: dict[str, Any],
        completion: str,
        seconds: float,
    ) -> str:
        """Stores a request's messages and its replies, (text, finish_reason, tokens) per choice; the id of
        the chat. A completion that is there already is left as it is, so a call may be repeated.

        In `chat` the turn goes on from the reply that ends the last assistant message of `messages`, if that
        was given in the same conversation, or else begins anew. Without one the request is a new chat with
        its whole history; what it continues by its text, of this key and user, is noted for `dialogs` alone,
        and `propensity` is of that new chat, as in `start_chat`.
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
        begun = _new_chat(key=key, user=user, model=model, propensity=propensity, consent=None)
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
            into = None if chat is None else _own_chat(connection, chat, begun["key"], begun["user"])
            parent, known = _parent(connection, said, into, begun)
            if into is None:
                parent = parent and _locked(connection, parent)
                begun, known = begun | {"thread": parent and (parent.thread or parent.chat)}, 0
                into = connection.execute(insert(CHATS).values(begun).returning(CHATS)).one()
            place = {"chat": into.number, "parent": parent and parent.number, "prompt": said[known:]}
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

    def known(self, chat: str, *, key: str = "", user: str = "") -> Row:
        """What is known of a chat: its id, model, user, ... With `user`, of a chat of this user."""
        with self._reader.begin() as connection:
            return _own_chat(connection, chat, key, user, lock=False)

    def chat_of(self, completion: str, *, key: str = "") -> str:
        """The id of the chat that a completion is in."""
        with self._reader.begin() as connection:
            turn = _own_turn(connection, completion, 0, key, lock=False)
            return connection.scalar(select(CHATS.c.id).where(CHATS.c.number == turn.chat))

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

    def delete_user(self, user: str | None, *, key: str | None = "") -> int:
        """Deletes the chats of a user of a key with their turns; how many chats. `user` None: of all users of
        the key, `key` None: of this user with any key. An SQLite file's text is overwritten, PostgreSQL's
        goes with the next VACUUM."""
        if user == "" or user is key is None:
            raise UserError(
                "expected the name of a user, got none: chats without a user cannot be told apart"
            )
        if not is_storable([user, key]):
            return 0
        given = [(CHATS.c.key, key), (CHATS.c.user, user)]
        whose = [column == name for column, name in given if name is not None]
        with self._writing() as connection:
            deleted = connection.execute(delete(CHATS).where(*whose)).rowcount
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
        for thread in self.threads(first, last):
            yield from chat_dialogs(*thread)

    def threads(
        self, first: int | None = None, last: int | None = None, *, last_turn: int | None = None
    ) -> Iterator[Thread]:
        """Every thread of chats with turns that begins among `first` to `last`, in the order of the numbers;
        a chat that no other goes on with is one by itself.

        `last_turn` leaves out later turns, so that several readers see one state of a store in use. No
        transaction is open while the caller works.
        """
        done = (first or 0) - 1
        while batch := self._batch(done, last, last_turn):
            yield from batch
            done = batch[-1][0][0].number

    def _batch(self, done: int, last: int | None, last_turn: int | None) -> list[Thread]:
        early = true() if last_turn is None else TURNS.c.number <= last_turn
        limits = [_BEGINS, CHATS.c.number > done] + ([] if last is None else [CHATS.c.number <= last])
        answered = select(TURNS.c.number).where(TURNS.c.chat == CHATS.c.number, early).exists()
        begun = select(CHATS.c.number).where(*limits, answered).order_by(CHATS.c.number).limit(CHATS_AT_ONCE)
        with self._reader.begin() as connection:
            roots = list(connection.scalars(begun))
            members = CHATS.c.number.in_(roots) | CHATS.c.thread.in_(roots)
            chats = connection.execute(select(CHATS).where(members).order_by(CHATS.c.number)).all()
            turns = connection.execute(
                select(TURNS).join(CHATS).where(members, early).order_by(TURNS.c.number)
            ).all()
            repeated = set(connection.scalars(_repeated(last_turn).where(members, early)))
        thread_of = {chat.number: chat.thread or chat.number for chat in chats}
        found: dict[int, Thread] = {root: ([], [], repeated) for root in roots}
        for chat in chats:
            found[thread_of[chat.number]][0].append(chat)
        for turn in turns:
            found[thread_of[turn.chat]][1].append(turn)
        return list(found.values())

    def ranges(self, size: int) -> tuple[list[tuple[int, int]], int]:
        """The numbers of the chats with turns that begin a thread as (first, last) of `size` each, and the
        last turn's number (0 without any)."""
        begun = select(CHATS.c.number).where(
            _BEGINS, select(TURNS.c.number).where(TURNS.c.chat == CHATS.c.number).exists()
        )
        chats = begun.add_columns(
            func.row_number().over(order_by=CHATS.c.number).label("position")
        ).subquery()
        starts = select(chats.c.number).where((chats.c.position - 1) % size == 0).order_by(chats.c.number)
        with self._reader.begin() as connection:
            firsts = list(connection.scalars(starts))
            last = connection.scalar(select(func.max(chats.c.number)))
            last_turn = connection.scalar(select(func.max(TURNS.c.number)))
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


Thread = tuple[list[Row], list[Row], set[int]]  # chats, their turns, and turns whose vote was repeated
_BEGINS = CHATS.c.thread.is_(None)  # a thread


def _repeated(last_turn: int | None) -> Select[tuple[int]]:
    """The turns whose conversation, word for word, the same key and user voted on again later: of such votes
    the last one counts."""
    later, chats = TURNS.alias(), CHATS.alias()
    same = [later.c.conversation == TURNS.c.conversation, later.c.number > TURNS.c.number]
    same += [chats.c.key == CHATS.c.key, chats.c.user == CHATS.c.user, later.c.vote.is_not(None)]
    same += [] if last_turn is None else [later.c.number <= last_turn]
    again = select(later.c.number).join(chats, chats.c.number == later.c.chat).where(*same).exists()
    return select(TURNS.c.number).join(CHATS).where(TURNS.c.vote.is_not(None), again)


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
    that the client changed.

    Outside of a chat several conversations may have begun alike: the latest that nothing continues yet.
    """
    place = CHATS.c.number == into.number if into else CHATS.c.user == begun["user"]
    child = TURNS.alias()
    continued = select(child.c.number).where(child.c.parent == TURNS.c.number).exists()
    turns = (
        select(TURNS.c.number, TURNS.c.chat, CHATS.c.thread, continued.label("continued"))
        .join(CHATS)
        .where(CHATS.c.key == begun["key"], place)
        .order_by(TURNS.c.number.desc())
        .limit(1 if into else ALIKE)
    )
    answered = [end for end, message in enumerate(said, 1) if message["role"] == "assistant"]
    for end in reversed(answered[-ANSWERS_SEARCHED:]):
        found = connection.execute(turns.where(TURNS.c.conversation == conversation_hash(said[:end]))).all()
        if found:
            return next((turn for turn in found if not turn.continued), found[0]), end
    return None, 0


def _locked(connection: Connection, parent: Row) -> Row | None:
    """The turn with its chat and thread kept from deletion until the transaction ends; None where somebody is
    deleting them. It does not wait: a deletion that holds one of them may be waiting for the other."""
    chats = {parent.chat, parent.thread or parent.chat}
    kept = select(CHATS.c.number).where(CHATS.c.number.in_(chats))
    kept = kept.with_for_update(read=True, key_share=True, skip_locked=True)
    return parent if len(connection.execute(kept).all()) == len(chats) else None


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


def _own_chat(connection: Connection, chat: str, key: str, user: str = "", *, lock: bool = True) -> Row:
    """Locked against deletion until the transaction ends."""
    query = select(CHATS).where(CHATS.c.id == chat, CHATS.c.key == key)
    query = query.where(CHATS.c.user == user) if user else query
    row = (
        connection.execute(query.with_for_update(key_share=True) if lock else query).first()
        if is_storable(chat)
        else None
    )
    if row is None:
        raise KeyError(f"expected the id of a chat of this API key and user, got {chat!r}")
    return row


def _own_turn(connection: Connection, completion: str, choice: int, key: str, *, lock: bool = True) -> Row:
    """Its chat is locked against deletion until the transaction ends."""
    query = (
        select(TURNS.c.number, TURNS.c.chat)
        .join(CHATS)
        .where(TURNS.c.completion == completion, TURNS.c.choice == choice, CHATS.c.key == key)
    )
    known = is_storable(completion) and isinstance(choice, int) and 0 <= choice < 2**31
    query = query.with_for_update(of=CHATS, key_share=True) if lock else query
    row = connection.execute(query).first() if known else None
    if row is None:
        raise KeyError(
            f"expected the id of a completion of this API key and one of its choices, got {completion!r}, "
            f"choice {choice!r}"
        )
    return row


def _touch(connection: Connection, chat: int) -> None:
    connection.execute(update(CHATS).where(CHATS.c.number == chat).values(updated=time.time()))


def _new_chat(
    *, key: str, user: str, model: str, propensity: float | None, consent: str | None
) -> dict[str, Any]:
    name_of(key, "key", least=0)
    name_of(user, "user", least=0)
    check_storable([model, consent], "model or consent")
    now = time.time()
    who = {"id": "chat-" + secrets.token_hex(12), "key": key, "user": user}
    return who | {
        "thread": None,
        "model": model,
        "assigned": propensity is not None,
        "propensity": propensity,
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
