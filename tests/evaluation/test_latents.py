"""Perplexity by importance sampling, KL per message and active units, against what can be worked out."""

import numpy as np
import pytest
import torch
from torch import nn

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.fqe import FQE
from rl_dialog.evaluation.held_out import HeldOut, HeldOutConfig, score_held_out
from rl_dialog.evaluation.latents import latent_figures, latent_measures
from rl_dialog.evaluation.metrics import find_pairs
from rl_dialog.evaluation.ope import Discount, all_estimates
from rl_dialog.evaluation.report import LANGUAGE
from rl_dialog.evaluation.scoring import logged_replies, score_replies
from rl_dialog.evaluation.summary import FIGURES, RunResult
from rl_dialog.methods import BC, ILQL
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.latents import latent_seeds
from rl_dialog.models.policy import Policy
from rl_dialog.models.seeded_noise import derived


def make(tokenizer, family="vhred", method=None) -> Policy:
    torch.manual_seed(2)
    config = ModelConfig(family=family, width=12, latent_size=2)
    policy = Policy(load_lm(config, tokenizer), method or BC(), config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return policy.eval()


@pytest.fixture
def logged(tokenizer):
    said = (("hello", "yes"), ("eat?", "tea, you?"), ("no", "then all is well"))
    dialogs = []
    for i in range(3):
        messages = []
        for question, reply in said[: i + 1]:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply, "reward": 1.0})
        dialogs.append(Dialog(str(i), messages))
    return logged_replies(dialogs, tokenizer, max_length=256)


def test_without_variance_the_bound_is_the_likelihood(tokenizer, logged):
    """Prior and posterior are one number: what the latents are is known, and nothing is to be sampled."""
    policy = make(tokenizer)
    model = policy.lm.base_model
    for net in (model.prior, model.posterior):
        for layer in (net.mean, net.spread):
            nn.init.zeros_(layer.weight)
        nn.init.constant_(net.mean.bias, 0.3)
        nn.init.constant_(net.spread.bias, -40.0)
    found = latent_figures(policy, logged, draws=2)
    measures = latent_measures(found, logged)
    exact = score_replies(policy, logged)  # at the prior's mean
    assert found.nll.sum() == pytest.approx(exact.nll.sum(), abs=0.02)
    assert found.tokens.sum() == exact.tokens.sum()
    perplexity = np.exp(exact.nll.sum() / exact.tokens.sum())
    assert measures["perplexity"].value == pytest.approx(perplexity, rel=1e-3)
    assert measures["kl_per_message"].value == pytest.approx(0.0, abs=1e-4)
    assert measures["active_units"].value == 0


def test_more_draws_tighten_the_bound(tokenizer, logged):
    policy = make(tokenizer, "vhcr")
    few, many = (latent_figures(policy, logged, draws=k).nll.sum() for k in (1, 200))
    assert many < few
    again = latent_figures(policy, logged, draws=1)
    assert again.nll.sum() == few  # seeds follow from the rows
    measures = latent_measures(again, logged)
    messages = sum(len(kl) for kl in again.kl)
    assert messages == len(logged.dialog) == 6
    assert measures["kl_per_message"].value == pytest.approx(sum(kl.sum() for kl in again.kl) / 6)
    variance = np.concatenate(again.means).var(0)
    assert measures["active_units"].value == (variance > 0.01).sum()


@torch.no_grad()
def test_replies_of_a_long_conversation_are_averaged_each_by_itself(tokenizer, logged):
    """Their latents know of each other only by words, so log p is a sum over replies, and so is its bound."""
    policy, row, draws = make(tokenizer), logged.rows[2], 5
    weights = []
    for k in range(draws):
        batch = collate([row])
        batch.noise = latent_seeds(derived(derived(torch.tensor([2]), 0), k))
        out, terms = policy.inferred(batch)
        logp = -out.lm.nll(batch.actions)[1]
        weights.append(torch.zeros(3).index_add(0, batch.reply, logp) + terms.importance)
    expected = -(torch.stack(weights).logsumexp(0) - np.log(draws)).sum().item()
    found = latent_figures(policy, logged, draws=draws)
    assert found.nll[2] == pytest.approx(expected, rel=1e-5)
    assert found.lm_nll[2] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_posterior_and_prior_draws_estimate_one_likelihood(tokenizer, logged):
    """A method with values draws from the prior; where its policy is the LM itself both must agree."""
    clone = make(tokenizer)
    for net in (clone.lm.base_model.prior, clone.lm.base_model.posterior):  # near each other, so few draws do
        for layer in (net.mean, net.spread):
            layer.weight.data.mul_(0.2)
            nn.init.zeros_(layer.bias)
    steered = Policy(clone.lm, ILQL(beta=0.0), ModelConfig()).eval()
    by_posterior, by_prior = (latent_figures(each, logged, draws=400) for each in (clone, steered))
    assert by_prior.nll == pytest.approx(by_posterior.nll, abs=0.4)
    assert by_prior.lm_nll == pytest.approx(by_posterior.nll, abs=0.4)
    assert "kl_per_message" not in latent_measures(by_prior, logged)


def test_estimates_that_need_a_probability_are_refused(tokenizer, logged):
    policy = make(tokenizer)
    settings = {"discount": Discount(1.0, "turn"), "fqe": FQE()}
    with pytest.raises(UserError, match="--ope wis: expected policies whose words have a probability"):
        all_estimates(("wis",), policy, score_replies(policy, logged), logged, **settings)


def test_a_report_has_them(tokenizer, tmp_path):
    """What `evaluate` measures on held-out logs of a cloned vhred."""
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes", "reward": 1.0}]
    dialogs = [Dialog(str(i), talk) for i in range(2)]
    policy = make(tokenizer)
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = RunResult("run", str(tmp_path), "bc")
    held_out = HeldOut("test", dialogs, find_pairs(dialogs), [(dialogs[0], 1)], [])
    score_held_out(result, policy, tokenizer, held_out, HeldOutConfig(max_new_tokens=4, device="cpu"))
    rows = logged_replies(dialogs, tokenizer, max_length=1024)
    expected = latent_measures(latent_figures(policy, rows), rows)
    for name in ("perplexity", "lm_perplexity", "kl_per_message", "active_units"):
        assert result.measures[name].value == pytest.approx(expected[name].value)
        assert name in LANGUAGE and name in FIGURES
    assert len(result.answers) == 1
