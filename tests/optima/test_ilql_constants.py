"""ILQL and its neighbours reach the constants of tiny decision processes, through the real trainer on a table
(tests/optima/tabular.py).

A, B and C are tokens; the user says U. Losses are means over decisions and constants are fixed points, so
neither a common factor of a loss (the seed's squared error has no half, ours neither) nor the number of Q
heads, each with a loss of its own, moves them. Tolerances: 1e-4 is the rounding of the constants; the trainer
itself ends within 1e-5.
"""

from __future__ import annotations

import math

import pytest
import torch

from rl_dialog.methods import AWAC, BC, ILQL, SARSA, MCReturns, UtteranceILQL
from tests.optima.tabular import PUBLISHED, tabular_lm, tabular_policy

A, B, C, U = 0, 1, 2, 3


def iql(tau: float, **fields) -> ILQL:
    """ILQL with its value part only, undiscounted."""
    plain = {"gamma": 1.0, "cql_weight": 0.0, "cql_support": 1.0, "awac_weight": 0.0, "alpha": 1.0}
    return ILQL(tau=tau, **(PUBLISHED | plain | fields))


def near(value: float, tolerance: float = 1e-4):
    return pytest.approx(value, abs=tolerance)


@pytest.fixture
def bandit(make_row):
    """bandit((action, reward, count), ...): one-token conversations. The user says A, so every token of the
    vocabulary may be an arm."""

    def build(*arms):
        return [
            make_row([A, action], [(1, 1, float(reward))])
            for action, reward, count in arms
            for _ in range(count)
        ]

    return build


@pytest.mark.parametrize(("tau", "v"), [(0.5, 0.1), (0.7, 0.20588), (0.9, 0.5), (0.99, 0.91667)])
def test_the_value_of_a_bandit_is_the_expectile_of_its_rewards(learn, bandit, tau, v):
    """Reward 1 in 1 of 10, else 0: V = w with w = .1 tau / (.1 tau + .9 (1 - tau))."""
    learned = learn(iql(tau), bandit((A, 1, 1), (B, 0, 9)), 2)
    assert learned.v([A]) == near(v)
    assert learned.q([A]) == [near(1.0), near(0.0)]


def test_of_two_values_equally_often_the_expectile_is_tau(learn, bandit):
    assert learn(iql(0.7), bandit((A, 1, 1), (B, 0, 1)), 2).v([A]) == near(0.7)


# --- the branch graph ---------------------------------------------------------------------------------------


@pytest.fixture
def branch(make_row):
    """S0: 5 of 11 take A -> -4; 6 of 11 take B -> S2, where 1 of 6 takes A -> -2 and 5 of 6 take B -> -6. The
    user says A."""
    first = [make_row([A, A], [(1, 1, -4.0)])] * 5
    good = [make_row([A, B, A, A], [(1, 1, 0.0), (3, 3, -2.0)])]
    return first + good + [make_row([A, B, A, B], [(1, 1, 0.0), (3, 3, -6.0)])] * 5


S0, S2 = [A], [A, B, A]


@pytest.mark.parametrize(
    ("tau", "v2", "best"),
    [
        (0.5, -5.33333, A),
        (0.7, -4.72727, A),
        (0.8, -4.22222, A),
        (0.833, -4.0024, A),
        (0.834, -3.9952, B),
        (0.9, -3.42857, B),
        (0.95, -2.83333, B),
    ],
)
def test_the_branch_graph_flips_at_five_sixths(learn, branch, tau, v2, best):
    """V(S2) = -6 + 4 w, w = tau / (tau + 5 (1 - tau)); B beats A's -4 where w > 1/2, that is tau > 5/6 =
    .8333..."""
    learned = learn(iql(tau, beta=1e5), branch, 2, rate=2.0)
    assert learned.v(S2) == near(v2)
    assert learned.q(S0) == [near(-4.0), near(v2)]
    assert [learned.greedy(S0), learned.greedy(S2)] == [best, A]


def test_at_five_sixths_both_branches_are_worth_the_same(learn, branch):
    assert learn(iql(5 / 6), branch, 2, rate=2.0).q(S0) == [near(-4.0, 1e-5)] * 2


@pytest.mark.parametrize("kind", [SARSA, MCReturns])
def test_averages_take_the_safe_branch(learn, branch, kind):
    """The mean at S2 is -5 1/3, whether it is bootstrapped or summed up."""
    learned = learn(
        kind(gamma=1.0, cql_weight=0.0, awac_weight=0.0, alpha=1.0, beta=1e5), branch, 2, rate=2.0
    )
    assert learned.q(S0) == [near(-4.0), near(-16 / 3)]
    assert learned.greedy(S0) == A


@pytest.mark.parametrize(("tau", "best"), [(0.833, A), (0.834, B)])
def test_whole_replies_flip_at_the_same_expectile(learn, branch, tau, best):
    """One-token replies: the per-utterance method has the same values, read where a reply ends."""
    learned = learn(
        UtteranceILQL(warmup=0.0, tau=tau, gamma=1.0, awac_weight=0.0, alpha=1.0), branch, 2, rate=2.0
    )
    w = tau / (tau + 5 * (1 - tau))
    values = [learned.q_of_reply([*S0, A]), learned.q_of_reply([*S0, B])]
    assert values == [near(-4.0), near(-6 + 4 * w)]
    assert values.index(max(values)) == best


def test_whole_replies_earn_fractions_and_are_discounted_by_the_turn(learn, make_row):
    """Two replies of two tokens, -.5 and 1, gamma .9: Q of the second 1, of the first -.5 + .9."""
    learned = learn(
        UtteranceILQL(warmup=0.0, gamma=0.9, awac_weight=0.0, alpha=1.0),
        [make_row([U, A, B, U, B, B], [(1, 2, -0.5), (4, 5, 1.0)])],
        4,
        rate=0.6,
    )
    assert [learned.q_of_reply([U, A, B]), learned.q_of_reply([U, A, B, U, B, B])] == [near(0.4), near(1.0)]


def test_cloning_takes_the_common_branch(learn, branch):
    """6 of 11 take B, 5 of 6 take B again: cloning walks into -6."""
    learned = learn(BC(), branch, 2, rate=4.0)
    assert learned.chances(S0) == [near(5 / 11), near(6 / 11)]
    assert learned.chances(S2) == [near(1 / 6), near(5 / 6)]


# --- stitching, luck, tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.7, 0.9])
def test_stitching(learn, make_row, tau):
    """s0 -A-> s1 -B-> 0 and, elsewhere, s1 -A-> 1, equally often: V(s1) = tau, Q(s0, A) = gamma V(s1) = .9
    tau, though nobody got from s0 to 1.

    A state is the last two tokens, so both conversations meet in s1 = (A, U); C opens the second one. Cloned
    whole, they never meet.
    """
    rows = [make_row([U, A, U, B], [(1, 1, 0.0), (3, 3, 0.0)]), make_row([C, A, U, A], [(3, 3, 1.0)])]
    learned = learn(iql(tau, gamma=0.9), rows, 4, key=lambda ids: ids[-2:])
    assert learned.v([U, A, U]) == near(tau)
    assert learned.q([U])[A] == near(0.9 * tau)
    q = learned.q([U, A, U])
    assert q[A] == near(1.0) and q[B] == near(0.0)
    assert learn(BC(), rows, 4, rate=10.0).chances([U, A, U])[A] < 0.01


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("kind", [ILQL, MCReturns])
def test_luck_is_no_choice(learn, make_row, kind, tau):
    """A pays 1 or -1, and only the user's next word (B or C) says which; B pays 0: Q(A) is the mean, 0, so V
    is 0 whatever tau. Returns that Q averages are no different.
    """
    lucky = [make_row([U, A, word], [(1, 1, reward)]) for word, reward in ((B, 1.0), (C, -1.0))]
    method = kind(tau=tau, gamma=1.0, cql_weight=0.0, awac_weight=0.0, alpha=1.0)
    learned = learn(method, lucky + [make_row([U, B], [(1, 1, 0.0)])], 4)
    assert [learned.q([U])[A], learned.q([U])[B], learned.v([U])] == [near(0.0)] * 3


@pytest.mark.parametrize(("others", "v"), [(0, 0.8), (1, 0.8 / 1.1)])
def test_an_expectile_of_returns_takes_luck_for_skill(learn, bandit, others, v):
    """V fitted to returns 1 and -1 at tau .9: .9 (1 - V) = .1 (V + 1), V = .8, though no choice earns more
    than 0. With B's 0 a third of the data, .9 (1 - V) = .1 (V + 1 + V) and V = .8 / 1.1. Q, which bootstraps,
    still knows that A is worth 0.
    """
    learned = learn(iql(0.9, mc_returns=True), bandit((A, 1, 1), (A, -1, 1), (B, 0, others)), 2)
    assert learned.v([A]) == near(v)
    assert learned.q([A])[A] == near(0.0)


REPLIES = ((A, C), 0.0), ((A, B), 1.0), ((B, C), 2.0)


@pytest.mark.parametrize(
    ("tau", "token", "whole"), [(0.5, 1.0, 1.0), (0.7, 1.4, 1.30769), (0.9, 1.8, 1.72727)]
)
def test_tokens_are_chosen_one_by_one_and_replies_at_once(learn, make_row, tau, token, whole):
    """Replies AC 0, AB 1, BC 2, equally often.

    By tokens: V(A) = tau, V(B) = 2, and at the root 2 of 3 begin with A: w = tau / (tau + 2 (1 - tau)), V = 2
    w + tau (1 - w). By replies: tau (2 - V) = (1 - tau) ((V - 1) + V) for V > 1, so V = (1 + tau) / (2 -
    tau).
    """
    rows = [make_row([U, *reply], [(1, 2, reward)]) for reply, reward in REPLIES]
    learned = learn(iql(tau), rows, 4)
    assert [learned.v([U, A]), learned.v([U])] == [near(tau), near(token)]
    at_once = learn(UtteranceILQL(warmup=0.0, tau=tau, gamma=1.0, awac_weight=0.0, alpha=1.0), rows, 4)
    assert at_once.v([U]) == near(whole)
    assert [at_once.q_of_reply([U, *reply]) for reply, _ in REPLIES] == [
        near(reward) for _, reward in REPLIES
    ]


# --- discounts, positions -----------------------------------------------------------------------------------


@pytest.fixture
def word_games(make_row):
    """Guesses of six tokens (five letters A, the end of turn B) with five colours C between: one game is won
    at the third guess, one is lost."""

    def game(first, guesses):
        ids, spans = [first], []
        for guess in range(guesses):
            spans.append((len(ids), len(ids) + 5, 0.0 if (guesses, guess) == (3, 2) else -1.0))
            ids += [A] * 5 + [B] + [C] * 5
        return make_row(ids, spans)

    return [game(B, 3), game(U, 6)]


@pytest.mark.parametrize(
    ("gamma", "discount", "won", "lost"),
    [(0.99, "token", -1.84633, -4.93351), (0.99, "turn", -1.99, -5.85199), (1.0, "token", -2.0, -6.0)],
)
def test_values_of_a_word_game(learn, word_games, gamma, discount, won, lost):
    """Guess k pays at its sixth token, the game's token 6 k - 1: -(g^5 + g^11) won and
    -(g^5 + g^11 + ... + g^35) lost; per turn -(1 + g) and -(1 + g + ... + g^5); undiscounted -2 and -6. One
    token at a time over 18 and 36 decisions (one in 54 each, hence the rate), or summed up.
    """
    values = PUBLISHED | {
        "gamma": gamma,
        "discount": discount,
        "cql_weight": 0.0,
        "awac_weight": 0.0,
        "alpha": 1.0,
    }
    for method, steps in ((SARSA(**values), 180), (MCReturns(**values), 30)):
        learned = learn(method, word_games, 4, steps=steps, rate=40.0)
        assert [learned.q([B])[A], learned.q([U])[A]] == [near(won), near(lost)]


def test_only_the_states_of_decisions_count(train, make_row):
    """U C A B C C B B: two replies between the user's tokens. Whatever the tables say after U's first, B's or
    C's tokens, the loss is the same."""
    row = make_row([U, C, A, B, C, C, B, B], [(2, 3, 0.5), (6, 7, -1.0)])
    policy = tabular_policy(tabular_lm([row], 4), ILQL(alpha=0.0))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    decisions = [
        policy.lm.walk(torch.as_tensor(row.input_ids[None]).long()).last_hidden_state[0, t].argmax().item()
        for t in (1, 2, 5, 6)
    ]
    names = "train/loss", "train/q_loss", "train/v_loss", "train/cql_loss", "train/nll"
    found = []
    for spoiled in (False, True):
        if spoiled:
            others = [s for s in range(policy.lm.config.states) if s not in decisions]
            for table in (
                policy.lm.table,
                *(head.out for head in (*policy.heads.q, *policy.heads.q_target, policy.heads.v)),
            ):
                table.weight.data[:, others] += 1e3
        metrics = train(policy, [row], 1, 0.0)
        found.append([metrics[name] for name in names])
    assert found[0] == found[1]


def test_a_game_s_only_guess_has_six_decisions(make_row):
    """The seed's 14 tokens: <a> c r a n e </a>, five colours, </s> </eod>; letters and the end of turn are
    actions 0 to 5. The seed's seventh state, its token 13, is worth nothing since the game is over: here
    there is none.
    """
    from rl_dialog.data.batch import collate

    won = make_row([9, 2, 17, 0, 13, 4, 6, *[7] * 5, 8, 9], [(1, 6, 0.0)])
    batch = collate([won])
    assert (batch.states.tolist(), batch.actions.tolist()) == (list(range(6)), [2, 17, 0, 13, 4, 6])
    assert batch.dones.tolist() == [False] * 5 + [True]
    two = make_row([9, 2, 17, 0, 13, 4, 6, *[7] * 5, 8, *[3] * 5, 6], [(1, 6, -1.0), (13, 18, 0.0)])
    assert collate([two]).states.tolist() == [*range(6), *range(12, 18)]
    assert collate([make_row([9], [])]).decisions == 0


# --- conservatism, cloning ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "q"), [(0.01, 0.99620), (0.1, 0.96273), (1.0, 0.69834), (10.0, 0.16797), (2.0, 0.5213)]
)
def test_the_fixed_points_of_the_conservative_term(learn, bandit, c, q):
    """A pays 1 and B -1, equally often, so Q = (q, -q) with (q - 1) + c (sigmoid(2 q) - 1/2) = 0 for each
    head. With a halved squared error, as in LMRL-Gym, c counts double: its 1 is our 2.
    """
    learned = learn(iql(0.5, cql_weight=c), bandit((A, 1, 1), (B, -1, 1)), 2, rate=0.3)
    assert learned.q([A]) == [near(q, 1e-3), near(-q, 1e-3)]


def test_the_conservative_term_alone_clones(learn, bandit):
    """Without a TD error softmax(Q) = 7/10, 3/10, for both heads."""
    learned = learn(iql(0.5, q_weight=0.0, cql_weight=1.0), bandit((A, 1, 7), (B, 5, 3)), 2)
    for head in range(2):
        assert torch.tensor(learned.q([A], head=head)).softmax(0).tolist() == [near(0.7), near(0.3)]


def test_what_is_often_said_is_not_lifted_for_that(learn, bandit):
    """Both arms pay 1, and A is said three times as often: they are worth the same, and a policy of any
    strength says what the logs say. With the whole term A would be said the oftener the stronger it is."""
    arms, fields = bandit((A, 1, 3), (B, 1, 1)), {"cql_weight": 0.3, "awac_weight": 1.0, "beta": 10.0}
    learned = learn(iql(0.5, **fields, cql_support=0.1), arms, 2, steps=400)
    assert learned.q([A]) == [near(1.0, 1e-3), near(1.0, 1e-3)]
    assert learned.chances([A]) == [near(0.75, 0.01), near(0.25, 0.01)]
    unrated = bandit((A, math.nan, 9), (B, math.nan, 3))  # which the term holds like any other
    values = learn(iql(0.5, **fields, cql_support=0.1), arms + unrated, 2, steps=1600).q([A])
    assert values == [near(1.0, 1e-3), near(1.0, 1e-3)]
    whole = learn(iql(0.5, **fields), arms, 2, steps=400)
    (high, low), chance = whole.q([A]), whole.chances([A])[0]
    # 2 p (Q - 1) = w (p - softmax(Q)) for both
    assert 1.5 * (high - 1) == near(0.3 * (0.75 - 1 / (1 + math.exp(low - high))), 1e-3) and chance > 0.9


def test_what_is_seldom_said_is_held_down(learn, bandit):
    """One reply in 25 pays 1 more: below `cql_support` the term moves Q of it, and of nothing else."""
    arms, fields = bandit((A, 0, 24), (B, 1, 1)), {"cql_weight": 0.3, "awac_weight": 1.0}
    often, seldom = learn(iql(0.5, **fields, cql_support=0.1), arms, 2, steps=800).q([A])
    share = 1 / (1 + math.exp(often - seldom))  # softmax(Q) of B
    assert often == near(0.0, 0.01)
    assert 2 * 0.04 * (seldom - 1) == near(0.3 * (0.04 - share), 2e-3) and seldom < 0.5


def test_the_conservative_term_sinks_what_nobody_said(learn, bandit):
    """C is never taken: with the term its Q goes on falling, without it it stays where it began."""
    arms = bandit((A, 1, 1), (B, 0, 1))
    with_term = {
        steps: learn(iql(0.5, cql_weight=1.0), arms, 3, steps=steps).q([A])[C] for steps in (20, 100)
    }
    assert with_term[100] < with_term[20] - 1 < -2
    assert learn(iql(0.5), arms, 3).q([A])[C] == 0


@pytest.mark.parametrize(("beta", "chance"), [(0.0, 0.5), (2.0, 0.8808), (4.0, 0.9820)])
def test_advantage_weighted_cloning(learn, bandit, beta, chance):
    """A pays 1, B pays 0, equally often, tau 1/2: A = +-1/2, weights e^(+-beta/2), so the clone says A with
    probability sigmoid(beta)."""
    learned = learn(
        AWAC(**PUBLISHED, tau=0.5, gamma=1.0, cql_weight=0.0, awac_beta=beta, alpha=1.0),
        bandit((A, 1, 1), (B, 0, 1)),
        2,
    )
    assert learned.chances([A])[A] == near(chance)


def test_signs_of_the_advantage_alone_clone_what_is_better_than_v(learn, bandit):
    """awac_beta 1: weight 1 above V and 0 below. Of A 2, B 1/2, C 0, equally often: at tau .5, V = 5/6 and A
    alone is cloned; at tau .2, .2 (2.5 - 2 V) = .8 V, V = .41667, and A and B are, equally.
    """
    arms = bandit((A, 2, 1), (B, 0.5, 1), (C, 0, 1))
    fields = {"awac_weight": 1.0, "awac_weights": "sign", "awac_beta": 1.0}
    assert (
        learn(iql(0.5, **fields), arms, 3, steps=200).chances([A], BC())[A] > 0.97
    )  # the others' chances fall as 1/steps
    assert (
        learn(iql(0.2, **fields), arms, 3, steps=200).chances([A], BC())[:2]
        == [pytest.approx(0.5, abs=0.01)] * 2
    )


@pytest.mark.parametrize(("beta", "chance"), [(0.0, 0.1), (1.0, 0.23197), (4.0, 0.85848)])
def test_steering_a_clone(learn, bandit, beta, chance):
    """Logged 9 B (0) to 1 A (1): the log-odds of A are log(1/9) + beta, its chance .1, sigmoid(1 - 2.1972)
    and sigmoid(4 - 2.1972)."""
    learned = learn(iql(0.7, awac_weight=1.0, beta=beta), bandit((A, 1, 1), (B, 0, 9)), 2)
    assert learned.chances([A])[A] == near(chance)
