"""SARSA, Monte-Carlo returns, AWAC and CQL: what each changes of ILQL, by hand."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from rl_dialog import methods
from rl_dialog.data.batch import collate
from rl_dialog.methods.backup import returns
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense, Linear, LowRank, reduce_minimum

# Values travel token by token, and the conservative term moves every Q, as in the papers.
PUBLISHED = {"backup": "token", "discount": "token", "cql_support": 1.0}
AWAC = partial(methods.AWAC, **PUBLISHED)
CQL = partial(methods.CQL, **PUBLISHED)
ILQL = partial(methods.ILQL, **PUBLISHED)
SARSA = partial(methods.SARSA, **PUBLISHED)
MCReturns = partial(methods.MCReturns, **PUBLISHED)


@pytest.fixture
def batch(make_row):
    """Row 0: replies (1, 2) and (3) that earn 1 and 2, then the end. Row 1: reply (4) earns 5, and the
    conversation goes on."""
    return collate(
        [
            make_row([9, 1, 2, 9, 3], [(1, 2, 1.0), (4, 4, 2.0)]),
            make_row([9, 4, 9], [(1, 1, 5.0)], truncated=True),
        ]
    )


def outputs(batch, v=None):
    states = len(batch.states)
    v = torch.zeros(states) if v is None else v
    heads = tuple(Dense(torch.randn(states, 10)) for _ in range(4))
    return Outputs(Dense(torch.randn(states, 10)), heads[:2], heads[2:], v)


def test_returns_by_hand(batch):
    """Tokens 1, 2, 3 of row 0: 0 + .5 (1 + .5 * 2), 1 + .5 * 2, 2; row 1: 5, and .5 V of the state it stops
    in."""
    assert returns(batch, 0.5, "token").tolist() == [1.0, 2.0, 2.0, 5.0]
    assert returns(batch, 0.5, "turn").tolist() == [2.0, 2.0, 2.0, 5.0]
    v = torch.tensor([100.0, 100.0, 100.0, 100.0, 8.0])  # states: four decisions, then the tail of row 1
    assert returns(batch, 0.5, "token", bootstrap=v).tolist() == [1.0, 2.0, 2.0, 9.0]


def test_mc_fits_q_to_the_returns(batch):
    v = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0])
    assert MCReturns(gamma=0.5).target(outputs(batch, v), batch).tolist() == [1.0, 2.0, 2.0, 9.0]


def test_returns_of_many_rows_equal_those_of_each(make_row):
    rows = []
    for n in range(1, 6):
        ids = [9] + [1] * n + [9] + [2] * (6 - n)
        rows.append(make_row(ids, [(1, n, float(n)), (n + 2, len(ids) - 1, -1.0)], truncated=bool(n % 2)))
    together = returns(collate(rows), 0.9, "token")
    apart = torch.cat([returns(collate([row]), 0.9, "token") for row in rows])
    torch.testing.assert_close(together, apart)


def test_cql_backs_up_the_best_of_the_smaller_head(batch):
    out = outputs(batch)
    first, second = (q.scores for q in out.q_target)
    best = torch.minimum(first, second).amax(1)
    expected = batch.rewards + 0.9 * best[batch.next_state] * ~batch.dones
    torch.testing.assert_close(CQL(gamma=0.9).target(out, batch), expected)
    torch.testing.assert_close(reduce_minimum((out.q_target[0],), "max"), first.amax(1))


@pytest.mark.parametrize("elements", [1, 15, 1 << 20])
def test_the_best_of_the_smaller_head_in_chunks(monkeypatch, elements):
    monkeypatch.setattr("rl_dialog.methods.scores.CHUNK_ELEMENTS", elements)
    base = Linear(torch.randn(6, 4), torch.randn(7, 4), torch.randn(7))
    low = LowRank(base, torch.tensor(0.5), torch.randn(6, 2), torch.randn(7, 2), torch.randn(6))
    torch.testing.assert_close(
        reduce_minimum((base, low), "max"), torch.minimum(base.dense(), low.dense()).amax(1)
    )


def test_sarsa_is_ilql_at_one_half(batch):
    out = outputs(batch)
    assert torch.equal(SARSA().loss(out, batch).total, ILQL(tau=0.5).loss(out, batch).total)


def test_awac_weighs_the_cloning_term_and_acts_on_it_alone(batch):
    out = outputs(batch, torch.randn(5))
    plain, weighted = (
        dataclasses.replace(AWAC(), awac_beta=beta, cql_weight=0.0).loss(out, batch) for beta in (0.0, 1.0)
    )
    advantage = torch.minimum(*(q.at(batch.actions) for q in out.q_target)) - out.v[:4]
    nll = -out.lm.scores.log_softmax(1)[range(4), batch.actions]
    torch.testing.assert_close(
        weighted.total - plain.total, ((advantage.exp().clamp(max=20.0) - 1) * nll).sum()
    )
    torch.testing.assert_close(AWAC().decode(out), out.lm.scores.log_softmax(1))


@pytest.mark.parametrize(("c", "q"), [(0.01, 0.99620), (0.1, 0.96273), (1.0, 0.69834), (10.0, 0.16797)])
def test_the_fixed_point_of_td_and_the_conservative_term(make_row, c, q):
    """One head, two arms of reward +1 and -1 taken equally often, Q = (q, -q): (q - 1) + c (sigmoid(2 q) -
    1/2) = 0."""
    assert (q - 1) + c * (1 / (1 + math.exp(-2 * q)) - 0.5) == pytest.approx(0, abs=1e-4)
    rows = [make_row([9, 0], [(1, 1, 1.0)]), make_row([9, 1], [(1, 1, -1.0)])]
    table = torch.tensor([q, -q]).requires_grad_()
    scores = Dense(table.expand(2, 2))
    both = Outputs(Dense(torch.zeros(2, 2)), (scores,), (scores,), torch.zeros(2))
    CQL(cql_weight=c, awac_weight=0.0).loss(both, collate(rows)).total.backward()
    assert table.grad.abs().max() < 1e-3
