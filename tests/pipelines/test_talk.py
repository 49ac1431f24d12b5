"""The terminal talk as a person runs it: scripted input, a real process, a real terminal."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from pipelines.talk import TalkConfig, main
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError

GOAL = {"hotel": {"info": {"area": "east"}, "reqt": {"phone": "?"}}}


@pytest.fixture
def talk(monkeypatch, capsys, tmp_path):
    """talk(lines, **config): what is printed, and what is saved."""

    def run(*lines, **config):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        goal, saved = tmp_path / "goal.json", tmp_path / "talks.jsonl"
        goal.write_text(json.dumps(GOAL))
        saved.unlink(missing_ok=True)
        told = main(TalkConfig(**{"goal": str(goal), "save": str(saved), "quiet": True} | config))
        return capsys.readouterr().out.splitlines(), list(read_jsonl(saved)) if saved.exists() else [], told

    return run


def test_the_person_is_the_user(talk):
    printed, (dialog,), told = talk(
        "Next I need a hotel. The area should be east.",
        "/look",
        "/acts Request-Hotel-Phone-?",
        "pardon zzz",
        "/goal",
        "/quit",
    )
    assert printed[0].startswith("system> ")
    assert (
        "  nlu    Inform-Hotel-none-none; Inform-Hotel-Area-east" in printed
        and "         hotel: area=east" in printed
    )
    assert "  (the system understood nothing of it)" in printed
    assert printed[-1] == "You are looking for a hotel. The area should be east. Ask for the phone number."
    assert told["turns"] == 3 and told["dialogs_saved"] == 1
    assert [message["role"] for message in dialog.messages] == ["user", "assistant"] * 3
    assert (
        dialog.messages[0]["content"] == "Next I need a hotel. The area should be east."
        and "phone" in dialog.messages[2]["content"]
    )
    assert dialog.goal == GOAL and dialog.meta["played"] == "user"


def test_overwritten_outputs_lead_to_another_answer_and_back(talk):
    east = ["Next I need a hotel. The area should be east.", "/look"]
    plain = talk(*east)[0]
    west = talk(*east, "/set system.nlu Inform-Hotel-Area-west", "/look")[0]
    assert (
        west[: len(plain)] == plain
        and "  nlu    Inform-Hotel-Area-west" in west
        and "         hotel: area=west" in west
    )
    back = talk(
        *east,
        "/set system.nlu Inform-Hotel-Area-west",
        "/set system.nlu Inform-Hotel-none-none; Inform-Hotel-Area-east",
        "/look",
    )[0]
    assert back[-len(plain) :] == plain, "the same chance as before"
    again = talk(*east, "/undo", *east)[0]
    assert again == [*plain, "Back 1.", *plain]

    printed, (dialog,), _ = talk(*east, "/set system.state hotel.area= hotel.stars=4 hotel.people=2", "/look")
    assert (
        "         hotel: stars=4 people=2" in printed
        and "  nlu    Inform-Hotel-none-none; Inform-Hotel-Area-east" in printed
    )
    (overwritten,) = dialog.meta["overwritten"]
    assert overwritten["turn"] == 0 and overwritten["system"]["state"]["hotel"]["semi"]["stars"] == "4"

    printed, (dialog,), _ = talk(
        *east, "/set system.acts Inform-Hotel-Phone-01223", "/set system.text Call us on 01223!", "/look"
    )
    assert printed[-1] == "  text   Call us on 01223!" and printed[-2] == "  acts   Inform-Hotel-Phone-01223"
    assert dialog.messages[-1]["content"] == "Call us on 01223!"


def test_the_person_is_the_system(talk):
    lines = [
        "/hint",
        "/rows 1",
        "There are [hotel_choice] of them.",
        "/acts Inform-Hotel-Name-the rose; Inform-Hotel-Phone-01223000000",
        "/look",
    ]
    printed, (dialog,), _ = talk(*lines, play="system")
    assert printed[0].startswith("user> ") and "Area east" in printed[1]
    count = next(line for line in printed if line.startswith("hotel: ")).split()[1]
    assert dialog.messages[1]["content"] == f"There are {count} of them."
    assert "Inform-Hotel-Name-the rose; Inform-Hotel-Phone-01223000000" in "\n".join(printed)
    assert (
        any(line.startswith("The user has left: success") for line in printed)
        or "user> " in printed[-1]
        or printed[-1].startswith("  text")
    )
    assert dialog.messages[1]["reward"] == -1.0

    booked, (dialog,), _ = talk("[booking_ref]", play="system")
    assert dialog.messages[1]["content"].isdigit() and "booked " + dialog.messages[1]["content"] in booked[-1]


def test_watching_to_the_end_and_trying_again(talk):
    printed, dialogs, told = talk(*[""] * 12, "/undo 2", "", "", "/new 5", "hello", play="none")
    first = next(line for line in printed if line.startswith("The user has left"))
    assert "success True" in first and printed.count(first) == 2, "after going back the same end"
    assert "error: the user has said goodbye; /new starts another conversation, /undo goes back" in printed
    assert printed[-1].startswith("error: expected Enter")
    (dialog,) = dialogs
    assert (
        dialog.meta["outcome"]["success"] is True
        and dialog.meta["seeds"] == [0, 0, 0, 0]
        and told["dialogs_saved"] == 1
    )
    changed, _, _ = talk("", "/set user.acts Request-Hotel-Post-?", "/look", play="none")
    assert "  acts   Request-Hotel-Post-?" in changed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set system.nlu Inform-Hotel-Area-east", "expected a turn to take again"),
        ("/set system.state hotel.area=east", "expected a turn to take again"),
        (
            "/set user.acts bye-general-none-none",
            "expected /set with one of system.nlu, system.state, system.acts, system.text",
        ),
        ("/acts Inform-Hotel-Colour-red", "expected a slot of Hotel"),
        ("/acts Inform-Hotel", "expected four strings"),
        ("/undo x", "expected a number, got 'x'"),
        ("/hint", "/hint cannot be done here"),
        ("/frobnicate", "/frobnicate cannot be done here"),
    ],
)
def test_what_cannot_be_done_is_told_and_changes_nothing(talk, line, said):
    printed, dialogs, told = talk(line)
    assert said in printed[0] and not dialogs and told["turns"] == 0


def test_bad_state_and_bad_configs(talk, tmp_path):
    printed, _, _ = talk(
        "Next I need a hotel. The area should be east.",
        "/set system.state hotel.colour=red",
        "/set system.state zoo.area=red",
        "/set system.state x",
    )
    assert (
        "expected a slot of hotel, one of name, area" in printed[1]
        and "expected a domain, one of attraction" in printed[2]
    )
    assert "expected domain.slot=value" in printed[3]
    with pytest.raises(UserError, match="expected templates or a folder"):
        talk(nlu="acts")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(UserError, match="bad.json: expected JSON"):
        talk(goal=str(bad))
    bad.write_text(json.dumps({"zoo": {"info": {}}}))
    with pytest.raises(UserError, match="zoo"):
        talk(goal=str(bad))
    with pytest.raises(UserError, match="expected a file to append to, got: Is a directory"):
        talk("I need a train.", save=str(tmp_path))


def test_in_a_terminal(tmp_path):
    """Prompts, line editing and Ctrl-D, through a pseudo terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pipelines.talk", "--seed", "3", "--save", str(tmp_path / "talks.jsonl")]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "dumb"}
    ) as process:
        os.close(theirs)
        seen = _until(ours, "user> ")
        assert "Conversation 3." in seen and "The user wants:" in seen
        os.write(ours, b"I need a train.\n")
        seen = _until(ours, "user> ")
        assert "system> " in seen
        os.write(ours, b"\x04")
        seen = _until(ours, "}")
        assert json.loads(seen[seen.index("{") :])["dialogs_saved"] == 1
        process.wait(240)
    os.close(ours)


def test_a_terminal_that_is_closed_saves_the_talk(tmp_path):
    saved = tmp_path / "talks.jsonl"
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, "-m", "pipelines.talk", "--save", str(saved)])  # noqa: S606
    _until(terminal, "user> ")
    os.write(terminal, b"I need a train.\n")
    _until(terminal, "user> ")
    os.close(terminal)
    os.waitpid(process, 0)
    assert [dialog.messages[0]["content"] for dialog in read_jsonl(saved)] == ["I need a train."]


def _until(terminal, text):
    seen, deadline = "", time.monotonic() + 240
    while text not in seen:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode()
    return seen


def test_a_task_policy_in_words(talk, tmp_path):
    """A checkpoint of `simulate` takes the rule policy's place, here and in `converse`."""
    from pipelines.converse import ConverseConfig
    from pipelines.converse import main as converse
    from pipelines.simulate import SimulateConfig
    from pipelines.simulate import main as simulate

    simulate(
        SimulateConfig(
            policy="mle", output_dir=str(tmp_path / "mle"), rule_episodes=100, episodes=20, quiet=True
        )
    )
    told = converse(
        ConverseConfig(
            system=str(tmp_path / "mle"), output_dir=str(tmp_path / "words"), episodes=20, quiet=True
        )
    )
    assert told["success"] > 0.3, "nothing like chance, which succeeds nowhere"
    printed, _, _ = talk(
        "Next I need a hotel. The area should be east.", "/look", system=str(tmp_path / "mle")
    )
    assert printed[0].startswith("system> ") and any("acts   " in line for line in printed)
