"""Imitation learns what is there, keeps the best epoch, and says what does not fit."""

import math

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig, GreedyActs
from rl_dialog.training.imitation import Imitation, imitate


def experts(dialogs=40, turns=5, seed=0):
    """Act i is said where bit i is on."""
    generator = np.random.default_rng(seed)
    states = (generator.random((dialogs * turns, 6)) < 0.3).astype(np.float32)
    return states, states[:, :4].astype(np.int8), np.repeat(np.arange(dialogs), turns)


def test_it_says_what_experts_say():
    policy = ActPolicy(ActPolicyConfig(6, 4, hidden=(16,)))
    states, actions, dialogs = experts()
    logged = []
    kept = imitate(
        policy,
        states,
        actions,
        dialogs,
        Imitation(learning_rate=1e-2),
        log=lambda epoch, metrics: logged.append((epoch, metrics)),
    )
    assert (GreedyActs(policy)(states, np.ones((len(states), 4), np.int8)) == actions).all()
    assert kept["held_out_f1"] == 1 and [epoch for epoch, _ in logged] == list(range(1, 17))
    assert kept["held_out_loss"] == min(metrics["held_out_loss"] for _, metrics in logged)


def test_the_loss_by_hand():
    """All weights 0: p = 1/2. With w = 5 and a share q of acts said, the loss is log 2 (5 q + 1 - q)."""
    policy = ActPolicy(ActPolicyConfig(6, 4))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    states, actions, dialogs = experts(dialogs=2)
    found = imitate(
        policy,
        states,
        actions,
        dialogs,
        Imitation(epochs=1, learning_rate=1e-12, batch_size=100, held_out=0.5),
        seed=0,
    )
    held = np.isin(dialogs, np.random.default_rng(0).permutation(2)[:1])
    for name, said in (("held_out_loss", actions[held].mean()), ("loss", actions[~held].mean())):
        assert found[name] == pytest.approx(math.log(2) * (1 + 4 * said), rel=1e-5)


@pytest.mark.parametrize(("dialogs", "share"), [(2, 0.9), (3, 0.9), (3, 0.01)])
def test_some_dialogs_are_learned_from_and_some_are_held_out(dialogs, share):
    torch.manual_seed(0)
    policy = ActPolicy(ActPolicyConfig(6, 4))
    before = [parameter.clone() for parameter in policy.policy.parameters()]
    found = imitate(policy, *experts(dialogs=dialogs), Imitation(epochs=1, held_out=share))
    assert math.isfinite(found["loss"]) and math.isfinite(found["held_out_loss"])
    assert any(not torch.equal(*pair) for pair in zip(before, policy.policy.parameters(), strict=True))


def test_the_same_seed_gives_the_same_policy():
    def weights(seed):
        torch.manual_seed(0)
        policy = ActPolicy(ActPolicyConfig(6, 4))
        imitate(policy, *experts(), Imitation(epochs=2), seed=seed)
        return torch.cat([value.flatten() for value in policy.state_dict().values()])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_the_value_network_is_left_alone():
    policy = ActPolicy(ActPolicyConfig(6, 4))
    before = [value.clone() for value in policy.value_network.state_dict().values()]
    imitate(policy, *experts(), Imitation(epochs=1))
    assert all(
        torch.equal(a, b) for a, b in zip(before, policy.value_network.state_dict().values(), strict=True)
    )


def test_mistakes_are_explained():
    states, actions, dialogs = experts()
    with pytest.raises(UserError, match="another world"):
        imitate(ActPolicy(ActPolicyConfig(7, 4)), states, actions, dialogs, Imitation())
    with pytest.raises(UserError, match="at least two dialogs"):
        imitate(ActPolicy(ActPolicyConfig(6, 4)), states, actions, np.zeros_like(dialogs), Imitation())
    with pytest.raises(UserError, match="epochs >= 0"):
        Imitation(held_out=1.0)
