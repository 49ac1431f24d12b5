"""Which contexts of held-out logs are answered."""

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation import held_out
from rl_dialog.evaluation.generation import Reply
from rl_dialog.evaluation.held_out import HeldOut, HeldOutConfig, _answer, _contexts
from rl_dialog.evaluation.summary import RunResult


def test_good_replies_are_those_that_earned_something():
    """Rewards 1, 0, -1, null and none at all: what nobody rated is not known to be good."""
    judged = [{"reward": reward} for reward in (1.0, 0.0, -1.0, None)] + [{}]
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    dialogs = [Dialog(str(i), [user | {"content": f"hi {i}"}, reply | more]) for i, more in enumerate(judged)]
    assert [(dialog.id, i) for dialog, i in _contexts(dialogs, 9, which="good")] == [("0", 1)]
    assert len(_contexts(dialogs, 9, which="all")) == 5


def test_a_context_that_calls_tools_is_answered(monkeypatch):
    call = [{"type": "function", "function": {"name": "track", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "where is it?"},
        {"role": "assistant", "content": None, "tool_calls": call, "reward": 1.0},
        {"role": "tool", "content": "sent", "tool_call_id": "1"},
        {"role": "assistant", "content": "on its way"},
    ]
    logs = HeldOut("test", [], None, [(Dialog("d", messages), 3)], [])
    monkeypatch.setattr(held_out, "generate_replies", lambda *_, **__: [Reply("sent", (), True)])
    (answer,) = _answer(RunResult("run", "", "bc"), None, None, logs, HeldOutConfig())
    assert answer.dialog.messages == [
        messages[0],
        {"role": "assistant", "content": None, "tool_calls": call, "weight": 0},
        messages[2],
        {"role": "assistant", "content": "sent"},
    ]
