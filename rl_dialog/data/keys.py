"""The keys of a database of chats or labels: who may do what, and how often. The server of chats and the one
of labels both use them; a key may be for both where they share a database.

    keys = Keys("sqlite:///chats.db")
    text = keys.add("ann", scopes=["participant"])      # shown here and never again; the hash of it is stored
    keys.find(text).may("chat", "participant")          # None for an unknown key, and for a revoked one

A key's scopes are what it may do:

    chat          talk to any model, vote, rate and read its own chats: programs, and developers
    participant   the same for one person of a study, who talks to whatever bot is drawn, and may delete all
                  that was stored of them
    labeller      compare segments on the page for labels
    operator      everybody's deletions, numbers and statistics, for whoever runs the server
    metrics       the numbers, for a monitoring system

A person's scopes are theirs alone: give each participant and labeller a key of their own, as a link.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import (
    Column,
    Double,
    Integer,
    MetaData,
    Row,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from rl_dialog.data.database import database_url, open_database
from rl_dialog.data.storable import is_storable, name_of
from rl_dialog.errors import UserError

SCOPES = ("chat", "participant", "labeller", "operator", "metrics")
REQUESTS_PER_MINUTE = 60  # of a new key
METADATA = MetaData()
KEYS = Table(
    "keys",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("hash", Text, nullable=False, unique=True),  # SHA-256; the key itself is never stored
    Column("requests_per_minute", Integer, nullable=False),
    Column("created", Double, nullable=False),  # seconds since 1970, UTC, here and below
    Column("revoked", Double),
    Column("scopes", Text, nullable=False, server_default="chat"),  # with a space between two
)


@dataclass(frozen=True)
class Key:
    """A key, as far as the database knows it."""

    name: str
    scopes: tuple[str, ...]
    requests_per_minute: int
    created: float
    revoked: float | None = None

    def may(self, *scopes: str) -> bool:
        """Has it one of these scopes?"""
        return any(scope in self.scopes for scope in scopes)

    @property
    def blind(self) -> bool:
        """Is it a participant's, who must not learn which bot answers?"""
        return not self.may("chat", "operator")


ANYBODY = Key("", SCOPES, 0, 0.0)  # who asks a server that is open to everybody on this machine


class Keys:
    """The keys in one database. The table is made where it is missing; without `create` (to read) it is not.

    Raises UserError for a database that cannot be used and for values that are none, KeyError for a key that
    there is not.
    """

    def __init__(self, url: str | URL, *, create: bool = True) -> None:
        self._reader = open_database(database_url(url), METADATA, create=create, what="table of keys")
        self._writer = self._reader.execution_options(writes=True)

    def close(self) -> None:
        self._reader.dispose()

    def add(
        self,
        name: str,
        *,
        scopes: Iterable[str] = ("chat",),
        requests_per_minute: int = REQUESTS_PER_MINUTE,
    ) -> str:
        """A new key, shown here and never again. The name of a revoked key may be given anew: the new key
        sees the chats of the old one."""
        name_of(name, "name of a key")
        scopes = _scopes_of(scopes)
        if type(requests_per_minute) is not int or not 1 <= requests_per_minute < 2**31:  # of its column
            raise UserError(
                "expected a whole number of at least 1 as requests_per_minute, and below 2,147,483,648, got "
                f"{requests_per_minute!r}"
            )
        key = "sk-rl-" + secrets.token_urlsafe(32)
        row = {"name": name, "hash": _hash(key), "scopes": " ".join(scopes)}
        row |= {"requests_per_minute": requests_per_minute, "created": time.time(), "revoked": None}
        try:
            with self._writer.begin() as connection:
                connection.execute(delete(KEYS).where(KEYS.c.name == name, KEYS.c.revoked.is_not(None)))
                connection.execute(insert(KEYS).values(row))
        except IntegrityError:
            raise UserError(
                f"expected a new name for the key, got {name!r}, which there is: revoke that key first, or "
                "choose another name"
            ) from None
        return key

    def find(self, plaintext: str) -> Key | None:
        """The key that a client sent; None for an unknown and for a revoked one."""
        query = select(*COLUMNS).where(KEYS.c.hash == _hash(plaintext), KEYS.c.revoked.is_(None))
        with self._reader.begin() as connection:
            row = connection.execute(query).first()
        return row and _key(row)

    def revoke(self, name: str) -> None:
        """From now on `find` does not know it; its chats and labels stay."""
        revoked = func.coalesce(KEYS.c.revoked, time.time())
        change = update(KEYS).where(KEYS.c.name == name).values(revoked=revoked)
        with self._writer.begin() as connection:
            known = is_storable(name) and connection.execute(change).rowcount
        if not known:
            names = ", ".join(key.name for key in self.all()) or "none"
            raise KeyError(f"expected the name of a key, got {name!r}; there are {names}")

    def all(self) -> list[Key]:
        """All keys by name, the revoked ones too."""
        with self._reader.begin() as connection:
            return [_key(row) for row in connection.execute(select(*COLUMNS).order_by(KEYS.c.name))]


COLUMNS = tuple(KEYS.c[name] for name in ("name", "scopes", "requests_per_minute", "created", "revoked"))


def _key(row: Row) -> Key:
    return Key(row.name, tuple(row.scopes.split()), *row[2:])


def _scopes_of(scopes: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(scopes))
    if not found or not set(found) <= set(SCOPES):
        raise UserError(f"expected scopes of a key ({', '.join(SCOPES)}), got {', '.join(found) or 'none'}")
    return found


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
