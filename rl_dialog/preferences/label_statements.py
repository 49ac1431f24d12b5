"""The statements of the label log. Each function works within a transaction of `LabelLog`, which has the
story."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    Table,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    or_,
    select,
    update,
)

from rl_dialog.data.storable import is_storable, name_of
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_tables import ANSWERS, GOLD, LABELLERS, LEASES, OPEN, PLAN, QUERIES, STANDS
from rl_dialog.preferences.labels import CHOICES, PREFERENCES, Answer, Choice, Label, Query, Remarks
from rl_dialog.preferences.plan import Plan

PRIME = 2**31 - 1  # times a query's number it is no larger than what a database counts with
REVOKED = ANSWERS.c.reason != "undo"  # by somebody else than its labeller
SEEN = or_(STANDS, REVOKED)  # an answer after which its labeller gets the pair no more
LAST_NUMBER = select(func.coalesce(func.max(ANSWERS.c.number), 0)).scalar_subquery()
LABEL = (
    *(
        ANSWERS.c.number,
        QUERIES.c.id,
        QUERIES.c.first,
        QUERIES.c.second,
        ANSWERS.c.preference,
        ANSWERS.c.labeller,
        ANSWERS.c.shown,
    ),
    *(ANSWERS.c.answered, QUERIES.c.reward_version, QUERIES.c.validation),
)
RECORD = ("choice", "swapped", "late", "revoked", "reason", "strength", "reasons", "flag")  # of an Answer
ANSWERED = ANSWERS.join(QUERIES)


def share(purpose: str, key: str) -> float:
    """A hash, uniform in [0, 1): what is drawn with it is the same in every process and after every
    restart."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\n{key}".encode()).digest()[:8], "big") / 2**64


def insert_queries(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Those that are new. Raises UserError for the id of another pair, and for a segment that is on the other
    side already."""
    ids = {row["id"] for row in rows} | {row[place] for row in rows for place in ("first", "second")}
    pairs: dict[str, set[str]] = {}
    sides: dict[str, bool] = {}
    columns = (QUERIES.c.id, QUERIES.c.first, QUERIES.c.second, QUERIES.c.validation, QUERIES.c.gold)
    for part in parts(ids):
        condition = or_(QUERIES.c.id.in_(part), QUERIES.c.first.in_(part), QUERIES.c.second.in_(part))
        for id, first, second, validation, gold in connection.execute(select(*columns).where(condition)):
            pairs[id] = {first, second}
            sides |= {} if gold is not None else {first: validation, second: validation}
    new = []
    for row in rows:
        pair = {row["first"], row["second"]}
        if pairs.get(row["id"], pair) != pair:
            raise UserError(
                f"expected a new id for a new pair, got {row['id']!r}, the query about "
                f"{' and '.join(sorted(pairs[row['id']]))}"
            )
        if row["id"] in pairs:
            continue
        for segment in pair if row["gold"] is None else ():  # nothing is learned from a gold pair
            if sides.setdefault(segment, row["validation"]) != row["validation"]:
                old_side, new_side = (
                    ("validation", "training") if sides[segment] else ("training", "validation")
                )
                raise UserError(
                    f"expected the segment {segment} in queries for {old_side} only, as before, got one for "
                    f"{new_side}: {sorted(pair)}"
                )
        pairs[row["id"]] = pair
        new.append(row)
    if new:
        number = connection.scalar(select(func.coalesce(func.max(QUERIES.c.number), 0)))
        connection.execute(insert(QUERIES), [row | {"number": number + i} for i, row in enumerate(new, 1)])


def read_plan(connection: Connection) -> Plan:
    """As it stands; without one, the defaults."""
    return Plan.stored({row.name: row.value for row in connection.execute(select(PLAN))})


def held(now: float) -> Any:
    """Somebody holds the query."""
    return exists().where(LEASES.c.query == QUERIES.c.number, LEASES.c.until > now)


def find_free(connection: Connection, labeller: str, number: int, now: float) -> Sequence[Row]:
    """Open queries that the labeller can have: the best first.

    Counts, where EXISTS would do: PostgreSQL looks each of them up, instead of joining all queries with all
    answers. Answers that stand have an index for that; those of the labeller that somebody revoked, of which
    there are seldom any, are looked for once.
    """
    holds = number_of(
        LEASES, LEASES.c.query == QUERIES.c.number, LEASES.c.until > now, LEASES.c.labeller == labeller
    )
    answers = number_of(ANSWERS, ANSWERS.c.query == QUERIES.c.number, ANSWERS.c.labeller == labeller, STANDS)
    revoked = select(ANSWERS.c.query).where(ANSWERS.c.labeller == labeller, ~STANDS, REVOKED)
    holders = number_of(LEASES, LEASES.c.query == QUERIES.c.number, LEASES.c.until > now)
    free = select(QUERIES).where(OPEN, holders < QUERIES.c.missing, holds == 0, answers == 0)
    free = free.where(QUERIES.c.number.not_in(revoked))
    return connection.execute(free.order_by(QUERIES.c.priority.desc(), QUERIES.c.number).limit(number)).all()


def mix_gold(
    connection: Connection, labeller: str, free: Sequence[Row], share_of_gold: float, now: float
) -> list[Row]:
    """The free queries, a share of them put off for gold pairs that the labeller has not seen. Which showings
    are gold is a hash of the labeller and how many pairs they got before."""
    if not free or not share_of_gold:
        return list(free)
    mine = LEASES.c.labeller == labeller
    before = select(
        number_of(LEASES, mine, LEASES.c.until > now) + number_of(ANSWERS, ANSWERS.c.labeller == labeller)
    )
    first = connection.scalar(before)
    places = [i for i in range(len(free)) if share("gold", f"{labeller}\n{first + i}") < share_of_gold]
    gold = dict(zip(places, _unseen_gold(connection, labeller, len(places), now), strict=False))
    ordinary = iter(free)
    return [gold[i] if i in gold else next(ordinary) for i in range(len(free))]


def _unseen_gold(connection: Connection, labeller: str, number: int, now: float) -> Sequence[Row]:
    """Up to so many, in an order of the labeller's own, so that two of them do not meet the gold pairs side
    by side. The database puts them in it: of thousands only these few come out of it."""
    if not number:
        return []
    answered = select(ANSWERS.c.query).where(ANSWERS.c.labeller == labeller, SEEN)
    holding = select(LEASES.c.query).where(LEASES.c.labeller == labeller, LEASES.c.until > now)
    unseen = select(QUERIES).where(GOLD, QUERIES.c.number.not_in(answered), QUERIES.c.number.not_in(holding))
    step, begin = (int(share(f"gold {what}", labeller) * PRIME) for what in ("step", "begin"))
    order = (QUERIES.c.number * (step or 1) + begin) % PRIME
    return connection.execute(unseen.order_by(order).limit(number)).all()


def answers_wanted(id: str, overlap: float) -> int:
    """How many people see a pair: 1.2 is two for a fifth of the pairs and one for the others."""
    return int(overlap) + (share("overlap", id) < overlap % 1)


def set_overlap(connection: Connection, overlap: float) -> None:
    """For every query that there is; what has been answered often enough is closed, the others are open."""
    rows = [
        {"of": number, "to": answers_wanted(id, overlap)}
        for number, id in connection.execute(select(QUERIES.c.number, QUERIES.c.id).where(~GOLD))
    ]
    if rows:
        one = update(QUERIES).where(QUERIES.c.number == bindparam("of")).values(wanted=bindparam("to"))
        connection.execute(one, rows)
        count_missing(connection, ~GOLD)


def set_gold(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Pairs that are queries already become gold, and what was answered so far is no label any more; the
    others are added."""
    there: dict[str, str] = {}
    for part in parts([row["id"] for row in rows]):
        named = select(QUERIES.c.id, QUERIES.c.first).where(QUERIES.c.id.in_(part))
        there |= {id: first for id, first in connection.execute(named)}
    insert_queries(connection, rows)
    for row in rows:
        if row["id"] in there:
            known = row["gold"] if there[row["id"]] == row["first"] else 1 - row["gold"]
            this = update(QUERIES).where(QUERIES.c.id == row["id"])
            connection.execute(this.values(gold=known, wanted=0, missing=0))


def renew(connection: Connection, query: str, labeller: str, now: float, until: float) -> bool:
    """False where others hold the query, or it has all answers."""
    other_holders = number_of(
        LEASES, LEASES.c.query == QUERIES.c.number, LEASES.c.until > now, LEASES.c.labeller != labeller
    )
    free = select(QUERIES.c.number).where(QUERIES.c.id == query, or_(GOLD, other_holders < QUERIES.c.missing))
    mine = update(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.query.in_(free))
    return is_storable(query) and connection.execute(mine.values(until=until)).rowcount > 0


def hold(
    connection: Connection, queries: Sequence[Row], labeller: str, now: float, until: float
) -> list[Query]:
    """The sides are a hash of query and labeller: half of the showings are swapped, and a page that was left
    open shows what a newer one does."""
    if not queries:
        return []
    rows = [
        {
            "query": q.number,
            "labeller": labeller,
            "swapped": share("swapped", f"{q.id}\n{labeller}") < 0.5,
            "shown": now,
            "until": until,
        }
        for q in queries
    ]
    for part in parts([q.number for q in queries]):
        connection.execute(delete(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.query.in_(part)))
    connection.execute(insert(LEASES), rows)
    return [
        Query(
            q.id,
            q.first,
            q.second,
            row["swapped"],
            q.task,
            q.priority,
            q.reward_version,
            q.about,
            q.validation,
            now,
            until,
        )
        for q, row in zip(queries, rows, strict=True)
    ]


def check_labeller(connection: Connection, name: str) -> None:
    name_of(name, "name of a labeller")
    if connection.execute(
        select(LABELLERS.c.name).where(LABELLERS.c.name == name, LABELLERS.c.revoked.is_not(None))
    ).first():
        raise PermissionError(f"the labeller {name!r} was revoked")


def find_shown(connection: Connection, ids: Sequence[str], labeller: str) -> dict[str, Row]:
    """Each query with its lease to the labeller and their answer, where there are."""
    lease = and_(LEASES.c.query == QUERIES.c.number, LEASES.c.labeller == labeller)
    answer = and_(ANSWERS.c.query == QUERIES.c.number, ANSWERS.c.labeller == labeller, STANDS)
    columns = (
        QUERIES.c.id,
        QUERIES.c.number,
        QUERIES.c.missing,
        QUERIES.c.gold,
        LEASES.c.swapped,
        LEASES.c.shown,
        ANSWERS.c.number.label("answer"),
    )
    query = select(*columns).select_from(QUERIES.outerjoin(LEASES, lease).outerjoin(ANSWERS, answer))
    return {
        row.id: row
        for part in parts(filter(is_storable, ids))
        for row in connection.execute(query.where(QUERIES.c.id.in_(part)))
    }


def answer_row(
    showing: Row, number: int, labeller: str, choice: Choice, remarks: Remarks, now: float
) -> dict[str, Any]:
    preference = PREFERENCES[choice]
    if preference is not None and showing.swapped:
        preference = 1 - preference
    row = {
        "number": number,
        "query": showing.number,
        "labeller": labeller,
        "choice": choice,
        "swapped": showing.swapped,
        "preference": preference,
    }
    row |= {"strength": remarks.strength, "reasons": list(remarks.reasons) or None, "flag": remarks.flag}
    late = showing.missing == 0 and showing.gold is None
    return row | {"late": late, "shown": showing.shown, "answered": now}


def insert_answers(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Of one labeller, whose leases end with them."""
    if not rows:
        return
    connection.execute(insert(ANSWERS), rows)
    labeller = rows[0]["labeller"]
    for part in parts([row["query"] for row in rows]):
        connection.execute(delete(LEASES).where(LEASES.c.labeller == labeller, LEASES.c.query.in_(part)))
        count_missing(connection, QUERIES.c.number.in_(part))


def insert_labels(connection: Connection, labels: Sequence[Label]) -> int:
    """Those whose queries exist and whose labellers have no other answer to them."""
    queries, answers = _asked_and_answered(connection, {label.query for label in labels})
    number = connection.scalar(select(LAST_NUMBER))
    missing = {query.number: query.missing for query in queries.values()}
    rows = []
    for label in labels:
        query = queries[label.query]
        if answers & {(query.number, label.labeller, None), (query.number, label.labeller, label.answered)}:
            continue
        answers.add((query.number, label.labeller, None))
        preference = label.preference
        if preference is not None and label.first != query.first:  # the log has the pair the other way round
            preference = 1 - preference
        row = {"number": number + len(rows) + 1, "query": query.number, "labeller": label.labeller}
        row |= {"choice": CHOICES[preference], "swapped": False, "preference": preference}
        row |= {"late": missing[query.number] == 0, "shown": label.shown, "answered": label.answered}
        row |= {name: getattr(label, name, None) for name in ("strength", "reasons", "flag")}  # of an Answer
        rows.append(row)
        missing[query.number] = max(0, missing[query.number] - 1)
    if rows:
        connection.execute(insert(ANSWERS), rows)
        for part in parts({row["query"] for row in rows}):
            count_missing(connection, QUERIES.c.number.in_(part))
    return len(rows)


def _asked_and_answered(
    connection: Connection, ids: set[str]
) -> tuple[dict[str, Row], set[tuple[int, str, float | None]]]:
    """The queries of these ids, and their answers: query, labeller, and None where an answer stands or the
    time of a revoked one."""
    queries: dict[str, Row] = {}
    answers: set[tuple[int, str, float | None]] = set()
    asked = (QUERIES.c.id, QUERIES.c.number, QUERIES.c.first, QUERIES.c.missing)
    answered = (ANSWERS.c.query, ANSWERS.c.labeller, ANSWERS.c.answered, ANSWERS.c.revoked)
    for part in parts(ids):
        chosen = QUERIES.c.id.in_(part)
        queries |= {row.id: row for row in connection.execute(select(*asked).where(chosen))}
        select_answers = select(*answered).join_from(ANSWERS, QUERIES).where(chosen)
        answers |= {
            (row.query, row.labeller, None if row.revoked is None else row.answered)
            for row in connection.execute(select_answers)
        }
    return queries, answers


def count_missing(connection: Connection, condition: Any) -> None:
    """Whenever answers come or go."""
    missing = QUERIES.c.wanted - number_of(ANSWERS, ANSWERS.c.query == QUERIES.c.number, STANDS)
    connection.execute(update(QUERIES).where(condition).values(missing=case((missing > 0, missing), else_=0)))


def number_of(table: Table, *conditions: Any) -> Any:
    """How many rows, as a column."""
    return select(func.count()).select_from(table).where(*conditions).scalar_subquery()


def find_labels(connection: Connection, condition: Any, queries: Sequence[str] | None = None) -> list[Label]:
    """Standing answers, of these queries or all, as Labels."""
    statement = select(*LABEL).select_from(ANSWERED).where(STANDS, condition)
    if queries is None:
        return [Label(*row) for row in connection.execute(statement.order_by(ANSWERS.c.number))]
    return [
        Label(*row)
        for part in parts(queries)
        for row in connection.execute(statement.where(QUERIES.c.id.in_(part)))
    ]


def find_answers(connection: Connection, *conditions: Any) -> list[Answer]:
    """The records of all answers, or of those, in their order."""
    columns = (*LABEL, *(ANSWERS.c[name] for name in RECORD), QUERIES.c.gold)
    statement = select(*columns).select_from(ANSWERED).where(*conditions).order_by(ANSWERS.c.number)
    return [Answer(*row) for row in connection.execute(statement)]


def is_about(query: str) -> Any:
    """The answer is to the query with this id."""
    known = QUERIES.c.id == query if is_storable(query) else false()
    return ANSWERS.c.query.in_(select(QUERIES.c.number).where(known))


def parts(values: Iterable[Any], size: int = 1000) -> Iterator[list[Any]]:
    """A statement takes some tens of thousands of values, and is slow long before."""
    values = list(values)
    for start in range(0, len(values), size):
        yield values[start : start + size]
