"""Linear and LowRank against the table they stand for: the same numbers and gradients as autograd on the
dense form, which here is float64."""

import pytest
import torch
import torch.nn.functional as F

from rl_dialog.methods import scores
from rl_dialog.methods.scores import (
    Dense,
    Linear,
    LowRank,
    Mixture,
    cross_entropy,
    kl_divergence,
    kl_divergences,
)

S, N, V, H, R = 7, 5, 11, 6, 3
ACTIONS = torch.tensor([0, 10, 4, 4, 9])  # a token taken twice: its row gets two gradients
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CHUNKS = {
    "one state a chunk": V,
    "two and a rest": 2 * V + 1,
    "all at once": 1 << 20,
    "fewer than a state": 1,
}


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


class Case:
    """A Scores object in float32, its tensors, and the dense form of the same numbers in float64."""

    def __init__(self, kind):
        self.kind = kind
        self.base = {"base_features": leaf(S, H), "base_weight": leaf(V, H), "base_bias": leaf(V)}
        self.own = {"features": leaf(S, H), "weight": leaf(V, H)}
        self.cap = 2.0 if "capped" in kind else None  # half the spread of the scores
        if kind in ("linear", "capped"):
            self.own["bias"] = leaf(V)
        if "lowrank" in kind:
            self.own = {
                "scale": torch.tensor(0.7).requires_grad_(),
                "features": leaf(S, R),
                "weight": leaf(V, R),
                "offset": leaf(S),
            }
        self.exact = {
            name: t.detach().double().requires_grad_() for name, t in (self.own | self.base).items()
        }

    def scores(self):
        if "lowrank" not in self.kind:
            return Linear(self.own["features"], self.own["weight"], self.own.get("bias"), cap=self.cap)
        base = Linear(*self.base.values(), cap=self.cap)
        return LowRank(base, **self.own)

    def table(self):
        """(S, V) in float64, with gradients into `exact`."""
        e = self.exact
        linear = e["features"] @ e["weight"].T
        if "lowrank" not in self.kind:
            return self.squashed(linear + e.get("bias", 0))
        base = self.squashed(F.linear(e["base_features"], e["base_weight"], e["base_bias"])).detach()
        return e["scale"] * base.log_softmax(1) + linear + e["offset"][:, None]

    def squashed(self, table):
        return table if self.cap is None else self.cap * torch.tanh(table / self.cap)

    def check_gradients(self):
        for name, tensor in self.own.items():
            expected = self.exact[name].grad
            got = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            torch.testing.assert_close(
                got.double(),
                torch.zeros_like(got).double() if expected is None else expected,
                **CLOSE,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        for name, tensor in self.base.items():
            assert tensor.grad is None, f"{name} got a gradient"


@pytest.fixture(params=["linear", "no bias", "lowrank", "capped", "lowrank on capped"])
def case(request):
    torch.manual_seed(1)
    return Case(request.param)


@pytest.fixture(params=CHUNKS.values(), ids=CHUNKS.keys())
def chunk(request, monkeypatch):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", request.param)


def test_at(case):
    got = case.scores().at(ACTIONS)
    expected = case.table()[torch.arange(N), ACTIONS]
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    weights = torch.randn(N)
    (got * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    case.check_gradients()


def test_at_each(case):
    tokens = torch.randint(V, (S, 4))
    got, expected = case.scores().at_each(tokens), case.table().gather(1, tokens)
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    weights = torch.randn(S, 4)
    (got * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    case.check_gradients()


def test_dense(case):
    got, expected = case.scores().dense(), case.table()
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    weights = torch.randn(S, V)
    (got * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    case.check_gradients()


@pytest.mark.parametrize("how", ["max", "logsumexp"])
def test_reduce(case, chunk, how):
    got = case.scores().reduce(how)
    expected = case.table().amax(1) if how == "max" else case.table().logsumexp(1)
    torch.testing.assert_close(got.double(), expected.detach(), **CLOSE)
    assert not got.requires_grad


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_nll(case, chunk, weighted):
    """Value, terms and gradients, also through an outer factor; the states behind the first N are
    untouched."""
    weight = torch.tensor([1.0, 0.0, 2.5, 0.3, 20.0]) if weighted else None
    total, each = case.scores().nll(ACTIONS, weight)
    expected = F.cross_entropy(case.table()[:N], ACTIONS, reduction="none")
    torch.testing.assert_close(each.double(), expected.detach(), **CLOSE)
    assert not each.requires_grad
    whole = (expected if weight is None else expected * weight.double()).sum()
    torch.testing.assert_close(total.double(), whole, **CLOSE)
    (total * 0.37).backward()
    (whole * 0.37).backward()
    case.check_gradients()
    assert not case.own["features"].grad[N:].any()


def test_dense_scores_are_the_table_itself():
    """The reference that method tests use, against plain indexing."""
    table = torch.randn(S, V)
    dense, weight = Dense(table), torch.rand(N)
    assert torch.equal(dense.at(ACTIONS), table[torch.arange(N), ACTIONS])
    tokens = torch.randint(V, (S, 3))
    assert torch.equal(dense.at_each(tokens), table[torch.arange(S)[:, None], tokens])
    torch.testing.assert_close(dense.reduce("max"), table.max(1).values)
    torch.testing.assert_close(dense.reduce("logsumexp"), table.exp().sum(1).log())
    log_p = (table.exp() / table.exp().sum(1, keepdim=True)).log()[torch.arange(N), ACTIONS]
    total, each = dense.nll(ACTIONS, weight)
    torch.testing.assert_close(each, -log_p)
    torch.testing.assert_close(total, -(weight * log_p).sum())


def test_nll_by_hand():
    """Logits (0, 1, 0), action 1: log(2 + e) - 1 = .551445. Logits (2, 0, 0), action 0: log(e^2 + 2) - 2 =
    .239545. Gradient softmax - onehot."""
    features, weight = (
        torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]).requires_grad_(),
        torch.eye(3).requires_grad_(),
    )
    total, each = Linear(features, weight).nll(torch.tensor([1, 0]))
    torch.testing.assert_close(each, torch.tensor([0.551445, 0.239545]), rtol=0, atol=1e-6)
    total.backward()
    expected = torch.tensor([[0.211942, 0.576117 - 1, 0.211942], [0.786986 - 1, 0.106507, 0.106507]])
    torch.testing.assert_close(features.grad, expected, rtol=0, atol=1e-5)


def test_nll_of_large_scores_is_finite():
    """exp(1e4) overflows; log softmax of (1e4, 0) at the second token is -1e4."""
    features = torch.tensor([[1e4, 0.0], [-1e4, 0.0]]).requires_grad_()
    total, each = Linear(features, torch.eye(2)).nll(torch.tensor([1, 1]))
    assert each.tolist() == [1e4, 0.0]
    total.backward()
    assert features.grad.tolist() == [[1.0, -1.0], [0.0, 0.0]]


def test_no_decisions(case):
    total, each = case.scores().nll(ACTIONS[:0])
    assert total.item() == 0 and each.shape == (0,)
    assert case.scores().at(ACTIONS[:0]).shape == (0,)
    total.backward()
    case.check_gradients()


def test_the_log_sum_exp_is_kept_from_nll():
    """`lse` after `nll` is free and the same as without."""
    torch.manual_seed(2)
    linear = Case("linear").scores()
    fresh = Linear(linear.features, linear.weight, linear.bias).lse(N)
    linear.nll(ACTIONS)
    linear.features = None  # nothing is left to compute it from
    torch.testing.assert_close(linear.lse(N), fresh)
    torch.testing.assert_close(linear.lse(2), fresh[:2])
    assert not fresh.requires_grad


def test_a_log_sum_exp_of_more_states_is_worked_out_again():
    torch.manual_seed(2)
    linear = Case("linear").scores()
    few = linear.lse(2)
    torch.testing.assert_close(
        linear.lse(N), Linear(linear.features, linear.weight, linear.bias).reduce("logsumexp")[:N]
    )
    assert few.shape == (2,) and linear.lse(N).shape == (N,)


def test_reduce_after_nll_covers_all_states():
    """`nll` knows the log-sum-exp of the first N states only; `reduce` is asked for all S."""
    torch.manual_seed(2)
    case = Case("linear")
    linear = case.scores()
    linear.nll(ACTIONS)
    torch.testing.assert_close(
        linear.reduce("logsumexp").double(), case.table().logsumexp(1).detach(), **CLOSE
    )
    linear.reduce("max")
    torch.testing.assert_close(linear.lse(S).double(), case.table().logsumexp(1).detach(), **CLOSE)


def test_without_gradients_none_are_worked_out(monkeypatch):
    """Evaluation and prior log-probabilities pay for the scores only."""
    made = Case("linear").scores()
    products = []
    monkeypatch.setattr(
        torch, "mm", lambda *given, mm=torch.mm, **named: products.append(given) or mm(*given, **named)
    )
    monkeypatch.setattr(torch, "addmm", lambda *_, **__: pytest.fail("a gradient was computed under no_grad"))
    with torch.no_grad():
        total, each = made.nll(ACTIONS)
    assert not total.requires_grad
    assert len(products) == 1  # the scores
    torch.testing.assert_close(total, each.sum())


def test_frozen_tensors_get_no_gradient():
    """A LoRA run: the LM head is frozen, the hidden states are not."""
    features, weight = leaf(S, H), torch.randn(V, H)
    Linear(features, weight).nll(ACTIONS)[0].backward()
    assert features.grad is not None and weight.grad is None


@pytest.mark.parametrize("kind", ["linear", "lowrank"])
def test_a_second_backward_is_never_silently_wrong(kind):
    case = Case(kind)
    total = case.scores().nll(ACTIONS)[0] * 3
    total.backward(retain_graph=True)
    first = case.own["weight"].grad.clone()
    try:
        total.backward()
    except RuntimeError:
        return
    torch.testing.assert_close(case.own["weight"].grad, 2 * first)


@pytest.mark.parametrize("kind", ["linear", "no bias", "lowrank"])
def test_bfloat16_autocast(kind):
    """As a bf16 run trains: float32 weights under autocast, within bfloat16's 3 digits of the exact loss and
    gradient."""
    torch.manual_seed(1)
    case = Case(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = case.scores()
        total, each = made.nll(ACTIONS)
        at = made.at(ACTIONS).sum()
    (total + at).backward()
    table = case.table()
    expected = F.cross_entropy(table[:N], ACTIONS, reduction="sum") + table[torch.arange(N), ACTIONS].sum()
    expected.backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close((total + at).double(), expected, rtol=0.05, atol=0.2)
    for name, tensor in case.own.items():
        error = (tensor.grad.double() - case.exact[name].grad).norm() / case.exact[name].grad.norm()
        assert error < 0.05, (name, error)


# --- averages and divergences -------------------------------------------------------------------------------

P, PI = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.2, 0.3, 0.5]])


@pytest.fixture
def mixture():
    """Three models and their shares, with the table of the average in float64."""
    members = [Linear(torch.randn(S, H), torch.randn(V, H), torch.randn(V)) for _ in range(2)] + [
        Dense(torch.randn(S, V))
    ]
    shares = torch.tensor([0.5, 0.2, 0.3])
    table = sum(
        share * member.dense().double().softmax(1) for share, member in zip(shares, members, strict=True)
    ).log()
    return Mixture(members, shares.log()), table


def test_a_mixture_averages_probabilities(mixture, chunk):
    made, table = mixture
    torch.testing.assert_close(made.dense().double(), table, **CLOSE)
    torch.testing.assert_close(made.at(ACTIONS).double(), table[torch.arange(N), ACTIONS], **CLOSE)
    tokens = torch.randint(V, (S, 4))
    torch.testing.assert_close(made.at_each(tokens).double(), table.gather(1, tokens), **CLOSE)
    torch.testing.assert_close(made.rows(slice(2, 5)).dense().double(), table[2:5], **CLOSE)
    torch.testing.assert_close(
        torch.cat([made.rows(part).dense() for part in made.parts()]).double(), table, **CLOSE
    )
    torch.testing.assert_close(made.reduce("max").double(), table.amax(1), **CLOSE)
    torch.testing.assert_close(
        made.reduce("logsumexp"), torch.zeros(S), rtol=0, atol=1e-5
    )  # it is normalised
    torch.testing.assert_close(made.scaled(0.5).dense().double(), 0.5 * table, **CLOSE)
    assert made.scaled(1.0) is made
    weight = torch.rand(N)
    total, each = made.nll(ACTIONS, weight)
    torch.testing.assert_close(each.double(), -table[torch.arange(N), ACTIONS], **CLOSE)
    torch.testing.assert_close(total, (weight * each).sum())
    torch.testing.assert_close(made.nll(ACTIONS)[0], each.sum())


def test_a_mixture_by_hand():
    """(.7, .2, .1) and (.2, .3, .5), three to one: (.575, .225, .2). A constant added to a model's logits
    changes nothing."""
    made = Mixture([Dense(P.log() + 5), Dense(PI.log() - 3)], torch.tensor([0.75, 0.25]).log())
    torch.testing.assert_close(made.dense().exp(), torch.tensor([[0.575, 0.225, 0.2]]))
    assert not Mixture([Dense(leaf(2, 3))], torch.zeros(1)).dense().requires_grad


def test_divergences_by_hand():
    """KL(p || pi) = .6349 and KL(pi || p) = .6758; of a distribution with itself 0; a token that pi never
    says counts nothing."""
    p, pi = Dense(P.log() + 1), Dense(PI.log() - 2)
    assert kl_divergences(p, pi).item() == pytest.approx(0.6349, abs=1e-4)
    assert kl_divergences(pi, p).item() == pytest.approx(0.6758, abs=1e-4)
    assert kl_divergences(p, p).item() == pytest.approx(0, abs=1e-6)
    never = Dense(torch.tensor([[0.4, 0.6, 0.0]]).log())
    assert kl_divergences(never, p).item() == pytest.approx(
        (0.4 * torch.tensor(4 / 7).log() + 0.6 * torch.tensor(3.0).log()).item(), abs=1e-6
    )


def test_divergences_in_chunks(mixture, chunk):
    made, table = mixture
    pi = Linear(leaf(S, H), leaf(V, H))
    log_pi = pi.dense().detach().double().log_softmax(1)
    got = kl_divergences(pi, made)
    torch.testing.assert_close(got.double(), kl_divergence(log_pi, table), **CLOSE)
    assert (got >= 0).all() and not got.requires_grad


def test_cross_entropy_by_hand():
    """p = (1/2, 1/2), softmax(scores) = (1/4, 3/4): -(log 1/4 + log 3/4) / 2 = .8369882; the gradient is
    softmax - p, and p gets none."""
    logits, target = (
        torch.tensor([[0.25, 0.75]]).log().requires_grad_(),
        torch.zeros(1, 2, requires_grad=True),
    )
    total = cross_entropy(Dense(logits), Dense(target))
    assert total.item() == pytest.approx(0.8369882, abs=1e-6)
    total.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.25]]))
    assert target.grad is None


def test_cross_entropy_against_a_one_hot_target_is_nll(case, chunk):
    onehot = Dense(F.one_hot(ACTIONS, V).float().log())
    got = cross_entropy(case.scores().rows(slice(0, N)), onehot)
    torch.testing.assert_close(
        got.double(), F.cross_entropy(case.table()[:N], ACTIONS, reduction="sum"), **CLOSE
    )


def test_cross_entropy_has_the_gradient_of_the_dense_form(case, chunk):
    target = Linear(torch.randn(S, H), torch.randn(V, H))
    got = cross_entropy(case.scores(), target)
    expected = -(target.dense().double().softmax(1) * case.table().log_softmax(1)).sum()
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    (got * 0.37).backward()
    (expected * 0.37).backward()
    case.check_gradients()
