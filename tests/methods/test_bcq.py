"""BCQ by hand: the support decides what the maximum may see and what may be said."""

import math
from functools import partial

import pytest
import torch

from rl_dialog import methods
from rl_dialog.data.batch import collate
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense

PUBLISHED = {"backup": "token", "discount": "token"}  # values travel token by token, as in the papers
BCQ = partial(methods.BCQ, **PUBLISHED)

P = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.04, 0.46]]).log()  # two states
Q1, Q2 = torch.tensor([[1.0, 2.0, 9.0], [0.0, 50.0, 3.0]]), torch.tensor([[5.0, 4.0, 8.0], [1.0, 60.0, 2.0]])


def outputs(q=(Q1, Q2)):
    return Outputs(Dense(P), tuple(map(Dense, q)), (Dense(Q1), Dense(Q2)))


@pytest.mark.parametrize(
    ("threshold", "best"),
    [(0.0, [8.0, 50.0]), (0.1, [8.0, 2.0]), (0.4, [2.0, 2.0]), (0.9, [1.0, 2.0]), (1.0, [1.0, 0.0])],
)
def test_the_best_inside_the_support(threshold, best):
    """State 0 has p / p_max = (1, .5, .17), state 1 (1, .08, .92); min Q' = (1, 2, 8) and (0, 50, 2)."""
    assert BCQ(threshold=threshold).best_supported(outputs()).tolist() == best


def test_the_target_and_the_loss(make_row):
    """Token 1, then token 0 and the end with reward 3: y = (.5 * 2, 3) at threshold .1, since the next
    state's supported best is 2."""
    batch = collate([make_row([9, 1, 0], [(1, 2, 3.0)])])
    loss = BCQ(threshold=0.1, gamma=0.5, clone_weight=2.0).loss(outputs(), batch)
    q_loss = (2 - 1) ** 2 + (4 - 1) ** 2 + (0 - 3) ** 2 + (1 - 3) ** 2
    assert loss.metrics["q_loss"].item() == pytest.approx(q_loss) and loss.metrics[
        "target"
    ].item() == pytest.approx(1 + 3)
    assert loss.total.item() == pytest.approx(q_loss - 2 * (math.log(0.3) + math.log(0.5)), abs=1e-5)
    bare = BCQ(threshold=0.1, gamma=0.5, clone_weight=0.0).loss(outputs(), batch)
    assert bare.total.item() == pytest.approx(q_loss) and "nll" not in bare.metrics


def test_it_says_nothing_outside_the_support():
    e, out = math.exp(2 * (2 - 1)), outputs()
    alone = BCQ(threshold=0.4, beta=2.0, include_logits=False).decode(out).softmax(1)
    torch.testing.assert_close(alone[0], torch.tensor([1 / (1 + e), e / (1 + e), 0.0]))
    p = out.lm.dense()[0].softmax(0)
    with_p = BCQ(threshold=0.4, beta=2.0).decode(out).softmax(1)
    torch.testing.assert_close(with_p[0], torch.tensor([p[0], p[1] * e, 0.0]) / (p[0] + p[1] * e))
    assert alone[1, 1] == with_p[1, 1] == 0
