"""Which pairs are asked about: the clips that are kept, the choice among their pairs, and the pool."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.queries import (
    ClipPool,
    QueryBroker,
    QuerySettings,
    draw_pairs,
    looks_of,
    preference_variance,
)
from rl_dialog.preferences.segments import Clip


@pytest.fixture
def open_log(tmp_path):
    """open_log(validation=...): the log of this test, as a new process would open it."""
    opened = []

    def build(**given):
        opened.append(LabelLog(f"sqlite:///{tmp_path}/labels.db", **{"validation": 0.0} | given))
        return opened[-1]

    yield build
    for log in opened:
        log.close()


def names(number):
    return [f"clip {i:04d}" for i in range(number)]


def choose(log, settings=None, *, clips, number, seed=0, **given):
    return [pair for pair, _ in QueryBroker(log, settings, seed=seed).choose(clips, number, **given)]


# Clips at hand


def test_the_ring_overwrites_the_oldest():
    pool = ClipPool(5)
    for i in range(8):
        pool.add(i)
    assert (
        pool.slots == [5, 6, 7, 3, 4]
        and pool.ids() == [3, 4, 5, 6, 7]
        and (pool.seen, pool.dropped, len(pool)) == (8, 3, 5)
    )
    for i in range(8, 11):
        pool.add(i)
    assert pool.slots == [10, 6, 7, 8, 9] and pool.ids() == [6, 7, 8, 9, 10] and pool.dropped == 6
    pool.add(7)  # it is here
    assert pool.slots == [10, 6, 7, 8, 9] and pool.seen == 11
    pool.add(0)  # it was once
    assert pool.slots == [10, 0, 7, 8, 9]


def test_the_sample_keeps_all_that_came_with_the_same_chance():
    """10 of 40, 2,000 times: each is kept 500 +- 5 x 19.4 times, early or late."""
    kept = Counter()
    for seed in range(2000):
        pool = ClipPool(10, keep="sample", seed=seed)
        for i in range(40):
            pool.add(i)
        assert len(pool.ids()) == 10 and sorted(pool.slots) == pool.ids() and pool.dropped == 30
        kept.update(pool.slots)
    assert all(abs(kept[i] - 500) < 97 for i in range(40))


def test_a_pool_takes_clips_as_fast_as_they_come():
    pool = ClipPool(1000)
    began = time.process_time()
    for i in range(50_000):
        pool.add(str(i))
    assert time.process_time() - began < 2.0 and pool.dropped == 49_000
    with pytest.raises(UserError, match="expected room for at least two clips, got 1"):
        ClipPool(1)


# Pairs


def test_no_pair_is_asked_about_twice_whoever_is_restarted(open_log):
    clips = names(5)
    broker = QueryBroker(open_log())
    first = broker.refill(clips, wanted=100, pool=4)
    again = QueryBroker(open_log())  # after a restart
    more = again.refill(clips, wanted=100, pool=100)
    assert (len(first), len(more)) == (4, 6) and len(open_log().pairs()) == 10
    assert again.refill(clips, wanted=100, pool=100) == []
    assert len(again.refill([*clips, "new", "newer"], wanted=100, pool=100)) == 11
    assert again.refill([*clips, "new", "newer"], wanted=100, pool=100) == []
    assert again.refill([], wanted=100, pool=100) == again.refill(["alone"], wanted=100, pool=100) == []


def test_every_pair_has_the_same_chance(open_log):
    """One of ten pairs, 1,000 times: 100 +- 5 x 9.5 each."""
    log = open_log()
    drawn = Counter(choose(log, clips=names(5), number=1, seed=seed)[0] for seed in range(1000))
    assert len(drawn) == 10 and all(abs(count - 100) < 48 for count in drawn.values())


def test_the_last_free_pairs_are_found():
    clips = names(60)
    rng = np.random.default_rng(0)
    every = draw_pairs(clips, clips, 10_000, rng)
    assert len(every) == len(set(every)) == 60 * 59 // 2 and all(one < other for one, other in every)
    left = set(every[:3])
    assert set(draw_pairs(clips, clips, 5, rng, set(every) - left)) == left


def test_what_is_drawn_depends_on_the_seed_and_on_what_was_asked(open_log):
    log, clips = open_log(), names(30)
    assert (
        choose(log, clips=clips, number=5)
        == choose(log, clips=clips, number=5)
        != choose(log, clips=clips, number=5, seed=1)
    )
    broker = QueryBroker(log)
    broker.refill(clips, wanted=100, pool=3)
    goes_on = broker.choose(clips, 5)
    assert QueryBroker(open_log()).choose(clips, 5) == goes_on  # a resumed run


def test_pairs_stay_on_one_side_in_the_proportion_of_the_sides(open_log):
    log = open_log(validation=0.2)
    clips = names(400)
    broker = QueryBroker(log, QuerySettings(recency=0.3))
    for filled in range(20, 1001, 20):
        assert len(broker.refill(clips, wanted=10_000, pool=filled)) == 20
    assert all(log.is_validation(one) == log.is_validation(other) for one, other in log.pairs())
    queries = log.lease_many("ann", 2000)
    assert len(queries) == 1000
    assert all(query.validation == log.is_validation(query.first) for query in queries)
    assert abs(np.mean([query.validation for query in queries]) - 0.2) < 0.05


def test_where_one_side_is_used_up_the_other_one_is_asked(open_log):
    log = open_log(validation=0.5)
    held_out = [id for id in names(100) if log.is_validation(id)][:6]
    training = [id for id in names(100) if not log.is_validation(id)][:3]
    assert len(choose(log, clips=held_out + training, number=1000)) == 15 + 3
    assert len(choose(log, clips=held_out + training, number=12)) == 12
    assert len(choose(log, clips=held_out + training[:1], number=12)) == 12
    assert len(choose(log, clips=training, number=12)) == 3


def test_the_variance_of_what_members_predict():
    """Differences 0, 2, -2 of three members: P = .5, .880797, .119203, variance 2/3 x .380797^2."""
    returns = np.array([[0.0, 0.0], [2.0, 0.0], [-1.0, 1.0]])
    assert preference_variance(returns, np.array([[0, 1], [1, 0]])) == pytest.approx(
        [2 / 3 * 0.38079708**2] * 2
    )
    assert preference_variance(np.array([[1e4, -1e4]] * 2), np.array([[0, 1]])) == 0  # without overflow


def test_the_pair_about_which_members_disagree_comes_first(open_log):
    """Three members agree that a < b < c; of d they agree that it beats a and b, but not whether it beats
    c."""
    log, clips = open_log(), ["a", "b", "c", "d"]
    returns = np.array([[0.0, 10.0, 20.0, 40.0], [0.0, 10.0, 20.0, 40.0], [0.0, 10.0, 30.0, 20.0]])
    settings = QuerySettings(selection="variance", candidates=6)
    (best,) = QueryBroker(log, settings).choose(clips, 1, returns=returns)
    assert best == (("c", "d"), pytest.approx(2 / 9, abs=1e-4))
    broker = QueryBroker(log, settings)
    broker.refill(clips, wanted=9, pool=6, returns=lambda: returns, reward_version=7)
    first = log.lease("ann")
    assert (
        {first.first, first.second} == {"c", "d"}
        and first.priority == pytest.approx(2 / 9, abs=1e-4)
        and first.reward_version == 7
    )


def test_only_the_highest_variances_among_the_candidates_are_kept(open_log):
    clips = names(40)
    returns = np.random.default_rng(0).normal(size=(3, 40)) * 3
    pairs = choose(
        open_log(),
        QuerySettings(selection="variance", candidates=10),
        clips=clips,
        number=20,
        returns=returns,
    )
    place = {id: i for i, id in enumerate(clips)}
    kept = preference_variance(returns, np.array([(place[one], place[other]) for one, other in pairs]))
    every = preference_variance(returns, np.array(list(itertools.combinations(range(40), 2))))
    assert (
        len(set(pairs)) == 20
        and kept.min() > np.quantile(every, 0.8)
        and list(kept) == sorted(kept, reverse=True)
    )
    assert kept.max() < every.max()  # of 200 candidates, not of all 780 pairs
    assert choose(open_log(), QuerySettings(selection="variance"), clips=clips, number=3) == choose(
        open_log(), clips=clips, number=3
    )  # no reward yet


@pytest.mark.parametrize("selection", ["random", "variance"])
def test_a_share_of_the_pairs_has_a_newest_clip(open_log, selection):
    clips = names(200)
    returns = np.random.default_rng(0).normal(size=(3, 200))

    def share(recency):
        settings = QuerySettings(selection=selection, recency=recency, newest=10, candidates=3)
        pairs = choose(open_log(), settings, clips=clips, number=400, returns=returns)
        return np.mean([bool({one, other} & set(clips[-10:])) for one, other in pairs])

    assert share(1.0) == 1.0
    assert abs(share(0.0) - 0.1) < 0.06 and abs(share(0.5) - 0.55) < 0.1


def test_what_does_not_fit(open_log):
    broker = QueryBroker(open_log())
    with pytest.raises(UserError, match="expected different clips, got 1 of them twice"):
        broker.choose(["a", "b", "a"], 1)
    with pytest.raises(UserError, match=r"expected returns of shape \(members, 2\), got \(2,\)"):
        broker.choose(["a", "b"], 1, returns=np.zeros(2))
    for wrong in (
        {"selection": "best"},
        {"candidates": 0},
        {"recency": 1.1},
        {"newest": 0},
        {"prefetch": 0},
        {"expire": 0.0},
    ):
        with pytest.raises(UserError, match="expected"):
            QuerySettings(**wrong)


# The pool


def test_the_pool_is_bounded_by_its_size_and_by_what_is_wanted(open_log):
    log, clips = open_log(), names(50)
    broker = QueryBroker(log, QuerySettings(prefetch=3, task="which?"))
    assert (
        len(broker.refill(clips, wanted=1000, labellers=2)) == 12
        and broker.refill(clips, wanted=1000, labellers=2) == []
    )
    query = log.lease("ann")
    assert (
        query.task == "which?" and broker.refill(clips, wanted=1000, labellers=2) == []
    )  # held: not answered yet
    log.answer(query.id, "ann", "left")
    assert broker.refill(clips, wanted=12, labellers=2) == []  # 1 label and 11 open queries are 12
    assert len(broker.refill(clips, wanted=13, labellers=2)) == 1
    while query := log.lease("ann"):
        log.answer(query.id, "ann", "skip" if query.id < "8" else "left")
    skipped = log.counts()["skipped"]
    assert skipped > 0 and len(broker.refill(clips, wanted=13)) == min(
        6, skipped
    )  # others are asked in their place
    assert broker.refill(clips, wanted=3) == []


def test_a_budget_is_never_exceeded(open_log):
    log, clips = open_log(), names(40)
    log.set_plan(overlap=1.5)
    broker = QueryBroker(log)
    for wanted in [3, 3, 10, 8, 25, 30, 30, 30, 30, 30]:
        broker.refill(clips, wanted=wanted)
        for who in ("ann", "bob"):
            for query in log.lease_many(who, 8):
                log.answer(query.id, who, "left")
        assert log.counts()["labels"] <= max(wanted, 10)
    assert log.counts()["labels"] == 30


def test_queries_that_are_too_old_are_replaced(open_log):
    now = [0.0]
    log = open_log(clock=lambda: now[0])
    broker = QueryBroker(log, QuerySettings(expire=60.0))
    old = broker.refill(names(20), wanted=100)
    now[0] = 61.0
    new = broker.refill(names(20), wanted=100)
    assert len(old) == len(new) == 8 and not set(old) & set(new)
    assert log.counts() | {"waiting": 8, "expired": 8} == log.counts() and log.lease("ann").id in new


def test_files_are_written_before_a_query_is_offered(open_log):
    log, stored = open_log(), []
    broker = QueryBroker(log)

    def store(ids):
        assert log.counts()["waiting"] == 0, "a labeller would see a pair whose clips are not there yet"
        stored.extend(ids)

    broker.refill(names(20), wanted=100, pool=5, store=store)
    shown = {id for query in log.lease_many("ann", 10) for id in (query.left, query.right)}
    assert set(stored) == shown and len(stored) == len(shown)

    def failing(ids):
        raise OSError("no space left on device")

    with pytest.raises(OSError):
        broker.refill(names(20), wanted=100, pool=50, store=failing)
    assert log.counts()["waiting"] == 0 and broker.asked == log.pairs()


def test_looks_are_ranks_of_what_is_seen_and_done():
    """By hand: means 0, 2 and 700 of the first number are ranks 0, 1/2 and 1, padding left out."""

    def clip(numbers, actions, steps=2):
        seen = np.array(numbers, np.float32)[:, None]
        return Clip(seen, np.array(actions), np.zeros(len(seen), np.float32), steps)

    found = looks_of([clip([1, 3], [0, 0]), clip([600, 800], [1, 1]), clip([0, 0, 9], [1, 0, 0])])
    assert found.tolist() == [[0.5, 0.5, 0], [1, 1, 1], [0, 0, 0.5]]
    pictures = np.zeros((2, 84, 84, 4), np.uint8)
    assert looks_of([Clip(pictures, np.zeros(2), np.zeros(2, np.float32), 2)]).shape == (1, 2 * 14 * 14 + 1)


def test_before_there_is_a_reward_clips_are_asked_about_that_look_unlike(open_log):
    """Of two clips in a hundred that look unlike all others far more is asked than chance would; a quarter is
    any. With a reward the disputed pairs come instead."""
    clips, looks = names(100), np.zeros((100, 1))
    looks[:2] = 1
    rare = set(clips[:2])
    settings = QuerySettings(selection="informative")
    pairs = choose(open_log(), settings, clips=clips, number=40, looks=looks)
    with_rare = sum(bool(rare & set(pair)) for pair in pairs)
    anyway = choose(open_log(), QuerySettings(), clips=clips, number=40, looks=looks)
    assert 10 <= with_rare <= 32 and sum(bool(rare & set(pair)) for pair in anyway) <= 5
    returns = np.zeros((3, 100))
    returns[0, 50:] = 5
    pairs = choose(open_log(), settings, clips=clips, number=40, looks=looks, returns=returns)
    assert sum((one < clips[50]) != (other < clips[50]) for one, other in pairs) >= 30
