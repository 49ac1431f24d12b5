"""The label log: which pairs of segments were offered, who holds them, and every answer that was ever given.
An SQL database.

    log = LabelLog("sqlite:///labels.db")                        # or postgresql://user:password@host/database
    log.add_query(one, other, task="Which one moves to the middle?")
    query = log.lease("ann")                                     # hers for a minute; `renew` keeps it
    log.answer(query.id, "ann", "left")                          # committed when it returns
    for label in log.labels(): ...

A function that changes something has committed when it returns: what it acknowledged is there after a kill or
a power cut. Threads and processes may use one log at once, each process with a LabelLog of its own. There is
one writer at a time, on PostgreSQL as on SQLite: answers are numbered without gaps, in the order in which
they become visible.

A query is open until as many labellers as the plan's `overlap` says have answered, each of them once. It has
one label, the earliest standing answer that prefers something; `answers()` has all, and reliability.py makes
of them what is most probably right. A gold pair has a known answer: it is shown now and then, is no label,
and measures who answers.

plan.py has what the plan says, labels.py queries and labels, label_tables.py the columns, label_statements.py
the statements. queries.py chooses the pairs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, delete, func, insert, inspect, select, text, update
from sqlalchemy.engine import URL

from rl_dialog.data.database import WAIT, database_url, open_database, shown_url
from rl_dialog.data.keys import REQUESTS_PER_MINUTE, Keys
from rl_dialog.data.storable import name_of
from rl_dialog.errors import UserError
from rl_dialog.preferences import label_statements as sql
from rl_dialog.preferences.label_tables import (
    ANSWERS,
    FIRST,
    GOLD,
    LABELLERS,
    LEASES,
    METADATA,
    OPEN,
    PLAN,
    QUERIES,
    STANDS,
)
from rl_dialog.preferences.labeller_statistics import labeller_statistics, own_counts
from rl_dialog.preferences.labels import (
    CHOICES,
    NO_REMARKS,
    PREFERENCES,
    Answer,
    Choice,
    Label,
    NewQuery,
    Query,
    Remarks,
    pair_id,
)
from rl_dialog.preferences.plan import Plan

LEASE = 60.0  # seconds
VALIDATION = 0.2  # share of the segments whose labels are for validation
PAGE_SCOPES = ("labeller", "operator", "metrics")  # of keys for the page of a run
LOCK = 0x726C_6C61_6265_6C  # of PostgreSQL, held by the one who writes


_TAKE_TURN = text(
    "SELECT set_config('lock_timeout', :wait, true), pg_advisory_xact_lock(:lock)"
)  # as long as SQLite waits, and no longer


_TAKE_OVER = text(
    "INSERT INTO keys (name, hash, scopes, requests_per_minute, created, revoked) SELECT name, hash, "
    "'labeller', :rate, created, revoked FROM labellers WHERE hash IS NOT NULL AND name NOT IN (SELECT name "
    "FROM keys)"
)


class LabelLog:
    """The labels in one database. Its tables are made where they are missing; without `create` (to read)
    nothing is.

    Args:
        validation: share of the segments whose labels are for validation. A segment's side is a hash of its
            id: the same after every restart.
        clock: seconds since 1970. Processes on several machines need clocks that agree to a fraction of a
            lease.

    Raises UserError for a database that cannot be used or a value that cannot be stored, KeyError for a query
    or a labeller that there is not, PermissionError for a labeller who was revoked.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        create: bool = True,
        validation: float = VALIDATION,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 <= validation <= 1:
            raise UserError(f"expected a share from 0 to 1 as validation, got {validation}")
        url = database_url(url)
        self.name = shown_url(url)  # without passwords
        self._engine = open_database(url, METADATA, create=create, what="log of labels")
        self._url = url
        self._sqlite = url.drivername == "sqlite"
        # A transaction must see what was committed while it waited for its turn.
        self._writer = self._engine.execution_options(
            **({"writes": True} if self._sqlite else {"isolation_level": "READ COMMITTED"})
        )
        self._turn = (
            threading.Lock() if self._sqlite else nullcontext()
        )  # threads that wait for SQLite's own lock sleep in ever longer steps
        self.validation, self._clock = validation, clock

    def close(self) -> None:
        self._engine.dispose()
        if "keys" in vars(self):
            self.keys.close()

    @cached_property
    def keys(self) -> Keys:
        """The keys of the labellers, and of those who look after the run."""
        keys = Keys(self._url)
        if "hash" in {column["name"] for column in inspect(self._engine).get_columns("labellers")}:
            with self._writing() as (connection, _):  # an earlier version's tokens
                connection.execute(_TAKE_OVER, {"rate": REQUESTS_PER_MINUTE})
        return keys

    @contextmanager
    def _writing(self) -> Iterator[tuple[Connection, float]]:
        """A transaction that changes something, and the time at which it began; no other one runs."""
        with self._turn, self._writer.begin() as connection:
            if not self._sqlite:
                connection.execute(_TAKE_TURN, {"wait": f"{WAIT}s", "lock": LOCK})
            yield connection, self._clock()

    # The plan

    @property
    def plan(self) -> Plan:
        """How the run is labelled, as it stands now."""
        with self._engine.begin() as connection:
            return sql.read_plan(connection)

    def set_plan(self, **changed: Any) -> Plan:
        """Changes what is not None of the plan, for pairs that are there and for those to come; the plan.
        Raises UserError for what cannot be."""
        with self._writing() as (connection, _):
            before = sql.read_plan(connection)
            plan = before.changed(**changed)
            connection.execute(delete(PLAN))
            connection.execute(insert(PLAN), plan.rows())
            if plan.overlap != before.overlap:
                sql.set_overlap(connection, plan.overlap)
        return plan

    def add_gold(self, pairs: Iterable[NewQuery]) -> int:
        """Pairs whose preference is known (`gold`); how many gold pairs there are now. A pair that was asked
        before is gold from now on, and what was answered about it no label any more.

        Raises UserError for a pair without a known preference, and for one that stands twice.
        """
        rows = [self._query_row(pair) for pair in pairs]
        if len({row["id"] for row in rows}) < len(rows):
            raise UserError("expected every gold pair once, got one twice")
        if any(row["gold"] is None for row in rows):
            raise UserError("expected gold pairs with their known preference, got one without")
        with self._writing() as (connection, now):
            sql.set_gold(connection, [row | {"created": now} for row in rows])
            return connection.scalar(select(sql.number_of(QUERIES, GOLD)))

    def gold(self) -> dict[str, float]:
        """Query -> P(first preferred), of the gold pairs."""
        with self._engine.begin() as connection:
            known = select(QUERIES.c.id, QUERIES.c.gold).where(GOLD).order_by(QUERIES.c.number)
            return {id: preference for id, preference in connection.execute(known)}

    def usual_task(self) -> str:
        """What labellers are told most often: a gold pair that asked something else would be known by it."""
        often = select(QUERIES.c.task).where(~GOLD).group_by(QUERIES.c.task)
        with self._engine.begin() as connection:
            return connection.scalar(often.order_by(func.count().desc(), QUERIES.c.task).limit(1)) or ""

    # Queries

    def is_validation(self, segment: str) -> bool:
        """The side of a segment. A pair is of two segments of one side, so that no segment is trained on and
        validated with."""
        return sql.share("validation", segment) < self.validation

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
        """Offers a pair of segments, whose files exist; the query's id. Without `id` it is a hash of the
        pair: the same pair is never asked twice. A query that is there already is left as it is.

        `validation`: the pair's side where the segments' ids do not say it, as with replies, whose contexts
        have sides. Raises UserError for a pair across the sides.
        """
        return self.add_queries(
            [NewQuery(first, second, id, task, priority, reward_version, about or {}, validation)]
        )[0]

    def add_queries(self, queries: Iterable[NewQuery]) -> list[str]:
        """`add_query` of each, in one transaction: all or none; their ids."""
        rows = [self._query_row(query) for query in queries]
        with self._writing() as (connection, now):
            self._insert_queries(connection, [row | {"created": now} for row in rows])
        return [row["id"] for row in rows]

    def _insert_queries(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        overlap = sql.read_plan(connection).overlap
        wanted = [sql.answers_wanted(row["id"], overlap) for row in rows]
        new = [row | {"wanted": n, "missing": n} for row, n in zip(rows, wanted, strict=True)]
        sql.insert_queries(connection, new)

    def _query_row(self, query: NewQuery) -> dict[str, Any]:
        validation = query.validation
        if validation is None and query.gold is not None:
            validation = False
        if validation is None:
            validation = self.is_validation(query.first)
            if validation != self.is_validation(query.second):
                raise UserError(
                    "expected two segments of one side, got one for training and one for validation: "
                    f"{query.first}, {query.second}; choose pairs with queries.py, or say `validation`"
                )
        id = query.id or pair_id(query.first, query.second)
        return asdict(query) | {"id": id, "validation": validation, "wanted": 0, "missing": 0}

    def pairs(self) -> set[tuple[str, str]]:
        """All pairs that were ever offered, each with the smaller id first."""
        with self._engine.begin() as connection:
            return {
                (min(pair), max(pair))
                for pair in connection.execute(select(QUERIES.c.first, QUERIES.c.second))
            }

    def sides(self) -> dict[str, bool]:
        """Segment -> whether its labels are for validation, of all that stand in a query; gold pairs do not
        say it."""
        told = select(QUERIES.c.first, QUERIES.c.second, QUERIES.c.validation).where(~GOLD)
        with self._engine.begin() as connection:
            rows = connection.execute(told).all()
        return {segment: validation for *pair, validation in rows for segment in pair}

    def expire(self, seconds: float) -> int:
        """Open queries older than that, which nobody holds or has answered, are offered no more; how many. An
        answer that comes nevertheless counts."""
        with self._writing() as (connection, now):
            fresh = (OPEN, QUERIES.c.missing == QUERIES.c.wanted)  # others wait for a second opinion
            old = update(QUERIES).where(*fresh, QUERIES.c.created < now - seconds, ~sql.held(now))
            return connection.execute(old.values(expired=now)).rowcount

    # Leases

    def lease(self, labeller: str, seconds: float = LEASE) -> Query | None:
        """The open query of highest priority, of those the oldest, that nobody holds and the labeller has not
        answered, or now and then a gold pair; None: there is none now."""
        return next(iter(self.lease_many(labeller, 1, seconds)), None)

    def lease_many(self, labeller: str, number: int, seconds: float = LEASE) -> list[Query]:
        """Up to `number` of them in one transaction."""
        with self._writing() as (connection, now):
            sql.check_labeller(connection, labeller)
            free = sql.find_free(connection, labeller, number, now)
            shown = sql.mix_gold(connection, labeller, free, sql.read_plan(connection).gold_share, now)
            return sql.hold(connection, shown, labeller, now, now + seconds)

    def renew(self, query_id: str, labeller: str, seconds: float = LEASE) -> bool:
        """Prolongs a lease, also one that has run out while nobody else took the query. False: it is
        answered, or another labeller holds it."""
        with self._writing() as (connection, now):
            sql.check_labeller(connection, labeller)
            return sql.renew(connection, query_id, labeller, now, now + seconds)

    def release(self, labeller: str) -> None:
        """Ends the labeller's leases, those of a process of this name that died, so that the queries are free
        now. An answer that still comes is taken as one after a lease has run out."""
        with self._writing() as (connection, now):
            held = update(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.until > now)
            connection.execute(held.values(until=now))

    # Answers

    def answer(self, query_id: str, labeller: str, choice: Choice, remarks: Remarks = NO_REMARKS) -> Label:
        """Records what a labeller chose of what was shown, and what that means for (first, second). Committed
        when it returns.

        The same query and labeller again: the same Label, whatever the choice. An answer after the lease has
        run out is recorded as well; if others have given all that the query wanted meanwhile, it is late, and
        not among `labels()`. Raises UserError for a query never shown to them.
        """
        return self.answer_many([(query_id, choice)], labeller, remarks)[0]

    def answer_many(
        self,
        answers: Sequence[tuple[str | Query, Choice]],
        labeller: str,
        remarks: Remarks = NO_REMARKS,
    ) -> list[Label]:
        """Several answers in one transaction, all or none, with the same remarks. Queries or their ids."""
        choices = [(query.id if isinstance(query, Query) else query, choice) for query, choice in answers]
        for _, choice in choices:
            if choice not in PREFERENCES:
                raise UserError(f"expected one of {', '.join(PREFERENCES)} as the choice, got {choice!r}")
            remarks.check(choice)
        with self._writing() as (connection, now):
            sql.check_labeller(connection, labeller)
            showings = sql.find_shown(connection, [query for query, _ in choices], labeller)
            number = connection.scalar(select(sql.LAST_NUMBER))
            new: dict[str, dict[str, Any]] = {}
            for query, choice in choices:
                if query not in showings:
                    raise KeyError(f"expected the id of a query, got {query!r}")
                if showings[query].answer is not None or query in new:
                    continue
                if showings[query].shown is None:
                    raise UserError(
                        f"expected an answer to a query that was shown to {labeller!r}, got one to {query!r}:"
                        " lease it first"
                    )
                place = number + len(new) + 1
                new[query] = sql.answer_row(showings[query], place, labeller, choice, remarks, now)
            sql.insert_answers(connection, list(new.values()))
            labels = {
                label.query: label
                for label in sql.find_labels(
                    connection, ANSWERS.c.labeller == labeller, [query for query, _ in choices]
                )
            }
        return [labels[query] for query, _ in choices]

    def undo(
        self, labeller: str, seconds: float = LEASE, *, query_id: str | None = None, request: str = ""
    ) -> Query | None:
        """Revokes the labeller's last answer that stands, or the one to this query (its record stays), and
        leases the query to them again, shown as before. None: no answer.

        `request`: what took an answer back under this id takes back no other one when it is sent again.
        """
        mine = select(ANSWERS.c.number, ANSWERS.c.query).where(ANSWERS.c.labeller == labeller)
        with self._writing() as (connection, now):
            sql.check_labeller(connection, labeller)
            again = mine.where(~STANDS, ANSWERS.c.undone_by == request)
            answer = connection.execute(again).first() if request else None
            if answer is None:
                this = mine.where(STANDS, *([] if query_id is None else [sql.is_about(query_id)]))
                answer = connection.execute(this.order_by(ANSWERS.c.number.desc()).limit(1)).first()
                if answer is None:
                    return None
                undone = {"revoked": now, "reason": "undo", "undone_by": request or None}
                connection.execute(update(ANSWERS).where(ANSWERS.c.number == answer.number).values(undone))
                sql.count_missing(connection, QUERIES.c.number == answer.query)
            query = connection.execute(select(QUERIES).where(QUERIES.c.number == answer.query)).one()
            return sql.hold(connection, [query], labeller, now, now + seconds)[0]

    def answer_of(self, query_id: str, labeller: str) -> Answer | None:
        """What stands of the labeller's about this query."""
        mine = (ANSWERS.c.labeller == labeller, STANDS, sql.is_about(query_id))
        with self._engine.begin() as connection:
            return next(iter(sql.find_answers(connection, *mine)), None)

    def stands_instead(
        self, query_id: str, labeller: str, choice: Choice, remarks: Remarks = NO_REMARKS
    ) -> Answer | None:
        """What the labeller had answered before, in another window, where it is not this: then this is not
        kept."""
        stands = self.answer_of(query_id, labeller)
        if stands is None or (stands.choice, stands.remarks) == (choice, remarks):
            return None
        return stands

    def labels(self) -> list[Label]:
        """The labels, one per query, in the order of the answers: standing answers that prefer something, the
        earliest of each query."""
        with self._engine.begin() as connection:
            return sql.find_labels(connection, ANSWERS.c.number.in_(FIRST))

    def answers(self) -> list[Answer]:
        """Every answer ever given, in order: also those that are incomparable, late or revoked, or about a
        gold pair."""
        with self._engine.begin() as connection:
            return sql.find_answers(connection)

    def add_labels(self, labels: Iterable[Label]) -> int:
        """Labels from elsewhere, in one transaction: their queries where those are new, and the answers as
        they are, but numbered anew; how many. An Answer's remarks come with it.

        What came in before is left out, also if it was revoked since. Raises UserError for a preference other
        than 1, 0, 0.5 and None.
        """
        labels = list(labels)
        for label in labels:
            if label.preference not in CHOICES:
                raise UserError(
                    f"expected a preference of 1, 0, 0.5 or None, got {label.preference!r} for the query "
                    f"{label.query!r}"
                )
            name_of(label.labeller, "name of a labeller")
        queries = [
            NewQuery(
                label.first,
                label.second,
                label.query,
                reward_version=label.reward_version,
                validation=label.validation,
            )
            for label in labels
        ]
        rows = [
            self._query_row(query) | {"created": label.shown}
            for query, label in zip(queries, labels, strict=True)
        ]
        with self._writing() as (connection, _):
            self._insert_queries(connection, rows)
            return sql.insert_labels(connection, labels)

    def state(self) -> tuple[int, int, int]:
        """(answers, revocations, gold pairs) so far: changes whenever `labels()` would."""
        figures = (sql.LAST_NUMBER, sql.number_of(ANSWERS, ~STANDS), sql.number_of(QUERIES, GOLD))
        with self._engine.begin() as connection:
            return tuple(connection.execute(select(*figures)).one())

    def counts(self) -> dict[str, int]:
        """How many

        - `waiting`, `leased`: open queries without any answer, which nobody holds, or somebody does;
          `second_opinions`: open ones with an answer
        - `expired`: queries that were too old and have no answer
        - `labels`: `labels()`, with the `ties` among them; `skipped`: standing answers "incomparable";
          `late`: standing answers that came after their query had all it wanted; `revoked`: answers
        """
        held = sql.held(self._clock())
        fresh = QUERIES.c.missing == QUERIES.c.wanted
        is_first = ANSWERS.c.number.in_(FIRST)
        columns = {
            "waiting": sql.number_of(QUERIES, OPEN, fresh, ~held),
            "leased": sql.number_of(QUERIES, OPEN, fresh, held),
            "second_opinions": sql.number_of(QUERIES, OPEN, ~fresh),
            "expired": sql.number_of(QUERIES, QUERIES.c.expired.is_not(None), fresh),
            "labels": sql.number_of(ANSWERS, is_first),
            "ties": sql.number_of(ANSWERS, is_first, ANSWERS.c.preference == 0.5),
            "skipped": sql.number_of(ANSWERS, STANDS, ANSWERS.c.preference.is_(None)),
            "late": sql.number_of(ANSWERS, STANDS, ANSWERS.c.late),
            "revoked": sql.number_of(ANSWERS, ~STANDS),
        }
        with self._engine.begin() as connection:
            return (
                connection.execute(select(*(column.label(name) for name, column in columns.items())))
                .one()
                ._asdict()
            )

    # Labellers

    def add_labeller(self, name: str, *, scopes: Iterable[str] = ("labeller",)) -> str:
        """A key for a labeller, shown here and never again. Who was revoked may come back: their earlier
        answers stay revoked.

        Raises UserError for a name that has a key.
        """
        key = self.keys.add(name, scopes=scopes)
        with self._writing() as (connection, now):
            labeller = connection.scalar(select(LABELLERS.c.name).where(LABELLERS.c.name == name))
            if labeller is None:
                connection.execute(insert(LABELLERS).values(name=name, created=now))
            connection.execute(update(LABELLERS).where(LABELLERS.c.name == name).values(revoked=None))
        return key

    def labeller_of(self, key: str) -> str | None:
        """Whose key it is; None: no labeller's, or a revoked one's."""
        owner = self.keys.find(key)
        return owner.name if owner and owner.may("labeller") else None

    def labellers(self) -> dict[str, dict[str, Any]]:
        """What each labeller did and how well: see labeller_statistics.py."""
        with self._engine.begin() as connection:
            return labeller_statistics(connection)

    def own_counts(self, labeller: str) -> dict[str, int]:
        """How many answers somebody gave: see labeller_statistics.py."""
        with self._engine.begin() as connection:
            return own_counts(connection, labeller)

    def revoke_labeller(self, name: str, reason: str = "labeller revoked") -> int:
        """Revokes all answers of a labeller (their records stay) and lets them answer no more; how many.
        Their queries are open again. A key of that name for the run's page goes too, also an operator's who
        has no answers; one for chats alone stays."""
        name_of(name, "name of a labeller")
        name_of(reason, "reason")
        keys = [key for key in self.keys.all() if key.name == name and key.may(*PAGE_SCOPES)]
        if keys:
            self.keys.revoke(name)
        answered_queries = select(ANSWERS.c.query).where(ANSWERS.c.labeller == name)
        with self._writing() as (connection, now):
            labeller = connection.scalar(select(LABELLERS.c.name).where(LABELLERS.c.name == name))
            if labeller is None:
                if connection.execute(answered_queries.limit(1)).first() is None:
                    if keys:
                        return 0
                    raise KeyError(f"expected the name of a labeller, got {name!r}")
                connection.execute(insert(LABELLERS).values(name=name, created=now))
            connection.execute(update(LABELLERS).where(LABELLERS.c.name == name).values(revoked=now))
            revoked = connection.execute(
                update(ANSWERS).where(ANSWERS.c.labeller == name, STANDS).values(revoked=now, reason=reason)
            ).rowcount
            connection.execute(delete(LEASES).where(LEASES.c.labeller == name))
            sql.count_missing(connection, QUERIES.c.number.in_(answered_queries))
        return revoked
