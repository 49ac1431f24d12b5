"""Rewards of whole conversations."""

from __future__ import annotations

import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards.conversation import conversation_length


def talk(replies):
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    return Dialog(id="d", messages=[dict(message) for _ in range(replies) for message in turn])


@pytest.mark.parametrize(
    ("replies", "values"), [(1, [0.0]), (2, [2.0, 0.0]), (3, [2.85, 3.0, 0.0]), (4, [3.61, 3.8, 4.0, 0.0])]
)
def test_length_is_told_to_all_replies_but_the_last(replies, values):
    """N .95^(N-2-t): for N = 3 that is 3 * .95 = 2.85, then 3; for N = 4 it is 4 * .9025 = 3.61, 3.8, 4."""
    assert conversation_length(talk(replies)) == pytest.approx(values)


def test_context_replies_are_not_counted():
    dialog = talk(4)
    dialog.messages[1]["weight"] = 0
    assert conversation_length(dialog) == pytest.approx([2.85, 3.0, 0.0])
