"""DPO by hand: which pairs there are, and what a pair's loss pulls."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import DPO
from rl_dialog.methods.dpo import replies
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense

LOG_2 = math.log(2)


def test_replies_that_differ_by_rounding_are_no_pair(make_row):
    """Means of .1 and .3, and .2, in float32; and .6 is above .1 by no more than a half."""

    def rows(*said):
        return [make_row([9, token], [(1, 1, np.float32(reward))]) for token, reward in said]

    level = rows((1, 0.1), (1, 0.3), (2, 0.2))
    with pytest.raises(UserError, match="two different replies of different reward"):
        mined(DPO(by="reply"), level)
    found, _ = mined(
        DPO(by="reply", margin=0.5),
        [*rows((1, 0.6), (2, 0.1)), make_row([8, 1], [(1, 1, 1.0)]), make_row([8, 2], [(1, 1, 0.0)])],
    )
    assert len(found) == 1
    high, _ = mined(DPO(by="reply"), rows((1, 1e6), (2, 1e6 + 1)))
    assert len(high) == 1


def mined(method, rows, validation=()):
    """[(better reply, its reward, worse reply, its reward)] of the training split, and the validation split's
    number of pairs."""
    train, other = method.prepare(rows, list(validation), None)
    assert len(train) % 2 == len(other) % 2 == 0
    found = []
    for better, worse in zip(train[0::2], train[1::2], strict=True):
        sides = []
        for row in (better, worse):
            first = row.assistant.tolist().index(True)
            assert row.assistant[first:].all() and row.reply_ends.tolist() == [
                len(row.input_ids) - 1
            ]  # one reply, and the row ends with it
            sides += [tuple(row.input_ids[first:].tolist()), float(row.rewards[0])]
        assert (
            better.input_ids[: better.assistant.argmax()].tolist()
            == worse.input_ids[: worse.assistant.argmax()].tolist()
        )
        found.append(tuple(sides))
    return found, len(other) // 2


# --- pairs --------------------------------------------------------------------------------------------------


def test_a_pair_is_one_context_and_two_replies_of_different_reward(make_row):
    """Contexts 9 (three replies, one of them twice) and 8 (one reply): the pairs are those of context 9, the
    widest first."""
    rows = [
        make_row([9, 1], [(1, 1, 0.0)]),
        make_row([9, 2, 2], [(1, 2, 3.0)]),
        make_row([9, 3], [(1, 1, 1.0)]),
        make_row([9, 1], [(1, 1, 9.0)]),  # the same reply again: 4.5 on average
        make_row([8, 4], [(1, 1, 5.0)]),
    ]
    assert mined(DPO(), rows) == (
        [((1,), 4.5, (3,), 1.0), ((2, 2), 3.0, (3,), 1.0), ((1,), 4.5, (2, 2), 3.0)],
        0,
    )


def test_the_context_is_all_that_was_said_before(make_row):
    """The second replies (5 and 6) follow different first ones, so only the first replies make a pair; its
    rows end with them."""
    rows = [
        make_row([9, 1, 9, 5], [(1, 1, 0.0), (3, 3, 2.0)]),
        make_row([9, 2, 9, 6], [(1, 1, 1.0), (3, 3, 0.0)]),
    ]
    assert mined(DPO(by="reply"), rows)[0] == [((2,), 1.0, (1,), 0.0)]
    for method in (DPO(by="to_go"), DPO()):
        assert mined(method, rows)[0] == [((1,), 2.0, (2,), 1.0)]  # 0 + 2 against 1 + 0


def test_two_replies_without_a_token_between_them_are_two(make_row):
    """To 9 the replies 1 and 2; behind 9 and 1, which the second reply follows at once, 5 and 6."""
    rows = [
        make_row([9, 1, 5], [(1, 1, 0.0), (2, 2, 2.0)]),
        make_row([9, 1, 6], [(1, 1, 0.0), (2, 2, 3.0)]),
        make_row([9, 2, 2, 7], [(1, 2, 1.0), (3, 3, 0.0)]),
    ]
    assert mined(DPO(by="reply"), rows)[0] == [((2, 2), 1.0, (1,), 0.0), ((6,), 3.0, (5,), 2.0)]


def test_what_nobody_rated_is_in_no_pair(make_row):
    """To 9: replies 1 (?, then 4), 2 (1) and 3 (?, then ?). An unrated reply takes no part in a mean."""
    nan = float("nan")
    rows = [
        make_row([9, 1, 9, 5], [(1, 1, nan), (3, 3, 4.0)]),
        make_row([9, 2], [(1, 1, 1.0)]),
        make_row([9, 3, 9, 5], [(1, 1, nan), (3, 3, nan)]),
    ]
    with pytest.raises(UserError, match="found none in the training split"):
        DPO(by="reply").prepare(rows, [], None)
    assert mined(DPO(by="to_go"), rows)[0] == [((1,), 4.0, (2,), 1.0)]
    assert mined(DPO(by="reply"), [*rows, make_row([9, 3], [(1, 1, 0.0)])])[0] == [((2,), 1.0, (3,), 0.0)]


@pytest.mark.parametrize(("margin", "expected"), [(0.0, 3), (0.9, 3), (1.0, 2), (2.0, 1)])
def test_a_margin(make_row, margin, expected):
    """Rewards 0, 1, 3: differences 1, 2 and 3, and a pair's is larger than the margin."""
    rows = [make_row([9, i], [(1, 1, reward)]) for i, reward in enumerate((0.0, 1.0, 3.0))]
    assert len(mined(DPO(margin=margin), rows)[0]) == expected


def test_a_context_gives_its_widest_pairs(make_row):
    rows = [make_row([9, i], [(1, 1, float(i * i))]) for i in range(4)]  # rewards 0, 1, 4, 9
    found, _ = mined(DPO(pairs_per_context=3), rows)
    assert [better - worse for _, better, _, worse in found] == [9, 8, 5]


def test_validation_may_have_no_pairs_but_training_may_not(make_row):
    pair = [make_row([9, 1], [(1, 1, 0.0)]), make_row([9, 2], [(1, 1, 1.0)])]
    assert mined(DPO(), pair, pair[:1]) == ([((2,), 1.0, (1,), 0.0)], 0)
    assert mined(DPO(), pair, pair)[1] == 1
    with pytest.raises(
        UserError,
        match="dpo: expected contexts with two different replies of different reward, found none .*train kto",
    ):
        DPO().prepare([pair[0], make_row([9, 3], [(1, 1, 0.0)]), make_row([8, 2], [(1, 1, 1.0)])], pair, None)


def test_a_row_comes_apart_into_its_replies(make_row):
    """<u> 1 2 <u> 3, rewards 1 and -3: each reply with all that came before it, and what is still to be
    earned from it on."""
    row = make_row([9, 1, 2, 9, 3, 9], [(1, 2, 1.0), (4, 4, -3.0)], truncated=True)
    found = [
        (start, reward, part.input_ids.tolist(), part.assistant.tolist())
        for start, reward, part in replies([row], by="reply")
    ]
    assert found == [
        (1, 1.0, [9, 1, 2], [False, True, True]),
        (4, -3.0, [9, 1, 2, 9, 3], [False] * 4 + [True]),
    ]
    assert [reward for _, reward, _ in replies([row], by="to_go")] == [-2.0, -3.0]


# --- loss ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(make_row):
    """Two pairs: replies (1, 2) over (0), and (2) over (1, 1). Six decisions."""
    rows = [
        make_row([9, 1, 2], [(1, 2, 0.0)]),
        make_row([9, 0], [(1, 1, 0.0)]),
        make_row([8, 2], [(1, 1, 0.0)]),
        make_row([8, 1, 1], [(1, 2, 0.0)]),
    ]

    def build(prior_logp=None):
        return collate(rows, prior_logp=prior_logp or [[-0.5, -2.0], [-1.0], [-3.0], [-0.1, -0.2]])

    return build


def log_ratio_table(logits, batch):
    """(4,) log pi - log p of the rows, with a gradient into every logit."""
    each = logits.log_softmax(1).gather(1, batch.actions[:, None]).squeeze(1) - batch.prior_logp
    return torch.stack([each[batch.rows == row].sum() for row in range(4)])


def test_at_the_prior_the_loss_is_log_2_and_pulls_apart(pairs):
    """pi = p: h = 0, -log sigmoid(0) = log 2. The gradient raises the better reply's tokens and lowers the
    worse one's, by beta / 2."""
    logits = torch.randn(6, 3, requires_grad=True)
    log_p = logits.detach().log_softmax(1)
    batch = pairs()
    batch.prior_logp = log_p.gather(1, batch.actions[:, None]).squeeze(1)
    loss = DPO(beta=0.3).loss(Outputs(Dense(logits)), batch)
    assert loss.total.item() == pytest.approx(2 * LOG_2, abs=1e-6) and DPO().terms(batch) == 2
    loss.total.backward()
    better = torch.tensor([True, True, False, True, False, False])  # whose tokens the six decisions are
    expected = (
        (0.3 / 2) * torch.where(better, -1.0, 1.0)[:, None] * (F.one_hot(batch.actions, 3) - log_p.exp())
    )
    torch.testing.assert_close(logits.grad, expected)


def test_the_loss_by_hand(make_row):
    """log pi = (log .5, log .25), log p = (log .25, log .5): g = (log 2, -log 2), h = .5 * 2 log 2 = log 2,
    sigmoid(h) = 2/3."""
    batch = collate(
        [make_row([9, 0], [(1, 1, 0.0)]), make_row([9, 1], [(1, 1, 0.0)])],
        prior_logp=[[math.log(0.25)], [math.log(0.5)]],
    )
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(2, 3)
    plain = DPO(beta=0.5).loss(Outputs(Dense(logits)), batch)
    assert plain.total.item() == pytest.approx(math.log(1.5), abs=1e-6)
    assert {name: value.item() for name, value in plain.metrics.items()} == {
        "accuracy": 1.0,
        "margin": pytest.approx(LOG_2),
        "reward_better": pytest.approx(0.5 * LOG_2),
        "reward_worse": pytest.approx(-0.5 * LOG_2),
    }
    smoothed = DPO(beta=0.5, label_smoothing=0.1).loss(Outputs(Dense(logits)), batch)
    assert smoothed.total.item() == pytest.approx(0.9 * math.log(1.5) + 0.1 * math.log(3), abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_is_that_of_the_dense_table(pairs, smoothing):
    """Against plain autograd through (N, V) log-probabilities, with another factor outside, as the trainer
    has one."""
    batch, method = pairs(), DPO(beta=0.7, label_smoothing=smoothing)
    logits = torch.randn(6, 3, requires_grad=True)
    loss = method.loss(Outputs(Dense(logits)), batch)
    (loss.total * 0.37).backward()
    table = logits.detach().clone().requires_grad_()
    ratio = log_ratio_table(table, batch)
    h = 0.7 * (ratio[0::2] - ratio[1::2])
    expected = -((1 - smoothing) * F.logsigmoid(h) + smoothing * F.logsigmoid(-h)).sum()
    (expected * 0.37).backward()
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(logits.grad, table.grad)
    assert loss.metrics["accuracy"].item() == (h > 0).sum().item()
    assert not any(value.requires_grad for value in loss.metrics.values())


def test_it_needs_a_prior_and_acts_by_the_language_model():
    assert DPO().uses_prior and not DPO().prior_every_step and DPO.plain_lm and DPO.rows_per_unit == 2
    assert not DPO.acts_with_beta  # its beta belongs to training
    lm = torch.randn(2, 3)
    assert torch.equal(DPO().decode(Outputs(Dense(lm))), lm)
