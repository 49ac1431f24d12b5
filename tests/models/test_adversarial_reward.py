"""f(s, a, s') = g + gamma h(s') - h(s) by hand, and a reward that finds what experts do."""

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.adversarial_reward import AdversarialReward, AdversarialRewardConfig
from rl_dialog.models.trajectory import Trajectory

STATES = np.eye(4, dtype=np.float32)
ACTIONS = np.array([[1, 0], [1, 0], [0, 1], [1, 0]], np.int8)
DIALOGS = np.array([0, 0, 0, 1])


def estimator(**changes):
    torch.manual_seed(0)
    return AdversarialReward(STATES, ACTIONS, DIALOGS, AdversarialRewardConfig(**changes))


def test_experts_turns_end_where_their_dialogs_do():
    """The state after turn i is that of turn i + 1 of the same dialog; turns 2 and 3 are last ones."""
    _, _, following, goes_on = estimator().experts
    assert goes_on.tolist() == [1, 1, 0, 0]
    assert following.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_constant_h_shapes_by_gamma_minus_one():
    """With g = 0 and h = c, f = (gamma - 1) c while the dialog goes on and -c at its end."""
    reward = estimator(gamma=0.9)
    with torch.no_grad():
        for parameter in reward.parameters():
            parameter.zero_()
        reward.h[-1].bias.fill_(0.02)
    s, a = torch.from_numpy(STATES), torch.from_numpy(ACTIONS).float()
    found = reward.f(s, a, s, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    torch.testing.assert_close(found, torch.tensor([-0.002, -0.002, -0.002, -0.02]))


def test_rewards_are_f_minus_log_pi_and_weights_stay_clamped():
    """As published, and by default without log pi and centred."""
    reward = estimator(batch_size=2, log_prob_weight=1.0, centre=False)
    log_probs = np.array([-1.0, -2.0, -3.0], np.float32)
    each = Trajectory(STATES, ACTIONS[:3], log_probs, np.zeros(3), terminated=True)
    (found,) = reward([each])
    assert max(parameter.abs().max().item() for parameter in reward.parameters()) <= 0.02
    s, a = torch.from_numpy(STATES), torch.from_numpy(ACTIONS[:3]).float()
    f = reward.f(s[:3], a, s[1:], torch.tensor([1.0, 1.0, 0.0])).detach().numpy()
    np.testing.assert_allclose(found, f - log_probs, rtol=1e-6)
    default = estimator(batch_size=2)
    (other,) = default([each])
    np.testing.assert_allclose(other, f - f.mean(), atol=1e-6)
    assert found.shape == (3,) and {"discriminator_loss", "learned_reward"} <= reward.metrics.keys()


def test_what_experts_do_is_worth_more():
    """After learning from a policy that does the opposite, f of the experts' acts is larger on average than
    of the policy's."""
    reward = estimator(batch_size=4, clamp=0.2)
    wrong = Trajectory(
        np.concatenate([STATES, STATES[:1]]),
        1 - ACTIONS,
        np.zeros(4, np.float32),
        np.zeros(4),
        terminated=False,
    )
    s, a, ones = torch.from_numpy(STATES), torch.from_numpy(ACTIONS).float(), torch.ones(4)

    def gap():
        return (reward.f(s, a, s, ones) - reward.f(s, 1 - a, s, ones)).mean().item()

    assert abs(gap()) < 0.01
    for _ in range(60):
        reward([wrong])
    assert gap() > 0.5


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="expected positive numbers"):
        AdversarialRewardConfig(clamp=0)
