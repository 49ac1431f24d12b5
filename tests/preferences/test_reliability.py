"""Dawid and Skene's estimator: by hand, on labellers whose errors are known, and what a judgement says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rl_dialog.models.reward_model import RewardModelConfig, preference_loss
from rl_dialog.preferences import reliability
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import NewQuery, Remarks
from rl_dialog.preferences.reliability import TRUTHS, dawid_skene, judgements
from rl_dialog.preferences.reward_trainer import RewardTraining
from rl_dialog.preferences.roles import Teacher
from rl_dialog.preferences.segments import Clip, Segments


def test_one_round_by_hand():
    """Gold: ann is right on 1 of 2, bob on 2 of 2. With a prior of weight 4 at .95, and first and second
    pooled, P(ann says first | first) = (4 * .95 + .5) / 5 = .86, P(bob ...) = .96; wrong ones: (.1 + .5) / 5
    = .12 and .1 / 5 = .02."""
    said = [("g1", "ann", 1.0), ("g2", "ann", 1.0), ("g1", "bob", 1.0), ("g2", "bob", 0.0)]
    found = dawid_skene(said, known={"g1": 1.0, "g2": 0.0})
    assert found.labellers["ann"][0].tolist() == pytest.approx([0.86, 0.02, 0.12])
    assert found.labellers["bob"][0].tolist() == pytest.approx([0.96, 0.02, 0.02])
    assert found.labellers["ann"][2].tolist() == pytest.approx([0.12, 0.02, 0.86]), (
        "which is first means nothing"
    )
    assert found.accuracy("ann") == pytest.approx(0.86)
    assert found.noise("bob") == pytest.approx(2 * 0.02 / 0.98)


def crowd(seed, accuracies, queries=300):
    rng = np.random.default_rng(seed)
    truth = rng.choice(2, queries) * 1.0
    said = [
        (f"q{i}", f"p{k}", truth[i] if rng.random() < right else 1 - truth[i])
        for k, right in enumerate(accuracies)
        for i in range(queries)
    ]
    return {f"q{i}": truth[i] for i in range(queries)}, said


def test_it_finds_who_is_right_and_beats_the_majority():
    truth, said = crowd(0, [0.95, 0.55, 0.55])
    found = dawid_skene(said)
    for name, right in (("p0", 0.95), ("p1", 0.55), ("p2", 0.55)):
        assert found.accuracy(name) == pytest.approx(right, abs=0.07), name
    best = {query: TRUTHS[int(p.argmax())] for query, p in found.queries.items()}
    votes = {query: sum(said_ for name, _, said_ in said if name == query) for query in truth}
    majority = np.mean([(votes[query] >= 2) == (truth[query] == 1) for query in truth])
    ours = np.mean([best[query] == truth[query] for query in truth])
    assert ours > 0.9 and ours > majority + 0.1


def test_gold_tells_two_people_apart():
    """Of two people nobody can say who is wrong, but gold pairs do."""
    truth, said = crowd(1, [0.95, 0.5])
    known = {query: truth[query] for query in list(truth)[:40]}
    found = dawid_skene(said, known=known)
    assert found.accuracy("p0") > 0.88 and found.accuracy("p1") < 0.65
    right = [
        TRUTHS[int(found.queries[query].argmax())] == truth[query] for query in truth if query not in known
    ]
    assert np.mean(right) > 0.9


def test_probabilities_are_calibrated():
    truth, said = crowd(2, [0.8, 0.7, 0.65], queries=3000)
    found = dawid_skene(said)
    p = np.array([found.queries[query][0] for query in truth])
    is_first = np.array([truth[query] == 1 for query in truth])
    for low, high in ((0.1, 0.4), (0.6, 0.9)):
        inside = (p > low) & (p < high)
        assert inside.sum() > 100 and abs(p[inside].mean() - is_first[inside].mean()) < 0.08


def pair_by_pair(said, known, rounds):
    """The published estimator as its formulas stand: P(truth) of each query."""
    queries, people = (list(dict.fromkeys(column)) for column in list(zip(*said, strict=True))[:2])
    place = {value: i for i, value in enumerate(TRUTHS)}
    votes = [(queries.index(query), people.index(who), place[value]) for query, who, value in said]
    gold = {queries.index(query): np.eye(3)[place[value]] for query, value in known.items()}
    truth = np.zeros((len(queries), 3))
    for i, _, value in votes:
        truth[i, value] += 1
    truth /= truth.sum(1, keepdims=True)
    for _ in range(rounds):
        truth = np.array([gold.get(i, row) for i, row in enumerate(truth)])
        counted = np.zeros((len(people), 3, 3))
        for i, k, value in votes:
            counted[k, :, value] += truth[i]
        share, confusion = truth.sum(0), counted / counted.sum(2, keepdims=True)
        truth = np.tile(share, (len(queries), 1))
        for i, k, value in votes:
            truth[i] *= confusion[k, :, value]
        truth /= truth.sum(1, keepdims=True)
    return {query: gold.get(i, truth[i]) for i, query in enumerate(queries)}


def test_what_is_estimated_is_that_of_every_pair_by_itself(monkeypatch):
    """The rounds go over the kinds of pairs, of which a log of three people has few."""
    _, said = crowd(3, [0.9, 0.8, 0.6], queries=100)
    said = [each for i, each in enumerate(said) if i % 7] + [("q0", "late", 0.5), ("q1", "late", 1.0)]
    said += [("q2", "late", 0.0)]
    kinds, expected = [], reliability._expected
    monkeypatch.setattr(reliability, "MOST_ROUNDS", 20)
    monkeypatch.setattr(
        reliability, "_expected", lambda *given: (kinds.append(given[-1]), expected(*given))[1]
    )
    known = {"q3": 1.0, "q4": 0.0, "q9": 0.5}
    found = dawid_skene(said, known=known, symmetric=False, prior=0)
    for query, truth in pair_by_pair(said, known, 20).items():
        assert found.queries[query].tolist() == pytest.approx(truth.tolist(), abs=1e-9)
    assert max(kinds) < 35


@pytest.fixture
def log(tmp_path):
    made = LabelLog(f"sqlite:///{tmp_path}/labels.db", validation=0.0)
    yield made
    made.close()


def say(log, who, preferences, **remarks):
    """Answers of somebody to all that they get: query's first segment -> what they prefer."""
    while query := log.lease(who):
        preference = preferences.get(query.first, 1.0)
        side = {
            1.0: "right" if query.swapped else "left",
            0.0: "left" if query.swapped else "right",
            0.5: "tie",
        }
        choice = side[preference]
        log.answer(query.id, who, choice, Remarks(**remarks) if choice != "tie" else Remarks())


def test_without_shared_or_gold_pairs_an_answer_is_taken_as_it_is(log):
    for n in range(3):
        log.add_query(f"a{n}", f"b{n}", id=f"query {n}")
    say(log, "ann", {"a1": 0.0, "a2": 0.5})
    found = judgements(log.answers())
    assert [(one.preference, one.noise, one.weight) for one in found] == [
        (1.0, 0.0, 1.0),
        (0.0, 0.0, 1.0),
        (0.5, 0.0, 1.0),
    ]
    assert [(one.query, one.first) for one in found] == [(label.query, label.first) for label in log.labels()]


def test_a_careless_answer_teaches_nothing(log):
    """Who is right on half of the gold pairs does not make two replies equal: the loss of the label is
    constant."""
    log.add_gold([NewQuery(f"g{n}", f"h{n}", gold=1.0) for n in range(40)])
    log.set_plan(gold_share=0.5)
    for n in range(60):
        log.add_query(f"a{n}", f"b{n}", id=f"query {n}")
    say(log, "eve", {f"g{n}": n % 2 for n in range(40)})
    found = judgements(log.answers())
    assert len(found) == 60, "gold pairs are no labels"
    assert all(one.noise > 0.75 for one in found)
    d = torch.tensor([3.0], requires_grad=True)
    loss = preference_loss(d, torch.zeros(1), torch.tensor([0.0]), noise=torch.tensor([1.0]))
    loss.sum().backward()
    assert abs(d.grad.item()) < 1e-5 and loss.item() == pytest.approx(np.log(2), abs=1e-4)


def test_the_reward_of_clips_learns_from_what_is_most_probably_right(log, tmp_path):
    """Ann is right on all gold pairs and bob on half of them: where both answered, the truth is ann's, and
    what bob alone said is left out."""
    rng, segments, said = np.random.default_rng(0), Segments(tmp_path / "clips"), {}

    def clip():
        moves = rng.normal(size=(5, 2)).astype(np.float32)
        return segments.add(Clip(moves, np.zeros(5, np.int64), np.zeros(5, np.float32), 5))

    log.add_queries(NewQuery(clip(), clip()) for _ in range(40))
    log.add_gold(NewQuery(clip(), clip(), gold=1.0) for _ in range(80))
    log.set_plan(overlap=2, gold_share=0.5)
    for who, right, most in (("bob", 0.5, 200), ("ann", 1.0, 40)):
        for query in iter(lambda who=who: log.lease(who), None):
            first = rng.random() < right
            log.answer(query.id, who, "left" if (query.left == query.first) == first else "right")
            said.setdefault(query.id, {})[who] = float(first)
            if sum(who in by for by in said.values()) == most:
                break
    shape = RewardModelConfig((2,), 3, hidden=(8,), members=1)
    teacher = Teacher(log, segments, tmp_path / "reward", shape, RewardTraining(), enough=10**6)
    assert teacher.step() == {}, "it waits for more labels, and has taken those that there are"
    shared = {query for query, by in said.items() if len(by) == 2} - log.gold().keys()
    taken = teacher.trainer.train_pairs
    assert 5 < len(shared) < 40 and {one.query for one in taken} == shared
    assert all(one.preference == said[one.query]["ann"] for one in taken)


def test_a_pair_that_becomes_gold_is_noticed_also_by_a_teacher_of_an_earlier_version(log, tmp_path):
    """It kept no number of gold pairs."""
    segments = Segments(tmp_path / "clips")
    clips = [Clip(np.full((5, 2), i, np.float32), np.zeros(5), np.zeros(5, np.float32), 5) for i in range(6)]
    ids = [segments.add(clip) for clip in clips]
    log.add_queries(NewQuery(*pair) for pair in zip(ids[::2], ids[1::2], strict=True))
    for query in log.lease_many("ann", 3):
        log.answer(query.id, "ann", "left" if query.left == query.first else "right")
    shape = RewardModelConfig((2,), 3, hidden=(8,), members=1)
    start = lambda: Teacher(log, segments, tmp_path / "reward", shape, RewardTraining(), first_epochs=1)  # noqa: E731
    assert start().step()["version"] == 1
    kept = tmp_path / "reward" / "1" / "labels.json"
    assert json.loads(kept.read_text()) == {"state": [3, 0, 0], "labels": 3}
    kept.write_text(json.dumps({"state": [3, 0], "labels": 3}))
    teacher = start()
    assert teacher.step() == {}
    log.add_gold([NewQuery(ids[0], ids[1], gold=1.0)])
    assert teacher.step()["all_labels"] == 2 and teacher.version == 2


def test_noise_of_each_label_is_that_of_all(log):
    d, mu = torch.tensor([-2.0, 0.3, 4.0]), torch.tensor([1.0, 0.5, 0.0])
    one = preference_loss(d, torch.zeros(3), mu, noise=0.1)
    each = preference_loss(d, torch.zeros(3), mu, noise=torch.full((3,), 0.1))
    assert torch.allclose(one, each)
    q = 0.95  # -log(q sigmoid(d) + (1 - q) sigmoid(-d))
    by_hand = -torch.log(q * torch.sigmoid(d[0]) + (1 - q) * torch.sigmoid(-d[0]))
    assert each[0].item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_two_who_agree_are_surer_than_two_who_do_not(log):
    log.set_plan(overlap=2)
    for n in range(30):
        log.add_query(f"a{n}", f"b{n}", id=f"query {n}")
    say(log, "ann", {}, strength=2)
    say(log, "bob", {"a0": 0.0, "a1": 0.5}, strength=1)
    found = {one.query: one for one in judgements(log.answers())}
    assert found["query 2"].noise < 0.02 and found["query 2"].preference == 1
    assert found["query 0"].noise > 0.5 and found["query 2"].strength == 1.5
    assert found["query 1"].preference == 1.0 and found["query 1"].weight < 0.98
