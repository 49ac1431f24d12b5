"""The tables of the store: chats and their turns. Those of keys.py stand beside them."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

METADATA = MetaData()
NUMBER = BigInteger().with_variant(
    Integer, "sqlite"
)  # SQLite counts up only in a column of exactly this type

CHATS = Table(
    "chats",
    METADATA,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),  # "chat-" and 24 hex digits
    # the chat whose conversation a request without an id goes on with, as far as its text tells: for
    # `prepare` alone; null: none
    Column("thread", NUMBER, ForeignKey("chats.number", ondelete="SET NULL"), index=True),
    Column("key", Text, nullable=False),  # name of the API key that made it, "" where the server is open
    Column("user", Text, nullable=False),  # the client's own name for its user, "" unknown
    Column("model", Text, nullable=False),
    Column("assigned", Boolean, nullable=False),  # the server drew the model
    Column("propensity", Double),  # with this probability; null: it did not
    Column("consent", Text),  # the text that the user agreed to
    Column("ratings", JSON(none_as_null=True)),  # {"quality": 5, ...}
    Column("comments", Text, nullable=False),
    Column("created", Double, nullable=False),  # seconds since 1970, UTC, here and below
    Column("updated", Double, nullable=False),
    Index("chats_of_a_user", "key", "user"),
    sqlite_autoincrement=True,  # a deleted chat's number is never given again
)
TURNS = Table(
    "turns",
    METADATA,
    Column("number", NUMBER, primary_key=True),
    Column("completion", Text, nullable=False),  # "chatcmpl-..."
    Column("choice", Integer, nullable=False),
    Column("chat", NUMBER, ForeignKey("chats.number", ondelete="CASCADE"), nullable=False, index=True),
    # the turn that this one goes on from; null: none. In the same chat `prompt` is what was said since its
    # reply; from another chat of the thread, or from none, `prompt` is the whole history
    Column("parent", NUMBER, ForeignKey("turns.number", ondelete="SET NULL"), index=True),
    Column("model", Text, nullable=False),
    Column("checkpoint", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("prompt", JSON, nullable=False),
    Column("reply", Text, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("tokens", JSON, nullable=False),  # {"prompt": n, "completion": n}
    Column("seconds", Double, nullable=False),
    Column(
        "conversation", Text, nullable=False, index=True
    ),  # `conversation_hash` of all that was said, this reply included
    Column("vote", Integer),  # -1, 0, 1
    Column("edit", Text),  # what the reply should have been
    Column("created", Double, nullable=False),
    UniqueConstraint("completion", "choice"),
    Index(
        "turns_with_a_vote",
        "vote",
        sqlite_where=text("vote IS NOT NULL"),
        postgresql_where=text("vote IS NOT NULL"),
    ),  # to count them
    sqlite_autoincrement=True,
)
