"""Which contexts of held-out logs are answered."""

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation.held_out import _contexts


def test_good_replies_are_those_that_earned_something():
    """Rewards 1, 0, -1, null and none at all: what nobody rated is not known to be good."""
    judged = [{"reward": reward} for reward in (1.0, 0.0, -1.0, None)] + [{}]
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    dialogs = [Dialog(str(i), [user | {"content": f"hi {i}"}, reply | more]) for i, more in enumerate(judged)]
    assert [(dialog.id, i) for dialog, i in _contexts(dialogs, 9, which="good")] == [("0", 1)]
    assert len(_contexts(dialogs, 9, which="all")) == 5
