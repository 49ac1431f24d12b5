"""ILQL on whole replies by hand: one action is one reply, valued where it ends, in front of the value before
the next one."""

import math

import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.evaluation.generation import Decoding, generate_replies
from rl_dialog.evaluation.scoring import rank_replies
from rl_dialog.methods import UtteranceILQL
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense
from tests.optima.tabular import tabular_lm, tabular_policy, write


def leaf(values):
    return torch.as_tensor(values, dtype=torch.float32).clone().requires_grad_()


@pytest.fixture
def chain(make_row):
    """chain(truncated): <u> 1 2 <u> 0 with rewards -.5 and 2; cut off, there is one more state behind it."""

    def build(truncated=False):
        return collate(
            [make_row([9, 1, 2, 9, 0] + [9] * truncated, [(1, 2, -0.5), (4, 4, 2.0)], truncated=truncated)]
        )

    return build


def outputs(batch, v, q=((1.0, 2.0), (0.0, 3.0)), target=((5.0, 1.0), (4.0, 6.0))):
    """Q of the two replies under two heads, and of their targets; V of every state."""
    lm = leaf(torch.zeros(len(batch.states), 3))
    return Outputs(
        Dense(lm),
        v=leaf(v),
        utterance_q=tuple(map(leaf, q)),
        utterance_q_target=tuple(map(torch.tensor, target)),
    )


BARE = {"awac_weight": 0.0}


@pytest.mark.parametrize(("truncated", "last"), [(False, 2.0), (True, 2.0 + 0.9 * 8)])
def test_the_two_turn_chain(chain, truncated, last):
    """V before the replies is 1 and 4; inside the first one it is 99, which nothing reads, and 8 where a
    truncated row stops.

    y = (-.5 + .9 * 4, 2 or 2 + .9 * 8): the reward -.5 stays what it is, and a reply of two tokens is
    discounted once.
    """
    batch = chain(truncated)
    out = outputs(batch, [1.0, 99.0, 4.0] + [8.0] * truncated)
    loss = UtteranceILQL(gamma=0.9, **BARE).loss(out, batch)
    loss.total.backward()
    y = torch.tensor([-0.5 + 0.9 * 4, last])
    for head in out.utterance_q:
        torch.testing.assert_close(head.grad, 2 * (head.detach() - y))
    expected = sum((y - head).square().sum() for head in out.utterance_q)
    torch.testing.assert_close(loss.metrics["q_loss"], expected.detach())
    assert UtteranceILQL().terms(batch) == 2


def test_a_young_run_counts_all_that_a_reply_earned(make_row):
    """-.5 at each of two tokens, then 2: at first y is what followed, (-1 + .9 * 2, 2), whatever V says."""
    row = make_row([9, 1, 2, 9, 0], [(1, 2, -0.5), (4, 4, 2.0)])
    batch = collate([row], spread="every_token")
    batch.progress = 0.0
    out = outputs(batch, [1.0, 99.0, 4.0])
    loss = UtteranceILQL(gamma=0.9, **BARE).loss(out, batch)
    expected = sum((torch.tensor([0.8, 2.0]) - head).square().sum() for head in out.utterance_q)
    torch.testing.assert_close(loss.metrics["q_loss"], expected.detach())


@pytest.mark.parametrize("tau", [0.5, 0.7])
def test_v_is_the_expectile_of_the_smaller_target(chain, tau):
    """min Q' = (4, 1), V = (1, 4): x = (3, -3), L_V = tau 9 + (1 - tau) 9, and dV = (-6 tau, 6 (1 - tau)); no
    other state's V learns."""
    batch = chain()
    out = outputs(batch, [1.0, 99.0, 4.0])
    loss = UtteranceILQL(tau=tau, **BARE).loss(out, batch)
    loss.total.backward()
    assert loss.metrics["v_loss"].item() == pytest.approx(9.0)
    torch.testing.assert_close(out.v.grad, torch.tensor([-6 * tau, 0.0, 6 * (1 - tau)]))
    assert not any(value.requires_grad for value in loss.metrics.values())
    assert [loss.metrics[name].item() for name in ("q", "v", "advantage")] == [3.0, 5.0, 0.0]
    assert "reply_nll" not in loss.metrics


@pytest.mark.parametrize(
    ("beta", "weights"),
    [(0.0, (1.0, 1.0)), (0.5, (math.exp(1.5), math.exp(-1.5))), (2.0, (20.0, math.exp(-6)))],
)
def test_a_reply_is_cloned_with_one_weight(chain, beta, weights):
    """Uniform over 3 tokens: -log p is 2 log 3 and log 3. x = (3, -3): exp(beta x), at most 20, on every
    token of the reply."""
    batch = chain()
    out = outputs(batch, [1.0, 99.0, 4.0])
    method = UtteranceILQL(awac_weight=0.1, awac_beta=beta)
    loss = method.loss(out, batch)
    bare = UtteranceILQL(**BARE).loss(out, batch)
    assert (loss.total - bare.total).item() == pytest.approx(
        0.1 * math.log(3) * (2 * weights[0] + weights[1]), rel=1e-4
    )
    assert loss.metrics["reply_nll"].item() == pytest.approx(3 * math.log(3), rel=1e-5)
    loss.total.backward()
    share = torch.full((3, 3), 1 / 3) - torch.nn.functional.one_hot(batch.actions, 3)
    torch.testing.assert_close(
        out.lm.scores.grad, 0.1 * torch.tensor([weights[0], weights[0], weights[1]])[:, None] * share
    )


def test_a_batch_is_the_sum_of_its_rows(make_row):
    rows = [
        make_row([9, 1, 2, 9, 0], [(1, 2, 1.0), (4, 4, 2.0)]),
        make_row([9, 2, 9], [(1, 1, 0.5)], truncated=True),
        make_row([9, 0, 1, 2], [(1, 3, -1.0)]),
    ]
    lm, v, q, target = (
        torch.randn(8, 3),
        torch.randn(8),
        torch.randn(2, 4),
        torch.randn(2, 4),
    )  # 7 decisions, then row 1's last state

    def total(chosen, states, replies):
        out = Outputs(
            Dense(lm[states]),
            v=v[states],
            utterance_q=tuple(q[:, replies]),
            utterance_q_target=tuple(target[:, replies]),
        )
        return UtteranceILQL(awac_beta=0.5).loss(out, collate([rows[b] for b in chosen])).total

    apart = total([0], [0, 1, 2], [0, 1]) + total([1], [3, 7], [2]) + total([2], [4, 5, 6], [3])
    torch.testing.assert_close(total([0, 1, 2], list(range(8)), list(range(4))), apart)


@pytest.mark.parametrize(
    ("tau", "second", "best"),
    [(0.5, -5.333333, "A"), (0.8, -4.222222, "A"), (5 / 6, -4.0, "equal"), (0.9, -3.428571, "B")],
)
def test_the_branch_graph_flips_at_five_sixths(make_row, tau, second, best):
    """Five of eleven say A and pay 4; six say B, then one of them C and pays 2, five D and pay 6; gamma 1,
    replies of two tokens.

    V(then) = -6 + 4 w, w = tau / (tau + 5 (1 - tau)), is where L_V has no gradient, and so Q(B); A's Q is -4.
    They are equal at tau = 5/6.
    """
    rows = [make_row([9, 1, 1], [(1, 2, -4.0)])] * 5
    rows += [
        make_row([9, 2, 2, 9, *then], [(1, 2, 0.0), (4, 5, cost)])
        for then, cost in [([3, 3], -2.0)] + [([4, 4], -6.0)] * 5
    ]
    batch = collate(rows)
    then = leaf(second)
    v = torch.zeros(len(batch.states))
    at = batch.reply_starts[
        torch.tensor([6, 8, 10, 12, 14, 16])
    ]  # replies 0-4 are A's, then B and what follows in turns
    v = v.index_put((at,), then.expand(6))
    worth = torch.tensor([-4.0] * 5 + [second, -2.0] + [second, -6.0] * 5)
    out = Outputs(
        Dense(torch.zeros(len(v), 5)), v=v, utterance_q=(leaf(worth),) * 2, utterance_q_target=(worth,) * 2
    )
    UtteranceILQL(tau=tau, gamma=1.0, **BARE).loss(out, batch).total.backward()
    assert then.grad.item() == pytest.approx(0, abs=1e-4)  # V has settled ...
    assert out.utterance_q[0].grad.abs().max() < 1e-4  # ... and so has Q, which is `worth`
    assert best == ("equal" if abs(second + 4) < 1e-6 else "B" if second > -4 else "A")


# --- acting -------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "hello"}]
SHORT, LONG = (101,), (102, 103)  # token ids of the two candidates


@pytest.fixture
def chooser(tokenizer, make_row):
    """chooser(method): says SHORT with 9/10 and LONG with 1/10; their values are 1 and 2 under one head, 5
    and 2.5 under the other."""
    end = tokenizer.eos_token_id
    prompt = encode_prompt(TALK, tokenizer, max_length=64)
    rows = [
        make_row([*prompt, *reply, end], [(len(prompt), len(prompt) + len(reply), 0.0)])
        for reply in (SHORT, LONG)
    ]

    def logits(chances):
        return [math.log(chances.get(token, 1e-30)) for token in range(len(tokenizer))]

    def build(method):
        policy = tabular_policy(tabular_lm(rows, len(tokenizer)), method)
        write(policy, prompt, lm=logits({SHORT[0]: 0.9, LONG[0]: 0.1}))
        write(policy, [*prompt, LONG[0]], lm=logits({LONG[1]: 1.0}))
        for reply, values in ((SHORT, (1.0, 5.0)), (LONG, (2.5, 2.0))):
            write(policy, [*prompt, *reply], lm=logits({end: 1.0}))
            write(policy, [*prompt, *reply, end], utterance_q_target=[[value] for value in values])
        return policy.eval(), prompt

    return build


def test_replies_are_ranked_by_their_own_smaller_value(chooser, tokenizer):
    """min(1, 5) = 1 and min(2.5, 2) = 2, whatever the length; log-probabilities are log .9 and log .1."""
    policy, prompt = chooser(UtteranceILQL())
    ids = [[*reply, tokenizer.eos_token_id] for reply in (SHORT, LONG)]
    assert rank_replies(policy, [prompt] * 2, ids, by="utterance Q").tolist() == pytest.approx([1.0, 2.0])
    assert rank_replies(policy, [prompt] * 2, ids, by="log-probability").tolist() == pytest.approx(
        [math.log(0.9), math.log(0.1)], abs=1e-5
    )


@pytest.mark.parametrize(("weight", "said"), [(0.0, LONG), (0.4, LONG), (0.5, SHORT)])
def test_it_says_the_best_of_what_it_draws(chooser, tokenizer, weight, said):
    """2 + w log .1 against 1 + w log .9: equal at w = 1 / log 9 = .455. Of 32 draws, 1/10 each, one at least
    is LONG but for .9^32 = .03."""
    policy, _ = chooser(UtteranceILQL(num_generations=32, rerank_log_prob_weight=weight))
    (reply,) = generate_replies(policy, tokenizer, [TALK], Decoding(max_new_tokens=4), seeds=[0])
    assert reply.tokens == said and reply.finished


def test_one_draw_is_the_language_model_s(chooser, tokenizer):
    """Settings that ask for one reply get one, and greedy decoding has only one to choose from."""
    policy, _ = chooser(UtteranceILQL(num_generations=32))
    one = [
        generate_replies(
            policy, tokenizer, [TALK], Decoding(max_new_tokens=4, num_generations=1), seeds=[seed]
        )[0]
        for seed in range(10)
    ]
    assert sum(reply.tokens == SHORT for reply in one) >= 7
    assert (
        generate_replies(policy, tokenizer, [TALK], Decoding(max_new_tokens=4, do_sample=False), seeds=[0])[
            0
        ].tokens
        == SHORT
    )


def test_what_it_needs():
    heads = UtteranceILQL.heads
    assert (heads.q, heads.utterance_q, heads.v, heads.target) == (
        0,
        2,
        True,
        False,
    ) and UtteranceILQL.plain_lm
    lm = torch.randn(2, 3)
    assert torch.equal(UtteranceILQL().decode(Outputs(Dense(lm))), lm)
