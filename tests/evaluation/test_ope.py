"""Returns from logs alone: fitted Q on decision processes that are solved by hand, and importance weights
worked out on paper."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.fqe import FQE, Piece, evaluate_q, expected, fit, spread_of_returns
from rl_dialog.evaluation.intervals import difference, estimate, unpaired_difference
from rl_dialog.evaluation.ope import (
    Behaviour,
    Discount,
    all_estimates,
    direct_method,
    effective,
    fitted_q,
    importance_sampling,
    known_outcomes,
    logged_returns,
    per_decision,
    read_behaviour,
)
from rl_dialog.evaluation.scoring import LoggedReplies, ReplyScores, logged_replies, score_replies
from rl_dialog.methods import BC, ILQL, WayOffPolicy
from rl_dialog.methods.backup import returns
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense, Linear
from rl_dialog.models.checkpoint import save_policy

A, B, C, D = 0, 1, 2, 3
START, THEN, OTHER = 90, 91, 92
NAN = np.nan
NEVER = -1e4  # a logit of probability 0
UNDISCOUNTED = Discount()


def tabular(rows, pi):
    """Rows as a Piece whose states are known by their last token: `pi` gives each state its probabilities of
    A, B, C, D."""
    batch, names = collate(rows), list(pi)
    states = [names.index(token) for token in batch.input_ids.flatten()[batch.states].tolist()]
    log_pi = torch.tensor([pi[name] for name in names]).log().clamp(min=NEVER)  # (states, 4)
    return Piece(batch, Outputs(Linear(torch.eye(len(names))[states], log_pi.T.contiguous())))


def plain(out):
    return out.lm.dense()


def value(rows, pi, *, gamma=1.0, discount="token", **settings):
    """E_pi Q in the first state of each row, fitted on the same rows."""
    piece = tabular(rows, pi)
    q = fit([piece], plain, FQE(steps=600, learning_rate=0.02, **settings), gamma=gamma, discount=discount)
    return evaluate_q(q, [piece], plain, gamma=gamma, discount=discount)


@pytest.fixture
def chain(make_row):
    """A: 1 in three of four conversations, else 0, and the end. B: on to a second state, where C earns 2 and
    D -4."""
    first = [make_row([START, A], [(1, 1, reward)]) for reward in (1.0, 1.0, 1.0, 0.0)]
    return [
        *first,
        *(
            make_row([START, B, THEN, a], [(1, 1, 0.0), (3, 3, reward)])
            for a, reward in ((C, 2.0), (D, -4.0))
        ),
    ]


CHAIN = {
    START: (0.25, 0.75, 0.0, 0.0),
    THEN: (0.0, 0.0, 0.8, 0.2),
    C: (0.25,) * 4,
    D: (0.25,) * 4,
    A: (0.25,) * 4,
    B: (0.25,) * 4,
}


@pytest.mark.parametrize("heads", ["lowrank", "mlp"])
@pytest.mark.parametrize(("gamma", "j"), [(1.0, 0.7875), (0.5, 0.4875)])
def test_fitted_q_of_a_known_policy(chain, heads, gamma, j):
    """V(then) = .8 * 2 - .2 * 4 = .8, so J = .25 * .75 + .75 * gamma * .8. The logs took D as often as C; the
    policy does not."""
    found = value(chain, CHAIN, gamma=gamma, heads=heads)
    assert found.first == pytest.approx([j] * 6, abs=0.01)
    assert found.decisions.tolist() == [1, 1, 1, 1, 2, 2]
    # what no Q can explain: rewards of 1, 1, 1, 0 around their mean of .75
    assert found.td_error == pytest.approx([0.0625] * 3 + [0.5625] + [0, 0], abs=0.02)


def test_the_value_follows_the_policy_not_the_logs(chain):
    best = CHAIN | {START: (0.0, 1.0, 0.0, 0.0), THEN: (0.0, 0.0, 1.0, 0.0)}
    worst = CHAIN | {START: (0.0, 1.0, 0.0, 0.0), THEN: (0.0, 0.0, 0.0, 1.0)}
    assert value(chain, best).first[0] == pytest.approx(2, abs=0.02)
    assert value(chain, worst).first[0] == pytest.approx(-4, abs=0.02)


@pytest.mark.slow
def test_a_truncated_row_bootstraps_and_a_finished_one_does_not(chain, make_row):
    cut, ended = (make_row([OTHER, B, THEN], [(1, 1, 0.5)], truncated) for truncated in (True, False))
    pi = CHAIN | {OTHER: (0.0, 1.0, 0.0, 0.0)}
    assert value([*chain, cut], pi).first[-1] == pytest.approx(0.5 + 0.8, abs=0.02)
    assert value([*chain, ended], pi).first[-1] == pytest.approx(0.5, abs=0.02)


def test_the_unit_is_that_of_whole_conversations(make_row):
    """A conversation that earns 1, 2, 4 and is cut behind its first reply: 7 and 6, 4. What a cut one that
    was never finished goes on to earn is not known, nor what follows a reply that nobody rated."""
    cut, rest = (
        make_row([START, A], [(1, 1, 1.0)], True),
        make_row([THEN, B, OTHER, C], [(1, 1, 2.0), (3, 3, 4.0)]),
    )
    known = {"later_rewards": np.float32([2, 4]), "later_tokens": np.int32([1, 1]), "later_done": True}
    for row, followed in (
        (replace(cut, **known), [7.0, 6.0, 4.0]),
        (cut, [1.0, 6.0, 4.0]),
        (replace(cut, **known | {"later_rewards": np.float32([2, NAN])}), [1.0, 6.0, 4.0]),
    ):
        found = spread_of_returns([tabular([row, rest], CHAIN | {OTHER: (0.25,) * 4})])
        assert found == pytest.approx((np.std(followed), np.mean(followed)))


def test_what_nobody_rated_is_learned_from_what_was(chain, make_row):
    """Ten more conversations that end with A, and one of B and C whose B is not rated: J stays as it was."""
    unrated = make_row([START, B, THEN, C], [(1, 1, NAN), (3, 3, 2.0)])
    found = value([*chain, *[make_row([START, A], [(1, 1, NAN)])] * 10, unrated], CHAIN)
    assert found.first == pytest.approx([0.7875] * 17, abs=0.02)
    assert found.decisions.tolist() == [1, 1, 1, 1, 2, 2, *[0] * 10, 1]
    assert found.td_error[6:] == pytest.approx([0] * 11, abs=0.02)


def test_inside_a_reply_nothing_is_earned_rated_or_not(make_row):
    """The reply B C is rated 2 in one row and not in the other: the target of B is known in both."""
    rows = [make_row([START, B, C], [(1, 2, reward)]) for reward in (2.0, NAN)]
    pi = {START: (0.0, 1.0, 0.0, 0.0), B: (0.0, 0.0, 1.0, 0.0), C: (0.25,) * 4}
    found = value(rows, pi)
    assert found.first == pytest.approx([2, 2], abs=0.02)
    assert found.decisions.tolist() == [2, 1]


@pytest.mark.slow
def test_turns_are_discounted_at_their_end_only(make_row):
    rows = [make_row([START, B, C], [(1, 2, 2.0)])]  # one reply of two tokens
    pi = {START: (0.0, 1.0, 0.0, 0.0), B: (0.0, 0.0, 1.0, 0.0), C: (0.25,) * 4}
    assert value(rows, pi, gamma=0.5, discount="token").first[0] == pytest.approx(1, abs=0.02)
    assert value(rows, pi, gamma=0.5, discount="turn").first[0] == pytest.approx(2, abs=0.02)


def test_the_expectation_is_exact_and_in_chunks(monkeypatch):
    from rl_dialog.methods import scores

    pi, q = torch.rand(7, 5).softmax(1), torch.randn(7, 5)
    features = torch.eye(7)
    out = Outputs(Linear(features, pi.log().T.contiguous()), q_target=(Dense(q),))
    whole = expected(lambda o: o.q_target[0].dense(), out, plain)
    assert whole.tolist() == pytest.approx((pi * q).sum(1).tolist(), abs=1e-6)
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 10)  # two states at a time
    assert expected(lambda o: o.q_target[0].dense(), out, plain).tolist() == pytest.approx(whole.tolist())


def test_fits_are_deterministic_and_leave_the_global_stream_alone(chain):
    before = torch.get_rng_state()
    found = [fit([tabular(chain, CHAIN)], plain, FQE(steps=20), seed=seed).state_dict() for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not all(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_a_decision_weighs_the_same_beside_few_rows(make_row):
    """One of 33 rows earned 33, and it is the only one of its piece."""
    rows = [*[make_row([START, A], [(1, 1, 0.0)])] * 32, make_row([START, A], [(1, 1, 33.0)])]
    pieces = [tabular(part, {START: [1.0, 0.0, 0.0, 0.0]}) for part in (rows[:32], rows[32:])]
    q = fit(pieces, plain, FQE(steps=600))
    assert evaluate_q(q, pieces, plain).first == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("heads", ["lowrank", "mlp"])
@pytest.mark.parametrize(("scale", "offset"), [(1e-4, 0.0), (1e4, 0.0), (1.0, -500.0)])
def test_fitted_q_does_not_depend_on_the_unit_of_rewards(make_row, heads, scale, offset):
    """A earns 1, B -1 or 3: half of each is worth 1."""
    said = [(A, 1.0), (B, -1.0), (B, 3.0)]
    rows = [make_row([START, action], [(1, 1, scale * reward + offset)]) for action, reward in said]
    piece = tabular(rows, {START: [0.5, 0.5, 0.0, 0.0]})
    q = fit([piece], plain, FQE(steps=300, heads=heads))
    assert (evaluate_q(q, [piece], plain).first - offset) / scale == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("change", [{"steps": 0}, {"alpha": 0.0}, {"learning_rate": -1.0}, {"dialogs": -1}])
def test_settings_without_sense(change):
    with pytest.raises(UserError, match="--fqe: expected steps"):
        replace(FQE(), **change).check()


# --- Importance sampling ------------------------------------------------------------------------------------


def scored(nll, tokens=None):
    """ReplyScores with nothing but log-probabilities."""
    nothing = np.full(len(nll), np.nan)
    values = {f.name: nothing for f in fields(ReplyScores)} | {
        "kl_missing": "",
        "nll": np.asarray(nll, float),
    }
    return ReplyScores(**values | {"tokens": np.ones(len(nll)) if tokens is None else np.asarray(tokens)})


@pytest.fixture
def logs(make_row):
    """Two dialogs: replies that earn 1 and 0, and one that earns 3."""
    rows = [make_row([START, A, THEN, B], [(1, 1, 1.0), (3, 3, 0.0)]), make_row([START, C], [(1, 1, 3.0)])]
    return LoggedReplies(rows, np.array([0, 0, 1]), 2)


def weighted(logs, pi, mu, *, which=("wis", "pdwis"), discount=UNDISCOUNTED):
    with np.errstate(divide="ignore"):
        pi, mu = -np.log(pi), -np.log(mu)
    return importance_sampling(which, scored(pi), logs, Behaviour("mu", logs, mu), discount)


def test_weights_by_hand(logs):
    """Ratios 2 and 1/2 in the first dialog, 1/2 in the second: w = (1, .5). Per decision: first (2, .5),
    second (1, .5)."""
    found = weighted(logs, (0.8, 0.2, 0.1), (0.4, 0.4, 0.2)).measures
    assert found["ope/wis"].value == pytest.approx((1 * 1 + 0.5 * 3) / 1.5)
    assert found["ope/pdwis"].value == pytest.approx((2 * 1 + 0.5 * 3) / 2.5)
    assert found["ope/n_eff"].value == pytest.approx(1.5**2 / 1.25)


def test_the_behaviour_policy_itself_gets_the_mean_of_the_logs(logs):
    found = weighted(logs, (0.4, 0.4, 0.2), (0.4, 0.4, 0.2)).measures
    assert [found["ope/wis"].value, found["ope/pdwis"].value] == pytest.approx([(1 + 3) / 2] * 2)
    assert found["ope/n_eff"].value == pytest.approx(2)


def test_a_dialog_with_a_missing_reward_is_left_out_and_counted(make_row, logs):
    """The numbers are those of the other two dialogs, whatever the weights of the third one are."""
    unrated = make_row([START, A, THEN, B], [(1, 1, 5.0), (3, 3, NAN)])
    three = LoggedReplies([unrated, *logs.rows], np.array([0, 0, 1, 1, 2]), 3)
    for weight in (0.0, 0.1, 1.0):
        found = weighted(three, (weight, weight, 0.8, 0.2, 0.1), (0.5, 0.5, 0.4, 0.4, 0.2))
        expected = weighted(logs, (0.8, 0.2, 0.1), (0.4, 0.4, 0.2)).measures
        for name in ("ope/wis", "ope/pdwis", "ope/n_eff"):
            assert found.measures[name].value == pytest.approx(expected[name].value), name
        assert "1 of 3 dialogs have a reply without a reward and are left out." in found.notes["ope/n_eff"]
        assert "more windows" not in found.notes["ope/n_eff"]
    alone = weighted(LoggedReplies([unrated], np.array([0, 0]), 1), (0.5, 0.5), (0.5, 0.5))
    assert not alone.measures
    assert alone.notes["ope/wis"] == "Undefined: every dialog has a reply without a reward."


def test_effective_number():
    assert effective(np.ones(7)) == 7
    assert effective(np.array([1.0, 0, 0, 0])) == 1
    assert effective(np.array([2.0, 1.0])) == pytest.approx(9 / 5)
    assert effective(np.array([2e-200, 1e-200]) / 3e-200) == pytest.approx(9 / 5)


def one_reply_each(make_row, earned):
    rows = [make_row([START, A], [(1, 1, reward)]) for reward in earned]
    return LoggedReplies(rows, np.arange(len(rows)), len(rows))


def test_an_interval_needs_enough_effective_dialogs(make_row):
    """60 dialogs, one earns 1: with 20 times the others' weight 20 / 79 in all, and n_eff is 79^2 / 459."""
    logs, mu = one_reply_each(make_row, [1.0] + [0.0] * 59), np.full(60, 0.01)
    even, heavy = (weighted(logs, np.r_[0.01 * ratio, mu[1:]], mu) for ratio in (1, 20))
    for name in ("ope/wis", "ope/pdwis"):
        found = estimate([heavy.measures[name]])
        assert found.value == pytest.approx(20 / 79) and (found.low, found.high) == (None, None)
        why = "No interval: 13.6 effective dialogs are too few, from 40 on there is one."
        assert heavy.notes[name] == why and name not in even.notes
        assert estimate([even.measures[name]]).low is not None
        change = difference([even.measures[name]], [heavy.measures[name]])
        assert change.value == pytest.approx(1 / 60 - 20 / 79) and change.low is None
    assert unpaired_difference(heavy.measures["ope/wis"], even.measures["ope/wis"]).low is None


def test_intervals_are_left_out_where_they_would_not_cover(make_row):
    """log w ~ N(0, s^2), half the variance of returns is that of log w, the truth s / sqrt 2: a hard case."""
    rng, covered = np.random.default_rng(0), {True: [], False: []}
    for sigma in (0.75, 1.0, 2.5, 3.0) * 25:
        z = rng.normal(size=300)
        logs = one_reply_each(make_row, (z + rng.normal(size=300)) / np.sqrt(2))
        behaviour = Behaviour("mu", logs, np.full(300, 9.0))
        found = importance_sampling(("wis",), scored(9 - sigma * z), logs, behaviour, UNDISCOUNTED)
        measure = found.measures["ope/wis"]
        interval = estimate([replace(measure, interval=True)], replicates=300)
        covered[measure.interval].append(interval.low <= sigma / np.sqrt(2) <= interval.high)
    assert min(map(len, covered.values())) > 20
    assert np.mean(covered[True]) > 0.8 and np.mean(covered[False]) < 0.7


def test_weights_may_be_astronomically_small(logs):
    """A hundred tokens of ratio 1e-9 underflow as a product; their logarithms do not."""
    behaviour = Behaviour("mu", logs, np.array([0.0, 0.0, 0.0]))
    found = importance_sampling(
        ("wis",), scored([2000.0, 2000.0, 4000.0 + np.log(2)]), logs, behaviour, UNDISCOUNTED
    ).measures
    assert found["ope/wis"].value == pytest.approx((1 + 3 / 2) / 1.5)


def test_per_decision_numbers_have_the_estimate_as_their_mean_and_its_spread():
    """The spread of the mean of the influence numbers equals the spread over fresh data sets, to first
    order."""
    rng = np.random.default_rng(0)

    def draw(n):
        ratio = rng.choice([0.5, 1.5], size=(n, 2))
        reward = rng.normal(size=(n, 2)) + ratio
        return list(np.cumsum(np.log(ratio), 1)), list(reward)

    repeated = [per_decision(*draw(200)).mean() for _ in range(400)]
    one = per_decision(*draw(200))
    assert one.std(ddof=1) / np.sqrt(200) == pytest.approx(np.std(repeated), rel=0.2)


def test_warnings_in_words(logs):
    notes = weighted(logs, (0.8, 0.2, 0.0), (0.4, 0.4, 0.2)).notes
    assert "1.0 of 2 dialogs carry the weight, which is fewer than 40" in notes["ope/n_eff"]
    assert "probability 0 to logged tokens in 1 of 2 dialogs" in notes["ope/n_eff"]
    nothing = weighted(logs, (0.0, 0.2, 0.0), (0.4, 0.4, 0.2))
    assert not nothing.measures
    assert (
        nothing.notes["ope/wis"]
        == "Undefined: in every dialog the policy gives probability 0 to logged tokens."
    )
    wrong = weighted(logs, (0.8, 0.2, 0.1), (0.4, 0.4, 0.0))
    assert wrong.notes["ope/pdwis"] == "Undefined: mu gives probability 0 to logged tokens."


def test_windows_and_cut_dialogs_are_told(make_row, logs):
    windows = LoggedReplies(
        [make_row([START, A, THEN], [(1, 1, 1.0)], True), make_row([THEN, B], [(1, 1, 0.0)]), logs.rows[1]],
        logs.dialog,
        logs.dialogs,
    )
    cut = Dialog("d", [{"role": "user", "content": "a"}], truncated=True)
    found = importance_sampling(
        ("wis",),
        scored([1.0] * 3),
        windows,
        Behaviour("mu", windows, np.ones(3)),
        UNDISCOUNTED,
        dialogs=[cut],
    )
    assert "cut into 1 more windows" in found.notes["ope/n_eff"]
    assert "1 dialogs are logged up to a cut only" in found.notes["ope/n_eff"]
    assert found.measures["ope/wis"].value == pytest.approx(2)  # still one weight and one return per dialog


def test_another_tokenizer_is_refused(logs, make_row):
    others = LoggedReplies(
        [make_row([START, A, THEN, C], [(1, 1, 1.0), (3, 3, 0.0)]), logs.rows[1]], logs.dialog, 2
    )
    with pytest.raises(
        UserError, match="--behaviour runs/x: expected a policy whose tokenizer cuts the logged replies"
    ):
        importance_sampling(
            ("wis",), scored([1.0] * 3), logs, Behaviour("runs/x", others, np.ones(3)), UNDISCOUNTED
        )


def test_dialogs_with_a_reply_that_is_cut_for_one_policy_alone_are_left_out(logs, make_row):
    """A window that has room for all of the first two dialogs with both tokenizers, and for two or three
    words of the third one's reply: the estimate is that of the first two."""
    rows = [make_row([START, C, A, C], [(1, 3, 9.0)]), make_row([START, C, A], [(1, 2, 9.0)], True)]
    ours, theirs = (LoggedReplies([*logs.rows, row], np.array([0, 0, 1, 2]), 3) for row in rows)
    pi, mu = np.array([0.5, 1.0, 0.7, 2.0]), np.array([1.0, 1.5, 1.0, 0.1])
    cut = Dialog("d", [{"role": "user", "content": "a"}], truncated=True)
    found = importance_sampling(
        ("wis",), scored(pi), ours, Behaviour("mu", theirs, mu), UNDISCOUNTED, dialogs=[cut] * 3
    )
    whole = importance_sampling(("wis",), scored(pi[:3]), logs, Behaviour("mu", logs, mu[:3]), UNDISCOUNTED)
    assert found.measures["ope/wis"].value == whole.measures["ope/wis"].value
    assert "1 of 3 dialogs are left out: a window has room for more" in found.notes["ope/n_eff"]
    assert "2 dialogs are logged up to a cut only" in found.notes["ope/n_eff"]


# --- The logs' own returns, and real policies ---------------------------------------------------------------


def test_logged_returns_by_hand(make_row):
    rows = [
        make_row([START, A, B, THEN, A, B, C], [(1, 2, 1.0), (4, 6, 1.0)]),
        make_row([START, A], [(1, 1, 3.0)]),
    ]
    logs = LoggedReplies(rows, np.array([0, 0, 2]), 3)  # the dialog in the middle has no reply
    tokens = np.array([2, 3, 1])
    for discount, first in ((UNDISCOUNTED, 2), (Discount(0.5), 0.5 + 0.5**4), (Discount(0.5, "turn"), 1.5)):
        found = logged_returns(logs, tokens, discount)
        assert found[[0, 2]].tolist() == pytest.approx([first, 3])
        assert np.isnan(found[1])
        batch = collate(rows)  # the same rule as in training
        assert found[0] == pytest.approx(returns(batch, discount.gamma, discount.per)[0].item())


def test_a_return_is_unknown_where_a_reward_is_missing(make_row):
    rows = [make_row([START, A, THEN, A], [(1, 1, 1.0), (3, 3, NAN)]), make_row([START, A], [(1, 1, 3.0)])]
    logs = LoggedReplies(rows, np.array([0, 0, 1]), 2)
    np.testing.assert_array_equal(logged_returns(logs, np.ones(3), UNDISCOUNTED), [NAN, 3])
    assert known_outcomes(logs) is logs  # the first reply is rated, so a reward is not an outcome


def test_an_outcome_is_all_that_a_dialog_earned(make_row):
    """Only last replies are rated, of the first and the third dialog. The first one has two windows."""
    rows = [
        make_row([START, A, THEN, A, OTHER], [(1, 1, NAN), (3, 3, NAN)], truncated=True),
        make_row([OTHER, A], [(1, 1, 8.0)]),
        make_row([START, A, THEN, A], [(1, 1, NAN), (3, 3, NAN)]),
        make_row([START, A], [(1, 1, 3.0)]),
    ]
    logs = LoggedReplies(rows, np.array([0, 0, 0, 1, 1, 2]), 3)
    found = known_outcomes(logs)
    np.testing.assert_array_equal(np.concatenate([row.rewards for row in found.rows]), [0, 0, 8, NAN, NAN, 3])
    assert found.rows[0].rewards.dtype == np.float64 and np.isnan(rows[0].rewards).all()
    np.testing.assert_array_equal(logged_returns(found, np.ones(6), UNDISCOUNTED), [8, NAN, 3])
    assert known_outcomes(found) is found


DIALOGS = [
    Dialog(
        "a",
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "thank you", "reward": 1.0}],
    ),
    Dialog(
        "b", [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "tea", "reward": 1.0}]
    ),
]


@pytest.fixture
def logged(tokenizer):
    return logged_replies(DIALOGS, tokenizer, max_length=64)


def test_the_direct_method_asks_the_critic(make_policy, logged):
    for method in (ILQL(gamma=1.0), WayOffPolicy(c=0.5, gamma=1.0, origin="logits", state_value=False)):
        policy = make_policy(method)
        batch = collate(logged.rows)
        with torch.no_grad():
            out = policy.outputs(batch)
            pi = policy.method.decode(out).softmax(1)
            q = (
                torch.minimum(out.q_target[0].dense(), out.q_target[1].dense())
                if out.q_target
                else 0.5 * out.lm.dense()
            )
        first = [0, int((batch.rows == 0).sum())]
        found = direct_method(policy, logged, UNDISCOUNTED)
        assert found.measures["ope/dm"].numerator == pytest.approx((pi * q).sum(1)[first].numpy(), rel=1e-4)
        assert "optimistic" in found.notes["ope/dm"]
    assert "not a return" in found.notes["ope/dm"]
    assert (
        "by 0.99 per turn, not by 1 per token"
        in direct_method(make_policy(ILQL()), logged, UNDISCOUNTED).notes["ope/dm"]
    )
    assert (
        "which only training reads"
        in direct_method(make_policy(WayOffPolicy()), logged, UNDISCOUNTED).notes["ope/dm"]
    )
    none = direct_method(make_policy(BC()), logged, UNDISCOUNTED)
    assert (none.measures, none.notes) == ({}, {"ope/dm": "The method has no Q over tokens."})


def test_a_later_window_is_no_first_state(make_policy, logged):
    policy = make_policy(ILQL())
    windows = LoggedReplies(logged.rows, np.array([0, 0]), 1)
    one = direct_method(policy, windows, UNDISCOUNTED).measures["ope/dm"]
    two = direct_method(policy, logged, UNDISCOUNTED).measures["ope/dm"]
    assert one.numerator.tolist() == [pytest.approx(two.numerator[0], rel=1e-5)]


def test_rewards_that_are_all_equal_say_nothing(make_policy, logged):
    found = fitted_q(make_policy(ILQL()), logged.rows, logged, FQE(steps=150, rank=8), UNDISCOUNTED)
    assert (
        "Every reply of the training dialogs earned 1, so the estimate is trivial" in found.notes["ope/fqe"]
    )
    assert found.measures["ope/fqe"].value == pytest.approx(
        1, abs=0.2
    )  # a reply is worth 1, whatever is said
    with pytest.raises(UserError, match="--ope fqe: expected replies in the train split"):
        fitted_q(make_policy(BC()), [], logged, FQE(), UNDISCOUNTED)


def test_notes_say_what_is_not_rated(make_policy, tokenizer):
    """Three dialogs: the outcome of two is known, nothing of the third. Then a first reply is rated, too."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "tea"}]
    last = {"role": "assistant", "content": "thank you"}
    rated = [last | {"reward": reward} for reward in (1.0, 2.0, None)]
    dialogs = [Dialog(str(i), [*turns, turns[0], reply]) for i, reply in enumerate(rated)]
    policy, how = make_policy(BC()), {"discount": UNDISCOUNTED, "fqe": FQE(steps=2)}

    def estimates():
        logged = logged_replies(dialogs, tokenizer, max_length=64)
        rows = known_outcomes(logged).rows
        return all_estimates(("fqe",), policy, score_replies(policy, logged), logged, train=rows, **how)

    found = estimates()
    assert found.measures["ope/logged"].value == pytest.approx(1.5)
    outcomes = "Only last replies are rated: a reward is taken for its dialog's outcome."
    left_out = "1 of 3 dialogs have a reply without a reward and are left out."
    assert found.notes["ope/logged"] == f"{outcomes} {left_out}"
    assert "2 of 6 training replies have no reward: Q guesses it from the others." in found.notes["ope/fqe"]
    dialogs[0].messages[1] = turns[1] | {"reward": 0.0}
    assert estimates().measures["ope/logged"].value == pytest.approx(1)
    for dialog in dialogs:
        dialog.messages = [*turns, turns[0], last]
    found = estimates()
    assert not found.measures
    assert found.notes["ope/fqe"] == "Undefined: none of the 6 training replies has a reward."
    assert found.notes["ope/logged"] == "3 of 3 dialogs have a reply without a reward and are left out."


def test_everything_together_with_a_checkpoint_as_its_own_behaviour(make_policy, tokenizer, logged, tmp_path):
    policy = make_policy(ILQL(top_k=3))  # cuts logged tokens off
    for name, one in (("cut", policy), ("whole", make_policy(BC()))):
        save_policy(one, tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    how = {"discount": UNDISCOUNTED, "fqe": FQE(steps=2), "dialogs": DIALOGS, "train": logged.rows}
    behaviour = read_behaviour(tmp_path / "whole", DIALOGS, max_length=64)
    own = make_policy(BC())
    found = all_estimates(
        ("fqe", "dm", "wis"), own, score_replies(own, logged), logged, behaviour=behaviour, **how
    )
    assert set(found.measures) == {
        "ope/logged",
        "ope/fqe",
        "ope/fqe_td",
        "ope/wis",
        "ope/n_eff",
        "ope/weight",
        "ope/outside",
    }
    assert found.measures["ope/outside"].value == pytest.approx(0)
    assert found.measures["ope/wis"].value == pytest.approx(found.measures["ope/logged"].value)
    assert found.measures["ope/n_eff"].value == pytest.approx(2, rel=1e-6)
    lost = all_estimates(("wis",), policy, score_replies(policy, logged), logged, behaviour=behaviour, **how)
    assert lost.notes["ope/wis"].startswith("Undefined: in every dialog the policy")
    cut = read_behaviour(tmp_path / "cut", DIALOGS, max_length=64)
    undefined = all_estimates(("wis",), own, score_replies(own, logged), logged, behaviour=cut, **how)
    assert undefined.notes["ope/wis"] == f"Undefined: {tmp_path}/cut gives probability 0 to logged tokens."
