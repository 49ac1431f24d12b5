"""The fast layers compute what the layers they replace compute."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import NewGELUActivation

from rl_dialog.models.cpu_layers import Dropout, TanhGELU, attention, speed_up


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
    assert torch.autograd.gradcheck(
        TanhGELU(), torch.linspace(-4, 4, 33, dtype=torch.float64, requires_grad=True)
    )


@pytest.mark.parametrize("shape", [(), (3,), (7, 5, 1), (1000, 1000)])
def test_dropout_drops_its_share_and_keeps_the_mean(shape):
    torch.manual_seed(0)
    layer, x = Dropout(0.1), torch.ones(shape, requires_grad=True)
    y = layer(x)
    kept = round(0.9 * 2**16) / 2**16
    assert torch.equal(y, torch.where(y > 0, 1 / kept, 0.0))
    y.sum().backward()
    assert torch.equal(x.grad, y)  # no gradient through what was dropped
    if x.numel() > 10:
        for part in (
            y.flatten()[i::4] for i in range(4)
        ):  # four numbers share a word: all of them are random
            assert abs(float((part > 0).float().mean()) - 0.9) < 5 * (0.09 / part.numel()) ** 0.5
    torch.manual_seed(0)
    assert torch.equal(layer(x), y)
    assert not x.numel() > 10 or not torch.equal(layer(x), y)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("p", [0.0, 1e-9, 1.0])
def test_dropout_of_nothing_and_of_all(p):
    assert torch.equal(Dropout(p)(torch.ones(9)), torch.full((9,), float(p < 1)))


def test_attention_that_drops_nothing_is_sdpa_and_otherwise_has_its_mean():
    torch.manual_seed(0)
    module, shape = SimpleNamespace(is_causal=True), (2, 3, 5, 4)
    q, k, v = (torch.randn(shape) for _ in range(3))
    padded = torch.ones(5, 5, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    padded[1, :, 1:, 0] = False
    for mask in (None, padded):
        expected, _ = attention(module, q, k, v, mask, scaling=0.3)
        got, _ = attention(
            module, q, k, v, mask, dropout=1e-9, scaling=0.3
        )  # so small a share that no number is dropped
        assert torch.allclose(got, expected, atol=1e-6)
        mean = torch.stack(
            [attention(module, q, k, v, mask, dropout=0.3, scaling=0.3)[0] for _ in range(2000)]
        ).mean(0)
        assert torch.allclose(mean, expected, atol=0.1)


def test_attention_that_drops_works_in_bfloat16():
    """Rotary positions leave a llama's queries in float32, whose products are then bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=11, attention_dropout=0.3, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    speed_up(model)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model.eval()(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            every = torch.stack([model.train()(ids).logits.float() for _ in range(300)])
    assert every.std(0).max() > 0 and torch.allclose(every.mean(0), expected, atol=0.02)


def test_every_dropout_of_gpt2_is_replaced_and_the_eval_output_stays():
    drop = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    config = AutoConfig.for_model("gpt2", vocab_size=11, n_layer=2, n_head=2, n_embd=8, n_positions=8, **drop)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
        speed_up(model)
        assert torch.allclose(model(ids).logits, expected, atol=1e-6)
        model.train()
        torch.manual_seed(0)
        one, other = model(ids).logits, model(ids).logits
        assert not torch.equal(one, other)
        torch.manual_seed(0)
        assert torch.equal(model(ids).logits, one)
    assert not any(type(m) is torch.nn.Dropout for m in model.modules())
