"""DBCQ by hand: the distribution of the best of n draws, against drawing them."""

import math
from functools import partial

import pytest
import torch

from rl_dialog import methods
from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense

PUBLISHED = {"backup": "token", "discount": "token"}  # values travel token by token, as in the papers
BCQ = partial(methods.BCQ, **PUBLISHED)
DBCQ = partial(methods.DBCQ, **PUBLISHED)

P = (0.5, 0.3, 0.2)
Q = (1.0, 3.0, 2.0)  # worst to best: tokens 0, 2, 1, and so F = .5, .7, 1


def chances(method, p=P, q=Q, other=None):
    heads = tuple(Dense(torch.tensor([list(row)])) for row in (q, q if other is None else other))
    return method.decode(Outputs(Dense(torch.tensor([list(p)]).log()), heads, heads)).exp()[0]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (1, (0.5, 0.3, 0.2)),  # the prior
        (2, (0.25, 0.51, 0.24)),  # .5^2, 1 - .7^2, .7^2 - .5^2
        (3, (0.125, 0.657, 0.218)),  # .5^3, 1 - .7^3, .7^3 - .5^3
        (1000, (0.0, 1.0, 0.0)),
    ],
)
def test_the_best_of_n_draws(samples, expected):
    torch.testing.assert_close(chances(DBCQ(samples=samples)), torch.tensor(expected))


def test_without_end_it_is_the_best_token_of_the_prior_s_support():
    """Token 3 has the largest Q and no probability: it is never said, however often one draws."""
    for samples in (1, 2, 10, 10_000):
        got = chances(DBCQ(samples=samples), p=(0.5, 0.3, 0.2, 0.0), q=(1.0, 3.0, 2.0, 100.0))
        assert got[3] == 0 and got.sum().item() == pytest.approx(1.0)
    assert got.tolist() == pytest.approx([0, 1, 0, 0])


@pytest.mark.parametrize("samples", [1, 10])
def test_a_prior_of_one_token_says_that_token(samples):
    assert chances(DBCQ(samples=samples), p=(0.0, 0.0, 1.0), q=(9.0, 8.0, -7.0)).tolist() == [0, 0, 1]


def test_the_smaller_of_the_two_heads_counts():
    """min Q = (1, 0, 2): worst to best 1, 0, 2 with F = .3, .8, 1."""
    torch.testing.assert_close(
        chances(DBCQ(samples=2), other=(5.0, 0.0, 4.0)), torch.tensor([0.64 - 0.09, 0.09, 0.36])
    )


def test_tokens_of_equal_value_share_what_the_draw_gives_them_together():
    """Q = (1, 1, 2): the pair's share is .8^2, whoever of the two takes it."""
    got = chances(DBCQ(samples=2), q=(1.0, 1.0, 2.0))
    assert got[:2].sum().item() == pytest.approx(0.64) and got[2].item() == pytest.approx(0.36)


def test_it_is_the_share_of_really_drawing():
    """20,000 times: draw five tokens of seven, keep the one of the highest value. Within 4 standard errors of
    each token's chance."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(7, generator=generator).softmax(0), torch.randn(7, generator=generator)
    expected = chances(DBCQ(samples=5), p.tolist(), q.tolist())
    drawn = torch.multinomial(p.expand(20_000, -1), 5, replacement=True, generator=generator)
    shares = drawn.gather(1, q[drawn].argmax(1, keepdim=True)).flatten().bincount(minlength=7) / 20_000
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all()
    assert (shares - p).abs().max() > 0.1  # and not those of the prior


def test_a_likely_prior_stays_exact_in_many_draws():
    """p = 1 - 1e-6 on the worst token: it is all that 1,000 draws show but for 1 - (1 - 1e-6)^1000 =
    .0009995."""
    got = chances(DBCQ(samples=1000), p=(1 - 1e-6, 1e-6), q=(0.0, 1.0))
    assert got[1].item() == pytest.approx(
        1 - math.exp(1000 * math.log1p(-1e-6)), rel=0.05
    )  # float32 logits hold 1e-6 to some percent


def test_it_learns_by_the_maximum_inside_the_support_or_as_published_over_all_tokens(make_row):
    """Token 1, then token 0 and the end with reward 3: y = (.5 * 50, 3); the second state's best token has p
    = 0.04, less than a tenth of 0.5."""
    batch = collate([make_row([9, 1, 0], [(1, 2, 3.0)])])
    q = Dense(torch.tensor([[1.0, 2.0, 9.0], [0.0, 50.0, 3.0]]))
    out = Outputs(Dense(torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.04, 0.46]]).log()), (q, q), (q, q))
    assert DBCQ(gamma=0.5, threshold=0.0).loss(out, batch).metrics["target"].item() == pytest.approx(25 + 3)
    assert DBCQ(gamma=0.5).loss(out, batch).metrics["target"].item() == pytest.approx(1.5 + 3)
    assert BCQ(gamma=0.5).loss(out, batch).metrics["target"].item() == pytest.approx(1.5 + 3)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"beta": 2.0}])
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(UserError, match="dbcq: expected samples of at least 1 and no beta"):
        DBCQ(**wrong)
    assert not methods.DBCQ.acts_with_beta and not methods.DBCQ.plain_lm
