"""ILQL's loss and decoding against numbers worked out by hand; every score is a table, no transformer is
involved."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_dialog import methods
from rl_dialog.data.batch import collate
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods import BC
from rl_dialog.methods.backup import discounts
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense, Linear, LowRank

# Values travel token by token, and the conservative term moves every Q, as in the papers.
PUBLISHED = {"backup": "token", "discount": "token", "cql_support": 1.0}
ILQL = partial(methods.ILQL, **PUBLISHED)

# Two decisions, actions 1 and 0, rewards 0 and 1, then the end (spec/asapp_offline_rl.md, the row "ilql
# loss").
LOGITS = [[0.0, 1, 0], [2, 0, 0]]
Q1, Q2 = [[0.1, 0.6, -0.2], [1, 0.3, 0]], [[0.2, 0.4, 0], [0.8, 0.1, 0.5]]
T1, T2 = [[0, 0.7, 0.1], [0.9, 0.2, 0.1]], [[0.1, 0.3, 0], [0.6, 0.2, 0.2]]
V = [0.5, 0.2]


@dataclass
class Tables:
    """Leaf tensors behind an Outputs."""

    lm: torch.Tensor
    q: list[torch.Tensor]
    q_target: list[torch.Tensor]
    v: torch.Tensor

    @classmethod
    def of(cls, lm=LOGITS, q=(Q1, Q2), q_target=(T1, T2), v=V):
        def leaf(values):
            return torch.as_tensor(values, dtype=torch.float32).clone().requires_grad_()

        return cls(leaf(lm), [leaf(x) for x in q], [leaf(x) for x in q_target], leaf(v))

    @classmethod
    def random(cls, states, tokens):
        return cls.of(
            torch.randn(states, tokens),
            torch.randn(2, states, tokens),
            torch.randn(2, states, tokens),
            torch.randn(states),
        )

    def outputs(self, rows=slice(None)):
        def table(tensors):
            return tuple(Dense(t[rows]) for t in tensors)

        return Outputs(Dense(self.lm[rows]), table(self.q), table(self.q_target), self.v[rows])

    def outputs_of_one(self):
        return Outputs(Dense(self.lm), (Dense(self.q[0]),), (Dense(self.q_target[0]),), self.v)

    def gradients(self, total):
        leaves = {
            "lm": self.lm,
            "q1": self.q[0],
            "q2": self.q[1],
            "t1": self.q_target[0],
            "t2": self.q_target[1],
            "v": self.v,
        }
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), found, strict=True)
        }


@pytest.fixture
def batch(make_row):
    return collate([make_row([9, 1, 0], [(1, 2, 1.0)])])


# --- loss ---------------------------------------------------------------------------------------------------


def test_the_published_loss_row(batch):
    """tau .7, gamma .99, cql .1, awac 1, N = 2.

    y = (0 + .99 * .2, 1) = (.198, 1); Qhat = (min(.7, .3), min(.9, .6)) = (.3, .6); u = (-.2, .4)
    L_Q   = [(.6 - .198)^2 + (1 - 1)^2 + (.4 - .198)^2 + (.8 - 1)^2] / 2 = .121204
    L_V   = [.3 * .04 + .7 * .16] / 2 = .062
    L_CQL = 1.5304428, L_LM = .3954947, together .121204 + .062 + .1 * 1.5304428 + .3954947 = .7317430; a Loss
        is N times that.
    """
    loss = ILQL(tau=0.7, gamma=0.99, cql_weight=0.1, awac_weight=1.0).loss(Tables.of().outputs(), batch)
    per_decision = {name: value.item() / 2 for name, value in loss.metrics.items()}
    assert per_decision == {
        "q_loss": pytest.approx(0.121204, abs=1e-6),
        "v_loss": pytest.approx(0.062, abs=1e-6),
        "cql_loss": pytest.approx(1.5304428, abs=1e-6),
        "nll": pytest.approx(0.3954947, abs=1e-6),
        "q": pytest.approx(0.8, abs=1e-6),  # of the first head: (.6 + 1) / 2
        "v": pytest.approx(0.35, abs=1e-6),
        "advantage": pytest.approx(0.1, abs=1e-6),  # (-.2 + .4) / 2
    }
    assert loss.total.item() / 2 == pytest.approx(0.7317430, abs=1e-6)
    assert not any(value.requires_grad for value in loss.metrics.values())


def test_each_weight_scales_its_term(batch):
    """cql_weight 3 and awac_weight .5: 2 * (.121204 + .062 + 3 * 1.5304428 + .5 * .3954947) = 9.9445."""
    loss = ILQL(tau=0.7, gamma=0.99, cql_weight=3.0, awac_weight=0.5).loss(Tables.of().outputs(), batch)
    assert loss.total.item() == pytest.approx(
        2 * (0.121204 + 0.062 + 3 * 1.5304428 + 0.5 * 0.3954947), abs=1e-5
    )
    bare = ILQL(tau=0.7, gamma=0.99, cql_weight=0.0, awac_weight=0.0).loss(Tables.of().outputs(), batch)
    assert bare.total.item() == pytest.approx(2 * (0.121204 + 0.062), abs=1e-6)


def targets(method, tables, batch):
    """y of each decision: the first head's gradient of (Q - y)^2 is 2 (Q - y)."""
    gradient = tables.gradients(method.loss(tables.outputs(), batch).total)["q1"]
    taken = torch.arange(batch.decisions), batch.actions
    return (tables.q[0][taken] - gradient[taken] / 2).detach()


PLAIN = {"cql_weight": 0.0, "awac_weight": 0.0}


def test_targets_stop_at_the_end(batch):
    """V = (.5, .2), r = (0, 1), ended: y = (.99 * .2, 1) = (.198, 1)."""
    torch.testing.assert_close(
        targets(ILQL(gamma=0.99, **PLAIN), Tables.of(), batch), torch.tensor([0.198, 1.0])
    )


def test_a_truncated_conversation_bootstraps(make_row):
    """The same rewards, cut off before a state worth .9: y = (.99 * .2, 1 + .99 * .9) = (.198, 1.891)."""
    batch = collate([make_row([9, 1, 0, 9], [(1, 2, 1.0)], truncated=True)])
    tables = Tables.of(torch.zeros(3, 3), torch.randn(2, 3, 3), torch.randn(2, 3, 3), [0.5, 0.2, 0.9])
    torch.testing.assert_close(
        targets(ILQL(gamma=0.99, **PLAIN), tables, batch), torch.tensor([0.198, 1.891])
    )


def test_the_end_of_a_reply_is_worth_the_next_reply(make_row):
    """<u> 1 2 <u> <u> 0 1: y of the first reply's last token is r_1 + gamma V(first state of the second
    reply); the user's tokens are no states."""
    batch = collate([make_row([9, 1, 2, 9, 9, 0, 1], [(1, 2, 10.0), (5, 6, 20.0)])])
    tables = Tables.of(torch.zeros(4, 3), torch.zeros(2, 4, 3), torch.zeros(2, 4, 3), [1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(
        targets(ILQL(gamma=0.5, **PLAIN), tables, batch),
        torch.tensor([0 + 0.5 * 2, 10 + 0.5 * 3, 0 + 0.5 * 4, 20.0]),
    )
    per_turn = ILQL(gamma=0.5, discount="turn", **PLAIN)
    torch.testing.assert_close(
        targets(per_turn, tables, batch), torch.tensor([0 + 2.0, 10 + 0.5 * 3, 0 + 4.0, 20.0])
    )


@pytest.mark.parametrize(
    ("guesses", "gamma", "discount", "expected"),
    [
        (3, 0.99, "token", -1.84633),  # -(g^5 + g^11): the reward of guess k arrives at action 6k - 1
        (6, 0.99, "token", -4.93351),  # lost: -(g^5 + g^11 + g^17 + g^23 + g^29 + g^35)
        (3, 0.99, "turn", -1.99),  # -(1 + g)
        (3, 1.0, "token", -2.0),
        (6, 1.0, "token", -6.0),
    ],
)
def test_discounted_returns_of_a_word_game(make_row, guesses, gamma, discount, expected):
    """Guesses of six tokens (five letters and the end of turn) and five colours in between, -1 for each guess
    but a winning third one."""
    ids, spans = [9], []
    for guess in range(guesses):
        start = len(ids)
        ids += [1] * 6 + [9] * 5
        spans.append((start, start + 5, 0.0 if guesses == 3 and guess == 2 else -1.0))
    batch = collate([make_row(ids, spans)])
    v = torch.zeros(len(batch.states))
    for _ in range(batch.decisions):
        v = batch.rewards + discounts(batch, gamma, discount) * v[batch.next_state]
    assert v[0].item() == pytest.approx(expected, abs=1e-5)


def test_gradients_go_where_they_should(make_row):
    """L_Q and L_CQL into Q, L_V into V, L_LM into the LM; nothing into the targets, and V gets nothing
    through y or the cloning weights."""
    batch = collate([make_row([9, 1, 0], [(1, 2, 1.0)]), make_row([9, 2, 2, 1], [(1, 3, -1.0)])])
    tables = Tables.random(5, 3)
    taken = torch.arange(5), batch.actions
    got = tables.gradients(
        ILQL(tau=0.8, gamma=0.9, cql_weight=0.3, awac_weight=0.7, awac_beta=1.5)
        .loss(tables.outputs(), batch)
        .total
    )
    y = targets(ILQL(gamma=0.9, **PLAIN), tables, batch)
    onehot = F.one_hot(batch.actions, 3).float()
    u = torch.minimum(*tables.q_target)[taken] - tables.v
    for name, q in (("q1", tables.q[0]), ("q2", tables.q[1])):
        torch.testing.assert_close(
            got[name], 2 * (q[taken] - y)[:, None] * onehot + 0.3 * (q.softmax(-1) - onehot)
        )
    torch.testing.assert_close(got["v"], -2 * torch.where(u < 0, 0.2, 0.8) * u)
    torch.testing.assert_close(got["lm"], 0.7 * (1.5 * u).exp()[:, None] * (tables.lm.softmax(-1) - onehot))
    assert not got["t1"].any() and not got["t2"].any()


def test_v_follows_the_smaller_target(batch):
    """Pessimism: raising the larger of the two targets changes nothing, raising the smaller one does."""
    method = ILQL()
    loss = method.loss(Tables.of().outputs(), batch).metrics["v_loss"]
    larger, smaller = torch.tensor(T1), torch.tensor(T2)
    larger[0, 1] += 5  # Qhat of the first decision is T2's .3
    assert torch.equal(method.loss(Tables.of(q_target=(larger, T2)).outputs(), batch).metrics["v_loss"], loss)
    smaller[0, 1] += 0.1
    assert method.loss(Tables.of(q_target=(T1, smaller)).outputs(), batch).metrics["v_loss"] < loss


def test_v_reads_the_targets_and_q_the_online_value(batch):
    """Online Q does not move V, and the targets do not move Q."""
    tables = Tables.of()
    before = tables.gradients(ILQL(**PLAIN).loss(tables.outputs(), batch).total)
    other = Tables.of(q=(torch.randn(2, 3), torch.randn(2, 3)))
    assert torch.equal(other.gradients(ILQL(**PLAIN).loss(other.outputs(), batch).total)["v"], before["v"])
    third = Tables.of(q_target=(torch.randn(2, 3), torch.randn(2, 3)))
    assert torch.equal(third.gradients(ILQL(**PLAIN).loss(third.outputs(), batch).total)["q1"], before["q1"])


def test_a_batch_is_the_sum_of_its_rows(make_row):
    """Rows of different lengths, one of them truncated: the loss together is the sum of the losses apart, so
    padding and neighbours do not matter."""
    rows = [
        make_row([9, 1, 0], [(1, 2, 1.0)]),
        make_row([9, 2, 2, 1, 9, 9, 0, 9], [(1, 3, -1.0), (6, 6, 0.5)], truncated=True),
        make_row([9, 9, 9, 2], [(3, 3, 2.0)]),
    ]
    method = ILQL(tau=0.8, gamma=0.9, awac_beta=0.5)
    together = collate(rows)
    tables = Tables.random(8, 3)  # 7 decisions, then the truncated row's last state
    whole = method.loss(tables.outputs(), together)
    mine = {0: [0, 1], 1: [2, 3, 4, 5, 7], 2: [6]}
    apart = [method.loss(tables.outputs(mine[b]), collate([row])) for b, row in enumerate(rows)]
    torch.testing.assert_close(whole.total, sum(loss.total for loss in apart))
    for name, value in whole.metrics.items():
        torch.testing.assert_close(
            value, sum(loss.metrics[name] for loss in apart), msg=lambda m, n=name: f"{n}: {m}"
        )


# --- cloning weights ----------------------------------------------------------------------------------------


def lm_gradient(method, tables, batch):
    return tables.gradients(method.loss(tables.outputs(), batch).total)["lm"]


@pytest.mark.parametrize(
    ("beta", "clip", "advantage", "weight"),
    [
        (1.0, 20.0, 0.5, 1.6487),
        (1.0, 20.0, -0.5, 0.60653),
        (4.0, 20.0, 0.5, 7.38906),
        (4.0, 5.0, 0.5, 5.0),
        (10.0, 20.0, 1.0, 20.0),
        (0.0, 20.0, 9.0, 1.0),
    ],
)
def test_cloning_weights(make_row, beta, clip, advantage, weight):
    """exp(beta A), at most awac_clip: e^.5 = 1.6487, e^-.5 = .6065, e^2 = 7.389."""
    batch = collate([make_row([9, 1], [(1, 1, 0.0)])])
    tables = Tables.of([[0.0, 0.0]], [[[0.0, 0.0]]] * 2, [[[0.0, advantage + 0.25]]] * 2, [0.25])
    got = lm_gradient(ILQL(awac_beta=beta, awac_clip=clip), tables, batch)
    torch.testing.assert_close(got, weight * torch.tensor([[0.5, -0.5]]), rtol=1e-4, atol=0)


def test_without_weighting_it_is_behaviour_cloning_bit_for_bit(batch):
    tables = Tables.random(2, 3)
    cloned = tables.gradients(BC().loss(tables.outputs(), batch).total)["lm"]
    assert torch.equal(lm_gradient(ILQL(awac_beta=0.0, awac_weight=1.0), tables, batch), cloned)


def test_weights_do_not_enter_the_reported_nll(batch):
    tables = Tables.random(2, 3)
    plain, weighted = (ILQL(awac_beta=b).loss(tables.outputs(), batch).metrics["nll"] for b in (0.0, 3.0))
    torch.testing.assert_close(plain, weighted)


def test_no_cloning_leaves_the_language_model_alone(batch):
    assert not lm_gradient(ILQL(awac_weight=0.0), Tables.random(2, 3), batch).any()


# --- decoding -----------------------------------------------------------------------------------------------


def decoded(method, lm, q_target, v, q=None):
    tables = Tables.of(lm, q_target if q is None else q, q_target, v)
    return method.decode(tables.outputs()).softmax(-1).detach()


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0, (0.211942, 0.576117, 0.211942)),
        (1, (0.176389, 0.647223, 0.176389)),
        (4, (0.090703, 0.818594, 0.090703)),
    ],
)
@pytest.mark.parametrize("v", [0.5, -5.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_published_decoding_table(beta, expected, v, top_k):
    """Logits (0, 1, 0), the smaller target (0, .3, 0): weights (1, e^(1 + .3 beta), 1) normalised. V shifts
    all tokens alike."""
    got = decoded(ILQL(beta=beta, top_k=top_k), [[0, 1, 0]], ([[0, 0.3, 0]], [[0.2, 0.9, 0.0]]), [v])
    torch.testing.assert_close(got, torch.tensor([expected]), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("beta", "expected"), [(0, 0.5), (1, 0.8808), (4, 0.99966)])
def test_advantage_of_one(beta, expected):
    """pi = (1/2, 1/2), A = (1, -1): sigmoid(2 beta)."""
    assert decoded(ILQL(beta=beta), [[0, 0]], ([[1, -1]],) * 2, [0.0])[0, 0].item() == pytest.approx(
        expected, abs=5e-5
    )


@pytest.mark.parametrize("top_k", [0, 2, 5])
def test_a_constant_on_q_and_v_changes_nothing(top_k):
    lm, q, v = torch.randn(4, 5), torch.randn(2, 4, 5), torch.randn(4)
    method = ILQL(beta=3.0, top_k=top_k)
    torch.testing.assert_close(decoded(method, lm, q + 7, v + 7), decoded(method, lm, q, v))


def test_decoding_takes_the_smaller_target_and_ignores_online_q():
    lm, targets_, v = torch.randn(4, 5), torch.randn(2, 4, 5), torch.randn(4)
    expected = (lm.log_softmax(-1) + 2.5 * (targets_.amin(0) - v[:, None])).softmax(-1)
    torch.testing.assert_close(decoded(ILQL(beta=2.5), lm, targets_, v, q=torch.randn(2, 4, 5)), expected)


def test_top_k_is_chosen_before_the_advantage():
    """The third token is the LM's least likely and worth 1000: impossible among the LM's top 2, certain
    without top-k."""
    lm, q = [[2.0, 1.0, 0.0]], ([[0.0, 0.5, 1000.0]],) * 2
    got = decoded(ILQL(beta=1.0, top_k=2), lm, q, [0.0])[0]
    assert got[2].item() == 0
    torch.testing.assert_close(got[:2], torch.tensor([2.0, 1.5]).softmax(0))
    assert decoded(ILQL(beta=1.0), lm, q, [0.0])[0, 2].item() == 1


@pytest.mark.parametrize("method", [ILQL(beta=0.0), methods.AWAC()])
@pytest.mark.parametrize("after", [False, True])
def test_top_k_holds_without_an_advantage(method, after):
    """As for awac, whose weights are in the language model."""
    method = replace(method, top_k=2, top_k_after=after)
    got = decoded(method, [[2.0, 1.0, 0.0]], ([[0.0, 0.5, 1000.0]],) * 2, [0.0])[0]
    torch.testing.assert_close(got, torch.tensor([0.731059, 0.268941, 0.0]), rtol=0, atol=5e-6)


def test_top_k_of_the_whole_vocabulary_is_no_top_k():
    lm, q, v = torch.randn(4, 5), torch.randn(2, 4, 5), torch.randn(4)
    for k in (5, 50):
        torch.testing.assert_close(
            decoded(ILQL(beta=2.0, top_k=k), lm, q, v), decoded(ILQL(beta=2.0), lm, q, v)
        )


def test_beta_zero_is_the_language_model_whatever_q_says():
    lm = torch.randn(4, 5)
    torch.testing.assert_close(
        decoded(ILQL(beta=0.0), lm, torch.full((2, 4, 5), torch.inf), torch.zeros(4)), lm.softmax(-1)
    )


def test_it_needs_double_q_v_and_targets():
    assert (ILQL().heads.q, ILQL().heads.v, ILQL().heads.target, ILQL().heads.lm_target) == (
        2,
        True,
        True,
        False,
    )
    assert not methods.ILQL.plain_lm and not ILQL().uses_prior


# --- switches -----------------------------------------------------------------------------------------------


def one_decision(q=(1.0, 0.0), action=0, reward=0.0, v=0.0, **fields):
    """The loss of a single last decision with one table for both heads and targets, cloning and the
    conservative term off unless asked for."""
    row = Row(
        np.asarray([9, action], np.int32),
        np.asarray([False, True]),
        np.asarray([1], np.int32),
        np.asarray([reward], np.float32),
        False,
    )
    tables = Tables.of(lm=[[0.0] * len(q)], q=([list(q)], [list(q)]), q_target=([list(q)], [list(q)]), v=[v])
    method = ILQL(**({"cql_weight": 0.0, "awac_weight": 0.0} | fields))
    return tables, method.loss(tables.outputs(), collate([row]))


@pytest.mark.parametrize(("action", "expected"), [(0, 0.25), (1, 2.25 + 0.25)])
def test_the_margin_term(action, expected):
    """Q = (1, 0), margin .5: taken 0 gives .5^2 for itself; taken 1 gives 1.5^2 for the other and .5^2 for
    itself. Two heads."""
    bare = one_decision(action=action)[1].total
    assert (
        one_decision(action=action, dm_weight=1.0, dm_margin=0.5)[1].total - bare
    ).item() == pytest.approx(2 * expected)


def test_the_conservative_term_has_a_temperature():
    loss = one_decision(q=(1.0, 0.0), cql_weight=1.0, cql_temperature=2.0)[1]
    assert loss.metrics["cql_loss"].item() == pytest.approx(2 * np.log(1 + np.exp(-0.5)))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [((None, None), 4 * 0.7), ((None, 1.0), 0.7), ((-1.0, 0.5), 0.25 * 0.7), ((3.0, None), 9 * 0.7)],
)
def test_the_value_target_is_clamped(bounds, expected):
    """min Q' = 2, V = 0, tau .7: L_V = .7 u^2 with u = 2 inside the bounds."""
    loss = one_decision(q=(2.0, 0.0), value_min=bounds[0], value_max=bounds[1])[1]
    assert loss.metrics["v_loss"].item() == pytest.approx(expected)


@pytest.mark.parametrize(("v", "weight"), [(0.0, 0.75), (2.0, 0.25)])
def test_sign_weights(v, weight):
    """awac_beta .75: .75 where min Q' = 1 is above V, .25 elsewhere; log p = -log 2."""
    bare, signed = (
        one_decision(v=v, awac_weight=w, awac_beta=0.75, awac_weights="sign")[1].total for w in (0.0, 1.0)
    )
    assert (signed - bare).item() == pytest.approx(weight * np.log(2))


@pytest.mark.parametrize("heads", ["dense", "linear", "lowrank"])
def test_scaled_scores(heads):
    base = Linear(torch.randn(4, 3), torch.randn(5, 3), torch.randn(5))
    made = {
        "dense": Dense(base.dense().detach()),
        "linear": base,
        "lowrank": LowRank(base, torch.tensor(0.7), torch.randn(4, 2), torch.randn(5, 2), torch.randn(4)),
    }
    torch.testing.assert_close(made[heads].scaled(0.3).dense(), 0.3 * made[heads].dense())
    assert made[heads].scaled(1.0) is made[heads]


@pytest.mark.parametrize(("beta", "expected"), [(1, 0.7311), (4, 0.9820)])
def test_an_advantage_that_may_only_veto(beta, expected):
    """pi = (1/2, 1/2), A = (1, -1), clip 0: only the second token loses."""
    got = decoded(ILQL(beta=beta, advantage_clip=0.0), [[0, 0]], ([[1, -1]], [[1, -1]]), [0.0])
    assert got[0, 0].item() == pytest.approx(expected, abs=1e-4)
    assert decoded(ILQL(beta=beta, advantage_clip=0.0, top_k=2), [[0, 0]], ([[1, -1]], [[1, -1]]), [0.0])[
        0, 0
    ].item() == pytest.approx(expected, abs=1e-4)


def test_top_k_after_the_advantage_lets_a_token_win_by_its_q():
    lm, q = [[5.0, 4.0, -5.0]], ([[0.0, 0.0, 100.0]], [[0.0, 0.0, 100.0]])
    assert decoded(ILQL(beta=1.0, top_k=2), lm, q, [0.0])[0, 2] == 0
    after = decoded(ILQL(beta=1.0, top_k=2, top_k_after=True), lm, q, [0.0])[0]
    assert after.argmax() == 2 and after[1] == 0 and after[0] > 0


def test_the_advantage_alone():
    got = decoded(ILQL(beta=2.0, include_logits=False), [[9.0, 0.0]], ([[1.0, 3.0]], [[2.0, 2.5]]), [0.5])
    torch.testing.assert_close(got, torch.tensor([[1.0, 4.0]]).softmax(-1))


@pytest.mark.parametrize(("q_weight", "v_weight"), [(2.0, 1.0), (1.0, 0.5), (0.0, 3.0)])
def test_the_td_and_the_value_loss_have_weights(batch, q_weight, v_weight):
    """2 * (.121204 w_q + .062 w_v) of the published row; a weight of 0 leaves the head without a gradient."""
    tables = Tables.of()
    loss = ILQL(tau=0.7, gamma=0.99, q_weight=q_weight, v_weight=v_weight, **PLAIN).loss(
        tables.outputs(), batch
    )
    assert loss.total.item() == pytest.approx(2 * (0.121204 * q_weight + 0.062 * v_weight), abs=1e-6)
    assert loss.metrics["q_loss"].item() == pytest.approx(2 * 0.121204, abs=1e-6)  # metrics have no weight
    assert tables.gradients(loss.total)["q1"].any().item() == (q_weight > 0)


def test_a_single_q_head(batch):
    """The first head alone: L_Q = (.6 - .198)^2 + 0, and V follows its target (.7, .9): u = (.2, .7)."""
    method = ILQL(tau=0.7, gamma=0.99, double_q=False, **PLAIN)
    assert method.heads.q == 1 and method.heads.target and ILQL().heads.q == 2
    loss = method.loss(Tables.of(q=(Q1,), q_target=(T1,)).outputs_of_one(), batch)
    assert loss.metrics["q_loss"].item() == pytest.approx(0.402**2, abs=1e-6)
    assert loss.metrics["v_loss"].item() == pytest.approx(0.7 * (0.2**2 + 0.7**2), abs=1e-6)


def test_v_may_be_fitted_to_the_returns_that_followed(make_row):
    """Rewards 1 and 2 at the ends of two replies, cut before a state worth 8, gamma .5: returns (0 + .5 * 3.5
    ...) worked out from the back.

    Last action: 2 + .5 * 8 = 6; the first reply's end: 1 + .5 * 6 = 4; its first token: 0 + .5 * 4 = 2. Q' is
    100 and is not read but for the metric.
    """
    batch = collate([make_row([9, 1, 0, 9, 1, 9], [(1, 2, 1.0), (4, 4, 2.0)], truncated=True)])
    tables = Tables.of(
        torch.zeros(4, 3), torch.zeros(2, 4, 3), torch.full((2, 4, 3), 100.0), [1.0, 5.0, 6.0, 8.0]
    )
    method = ILQL(tau=0.75, gamma=0.5, mc_returns=True, **PLAIN)
    loss = method.loss(tables.outputs(), batch)
    got = tables.gradients(loss.total)
    torch.testing.assert_close(got["v"], -2 * torch.tensor([0.75 * (2 - 1), 0.25 * (4 - 5), 0.0, 0.0]))
    assert loss.metrics["advantage"].item() == pytest.approx(300 - 12)
    torch.testing.assert_close(
        targets(method, tables, batch), torch.tensor([0 + 0.5 * 5, 1 + 0.5 * 6, 2 + 0.5 * 8])
    )  # Q still learns by TD


def test_the_context_s_tokens_may_be_cloned_too(make_row):
    """<u> 2 1 0: position 0 predicts the user's 2, positions 1 and 2 are decisions. Uniform over 3 tokens,
    weight .25: .25 log 3 more."""
    batch = collate([make_row([9, 2, 1, 0], [(2, 3, 1.0)])])
    tables = Tables.of()
    out = tables.outputs()
    out.context = Dense(torch.zeros(1, 3, requires_grad=True))
    bare, loss = (ILQL(transition_weight=weight).loss(out, batch) for weight in (0.0, 0.25))
    assert (loss.total - bare.total).item() == pytest.approx(0.25 * np.log(3), abs=1e-6)
    assert (
        loss.metrics["context_nll"].item() == pytest.approx(np.log(3)) and "context_nll" not in bare.metrics
    )
    loss.total.backward()
    torch.testing.assert_close(out.context.scores.grad, 0.25 * torch.tensor([[1 / 3, 1 / 3, -2 / 3]]))
    assert ILQL(transition_weight=0.25).learns_context and not ILQL().learns_context


# --- the distribution of the model as loaded in the place of logged tokens ----------------------------------

BASE = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]


def held(batch, tables, **fields):
    out = tables.outputs()
    out.prior = Dense(torch.tensor(BASE).log())
    return ILQL(reg_to="base_policy", **fields).loss(out, batch)


def test_terms_may_hold_to_the_base_policy(batch):
    """-sum_b p_0(b) log softmax(.)[b] in the conservative term of both heads and in the cloning term; logged
    tokens in TD and in the reported nll."""
    tables, p = Tables.of(), torch.tensor(BASE)
    loss = held(batch, tables, tau=0.7, gamma=0.99, cql_weight=0.1, awac_weight=2.0)
    cql = -sum((p * q.detach().log_softmax(1)).sum() for q in tables.q)
    cloning = -(p * tables.lm.detach().log_softmax(1)).sum()
    assert loss.metrics["cql_loss"].item() == pytest.approx(cql.item(), abs=1e-5)
    assert loss.metrics["nll"].item() == pytest.approx(2 * 0.3954947, abs=1e-5)
    assert loss.total.item() == pytest.approx(
        2 * (0.121204 + 0.062) + 0.1 * cql.item() + 2 * cloning.item(), abs=1e-5
    )
    got = tables.gradients(loss.total)
    torch.testing.assert_close(got["lm"], 2 * (tables.lm.softmax(1) - p))


def test_only_holding_to_the_base_policy_makes_q_its_logits(batch):
    """Where softmax(Q / T) is the base policy the conservative term has no gradient."""
    logits = 2.0 * torch.tensor(BASE).log() + 3
    tables = Tables.of(q=(logits, logits))
    got = tables.gradients(
        held(batch, tables, cql_weight=1.0, cql_temperature=2.0, awac_weight=0.0, q_weight=0.0).total
    )
    torch.testing.assert_close(got["q1"], torch.zeros(2, 3), rtol=0, atol=1e-6)
    assert not got["lm"].any()


def test_a_base_policy_that_says_the_logged_token_is_the_data_set(batch):
    tables = Tables.random(2, 3)
    out = tables.outputs()
    out.prior = Dense(F.one_hot(batch.actions, 3).float().log())
    ours, theirs = (ILQL(cql_weight=0.3, reg_to=to).loss(out, batch) for to in ("base_policy", "dataset"))
    torch.testing.assert_close(ours.total, theirs.total)


def test_what_the_base_policy_needs_and_refuses():
    method = ILQL(reg_to="base_policy")
    assert (
        method.uses_prior
        and method.prior_every_step
        and not ILQL().uses_prior
        and not ILQL().prior_every_step
    )
    for fields in ({"awac_beta": 1.0}, {"awac_weights": "sign", "awac_beta": 0.0}):
        with pytest.raises(UserError, match="reg_to base_policy: expected no cloning weights"):
            ILQL(reg_to="base_policy", **fields)


# --- other ways to act --------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 2])
def test_the_language_model_s_own_temperature(top_k):
    """Logits (0, 2) at temperature 2 are (0, 1), and Q stays as it is: sigmoid(1 - 3)."""
    method = ILQL(beta=1.0, lm_temperature=2.0, top_k=top_k)
    assert decoded(method, [[0, 2]], ([[3, 0]],) * 2, [0.0])[0, 1].item() == pytest.approx(
        1 / (1 + np.exp(2)), abs=1e-6
    )
    assert decoded(ILQL(beta=0.0, lm_temperature=2.0, top_k=top_k), [[0, 2]], ([[3, 0]],) * 2, [0.0])[
        0, 1
    ].item() == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.5, (1 / 3, 1 / 3, 1 / 3)),
        (0.9, (0.9 / 1.1, 0.1 / 1.1, 0.1 / 1.1)),
        (0.2, (0.2 / 1.8, 0.8 / 1.8, 0.8 / 1.8)),
    ],
)
@pytest.mark.parametrize("top_k", [0, 3])
def test_signs_alone(beta, expected, top_k):
    """A uniform LM, advantages (2, -1, 0) around V = 1: log beta for the first, log(1 - beta) for the others,
    however large they are."""
    got = decoded(ILQL(beta=beta, extraction="sign", top_k=top_k), [[0, 0, 0]], ([[3, 0, 1]],) * 2, [1.0])
    torch.testing.assert_close(got, torch.tensor([expected]))
    far = decoded(ILQL(beta=beta, extraction="sign", top_k=top_k), [[0, 0, 0]], ([[300, -70, 1]],) * 2, [1.0])
    torch.testing.assert_close(far, got)
    assert ILQL(beta=beta, extraction="sign", top_k=3).decodes_with_v  # V decides the sign


@pytest.mark.parametrize("changes", [{"extraction": "sign", "beta": 0.5}, {"include_logits": False}])
def test_a_divergence_is_only_aimed_at_where_a_beta_leads_to_it(changes):
    """With signs a beta above 1 is refused; without p, less of a beta leads to all tokens alike, not to p."""
    with pytest.raises(UserError, match="--method.target_kl 2: expected extraction exp and include_logits"):
        ILQL(target_kl=2.0, **changes)


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_signs_need_a_share(beta):
    with pytest.raises(UserError, match="extraction sign: expected a beta between 0 and 1"):
        ILQL(beta=beta, extraction="sign")
