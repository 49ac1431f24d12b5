"""VHRL in a world where only the latent can choose: a decoder that says A behind every z > 0, B behind every
other one, and nothing else. No word has an alternative then, so words tell the worker nothing.

A earns 1. With latents N(m, s^2) and the prior's N(-1/2, 1) the optimum is that of
Phi(m / s) - c KL(N(m, s^2) || prior).
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import VHRL, Reinforce
from rl_dialog.methods.online import OnlineMethod
from rl_dialog.models.hierarchical import HierarchicalLM
from rl_dialog.models.hierarchical_config import HierarchicalConfig
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from tests.optima.test_online import END, GO, WORDS, A, B, words

START = Normal(torch.tensor(-0.5), torch.tensor(1.0))


class One:
    """One word is asked for, and A pays."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        return [{"role": "user", "content": "go"}], {}

    def step(self, reply):  # noqa: ANN001, ANN201
        said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": reply}]
        return said, float(reply == "A"), True, False, {}


@torch.no_grad()
def lm_that_says_the_sign() -> HierarchicalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": len(WORDS), "hidden_size": 8, "message_end_ids": (END,), "latent": "message"}
    lm = HierarchicalLM(HierarchicalConfig(**shape, latent_size=1))
    model = lm.model
    for module in (model.start, model.decoder, lm.lm_head):
        for parameter in module.parameters():
            parameter.zero_()
    model.start.weight[0, -1] = 1e6  # the first number of the decoder's state is the sign of z ...
    model.decoder.bias_hh_l0.chunk(3)[1].fill_(50.0)  # ... and stays it, whatever is read
    lm.lm_head.weight[A, 0], lm.lm_head.weight[B, 0] = 60.0, -60.0
    for layer, bias in ((model.prior.mean, -0.5), (model.prior.spread, 0.5413)):  # softplus(0.5413) = 1
        layer.weight.zero_()
        layer.bias.fill_(bias)
    lm.requires_grad_(False)
    model.prior.requires_grad_(True)
    return lm


def learned(method: OnlineMethod, folder: Path, rounds: int = 60) -> Normal:
    """What latents are drawn from, in the only context, after so many rounds of 128 words."""
    lm = lm_that_says_the_sign()
    policy = Policy(lm, method, ModelConfig())
    play = Rollouts(One, Decoding(max_new_tokens=1), groups=32, group_size=4, seed=0, batch_size=128)
    settings = OnlineSettings(
        max_steps=rounds, learning_rate=0.05, warmup_steps=0, eval_steps=0, value_unit=1.0, report_to="none",
        logging_steps=rounds, per_device_train_batch_size=128,
    )  # fmt: skip
    prior = Prior([copy.deepcopy(lm).requires_grad_(False)])
    OnlineTrainer(policy, words(), play, settings, folder, prior=prior).train()
    with torch.no_grad():
        state = lm(input_ids=torch.tensor([GO]), use_cache=True).past_key_values.state
        drawn = lm.model.prior(state.context)
    return Normal(drawn.mean.squeeze(), drawn.variance.sqrt().squeeze())


def chance_of_a(latent: Normal) -> float:
    return 1 - float(latent.cdf(torch.tensor(0.0)))


def optimum(c: float) -> float:
    """The chance of A under the best normal distribution, looked for on a grid."""
    m, s = torch.meshgrid(torch.linspace(-1, 6, 701), torch.linspace(0.1, 3, 291), indexing="ij")
    value = 1 - Normal(m, s).cdf(torch.tensor(0.0)) - c * kl_divergence(Normal(m, s), START)
    best = value.argmax()
    return chance_of_a(Normal(m.flatten()[best], s.flatten()[best]))


def test_the_start_says_what_was_meant(tmp_path: Path) -> None:
    assert chance_of_a(START) == pytest.approx(0.31, abs=0.01)
    assert chance_of_a(learned(Reinforce(), tmp_path, rounds=1)) == pytest.approx(0.31, abs=0.03)


@pytest.mark.parametrize("c", [0.05, pytest.param(0.4, marks=pytest.mark.slow)])
def test_the_manager_reaches_the_optimum_near_the_prior(tmp_path: Path, c: float) -> None:
    found = chance_of_a(learned(VHRL(c=c), tmp_path))
    assert found == pytest.approx(optimum(c), abs=0.04)


@pytest.mark.slow
def test_standardised_as_published_it_is_found_too(tmp_path: Path) -> None:
    method = VHRL(c=0.0, standardise=True, gamma=0.9, words="mean", baseline="none", through_latents=True)
    assert chance_of_a(learned(method, tmp_path)) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Reinforce(c=0.0), VHRL(c=0.0, learns="worker")], ids=["reinforce", "worker"]
)
def test_words_alone_tell_nothing(tmp_path: Path, method: OnlineMethod) -> None:
    assert chance_of_a(learned(method, tmp_path)) == pytest.approx(chance_of_a(START), abs=0.05)
