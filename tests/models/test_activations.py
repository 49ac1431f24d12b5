"""The fast GELU is GPT-2's GELU."""

import torch
from transformers.activations import NewGELUActivation

from rl_dialog.models.activations import TanhGELU


def test_values_and_gradients_are_those_of_transformers():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-8, -1e4, 1e4])]).double()
    outer = torch.randn(len(x), generator=torch.Generator().manual_seed(0)).double()
    found = []
    for activation in (NewGELUActivation(), TanhGELU()):
        leaf = x.clone().requires_grad_()
        activation(leaf).backward(outer)
        found.append((activation(leaf).detach(), leaf.grad))
    for expected, got in zip(*found, strict=True):
        assert torch.allclose(got, expected, atol=1e-12)


def test_it_passes_the_numerical_gradient_check():
    assert torch.autograd.gradcheck(TanhGELU(), torch.linspace(-4, 4, 33, dtype=torch.float64, requires_grad=True))
