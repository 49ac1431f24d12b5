"""The database behind a store or log: which one a URL means, how it is opened, its tables, made once however
many processes start at the same moment.

SQLite runs in WAL mode, so readers never wait for a writer, and every commit reaches the disk before it
returns. WAL needs memory that the processes share: an SQLite store belongs on a disk of the machine that
serves. Servers on several machines share a PostgreSQL store.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoFreeConnection
from sqlalchemy.schema import CreateColumn

from rl_dialog.errors import UserError

WAIT = 30  # seconds that a writer waits for others, and a request for a free connection
CONNECT = 10  # seconds that a PostgreSQL server has to answer
# held while tables are made: PostgreSQL's CREATE TABLE IF NOT EXISTS fails when two processes run it at once
LOCK = 0x726C_6469_616C
FORMS = "sqlite:///chats.db, sqlite:////folder/chats.db or postgresql://user:password@host/database"
# what a database raises that takes nothing now and may later: a full disk, a lock, a server that is away
UNAVAILABLE = (OperationalError, NoFreeConnection)
DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
SECRET = ("password", "sslpassword")  # of a URL's query
EARLIER = (
    "which needs another name, or an earlier version's, which opens once a server or a labeller has been "
    "started on it"
)


def database_url(url: str | URL) -> URL:
    """The database that a URL means, an SQLite path made absolute. Raises UserError, which shows no
    password."""
    shown = _without_secrets(str(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        raise UserError(f"expected the URL of a store ({FORMS}), got {shown!r}") from None
    if parsed.drivername not in DRIVERS:
        raise UserError(f"expected the URL of an SQLite or PostgreSQL store ({FORMS}), got {shown!r}")
    parsed = parsed.set(drivername=DRIVERS[parsed.drivername])
    if parsed.drivername != "sqlite":
        return parsed
    if (
        not parsed.database
        or parsed.database.startswith((":memory:", "file:"))
        or parsed.query
        or parsed.host
    ):
        raise UserError(
            "expected a file's path and no options (sqlite:///chats.db, sqlite:////folder/chats.db), got "
            f"{shown!r}"
        )
    return URL.create("sqlite", database=str(Path(parsed.database).absolute()))


def is_missing(url: str | URL) -> bool:
    """Whether it is an SQLite file that is not there, which opening it would make."""
    url = database_url(url)
    return url.drivername == "sqlite" and not Path(url.database).is_file()


def shown_url(url: URL) -> str:
    """The URL for people, manifests and logs: without passwords."""
    if url.drivername == "sqlite":
        return f"sqlite:///{url.database}"
    return (
        url.set(drivername="postgresql").difference_update_query(SECRET).render_as_string(hide_password=True)
    )


def without_password(url: str) -> str:
    """The URL as settings on disk keep it. Whoever opens it again has the password in PGPASSWORD or
    ~/.pgpass."""
    if not url.startswith("postgres"):
        return url
    parsed = database_url(url).difference_update_query(SECRET)
    return parsed._replace(drivername="postgresql", password=None).render_as_string(hide_password=False)


def open_database(url: URL, metadata: MetaData, *, create: bool, what: str = "store of chats") -> Engine:
    """The engine of a database that holds the tables of `metadata`: with `create` they are made where they
    are missing, without it nothing is. `what` they are is for the errors.

    Raises UserError where it cannot be reached or holds something else. Of an engine's connections those with
    the execution option `writes` begin their transactions with SQLite's write lock, so that no transaction
    fails half-way because another one wrote in between.
    """
    path = Path(url.database) if url.drivername == "sqlite" else None
    if path and not create and is_missing(url):
        raise UserError(f"expected an SQLite file with a {what}, found nothing at {path}")
    if path and not path.parent.is_dir():
        raise UserError(
            f"expected a folder for the SQLite file {path}, found none: make the folder {path.parent}, or "
            "name another one"
        )
    engine = _sqlite_engine(url) if path else _postgresql_engine(url)
    try:
        if path and create:
            _begin_wal(engine)
        with engine.execution_options(writes=create).begin() as connection:
            if path is None:
                _check_encoding(connection, shown_url(url))
            if create:
                _create_tables(connection, metadata)
            _check_tables(connection, metadata, shown_url(url), what)
    except SQLAlchemyError as error:
        engine.dispose()
        raise UserError(f"cannot open the store {shown_url(url)}: {plain_reason(error)}") from None
    except ValueError:
        engine.dispose()
        raise
    return engine


def truncate_wal(engine: Engine) -> None:
    """Empties the file beside an SQLite database in which deleted text would stand until it is
    overwritten."""
    if engine.dialect.name == "sqlite":
        _pragma(engine, "wal_checkpoint(TRUNCATE)")


def plain_reason(error: SQLAlchemyError) -> str:
    """What the database says, without the statement."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _without_secrets(text: str) -> str:
    """A URL that may not be one: all that can be a password is left out."""
    text = re.sub(r"://.*@", "://***@", text, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1***", text)


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(
        url, hide_parameters=True, json_serializer=_dump, pool_timeout=WAIT, connect_args={"timeout": WAIT}
    )

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, record: Any) -> None:
        connection.isolation_level = None  # transactions begin below, not where Python's driver thinks best
        for pragma in (
            "foreign_keys = ON",
            "synchronous = FULL",
            "secure_delete = ON",
        ):  # secure: deleted text is overwritten, not only unlinked
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(
            "BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN"
        )

    return engine


def _postgresql_engine(url: URL) -> Engine:
    waits = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT}
    try:
        return create_engine(
            url,
            hide_parameters=True,
            json_serializer=_dump,
            pool_timeout=WAIT,
            pool_pre_ping=True,
            connect_args=waits,
        )
    except ImportError as error:
        raise UserError('a PostgreSQL store needs psycopg: pip install "psycopg[binary]"') from error


def _begin_wal(engine: Engine) -> None:
    """WAL mode is a property of the file. Where two processes switch a new file at once SQLite refuses one of
    them without waiting."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return _pragma(engine, "journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise UserError(f"cannot open the store {shown_url(engine.url)}: {error}") from None
            time.sleep(0.02)
        except sqlite3.DatabaseError as error:
            raise UserError(f"cannot open the store {shown_url(engine.url)}: {error}") from None


def _pragma(engine: Engine, pragma: str) -> None:
    """Outside of any transaction, as these pragmas must be."""
    connection = engine.raw_connection()
    try:
        connection.cursor().execute(f"PRAGMA {pragma}").fetchall()
    finally:
        connection.close()


def _check_encoding(connection: Connection, name: str) -> None:
    encoding = connection.scalar(text("SHOW server_encoding"))
    if encoding != "UTF8":
        raise UserError(
            f"expected a database that stores UTF8, got {encoding} in {name}: create it with `createdb "
            "--encoding UTF8 --template template0`"
        )


def _create_tables(connection: Connection, metadata: MetaData) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    metadata.create_all(connection)
    for table in metadata.tables.values():
        _add_columns(connection, table)


def _add_columns(connection: Connection, table: Table) -> None:
    """Columns that an earlier version did not have, where rows without them mean something."""
    there = {column["name"] for column in inspect(connection).get_columns(table.name)}
    missing = [column for column in table.columns if column.name not in there]
    if any(not column.nullable and column.server_default is None for column in missing):
        return  # another program's table: `_check_tables` says so
    name = connection.dialect.identifier_preparer.format_table(table)
    for column in missing:
        definition = CreateColumn(column).compile(dialect=connection.dialect)
        connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {definition}"))
        for index in table.indexes:
            if list(index.columns) == [column]:
                index.create(connection)


def _check_tables(connection: Connection, metadata: MetaData, name: str, what: str) -> None:
    inspector = inspect(connection)
    tables = inspector.get_table_names()
    if missing := [table for table in metadata.tables if table not in tables]:
        holds = f"the tables {', '.join(sorted(tables)[:12])}" if tables else "no table"
        told = f"expected a {what}, missing the tables {', '.join(missing)}; {name} holds {holds}"
        if len(missing) == len(metadata.tables):
            raise UserError(told)
        raise UserError(f"{told}: it is another program's, {EARLIER}")
    for table in metadata.tables.values():
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        if missing := [column.name for column in table.columns if column.name not in columns]:
            raise UserError(
                f"expected a {what}, missing the columns {', '.join(missing)} of the table {table.name} in "
                f"{name}: it is another program's, {EARLIER}"
            )


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
