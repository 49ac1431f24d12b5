"""KL-control and Psi-learning targets by hand; every score is a table.

The loss is Huber's, so where |Q - y| < 1 the gradient of Q is Q - y: with Q set to y + .25 it must be exactly
.25 (`gap`).
"""

import math

import pytest
import torch
import torch.nn.functional as F

from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import WayOffPolicy
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense, Mixture

PUBLISHED = {
    "origin": "logits",
    "state_value": False,
}  # Q is the raw logits, so that a table of logits is a table of Q


def leaf(values):
    return torch.as_tensor(values, dtype=torch.float32).clone().requires_grad_()


@pytest.fixture
def one(make_row):
    """<u> 0: one action and the end, reward 1."""

    def build(log_p=0.0, reward=1.0):
        return collate([make_row([9, 0], [(1, 1, reward)])], prior_logp=[[log_p]])

    return build


@pytest.fixture
def two(make_row):
    """<u> 0 1: a first action that leads to a second one, which ends it; reward .5 on the second."""

    def build(log_p=(0.0, 0.0)):
        return collate([make_row([9, 0, 1], [(1, 2, 0.5)])], prior_logp=[list(log_p)])

    return build


def gap(method, q, target, batch):
    """Q - y of each decision."""
    lm = leaf(q)
    method.loss(
        Outputs(Dense(lm), lm_target=(Dense(torch.as_tensor(target, dtype=torch.float32)),)), batch
    ).total.backward()
    return lm.grad[torch.arange(batch.decisions), batch.actions]


def policy_row(q, pi, tokens=3):
    """A row of Q whose first entry is q and whose softmax there is pi."""
    rest = (1 - pi) / (tokens - 1)
    return [q] + [q + math.log(rest / pi)] * (tokens - 1)


@pytest.mark.parametrize(("backup", "value"), [("psi", 3.4076059), ("max", 3.0)])
def test_the_backup_of_logits_one_two_three(two, backup, value):
    """log(e + e^2 + e^3) = 3.4076; the maximum is 3. gamma 1, no reward and no prior term (p = 1 = pi) at the
    first action."""
    method = WayOffPolicy(**PUBLISHED, backup=backup, gamma=1.0, c=1.0)
    q = [[value + 0.25, -1e4, -1e4], [-1e4, 0.5 + 0.25, -1e4]]  # pi = 1 on both actions
    got = gap(method, q, [[9.0, 9, 9], [1, 2, 3]], two())
    torch.testing.assert_close(got, torch.tensor([0.25, 0.25]), rtol=0, atol=2e-6)


def test_the_value_is_discounted(two):
    """gamma .5 per token: .5 * 3.4076 = 1.7038; per turn a reply's first token is not discounted."""
    table = [[0.0, 0, 0], [1, 2, 3]]
    got = gap(
        WayOffPolicy(backup="psi", **PUBLISHED, gamma=0.5, c=1.0),
        [[1.7038030 + 0.25, 0, 0], [0, 0, 0]],
        table,
        two(),
    )
    assert got[0].item() == pytest.approx(0.25, abs=2e-6)
    got = gap(
        WayOffPolicy(backup="psi", **PUBLISHED, gamma=0.5, discount="turn", c=1.0),
        [[3.4076059 + 0.25, 0, 0], [0, 0, 0]],
        table,
        two(),
    )
    assert got[0].item() == pytest.approx(0.25, abs=2e-6)


@pytest.mark.parametrize(
    ("coefficient", "c", "y"),
    [
        ("kl", 0.5, 1 + 0.3465736),  # 1 + .5 * log(.5 / .25)
        ("kl", 0.0, 1.0),
        ("kl", 2.0, 1 + 1.3862944),
        ("reward", 0.5, 2 + 0.6931472),  # 1 / .5 + log 2
        ("reward", 2.0, 0.5 + 0.6931472),
    ],
)
def test_kl_control_s_reward(one, coefficient, c, y):
    """p = .5, pi = .25, r = 1, the end."""
    got = gap(
        WayOffPolicy(**PUBLISHED, backup="max", c=c, coefficient=coefficient),
        [policy_row(y + 0.25, 0.25)],
        [[0.0] * 3],
        one(math.log(0.5)),
    )
    assert got.item() == pytest.approx(0.25, abs=2e-6)


@pytest.mark.parametrize(
    ("coefficient", "c", "y"),
    [("kl", 0.5, 1 - 0.3465736), ("reward", 0.5, 2 - 0.6931472), ("reward", 1.0, 1 - 0.6931472)],
)
@pytest.mark.parametrize("pi", [0.25, 0.9])
def test_psi_leaves_the_policy_s_own_term_to_the_logsumexp(one, coefficient, c, y, pi):
    """r / c + log p or r + c log p, whatever pi is: equation 8 has no -log pi."""
    got = gap(
        WayOffPolicy(**PUBLISHED, backup="psi", c=c, coefficient=coefficient),
        [policy_row(y + 0.25, pi)],
        [[0.0] * 3],
        one(math.log(0.5)),
    )
    assert got.item() == pytest.approx(0.25, abs=2e-6)


def test_the_two_conventions(one):
    """k = log(.3 / .25) = .18232. r / 2 + k = .68232 and r + 2 k = 1.36464 differ in scale; r + .5 k =
    1.09116 is another trade-off."""
    batch, q = one(math.log(0.3)), 1.0

    def y(coefficient, c):
        return (
            q
            - gap(
                WayOffPolicy(**PUBLISHED, backup="max", c=c, coefficient=coefficient),
                [policy_row(q, 0.25)],
                [[0.0] * 3],
                batch,
            ).item()
        )

    assert y("reward", 2.0) == pytest.approx(0.68232, abs=1e-5)
    assert y("kl", 2.0) == pytest.approx(1.36464, abs=1e-5)
    assert y("kl", 0.5) == pytest.approx(1.09116, abs=1e-5)


def test_the_loss_is_huber_s(make_row):
    """Q = (0, 3) against y = (.5, 1): .5 * .25 = .125 and 2 - .5 = 1.5, mean .8125; a Loss is the sum,
    1.625."""
    rows = [make_row([9, 0], [(1, 1, 0.5)]), make_row([9, 0], [(1, 1, 1.0)])]
    batch = collate(rows, prior_logp=[[0.0], [0.0]])
    lm = leaf([[0.0, -1e4], [3.0, -1e4]])
    loss = WayOffPolicy(**PUBLISHED, backup="max", c=1.0).loss(
        Outputs(Dense(lm), lm_target=(Dense(torch.zeros(2, 2)),)), batch
    )
    assert loss.total.item() == pytest.approx(1.625, abs=1e-6)
    assert loss.metrics["q_loss"].item() / batch.decisions == pytest.approx(0.8125, abs=1e-6)
    loss.total.backward()
    assert lm.grad[:, 0].tolist() == [-0.5, 1.0]


def test_nothing_is_bootstrapped_after_the_end_and_something_after_a_cut(make_row):
    """A target of 100 everywhere: y = 1 at the end, 1 + .5 * 100 at a truncation (psi over one token; log(1)
    = 0)."""
    ended = collate([make_row([9, 0], [(1, 1, 1.0)])], prior_logp=[[0.0]])
    cut = collate([make_row([9, 0, 9], [(1, 1, 1.0)], truncated=True)], prior_logp=[[0.0]])
    method = WayOffPolicy(backup="psi", **PUBLISHED, gamma=0.5, c=1.0)
    assert gap(method, [[1.25]], [[100.0]], ended).item() == pytest.approx(0.25)
    assert gap(method, [[51.25], [0.0]], [[100.0], [100.0]], cut).item() == pytest.approx(0.25)


def test_the_end_of_a_reply_is_worth_the_next_reply(make_row):
    """<u> 0 <u> <u> 0: the value after the first reply's only action is that of the second reply's first
    state; user tokens are no states."""
    batch = collate([make_row([9, 0, 9, 9, 0], [(1, 1, 10.0), (4, 4, 20.0)])], prior_logp=[[0.0, 0.0]])
    got = gap(
        WayOffPolicy(backup="psi", **PUBLISHED, gamma=0.5, c=1.0),
        [[10 + 0.5 * 6 + 0.25], [20.25]],
        [[4.0], [6.0]],
        batch,
    )
    torch.testing.assert_close(got, torch.tensor([0.25, 0.25]))


@pytest.mark.parametrize("backup", ["psi", "max"])
def test_only_the_taken_token_gets_a_gradient(two, backup):
    """log pi is sampled at the logged token without gradient, and the target network has none."""
    lm, target = leaf(torch.randn(2, 3)), leaf(torch.randn(2, 3))
    batch = two((-0.5, -2.0))
    WayOffPolicy(**PUBLISHED, backup=backup).loss(
        Outputs(Dense(lm), lm_target=(Dense(target),)), batch
    ).total.backward()
    assert (lm.grad != 0).tolist() == F.one_hot(batch.actions, 3).bool().tolist()
    assert target.grad is None


def test_metrics_are_sums_without_gradient(two):
    """pi = 1/3 at both actions, p = (.5, .1): log p - log pi sums to log(1.5) + log(.3)."""
    batch = two((math.log(0.5), math.log(0.1)))
    loss = WayOffPolicy(**PUBLISHED, backup="psi").loss(
        Outputs(Dense(leaf(torch.full((2, 3), 4.0))), lm_target=(Dense(torch.zeros(2, 3)),)), batch
    )
    got = {name: value.item() for name, value in loss.metrics.items()}
    assert got["q"] == pytest.approx(8.0)
    assert got["nll"] == pytest.approx(2 * math.log(3), abs=1e-5)
    assert got["log_p_minus_log_pi"] == pytest.approx(math.log(1.5) + math.log(0.3), abs=1e-5)
    assert not any(value.requires_grad for value in loss.metrics.values())


@pytest.mark.parametrize("backup", ["psi", "max"])
def test_a_batch_is_the_sum_of_its_rows(make_row, backup):
    rows = [
        make_row([9, 1, 0], [(1, 2, 1.0)]),
        make_row([9, 2, 2, 1, 9, 9, 0, 9], [(1, 3, -1.0), (6, 6, 0.5)], truncated=True),
    ]
    logp = [[-0.1, -0.2], [-1.0, -2.0, -3.0, -4.0]]
    lm, target = torch.randn(7, 3), torch.randn(7, 3)  # six decisions, then the truncated row's last state
    method = WayOffPolicy(**PUBLISHED, backup=backup, gamma=0.9)

    def loss(states, chosen):
        batch = collate([rows[b] for b in chosen], prior_logp=[logp[b] for b in chosen])
        return method.loss(Outputs(Dense(lm[states]), lm_target=(Dense(target[states]),)), batch).total

    torch.testing.assert_close(loss(list(range(7)), [0, 1]), loss([0, 1], [0]) + loss([2, 3, 4, 5, 6], [1]))


def test_its_logits_are_the_policy():
    lm = torch.randn(2, 3)
    assert torch.equal(WayOffPolicy(**PUBLISHED).decode(Outputs(Dense(lm))), lm)
    assert (
        WayOffPolicy().uses_prior
        and WayOffPolicy.plain_lm
        and WayOffPolicy().heads.lm_target
        and not WayOffPolicy().heads.q
    )


def test_a_missing_prior_is_an_error(make_row):
    """Without prior log-probabilities there is nothing to stay near to; the loss must not go on without
    them."""
    batch = collate([make_row([9, 0], [(1, 1, 1.0)])])
    with pytest.raises(TypeError):
        WayOffPolicy(**PUBLISHED).loss(
            Outputs(Dense(torch.zeros(1, 3)), lm_target=(Dense(torch.zeros(1, 3)),)), batch
        )


# --- several passes of the target ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "expected"), [([1.0], 1.0), ([1.0, 3.0], 1.0), ([3.0, 1.0, 2.0], 1.0), ([3.0, 2.0], 2.0)]
)
@pytest.mark.parametrize("lowest", ["before", "after"])
def test_the_lowest_pass_counts(two, passes, expected, lowest):
    """One token of value v in each pass: y = min v at the first action, whichever comes first, minimum or
    maximum."""
    lm = leaf([[expected + 0.25, -1e4], [-1e4, 0.75]])
    targets = tuple(Dense(torch.tensor([[9.0, 9.0], [v, -1e4]])) for v in passes)
    WayOffPolicy(**PUBLISHED, gamma=1.0, c=1.0, lowest=lowest, target_passes=len(passes)).loss(
        Outputs(Dense(lm), lm_target=targets), two()
    ).total.backward()
    assert lm.grad[0, 0].item() == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("backup", "lowest", "expected"),
    [("max", "before", 1.0), ("max", "after", 2.0), ("psi", "before", 1.3133), ("psi", "after", 2.1269)],
)
def test_the_lowest_before_the_maximum_is_the_lower_bound(two, backup, lowest, expected):
    """Passes (2, 0) and (1, 3): token by token the lowest are (1, 0), so max 1 and log(e + 1); afterwards
    min(2, 3) and min(log(e^2 + 1), ...)."""
    lm = leaf([[expected + 0.25, -1e4], [-1e4, 0.75]])
    targets = tuple(Dense(torch.tensor([[9.0, 9.0], row])) for row in ([2.0, 0.0], [1.0, 3.0]))
    WayOffPolicy(**PUBLISHED, backup=backup, gamma=1.0, c=1.0, lowest=lowest).loss(
        Outputs(Dense(lm), lm_target=targets), two()
    ).total.backward()
    assert lm.grad[0, 0].item() == pytest.approx(0.25, abs=1e-3)


def test_psi_may_keep_log_pi_as_the_original_did(one):
    """p = 1/2, pi = 1/4, r = 1, c = 1: y = 1 + log(1/2), and with -log pi kept 1 + log 2."""
    for keep, y in ((False, 1 - math.log(2)), (True, 1 + math.log(2))):
        got = gap(
            WayOffPolicy(backup="psi", **PUBLISHED, c=1.0, keep_log_pi=keep),
            [policy_row(y + 0.25, 0.25)],
            [[0.0] * 3],
            one(math.log(0.5)),
        )
        assert got.item() == pytest.approx(0.25, abs=1e-5)


def test_psi_is_kl_control_with_the_soft_backup(two):
    q, target = [[0.3, 0.1, 0.2], [0.4, 0.0, 0.5]], [[9.0, 9, 9], [1, 2, 3]]
    assert torch.equal(
        gap(WayOffPolicy(backup="psi", **PUBLISHED), q, target, two()),
        gap(WayOffPolicy(**PUBLISHED, backup="psi"), q, target, two()),
    )


# --- divergences over the whole vocabulary, averaged priors -------------------------------------------------

P, PI = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])


def target_of(method, batch, *, prior=None, states=1):
    """y of one decision whose policy is PI: the gap at Q = y + .25 would be .25, and so Q - y is what Huber's
    gradient is while it is small."""
    found = 0.0
    for _ in range(20):  # Q is moved onto y; adding a constant to a row leaves its softmax alone
        lm = leaf((PI.log() - PI.log()[batch.actions[0]] + found).expand(states, 3))
        out = Outputs(
            Dense(lm),
            lm_target=(Dense(torch.zeros(states, 3)),),
            prior=None if prior is None else Dense(prior.log().expand(states, 3)),
        )
        method.loss(out, batch).total.backward()
        found -= lm.grad[0, batch.actions[0]].item()
    return found


@pytest.mark.parametrize("action", [0, 1, 2])
@pytest.mark.parametrize(("kl", "k"), [("exact", -0.6758), ("reverse", -0.6349)])
@pytest.mark.parametrize(("coefficient", "c", "r"), [("reward", 2.0, 0.5), ("kl", 2.0, 1.0)])
def test_the_whole_divergence_stands_in_for_the_sample(make_row, action, kl, k, coefficient, c, r):
    """p = (.7, .2, .1), pi = (.2, .3, .5): KL(pi || p) = .6758, KL(p || pi) = .6349, whatever token was
    logged. r = 1: 1/2 + k, or 1 + 2 k."""
    batch = collate(
        [make_row([9, action], [(1, 1, 1.0)])], prior_logp=[[-99.0]]
    )  # the sampled log p is not read
    method = WayOffPolicy(**PUBLISHED, kl=kl, c=c, coefficient=coefficient)
    assert target_of(method, batch, prior=P) == pytest.approx(
        r + (c if coefficient == "kl" else 1) * k, abs=2e-4
    )
    assert method.prior_every_step and not WayOffPolicy(**PUBLISHED).prior_every_step


def test_the_exact_divergence_is_the_mean_of_the_samples(make_row):
    """sum_a pi(a) (log p(a) - log pi(a)) = -KL(pi || p)."""

    def y(method, action):
        return target_of(
            method,
            collate([make_row([9, action], [(1, 1, 1.0)])], prior_logp=[[P[action].log().item()]]),
            prior=P,
        )

    mean = sum(PI[action].item() * y(WayOffPolicy(**PUBLISHED, c=1.0), action) for action in range(3))
    assert mean == pytest.approx(y(WayOffPolicy(**PUBLISHED, c=1.0, kl="exact"), 0), abs=1e-5)


def test_only_the_decisions_have_a_divergence(make_row):
    """A truncated row has a state without an action behind its decisions."""
    batch = collate([make_row([9, 0, 9], [(1, 1, 1.0)], truncated=True)], prior_logp=[[0.0]])
    assert target_of(WayOffPolicy(**PUBLISHED, kl="exact", c=1.0), batch, prior=P, states=2) == pytest.approx(
        1 - 0.6758, abs=1e-4
    )


@pytest.mark.parametrize(
    ("log_p", "clip", "k"),
    [(0.5, False, 0.6931472), (0.5, True, 0.0), (0.1, False, -0.9162907), (0.1, True, -0.9162907)],
)
def test_a_clipped_prior_rewards_nothing(one, log_p, clip, k):
    """pi = 1/4. What the prior likes better earns log(p / pi) > 0 or nothing; what it likes less costs the
    same either way."""
    y = 1 + k
    got = gap(
        WayOffPolicy(**PUBLISHED, c=1.0, clip_prior=clip),
        [policy_row(y + 0.25, 0.25)],
        [[0.0] * 3],
        one(math.log(log_p)),
    )
    assert got.item() == pytest.approx(0.25, abs=2e-6)


def test_with_an_averaged_prior_and_the_clamp_no_token_earns_anything(make_row):
    """Two priors, equally: p = (.45, .25, .3) over pi = (.2, .3, .5), so k = log 2.25, log .8333, log .6;
    clipped 0, -.1823, -.5108."""
    average = Mixture([Dense(P.log()[None]), Dense(PI.log()[None])], torch.tensor([0.5, 0.5]).log())
    for action, k in enumerate((0.0, -0.1823216, -0.5108256)):
        prior_logp = average.at(torch.tensor([action])).tolist()
        batch = collate([make_row([9, action], [(1, 1, 0.0)])], prior_logp=[prior_logp])
        assert target_of(WayOffPolicy(**PUBLISHED, c=1.0, clip_prior=True), batch) == pytest.approx(
            k, abs=1e-5
        )


def test_psi_has_no_term_that_a_divergence_could_stand_for(make_row):
    with pytest.raises(
        UserError,
        match=(
            "kl 'exact': expected a target with log p - log pi in it, but psi has log p alone: set "
            "keep_log_pi"
        ),
    ):
        WayOffPolicy(backup="psi", **PUBLISHED, kl="exact")
    batch = collate([make_row([9, 1], [(1, 1, 1.0)])], prior_logp=[[0.0]])
    assert target_of(
        WayOffPolicy(backup="psi", **PUBLISHED, kl="reverse", keep_log_pi=True, c=1.0), batch, prior=P
    ) == pytest.approx(1 - 0.6349, abs=1e-4)


@pytest.mark.parametrize(("v", "gaps"), [((0.0, 0.0), [0.0, -0.5]), ((1.0, 1.5), [-0.5, 1.0])])
def test_q_starts_as_the_log_prior_and_v_raises_it(two, v, gaps):
    """Policy = target = prior, at levels of their own: Q = log p + v, so psi's TD errors are v(s) - v(s') and
    v(s) - r/c, r = .5, c = 1."""
    logits = torch.tensor([[1.0, 2, 3], [7, 5, 9]])
    batch = two(logits.log_softmax(1)[[0, 1], [0, 1]].tolist())
    batch.prior_lse = logits.logsumexp(1)
    head, lm = leaf(v), leaf(logits)
    WayOffPolicy(backup="psi", c=1.0, gamma=1.0).loss(
        Outputs(Dense(lm), lm_target=(Dense(logits),), v=head), batch
    ).total.backward()
    torch.testing.assert_close(lm.grad[[0, 1], [0, 1]], torch.tensor(gaps), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        head.grad, torch.tensor(gaps), rtol=0, atol=1e-5
    )  # and no gradient through the next state's
