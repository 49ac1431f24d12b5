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


def test_what_is_held_out_is_drawn_from_all_files(monkeypatch):
    """600 dialogs of one source, then 600 of another: the first 512 would be of one."""
    lines = [("shop", n) for n in range(600)] + [("clinic", n) for n in range(600)]
    dialogs = [
        Dialog(
            f"{source}-{n}",
            [{"role": "user", "content": f"{source} {n}"}, {"role": "assistant", "content": "yes"}],
        )
        for source, n in lines
    ]
    counts = {"train": 0, "validation": 0, "test": len(dialogs)}
    splits = {split: {"dialogs": count} for split, count in counts.items()}
    manifest = {"splits": splits, "rewards": {"components": {}}}
    monkeypatch.setattr(held_out, "load_manifest", lambda _: manifest)
    monkeypatch.setattr(held_out, "read_dialogs", lambda *_: iter(dialogs))
    found = held_out.read_held_out(HeldOutConfig(data="data", held_out=512, contexts=40))
    sources = [dialog.id.split("-")[0] for dialog in found.dialogs]
    assert len(sources) == 512 and 200 < sources.count("shop") < 312
    assert found.dialogs == sorted(found.dialogs, key=dialogs.index)  # in their order
    answered = [dialog.id.split("-")[0] for dialog, _ in found.contexts]
    assert len(answered) == 40 and 8 < answered.count("shop") < 32


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
