"""The reward model: sizes as published, Bradley-Terry by hand, members that do not know of each other, the
normaliser."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.reward_model import RewardModel, RewardModelConfig, preference_loss

ATARI = RewardModelConfig((84, 84, 4), 6, action_input="none", hidden=(64,), members=1)
DOT = RewardModelConfig((2,), 5, action_input="number", hidden=(64, 64, 64), members=1)
VECTOR = RewardModelConfig((3,), 4)
PLACES = RewardModelConfig((64, 60, 2), 3, hidden=(64,), coordinates=True)


def made(config, seed=0):
    torch.manual_seed(seed)
    return RewardModel(config).eval()


def steps(config, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if config.pixels:
        observations = torch.randint(0, 256, (n, *config.observation), dtype=torch.uint8, generator=generator)
    else:
        observations = torch.randn(n, *config.observation, generator=generator)
    actions = torch.randint(config.actions, (n,), generator=generator)
    return observations, actions if config.discrete else torch.randn(n, config.actions, generator=generator)


@pytest.mark.parametrize(("config", "parameters"), [(ATARI, 64_513), (DOT, 8_641)])
def test_sizes_of_the_original_networks(config, parameters):
    assert sum(p.numel() for p in RewardModel(config).parameters()) == parameters


@pytest.mark.parametrize(
    ("difference", "loss", "noisy", "slope", "noisy_slope"),
    [
        (0, 0.693147, 0.693147, -0.5, -0.45),
        (2, 0.126928, 0.171124, -0.119203, -0.112130),
        (-5, 5.006715, 2.881983, -0.993307, -0.106799),
    ]
    + [(-10, 10.000045, 2.994915, -0.999955, -0.000816)],
)
def test_the_loss_of_a_label_and_its_slope(difference, loss, noisy, slope, noisy_slope):
    for noise, value, gradient in ((0.0, loss, slope), (0.1, noisy, noisy_slope)):
        first = torch.tensor(float(difference), requires_grad=True)
        found = preference_loss(first, torch.zeros(()), torch.ones(()), noise=noise)
        found.backward()
        assert found.item() == pytest.approx(value, abs=2e-6)
        assert first.grad.item() == pytest.approx(gradient, abs=2e-6)


def test_the_loss_stays_finite_and_is_symmetric():
    far = torch.tensor([500.0, -500.0])
    for noise in (0.0, 0.1):
        assert preference_loss(far, torch.zeros(2), torch.tensor([0.0, 1.0]), noise=noise).isfinite().all()
        mirrored = preference_loss(torch.tensor([1.3]), torch.zeros(1), torch.tensor([0.25]), noise=noise)
        assert mirrored.item() == pytest.approx(
            preference_loss(torch.zeros(1), torch.tensor([1.3]), torch.tensor([0.75]), noise=noise).item()
        )
    assert preference_loss(torch.tensor([-500.0]), torch.zeros(1), torch.ones(1)).item() == pytest.approx(
        -math.log(0.05), abs=1e-5
    )
    tie = preference_loss(torch.zeros(1), torch.zeros(1), torch.tensor([0.5]))
    assert tie.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "config",
    [
        ATARI,
        DOT,
        VECTOR,
        RewardModelConfig((2,), 2, discrete=False),
        RewardModelConfig((48, 43, 2), 3, hidden=(64,)),
        PLACES,
    ],
)
def test_a_batch_is_its_steps_one_by_one(config):
    model, (observations, actions) = made(config), steps(config, 6)
    together = model(observations, actions)
    assert together.shape == (config.members, 6)
    alone = torch.cat([model(observations[i : i + 1], actions[i : i + 1]) for i in range(6)], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config", [VECTOR, PLACES, RewardModelConfig((48, 43, 2), 3, hidden=(64,), batchnorm=True)]
)
def test_members_do_not_know_of_each_other(config):
    """The gradient of one member's reward is zero at every other member's weights, and they begin
    differently."""
    model, (observations, actions) = made(config).train(), steps(config, 5)
    raw = model(observations, actions)
    assert (raw[0] - raw[1]).abs().min() > 0
    raw[1].sum().backward()
    for name, parameter in model.named_parameters():
        parts = parameter.grad.chunk(config.members)
        assert parts[1].abs().sum() > 0 or "bias" in name, name
        assert parts[0].abs().sum() == 0 and parts[2].abs().sum() == 0, name


def test_coordinates_are_the_mean_place_of_what_is_seen():
    convolutions = made(replace(PLACES, members=1)).convolutions
    seen = torch.zeros(1, 2, 3, 5)
    seen[0, 0, 2, 4], seen[0, 1, 1, 0] = 100.0, math.log(7.0)  # one place; 7 parts of 21
    convolutions.sharpness = torch.nn.Parameter(torch.zeros(2))
    places = convolutions._places(seen)[0]
    torch.testing.assert_close(places[0], torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(places[1], torch.tensor([-6 / 21, 0.0]))


def test_actions_count_as_configured():
    observations, _ = steps(VECTOR, 1)
    seen = {}
    for name in ("one_hot", "number", "none"):
        model = made(RewardModelConfig((3,), 4, action_input=name))
        seen[name] = [model(observations, torch.tensor([action]))[0].item() for action in range(4)]
    assert len(set(seen["one_hot"])) == 4 and len(set(seen["number"])) == 4 and len(set(seen["none"])) == 1


def test_dropout_masks_are_the_steps_own_and_off_in_eval_mode():
    model = made(RewardModelConfig((3,), 4, dropout=0.5)).train()
    observations, actions = (x.repeat(2, *[1] * (x.dim() - 1)) for x in steps(VECTOR, 1))
    training = model(observations, actions)
    assert not torch.equal(training[:, 0], training[:, 1])
    model.eval()
    one, other = model(observations, actions).unbind(1)[:2]
    torch.testing.assert_close(
        one, other, rtol=1e-5, atol=1e-6
    )  # a kernel may add up the rows of a batch in different orders


def test_returns_leave_padding_out():
    model, (observations, actions) = made(VECTOR), steps(VECTOR, 10)
    whole = model.returns(observations.view(2, 5, 3), actions.view(2, 5), torch.tensor([5, 3]))
    raw = model(observations, actions)
    torch.testing.assert_close(whole, torch.stack([raw[:, :5].sum(1), raw[:, 5:8].sum(1)], 1))


def with_rewards(raw, scale=0.05):
    """A model whose raw rewards of one step each are given # (M, N)"""
    model = made(RewardModelConfig((1,), 1, members=len(raw), scale=scale))
    model.forward = lambda observations, actions: torch.tensor(raw)[:, : len(observations)]
    return model


def normal(model, n):
    observations, actions = torch.zeros(n, 1), torch.zeros(n)
    model.fit_normaliser(observations, actions)
    return model.normalised(model(observations, actions))


def test_the_normaliser_by_hand():
    """(1, 2, 3, 4): mean 2.5, unbiased deviation 1.2909944; .05 (1 - 2.5) / 1.2909944 = -.0580948."""
    expected = torch.tensor([-0.0580948, -0.0193649, 0.0193649, 0.0580948])
    torch.testing.assert_close(normal(with_rewards([[1.0, 2.0, 3.0, 4.0]]), 4), expected)
    torch.testing.assert_close(
        normal(with_rewards([[7.0 + 3 * x for x in (1, 2, 3, 4)]]), 4), expected
    )  # no shift, no scale
    torch.testing.assert_close(
        normal(with_rewards([[1.0, 2, 3, 4], [103.0, 203, 303, 403]]), 4), expected
    )  # each member's, then the mean
    assert normal(with_rewards([[2.0, 2.0]]), 2).abs().max() == 0  # constant rewards
    assert normal(with_rewards([[3.0]]), 1).item() == 0


def test_weights_and_normaliser_are_saved_as_one(tmp_path):
    model, (observations, actions) = made(VECTOR), steps(VECTOR, 20)
    model.fit_normaliser(observations, actions)
    model.save_pretrained(tmp_path, version=3)
    found = RewardModel.from_pretrained(tmp_path)
    given = found.predict(observations.numpy(), actions.numpy())
    assert given.dtype == np.float32 and np.array_equal(
        given, model.predict(observations.numpy(), actions.numpy())
    )
    assert abs(given.mean()) < 1e-6
    with pytest.raises(UserError, match="expected the description of a reward model"):
        RewardModel.from_pretrained(tmp_path / "no")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(UserError, match="expected the weights of"):
        RewardModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "act_policy"}')
    with pytest.raises(UserError, match="expected model_type reward_model"):
        RewardModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"observation": (3, 3)},
        {"members": 0},
        {"actions": 0},
        {"dropout": 1.0},
        {"scale": 0.0},
        {"batchnorm": True},
        {"coordinates": True},
        {"hidden": ()},
    ],
)
def test_shapes_that_cannot_be(wrong):
    with pytest.raises(UserError, match="expected"):
        RewardModelConfig(**{"observation": (3,), "actions": 4} | wrong)
