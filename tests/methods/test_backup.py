"""Discounts and the expectile, by hand."""

import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.methods.backup import discounts, expectile, minimum


@pytest.fixture
def two_replies(make_row):
    """<u> a a <u> b b, finished: four actions; the second ends its reply, the fourth ends its reply and the conversation."""
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


def test_gamma_zero_and_one(two_replies):
    assert discounts(two_replies, 0.0, "token").tolist() == [0, 0, 0, 0]
    assert discounts(two_replies, 1.0, "token").tolist() == discounts(two_replies, 1.0, "turn").tolist() == [1, 1, 1, 0]


def test_an_unknown_discount_is_refused(two_replies):
    with pytest.raises(ValueError, match="expected discount 'token' or 'turn', got 'episode'"):
        discounts(two_replies, 0.9, "episode")


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9, 1.0])
def test_expectile(tau):
    """Target 2, V 0: error 2 -> 4 tau. Target -2, V 0: error -2 -> 4 (1 - tau). No error, no loss."""
    torch.testing.assert_close(expectile(torch.tensor([2.0, -2.0, 0.0]), tau), torch.tensor([4 * tau, 4 * (1 - tau), 0.0]))


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
    assert minimum((torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0, 4.0]))).tolist() == [1.0, 3.0]
    assert minimum((torch.tensor([1.0]),)).tolist() == [1.0]
