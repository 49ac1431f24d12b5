"""Advantages, returns and losses by hand arithmetic, and TensorFlow's RMSprop."""

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.training.optim import RMSprop, load_optimizer, save_optimizer
from rl_dialog.training.policy_gradient import A2C, PPO, clipped_loss, generalised_advantages


def targets(rewards, values, terminated, gamma, gae_lambda):
    found = generalised_advantages(rewards, values, terminated, gamma=gamma, gae_lambda=gae_lambda)
    return [a + v[:-1] for a, v in zip(found, values, strict=True)]


def test_n_step_returns():
    """A2C's: lambda = 1, bootstrapped unless done. r = 1 five times, gamma .99, v = .5; and r = 1, 2, 3, done
    after the second, v = 10."""
    (found,) = targets([np.ones(5)], [np.full(6, 0.5)], [False], 0.99, A2C().gae_lambda)
    np.testing.assert_allclose(found, [5.37649, 4.42070, 3.45525, 2.48005, 1.495], atol=1e-5)
    found = targets(
        [np.array([1.0, 2]), np.array([3.0])], [np.full(3, 10.0), np.full(2, 10.0)], [True, False], 0.99, 1.0
    )
    np.testing.assert_allclose(np.concatenate(found), [2.98, 2.0, 12.9], atol=1e-6)


def test_advantages():
    """r = 3, -2, v = .5, -1, 2, the end, gamma .9, lambda .8: d_1 = -2 + 1 = -1, d_0 = 3 + .9 * -1 - .5 =
    1.6; A_1 = -1, A_0 = 1.6 + .72 * -1."""
    (found,) = generalised_advantages(
        [np.array([3.0, -2])], [np.array([0.5, -1, 2])], [True], gamma=0.9, gae_lambda=0.8
    )
    np.testing.assert_allclose(found, [0.88, -1], rtol=1e-6)
    (going_on,) = generalised_advantages(
        [np.array([3.0, -2])], [np.array([0.5, -1, 2])], [False], gamma=0.9, gae_lambda=0.8
    )
    np.testing.assert_allclose(going_on, [0.88 + 0.72 * 1.8, -1 + 1.8], rtol=1e-6)


def test_pieces_make_no_difference_to_one_another():
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=n) for n in (1, 7, 3, 7)]
    values, ended = [rng.normal(size=len(each) + 1) for each in rewards], [True, False, True, False]
    together = generalised_advantages(rewards, values, ended, gamma=0.99, gae_lambda=0.95)
    for found, r, v, e in zip(together, rewards, values, ended, strict=True):
        alone = generalised_advantages([r], [v], [e], gamma=0.99, gae_lambda=0.95)[0]
        np.testing.assert_allclose(
            found, alone, rtol=1e-5, atol=1e-6
        )  # float32, and pieces of another length may be added up in another order


def test_the_clipped_loss():
    """rho = 1.5 and .5 with clip .2: gains are cut at 1.2 A, and at .8 A for A < 0; the rest keeps its
    gradient."""
    log_probs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantages = torch.tensor([1.0, -1, 1, -1])
    loss = clipped_loss(log_probs, torch.zeros(4), advantages, 0.2)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 1.5 / 4, -0.5 / 4, 0.0]))


def test_rmsprop_is_tensorflows():
    """s = .99 + .01 * 4 = 1.03, theta = 1 - .1 * 2 / sqrt(1.03 + 1e-5); then g = -1: s = 1.0297."""
    theta = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = RMSprop([theta], lr=0.1)
    (2 * theta).sum().backward()
    optimizer.step()
    first = 1 - 0.2 / (1.03 + 1e-5) ** 0.5
    assert theta.item() == pytest.approx(first, rel=1e-6)
    optimizer.zero_grad()
    (-theta).sum().backward()
    optimizer.step()
    assert theta.item() == pytest.approx(first + 0.1 / (0.99 * 1.03 + 0.01 + 1e-5) ** 0.5, rel=1e-6)


def test_rmsprop_goes_on(tmp_path):
    def steps(n, state=None):
        torch.manual_seed(0)
        theta = torch.nn.Parameter(torch.ones(3) if state is None else state[0].clone())
        optimizer = RMSprop([theta], lr=0.1)
        if state is not None:
            load_optimizer(optimizer, state[1])
        for _ in range(n):
            optimizer.zero_grad()
            (theta**2).sum().backward()
            optimizer.step()
        return theta.detach(), optimizer

    whole, _ = steps(4)
    half, optimizer = steps(2)
    save_optimizer(optimizer, tmp_path / "rmsprop.safetensors")
    assert torch.equal(steps(2, (half, tmp_path / "rmsprop.safetensors"))[0], whole)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"minibatch_size": 5000},
        {"gamma": 1.5},
        {"clip": 0.0},
        {"lr_zero_steps": -1},
        {"optimizer": "sgd"},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(UserError, match="expected"):
        PPO(**wrong)
