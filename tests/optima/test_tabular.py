"""Each method reaches the known answer of a tiny decision process, with a table instead of a transformer.

A state is whatever `key` makes of the tokens so far; its scores are a row of a table, learned by Adam on `method.loss` with Polyak targets. User
tokens are 90 and above, so the tables' columns are the assistant's actions only and every column is in the data (an untouched Q of 0 would enter
maxima and sums). Rewards and counts are those of spec/ilql.md section 10; the docstrings derive the answers.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from rl_dialog.data.batch import collate
from rl_dialog.methods import BC, ILQL, KLControl
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense

A, B, C, D = 0, 1, 2, 3
START, THEN = 90, 91


class Table(nn.Module):
    """Scores of `width` actions in every state of a batch."""

    def __init__(self, batch, width, key=tuple):
        super().__init__()
        ids, columns = batch.input_ids.tolist(), batch.input_ids.shape[1]
        keys = [key(ids[s // columns][: s % columns + 1]) for s in batch.states.tolist()]
        self.names = {name: i for i, name in enumerate(dict.fromkeys(keys))}
        self.register_buffer("rows", torch.tensor([self.names[k] for k in keys]))
        states = len(self.names)
        self.lm = nn.Parameter(torch.zeros(states, width))
        self.q = nn.Parameter(torch.zeros(2, states, width))
        self.v = nn.Parameter(torch.zeros(states))
        self.targets = {"q": self.q.detach().clone(), "lm": self.lm.detach().clone()}

    def forward(self) -> Outputs:
        q, target, rows = self.q[:, self.rows], self.targets["q"][:, self.rows], self.rows
        lm = Dense(self.lm[rows]), Dense(self.targets["lm"][rows])
        return Outputs(lm[0], tuple(map(Dense, q)), tuple(map(Dense, target)), self.v[rows], (lm[1],))

    def at(self, name, table="q"):
        """Q (the first head), V, LM or target scores in the state called `name`."""
        values = {"q": self.q[0], "v": self.v, "lm": self.lm}[table]
        return values[self.names[name]].detach()

    def policy(self, method, name):
        """Probabilities of the method's policy in a state."""
        q, row = self.targets["q"], [self.names[name]]
        out = Outputs(Dense(self.lm[row]), (), tuple(Dense(head[row]) for head in q), self.v[row])
        return method.decode(out).softmax(-1)[0].detach()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tables are far too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learn(method, rows, width, *, key=tuple, logp=None, steps=500, rate=0.2, alpha=0.2):
    """Full-batch Adam whose rate falls to a thousandth, so that what is left is the stationary point."""
    batch = collate(rows, prior_logp=logp)
    table = Table(batch, width, key)
    optimizer = torch.optim.Adam(table.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.001 ** (2 * step / steps - 1)))
    for _ in range(steps):
        optimizer.zero_grad()
        (method.loss(table(), batch).total / batch.decisions).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            table.targets["q"].lerp_(table.q, alpha)
            table.targets["lm"].lerp_(table.lm, alpha)
    return table


def iql(tau, **fields):
    """ILQL with its value part only."""
    return ILQL(tau=tau, **({"gamma": 1.0, "cql_weight": 0.0, "awac_weight": 0.0} | fields))


def near(value, tolerance=0.005):
    return pytest.approx(value, abs=tolerance)


@pytest.fixture
def bandit(make_row):
    """bandit((action, reward, count), ...): one-token conversations."""

    def build(*arms):
        return [make_row([START, action], [(1, 1, float(reward))]) for action, reward, count in arms for _ in range(count)]

    return build


# --- ILQL ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tau", "v"), [(0.5, 0.1), (0.7, 0.2059), (0.9, 0.5), (0.99, 0.9167)])
def test_bandit_value_is_the_expectile(bandit, tau, v):
    """Reward 1 in 1 of 10, else 0: V = w with w = .1 tau / (.1 tau + .9 (1 - tau))."""
    table = learn(iql(tau), bandit((A, 1, 1), (B, 0, 9)), 2)
    assert table.at((START,), "v").item() == near(v)
    assert table.at((START,)).tolist() == [near(1.0), near(0.0)]


@pytest.fixture
def branch(make_row):
    """S0: 5 of 11 take A -> -4; 6 of 11 take B -> S2, where 1 of 6 takes C -> -2 and 5 of 6 take D -> -6."""
    first = [make_row([START, A], [(1, 1, -4.0)])] * 5
    good = [make_row([START, B, THEN, C], [(1, 1, 0.0), (3, 3, -2.0)])]
    return first + good + [make_row([START, B, THEN, D], [(1, 1, 0.0), (3, 3, -6.0)])] * 5


@pytest.mark.parametrize(
    ("tau", "v2", "best"), [(0.5, -5.333, A), (0.7, -4.727, A), (0.8, -4.222, A), (0.86, -3.795, B), (0.9, -3.429, B), (0.95, -2.833, B)]
)
def test_branch_graph(branch, tau, v2, best):
    """V(S2) = -2 w - 6 (1 - w), w = tau / (tau + 5 (1 - tau)); B beats A's -4 where w > 1/2, that is tau > 5/6. SARSA (tau .5) takes A.

    C and D are never taken at S0, so their Q is still 0 there; top-k keeps them out, as it is chosen by the cloned LM.
    """
    table = learn(iql(tau, awac_weight=1.0), branch, 4)
    second = (START, B, THEN)
    assert table.at(second, "v").item() == near(v2, 0.02)
    q = table.at((START,))
    assert (q[A].item(), q[B].item()) == (near(-4.0, 0.02), near(v2, 0.02))
    assert q[[A, B]].argmax().item() == best
    assert table.policy(ILQL(beta=1000.0, top_k=2), (START,)).argmax().item() == best


def test_behaviour_cloning_takes_the_common_branch(branch):
    """6 of 11 take B, 5 of 6 take D: cloning walks into -6."""
    table = learn(BC(), branch, 4)
    assert table.at((START,), "lm").softmax(-1).tolist() == [near(5 / 11), near(6 / 11), near(0.0), near(0.0)]
    assert table.at((START, B, THEN), "lm").softmax(-1)[D].item() == near(5 / 6)


@pytest.mark.parametrize("tau", [0.7, 0.9])
def test_stitching(make_row, tau):
    """s0 -A-> s1 -B-> 0 and, elsewhere, s1 -C-> 1, equally often. The state is the last token, so both meet in s1 (95).

    Q(s1) = (0, 1) equally often, so V(s1) = tau; Q(s0, A) = gamma V(s1) = .9 tau, although no conversation ever got from s0 to 1.
    """
    rows = [make_row([START, A, 95, B], [(1, 1, 0.0), (3, 3, 0.0)]), make_row([96, 95, C], [(2, 2, 1.0)])]
    table = learn(iql(tau, gamma=0.9), rows, 3, key=lambda ids: ids[-1])
    assert table.at(95, "v").item() == near(tau)
    assert table.at(START)[A].item() == near(0.9 * tau)


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.9])
def test_luck_is_no_choice(bandit, tau):
    """A pays 1 or -1 by chance, B pays 0: Q(A) is the mean, 0, so V is 0 whatever tau (an expectile of returns would say .8 at tau .9)."""
    table = learn(iql(tau), bandit((A, 1, 2), (A, -1, 2), (B, 0, 2)), 2)
    assert table.at((START,)).tolist() == [near(0.0), near(0.0)]
    assert table.at((START,), "v").item() == near(0.0)


@pytest.mark.parametrize(("tau", "v"), [(0.5, 1.0), (0.7, 1.4), (0.9, 1.8)])
def test_tokens_are_chosen_one_by_one(make_row, tau, v):
    """Replies AC 0, AD 1, BC 2 equally often. V(A) = tau, V(B) = 2, and at the root 2 of 3 begin with A:
    w = tau / (tau + 2 (1 - tau)), V = 2 w + tau (1 - w) = 1, 1.4, 1.8; an expectile over whole replies would be 1.3077 and 1.7273.
    """
    rows = [make_row([START, *reply], [(1, 2, float(r))]) for reply, r in (((A, C), 0), ((A, D), 1), ((B, C), 2))]
    table = learn(iql(tau), rows, 4)
    assert table.at((START, A), "v").item() == near(tau, 0.01)
    assert table.at((START,), "v").item() == near(v, 0.01)


def test_credit_crosses_turns(make_row):
    """Two turns of two tokens, rewards 1 and 2 on their ends, one logged way, gamma .5 per token: V = 2, 1, 2, ... from the back:
    last token 2, before it .5 * 2 = 1, end of the first reply 1 + .5 * 1 = 1.5, first token .5 * 1.5 = .75. Per turn: 2, 2, 1 + .5 * 2 = 2, 2.
    """
    rows = [make_row([START, A, B, THEN, 92, B, A], [(1, 2, 1.0), (5, 6, 2.0)])]
    states = [(START,), (START, A), (START, A, B, THEN, 92), (START, A, B, THEN, 92, B)]
    for discount, expected in (("token", (0.75, 1.5, 1.0, 2.0)), ("turn", (2.0, 2.0, 2.0, 2.0))):
        table = learn(iql(0.5, gamma=0.5, discount=discount), rows, 2)
        assert [table.at(s, "v").item() for s in states] == [near(value) for value in expected]


@pytest.mark.parametrize(("c", "q"), [(0.01, 0.99620), (0.1, 0.96273), (1.0, 0.69834), (10.0, 0.16797)])
def test_conservative_bandit(bandit, c, q):
    """A pays 1 and B -1, equally often: Q = (q, -q) with 2 (q - 1) + c (2 sigmoid(2q) - 1) = 0, for both heads."""
    table = learn(iql(0.5, cql_weight=c), bandit((A, 1, 1), (B, -1, 1)), 2)
    assert table.at((START,)).tolist() == [near(q, 1e-3), near(-q, 1e-3)]
    assert torch.allclose(table.q[0], table.q[1], atol=1e-3)


def test_the_conservative_term_sinks_what_nobody_said(bandit):
    """Column C is never taken: with the term its Q only falls, without it it stays where it began."""
    with_term = learn(iql(0.5, cql_weight=0.1), bandit((A, 1, 1), (B, 0, 1)), 3).at((START,))
    without = learn(iql(0.5), bandit((A, 1, 1), (B, 0, 1)), 3).at((START,))
    assert with_term[C].item() < -1 < 0 == without[C].item()


def test_advantage_weighted_cloning(bandit):
    """A pays 1, B pays 0, equally often, tau .5: V = .5, A = +-.5; weights e^(+-beta/2) make pi(A) = sigmoid(beta) = .8808 at beta 2."""
    table = learn(iql(0.5, awac_weight=1.0, awac_beta=2.0), bandit((A, 1, 1), (B, 0, 1)), 2)
    assert table.at((START,), "lm").softmax(-1)[A].item() == near(0.8808)


def test_steered_decoding(bandit):
    """Logged 9 B (0) to 1 A (1), the LM cloned: log-odds of A are log(1/9) + beta; .1 at beta 0 and sigmoid(4 - 2.1972) = .8585 at beta 4."""
    table = learn(iql(0.7, awac_weight=1.0), bandit((A, 1, 1), (B, 0, 9)), 2)
    assert table.policy(ILQL(beta=0.0), (START,))[A].item() == near(0.1)
    assert table.policy(ILQL(beta=4.0), (START,))[A].item() == near(0.8585)


# --- KL-control and Psi --------------------------------------------------------------------------------------------------------------------------


def tree(make_row, prior, rewards, counts=(1, 1, 1, 1)):
    """All four conversations of two one-token turns with actions A and B; the prior is the same at every state, a reward pays the second action."""
    rows, logp = [], []
    for (first, second), count in zip(((A, A), (A, B), (B, A), (B, B)), counts, strict=True):
        rows += [make_row([START, first, THEN, second], [(1, 1, 0.0), (3, 3, rewards[second])])] * count
        logp += [[math.log(prior[first]), math.log(prior[second])]] * count
    return rows, logp


STATES = ((START,), (START, A, THEN), (START, B, THEN))


def test_psi_without_reward_is_the_prior(make_row):
    """Q = log p in every state, its logsumexp 0, whatever the data's own frequencies."""
    rows, logp = tree(make_row, (0.7, 0.3), (0.0, 0.0), counts=(1, 3, 2, 1))
    table = learn(KLControl(backup="psi", gamma=1.0, c=1.0), rows, 2, logp=logp)
    for state in STATES:
        assert table.at(state, "lm").tolist() == [near(math.log(0.7)), near(math.log(0.3))]
        assert table.at(state, "lm").logsumexp(0).item() == near(0.0)


@pytest.mark.parametrize(("c", "value"), [(1.0, 0.62011), (0.5, 1.43378)])
def test_psi_before_two_last_actions(make_row, c, value):
    """Rewards 1 and 0, p = 1/2: logsumexp = log((e^(1/c) + 1) / 2) = .62011 at c 1, 1.43378 at c .5; one turn earlier Q is that plus log(1/2)."""
    rows, logp = tree(make_row, (0.5, 0.5), (1.0, 0.0))
    table = learn(KLControl(backup="psi", gamma=1.0, c=c), rows, 2, logp=logp)
    for state in STATES[1:]:
        assert table.at(state, "lm").logsumexp(0).item() == near(value)
    assert table.at((START,), "lm").tolist() == [near(value - math.log(2))] * 2
    e = math.exp(1 / c)
    assert table.policy(KLControl(), STATES[1]).tolist() == [near(e / (e + 1)), near(1 / (e + 1))]  # pi is p exp(r / c), normalised


def test_psi_discounts_the_value(make_row):
    """gamma .5: Q(first) = log(1/2) + .5 * .62011 = -.38309."""
    rows, logp = tree(make_row, (0.5, 0.5), (1.0, 0.0))
    table = learn(KLControl(backup="psi", gamma=0.5, c=1.0), rows, 2, logp=logp)
    assert table.at((START,), "lm").tolist() == [near(-0.38309)] * 2


def test_kl_control(make_row):
    """Q = r + log p - log pi and pi = softmax(Q): 2 Q = r + log p + L with L = 2 log sum_a sqrt(p e^r).

    p = 1/2, r = (1, 0): L = 2 log(.70711 * 2.64872) = 1.25501, Q = (.78093, .28093). One turn earlier pi = 1/2 = p, so Q is the maximum, .78093.
    """
    rows, logp = tree(make_row, (0.5, 0.5), (1.0, 0.0))
    table = learn(KLControl(backup="max", gamma=1.0, c=1.0), rows, 2, logp=logp)
    for state in STATES[1:]:
        assert table.at(state, "lm").tolist() == [near(0.78093), near(0.28093)]
    assert table.at((START,), "lm").tolist() == [near(0.78093)] * 2


def test_kl_control_without_reward_stays_at_the_prior(make_row):
    """r = 0, p = (.7, .3): L = 2 log(sqrt .7 + sqrt .3) and pi is proportional to sqrt(p): the sampled -log pi halves the logits."""
    rows, logp = tree(make_row, (0.7, 0.3), (0.0, 0.0))
    table = learn(KLControl(backup="max", gamma=1.0, c=1.0), rows, 2, logp=logp)
    root = math.sqrt(0.7), math.sqrt(0.3)
    assert table.policy(KLControl(), STATES[1]).tolist() == [near(root[0] / sum(root)), near(root[1] / sum(root))]
    assert table.at(STATES[1], "lm")[A].item() == near(0.5 * math.log(0.7) + math.log(sum(root)))


def test_no_kl_is_q_learning(make_row):
    """c = 0 in the 2019 convention: Q(second) = r, and Q(first) = gamma max = .9 for both; with two unequal branches the better one wins."""
    rows, logp = tree(make_row, (0.5, 0.5), (1.0, -1.0))
    table = learn(KLControl(backup="max", coefficient="kl", c=0.0, gamma=0.9), rows, 2, logp=logp)
    assert table.at(STATES[1], "lm").tolist() == [near(1.0), near(-1.0)]
    assert table.at((START,), "lm").tolist() == [near(0.9), near(0.9)]


def test_a_larger_c_stays_closer_to_the_prior(make_row):
    """psi: the odds of the rewarded action are those of the prior times e^(1/c)."""
    rows, logp = tree(make_row, (0.2, 0.8), (1.0, 0.0))
    chosen = [learn(KLControl(backup="psi", gamma=1.0, c=c), rows, 2, logp=logp).policy(KLControl(), STATES[1])[A].item() for c in (0.5, 1.0, 4.0)]
    assert chosen == [near(0.25 * math.exp(1 / c) / (1 + 0.25 * math.exp(1 / c))) for c in (0.5, 1.0, 4.0)]


def test_the_learner_is_deterministic(bandit):
    """What these tests rest on: the same table twice."""
    rows = bandit((A, 1, 1), (B, 0, 3))
    first, second = (learn(iql(0.7), copy.deepcopy(rows), 2, steps=50) for _ in range(2))
    assert torch.equal(first.q, second.q) and torch.equal(first.v, second.v)
