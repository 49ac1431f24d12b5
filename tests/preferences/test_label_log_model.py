"""The label log against a model of it: lists and dicts, and no database."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog

LABELLERS = ("ann", "bob", "eve")
CHOICES = {"left": 1.0, "right": 0.0, "tie": 0.5, "skip": None}
labellers = st.sampled_from(LABELLERS)


@dataclass
class Asked:
    id: str
    priority: float
    wanted: int
    created: float
    expired: bool = False
    leases: dict = field(default_factory=dict)  # labeller -> until


@dataclass
class Answered:
    query: str
    labeller: str
    choice: str
    late: bool
    revoked: bool = False


class Model(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1000.0
        self.log = None
        self.queries: list[Asked] = []
        self.answers: list[Answered] = []
        self.revoked: set[str] = set()
        self.swapped: dict[tuple[str, str], bool] = {}

    def teardown(self):
        if self.log:
            self.log.close()
        self.folder.cleanup()

    @initialize()
    def start(self):
        self.open()
        for pair in range(2):
            self.add(pair, 0.0)

    def open(self):
        self.log = LabelLog(
            f"sqlite:///{self.folder.name}/labels.db",
            validation=0.0,
            clock=lambda: self.now,
        )
        self.log.set_plan(overlap=self.overlap)

    @rule()
    def restart(self):
        self.log.close()
        self.open()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(pair=st.integers(0, 5), priority=st.sampled_from([0.0, 0.0, 1.0]))
    def add(self, pair, priority):
        id = self.log.add_query(f"a{pair}", f"b{pair}", id=f"query {pair}", priority=priority)
        if id not in [query.id for query in self.queries]:
            self.queries.append(Asked(id, priority, self.overlap, self.now))

    @rule(age=st.sampled_from([5.0, 15.0]))
    def expire(self, age):
        old = [
            q
            for q in self.queries
            if self.open_(q) and q.created < self.now - age
            if not self.holders(q) and not self.standing(q.id)
        ]
        assert self.log.expire(age) == len(old)
        for query in old:
            query.expired = True

    @rule(who=labellers, seconds=st.sampled_from([5.0, 20.0]), number=st.integers(1, 2))
    def lease(self, who, seconds, number):
        if who in self.revoked:
            with pytest.raises(PermissionError):
                self.log.lease_many(who, number, seconds)
            return
        free = [
            q
            for q in self.queries
            if self.open_(q) and len(self.holders(q)) < self.missing(q) and who not in self.holders(q)
        ]
        free = [q for q in free if not self.standing(q.id, who)]
        free = sorted(free, key=lambda q: -q.priority)[:number]  # sorting keeps the order of age
        got = self.log.lease_many(who, number, seconds)
        assert [(q.id, q.until) for q in got] == [(q.id, self.now + seconds) for q in free]
        for query, shown in zip(free, got, strict=True):
            query.leases[who] = self.now + seconds
            assert self.swapped.setdefault((query.id, who), shown.swapped) == shown.swapped

    @precondition(lambda self: self.queries)
    @rule(who=labellers, data=st.data(), seconds=st.sampled_from([0.0, 20.0]))
    def renew(self, who, data, seconds):
        query = data.draw(st.sampled_from(self.queries))
        if who in self.revoked:
            return
        others = [name for name in self.holders(query) if name != who]
        expected = who in query.leases and len(others) < self.missing(query)
        assert self.log.renew(query.id, who, seconds) == expected
        if expected:
            query.leases[who] = self.now + seconds

    @precondition(lambda self: self.queries)
    @rule(who=labellers, choice=st.sampled_from(sorted(CHOICES)), data=st.data())
    def answer(self, who, choice, data):
        shown = [query for query in self.queries if who in query.leases]
        query = data.draw(st.sampled_from(shown or self.queries))
        before = self.standing(query.id, who)
        if who in self.revoked:
            with pytest.raises(PermissionError):
                self.log.answer(query.id, who, choice)
        elif not before and who not in query.leases:
            with pytest.raises(UserError, match="lease it first"):
                self.log.answer(query.id, who, choice)
        else:
            if not before:
                self.answers.append(Answered(query.id, who, choice, late=self.missing(query) == 0))
                query.leases.pop(who)
            label = self.log.answer(query.id, who, choice)
            (kept,) = self.standing(query.id, who)
            assert (label.number, label.preference) == (self.answers.index(kept) + 1, self.preference(kept))

    @rule(who=labellers)
    def undo(self, who):
        if who in self.revoked:
            return
        given = [answer for answer in self.answers if answer.labeller == who and not answer.revoked]
        again = self.log.undo(who, 20.0)
        assert (again and again.id) == (given[-1].query if given else None)
        if given:
            given[-1].revoked = True
            next(query for query in self.queries if query.id == again.id).leases[who] = self.now + 20.0
            assert again.swapped == self.swapped[again.id, who]

    @precondition(lambda self: self.answers)
    @rule(who=st.sampled_from(("bob", "eve")))
    def revoke(self, who):
        given = [answer for answer in self.answers if answer.labeller == who]
        if not given and who not in self.revoked:
            with pytest.raises(KeyError):
                self.log.revoke_labeller(who)
            return
        assert self.log.revoke_labeller(who) == sum(not answer.revoked for answer in given)
        self.revoked.add(who)
        for answer in given:
            answer.revoked = True
        for query in self.queries:
            query.leases.pop(who, None)

    @invariant()
    def agree(self):
        if self.log is None:
            return
        labels = {}
        for number, answer in enumerate(self.answers, 1):
            if not answer.revoked and answer.choice != "skip":
                labels.setdefault(
                    answer.query, (number, answer.query, answer.labeller, self.preference(answer))
                )
        labels = sorted(labels.values())
        assert [
            (label.number, label.query, label.labeller, label.preference) for label in self.log.labels()
        ] == labels
        kept = [answer for answer in self.answers if not answer.revoked]
        assert self.log.state() == (len(self.answers), len(self.answers) - len(kept), 0)
        assert [(a.query, a.choice, a.late, a.revoked is not None) for a in self.log.answers()] == [
            (a.query, a.choice, a.late, a.revoked) for a in self.answers
        ]
        fresh = [query for query in self.queries if self.open_(query) and not self.standing(query.id)]
        assert self.log.counts() == {
            "waiting": sum(not self.holders(query) for query in fresh),
            "leased": sum(bool(self.holders(query)) for query in fresh),
            "second_opinions": sum(
                self.open_(query) and bool(self.standing(query.id)) for query in self.queries
            ),
            "expired": sum(query.expired and not self.standing(query.id) for query in self.queries),
            "labels": len(labels),
            "ties": sum(preference == 0.5 for *_, preference in labels),
            "skipped": sum(answer.choice == "skip" for answer in kept),
            "late": sum(answer.late for answer in kept),
            "revoked": len(self.answers) - len(kept),
        }

    def standing(self, query, who=None):
        return [a for a in self.answers if a.query == query and not a.revoked and who in (None, a.labeller)]

    def missing(self, query):
        return max(0, query.wanted - len(self.standing(query.id)))

    def open_(self, query):
        return self.missing(query) > 0 and not query.expired

    def holders(self, query):
        return [who for who, until in query.leases.items() if until > self.now]

    def preference(self, answer):
        preference = CHOICES[answer.choice]
        return (
            preference
            if preference is None or not self.swapped[answer.query, answer.labeller]
            else 1 - preference
        )


class Overlapping(Model):
    overlap = 2


class Single(Model):
    overlap = 1


@pytest.mark.parametrize("model", [Single, Overlapping])
@pytest.mark.parametrize(("examples", "steps"), [(8, 30), pytest.param(30, 50, marks=pytest.mark.slow)])
def test_the_log_does_what_its_model_does(model, examples, steps):
    checked = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(model, settings=checked)
