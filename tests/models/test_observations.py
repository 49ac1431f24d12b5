"""Observations of unknown units, centred and compressed."""

import json
import math

import numpy as np
import pytest
import torch

from rl_dialog.models.control_policy import ControlPolicy, ControlPolicyConfig
from rl_dialog.models.observations import RunningScale
from rl_dialog.models.reward_model import RewardModel, RewardModelConfig


def test_statistics_run():
    """Of all that came, in whatever parts; z = asinh((o - mean) / deviation)."""
    seen = torch.from_numpy(np.random.default_rng(0).normal([5, -300], [2, 100], (50, 2))).float()
    whole, parts = RunningScale(2), RunningScale(2)
    whole.add(seen)
    for part in seen.split([1, 9, 40]):
        parts.add(part)
    torch.testing.assert_close(parts.mean, seen.mean(0))
    torch.testing.assert_close(parts.variance, seen.var(0, unbiased=False), rtol=1e-4, atol=0)
    torch.testing.assert_close(parts(seen), whole(seen), rtol=1e-4, atol=1e-5)
    expected = torch.asinh((seen - seen.mean(0)) / seen.std(0, unbiased=False))
    torch.testing.assert_close(whole(seen), expected)
    whole.replace(seen[:2])
    torch.testing.assert_close(whole.mean, seen[:2].mean(0))


def test_it_takes_observations_of_another_device():
    """What was sampled on the CPU, to where the network is: here torch's `meta`, which every machine has."""
    scale = RunningScale(2).to("meta")
    scale.add(torch.zeros(5, 2))
    assert scale.mean.device.type == "meta" and scale(torch.zeros(3, 2, device="meta")).shape == (3, 2)


def test_what_never_varies_and_what_is_huge_is_finite():
    scale = RunningScale(2)
    scale.add(torch.tensor([[3.0, 1.0], [3.0, -1.0]]))
    z = scale(torch.tensor([[3.0, 1e8]]))
    assert z[0, 0] == 0 and 18 < z[0, 1] < 20


def test_a_number_whose_square_is_none_is_taken_for_the_largest():
    """3e38, of a sensor that sees nothing, is finite; its square is not."""
    scale = RunningScale(1, scales=2)
    scale.add(torch.tensor([[3e38], [0.0], [-3e38], [0.0]] * 100))
    seen = torch.tensor([[3e38], [0.0]], requires_grad=True)
    found = scale(seen)
    found.sum().backward()
    assert scale.mean.isfinite() and scale.variance.isfinite() and seen.grad.isfinite().all()
    assert found[0, 0].item() == pytest.approx(math.asinh(math.sqrt(2)), rel=1e-4)
    assert found[1].tolist() == [0, 0]


def test_what_slides_off_hides_nothing_at_the_second_scale():
    """A fall is nine tenths of what was seen, and sets the deviation; before it little matters."""
    fallen, standing = torch.linspace(-60, 60, 900)[:, None], torch.linspace(-0.2, 0.2, 100)[:, None]
    one, two = RunningScale(1), RunningScale(1, scales=2)
    for scale in (one, two):
        scale.add(torch.cat([fallen, standing]))
    apart = [each(torch.tensor([[0.0], [0.2]])).diff(dim=0).abs().max() for each in (one, two)]
    assert apart[0] < 0.01 and apart[1] > 0.19
    z = two(standing)
    assert z.shape == (100, 2)
    torch.testing.assert_close(z[:, :1], one(standing))
    torch.testing.assert_close(z[:, 1:], torch.asinh(standing))


def test_networks_of_two_scales_and_of_before_there_were_two(tmp_path):
    """Saved and loaded; a folder that says nothing of scales has one."""
    seen, actions = torch.randn(5, 3), torch.zeros(5)
    for kind, config in ((ControlPolicy, ControlPolicyConfig), (RewardModel, RewardModelConfig)):
        for scales in (1, 2):
            network = kind(config((3,), 2, normalise_observations=True, scales=scales)).eval()
            folder = tmp_path / f"{kind.__name__}{scales}"
            network.save_pretrained(folder)
            path = folder / "config.json"
            shape = {name: value for name, value in json.loads(path.read_text()).items() if name != "scales"}
            if scales == 1:
                path.write_text(json.dumps(shape))
            loaded = kind.from_pretrained(folder)
            assert loaded.config.scales == scales
            inputs = (seen,) if kind is ControlPolicy else (seen, actions)
            torch.testing.assert_close(loaded(*inputs), network(*inputs))


def test_networks_that_see_through_it(tmp_path):
    """The same numbers in other units are the same to a policy and to a reward model that have seen such
    ones, also after they were saved."""
    seen = torch.randn(64, 3)
    for unit in (1.0, 1000.0):
        torch.manual_seed(0)
        policy = ControlPolicy(ControlPolicyConfig((3,), 2, normalise_observations=True))
        policy.fit_observations(seen * unit)
        policy.save_pretrained(tmp_path / f"policy{unit}")
        torch.manual_seed(0)
        reward = RewardModel(RewardModelConfig((3,), 2, normalise_observations=True))
        reward.observations.add(seen * unit)
        reward.save_pretrained(tmp_path / f"reward{unit}")
    policies = [ControlPolicy.from_pretrained(tmp_path / f"policy{unit}") for unit in (1.0, 1000.0)]
    rewards = [RewardModel.from_pretrained(tmp_path / f"reward{unit}") for unit in (1.0, 1000.0)]
    actions = torch.zeros(64)
    torch.testing.assert_close(policies[0].logits(seen), policies[1].logits(seen * 1000))
    torch.testing.assert_close(rewards[0](seen, actions), rewards[1](seen * 1000, actions))


def test_a_reward_model_of_before_is_confirmed():
    model = RewardModel(RewardModelConfig((3,), 2))
    state = {name: value for name, value in model.state_dict().items() if name != "confirmed"}
    model.confirmed.fill_(0.25)
    model.load_state_dict(state)
    assert model.confirmed == 1


def test_actions_are_cut_as_the_environment_cuts_them():
    model = RewardModel(RewardModelConfig((1,), 1, discrete=False, action_limit=1.0))
    seen = torch.zeros(3, 1)
    far, near = torch.tensor([[-5.0], [0.5], [7.0]]), torch.tensor([[-1.0], [0.5], [1.0]])
    torch.testing.assert_close(model(seen, far), model(seen, near))
