"""tf_all is bc under the name that the comparison on candidates gives it."""

import torch

from rl_dialog.data.batch import collate
from rl_dialog.methods import BC, TFAll
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense


def test_it_learns_from_every_reply_whatever_it_earned(make_row):
    """Two replies to one context, one of them bad: both stay, and the loss is that of bc to the bit."""
    rows = [make_row([9, 1, 2], [(1, 2, -5.0)]), make_row([9, 3], [(1, 1, 7.0)])]
    train, validation = TFAll().prepare(rows, rows[:1], None)
    assert train is rows and validation == rows[:1]
    batch = collate(train)
    out = Outputs(Dense(torch.randn(3, 10)))
    assert torch.equal(TFAll().loss(out, batch).total, BC().loss(out, batch).total)
    assert torch.equal(TFAll().decode(out), out.lm.scores)
