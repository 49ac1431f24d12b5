"""Networks for control: sizes, distributions against torch's, checkpoints."""

import json

import numpy as np
import pytest
import torch

from envs.moving_dot import MovingDotVector
from rl_dialog.errors import UserError
from rl_dialog.models.control_policy import (
    Categorical,
    ControlPolicy,
    ControlPolicyConfig,
    DiagonalGaussian,
    shape_of,
)

PIXELS = ControlPolicyConfig((84, 84, 4), 6, hidden=(512,))


def count(module):
    return sum(each.numel() for each in module.parameters())


def test_sizes():
    """Pong's A2C network as published; and two perceptrons, 2-64-64-5 and 2-64-64-1: 3 * 64 + 65 * 64 + 65 *
    5, and 65 * 1 at the end."""
    assert count(ControlPolicy(PIXELS)) == 1_687_719
    assert count(ControlPolicy(ControlPolicyConfig((2,), 5))) == (192 + 4160 + 325) + (192 + 4160 + 65)
    assert count(ControlPolicy(ControlPolicyConfig((2,), 2, discrete=False))) == (192 + 4160 + 130 + 2) + (
        192 + 4160 + 65
    )


def test_shapes():
    assert shape_of(MovingDotVector(1)) == ControlPolicyConfig((2,), 5)
    assert shape_of(MovingDotVector(1, "pixels")) == ControlPolicyConfig((84, 84, 4), 5, hidden=(512,))
    assert shape_of(MovingDotVector(1, continuous=True), hidden=(32,)) == ControlPolicyConfig(
        (2,), 2, discrete=False, hidden=(32,)
    )


def test_a_categorical_is_torchs():
    torch.manual_seed(0)
    logits, other, actions = torch.randn(6, 4), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    ours, theirs, far = (
        Categorical(logits),
        torch.distributions.Categorical(logits=logits),
        torch.distributions.Categorical(logits=other),
    )
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.kl(Categorical(other)), torch.distributions.kl_divergence(theirs, far))
    assert torch.equal(ours.mode(), logits.argmax(-1))
    drawn = Categorical(logits[:1].expand(40_000, 4)).sample()
    shares = torch.bincount(drawn, minlength=4) / 40_000
    assert (
        drawn.dtype == torch.int64 and (shares - theirs.probs[0]).abs().max() < 4 * 0.5 / 200
    )  # 4 standard errors


def test_a_gaussian_is_torchs():
    torch.manual_seed(0)
    inputs, other, actions = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 2)
    normal = (  # noqa: E731
        lambda x: torch.distributions.Independent(torch.distributions.Normal(x[:, :2], x[:, 2:].exp()), 1)
    )
    ours, theirs = DiagonalGaussian(inputs), normal(inputs)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(
        ours.kl(DiagonalGaussian(other)), torch.distributions.kl_divergence(theirs, normal(other))
    )
    drawn = DiagonalGaussian(inputs[:1].expand(40_000, 4)).sample()
    torch.testing.assert_close(drawn.mean(0), inputs[0, :2], atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.std(0), inputs[0, 2:].exp(), atol=0.1, rtol=0)


@pytest.mark.parametrize(
    "config", [PIXELS, ControlPolicyConfig((2,), 5), ControlPolicyConfig((3,), 2, discrete=False)]
)
def test_both_at_once_are_each_alone(config):
    torch.manual_seed(0)
    policy = ControlPolicy(config)
    seen = (
        torch.randint(0, 256, (3, *config.observation), dtype=torch.uint8)
        if config.pixels
        else torch.randn(3, *config.observation)
    )
    inputs, values = policy(seen)
    torch.testing.assert_close(inputs, policy.logits(seen))
    torch.testing.assert_close(values, policy.values(seen))
    assert inputs.shape == (3, config.actions * (1 if config.discrete else 2)) and values.shape == (3,)
    assert sum(len(each) for each in policy.optimized().values()) == len(list(policy.parameters()))
    actions = policy.act(seen.numpy())
    assert actions.shape == ((3,) if config.discrete else (3, config.actions))
    assert inputs.abs().max() < 0.5  # the first actions are nearly uniform, or near 0


@pytest.mark.parametrize("config", [PIXELS, ControlPolicyConfig((2,), 5)])
def test_values_keep_their_units(config):
    """The first targets set mean and deviation; later ones change them, and the network so that values
    stay."""
    torch.manual_seed(0)
    policy = ControlPolicy(config)
    seen = (
        torch.randint(0, 256, (3, *config.observation), dtype=torch.uint8)
        if config.pixels
        else torch.randn(3, *config.observation)
    )
    policy.fit_values(torch.tensor([90.0, 110.0]))
    assert (
        policy.value_mean == 100
        and abs(policy.value_unit - 200**0.5) < 1e-4
        and ((policy.values(seen) - 100).abs() < 60).all()
    )
    before = policy.values(seen)
    policy.fit_values(torch.tensor([-2000.0, 3000.0]))
    assert abs(policy.value_mean - 140) < 1e-3 and policy.value_unit > 1000
    torch.testing.assert_close(policy.values(seen), before, rtol=1e-4, atol=1e-2)
    policy.fit_values(torch.full((4,), 7.0))
    assert policy.values(seen).isfinite().all()


def test_a_checkpoint_is_what_was_saved(tmp_path):
    torch.manual_seed(0)
    policy = ControlPolicy(ControlPolicyConfig((2,), 2, discrete=False, hidden=(8,)))
    policy.save_pretrained(tmp_path)
    found = ControlPolicy.from_pretrained(tmp_path, expected=ControlPolicyConfig((2,), 2, discrete=False))
    assert (
        found.config == policy.config
        and not found.training
        and {each.name for each in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    )
    seen = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    assert np.array_equal(found.act(seen), policy.act(seen))
    with pytest.raises(UserError, match="it was trained in another environment"):
        ControlPolicy.from_pretrained(tmp_path, expected=ControlPolicyConfig((2,), 5))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "expected the description of a control policy"),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "expected the description of a control policy",
        ),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": "act_policy"})),
            "expected model_type control_policy",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "expected the weights of"),
    ],
)
def test_broken_checkpoints(break_it, message, tmp_path):
    ControlPolicy(ControlPolicyConfig((2,), 5)).save_pretrained(tmp_path)
    break_it(tmp_path)
    with pytest.raises(UserError, match=message):
        ControlPolicy.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"observation": (2, 2)},
        {"observation": (2,), "actions": 0},
        {"observation": (84, 84, 4)},
        {"observation": (2,), "hidden": ()},
    ],
)
def test_impossible_shapes(wrong):
    with pytest.raises(UserError, match="expected"):
        ControlPolicyConfig(**{"actions": 3} | wrong)
