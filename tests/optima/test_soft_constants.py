"""Methods whose backup looks at every token (kl_control, psi, cql, bcq) reach their known answers, through
the real trainer on a table.

A maximum or logsumexp reads tokens that nobody tried, too, so here every token of the vocabulary is tried in
every state, unless a test is about just that; the user says A. r/c + k is our convention ("reward"), r + c k
the 2019 code's ("kl").
"""

from __future__ import annotations

import math

import pytest

from rl_dialog.methods import BCQ, CQL, ILQL, WayOffPolicy
from tests.optima.tabular import PUBLISHED

RAW = {"origin": "logits", "state_value": False}  # Q is the raw logits

A, B, C = 0, 1, 2
HALF = [math.log(0.5)] * 2


def near(value: float, tolerance: float = 1e-4):
    return pytest.approx(value, abs=tolerance)


@pytest.fixture
def tree(make_row):
    """tree((r_A, r_B), counts): all four conversations of two one-token turns; the second token earns the
    reward."""

    def build(rewards, counts=(1, 1, 1, 1)):
        replies = (A, A), (A, B), (B, A), (B, B)
        return [
            make_row([A, first, A, second], [(1, 1, 0.0), (3, 3, rewards[second])])
            for (first, second), count in zip(replies, counts, strict=True)
            for _ in range(count)
        ]

    return build


@pytest.fixture
def elsewhere(make_row):
    """A conversation that begins with B and earns 1: rewards that are all 0 are refused, and no state of
    `tree` leads here."""
    return [make_row([B, A], [(1, 1, 1.0)])]


ROOT, LEAVES = [A], ([A, A, A], [A, B, A])


# --- psi ----------------------------------------------------------------------------------------------------


def test_psi_without_reward_is_the_prior(learn, tree, elsewhere):
    """Q = log p in every state, its logsumexp 0, whatever the data's own frequencies."""
    log_p = [math.log(0.7), math.log(0.3)]
    learned = learn(
        WayOffPolicy(backup="psi", **RAW, gamma=1.0, c=1.0, alpha=1.0),
        tree((0.0, 0.0), (1, 3, 2, 1)) + elsewhere,
        2,
        prior=log_p,
        rate=4.0,
    )
    for state in (ROOT, *LEAVES):
        assert learned.logits(state).tolist() == [near(value) for value in log_p]
        assert learned.logits(state).logsumexp(0).item() == near(0.0)


@pytest.mark.parametrize(("c", "soft", "hard"), [(1.0, 0.62011, 0.30685), (0.5, 1.43378, 1.30685)])
def test_psi_before_two_last_actions(learn, tree, c, soft, hard):
    """Rewards 1 and 0, p = 1/2: Q = (1/c - log 2, -log 2), logsumexp log((e^(1/c) + 1) / 2), maximum 1/c -
    log 2. One turn earlier Q is the logsumexp plus log(1/2), and the policy at the end is p e^(r/c),
    normalised.
    """
    learned = learn(
        WayOffPolicy(backup="psi", **RAW, gamma=1.0, c=c, alpha=1.0),
        tree((1.0, 0.0)),
        2,
        prior=HALF,
        rate=4.0,
    )
    for state in LEAVES:
        assert learned.logits(state).logsumexp(0).item() == near(soft)
        assert learned.logits(state).max().item() == near(hard)
        assert learned.chances(state)[A] == near(1 / (1 + math.exp(-1 / c)))
    assert learned.logits(ROOT).tolist() == [near(soft - math.log(2))] * 2


@pytest.mark.parametrize(("c", "chance"), [(0.5, 0.64877), (1.0, 0.40461), (4.0, 0.24300)])
def test_a_larger_c_stays_closer_to_the_prior(learn, tree, c, chance):
    """p = (.2, .8), rewards 1 and 0: the odds of A are e^(1/c) / 4."""
    learned = learn(
        WayOffPolicy(backup="psi", **RAW, gamma=1.0, c=c, alpha=1.0),
        tree((1.0, 0.0)),
        2,
        prior=[math.log(0.2), math.log(0.8)],
        rate=4.0,
    )
    assert learned.chances(LEAVES[0])[A] == near(chance)


def test_psi_discounts_the_value(learn, tree):
    """gamma .5: Q(first) = log(1/2) + .5 * .62011 = -.38309."""
    assert (
        learn(
            WayOffPolicy(backup="psi", **RAW, gamma=0.5, c=1.0, alpha=1.0),
            tree((1.0, 0.0)),
            2,
            prior=HALF,
            rate=4.0,
        )
        .logits(ROOT)
        .tolist()
        == [near(-0.38309)] * 2
    )


# --- kl_control ---------------------------------------------------------------------------------------------


def test_kl_control(learn, tree):
    """Q = r + log p - log pi and pi = softmax(Q): 2 Q = r + log p + L with L = 2 log sum_a sqrt(p e^r).

    p = 1/2, r = (1, 0): L = 2 log(.70711 * 2.64872) = 1.25501, Q = (.78093, .28093). One turn earlier pi =
    1/2 = p, so Q is the maximum, .78093.
    """
    learned = learn(
        WayOffPolicy(**RAW, gamma=1.0, c=1.0, alpha=1.0), tree((1.0, 0.0)), 2, prior=HALF, rate=4.0
    )
    for state in LEAVES:
        assert learned.logits(state).tolist() == [near(0.78093), near(0.28093)]
    assert learned.logits(ROOT).tolist() == [near(0.78093)] * 2


def test_kl_control_without_reward_halves_the_prior_s_logits(learn, tree, elsewhere):
    """r = 0, p = (.7, .3): pi is proportional to sqrt(p), because -log pi is sampled at the logged token and
    Q itself is log pi."""
    learned = learn(
        WayOffPolicy(**RAW, gamma=1.0, c=1.0, alpha=1.0),
        tree((0.0, 0.0)) + elsewhere,
        2,
        prior=[math.log(0.7), math.log(0.3)],
        rate=4.0,
    )
    roots = math.sqrt(0.7), math.sqrt(0.3)
    assert learned.chances(LEAVES[0]) == [near(root / sum(roots)) for root in roots]


def test_without_a_prior_term_it_is_q_learning(learn, tree):
    """c = 0 in the 2019 convention: Q(second) = r and Q(first) = gamma max r = .9."""
    learned = learn(
        WayOffPolicy(**RAW, coefficient="kl", c=0.0, gamma=0.9, alpha=1.0),
        tree((1.0, -1.0)),
        2,
        prior=HALF,
        rate=4.0,
    )
    assert learned.logits(LEAVES[0]).tolist() == [near(1.0), near(-1.0)]
    assert learned.logits(ROOT).tolist() == [near(0.9)] * 2


# --- across turns -------------------------------------------------------------------------------------------


@pytest.fixture
def two_turns(make_row):
    """Reply B (.5), AB (1) or AA (0), then the user's A, then a reply of A (2) or B (-1): B after A ends a
    first reply of two tokens."""
    firsts = ((B,), 0.5), ((A, B), 1.0), ((A, A), 0.0)
    seconds = (A, 2.0), (B, -1.0)
    return [
        make_row([A, *reply, A, second], [(1, len(reply), reward), (len(reply) + 2, len(reply) + 2, later)])
        for reply, reward in firsts
        for second, later in seconds
    ]


SOFT = math.log((math.exp(2) + math.exp(-1)) / 2)


@pytest.mark.parametrize(
    ("method", "value", "own"),
    [
        (WayOffPolicy(**RAW, coefficient="kl", c=0.0, gamma=1.0, alpha=1.0), 2.0, 0.0),
        (WayOffPolicy(backup="psi", **RAW, gamma=1.0, c=1.0, alpha=1.0), SOFT, math.log(0.5)),
        (CQL(**PUBLISHED, gamma=1.0, cql_weight=0.0, awac_weight=0.0, alpha=1.0), 2.0, 0.0),
        (BCQ(**PUBLISHED, gamma=1.0, alpha=1.0), 2.0, 0.0),
        (ILQL(**PUBLISHED, tau=0.5, gamma=1.0, cql_weight=0.0, awac_weight=0.0, alpha=1.0), 0.5, 0.0),
        (ILQL(**PUBLISHED, tau=0.9, gamma=1.0, cql_weight=0.0, awac_weight=0.0, alpha=1.0), 1.7, 0.0),
    ],
    ids=["kl_control", "psi", "cql", "bcq", "ilql .5", "ilql .9"],
)
def test_the_end_of_a_reply_is_worth_its_reward_and_the_next_reply(learn, two_turns, method, value, own):
    """gamma 1: Q of the first reply's last token = r1 + V(turn 2), with psi + log p of itself. V(turn 2) of
    rewards 2 and -1, equally often and p = 1/2: the maximum 2, the logsumexp log((e^2 + e^-1) / 2), the
    expectile 3 tau - 1.
    """
    learned = learn(method, two_turns, 2, prior=HALF if method.uses_prior else None, rate=3.0)
    scores = learned.logits if method.uses_prior else learned.q
    first, ended = (list(map(float, scores(context))) for context in ([A], [A, A]))
    assert first[B] == near(0.5 + value + own)
    assert ended == [near(0.0 + value + own), near(1.0 + value + own)]


# --- cql, bcq -----------------------------------------------------------------------------------------------


def test_cql_without_its_term_takes_the_maximum(learn, make_row):
    """A earns 1 and ends; B goes on, and there A earns 0 and B 2: Q(B) = gamma 2 = 1.8, where the average
    would say .9."""
    rows = [make_row([A, A], [(1, 1, 1.0)])]
    rows += [
        make_row([A, B, A, second], [(1, 1, 0.0), (3, 3, reward)]) for second, reward in ((A, 0.0), (B, 2.0))
    ]
    learned = learn(
        CQL(**PUBLISHED, gamma=0.9, cql_weight=0.0, awac_weight=0.0, alpha=1.0, beta=1e5), rows, 2
    )
    assert learned.q([A]) == [near(1.0), near(1.8)]
    assert [learned.greedy([A]), learned.greedy([A, B, A])] == [B, B]


@pytest.mark.parametrize(("threshold", "value", "best"), [(0.15, -2.0, B), (0.3, -6.0, A), (0.0, 0.0, B)])
def test_bcq_backs_up_the_best_of_what_the_logs_make_likely(learn, make_row, threshold, value, best):
    """5 of 11 take A -> -4; 6 of 11 take B, after which 1 of 6 takes A -> -2 and 5 of 6 B -> -6. There p(A) /
    p(B) = 1/5: a threshold of .15 has A in the support, .3 only B; threshold 0 believes in C, which nobody
    ever said and whose Q is still 0.
    """
    rows = [make_row([A, A], [(1, 1, -4.0)])] * 5 + [make_row([A, B, A, A], [(1, 1, 0.0), (3, 3, -2.0)])]
    rows += [make_row([A, B, A, B], [(1, 1, 0.0), (3, 3, -6.0)])] * 5
    learned = learn(BCQ(**PUBLISHED, threshold=threshold, gamma=1.0, alpha=1.0, beta=1e5), rows, 3, rate=1.5)
    assert learned.q([A])[:2] == [near(-4.0), near(value)]
    assert learned.greedy([A], BCQ(threshold=0.15, beta=1e5)) == best
