"""The tables of the label log: queries, who holds them, what was answered, who may answer, and the plan.

Nothing of an answer is ever changed or deleted; it may be revoked.
"""

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
    and_,
    func,
    literal_column,
    select,
)

METADATA = MetaData()
NUMBER = BigInteger().with_variant(Integer, "sqlite")

QUERIES = Table(
    "queries",
    METADATA,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("first", Text, nullable=False, index=True),  # segments
    Column("second", Text, nullable=False, index=True),
    Column("task", Text, nullable=False),  # what the labeller is told
    Column("priority", Double, nullable=False),
    Column("reward_version", Integer, nullable=False),  # of the reward model when the query was made
    Column("about", JSON, nullable=False),
    Column("validation", Boolean, nullable=False),  # its label is for validation, not for training
    Column("wanted", Integer, nullable=False),  # answers by different labellers
    Column("missing", Integer, nullable=False),  # max(0, wanted - answers that stand)
    Column("created", Double, nullable=False),  # seconds since 1970, UTC, here and below
    Column("expired", Double),  # offered no more: it was too old
    Column("gold", Double),  # P(first preferred) as it is known; null: it is asked because nobody knows
)
GOLD = QUERIES.c.gold.is_not(None)
Index("queries_with_known_answers", QUERIES.c.gold, sqlite_where=GOLD, postgresql_where=GOLD)
OPEN = and_(
    QUERIES.c.missing > literal_column("0"), QUERIES.c.expired.is_(None)
)  # literally: SQLite takes a partial index only then
Index(
    "queries_to_answer", QUERIES.c.priority.desc(), QUERIES.c.number, sqlite_where=OPEN, postgresql_where=OPEN
)
LEASES = Table(  # a query that was shown to a labeller, who has not answered yet
    "leases",
    METADATA,
    Column("query", NUMBER, ForeignKey("queries.number"), primary_key=True),
    Column("labeller", Text, primary_key=True),
    Column("swapped", Boolean, nullable=False),  # the second segment is on the left
    Column("shown", Double, nullable=False),
    Column("until", Double, nullable=False),  # from then on others may get it
)
ANSWERS = Table(
    "answers",
    METADATA,
    Column("number", NUMBER, primary_key=True),  # 1, 2, 3, ... in the order of commits
    Column("query", NUMBER, ForeignKey("queries.number"), nullable=False),
    Column("labeller", Text, nullable=False),
    Column("choice", Text, nullable=False),  # "left", "right", "tie", "skip", as shown
    Column("swapped", Boolean, nullable=False),
    Column("preference", Double),  # P(first preferred) as said: 1, 0, 0.5; null: incomparable
    Column("late", Boolean, nullable=False),  # others had given all answers that the query wanted
    Column("shown", Double, nullable=False),
    Column("answered", Double, nullable=False),
    Column("revoked", Double),
    Column("reason", Text),  # of the revocation: "undo", or what was said of the labeller
    Column("strength", Integer),  # 1 slightly better, 2 much better; null: it was not asked
    Column("reasons", JSON(none_as_null=True)),  # tags
    Column("flag", Text),  # what is wrong with the pair
    Column("undone_by", Text),  # id of the request that took it back, which may be sent again
)
# A query and a labeller have one standing answer at most, whatever happens.
STANDS = ANSWERS.c.revoked.is_(None)
Index(
    "answers_that_stand",
    ANSWERS.c.query,
    ANSWERS.c.labeller,
    unique=True,
    sqlite_where=STANDS,
    postgresql_where=STANDS,
)
PREFERS = and_(STANDS, ANSWERS.c.preference.is_not(None))
Index(
    "answers_that_prefer", ANSWERS.c.query, ANSWERS.c.number, sqlite_where=PREFERS, postgresql_where=PREFERS
)
# The answers that are labels: of each query the earliest. Those to gold pairs measure labellers.
FIRST = (
    select(func.min(ANSWERS.c.number))
    .where(PREFERS, ANSWERS.c.query.not_in(select(QUERIES.c.number).where(GOLD)))
    .group_by(ANSWERS.c.query)
)
Index("answers_of_a_labeller", ANSWERS.c.labeller, ANSWERS.c.number)
Index("answers_revoked", ANSWERS.c.revoked, sqlite_where=~STANDS, postgresql_where=~STANDS)
LABELLERS = Table(
    "labellers",
    METADATA,
    Column("name", Text, primary_key=True),  # of the labeller's key too, where there is one
    Column("created", Double, nullable=False),
    Column("revoked", Double),
)
PLAN = Table(  # how the run is labelled, see plan.py
    "plan",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", JSON, nullable=False),
)
