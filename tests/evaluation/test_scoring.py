"""Perplexity, divergence and critic scores against known answers and against the plain, unchunked
computation."""

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation import scoring
from rl_dialog.evaluation.scoring import (
    critic_scores,
    held_out_measures,
    kl_divergence,
    logged_replies,
    rank_replies,
    score_replies,
    token_table,
)
from rl_dialog.methods import BC, ILQL, Psi, UtteranceILQL, WayOffPolicy
from rl_dialog.models.prior import Prior

DIALOGS = [
    Dialog("a", [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "thank you"}]),
    Dialog(
        "b",
        [
            {"role": "user", "content": "what would you like?"},
            {"role": "assistant", "content": "tea"},
            {"role": "user", "content": "that is all"},
            {"role": "assistant", "content": "hello there, how are you?"},
        ],
    ),
]


@pytest.fixture
def logged(tokenizer):
    return logged_replies(DIALOGS, tokenizer, max_length=128)


def test_kl_of_a_known_pair():
    pi, p = torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.tensor([[0.7, 0.2, 0.1]]).log()
    expected = 0.2 * np.log(2 / 7) + 0.3 * np.log(3 / 2) + 0.5 * np.log(5)
    assert kl_divergence(pi, p).item() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.6758, abs=1e-4)
    cut = torch.tensor([[0.4, 0.6, 0.0]]).log()
    assert kl_divergence(cut, p).item() == pytest.approx(0.4 * np.log(4 / 7) + 0.6 * np.log(3))


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(make_policy, logged):
    policy = make_policy(BC())
    torch.nn.init.zeros_(policy.get_output_embeddings().weight)
    found = held_out_measures(score_replies(policy, logged), logged)
    size = len(policy.get_output_embeddings().weight)
    assert found["perplexity"].value == pytest.approx(size, rel=1e-5)
    assert found["lm_perplexity"].value == pytest.approx(size, rel=1e-5)
    assert "kl" not in found


@pytest.mark.parametrize("elements", [1, 1000, 1 << 30], ids=["state by state", "chunks", "at once"])
@pytest.mark.parametrize("heads", ["mlp", "lowrank"])
def test_scores_equal_the_plain_computation(make_policy, logged, heads, elements, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", elements)
    policy, prior = make_policy(ILQL(beta=2.0), heads=heads), make_policy(BC(), seed=1).lm
    found = score_replies(policy, logged, prior=Prior([prior]), tokens_per_batch=40)
    reply = 0
    for row in logged.rows:
        ids = torch.as_tensor(row.input_ids.astype(np.int64))[None]
        batch = collate([row])
        with torch.no_grad():
            log_pi, log_p, log_lm = (
                logits[0].log_softmax(-1)
                for logits in (policy(ids).logits, prior(ids).logits, policy.lm(ids).logits)
            )
            out = policy.outputs(batch)
            q = torch.minimum(out.q_target[0].at(batch.actions), out.q_target[1].at(batch.actions))
        first = 0
        for end in row.reply_ends:
            where = [t for t in range(first, end) if row.assistant[t + 1]]
            action = [int(row.input_ids[t + 1]) for t in where]
            inside = [
                i for i, state in enumerate(batch.states[: batch.decisions].tolist()) if first <= state < end
            ]
            assert found.tokens[reply] == len(where) == len(inside)
            assert found.nll[reply] == pytest.approx(
                -sum(log_pi[t, a].item() for t, a in zip(where, action, strict=True)), rel=1e-4
            )
            assert found.lm_nll[reply] == pytest.approx(
                -sum(log_lm[t, a].item() for t, a in zip(where, action, strict=True)), rel=1e-4
            )
            assert found.kl[reply] == pytest.approx(
                sum((log_pi[t].exp() * (log_pi[t] - log_p[t])).sum().item() for t in where), rel=1e-3
            )
            assert found.q[reply] == pytest.approx(q[inside].sum().item(), rel=1e-4)
            assert found.q_last[reply] == pytest.approx(q[inside[-1]].item(), rel=1e-4)
            assert found.advantage[reply] == pytest.approx(
                (q - out.v[: len(q)])[inside].sum().item(), rel=1e-4, abs=1e-5
            )
            first, reply = end, reply + 1
    assert reply == len(found.nll) == 3


def test_what_the_divergence_is_measured_against(make_policy, logged):
    steered = score_replies(make_policy(ILQL(beta=2.0)), logged)  # its own LM
    assert (steered.kl > 0).all()
    still = score_replies(make_policy(ILQL(beta=0.0)), logged)
    assert np.allclose(still.kl, 0, atol=1e-4)
    assert np.allclose(still.nll, still.lm_nll)
    plain = score_replies(make_policy(BC()), logged)
    assert np.isnan(plain.kl).all()
    assert plain.kl_missing == "the checkpoint names no frozen prior"
    same = make_policy(BC())
    assert np.allclose(score_replies(same, logged, prior=Prior([same.lm])).kl, 0, atol=1e-5)


def test_each_method_is_ranked_by_what_it_has(make_policy, logged):
    ways = {
        method: list(critic_scores(score_replies(make_policy(method), logged)))
        for method in (BC(), WayOffPolicy(), ILQL())
    }
    assert ways[BC()][0] == "mean log-probability"
    assert ways[WayOffPolicy()][0] == ways[ILQL()][0] == "mean Q"
    assert "mean Q - V" not in ways[WayOffPolicy()]


def test_units_are_dialogs(make_policy, logged):
    scores = score_replies(make_policy(ILQL()), logged)
    found = held_out_measures(scores, logged)
    assert found["perplexity"].denominator.tolist() == [scores.tokens[0], scores.tokens[1] + scores.tokens[2]]
    assert found["kl_per_reply"].denominator.tolist() == [1, 2]


def test_tokens_outside_the_support_make_the_perplexity_infinite(make_policy, logged):
    found = held_out_measures(score_replies(make_policy(ILQL(top_k=1)), logged), logged)
    assert found["perplexity"].value == np.inf
    assert np.isfinite(found["lm_perplexity"].value)
    assert np.isfinite(found["kl"].value)


def test_the_table_of_tokens_adds_up_to_the_scores(make_policy, logged):
    policy, prior = make_policy(ILQL()), make_policy(BC(), seed=1).lm
    row = logged.rows[0]
    ids = row.input_ids.tolist()
    first = row.assistant.tolist().index(True)
    table = token_table(policy, Prior([prior]), ids[:first], ids[first:])
    scores = score_replies(policy, logged, prior=Prior([prior]))
    assert [line["token"] for line in table] == ids[first:]
    assert sum(line["policy"] for line in table) == pytest.approx(-scores.nll[0], rel=1e-5)
    assert sum(line["q"] for line in table) == pytest.approx(scores.q[0], rel=1e-5)
    assert sum(line["q"] - line["v"] for line in table) == pytest.approx(scores.advantage[0], rel=1e-4)
    assert token_table(make_policy(BC()), None, ids[:first], ids[first:])[0] | {"lm": 0, "policy": 0} == {
        "token": ids[first], "q": None, "v": None, "advantage": None, "prior": None, "lm": 0, "policy": 0,
    }  # fmt: skip


# --- ranking replies ----------------------------------------------------------------------------------------

PROMPTS = [[3, 90, 91, 1, 4], [3, 92, 4], [3, 92, 4]]
REPLIES = [[70, 71, 1], [72, 1], [73, 74, 75, 76, 1]]


@pytest.mark.parametrize("elements", [1, 1 << 30], ids=["state by state", "at once"])
def test_ways_to_rank_replies(make_policy, elements, monkeypatch):
    """Each way from plain forward passes: Q' the smaller target at each token, V of the state before it, log
    pi of what is sampled from."""
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", elements)
    policy = make_policy(ILQL(beta=2.0))
    expected = {
        way: []
        for way in (
            "mean Q",
            "last-token Q",
            "mean Q - V",
            "sum of Q - V",
            "last V",
            "mean log-probability",
            "log-probability",
        )
    }
    for prompt, reply in zip(PROMPTS, REPLIES, strict=True):
        ids = torch.tensor([prompt + reply])
        with torch.no_grad():
            hidden = policy.lm.base_model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            q = torch.minimum(*(head(hidden, None).dense() for head in policy.heads.q_target)).gather(
                1, torch.tensor(reply)[:, None]
            )[:, 0]
            v = policy.heads.v(hidden)
            logp = (
                policy(ids)
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
                .gather(1, torch.tensor(reply)[:, None])[:, 0]
            )
        values = (q.mean(), q[-1], (q - v).mean(), (q - v).sum(), v[-1], logp.mean(), logp.sum())
        for way, value in zip(expected, values, strict=True):
            expected[way].append(value.item())
    for way, values in expected.items():
        assert rank_replies(policy, PROMPTS, REPLIES, by=way).tolist() == pytest.approx(
            values, rel=1e-4, abs=1e-5
        ), way


def test_a_reply_s_own_value_ranks_it(make_policy):
    """Where a method has one, it is the critic: the smaller target head at the reply's last token, alone or
    among others."""
    policy = make_policy(UtteranceILQL())
    expected = []
    for prompt, reply in zip(PROMPTS, REPLIES, strict=True):
        with torch.no_grad():
            last = policy.lm.base_model(torch.tensor([prompt + reply])).last_hidden_state[:, -1]
            expected.append(min(head(last).item() for head in policy.heads.utterance_q_target))
    assert rank_replies(policy, PROMPTS, REPLIES, by="utterance Q").tolist() == pytest.approx(
        expected, rel=1e-4, abs=1e-5
    )
    assert rank_replies(policy, PROMPTS[2:], REPLIES[2:], by="utterance Q").tolist() == pytest.approx(
        expected[2:], rel=1e-4, abs=1e-5
    )


def test_logged_replies_have_their_own_values(make_policy, logged):
    found = critic_scores(score_replies(make_policy(UtteranceILQL()), logged))
    assert (
        list(found)[0] == "utterance Q"
        and "mean Q" not in found
        and len(set(found["utterance Q"].tolist())) == 3
    )


def test_a_way_that_the_policy_does_not_have(make_policy):
    with pytest.raises(
        UserError,
        match=(
            "cannot rank replies by 'mean Q': expected one of 'mean log-probability', 'log-probability', "
            "which is what"
        ),
    ):
        rank_replies(make_policy(BC()), PROMPTS, REPLIES, by="mean Q")


@pytest.mark.parametrize("method", [ILQL(), Psi(), UtteranceILQL()])
def test_values_are_reported_in_units_of_reward(make_policy, logged, method):
    """A checkpoint whose unit of value is 3 rewards says 3 times what its heads say, and acts no
    differently."""
    policy = make_policy(method)
    plain = score_replies(policy, logged)
    policy.value_unit = 3.0
    scaled = score_replies(policy, logged)
    for name in ("q", "q_last", "advantage", "v_last", "utterance_q"):
        np.testing.assert_allclose(getattr(scaled, name), 3 * getattr(plain, name), rtol=1e-6)
    np.testing.assert_array_equal(scaled.nll, plain.nll)
