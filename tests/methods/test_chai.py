"""CHAI by hand: what the best proposal adds, what the conservative term weighs, and what the frozen LM
proposes."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import CHAI
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense
from rl_dialog.models.policy import Policy
from rl_dialog.models.proposals import propose

Q = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])  # two heads, two replies
TARGET = (
    torch.tensor([[9.0, 9.0], [3.0, 5.0]]),
    torch.tensor([[9.0, 9.0], [4.0, 1.0]]),
)  # two proposals to each context; the lowest of the second: 3, 1
ZERO = torch.zeros(2, 2)


def outputs(q=Q, proposed=(ZERO, ZERO), random=(ZERO, ZERO)):
    return Outputs(
        Dense(torch.zeros(9, 3)),
        utterance_q=q,
        proposal_q=proposed,
        proposal_q_target=TARGET,
        random_q=random,
    )


def batch_of(make_row, truncated=False, width=1):
    batch = collate([make_row([9, 0, 1, 9, 2] + [9] * truncated, [(1, 2, 0.5), (4, 4, -1.0)], truncated)])
    batch.proposals, batch.proposal_logp = torch.zeros(2, 2, width), torch.full((2, 2), math.log(0.25))
    return batch


def test_the_target_is_the_best_of_the_lowest_proposals_to_the_next_context(make_row):
    """y = (.5 + .5 * 3, -1): the second reply ends the conversation."""
    loss = CHAI(gamma=0.5, cql_weight=0.0).loss(outputs(), batch_of(make_row))
    assert loss.total.item() == pytest.approx((2 - 1) ** 2 + (-1 - 2) ** 2 + (2 - 0) ** 2 + (-1 - 4) ** 2)
    assert loss.metrics["target"].item() == pytest.approx(2 - 1) and CHAI().terms(batch_of(make_row)) == 2


def test_a_truncated_row_says_nothing_about_its_last_reply(make_row):
    loss = CHAI(gamma=0.5, cql_weight=0.0).loss(outputs(), batch_of(make_row, truncated=True))
    assert loss.total.item() == pytest.approx((2 - 1) ** 2 + (2 - 0) ** 2)


def test_the_bootstrap_stays_inside_a_row(make_row):
    """The same two replies in two finished rows: the first one leads nowhere."""
    batch = collate([make_row([9, 0, 1], [(1, 2, 0.5)]), make_row([9, 2], [(1, 1, -1.0)])])
    batch.proposals, batch.proposal_logp = torch.zeros(2, 2, 1), torch.zeros(2, 2)
    loss = CHAI(gamma=0.5, cql_weight=0.0).loss(outputs(), batch)
    assert loss.total.item() == pytest.approx((0.5 - 1) ** 2 + (-1 - 2) ** 2 + (0.5 - 0) ** 2 + (-1 - 4) ** 2)


@pytest.mark.parametrize(
    ("density", "term"),
    [
        ("exact", math.log((2 * math.e / 0.25 + 2 * math.e**2 * 2**3) / 4)),  # H = 3: 1/q = 2^3
        (
            "original",
            math.log(2 * (math.e / 0.25) ** 0.25 + 2 * (math.e**2 * 6) ** 0.25),
        ),  # 1/q = 2H, everything to the power 1/2n
    ],
)
def test_the_conservative_term(make_row, density, term):
    """Proposals are worth 1 at p = 1/4, random features 2."""
    out = outputs(proposed=(ZERO + 1, ZERO + 1), random=(ZERO + 2, ZERO + 2))
    loss = CHAI(gamma=0.5, density=density).loss(out, batch_of(make_row, width=3))
    assert loss.metrics["cql_loss"].item() == pytest.approx(4 * term - (1 + 2 + 0 + 4), rel=1e-5)


def test_only_the_heads_learn(make_policy, make_row):
    policy = make_policy(CHAI(proposals=2)).start_training().train()
    batch = batch_of(lambda ids, *rest: make_row([70 + i for i in ids], *rest), width=32)
    policy.method.loss(policy.outputs(batch), batch).total.backward()
    assert all(p.grad is None for p in policy.lm.parameters())
    assert all(p.grad is not None and p.grad.any() for p in policy.heads.utterance_q.parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_proposals_are_what_the_lm_says_to_each_context(make_policy, make_row, family):
    """An LM that is sure of every token proposes its greedy reply: the features are the mean hidden state
    over context and reply, log p its sum."""
    policy = make_policy(CHAI(proposals=2, proposal_tokens=4), family)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight.mul_(1000)
    rows = [
        make_row([3, 70, 4, 71, 1, 3, 72, 4, 73, 1], [(3, 4, 1.0), (8, 9, 0.0)]),
        make_row([3, 80, 81, 82, 4, 83, 1], [(5, 6, 1.0)]),
    ]
    found = propose(policy, rows, eos_id=1, pad_id=0, seed=0)
    assert [each.features.shape for each in found] == [(2, 2, 32), (1, 2, 32)] and [
        each.logp.shape for each in found
    ] == [(2, 2), (1, 2)]
    contexts = [rows[0].input_ids[:3], rows[0].input_ids[:8], rows[1].input_ids[:5]]
    features, logp = (
        np.concatenate([each.features for each in found]),
        np.concatenate([each.logp for each in found]),
    )
    for context, mine, likely in zip(contexts, features, logp, strict=True):
        prompt = torch.as_tensor(np.asarray(context, np.int64))[None]
        whole = policy.lm.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=4,
            eos_token_id=1,
            pad_token_id=0,
        )
        with torch.no_grad():
            hidden = policy.lm.base_model(whole).last_hidden_state[0]
            chances = (
                policy.lm(whole)
                .logits[0]
                .log_softmax(-1)[prompt.shape[1] - 1 : -1]
                .gather(1, whole[0, prompt.shape[1] :, None])
            )
        np.testing.assert_allclose(mine, np.tile(hidden.mean(0), (2, 1)), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(likely, float(chances.sum()), atol=1e-2)


def test_the_same_seed_proposes_the_same(make_policy, make_row):
    policy = make_policy(CHAI(proposals=3, proposal_tokens=5))
    rows = [make_row([3, 70, 4, 71, 1], [(3, 4, 1.0)]), make_row([3, 72, 4, 73, 1], [(3, 4, 1.0)])]
    first, again, other = (
        propose(policy, rows, eos_id=1, pad_id=0, seed=seed)[0].features for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len(np.unique(first.round(5), axis=1)[0]) > 1  # and not three times one reply


def test_features_are_as_wide_as_the_states_that_words_are_read_from(tokenizer, make_row):
    """OPT-350m's are half as wide as its layers."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(
        "opt", vocab_size=len(tokenizer), num_attention_heads=2, do_layer_norm_before=False, **sizes, **ids
    )
    policy = Policy(AutoModelForCausalLM.from_config(config), CHAI(proposals=2, proposal_tokens=3)).eval()
    rows = [make_row([3, 70, 4, 71, 1], [(3, 4, 1.0)])]
    (found,) = propose(policy, rows, eos_id=1, pad_id=0, seed=0)
    assert found.features.shape == (1, 2, 16) and found.features.any()


def test_a_window_without_room_for_a_context(make_policy, make_row):
    with pytest.raises(
        UserError,
        match=(
            "expected proposals that leave room for a context, got 128 tokens with a model of 128 positions"
        ),
    ):
        propose(
            make_policy(CHAI(proposal_tokens=128)),
            [make_row([3, 70, 1], [(1, 2, 0.0)])],
            eos_id=1,
            pad_id=0,
            seed=0,
        )


def test_the_frozen_lm_reads_replies_without_dropout_as_it_read_its_proposals(make_policy, make_row):
    """Otherwise Q learns from states that neither the proposals nor the replies to choose from have."""
    policy = make_policy(CHAI(), dropout=0.5)
    batch = collate([make_row([9, 1, 2, 9, 5], [(1, 2, 0.5), (4, 4, 1.0)])])
    acting = policy.eval().outputs(batch).utterance_q[0]
    torch.testing.assert_close(policy.train().outputs(batch).utterance_q[0], acting)
