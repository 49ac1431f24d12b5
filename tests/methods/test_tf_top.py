"""Which replies tf_top learns from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import TFTop
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense

NAN = np.nan


@pytest.fixture
def rows(make_row):
    """Two dialogs: replies that earn 1, -2 (tokens 1-2 and 4) and 3 (token 1)."""
    return [make_row([9, 1, 2, 9, 3], [(1, 2, 1.0), (4, 4, -2.0)]), make_row([9, 5], [(1, 1, 3.0)])]


def test_replies_of_a_long_dialog_count_once_however_many_windows_it_has(make_row):
    """Six of ten replies are rated. Each window knows what stands behind it: 4 + 3 + 2 of the unrated."""
    unrated = [
        replace(
            make_row([9, 1], [(1, 1, NAN)], count > 0),
            later_rewards=np.full(count, NAN, np.float32),
            later_tokens=np.ones(count, np.int32),
            later_done=True,
        )
        for count in (3, 2, 1, 0)
    ]
    rated = [make_row([9, 2, 9, 3], [(1, 1, 1.0), (3, 3, float(n))]) for n in range(3)]
    with pytest.warns(UserWarning, match="tf_top judges by dialog: 6 of 10 replies have a reward"):
        assert kept(prepare(TFTop(threshold=2.5), [*unrated, *rated])) == [[1.0, 2.0]]


def prepare(method, rows):
    train, _ = method.prepare(rows, rows, None)
    return train


def kept(rows):
    return [[float(r) for r in row.rewards] for row in rows]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (TFTop(by="reply", threshold=1.0), [[1.0], [3.0]]),
        (TFTop(by="reply", threshold=2.0), [[3.0]]),
        (TFTop(by="reply", fraction=2 / 3), [[1.0], [3.0]]),
        (TFTop(by="reply", fraction=0.5), [[3.0]]),  # floor(0.5 * 3) = 1
        (TFTop(by="reply", fraction=0.01), [[3.0]]),
        (TFTop(by="reply", fraction=1.0), [[1.0, -2.0], [3.0]]),
        (TFTop(by="dialog", threshold=0.0), [[3.0]]),  # 1 - 2 < 0
        (TFTop(by="dialog", threshold=-1.0), [[1.0, -2.0], [3.0]]),
    ],
)
def test_which_replies_are_kept(rows, method, expected):
    assert kept(prepare(method, rows)) == expected


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (TFTop(by="reply", threshold=1.0), [[3.5], [2.0], [1.0]]),
        (TFTop(by="reply", fraction=0.5), [[3.5]]),  # as good as the 3 that was kept
        (TFTop(by="dialog", fraction=0.5), [[0.5, 3.5]]),
        (TFTop(by="dialog", fraction=1.0), [[0.5, 3.5], [2.0, -1.0], [1.0]]),  # from the -1 of the first on
        (TFTop(by="dialog", threshold=9.0), []),
    ],
)
def test_held_out_replies_are_judged_by_the_training_split_s_filter(rows, make_row, method, expected):
    """What is not to be said is no measure of how well it is said."""
    held_out = [
        make_row([9, 1, 9, 2], [(1, 1, 0.5), (3, 3, 3.5)]),
        make_row([9, 1, 9, 2], [(1, 1, 2.0), (3, 3, -1.0)]),
        make_row([9, 1, 9, 2], [(1, 1, -2.0), (3, 3, -2.0)]),
        make_row([9, 1], [(1, 1, 1.0)]),
        make_row([9, 1], [(1, 1, NAN)]),
    ]
    best = [make_row([9, 1], [(1, 1, 9.0)])] if method.threshold == 9 else []
    assert kept(method.prepare([*rows, *best], held_out, None)[1]) == expected


def test_the_others_are_context_and_no_target(rows):
    (first, _) = prepare(TFTop(by="reply", threshold=1.0), rows)
    assert first.input_ids.tolist() == [9, 1, 2, 9, 3] and first.assistant.tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert rows[0].assistant.tolist() == [False, True, True, False, True]  # the data itself is left alone
    batch = collate([first])
    logits = torch.randn(batch.decisions, 10)
    total = TFTop().loss(Outputs(Dense(logits)), batch).total
    torch.testing.assert_close(total, -logits.log_softmax(1)[[0, 1], [1, 2]].sum())


@pytest.mark.parametrize("by", ["reply", "dialog"])
def test_equals_are_kept_by_lot_a_row_at_a_time(make_row, by):
    """Forty good rows of two replies, those that say 1 before those that say 2: of the twenty that are kept
    about half say 1, and most are kept whole."""
    rows = [make_row([9, i, 9, i], [(1, 1, 1.0), (3, 3, 1.0)]) for i in [1] * 20 + [2] * 20]
    rows += [make_row([9, 3], [(1, 1, 0.0)])] * 40
    kept = prepare(TFTop(by=by, fraction=1 / 3), rows)
    assert [len(row.rewards) for row in kept] == [2] * 20
    assert 5 <= sum(int(row.input_ids[1]) == 1 for row in kept) <= 15
    assert [row.input_ids.tolist() for row in kept] == sorted(row.input_ids.tolist() for row in kept)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (TFTop(by="reply", fraction=1.0), [[-1.0], [3.0, 0.0]]),  # all that is rated, and nothing else
        (TFTop(by="reply", fraction=0.5), [[3.0]]),  # floor(.5 * 3) of the rated ones
        (TFTop(by="reply", threshold=-5.0), [[-1.0], [3.0, 0.0]]),
        (TFTop(by="dialog", threshold=-5.0), [[NAN, -1.0], [3.0, 0.0]]),  # -1: all that is known
        (TFTop(by="dialog", fraction=0.5), [[3.0, 0.0]]),
    ],
)
def test_what_nobody_rated_is_never_kept(make_row, method, expected):
    """Dialogs whose replies earned ? and -1, 3 and 0, ? and ?."""
    earned = [(NAN, -1.0), (3.0, 0.0), (NAN, NAN)]
    rows = [make_row([9, 1, 9, 2], [(1, 1, first), (3, 3, second)]) for first, second in earned]
    found = prepare(method, rows)
    assert all(row.input_ids.tolist() == [9, 1, 9, 2] for row in found)  # as context they stay
    assert len(found) == len(expected)
    for row, rewards in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row.rewards, rewards)
        assert row.assistant.sum() == len(rewards)


def test_too_few_rated_replies_are_counted(make_row):
    rows = [make_row([9, 1, 9, 2], [(1, 1, NAN), (3, 3, reward)]) for reward in (1.0, NAN)]
    with pytest.raises(UserError, match=r"every reply earned 1 \(3 of 4 have no reward\), so none"):
        prepare(TFTop(by="reply"), rows)
    with pytest.raises(UserError, match=r"every dialog earned 1 \(2 of 4 have no reward\), so none"):
        prepare(TFTop(by="dialog"), rows)
    with pytest.raises(UserError, match=r"no reply has a reward \(2 of 2 have no reward\), .* or train bc"):
        prepare(TFTop(by="reply"), rows[1:])


def test_rewards_that_tell_nothing_apart_are_refused(rows):
    for row in rows:
        row.rewards = np.full_like(row.rewards, 0.5)
    with pytest.raises(
        UserError,
        match="every reply earned 0.5, so none is better: prepare with rewards that differ, or train bc",
    ):
        prepare(TFTop(by="reply"), rows)


def test_a_threshold_that_nothing_reaches_is_refused(rows):
    with pytest.raises(
        UserError, match=r"no reply earned 4 or more \(the best one 3\): lower --method.threshold"
    ):
        prepare(TFTop(by="reply", threshold=4.0), rows)
    with pytest.raises(UserError, match=r"expected a fraction in \(0, 1\], got 0"):
        prepare(TFTop(fraction=0.0), rows)


def outcome(make_row, *rewards):
    """A dialog whose replies earn `rewards`."""
    replies = [(2 * i + 1, 2 * i + 1, reward) for i, reward in enumerate(rewards)]
    return make_row([9, 1] * len(rewards), replies)


def test_a_dialog_that_was_cut_is_judged_by_how_it_went_on(make_row):
    """The first half of a dialog that ended well is kept, that of one that ended badly is not."""
    halves = []
    for earned in (1, 0, 0, 0):
        first, second = outcome(make_row, 0, 0), outcome(make_row, earned)
        later = {"later_rewards": second.rewards, "later_tokens": np.array([1], np.int32), "later_done": True}
        halves += [replace(first, truncated=True, **later), second]
    with pytest.warns(UserWarning, match="by dialog: 12 of 12 replies"):
        assert kept(prepare(TFTop(fraction=0.25), halves)) == [[0, 0], [1]]


def test_a_reward_at_the_end_keeps_whole_dialogs_and_not_last_replies(make_row):
    """By their own rewards the best of these replies would be two last ones, and others by luck."""
    rows = [outcome(make_row, 0, 0, earned) for earned in (1, 0, 2, 0)]
    with pytest.warns(UserWarning, match="by dialog: 12 of 12 replies"):
        assert kept(prepare(TFTop(), rows)) == [[0, 0, 1], [0, 0, 2]]
    assert kept(prepare(TFTop(by="reply", threshold=1.0), rows)) == [[1], [2]]
