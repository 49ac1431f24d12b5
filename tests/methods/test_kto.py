"""KTO by hand: labels, strangers, and the loss on either side of z."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import KTO
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def prepared(method, rows, validation=()):
    """[(context, reply, label, stranger)] of both splits."""
    found = []
    for split in method.prepare(rows, list(validation), None):
        pairs = []
        for own, other in zip(split[0::2], split[1::2], strict=True):
            start = int(own.assistant.argmax())
            assert (
                other.assistant.argmax() == start
                and other.input_ids[:start].tolist() == own.input_ids[:start].tolist()
            )
            assert own.assistant[start:].all() and other.assistant[start:].all()
            pairs.append(
                (
                    own.input_ids[:start].tolist(),
                    own.input_ids[start:].tolist(),
                    float(own.rewards[0]),
                    other.input_ids[start:].tolist(),
                )
            )
        found.append(pairs)
    return found


# --- data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "labels"),
    [
        (KTO(by="reply"), [-1.0, 1.0, -1.0]),  # above their mean, 1
        (KTO(by="reply", threshold=-1.0), [1.0, 1.0, -1.0]),
        (KTO(by="reply", threshold=0.0), [-1.0, 1.0, -1.0]),  # above it, not equal to it
        (KTO(by="to_go"), [1.0, 1.0, -1.0]),  # 0 + 5, 5 and -2 against their mean, 8 / 3
        (KTO(), [1.0, 1.0, -1.0]),
    ],
)
def test_good_is_above_the_threshold(make_row, method, labels):
    """A dialog whose replies earn 0 and 5, and one that earns -2."""
    rows = [make_row([9, 1, 9, 2], [(1, 1, 0.0), (3, 3, 5.0)]), make_row([8, 3, 3], [(1, 2, -2.0)])]
    train, validation = prepared(method, rows)
    assert [(context, reply, label) for context, reply, label, _ in train] == [
        ([9], [1], labels[0]),
        ([9, 1, 9], [2], labels[1]),
        ([8], [3, 3], labels[2]),
    ]
    assert validation == []


def test_one_outlier_does_not_decide_what_is_good(make_row):
    """The mean of 0, 1, 0, 1, ... and a thousand is above all others; a few good replies among many are few
    whatever the threshold."""

    def labels(rewards):
        train, _ = prepared(KTO(by="reply"), [make_row([9, 1], [(1, 1, float(r))]) for r in rewards])
        return [label for _, _, label, _ in train]

    with pytest.warns(UserWarning, match="kto: 2.0% of the replies earn more than the mean, 20.*more than 0"):
        assert labels([0, 1] * 25 + [1000]) == [-1.0, 1.0] * 25 + [1.0]
    with warnings.catch_warnings(action="error"):
        assert labels([0] * 49 + [1]) == [-1.0] * 49 + [1.0]


@pytest.mark.parametrize("threshold", [0.1, 0.4, 0.7])
def test_a_reward_that_is_the_threshold_is_not_above_it(make_row, threshold):
    """Float32 lies above .1 and .4, below .7."""
    rows = [make_row([9, 1], [(1, 1, reward)]) for reward in (threshold, 1.0, 0.0)]
    train, _ = prepared(KTO(by="reply", threshold=threshold), rows)
    assert [label for _, _, label, _ in train] == [-1.0, 1.0, -1.0]


def test_validation_is_judged_by_the_training_split_s_mean(make_row):
    train = [make_row([9, 1], [(1, 1, 0.0)]), make_row([9, 2], [(1, 1, 10.0)])]
    _, found = prepared(KTO(), train, [make_row([9, 3], [(1, 1, 6.0)]), make_row([9, 4], [(1, 1, 7.0)])])
    assert [label for *_, label, _ in found] == [1.0, 1.0]  # above 5, both of them


@pytest.mark.parametrize(("by", "expected"), [("reply", {2: 1, 3: -1}), ("to_go", {1: 1, 2: 1, 3: -1})])
def test_what_nobody_rated_is_neither_good_nor_bad(make_row, by, expected):
    """Replies 1 to 5 earned ?, 5, -2, and in a dialog of their own ? and ?: the mean is of the rated ones."""
    nan = np.nan
    rows = [
        make_row([9, 1, 9, 2], [(1, 1, nan), (3, 3, 5.0)]),
        make_row([8, 3], [(1, 1, -2.0)]),
        make_row([9, 4, 9, 5], [(1, 1, nan), (3, 3, nan)]),
    ]
    for found in prepared(KTO(by=by), rows, rows):
        assert {reply[0]: label for _, reply, label, _ in found} == expected
        assert {stranger[0] for *_, stranger in found} == set(expected)
    assert prepared(KTO(by=by), rows, rows[2:])[1] == []


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({}, 2.0, 2 / 3),  # 4 / (2 * 1), 4 / (2 * 3): each kind has a weight of 2 in all
        ({"desirable_weight": 1.0}, 1.0, 2 / 3),
        ({"desirable_weight": 1.0, "undesirable_weight": 0.0}, 1.0, 0.0),
    ],
)
def test_good_and_bad_replies_weigh_the_same_unless_told_otherwise(make_row, given, good, bad):
    """One of four is good; a held-out reply has the training split's weight."""
    rows = [make_row([9, i + 1], [(1, 1, float(i == 2))]) for i in range(4)]
    train, held_out = KTO(**given).prepare(rows, rows[2:3], None)
    weights = [float(row.rewards[0]) for row in train[1::2]]
    assert weights == pytest.approx([bad, bad, good, bad])
    assert [float(row.rewards[0]) for row in held_out] == pytest.approx([1.0, good])


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_stranger_is_another_example(make_row, count):
    """Every reply is a stranger once, and never beside itself; the same ones every time."""
    rows = [make_row([9, 1 + i], [(1, 1, float(i))]) for i in range(count)]
    (train, _), (again, _) = prepared(KTO(), rows), prepared(KTO(), rows)
    assert train == again
    assert sorted(stranger for *_, stranger in train) == sorted(reply for _, reply, *_ in train)
    assert all(reply != stranger for _, reply, _, stranger in train)


def test_a_stranger_is_cut_where_the_longest_row_ends(make_row):
    """Behind a long context a long reply would be a row longer than any of the data, and perhaps than the
    model's context."""
    rows = [make_row([9, *[1] * 9], [(1, 9, 1.0)]), make_row([*[8] * 7, 2, 2], [(7, 8, 0.0)])]
    train, _ = KTO().prepare(rows, [], None)
    assert [len(row.input_ids) for row in train] == [10, 3, 9, 10]
    assert train[3].input_ids.tolist() == [*[8] * 7, 1, 1, 1] and train[3].reply_ends.tolist() == [9]


def test_one_class_alone_is_refused(make_row):
    unrated = make_row([9, 1], [(1, 1, np.nan)])
    with pytest.raises(UserError, match=r"got 0 of 1 .* \(they are 1 to 1\) \(2 of 3 have no reward\): set"):
        KTO().prepare([unrated, make_row([9, 1], [(1, 1, 1.0)]), unrated], [], None)
    with pytest.raises(UserError, match="kto: expected good and bad replies, got 2 without a reward"):
        KTO().prepare([unrated] * 2, [], None)
    rows = [make_row([9, i], [(1, 1, float(i))]) for i in range(3)]
    with pytest.raises(
        UserError,
        match=r"kto: expected good and bad replies, got 0 of 3 with a reward above 5 \(they are 0 to 2\)",
    ):
        KTO(threshold=5.0).prepare(rows, [], None)
    with pytest.raises(UserError, match="got 3 of 3 with a reward above -1"):
        KTO(threshold=-1.0).prepare(rows, [], None)
    for row in rows:
        row.rewards = np.full_like(row.rewards, 0.5)
    with pytest.raises(
        UserError, match="got 0 of 3 .*set --method.threshold, or prepare with rewards that differ"
    ):
        KTO().prepare(rows, [], None)


# --- loss ---------------------------------------------------------------------------------------------------

GOOD, BAD = 0.8, -0.3  # log pi - log p of the good and of the bad reply


@pytest.fixture
def batch(make_row):
    """batch(strangers): a good reply of weight 1 and a bad one of weight .5, each beside a stranger; all
    log-ratios are as given, under a policy that is uniform over 2 tokens."""

    def build(strangers):
        labels, ratios = (1.0, 1.0, -1.0, 0.5), (GOOD, strangers[0], BAD, strangers[1])
        rows = [make_row([9, 0], [(1, 1, label)]) for label in labels]
        made = collate(rows, prior_logp=[[-math.log(2) - ratio] for ratio in ratios])
        return dataclasses.replace(made, measured=KTO().measure(out(), made))

    return build


def out():
    return Outputs(Dense(torch.zeros(4, 2, requires_grad=True)))


@pytest.mark.parametrize(
    ("strangers", "z"), [((-0.5, -0.7), 0.0), ((0.1, -0.1), 0.0), ((0.5, -0.1), 0.2), ((1.0, 1.2), 1.1)]
)
def test_the_loss_by_hand(batch, strangers, z):
    """beta 2, w 1 and .5: 1 - sigmoid(2 (.8 - z)) and .5 (1 - sigmoid(2 (z + .3))), z the strangers' mean but
    at least 0; and of the good one, which is cloned with weight 3, 3 times its log-ratio less."""
    method = KTO(beta=2.0, clone_weight=3.0)
    loss = method.loss(out(), batch(strangers))
    good, bad = 1 - sigmoid(2 * (GOOD - z)), 1 - sigmoid(2 * (z - BAD))
    assert loss.total.item() == pytest.approx(good + 0.5 * bad - 3 * GOOD, abs=1e-6)
    assert {name: value.item() for name, value in loss.metrics.items()} == {
        "kl": pytest.approx(2 * z, abs=1e-6),  # the loop divides by the two terms
        "good": 1.0,
        "accuracy": float(z < GOOD) + float(z > BAD),
        "reward_good": pytest.approx(2 * GOOD, abs=1e-6),
        "reward_bad": pytest.approx(2 * BAD, abs=1e-6),
    }
    assert method.terms(batch(strangers)) == 2


def test_a_reply_weighs_the_same_where_each_token_has_its_reward(make_row):
    rows = [make_row([9, 0, 1, 0], [(1, 3, label)]) for label in (1.0, 2.0, -1.0, 0.5)]

    def total(spread):
        made = collate(rows, spread=spread, prior_logp=[[-0.5] * 3] * 4)
        outputs = Outputs(Dense(torch.zeros(12, 2)))
        made = dataclasses.replace(made, measured=KTO().measure(outputs, made))
        return KTO().loss(outputs, made).total.item()

    assert total("every_token") == total("reply_end") != 0


def test_the_gradient_raises_the_good_and_lowers_the_bad_and_leaves_strangers_alone(batch):
    """d(1 - sigmoid(x))/dg is -beta sigmoid (1 - sigmoid) for a good reply, which is cloned too, and the
    same, positive, for a bad one; z has no gradient."""
    given, lm = batch((0.5, -0.1)), out()
    KTO(beta=2.0, clone_weight=0.25).loss(lm, given).total.backward()
    good, bad = (-2 * s * (1 - s) for s in (sigmoid(2 * (GOOD - 0.2)), sigmoid(2 * (0.2 - BAD))))
    expected, towards = torch.zeros(4, 2), torch.tensor([0.5, -0.5])
    expected[0], expected[2] = (good - 0.25) * towards, -0.5 * bad * towards
    torch.testing.assert_close(lm.lm.scores.grad, expected)


def test_at_the_prior_every_term_is_one_half(make_row):
    rows = [make_row([9, 0], [(1, 1, label)]) for label in (1.0, 1.0, -1.0, 1.0)]
    loss = KTO().loss(
        out(),
        dataclasses.replace(
            collate(rows, prior_logp=[[-math.log(2)]] * 4), measured=torch.tensor([0.0, 2.0])
        ),
    )
    assert loss.total.item() == pytest.approx(1.0) and loss.metrics["accuracy"] == 0


def test_it_needs_a_prior_and_acts_by_the_language_model():
    assert (
        KTO().uses_prior
        and not KTO().prior_every_step
        and KTO.plain_lm
        and KTO.rows_per_unit == 2
        and not KTO.acts_with_beta
    )
    lm = torch.randn(2, 3)
    assert torch.equal(KTO().decode(Outputs(Dense(lm))), lm)
