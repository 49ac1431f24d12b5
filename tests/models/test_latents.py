"""Latents: their divergences by torch.distributions, their noise, and the bound by quadrature."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, kl_divergence
from torch.distributions import Normal as Known

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize
from rl_dialog.methods import BC, ILQL
from rl_dialog.methods.method import Bound, Loss
from rl_dialog.models.hierarchical_trunk import Blank
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.latents import LatentTerms, Normal, latent_seed
from rl_dialog.models.policy import Policy
from rl_dialog.models.seeded_noise import derived, standard_normal

TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "eat?"},
    {"role": "assistant", "content": "tea"},
]


def test_kl_and_density_are_those_of_torch():
    one, two = (Normal(torch.randn(4, 3), torch.rand(4, 3) + 0.1) for _ in range(2))
    known = [Independent(Known(each.mean, each.variance.sqrt()), 1) for each in (one, two)]
    torch.testing.assert_close(one.kl(two), kl_divergence(*known))
    z = torch.randn(4, 3)
    torch.testing.assert_close(one.logp(z), known[0].log_prob(z))


def test_kl_by_hand():
    """KL(N(1,1) || N(0,1)) = 1/2; KL of variance 2 from 1 is (2 - 1 - ln 2) / 2 = 0.1534; at its mean a
    standard normal in two dimensions has log-density -ln 2 pi = -1.8379."""
    zero, one, two = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    assert Normal(one, one).kl(Normal(zero, one)).item() == pytest.approx(0.5)
    assert Normal(zero, two).kl(Normal(zero, one)).item() == pytest.approx(0.1534, abs=1e-4)
    standard = Normal(torch.zeros(2), torch.ones(2))
    assert standard.logp(torch.zeros(2)).item() == pytest.approx(-1.8379, abs=1e-4)


def test_noise_is_normal_and_follows_from_the_seed_alone():
    seeds = derived(torch.tensor([3]), torch.arange(20_000))
    noise = standard_normal(seeds, 3).double()  # (20000, 3)
    assert torch.equal(noise[7], standard_normal(seeds[7], 3).double())
    error = 20_000**-0.5
    assert noise.mean(0).abs().max() < 4 * error
    assert (noise.T @ noise / 20_000 - torch.eye(3)).abs().max() < 6 * error
    assert (noise**4).mean().item() == pytest.approx(3, abs=0.2)
    neighbours = (noise[1:] * noise[:-1]).mean(0)
    assert neighbours.abs().max() < 4 * error
    assert latent_seed(-5) == latent_seed(2**64 - 5) >= 0


def test_free_bits_are_free_for_each_latent():
    terms = LatentTerms(torch.tensor([0.1, 0.4, 2.0]))
    assert terms.penalty(0.0).item() == pytest.approx(2.5)
    assert terms.penalty(0.5).item() == pytest.approx(0.5 + 0.5 + 2.0)


def test_the_bound_adds_to_the_loss():
    loss = Loss(torch.tensor(5.0), {"nll": torch.tensor(4.0)})
    got = Bound(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.25)).added_to(loss)
    assert got.total.item() == 6.25
    names = {"nll": 6.0, "reconstruction": 4.0, "kl": 2.0, "bag_of_words": 0.25}
    assert {name: value.item() for name, value in got.metrics.items()} == names


def test_a_coin_for_each_word():
    """Not one for a whole time step, as the code of 2019 had it."""
    blank = Blank(4)
    nn.init.constant_(blank.vector, 9.0)
    hidden = (blank(torch.zeros(50, 40, 4), 0.25) == 9.0).all(-1).double()
    assert hidden.mean().item() == pytest.approx(0.25, abs=0.04)
    assert hidden.mean(0).min() > 0 and hidden.mean(0).max() < 0.6  # no column is dropped as a whole
    assert not blank(torch.zeros(50, 4), 0.0).any()


def policy_of(tokenizer, family, size=1, method=None, **fields) -> Policy:
    torch.manual_seed(1)
    config = ModelConfig(family=family, width=12, latent_size=size, **fields)
    policy = Policy(load_lm(config, tokenizer), method or BC(), config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return policy.eval()


class At(nn.Module):
    """A prior that is one number for each row."""

    def __init__(self, grid):
        super().__init__()
        self.grid = grid

    def forward(self, *features):
        mean = self.grid[:, None, None].expand(-1, features[0].shape[1], 1)
        return Normal(mean, torch.full_like(mean, 1e-8))


@torch.no_grad()
def test_the_bound_and_importance_sampling_by_quadrature(tokenizer):
    """One latent number: log p(reply) = log of an integral, which a grid gives. The bound is below it by
    KL(q || p(z | reply)), and log-mean-exp of importance weights is the integral."""
    policy = policy_of(tokenizer, "vhred")
    policy.lm.base_model.embedding.weight.mul_(
        0.3
    )  # or the posterior is so far off that millions must be drawn
    row = tokenize(Dialog("0", TALK[:2]), tokenizer)[0]
    grid = torch.linspace(-12, 12, 1601)
    batch = collate([row] * len(grid))
    model, prior = policy.lm.base_model, policy.lm.base_model.prior
    ends = (batch.input_ids[:1] == tokenizer.eos_token_id).nonzero()[:, 1]
    context, encoded = _features(model, row, int(ends[0]))
    model.prior = At(grid)
    log_likelihood = _sums(policy, batch, policy.outputs(batch).lm)  # (grid,)
    model.prior = prior
    p, q = prior(context, context[:, :0]), model.posterior(context, encoded, context[:, :0])
    step = grid[1] - grid[0]
    joint = log_likelihood + p.logp(grid[:, None]) + step.log()
    log_p = joint.logsumexp(0)
    density = q.logp(grid[:, None]) + step.log()
    gap = (density.exp() * (density - (joint - log_p))).sum()  # KL(q || p(z | reply))
    draws = collate([row] * 6000)
    draws.noise = derived(torch.tensor([8]), torch.arange(6000)) & (2**63 - 1)
    out = policy.outputs(draws, learning=True)
    bound = out.latents.added_to(policy.method.loss(out, draws)).total / 6000
    assert gap > 0.02
    assert -bound.item() == pytest.approx((log_p - gap).item(), abs=0.05)
    _, terms = policy._inferred(draws)
    weights = _sums(policy, draws, out.lm) + terms.importance
    assert (weights.logsumexp(0) - np.log(6000)).item() == pytest.approx(log_p.item(), abs=0.03)


def _features(model, row, end):
    """The context of the reply behind `end`, and the reply's encoding, as the posterior reads them."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64))
    _, user = model.encoder(model.embedding(ids[: end + 1])[None])
    _, reply = model.encoder(model.embedding(ids[end + 1 :])[None])
    _, context = model.context(user)
    return context[0], reply[0]


def _sums(policy, batch, scores):
    """(B,) the log-probability of each row's actions."""
    logp = -scores.nll(batch.actions)[1]
    return logp.new_zeros(len(batch.input_ids)).index_add(0, batch.rows, logp)


@torch.no_grad()
def test_only_messages_that_are_learned_have_a_kl(tokenizer):
    row = tokenize(Dialog("0", TALK), tokenizer)[0]
    batch = collate([row])
    batch.noise = torch.tensor([4])
    _, terms = policy_of(tokenizer, "vhred")._inferred(batch)
    assert len(terms.kl) == 2 and (terms.kl > 0).all()  # two replies
    _, terms = policy_of(tokenizer, "vhcr")._inferred(batch)
    assert len(terms.kl) == 2 and len(terms.every_kl) == 3  # and the conversation


@torch.no_grad()
def test_annealing_weighs_the_kl_in_training_only(tokenizer):
    batch = collate([tokenize(Dialog("0", TALK), tokenizer)[0]])
    batch.noise, batch.progress = torch.tensor([4]), 0.1
    policy = policy_of(tokenizer, "vhred", kl_annealing=0.4, bow_weight=2.0)
    shown = policy.outputs(batch, learning=True).latents
    assert shown.penalty == shown.kl and shown.words is None
    policy.train()
    learned = policy.outputs(batch, learning=True).latents
    assert learned.penalty.item() == pytest.approx(0.25 * shown.kl.item())
    hidden = policy.lm.base_model.words.weight
    assert learned.words > 0 and hidden.shape == (12, 1)


@torch.no_grad()
def test_a_new_model_gets_its_free_bits_in_the_middle_of_its_run(tokenizer):
    """Two replies with 50 nats each: none yet, half of them, all; and all at once where a model goes on."""
    batch = collate([tokenize(Dialog("0", TALK), tokenizer)[0]])
    batch.noise = torch.tensor([4])
    policy = policy_of(tokenizer, "vhred", free_bits=50.0).train()

    def penalty(progress: float) -> float:
        batch.progress = progress
        return policy.outputs(batch, learning=True).latents.penalty.item()

    assert penalty(0.3) < 20
    assert [penalty(progress) for progress in (0.5, 0.7)] == pytest.approx([50, 100])
    policy.start = "made"
    assert penalty(0.0) == pytest.approx(100)


@torch.no_grad()
def test_a_new_decoder_hears_its_context_above_its_latents(tokenizer):
    """A number of a latent moves its start and what it reads at each word less than one of the context."""
    torch.manual_seed(0)
    model = load_lm(ModelConfig(family="vhred", width=48, latent_size=16), tokenizer).base_model
    for reader in (model.start, model.reminder):
        heard, drawn = reader.weight.split([48, 16], 1)
        assert 0 < drawn.norm(dim=0).max() < 0.3 * heard.norm(dim=0).min()


def test_the_posterior_is_for_cloning_and_the_prior_for_values(tokenizer):
    batch = collate([tokenize(Dialog("0", TALK), tokenizer)[0]])
    batch.noise = torch.tensor([4])
    assert policy_of(tokenizer, "vhred").outputs(batch).latents is None
    assert policy_of(tokenizer, "vhred", method=ILQL()).outputs(batch, learning=True).latents is None
    policy = policy_of(tokenizer, "vhred").train()
    policy.outputs(batch, learning=True).lm.nll(batch.actions)[0].backward()
    assert policy.lm.base_model.prior.mean.weight.grad is None
    assert policy.lm.base_model.posterior.mean.weight.grad.abs().sum() > 0
    policy.zero_grad()
    policy.outputs(batch).lm.nll(batch.actions)[0].backward()
    assert policy.lm.base_model.posterior.mean.weight.grad is None
    assert policy.lm.base_model.prior.mean.weight.grad.abs().sum() > 0


def test_bag_of_words_by_hand(tokenizer):
    """Uniform over V words, n words: n ln V, whatever the words' levels."""
    policy = policy_of(tokenizer, "vhred", bow_weight=1.0).train()
    nn.init.zeros_(policy.lm.lm_head.weight)
    batch = collate([tokenize(Dialog("0", TALK), tokenizer)[0]])
    batch.noise = torch.tensor([4])
    words = policy.outputs(batch, learning=True).latents.words
    assert words.item() == pytest.approx(batch.decisions * np.log(len(tokenizer)), rel=1e-5)
