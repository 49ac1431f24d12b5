"""The frozen prior, one model or the weighted average of several, against plain probabilities."""

import math

import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, UtteranceILQL, WayOffPolicy
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior


@pytest.fixture
def lms(make_policy):
    """Three models of one vocabulary, of both families."""
    return [make_policy(BC(), family, seed=seed).lm for seed, family in enumerate(("gpt2", "llama", "gpt2"))]


@pytest.fixture
def batch(make_row):
    """A finished row of four decisions and a truncated one of two."""
    return collate(
        [
            make_row([3, 70, 4, 71, 72, 73, 1], [(3, 6, 1.0)]),
            make_row([3, 4, 80, 81, 3], [(2, 3, 0.0)], truncated=True),
        ]
    )


@torch.no_grad()
def probabilities(lm, batch):
    """(S, V) of a plain forward pass."""
    return lm(batch.input_ids).logits.softmax(-1).flatten(0, 1)[batch.states]


def test_a_single_model_is_its_own_average(lms, batch):
    prior = Prior(lms[:1])
    assert prior.weights == (1.0,) and prior.vocabulary == lms[0].config.vocab_size
    torch.testing.assert_close(
        prior.prior_scores(batch).dense().softmax(1), probabilities(lms[0], batch), rtol=1e-4, atol=1e-6
    )
    expected = probabilities(lms[0], batch)[torch.arange(6), batch.actions].log()
    torch.testing.assert_close(prior.prior_logp(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((), (1 / 3, 1 / 3, 1 / 3)),
        ((1.0, 2.0, 5.0), (0.125, 0.25, 0.625)),
        ((1e-6, 1e-6, 1.0), (0.0, 0.0, 1.0)),
    ],
)
def test_probabilities_are_averaged_and_not_logits(lms, batch, weights, shares):
    prior = Prior(lms, weights)
    expected = sum(share * probabilities(lm, batch) for share, lm in zip(shares, lms, strict=True))
    torch.testing.assert_close(prior.prior_scores(batch).dense().softmax(1), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        prior.prior_logp(batch), expected[torch.arange(6), batch.actions].log(), rtol=1e-3, atol=1e-2
    )


def test_a_model_averaged_with_itself_is_that_model(lms, batch):
    """Level and all: the log-sum-exp of the logits is what way_off_policy takes for the origin of Q."""
    one, twice = (Prior([lms[1]] * times, (3.0, 1.0)[:times]).prior_scores(batch) for times in (1, 2))
    assert one.reduce("logsumexp").abs().min() > 1
    torch.testing.assert_close(twice.dense(), one.dense(), rtol=1e-5, atol=1e-5)
    for how in ("logsumexp", "max"):
        torch.testing.assert_close(twice.reduce(how), one.reduce(how), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(twice.at(batch.actions), one.at(batch.actions), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(twice.rows(slice(2, 4)).dense(), one.dense()[2:4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(twice.nll(batch.actions)[1], one.nll(batch.actions)[1], rtol=1e-5, atol=1e-5)


def test_weights_are_normalised_as_published(make_policy):
    """The six of the 2019 code: 3.125 / 16.7016 = .1871 and so on."""
    lm = make_policy(BC()).lm
    prior = Prior([lm] * 6, (3.125, 3.0476, 2.9130, 2.5476, 2.5417, 2.5294))
    assert prior.weights == pytest.approx((0.1871, 0.1824, 0.1744, 0.1525, 0.1522, 0.1514), abs=5e-5)
    assert sum(prior.weights) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "weights", [(1.0, 2.0), (1.0, 2.0, 0.0), (1.0, 2.0, -1.0), (1.0, math.nan, 1.0), (1.0, math.inf, 1.0)]
)
def test_weights_that_make_no_sense(lms, weights):
    with pytest.raises(UserError, match="expected a positive weight for each of the prior's 3 models, got"):
        Prior(lms, weights)


def test_models_of_another_vocabulary_are_refused(lms):
    size = lms[1].config.vocab_size
    lms[1].resize_token_embeddings(size - 3)
    with pytest.raises(
        UserError, match=rf"expected models of one vocabulary to average, got \[{size - 3}, {size}\] tokens"
    ):
        Prior(lms)


def test_it_is_frozen_and_has_no_dropout(make_policy, batch):
    lm = make_policy(BC(), dropout=0.5).lm.train()
    prior = Prior([lm])
    assert not any(p.requires_grad for p in prior.parameters()) and not any(
        module.training for module in prior.modules()
    )
    assert torch.equal(prior.prior_logp(batch), prior.prior_logp(batch))
    assert not prior.prior_scores(batch).dense().requires_grad


def test_a_policy_with_adapters_is_its_own_prior(make_policy, batch):
    """The same two questions, answered by the LM without its adapters, also in training mode."""
    policy, plain = make_policy(WayOffPolicy(), peft=True, dropout=0.5), make_policy(WayOffPolicy())
    policy.train()
    prior = Prior([plain.lm])
    torch.testing.assert_close(policy.prior_logp(batch), prior.prior_logp(batch), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        policy.prior_scores(batch).dense(), prior.prior_scores(batch).dense(), rtol=1e-4, atol=1e-4
    )
    assert policy.lm.training


@pytest.mark.parametrize("method", [BC(), UtteranceILQL(), WayOffPolicy()])
def test_a_target_trunk_that_nobody_would_read_is_refused(tokenizer, method):
    shape = ModelConfig(layers=1, width=16, attention_heads=2, context=32, target_trunk="separate")
    with pytest.raises(UserError, match="has no target heads on tokens: expected target_trunk shared"):
        Policy(load_lm(shape, tokenizer), method, shape)
