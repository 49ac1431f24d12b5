"""Discounts, the expectile and log-ratios, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import METHODS, scores
from rl_dialog.methods.backup import (
    discounts,
    earned_beyond,
    expectile,
    following,
    gumbel,
    log_ratios,
    minimum,
    returns,
)
from rl_dialog.methods.scores import Dense, Linear


@pytest.fixture
def two_replies(make_row):
    """<u> a a <u> b b, finished: four actions; the second ends its reply, the fourth ends its reply and the
    conversation."""
    return collate([make_row([9, 1, 2, 9, 3, 4], [(1, 2, 0.0), (4, 5, 0.0)])])


def test_discounts_per_token(two_replies):
    torch.testing.assert_close(discounts(two_replies, 0.9, "token"), torch.tensor([0.9, 0.9, 0.9, 0.0]))


def test_discounts_per_turn(two_replies):
    """Inside a reply nothing is discounted; the end of the conversation has no value after it either way."""
    torch.testing.assert_close(discounts(two_replies, 0.9, "turn"), torch.tensor([1.0, 0.9, 1.0, 0.0]))


def test_a_truncated_conversation_is_discounted_and_not_ended(make_row):
    batch = collate([make_row([9, 1, 2, 9], [(1, 2, 0.0)], truncated=True)])
    torch.testing.assert_close(discounts(batch, 0.9, "token"), torch.tensor([0.9, 0.9]))
    torch.testing.assert_close(discounts(batch, 0.9, "turn"), torch.tensor([1.0, 0.9]))


@pytest.mark.parametrize(("per", "behind"), [("token", 0.9**2 * 5 + 0.9**3 * 0.9 * 7), ("turn", 5 + 0.9 * 7)])
def test_behind_a_cut_stands_what_the_conversation_went_on_to_earn(make_row, per, behind):
    """Behind the cut a reply of three tokens earns 5 and one of two tokens 7. The second row was cut as well,
    but nobody rated what followed it; the third was not."""
    cut = make_row([9, 1, 2, 9], [(1, 2, 0.0)], truncated=True)
    known, unknown = (
        replace(
            cut,
            later_rewards=np.array(rewards, np.float32),
            later_tokens=np.array([3, 2], np.int32),
            later_done=True,
        )
        for rewards in ([5, 7], [5, np.nan])
    )
    batch = collate([known, unknown, make_row([9, 3], [(1, 1, 0.0)])])
    values = torch.arange(1.0, len(batch.states) + 1)
    inside, last = (0.9 if per == "token" else 1.0), 0.9
    expected = [inside * 2, last * behind, inside * 4, last * 7, 0]
    torch.testing.assert_close(earned_beyond(batch, values, 0.9, per), torch.tensor(expected))
    expected[1] = last * 6  # a value takes over what can be put together from other conversations
    torch.testing.assert_close(following(batch, values, 0.9, per), torch.tensor(expected))
    torch.testing.assert_close(
        returns(batch, 0.9, per, bootstrap=values),
        torch.tensor([inside * last * behind, last * behind, inside * last * 7, last * 7, 0]),
    )


def test_gamma_zero_and_one(two_replies):
    assert discounts(two_replies, 0.0, "token").tolist() == [0, 0, 0, 0]
    assert (
        discounts(two_replies, 1.0, "token").tolist()
        == discounts(two_replies, 1.0, "turn").tolist()
        == [1, 1, 1, 0]
    )


def test_an_unknown_discount_is_refused(two_replies):
    with pytest.raises(UserError, match="expected discount 'token' or 'turn', got 'episode'"):
        discounts(two_replies, 0.9, "episode")


@pytest.mark.parametrize("beyond", [-0.1, 1.5])
def test_a_discount_and_an_expectile_beyond_their_range_are_refused(two_replies, beyond):
    """With tau 1.5 an error below 0 weighs -1/2: the loss has no smallest value."""
    with pytest.raises(UserError, match=f"expected --method.gamma from 0 to 1, got {beyond:g}"):
        discounts(two_replies, beyond, "turn")
    with pytest.raises(UserError, match=f"expected --method.tau from 0 to 1, got {beyond:g}"):
        expectile(torch.tensor([-1.0]), beyond)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9, 1.0])
def test_expectile(tau):
    """Target 2, V 0: error 2 -> 4 tau. Target -2, V 0: error -2 -> 4 (1 - tau). No error, no loss."""
    torch.testing.assert_close(
        expectile(torch.tensor([2.0, -2.0, 0.0]), tau), torch.tensor([4 * tau, 4 * (1 - tau), 0.0])
    )


def test_expectile_gradient_pulls_v_towards_the_target():
    """d/dV of tau (2 - V)^2 at V = 0 is -4 tau; of (1 - tau) (-2 - V)^2 it is 4 (1 - tau)."""
    v = torch.zeros(2, requires_grad=True)
    expectile(torch.tensor([2.0, -2.0]) - v, 0.7).sum().backward()
    torch.testing.assert_close(v.grad, torch.tensor([-2.8, 1.2]))


@pytest.mark.parametrize(("tau", "fitted"), [(0.5, 0.5), (0.7, 0.7), (0.99, 0.99)])
def test_the_expectile_of_zero_and_one_is_tau(tau, fitted):
    """Values 0 and 1 equally often: tau (1 - V) = (1 - tau) V -> V = tau."""
    v = torch.tensor(fitted, requires_grad=True)
    expectile(torch.tensor([0.0, 1.0]) - v, tau).sum().backward()
    assert abs(v.grad.item()) < 1e-6


def test_minimum_is_elementwise():
    assert minimum(
        (torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0, 4.0]))
    ).tolist() == [1.0, 3.0]
    assert minimum((torch.tensor([1.0]),)).tolist() == [1.0]


# --- log-ratios of whole replies ----------------------------------------------------------------------------


@pytest.fixture
def ragged(make_row):
    """Three rows of 2, 3 and 1 decisions; the second is truncated, so there is a state without an action
    behind them."""
    rows = [
        make_row([9, 1, 0], [(1, 2, 0.0)]),
        make_row([9, 2, 9, 1, 1, 9], [(1, 1, 0.0), (3, 4, 0.0)], truncated=True),
        make_row([9, 9, 2], [(2, 2, 0.0)]),
    ]
    return collate(rows, prior_logp=[[-0.5, -2.0], [-1.0, -0.1, -0.2], [-3.0]])


LOSSES = {
    "sum": lambda g: g.sum(),
    "each its own slope": lambda g: (torch.tensor([1.0, -2.0, 0.5]) * g.exp()).sum(),
    "rows together": lambda g: torch.nn.functional.softplus(g[0] - g[1]) * g[2] ** 3,
    "one row counts": lambda g: g[1].square(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("elements", [1, 5, 1 << 20])
def test_log_ratios_have_the_value_and_gradient_of_the_dense_table(ragged, loss, elements, monkeypatch):
    """Against plain autograd through (N, V) log-probabilities, with another factor outside; the state behind
    the decisions gets no gradient."""
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", elements)
    features, weight, bias = (torch.randn(*shape).requires_grad_() for shape in ((7, 4), (3, 4), (3,)))
    got = log_ratios(Linear(features, weight, bias), ragged, loss)
    gradients = torch.autograd.grad(got * 0.37, (features, weight, bias))
    log_p = torch.nn.functional.linear(features, weight, bias).log_softmax(1)[:6]
    each = log_p.gather(1, ragged.actions[:, None]).squeeze(1) - ragged.prior_logp
    expected = loss(torch.stack([each[ragged.rows == row].sum() for row in range(3)]))
    torch.testing.assert_close(got, expected)
    for found, wanted in zip(
        gradients, torch.autograd.grad(expected * 0.37, (features, weight, bias)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_log_ratios_by_hand(ragged):
    """A uniform policy over three tokens: g = -n log 3 - sum log p = (-2 log 3 + 2.5, -3 log 3 + 1.3, -log 3
    + 3)."""
    seen = []
    with torch.no_grad():  # as at an evaluation
        total = log_ratios(Dense(torch.zeros(7, 3)), ragged, lambda g: seen.append(g.detach()) or g.sum())
    expected = torch.tensor([2.5, 1.3, 3.0]) - torch.tensor([2.0, 3.0, 1.0]) * torch.tensor(3.0).log()
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(total, expected.sum())
    assert not total.requires_grad


def test_gumbel_regression_goes_on_as_a_straight_line():
    """c = 1/2: below z = 2 its derivative is c (exp z - 1), and from there on that of z = 2."""
    error = torch.tensor([-1.0, 0.0, 0.5, 1.0, 4.0], requires_grad=True)  # z = -2, 0, 1, 2, 8
    loss = gumbel(error, 0.5)
    e = math.e
    told = [1 / e**2 + 1, 0, e - 2, e**2 - 3, e**2 - 3 + 6 * (e**2 - 1)]
    torch.testing.assert_close(loss, torch.tensor([value / 4 for value in told]))
    (slope,) = torch.autograd.grad(loss.sum(), error)
    torch.testing.assert_close(slope, torch.tensor([1 / e**2 - 1, 0, e - 1, e**2 - 1, e**2 - 1]) / 2)


@pytest.mark.parametrize(
    ("method", "field", "value", "expected"),
    [
        ("ilql", "lm_temperature", 0.0, "above 0, got 0"),  # decode divides by it
        ("ilql", "cql_temperature", 0.0, "above 0"),
        ("ilql", "top_k", -1, "of at least 0, got -1"),
        ("mc", "warmup", -0.5, "from 0 to 1, got -0.5"),  # targets would go on past y
        ("awac", "alpha", 2.0, "from 0 to 1"),  # and past the values
        ("psi", "c", 0.0, "above 0"),
        ("kl_control", "c", -1.0, "above 0"),  # would lean towards what is worth least
        ("bcq", "threshold", 1.5, "from 0 to 1"),  # no token would be left
        ("dbcq", "threshold", -0.1, "from 0 to 1"),
        ("utterance_ilql", "num_generations", 0, "of at least 1"),
        ("chai", "cql_weight", -1.0, "of at least 0"),
        ("way_off_policy", "c", 0.0, "above 0"),
        ("dpo", "beta", 0.0, "above 0"),
        ("dpo", "label_smoothing", 1.5, "from 0 to 1"),
        ("kto", "beta", math.nan, "above 0, got nan"),
        ("reinforce", "gamma", 1.5, "from 0 to 1"),
        ("grpo", "epsilon", -0.2, "above 0"),
        ("ppo", "lam", 2.0, "from 0 to 1"),
    ],
)
def test_a_hyper_parameter_out_of_its_range_is_refused_by_name(method, field, value, expected):
    with pytest.raises(UserError, match=f"--method.{field} {expected}"):
        METHODS[method](**{field: value})


def test_a_divergence_that_is_no_divisor_may_weigh_nothing():
    assert METHODS["way_off_policy"](coefficient="kl", c=0.0).c == 0
