"""Conversations that are longer than a row: values in front of the cut count what was earned behind it."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize
from rl_dialog.methods import CQL, SARSA, Psi, UtteranceILQL

METHODS = [  # the conservative term raises Q of what is said
    *(method(cql_weight=0) for method in (SARSA, CQL, Psi)),
    UtteranceILQL(),
]
REPLIES = 8


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_first_state_knows_what_all_replies_earn(method, learn, tokenizer):
    """Eight replies worth 1 each: V of the first state is the sum of .99^k over all of them, in three rows
    as in one; so is V where the second row begins, over the replies that are left."""
    messages = [
        message
        for n in range(REPLIES)
        for message in (
            {"role": "user", "content": chr(ord("a") + n)},
            {"role": "assistant", "content": "on", "reward": 1.0},
        )
    ]
    rows = tokenize(Dialog("long", messages), tokenizer, max_length=28)
    assert len(rows) > 2
    learned = learn(method, rows, len(tokenizer), steps=250, rate=3.0)
    done = 0
    for row in rows:
        left = REPLIES - done
        state = row.input_ids[: row.reply_starts[0]]
        assert learned.v(state) == pytest.approx((1 - 0.99**left) / 0.01, rel=0.01)
        done += len(row.rewards)
