"""What labellers did, and how well they agree: the figures of `LabelLog.labellers()`."""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from statistics import median
from typing import Any

from sqlalchemy import Connection, and_, case, func, select

from rl_dialog.preferences.label_tables import ANSWERS, GOLD, LABELLERS, QUERIES, STANDS


def labeller_statistics(connection: Connection) -> dict[str, dict[str, Any]]:
    """Per labeller, by name, of the answers that stand:

    - `labels`: that prefer something, with the `ties` among them; `skips`: "incomparable"; `late`: after
      others had said all that was wanted
    - `revoked`: answers that do not stand; `active`: may answer
    - `seconds`: from showing to answer, the median; None without an answer. What was ready while another pair
      was looked at was shown when that one was answered
    - `left_share`: of the `sides` answers "left" or "right", as shown; 1/2 is expected, as sides are drawn;
      None without any
    - `gold`: answers that prefer something of a pair whose answer is known; `gold_right`: the right ones
    - `shared`: comparisons with another labeller's preference about the same query, gold pairs left out;
      `agreement`: the share in which both say the same, ties included
    - `flags`: pairs that they say something is wrong with
    - `noise`: the share of answers that are a coin's, see `coin_share`; None without a shared query that both
      decided
    """
    figures: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(COUNTED, 0)
        | {"active": revoked is None, "seconds": None, "left_share": None}
        | {"shared": 0, "agreement": None, "noise": None}
        for name, revoked in connection.execute(select(LABELLERS.c.name, LABELLERS.c.revoked))
    }
    for row in connection.execute(_COUNTED):
        entry = figures.setdefault(
            row.labeller, {"active": True, "shared": 0, "agreement": None, "noise": None, "seconds": None}
        )
        entry |= {name: getattr(row, name) for name in COUNTED}
        entry["left_share"] = row.left / row.sides if row.sides else None
    for labeller, seconds in _seconds(connection).items():
        figures[labeller]["seconds"] = median(seconds)
    for row in connection.execute(_SHARED):
        figures[row.labeller] |= {"shared": row.shared, "agreement": row.same / row.shared}
        if row.decided:
            figures[row.labeller]["noise"] = coin_share(row.same_decided / row.decided)
    return dict(sorted(figures.items()))


def own_counts(connection: Connection, labeller: str) -> dict[str, int]:
    """What somebody gave, gold pairs included, as the log's counts name it; `answers` are all that stand."""
    row = connection.execute(_COUNTED.where(ANSWERS.c.labeller == labeller)).first()
    figures = dict.fromkeys(COUNTED, 0) if row is None else row._asdict()
    counts = {name: figures[name] for name in ("labels", "ties", "revoked")} | {"skipped": figures["skips"]}
    return counts | {"answers": figures["labels"] + figures["skips"]}


def _seconds(connection: Connection) -> dict[str, list[float]]:
    """Of each labeller, from showing to answer. A page has the next pair ready before the one on its screen
    is answered: so long nobody looks at it."""
    seconds: dict[str, list[float]] = defaultdict(list)
    latest: dict[str, tuple[float, float]] = {}  # when each labeller answered last, and before that
    columns = (ANSWERS.c.labeller, ANSWERS.c.shown, ANSWERS.c.answered, ANSWERS.c.revoked)
    for labeller, shown, answered, revoked in connection.execute(
        select(*columns).order_by(ANSWERS.c.answered)
    ):
        last, before = latest.get(labeller, (shown, shown))
        if answered > last:  # several at once took as long as they took together
            last, before = latest[labeller] = answered, last
        if revoked is None:
            seconds[labeller].append(answered - max(shown, before))
    return seconds


def coin_share(agreement: float) -> float:
    """The noise e that explains how often two labellers agree where both decided, if each answers with
    probability e by a coin and otherwise as the truth demands: a = (1 - e/2)^2 + (e/2)^2, so e = 1 - sqrt(2 a
    - 1). The other labellers are taken to be as noisy; pairs that are hard for everybody count as noise."""
    return 1 - sqrt(max(0.0, 2 * agreement - 1))


def _count(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


COUNTED = ("labels", "ties", "skips", "late", "revoked", "sides", "flags", "gold", "gold_right")
_DECIDED = ANSWERS.c.preference.in_((0.0, 1.0))
_COUNTED = (
    select(
        ANSWERS.c.labeller,
        _count(and_(STANDS, ANSWERS.c.preference.is_not(None))).label("labels"),
        _count(and_(STANDS, ANSWERS.c.preference == 0.5)).label("ties"),
        _count(and_(STANDS, ANSWERS.c.preference.is_(None))).label("skips"),
        _count(and_(STANDS, ANSWERS.c.late)).label("late"),
        _count(~STANDS).label("revoked"),
        _count(and_(STANDS, ANSWERS.c.choice == "left")).label("left"),
        _count(and_(STANDS, ANSWERS.c.choice.in_(("left", "right")))).label("sides"),
        _count(and_(STANDS, ANSWERS.c.flag.is_not(None))).label("flags"),
        _count(and_(STANDS, GOLD, ANSWERS.c.preference.is_not(None))).label("gold"),
        _count(and_(STANDS, ANSWERS.c.preference == QUERIES.c.gold)).label("gold_right"),
    )
    .join_from(ANSWERS, QUERIES)
    .group_by(ANSWERS.c.labeller)
)
_OTHER = ANSWERS.alias("other")
_BOTH_DECIDED = and_(_DECIDED, _OTHER.c.preference.in_((0.0, 1.0)))
_SAME = ANSWERS.c.preference == _OTHER.c.preference
_SHARED = (
    select(
        ANSWERS.c.labeller,
        func.count().label("shared"),
        _count(_SAME).label("same"),
        _count(_BOTH_DECIDED).label("decided"),
        _count(and_(_BOTH_DECIDED, _SAME)).label("same_decided"),
    )
    .join_from(
        ANSWERS, _OTHER, and_(ANSWERS.c.query == _OTHER.c.query, ANSWERS.c.labeller != _OTHER.c.labeller)
    )
    .join(QUERIES, QUERIES.c.number == ANSWERS.c.query)
    .where(
        STANDS,
        ~GOLD,
        _OTHER.c.revoked.is_(None),
        ANSWERS.c.preference.is_not(None),
        _OTHER.c.preference.is_not(None),
    )
    .group_by(ANSWERS.c.labeller)
)
