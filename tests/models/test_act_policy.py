"""The masked product of Bernoullis by hand, and checkpoints that do not fit."""

import json
import math

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import (
    IMPOSSIBLE,
    ActPolicy,
    ActPolicyConfig,
    GreedyActs,
    MaskedBernoulli,
    read_config,
)

THIRD, HALF = math.log(0.5), 0.0  # logits of p = 1/3 and 1/2


def test_log_probabilities_by_hand():
    """p = (1/3, 1/2): log p(1, 0) = log(1/3 * 1/2) = -log 6, log p(0, 0) = log(2/3 * 1/2) = -log 3."""
    product = MaskedBernoulli(torch.tensor([[THIRD, HALF], [THIRD, HALF]]))
    found = product.log_prob(torch.tensor([[1, 0], [0, 0]]))
    torch.testing.assert_close(found, torch.tensor([-math.log(6), -math.log(3)]))


def test_entropy_by_hand():
    """H(1/3) = log 3 - 2/3 log 2, H(1/2) = log 2."""
    found = MaskedBernoulli(torch.tensor([[THIRD, HALF]])).entropy()
    torch.testing.assert_close(found, torch.tensor([math.log(3) + math.log(2) / 3]))


def test_divergence_by_hand():
    """KL(1/2 || 1/3) = 1/2 log(3/2) + 1/2 log(3/4) = 1/2 log(9/8), and 0 of anything from itself."""
    half, third = MaskedBernoulli(torch.tensor([[HALF]])), MaskedBernoulli(torch.tensor([[THIRD]]))
    torch.testing.assert_close(half.kl(third), torch.tensor([0.5 * math.log(9 / 8)]))
    assert third.kl(third).item() == 0


def test_a_masked_bit_is_impossible_and_adds_nothing():
    """It is never on, whatever its logit; log-probability, entropy and divergence are those of the other
    bits; its logit gets no gradient."""
    raw = torch.tensor([[100.0, THIRD, HALF]], requires_grad=True)
    mask = torch.tensor([[0, 1, 1]], dtype=torch.int8)
    product = MaskedBernoulli(MaskedBernoulli.masked(raw, mask))
    rest = MaskedBernoulli(torch.tensor([[THIRD, HALF]]))
    assert not product.mode()[0, 0] and not any(product.sample()[0, 0] for _ in range(50))
    bits = torch.tensor([[0, 1, 0]])
    torch.testing.assert_close(product.log_prob(bits), rest.log_prob(bits[:, 1:]))
    torch.testing.assert_close(product.entropy(), rest.entropy())
    assert product.kl(product).item() == 0
    (product.log_prob(bits) + product.entropy()).sum().backward()
    assert raw.grad[0, 0] == 0 and raw.grad[0, 1:].abs().min() > 0
    assert product.log_prob(torch.tensor([[1, 1, 0]])).item() <= IMPOSSIBLE


def test_extreme_logits_have_finite_log_probabilities():
    """log p(wrong) of logits +-100 is -100 each; the logarithm of a rounded sigmoid would be -inf."""
    product = MaskedBernoulli(torch.tensor([[100.0, -100.0]], requires_grad=True))
    wrong = product.log_prob(torch.tensor([[0, 1]]))
    torch.testing.assert_close(wrong, torch.tensor([-200.0]))
    wrong.backward()
    torch.testing.assert_close(product.logits.grad, torch.tensor([[-1.0, 1.0]]))
    assert torch.isfinite(product.entropy()).all()


def test_samples_follow_the_probabilities():
    """20,000 draws of p = (1/3, 1/2): within four standard errors, and independent."""
    product = MaskedBernoulli(torch.tensor([[THIRD, HALF]]).expand(20_000, 2))
    drawn = product.sample(torch.Generator().manual_seed(0)).double()
    assert drawn[:, 0].mean().item() == pytest.approx(1 / 3, abs=4 * math.sqrt(2 / 9 / 20_000))
    assert drawn[:, 1].mean().item() == pytest.approx(1 / 2, abs=4 * math.sqrt(1 / 4 / 20_000))
    assert abs(torch.corrcoef(drawn.T)[0, 1].item()) < 4 / math.sqrt(20_000)


def test_the_published_sizes():
    """340-100-100-209 has 65,309 parameters, 340-50-50-1 has 19,651."""
    policy = ActPolicy(ActPolicyConfig(340, 209))
    assert sum(p.numel() for p in policy.policy.parameters()) == 65_309
    assert sum(p.numel() for p in policy.value_network.parameters()) == 19_651


def test_greedy_choices_do_not_depend_on_the_company():
    policy = ActPolicy(ActPolicyConfig(30, 20))
    states, masks = np.random.default_rng(0).random((40, 30), np.float32), np.ones((40, 20), np.int8)
    choose = GreedyActs(policy)
    together = choose(states, masks)
    assert (
        together == np.concatenate([choose(states[i : i + 1], masks[i : i + 1]) for i in range(40)])
    ).all() and together.any()
    with torch.no_grad():
        assert (together == (policy.logits(torch.from_numpy(states)) > 0).numpy()).all()
    masks[:, :10] = 0
    assert (choose(states, masks) == together * masks).all()


def test_a_checkpoint_comes_back(tmp_path):
    policy = ActPolicy(ActPolicyConfig(12, 7, hidden=(5,), vocabulary="abc"))
    policy.save_pretrained(tmp_path)
    again = ActPolicy.from_pretrained(tmp_path, expected=policy.config)
    assert again.config == policy.config
    for name, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (ActPolicyConfig(13, 7), "states of 13 bits and 7 acts, got one for 12 and 7"),
        (ActPolicyConfig(12, 7, vocabulary="other"), "the same sizes but other acts"),
    ],
)
def test_a_policy_of_another_world_is_refused(expected, told, tmp_path):
    ActPolicy(ActPolicyConfig(12, 7, vocabulary="abc")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=told):
        ActPolicy.from_pretrained(tmp_path, expected=expected)


def test_broken_checkpoints_are_explained(tmp_path):
    with pytest.raises(UserError, match="found no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="expected JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="expected model_type act_policy"):
        read_config(tmp_path)
    ActPolicy(ActPolicyConfig(12, 7)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden": [3]}))
    with pytest.raises(UserError, match="expected the weights of"):
        ActPolicy.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="expected the weights of"):
        ActPolicy.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="sizes of at least 1"):
        ActPolicyConfig(0, 7)
