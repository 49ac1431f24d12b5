"""The label log: which pairs of segments were offered, who holds them, and every answer that was ever given. An SQL database.

    log = LabelLog("sqlite:///labels.db")                        # or postgresql://user:password@host/database
    log.add_query(one, other, task="Which one moves to the middle?")
    query = log.lease("ann")                                     # hers for a minute; `renew` keeps it
    log.answer(query.id, "ann", "left")                          # committed when it returns
    for label in log.labels(): ...

A function that changes something has committed when it returns: what it acknowledged is there after a kill or a power cut. Threads and processes may
use one log at once, each process with a LabelLog of its own. There is one writer at a time, on PostgreSQL as on SQLite: answers are numbered without
gaps, in the order in which they become visible.

A query is open until as many labellers as it wants have answered: one, or two for a share `overlap` of the queries, for statistics. It has one label,
the earliest standing answer that prefers something. A second opinion measures the labellers; it becomes the label when the first is revoked.

label_tables.py has the columns, queries.py chooses the pairs, labeller_statistics.py says what labellers are worth.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, Row, and_, case, delete, exists, func, insert, or_, select, text, update
from sqlalchemy.engine import URL

from rl_dialog.data.database import database_url, open_database, shown_url
from rl_dialog.data.storable import check_storable, name_of
from rl_dialog.preferences.label_tables import ANSWERS, LABELLERS, LEASES, METADATA, OPEN, QUERIES, STANDS
from rl_dialog.preferences.labeller_statistics import labeller_statistics

Choice = Literal["left", "right", "tie", "skip"]
PREFERENCES: dict[str, float | None] = {"left": 1.0, "right": 0.0, "tie": 0.5, "skip": None}  # of what is shown on the left
LEASE = 60.0  # seconds
VALIDATION = 0.2  # share of the segments whose labels are for validation
LOCK = 0x726C_6C61_6265_6C  # of PostgreSQL, held by the one who writes


@dataclass(frozen=True)
class NewQuery:
    """What `add_query` takes. Raises ValueError for what no database can hold, and for a segment compared with itself."""

    first: str
    second: str
    id: str | None = None
    task: str = ""
    priority: float = 0.0
    reward_version: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    validation: bool | None = None

    def __post_init__(self) -> None:
        name_of(self.first, "first segment")
        name_of(self.second, "second segment")
        if self.id is not None:
            name_of(self.id, "id of a query")
        if self.first == self.second:
            raise ValueError(f"expected two different segments, got {self.first} twice")
        for name in ("task", "priority", "reward_version", "about"):
            check_storable(getattr(self, name), name)


@dataclass(frozen=True)
class Query:
    """A question as it is shown to one labeller, who holds it until `until`."""

    id: str
    first: str  # segments, here and below
    second: str
    swapped: bool  # the second one is shown on the left
    task: str = ""
    priority: float = 0.0
    reward_version: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    validation: bool = False
    shown: float = 0.0  # seconds since 1970, here and below
    until: float = 0.0

    @property
    def left(self) -> str:
        return self.second if self.swapped else self.first

    @property
    def right(self) -> str:
        return self.first if self.swapped else self.second


@dataclass(frozen=True)
class Label:
    """An answer about (first, second), whatever side they were shown on."""

    number: int  # of the answer: 1, 2, 3, ...
    query: str
    first: str
    second: str
    preference: float | None  # P(first preferred): 1, 0, 0.5 for a tie; None: incomparable
    labeller: str
    shown: float
    answered: float
    reward_version: int  # of the reward model when the query was made
    validation: bool  # for validation, not for training


class LabelLog:
    """The labels in one database. Its tables are made where they are missing; without `create` (to read) nothing is.

    Args:
        overlap: share of the new queries that a second labeller is asked as well.
        validation: share of the segments whose labels are for validation. A segment's side is a hash of its id: the same after every restart.
        clock: seconds since 1970. Processes on several machines need clocks that agree to a fraction of a lease.

    Raises ValueError for a database that cannot be used or a value that cannot be stored, KeyError for a query or a labeller that there is not,
    PermissionError for a labeller who was revoked.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        create: bool = True,
        overlap: float = 0.0,
        validation: float = VALIDATION,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, share in (("overlap", overlap), ("validation", validation)):
            if not 0 <= share <= 1:
                raise ValueError(f"expected a share from 0 to 1 as {name}, got {share}")
        url = database_url(url)
        self.name = shown_url(url)  # without passwords
        self._engine = open_database(url, METADATA, create=create, what="log of labels")
        self._sqlite = url.drivername == "sqlite"
        # A transaction must see what was committed while it waited for its turn.
        self._writer = self._engine.execution_options(**({"writes": True} if self._sqlite else {"isolation_level": "READ COMMITTED"}))
        self._turn = threading.Lock() if self._sqlite else nullcontext()  # threads that wait for SQLite's own lock sleep in ever longer steps
        self._overlap, self.validation, self._clock = overlap, validation, clock

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that changes something; no other one runs."""
        with self._turn, self._writer.begin() as connection:
            if not self._sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            yield connection

    # Queries

    def is_validation(self, segment: str) -> bool:
        """The side of a segment. A pair is of two segments of one side, so that no segment is trained on and validated with."""
        return _share("validation", segment) < self.validation

    def add_query(
        self,
        first: str,
        second: str,
        id: str | None = None,
        task: str = "",
        priority: float = 0.0,
        reward_version: int = 0,
        about: Mapping[str, Any] | None = None,
        validation: bool | None = None,
    ) -> str:
        """Offers a pair of segments, whose files exist; the query's id. Without `id` it is a hash of the pair: the same pair is never asked twice.
        A query that is there already is left as it is.

        `validation`: the pair's side where the segments' ids do not say it, as with replies, whose contexts have sides. Raises ValueError for a pair
        across the sides.
        """
        return self.add_queries([NewQuery(first, second, id, task, priority, reward_version, about or {}, validation)])[0]

    def add_queries(self, queries: Iterable[NewQuery]) -> list[str]:
        """`add_query` of each, in one transaction: all or none; their ids."""
        now = self._clock()
        rows = [self._query_row(query) | {"created": now} for query in queries]
        with self._writing() as connection:
            _insert_queries(connection, rows)
        return [row["id"] for row in rows]

    def _query_row(self, query: NewQuery) -> dict[str, Any]:
        validation = query.validation
        if validation is None:
            validation = self.is_validation(query.first)
            if validation != self.is_validation(query.second):
                raise ValueError(
                    f"expected two segments of one side, got one for training and one for validation: {query.first}, {query.second}; "
                    "choose pairs with queries.py, or say `validation`"
                )
        row = asdict(query) | {"id": query.id or pair_id(query.first, query.second), "validation": validation}
        wanted = 2 if _share("overlap", row["id"]) < self._overlap else 1
        return row | {"wanted": wanted, "missing": wanted}

    def pairs(self) -> set[tuple[str, str]]:
        """All pairs that were ever offered, each with the smaller id first."""
        with self._engine.begin() as connection:
            return {(min(pair), max(pair)) for pair in connection.execute(select(QUERIES.c.first, QUERIES.c.second))}

    def expire(self, seconds: float) -> int:
        """Open queries older than that, which nobody holds, are offered no more; how many. An answer that comes nevertheless counts."""
        now = self._clock()
        held = exists().where(LEASES.c.query == QUERIES.c.number, LEASES.c.until > now)
        with self._writing() as connection:
            return connection.execute(update(QUERIES).where(OPEN, QUERIES.c.created < now - seconds, ~held).values(expired=now)).rowcount

    # Leases

    def lease(self, labeller: str, seconds: float = LEASE) -> Query | None:
        """The open query of highest priority, of those the oldest, that nobody holds and the labeller has not answered; None: there is none now."""
        return next(iter(self.lease_many(labeller, 1, seconds)), None)

    def lease_many(self, labeller: str, number: int, seconds: float = LEASE) -> list[Query]:
        """Up to `number` of them in one transaction."""
        name_of(labeller, "name of a labeller")
        now = self._clock()
        holders = select(func.count()).where(LEASES.c.query == QUERIES.c.number, LEASES.c.until > now).scalar_subquery()
        holds = exists().where(LEASES.c.query == QUERIES.c.number, LEASES.c.until > now, LEASES.c.labeller == labeller)
        has_answered = exists().where(ANSWERS.c.query == QUERIES.c.number, ANSWERS.c.labeller == labeller, STANDS)
        free = select(QUERIES).where(OPEN, holders < QUERIES.c.missing, ~holds, ~has_answered)
        with self._writing() as connection:
            _check_labeller(connection, labeller)
            found = connection.execute(free.order_by(QUERIES.c.priority.desc(), QUERIES.c.number).limit(number)).all()
            return _hold(connection, found, labeller, now, now + seconds)

    def renew(self, query_id: str, labeller: str, seconds: float = LEASE) -> bool:
        """Prolongs a lease, also one that has run out while nobody else took the query. False: it is answered, or another labeller holds it."""
        now = self._clock()
        others = select(func.count()).where(LEASES.c.query == QUERIES.c.number, LEASES.c.until > now, LEASES.c.labeller != labeller)
        free = select(QUERIES.c.number).where(QUERIES.c.id == query_id, others.scalar_subquery() < QUERIES.c.missing)
        mine = update(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.query.in_(free))
        with self._writing() as connection:
            _check_labeller(connection, labeller)
            return connection.execute(mine.values(until=now + seconds)).rowcount > 0

    # Answers

    def answer(self, query_id: str, labeller: str, choice: Choice) -> Label:
        """Records what a labeller chose of what was shown, and what that means for (first, second). Committed when it returns.

        The same query and labeller again: the same Label, whatever the choice. An answer after the lease has run out is recorded as well; if others
        have given all that the query wanted meanwhile, it is late, and not among `labels()`. Raises ValueError for a query never shown to them.
        """
        return self.answer_many([(query_id, choice)], labeller)[0]

    def answer_many(self, answers: Sequence[tuple[str | Query, Choice]], labeller: str) -> list[Label]:
        """Several answers in one transaction: all or none. Queries or their ids."""
        chosen = [(query.id if isinstance(query, Query) else query, choice) for query, choice in answers]
        for _, choice in chosen:
            if choice not in PREFERENCES:
                raise ValueError(f"expected one of {', '.join(PREFERENCES)} as the choice, got {choice!r}")
        now = self._clock()
        with self._writing() as connection:
            _check_labeller(connection, labeller)
            shown = _shown(connection, [query for query, _ in chosen], labeller)
            number = _last_number(connection)
            new: dict[str, dict[str, Any]] = {}
            for query, choice in chosen:
                if query not in shown:
                    raise KeyError(f"expected the id of a query, got {query!r}")
                if shown[query].answer is not None or query in new:
                    continue
                if shown[query].shown is None:
                    raise ValueError(f"expected an answer to a query that was shown to {labeller!r}, got one to {query!r}: lease it first")
                new[query] = _answer_row(shown[query], number + len(new) + 1, labeller, choice, now)
            _insert_answers(connection, list(new.values()))
            labels = {label.query: label for label in _labels(connection, ANSWERS.c.labeller == labeller, [query for query, _ in chosen])}
        return [labels[query] for query, _ in chosen]

    def undo(self, labeller: str, seconds: float = LEASE) -> Query | None:
        """Revokes the labeller's last answer that stands (its record stays) and leases the query to them again, shown as before. None: no answer."""
        now = self._clock()
        last = select(ANSWERS.c.number, ANSWERS.c.query).where(ANSWERS.c.labeller == labeller, STANDS).order_by(ANSWERS.c.number.desc()).limit(1)
        with self._writing() as connection:
            _check_labeller(connection, labeller)
            answer = connection.execute(last).first()
            if answer is None:
                return None
            connection.execute(update(ANSWERS).where(ANSWERS.c.number == answer.number).values(revoked=now, reason="undo"))
            _count_missing(connection, QUERIES.c.number == answer.query)
            query = connection.execute(select(QUERIES).where(QUERIES.c.number == answer.query)).one()
            return _hold(connection, [query], labeller, now, now + seconds)[0]

    def labels(self) -> list[Label]:
        """The labels, one per query, in the order of the answers: standing answers that prefer something, the earliest of each query."""
        with self._engine.begin() as connection:
            return _labels(connection, ANSWERS.c.number.in_(FIRST))

    def state(self) -> tuple[int, int]:
        """(answers, revocations) so far: changes whenever `labels()` would."""
        revocations = select(func.count()).where(~STANDS).scalar_subquery()
        with self._engine.begin() as connection:
            return tuple(connection.execute(select(func.coalesce(func.max(ANSWERS.c.number), 0), revocations)).one())

    def counts(self) -> dict[str, int]:
        """How many

        - `waiting`, `leased`: open queries without any answer, which nobody holds, or somebody does; `second_opinions`: open ones with an answer
        - `expired`: queries that were too old and have no answer
        - `labels`: `labels()`, with the `ties` among them; `skipped`: standing answers "incomparable"; `late`: standing answers that came after their
          query had all it wanted; `revoked`: answers
        """
        now = self._clock()
        fresh = and_(OPEN, QUERIES.c.missing == QUERIES.c.wanted)
        held = exists().where(LEASES.c.query == QUERIES.c.number, LEASES.c.until > now)
        first = ANSWERS.c.number.in_(FIRST)
        counted = {
            "waiting": (QUERIES, and_(fresh, ~held)),
            "leased": (QUERIES, and_(fresh, held)),
            "second_opinions": (QUERIES, and_(OPEN, QUERIES.c.missing < QUERIES.c.wanted)),
            "expired": (QUERIES, and_(QUERIES.c.expired.is_not(None), QUERIES.c.missing == QUERIES.c.wanted)),
            "labels": (ANSWERS, first),
            "ties": (ANSWERS, and_(first, ANSWERS.c.preference == 0.5)),
            "skipped": (ANSWERS, and_(STANDS, ANSWERS.c.preference.is_(None))),
            "late": (ANSWERS, and_(STANDS, ANSWERS.c.late)),
            "revoked": (ANSWERS, ~STANDS),
        }
        columns = [select(func.count()).select_from(table).where(which).scalar_subquery().label(name) for name, (table, which) in counted.items()]
        with self._engine.begin() as connection:
            return connection.execute(select(*columns)).one()._asdict()

    # Labellers

    def add_labeller(self, name: str) -> str:
        """An access token for a labeller, shown here and never again. Who was revoked may come back: their earlier answers stay revoked.

        Raises ValueError for a name that has a token.
        """
        name_of(name, "name of a labeller")
        token = "rl-" + secrets.token_urlsafe(24)
        with self._writing() as connection:
            known = connection.execute(select(LABELLERS).where(LABELLERS.c.name == name)).first()
            if known and known.hash and known.revoked is None:
                raise ValueError(f"expected the name of somebody without a token, got {name!r}: revoke that token first, or choose another name")
            if known is None:
                connection.execute(insert(LABELLERS).values(name=name, created=self._clock()))
            connection.execute(update(LABELLERS).where(LABELLERS.c.name == name).values(hash=_token_hash(token), revoked=None))
        return token

    def revoke_token(self, name: str) -> None:
        """From now on the labeller's token is nobody's; the labels stay."""
        with self._writing() as connection:
            if not connection.execute(update(LABELLERS).where(LABELLERS.c.name == name, LABELLERS.c.hash.is_not(None)).values(hash=None)).rowcount:
                raise KeyError(f"expected the name of somebody with a token, got {name!r}")

    def labeller_of(self, token: str) -> str | None:
        """Whose token it is; None: nobody's, or a revoked labeller's."""
        with self._engine.begin() as connection:
            return connection.scalar(select(LABELLERS.c.name).where(LABELLERS.c.hash == _token_hash(token), LABELLERS.c.revoked.is_(None)))

    def labellers(self) -> dict[str, dict[str, Any]]:
        """What each labeller did and how well: see labeller_statistics.py."""
        with self._engine.begin() as connection:
            return labeller_statistics(connection)

    def revoke_labeller(self, name: str, reason: str = "labeller revoked") -> int:
        """Revokes all answers of a labeller (their records stay) and lets them answer no more; how many. Their queries are open again."""
        now = self._clock()
        name_of(name, "name of a labeller")
        name_of(reason, "reason")
        answered = select(ANSWERS.c.query).where(ANSWERS.c.labeller == name)
        with self._writing() as connection:
            known = connection.scalar(select(LABELLERS.c.name).where(LABELLERS.c.name == name))
            if known is None:
                if connection.execute(answered.limit(1)).first() is None:
                    raise KeyError(f"expected the name of a labeller, got {name!r}")
                connection.execute(insert(LABELLERS).values(name=name, created=now))
            connection.execute(update(LABELLERS).where(LABELLERS.c.name == name).values(revoked=now))
            revoked = connection.execute(update(ANSWERS).where(ANSWERS.c.labeller == name, STANDS).values(revoked=now, reason=reason)).rowcount
            connection.execute(delete(LEASES).where(LEASES.c.labeller == name))
            _count_missing(connection, QUERIES.c.number.in_(answered))
        return revoked


# The answers that are labels.
FIRST = select(func.min(ANSWERS.c.number)).where(STANDS, ANSWERS.c.preference.is_not(None)).group_by(ANSWERS.c.query)


def pair_id(first: str, second: str) -> str:
    """The id of the query about a pair, in either order."""
    return hashlib.sha256("\n".join(sorted((first, second))).encode()).hexdigest()[:32]


def _share(purpose: str, key: str) -> float:
    """A hash, uniform in [0, 1): what is drawn with it is the same in every process and after every restart."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\n{key}".encode()).digest()[:8], "big") / 2**64


def _insert_queries(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Those that are new. Raises ValueError for the id of another pair, and for a segment that is on the other side already."""
    named = {row["id"] for row in rows} | {row[place] for row in rows for place in ("first", "second")}
    known: dict[str, set[str]] = {}
    sides: dict[str, bool] = {}
    columns = (QUERIES.c.id, QUERIES.c.first, QUERIES.c.second, QUERIES.c.validation)
    for part in _parts(named):
        found = or_(QUERIES.c.id.in_(part), QUERIES.c.first.in_(part), QUERIES.c.second.in_(part))
        for id, first, second, validation in connection.execute(select(*columns).where(found)):
            known[id] = {first, second}
            sides |= {first: validation, second: validation}
    new = []
    for row in rows:
        pair = {row["first"], row["second"]}
        if known.get(row["id"], pair) != pair:
            raise ValueError(f"expected a new id for a new pair, got {row['id']!r}, the query about {' and '.join(sorted(known[row['id']]))}")
        if row["id"] in known:
            continue
        for segment in pair:
            if sides.setdefault(segment, row["validation"]) != row["validation"]:
                before, now = ("validation", "training") if sides[segment] else ("training", "validation")
                raise ValueError(f"expected the segment {segment} in queries for {before} only, as before, got one for {now}: {sorted(pair)}")
        known[row["id"]] = pair
        new.append(row)
    if new:
        number = connection.scalar(select(func.coalesce(func.max(QUERIES.c.number), 0)))
        connection.execute(insert(QUERIES), [row | {"number": number + i} for i, row in enumerate(new, 1)])


def _hold(connection: Connection, queries: Sequence[Row], labeller: str, now: float, until: float) -> list[Query]:
    """The sides are a hash of query and labeller: half of the showings are swapped, and a page that was left open shows what a newer one does."""
    if not queries:
        return []
    rows = [
        {"query": q.number, "labeller": labeller, "swapped": _share("swapped", f"{q.id}\n{labeller}") < 0.5, "shown": now, "until": until}
        for q in queries
    ]
    connection.execute(delete(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.query.in_([q.number for q in queries])))
    connection.execute(insert(LEASES), rows)
    return [
        Query(q.id, q.first, q.second, row["swapped"], q.task, q.priority, q.reward_version, q.about, q.validation, now, until)
        for q, row in zip(queries, rows, strict=True)
    ]


def _check_labeller(connection: Connection, name: str) -> None:
    if connection.execute(select(LABELLERS.c.name).where(LABELLERS.c.name == name, LABELLERS.c.revoked.is_not(None))).first():
        raise PermissionError(f"the labeller {name!r} was revoked")


def _shown(connection: Connection, ids: Sequence[str], labeller: str) -> dict[str, Row]:
    """Each query with its lease to the labeller and their answer, where there are."""
    lease = and_(LEASES.c.query == QUERIES.c.number, LEASES.c.labeller == labeller)
    answer = and_(ANSWERS.c.query == QUERIES.c.number, ANSWERS.c.labeller == labeller, STANDS)
    columns = (QUERIES.c.id, QUERIES.c.number, QUERIES.c.missing, LEASES.c.swapped, LEASES.c.shown, ANSWERS.c.number.label("answer"))
    query = select(*columns).select_from(QUERIES.outerjoin(LEASES, lease).outerjoin(ANSWERS, answer))
    return {row.id: row for part in _parts(ids) for row in connection.execute(query.where(QUERIES.c.id.in_(part)))}


def _answer_row(shown: Row, number: int, labeller: str, choice: Choice, now: float) -> dict[str, Any]:
    preference = PREFERENCES[choice]
    if preference is not None and shown.swapped:
        preference = 1 - preference
    row = {"number": number, "query": shown.number, "labeller": labeller, "choice": choice, "swapped": shown.swapped, "preference": preference}
    return row | {"late": shown.missing == 0, "shown": shown.shown, "answered": now}


def _insert_answers(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    connection.execute(insert(ANSWERS), rows)
    labeller = rows[0]["labeller"]
    for part in _parts([row["query"] for row in rows]):
        connection.execute(delete(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.query.in_(part)))
        _count_missing(connection, QUERIES.c.number.in_(part))


def _count_missing(connection: Connection, which: Any) -> None:
    left = QUERIES.c.wanted - select(func.count()).where(ANSWERS.c.query == QUERIES.c.number, STANDS).scalar_subquery()
    connection.execute(update(QUERIES).where(which).values(missing=case((left > 0, left), else_=0)))


def _last_number(connection: Connection) -> int:
    return connection.scalar(select(func.coalesce(func.max(ANSWERS.c.number), 0)))


def _labels(connection: Connection, which: Any, queries: Sequence[str] | None = None) -> list[Label]:
    """Standing answers, of these queries or all, as Labels."""
    answer = (ANSWERS.c.preference, ANSWERS.c.labeller, ANSWERS.c.shown, ANSWERS.c.answered)
    columns = (ANSWERS.c.number, QUERIES.c.id, QUERIES.c.first, QUERIES.c.second, *answer, QUERIES.c.reward_version, QUERIES.c.validation)
    found = select(*columns).select_from(ANSWERS.join(QUERIES)).where(STANDS, which)
    if queries is None:
        return [Label(*row) for row in connection.execute(found.order_by(ANSWERS.c.number))]
    return [Label(*row) for part in _parts(queries) for row in connection.execute(found.where(QUERIES.c.id.in_(part)))]


def _parts(values: Iterable[Any], size: int = 1000) -> Iterator[list[Any]]:
    """A statement takes some tens of thousands of values, and is slow long before."""
    values = list(values)
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _token_hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
