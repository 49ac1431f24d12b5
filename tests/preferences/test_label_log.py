"""The label log, on SQLite and on PostgreSQL: what it offers, to whom, what it keeps, and what counts."""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy

from rl_dialog.data.store import Store
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labeller_statistics import coin_share
from rl_dialog.preferences.labels import NewQuery, Query


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_log(store_url, clock):
    """open_log(overlap=...): a LabelLog of the same database, as another process would have it."""
    opened = []

    def build(**given):
        overlap = given.pop("overlap", None)
        opened.append(LabelLog(store_url, **{"validation": 0.0, "clock": clock} | given))
        if overlap is not None:
            opened[-1].set_plan(overlap=overlap)
        return opened[-1]

    yield build
    for log in opened:
        log.close()


@pytest.fixture
def log(open_log):
    return open_log()


def ask(log, number, **given):
    """Queries about `number` pairs of segments; their ids."""
    return log.add_queries(NewQuery(f"a{i}", f"b{i}", **{"validation": False} | given) for i in range(number))


def answer(log, labeller, choice="left", *, prefer=None):
    """Leases a query and answers it, `prefer`: so that its "first" or "second" wins."""
    query = log.lease(labeller)
    if prefer:
        choice = "left" if (query.left == query.first) == (prefer == "first") else "right"
    return log.answer(query.id, labeller, choice)


# Queries


def test_the_same_pair_is_one_query(log):
    query = log.add_query("a", "b", task="which?", about={"env": "dot"})
    assert log.add_query("b", "a", task="another task") == query
    assert log.add_query("a", "b", id="again") == "again"  # on purpose
    assert log.pairs() == {("a", "b")} and log.counts()["waiting"] == 2
    leased = log.lease("ann")
    assert (leased.id, leased.task, leased.about, leased.first, leased.second) == (
        query,
        "which?",
        {"env": "dot"},
        "a",
        "b",
    )
    with pytest.raises(
        UserError, match="expected a new id for a new pair, got 'again', the query about a and b"
    ):
        log.add_query("a", "c", id="again")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("a", "a"), "expected two different segments, got a twice"),
        (("a", ""), "second segment"),
        (("a", "b\0"), "second segment"),
        (("a", "b", ""), "id of a query"),
        (("a", "b", None, "\ud800"), "task"),
        (("a", "b", None, "", float("nan")), "priority"),
        (("a", "b", None, "", 0.0, 0, {"x": float("inf")}), "about"),
    ],
)
def test_a_query_that_no_database_can_hold(log, given, told):
    with pytest.raises(UserError, match=told):
        log.add_query(*given)
    assert log.counts()["waiting"] == 0


def test_no_segment_is_on_both_sides(open_log):
    log = open_log(validation=0.2)
    ids = [f"clip {i}" for i in range(5000)]
    side = {id: log.is_validation(id) for id in ids}
    assert abs(sum(side.values()) / 5000 - 0.2) < 0.02
    again = open_log(validation=0.2)
    assert {id: again.is_validation(id) for id in ids} == side  # after a restart
    train, held_out = ([id for id in ids if side[id] == wanted] for wanted in (False, True))
    with pytest.raises(UserError, match="one for training and one for validation"):
        log.add_query(train[0], held_out[0])
    log.add_query(train[0], train[1])
    log.add_query(held_out[0], held_out[1])
    assert sorted(answer(log, "ann").validation for _ in range(2)) == [False, True]
    log.add_query("reply 1", "reply 2", validation=True)
    with pytest.raises(UserError, match="expected the segment reply 2 in queries for validation only"):
        log.add_query("reply 2", "reply 3", validation=False)
    with pytest.raises(
        UserError, match="in queries for training only"
    ):  # a restart with another share would move clips
        open_log(validation=1.0).add_query(train[0], held_out[5])


def test_the_most_important_query_comes_first_and_then_the_oldest(log):
    for number, priority in enumerate([0.0, 2.0, 2.0, 1.0]):
        log.add_query(f"a{number}", "b", priority=priority)
    assert [log.lease("ann").first for _ in range(4)] == ["a1", "a2", "a3", "a0"]


def test_old_queries_expire(log, clock):
    old = ask(log, 3)
    clock.now += 100
    log.add_query("new", "newer")
    held = log.lease("ann", 60)
    assert log.expire(50) == 2 and log.expire(50) == 0
    assert log.counts() | {"waiting": 1, "leased": 1, "expired": 2} == log.counts()
    assert log.lease("bob").first == "new" and log.lease("bob") is None
    clock.now += 61  # ann's lease has run out
    assert log.expire(50) == 2
    assert log.answer(held.id, "ann", "tie").query == held.id in old  # and yet she answers
    assert log.counts() | {"expired": 3, "labels": 1} == log.counts()


def test_a_query_that_waits_for_a_second_opinion_does_not_expire(open_log, clock):
    log = open_log(overlap=2)
    ask(log, 2)
    first = answer(log, "ann")
    clock.now += 100
    assert log.expire(50) == 1, "the one that nobody has answered"
    assert log.counts() | {"second_opinions": 1, "expired": 1} == log.counts()
    assert log.lease("bob").id == first.query and log.lease("bob") is None


# Leases


def test_a_query_is_answered_once_and_unswapped(log, clock):
    (query,) = ask(log, 1, reward_version=3)
    shown = log.lease("ann", 60)
    assert (
        {shown.left, shown.right} == {"a0", "b0"}
        and (shown.left == "b0") == shown.swapped
        and shown.until == 1060.0
    )
    assert log.lease("bob") is None and log.lease("ann") is None
    clock.now += 5
    label = log.answer(query, "ann", "left")
    assert (label.first if label.preference == 1 else label.second) == shown.left
    assert (label.number, label.query, label.labeller, label.shown, label.answered, label.reward_version) == (
        1,
        query,
        "ann",
        1000.0,
        1005.0,
        3,
    )
    assert log.answer(query, "ann", "right") == label  # a repeated request changes nothing
    assert log.labels() == [label] and log.state() == (1, 0, 0)
    assert log.lease("bob") is None


def test_a_lease_runs_out_and_a_late_answer_is_kept_but_counts_once(log, clock):
    one, other = ask(log, 2)
    log.lease("ann", 60)
    assert log.lease("bob", 60).id == other
    clock.now += 60
    assert log.lease("bob").id == one and log.renew(one, "ann") is False  # lost
    by_bob = log.answer(one, "bob", "tie")
    late = log.answer(one, "ann", "skip")
    assert late.preference is None and log.labels() == [by_bob]
    assert [(kept.labeller, kept.late) for kept in log.answers()] == [("bob", False), ("ann", True)]
    assert log.counts() | {"labels": 1, "late": 1, "skipped": 1} == log.counts()
    assert log.answer(other, "bob", "tie").number == 3  # late as well, but nobody else had answered
    assert len(log.labels()) == 2 and log.counts()["late"] == 1


def test_the_leases_of_a_labeller_that_died_are_released(log, clock):
    one, other = ask(log, 2)
    assert (log.lease("ann").id, log.lease("bob").id, log.lease("ann")) == (one, other, None)
    log.release("ann")
    assert log.lease("ann").id == one and log.lease("ann") is None  # bob keeps what he holds
    log.release("ann")
    assert log.answer(one, "ann", "left") in log.labels()  # shown before


def test_a_lease_is_renewed_while_nobody_else_has_it(log, clock):
    (query,) = ask(log, 1)
    assert not log.renew(query, "ann") and not log.renew("nothing", "ann") and not log.renew("\0", "ann")
    log.lease("ann", 10)
    clock.now += 9
    assert log.renew(query, "ann", 10)
    clock.now += 9
    assert log.lease("bob") is None
    clock.now += 9  # it has run out
    assert log.renew(query, "ann", 10) and log.lease("bob") is None
    assert log.renew(query, "ann", 0) and log.lease("bob").id == query  # given back
    assert not log.renew(query, "ann")
    log.answer(query, "bob", "left")
    assert not log.renew(query, "bob")


def test_three_labellers_in_turn_and_one_who_vanishes(log, clock):
    ask(log, 90)
    for _ in range(20):
        for labeller in ("ann", "bob", "eve"):
            answer(log, labeller)
    gone = [log.lease("eve", 60).id for _ in range(5)]
    done = set()
    while query := log.lease("ann", 1e6):
        done.add(log.answer(query.id, "ann", "left").query)
    assert len(done) == 25 and not done & set(gone) and log.counts()["leased"] == 5
    clock.now += 60
    assert [answer(log, "bob").query for _ in range(5)] == gone and log.lease("bob") is None
    assert (
        Counter(label.query for label in log.labels()).most_common(1)[0][1] == 1 and len(log.labels()) == 90
    )


# Answers


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("choice", "preference"), [("left", 1.0), ("right", 0.0), ("tie", 0.5), ("skip", None)]
)
def test_what_an_answer_means(log, swapped, choice, preference):
    ask(log, 20)
    query = next(query for query in log.lease_many("ann", 20) if query.swapped == swapped)
    label = log.answer(query.id, "ann", choice)
    assert label.preference == (preference if not swapped or preference is None else 1 - preference)
    (kept,) = log.answers()
    assert (kept.choice, kept.swapped, kept.preference) == (choice, swapped, label.preference)
    assert log.labels() == ([] if choice == "skip" else [label])
    assert (
        log.counts()
        | {"labels": int(choice != "skip"), "ties": int(choice == "tie"), "skipped": int(choice == "skip")}
        == log.counts()
    )
    assert query.id not in [again.id for again in log.lease_many("bob", 20)]  # asked and answered, a skip too


def test_wrong_answers_leave_nothing(log):
    one, other = ask(log, 2)
    log.lease("ann")
    for choice in ("LEFT", "", None, "l"):
        with pytest.raises(UserError, match="expected one of left, right, tie, skip as the choice"):
            log.answer(one, "ann", choice)
    for unknown in ("nothing", "", "\0"):
        with pytest.raises(KeyError, match="expected the id of a query"):
            log.answer(unknown, "ann", "left")
    with pytest.raises(UserError, match="lease it first"):
        log.answer(one, "bob", "left")
    with pytest.raises(UserError, match="name of a labeller"):
        log.answer(one, "", "left")
    with pytest.raises(UserError, match="lease it first"):  # all or none
        log.answer_many([(one, "left"), (other, "left")], "ann")
    assert log.answers() == [] and log.state() == (0, 0, 0)


def test_always_left_prefers_the_first_half_of_the_time(log):
    ask(log, 2000)
    for _ in range(20):
        log.answer_many([(query, "left") for query in log.lease_many("lazy", 100)], "lazy")
    assert (
        len(log.labels()) == 2000
        and abs(sum(label.preference for label in log.labels()) / 2000 - 0.5) < 0.035
    )
    assert log.labellers()["lazy"]["left_share"] == 1.0


def test_two_labellers_see_different_sides(log):
    ask(log, 200)
    shown = {
        who: {query.id: query.swapped for query in log.lease_many(who, 200, 0)} for who in ("ann", "bob")
    }
    different = sum(shown["ann"][id] != shown["bob"][id] for id in shown["ann"])
    assert 70 < different < 130
    assert {query.id: query.swapped for query in log.lease_many("ann", 200)} == shown[
        "ann"
    ]  # an older window of hers shows the same


def test_many_answers_are_one_transaction(log, clock):
    ask(log, 100)
    commits, statements = [], []
    sqlalchemy.event.listen(log._engine, "commit", commits.append)
    sqlalchemy.event.listen(log._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    queries = log.lease_many("oracle", 100)
    labels = log.answer_many([(query, "left") for query in queries], "oracle")
    assert len(queries) == 100 and len(commits) == 2 and len(statements) < 25
    assert [label.query for label in labels] == [query.id for query in queries] and [
        label.number for label in labels
    ] == list(range(1, 101))
    assert log.answer_many([(query.id, "right") for query in queries[::-1]], "oracle") == labels[::-1]
    assert log.answer_many([], "oracle") == [] and log.lease_many("oracle", 1) == []


def test_counts_and_state_are_one_statement_each(log):
    """One statement each, whatever there is."""
    ask(log, 1000)
    for _ in range(10):
        log.answer_many([(query, "left") for query in log.lease_many("oracle", 100)], "oracle")
    statements = []
    sqlalchemy.event.listen(log._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert log.counts()["labels"] == 1000 and log.state() == (1000, 0, 0)
    assert sum("SELECT" in statement for statement in statements) == 2


# Undo


def test_undo_takes_the_last_answer_back_and_shows_it_again(log, clock):
    ask(log, 3)
    first, second = answer(log, "ann"), answer(log, "ann", "tie")
    by_bob = answer(log, "bob")
    shown = {kept.query: kept.swapped for kept in log.answers()}
    again = log.undo("ann", 30)
    assert (
        isinstance(again, Query)
        and again.id == second.query
        and again.swapped == shown[again.id]
        and again.until == 1030.0
    )
    assert log.labels() == [first, by_bob] and log.state() == (3, 1, 0) and log.lease("bob") is None
    changed = log.answer(again.id, "ann", "left")
    assert changed.number == 4 and log.labels() == [first, by_bob, changed] and log.counts()["revoked"] == 1
    assert [(kept.choice, kept.revoked, kept.reason) for kept in log.answers()][1] == ("tie", 1000.0, "undo")
    assert [log.undo("ann").id, log.undo("ann").id] == [second.query, first.query] and log.undo("ann") is None
    assert log.labels() == [by_bob]
    clock.now += 60
    assert {log.lease("bob").id, log.lease("bob").id} == {
        first.query,
        second.query,
    }  # she has gone: others are asked


def test_undo_of_a_late_answer_changes_no_label(log, clock):
    (query,) = ask(log, 1)
    log.lease("ann", 1)
    clock.now += 1
    log.lease("bob")
    label = log.answer(query, "bob", "left")
    log.answer(query, "ann", "left")
    assert log.undo("ann").id == query and log.labels() == [label]
    assert log.answer(query, "ann", "right").number == 3 and log.labels() == [label]
    assert log.undo("bob").id == query and [label.number for label in log.labels()] == [3]  # hers stands now


def test_undo_races_with_leases(open_log, clock):
    """Eight threads, four logs: nobody gets what another holds, and no query has two labels."""
    ask(open_log(), 12)
    problems, held, lock = [], set(), threading.Lock()

    def hold_and_answer(log, query, name, choice):
        with lock:
            if query.id in held:
                problems.append(f"two labellers hold {query.id}")
            held.add(query.id)
        time.sleep(0.001)
        with lock:
            held.discard(query.id)
        log.answer(query.id, name, choice)

    def work(log, name):
        try:
            for _ in range(6):
                if query := log.lease(name):
                    hold_and_answer(log, query, name, "left")
                if query := log.undo(name):
                    hold_and_answer(log, query, name, "right")
        except Exception as error:
            problems.append(error)

    logs = [open_log() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(logs[i % 4], f"labeller {i}")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = logs[0]
    assert (
        problems == [] and log.counts() | {"waiting": 0, "leased": 0, "labels": 12, "late": 0} == log.counts()
    )
    assert len({label.query for label in log.labels()}) == 12
    assert [kept.number for kept in log.answers()] == list(range(1, log.state()[0] + 1))


# Reading


def test_what_a_slow_reader_saw_stays_as_it_was(open_log):
    """1,000 labels of four threads, through a reader that sleeps: every list that it gets goes on from the
    one before, and nothing is missing."""
    ask(open_log(), 1000)

    def work(log, name):
        while queries := log.lease_many(name, 10):
            log.answer_many([(query, "left") for query in queries], name)

    threads = [threading.Thread(target=work, args=(open_log(), f"labeller {i}")) for i in range(4)]
    reader, seen = open_log(), []
    for thread in threads:
        thread.start()
    for _ in itertools.count():
        over = not any(thread.is_alive() for thread in threads)
        labels = reader.labels()
        assert labels[: len(seen)] == seen
        seen = labels
        if over:
            break
        threads[0].join(0.02)
    assert [label.number for label in seen] == list(range(1, 1001)) and len(
        {label.query for label in seen}
    ) == 1000


def test_everything_is_there_after_a_restart(open_log):
    log = open_log()
    ask(log, 3)
    label = answer(log, "ann")
    held = log.lease("bob")
    log.close()
    again = open_log(create=False)
    assert again.labels() == [label] and again.pairs() == {("a0", "b0"), ("a1", "b1"), ("a2", "b2")}
    assert again.lease("ann").id not in (label.query, held.id)
    assert again.answer(held.id, "bob", "left").labeller == "bob"


def test_a_log_and_a_store_of_chats_share_a_database(store_url):
    Store(store_url).close()
    with pytest.raises(
        UserError, match="expected a log of labels, missing the tables queries, leases, answers, labellers"
    ):
        LabelLog(store_url, create=False)
    log = LabelLog(store_url)
    ask(log, 1)
    log.close()
    assert Store(store_url, create=False).counts()["chats"] == 0


@pytest.mark.slow
@pytest.mark.postgres
def test_a_lost_connection_is_made_anew(postgres_url):
    log, admin = LabelLog(postgres_url), LabelLog(postgres_url)
    ask(log, 2)
    label = answer(log, "ann")
    with admin._engine.begin() as connection:
        connection.execute(
            sqlalchemy.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()"
            )
        )
    assert log.answer(label.query, "ann", "left") == label and answer(log, "ann").number == 2
    log.close()
    admin.close()


def test_a_writer_that_hangs_stops_the_others_with_an_error(open_log, monkeypatch):
    for module in ("data.database", "preferences.label_log"):
        monkeypatch.setattr(f"rl_dialog.{module}.WAIT", 0.5)
    log, hanging = open_log(), open_log()
    ask(log, 1)
    with hanging._writing():
        assert log.counts()["waiting"] == 1  # readers never wait
        with pytest.raises(sqlalchemy.exc.OperationalError, match="locked|lock timeout"):
            log.lease("ann")
    assert log.lease("ann") is not None


def test_a_share_is_a_share(tmp_path):
    with pytest.raises(UserError, match="expected a share from 0 to 1"):
        LabelLog(f"sqlite:///{tmp_path}/labels.db", validation=1.5)
    with pytest.raises(UserError, match="expected an SQLite file with a log of labels, found nothing"):
        LabelLog(f"sqlite:///{tmp_path}/labels.db", create=False)


# Labellers


def test_a_second_opinion_is_asked_of_somebody_else_and_gives_no_second_label(open_log, clock):
    log = open_log(overlap=2)
    (query,) = ask(log, 1)
    assert log.lease("ann").id == query and log.lease("bob").id == query and log.lease("eve") is None
    first, second = log.answer(query, "ann", "tie"), log.answer(query, "bob", "left")
    assert (
        log.labels() == [first]
        and log.counts() | {"labels": 1, "second_opinions": 0, "late": 0} == log.counts()
    )
    assert log.lease("eve") is None
    log.revoke_labeller("ann")
    assert log.labels() == [second] and log.counts()["second_opinions"] == 1
    assert log.lease("eve").id == query and log.lease("bob") is None


def test_who_skips_leaves_the_label_to_the_second_opinion(open_log):
    log = open_log(overlap=2)
    ask(log, 1)
    answer(log, "ann", "skip")
    assert log.labels() == [] and log.counts()["second_opinions"] == 1 and log.lease("ann") is None
    label = answer(log, "bob")
    assert log.labels() == [label] and log.counts() | {"skipped": 1, "labels": 1} == log.counts()


def test_the_overlap_is_a_share_of_the_queries(open_log):
    log = open_log(overlap=1.2)
    ask(log, 1000)
    log.answer_many([(query, "left") for query in log.lease_many("ann", 1000)], "ann")
    assert abs(log.counts()["second_opinions"] / 1000 - 0.2) < 0.04
    assert len(log.lease_many("bob", 1000)) == log.counts()["second_opinions"]


def test_agreement_of_two_labellers(open_log, clock):
    """Of four shared queries they agree on two, of which one is a tie: where both decided, 1 of 2."""
    log = open_log(overlap=2)
    ask(log, 5)
    for mine, yours in (
        ("first", "first"),
        ("first", "second"),
        ("tie", "tie"),
        ("tie", "first"),
        ("skip", "second"),
    ):
        for who, said in (("ann", mine), ("bob", yours)):
            query = log.lease(who)
            clock.now += 2 if who == "ann" else 8
            prefers_left = (query.left == query.first) == (said == "first")
            log.answer(
                query.id, who, said if said in ("tie", "skip") else "left" if prefers_left else "right"
            )
    clock.now += 1000
    answered = log.labellers()
    assert list(answered) == ["ann", "bob"]
    expected = {"labels": 4, "ties": 2, "skips": 1, "late": 0, "revoked": 0, "active": True, "seconds": 2.0}
    assert answered["ann"] | expected | {"shared": 4, "agreement": 0.5, "noise": 1.0} == answered["ann"]
    assert (
        answered["bob"] | {"labels": 5, "ties": 1, "skips": 0, "shared": 4, "agreement": 0.5, "seconds": 8.0}
        == answered["bob"]
    )
    log.undo("bob")
    assert log.labellers()["bob"] | {"labels": 4, "revoked": 1} == log.labellers()["bob"]


def test_a_pair_that_waited_behind_another_was_not_looked_at_meanwhile(open_log, clock):
    """A page leases two pairs. Somebody who takes three seconds for each was told to take six."""
    log = open_log()
    ask(log, 8)
    held = log.lease_many("ann", 2)
    for _ in range(5):
        clock.now += 3
        log.answer(held.pop(0).id, "ann", "left")
        held += log.lease_many("ann", 1)
    assert log.labellers()["ann"]["seconds"] == 3.0
    clock.now += 50  # both at once
    log.answer_many([(query, "left") for query in held], "ann")
    log.answer_many([(query, "left") for query in log.lease_many("bob", 1)], "bob")
    assert log.labellers()["ann"]["seconds"] == 3.0 and log.labellers()["bob"]["seconds"] == 0.0


def test_noise_is_estimated_from_agreement(open_log):
    """Both answer by a coin in 30 % of cases. (0.85^2 + 0.15^2 = 0.745: how often they agree.)"""
    import numpy as np

    assert coin_share(1.0) == 0.0 and coin_share(0.5) == 1.0 and coin_share(0.4) == 1.0
    assert coin_share(0.95**2 + 0.05**2) == pytest.approx(0.1)
    rng = np.random.default_rng(0)
    log = open_log(overlap=2)
    ask(log, 2000)
    for who in ("ann", "bob"):
        wrong = rng.random(2000) < 0.15
        given = [
            (query, "left" if (query.left == query.first) != wrong[i] else "right")
            for i, query in enumerate(log.lease_many(who, 2000))
        ]
        log.answer_many(given, who)
    assert log.labellers()["ann"]["noise"] == pytest.approx(0.3, abs=0.06)
    assert log.labellers()["ann"]["agreement"] == pytest.approx(0.745, abs=0.04)


def test_a_labeller_is_revoked_as_a_whole(log, clock):
    ask(log, 5)
    token = log.add_labeller("eve")
    for _ in range(2):
        answer(log, "eve")
    kept = answer(log, "ann")
    held = log.lease("eve")
    assert log.revoke_labeller("eve", "answers at random") == 2
    assert log.labels() == [kept] and log.state() == (3, 2, 0) and log.labeller_of(token) is None
    assert [a.reason for a in log.answers()] == ["answers at random", "answers at random", None]
    refused = (
        lambda: log.lease("eve"),
        lambda: log.renew(held.id, "eve"),
        lambda: log.answer(held.id, "eve", "left"),
        lambda: log.undo("eve"),
    )
    for act in refused:
        with pytest.raises(PermissionError, match="the labeller 'eve' was revoked"):
            act()
    assert len(log.lease_many("ann", 9)) == 4  # all that she answered or held is open again
    assert log.labellers()["eve"] | {"active": False, "labels": 0, "revoked": 2} == log.labellers()["eve"]
    assert log.revoke_labeller("ann") == 1 and log.labels() == []  # she never had a token
    with pytest.raises(KeyError, match="expected the name of a labeller, got 'nobody'"):
        log.revoke_labeller("nobody")
    assert (
        log.labeller_of(log.add_labeller("eve")) == "eve"
        and log.lease("eve") is not None
        and log.labels() == []
    )


def test_tokens_of_an_earlier_version_go_on(tmp_path):
    """They stood beside the labellers' names; whoever was revoked stays out."""
    url = f"sqlite:///{tmp_path}/labels.db"
    LabelLog(url).close()
    hashed = {name: hashlib.sha256(f"rl-{name}".encode()).hexdigest() for name in ("ann", "bob")}
    with closing(sqlite3.connect(tmp_path / "labels.db")) as connection, connection:
        connection.execute("ALTER TABLE labellers ADD COLUMN hash TEXT")
        rows = [(name, 1.0, 2.0 if name == "bob" else None, known) for name, known in hashed.items()]
        connection.executemany(
            "INSERT INTO labellers (name, created, revoked, hash) VALUES (?, ?, ?, ?)", rows
        )
    for _ in range(2):
        log = LabelLog(url)
        assert (log.labeller_of("rl-ann"), log.labeller_of("rl-bob")) == ("ann", None)
        log.close()


def test_who_labels_without_a_key_may_be_revoked_beside_a_key_of_that_name(log):
    ask(log, 1)
    key = log.keys.add("ann", scopes=["chat"])
    answer(log, "ann")
    assert log.revoke_labeller("ann") == 1 and log.keys.find(key).name == "ann"


@pytest.mark.parametrize("scope", ["operator", "metrics"])
def test_a_key_for_the_page_alone_is_revoked_too(log, scope):
    ask(log, 1)
    keys = {name: log.keys.add(name, scopes=[scope]) for name in ("boss", "ann")}
    answer(log, "ann")
    assert [log.revoke_labeller(name) for name in ("boss", "boss", "ann")] == [0, 0, 1]
    assert [log.keys.find(key) for key in keys.values()] == [None, None] and "boss" not in log.labellers()
    log.keys.add("app", scopes=["chat"])
    with pytest.raises(KeyError, match="expected the name of a labeller, got 'app'"):
        log.revoke_labeller("app")


def test_tokens(log, store_url):
    token, other = log.add_labeller("ann"), log.add_labeller("bob")
    assert token != other and (log.labeller_of(token), log.labeller_of(other)) == ("ann", "bob")
    assert (
        log.labeller_of("") is None
        and log.labeller_of(token + "x") is None
        and log.labeller_of("\0\ud800") is None
    )
    with pytest.raises(UserError, match="expected a new name for the key, got 'ann'"):
        log.add_labeller("ann")
    log.revoke_labeller("ann")
    assert log.labeller_of(token) is None and log.labeller_of(log.add_labeller("ann")) == "ann"
    if store_url.startswith("sqlite"):
        folder = Path(store_url.removeprefix("sqlite:///")).parent
        assert all(
            token.encode() not in path.read_bytes() and other.encode() not in path.read_bytes()
            for path in folder.iterdir()
        )
