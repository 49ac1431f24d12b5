"""Behaviour cloning is cross-entropy on the assistant's tokens."""

import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.methods import BC, METHODS
from rl_dialog.methods.method import Heads, Method, Outputs
from rl_dialog.methods.scores import Dense


@pytest.fixture
def batch(make_row):
    """<u> 1 0, then a truncation's last state: actions 1 and 0."""
    return collate([make_row([9, 1, 0, 9], [(1, 2, 5.0)], truncated=True)])


def test_loss_by_hand(batch):
    """log(2 + e) - 1 = .551445 and log(e^2 + 2) - 2 = .239545: the sum is .790990, their mean .3954947. The
    third state has no action."""
    logits = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [7.0, -7.0, 0.0]]).requires_grad_()
    loss = BC().loss(Outputs(Dense(logits)), batch)
    assert loss.total.item() == pytest.approx(0.7909894, abs=1e-6)
    assert loss.metrics["nll"].item() == pytest.approx(0.7909894, abs=1e-6)
    assert not loss.metrics["nll"].requires_grad
    loss.total.backward()
    expected = torch.tensor(
        [[0.211942, -0.423883, 0.211942], [-0.213014, 0.106507, 0.106507], [0.0, 0.0, 0.0]]
    )
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-5)


def test_rewards_do_not_matter(batch):
    logits = torch.randn(3, 3)
    before = BC().loss(Outputs(Dense(logits)), batch).total
    batch.rewards.mul_(-100)
    assert torch.equal(BC().loss(Outputs(Dense(logits)), batch).total, before)


def test_it_decodes_the_language_model():
    logits = torch.randn(4, 6)
    assert torch.equal(BC().decode(Outputs(Dense(logits))), logits)
    assert BC.plain_lm and not BC().uses_prior and BC.heads == Heads()


def test_a_method_without_a_loss_says_so(batch):
    with pytest.raises(TypeError, match="Method has no loss"):
        Method().loss(Outputs(Dense(torch.zeros(3, 3))), batch)


def test_the_registry_names_each_method_once():
    assert METHODS["bc"] is BC
    assert len(set(METHODS.values())) == len(METHODS)
    assert all(issubclass(kind, Method) for kind in METHODS.values())
