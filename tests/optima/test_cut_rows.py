"""Conversations that are longer than a row: values in front of the cut count what can be earned behind it."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize
from rl_dialog.methods import CQL, ILQL, SARSA, Psi, UtteranceILQL

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


@pytest.mark.parametrize("truncated", [False, True], ids=["finished", "unfinished"])
def test_values_are_put_together_across_a_cut(truncated, learn, tokenizer):
    """Who says a always went on badly from m, and who says z well, each reply in a row of its own: what a is
    worth is what m is worth, in the expectile .9 of both. The row of a ends behind a and m, a context that
    begins no row; in an unfinished conversation nobody knows what followed either."""

    def dialog(opening, reward):
        turns = ((opening, "on", 0.0), ("m", "up" if reward else "down", reward), ("m", "on", 0.0))
        messages = [
            message
            for said, reply, earned in turns
            for message in (
                {"role": "user", "content": said},
                {"role": "assistant", "content": reply, "reward": earned},
            )
        ]
        return Dialog(opening, messages, truncated=truncated)

    dialogs = [dialog("a", 0.0), dialog("z", 1.0)]
    rows = [row for each in dialogs for row in tokenize(each, tokenizer, max_length=12)]
    assert all(len(row.rewards) == 1 for row in rows)
    learned = learn(ILQL(tau=0.9, cql_weight=0, gamma=0.5), rows, len(tokenizer), steps=250, rate=3.0)
    a, m = (row.input_ids[: row.reply_starts[0]] for row in rows[:2])
    assert learned.v(a) == pytest.approx(0.5 * learned.v(m), rel=0.05)
    assert learned.v(m) > 0.5
