"""Policies that say what the logs cannot hold, in a world of two replies whose truth is a sum of a few
products."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_dialog.data.tokenize import Row
from rl_dialog.evaluation.intervals import estimate
from rl_dialog.evaluation.ope import Behaviour, Discount, importance_sampling
from rl_dialog.evaluation.scoring import LoggedReplies, ReplyScores
from rl_dialog.evaluation.support import decisions_outside, mass_outside
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Linear

START, THEN = 5, 6  # the user's tokens; replies are one of the tokens 0..3
EARNS = {0: 0.9, 1: 0.2, 2: 0.0, 3: 0.0}  # chance of success of a conversation: the mean over its two replies


@dataclass(frozen=True)
class Speaker:
    """A policy that says a token by what the user said last: stands where a Policy does."""

    first: tuple[float, ...]
    second: tuple[float, ...]
    device = "cpu"
    method = SimpleNamespace(decode=lambda out: out.lm.dense())

    @cached_property
    def log_p(self):
        return torch.tensor([self.first, self.second], dtype=torch.float64).log().float()

    def get_output_embeddings(self):
        return SimpleNamespace(weight=torch.empty(len(self.first), 1))

    def outputs(self, batch):
        states = batch.input_ids.flatten()[batch.states] - START
        return Outputs(Linear(torch.eye(2)[states], self.log_p.T.contiguous().clamp(min=-1e4)))

    def nll(self, said):
        return (
            -np.stack([self.log_p[0].numpy()[said[:, 0]], self.log_p[1].numpy()[said[:, 1]]], 1)
            .ravel()
            .astype(float)
        )

    @property
    def truth(self):
        return sum(
            self.first[a] * self.second[b] * (EARNS[a] + EARNS[b]) / 2 for a, b in product(EARNS, EARNS)
        )


MU = Speaker((0.5, 0.5, 0.0, 0.0), (0.4, 0.6, 0.0, 0.0))
LEAVES = Speaker((0.5, 0.4, 0.1, 0.0), (0.6, 0.32, 0.0, 0.08))  # 1 - 0.9 * 0.92 = 17.2 % of its conversations


def conversations(count, rng, mu=MU):
    said = np.stack([rng.choice(4, size=count, p=mu.first), rng.choice(4, size=count, p=mu.second)], 1)
    earned = rng.random(count) < np.vectorize(EARNS.get)(said).mean(1)
    masks, ends = np.array([False, True, False, True]), np.array([1, 3], np.int32)
    rows = [
        Row(np.array([START, a, THEN, b], np.int32), masks, ends, np.array([0, r], np.float32), False)
        for (a, b), r in zip(said, earned, strict=True)
    ]
    return said, LoggedReplies(rows, np.repeat(np.arange(count), 2), count)


def estimated(policy, count, rng, mu=MU, known=True):
    said, logged = conversations(count, rng, mu)
    nothing = np.full(2 * count, np.nan)
    scores = ReplyScores(np.ones(2 * count), policy.nll(said), *[nothing] * 7)
    behaviour = Behaviour("mu", logged, mu.nll(said), mu if known else None)
    return importance_sampling(("wis", "pdwis"), scores, logged, behaviour, Discount(), policy=policy)


def test_the_mass_outside_by_hand():
    """At the first decision .1 of two equal weights leave. Then the weights are 3 and 1, and of these .4 and
    0: h = .3; inside .9 * .7."""
    decisions = [np.array([[np.log(3), 0.1], [5.0, 0.4]]), np.array([[0.0, 0.1]])]
    assert mass_outside(decisions).mean() == pytest.approx(1 - 0.9 * 0.7)
    gone = [
        np.array([[-np.inf, 0.5], [0.0, 0.9]])
    ] * 2  # nothing that the policy says is in the logs: they know the first decision only
    assert mass_outside(gone).mean() == pytest.approx(0.5)


def test_what_the_behaviour_never_says_is_outside_and_what_it_says_seldom_by_the_number_of_dialogs():
    _, logged = conversations(50, np.random.default_rng(0))
    seldom = Speaker((0.5, 0.489, 0.001, 0.01), (0.4, 0.6, 0.0, 0.0))
    first = np.array(
        [part[0] for part in decisions_outside(LEAVES, seldom, logged, logged)]
    )  # 0.1 > 50 * 0.001
    assert first[:, 1] == pytest.approx(0.1)
    assert set(np.exp(first[:, 0]).round(3)) == {1.0, round(0.4 / 0.489, 3)}
    same = np.concatenate(decisions_outside(LEAVES, LEAVES, logged, logged))
    assert same == pytest.approx(0)
    smaller = Speaker(MU.first[:2], MU.second[:2])  # it does not know the tokens 2 and 3
    for one, other in zip(
        *(decisions_outside(LEAVES, mu, logged, logged) for mu in (MU, smaller)), strict=True
    ):
        assert one == pytest.approx(other)


def test_dialogs_in_several_batches_stay_in_order(monkeypatch):
    _, logged = conversations(50, np.random.default_rng(0))
    whole = decisions_outside(LEAVES, MU, logged, logged)
    monkeypatch.setattr("rl_dialog.evaluation.support.TOKENS_PER_BATCH", 30)
    np.testing.assert_array_equal(np.stack(whole), np.stack(decisions_outside(LEAVES, MU, logged, logged)))


@pytest.mark.parametrize("known", [True, False])
def test_a_policy_that_leaves_the_logs_gets_no_interval_and_is_told_so(known):
    found = estimated(LEAVES, 1500, np.random.default_rng(0), known=known)
    weight, outside = (estimate([found.measures[f"ope/{name}"]]) for name in ("weight", "outside"))
    assert weight.low < 0.828 < weight.high and weight.value == pytest.approx(0.828, abs=0.04)
    assert outside.value == pytest.approx(0.172, abs=0.01 if known else 0.04)
    assert found.measures["ope/n_eff"].value > 100
    for name in ("ope/wis", "ope/pdwis"):
        told = estimate([found.measures[name]])
        assert told.low is None and told.value > LEAVES.truth + 0.05
        assert "outside the logs and could move the estimate" in found.notes[name]
    assert "of the policy's conversations leave the logs" in found.notes["ope/outside"]
    assert "It should be 1 and is 0.8" in found.notes["ope/weight"]
    stays = estimated(
        replace(LEAVES, first=(0.6, 0.4, 0, 0), second=(0.65, 0.35, 0, 0)),
        400,
        np.random.default_rng(0),
        known=known,
    )
    assert estimate([stays.measures["ope/wis"]]).low is not None
    assert stays.measures["ope/outside"].value == pytest.approx(0, abs=0 if known else 0.1)
    assert "ope/outside" not in stays.notes and "ope/wis" not in stays.notes


def test_intervals_hold_the_truth_where_they_are_given():
    """From nothing to 17 % outside, and 10 % on a word that one log in a thousand has: seen once or never in
    300 dialogs."""
    rng, held, given = np.random.default_rng(0), [], {}
    seldom = Speaker((0.5, 0.499, 0.001, 0.0), MU.second)
    policies = {
        share: Speaker((0.6, 0.4 - share, share, 0.0), (0.55, 0.45, 0.0, 0.0))
        for share in (0.0, 0.003, 0.02, 0.1)
    }
    for mu, policy in [*((MU, policy) for policy in (*policies.values(), LEAVES)), (seldom, policies[0.1])]:
        found = [
            estimate([estimated(policy, 300, rng, mu).measures["ope/wis"]], replicates=200) for _ in range(8)
        ]
        told = [each.low <= policy.truth <= each.high for each in found if each.low is not None]
        given[mu is MU, policy] = len(told)
        held += told
    assert given[True, policies[0.0]] >= 6 and given[True, policies[0.003]] >= 6
    assert given[True, LEAVES] == given[True, policies[0.1]] == 0 and given[False, policies[0.1]] <= 2
    assert np.mean(held) > 0.85
