"""The verb `label` as people run it: keys in a pseudo terminal, lines through a pipe, the page as a process;
what becomes of the pair they had."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import httpx
import numpy as np
import pytest
from rich.console import Console

from pipelines.label import LabelConfig, drawing, main
from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import draw_pixels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.plan import Plan
from rl_dialog.preferences.segments import Clip, Reply, Segments
from rl_dialog.preferences.terminal import TerminalLabeller, half_blocks

COLOUR = re.compile(r"\x1b\[(?:\d+;)*38;2;(\d+);(\d+);(\d+)")


class Folder:
    """A run's folder. The ground of clip n is (n, 2 n, 0)."""

    def __init__(self, path):
        self.path, self.log, self.segments = (
            path,
            LabelLog(f"sqlite:///{path}/labels.db", validation=0.0),
            Segments(path / "clips"),
        )
        self.clips = {}

    def clip(self, steps=6):
        n = 20 + len(self.clips)
        frames = np.full((6, 16, 12, 3), (n, 2 * n, 0), np.uint8)
        self.clips[n] = self.segments.add(Clip(frames, np.zeros(6, np.int64), np.zeros(6, np.float32), steps))
        return self.clips[n]

    def ask(self, number=1, **given):
        return [
            self.log.add_query(self.clip(), self.clip(), task="Which is brighter?", **given)
            for _ in range(number)
        ]

    def free(self):
        """Is there a pair that nobody has?"""
        return self.log.counts()["waiting"] > 0


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path)
    yield made
    made.log.close()


def command(folder, *arguments):
    return [sys.executable, "-m", "pipelines.label", "--run", str(folder.path), *arguments]


class Terminal:
    """A program in a pseudo terminal of 80 by 24 characters."""

    def __init__(self, arguments):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        take_the_terminal = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
        self.process = subprocess.Popen(
            arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=take_the_terminal,
        )
        os.close(theirs)

    def until(self, text):
        """What is written until `text` comes."""
        seen, deadline = "", time.monotonic() + 240
        while text not in seen:
            assert select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"{text!r} did not come, but {seen[-2000:]!r}"
            )
            seen += os.read(self.ours, 65536).decode("utf-8", "replace")
        return seen

    def watch(self, seconds):
        """Reads what is shown: a terminal that nobody reads stops the program."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.ours], [], [], 0.05)[0]:
                os.read(self.ours, 65536)

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def end(self):
        """The line of JSON at the end."""
        seen = self.until("}\r\n")
        assert self.process.wait(240) == 0
        return json.loads(seen[seen.rindex("{") :])

    def close(self):
        os.close(self.ours)


@pytest.fixture
def terminal(folder):
    """terminal(*arguments): `label` in a pseudo terminal."""
    begun = []

    def start(*arguments):
        begun.append(Terminal(command(folder, "--labeller", "ann", *arguments)))
        return begun[-1]

    yield start
    for each in begun:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def eventually(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds} s"
        time.sleep(0.02)


def test_keys_in_a_terminal(folder, terminal):
    (query,) = folder.ask(1)
    me = terminal()
    frame = me.until("Which is brighter?")
    frame += me.until("6/6")
    left = folder.clips[int(COLOUR.search(frame[frame.index("Left") :]).group(1))]
    assert "▀" in frame and "48;2;" in frame, "two pixels to a character"
    me.press("L")
    assert "1 answered" in me.until("1 answered") and folder.log.labels()[0].query == query
    me.press("u")
    me.until("Taken back.")
    eventually(lambda: folder.log.state() == (1, 1, 0))
    me.press("\x1b[D")  # the left arrow
    me.until("Saved: left.")
    (label,) = folder.log.labels()
    assert (label.first if label.preference == 1 else label.second) == left and label.labeller == "ann"
    me.until("Waiting for the next pair")
    folder.log.add_query(folder.clip(), folder.clip(steps=3))
    me.until("the episode ends")
    me.press("zq")
    assert me.end() == {"labeller": "ann", "answers": 2, "undone": 1, "labels": 1}
    assert folder.free(), "the pair on the screen goes back"
    me.close()


def remarks(folder):
    """(choice, strength, reasons, flag) of each answer that stands."""
    given = [answer for answer in folder.log.answers() if answer.revoked is None]
    return [(each.choice, each.strength, tuple(each.reasons or ()), each.flag) for each in given]


@pytest.mark.slow
def test_what_the_plan_asks_beside_the_choice(folder, terminal):
    """As on the page: capitals and Shift say much better, numbers give reasons, F flags with a note, and what
    was said of one pair is not said of the next."""
    folder.log.set_plan(strength=True, reasons=("bright", "steady"))
    folder.ask(5)
    me = terminal()
    shown = me.until("F flag")
    assert "1 bright   2 steady" in shown and "Shift with an arrow: much better" in shown
    me.press("l")
    me.until("Saved: left, slightly better.")
    me.press("2")
    me.until("[steady]")
    me.press("1")
    me.until("[bright]")
    me.press("2R")
    me.until("Saved: right, much better (bright).")
    me.press("\x1b[1;2D")  # Shift and the left arrow
    me.until("Saved: left, much better.")
    me.press("f")
    me.until("What is wrong?")
    me.press("quiz\x7ft\u00e9?")  # letters are no answers, and one is taken back
    me.until("quit\u00e9?_")
    me.press("\r")
    me.until("Flagged: quit\u00e9?")
    me.press("f\x1b")
    me.until("Not flagged.")
    me.press("fdark\re")
    me.until("Saved: equal (flagged).")
    me.press("2u")
    me.until("Taken back.")
    me.press("s")
    me.until("Saved: can't tell.")
    me.press("q")
    assert me.end()["answers"] == 5
    assert remarks(folder) == [
        ("left", 1, (), None),
        ("right", 2, ("bright",), None),
        ("left", 2, (), None),
        ("skip", None, (), None),
    ]
    (taken_back,) = [answer for answer in folder.log.answers() if answer.revoked is not None]
    assert (taken_back.choice, taken_back.flag, taken_back.strength) == ("tie", "dark", None)
    me.close()


@pytest.mark.slow
def test_remarks_in_lines_through_a_pipe(folder):
    folder.log.set_plan(strength=True, reasons=("bright", "steady"), guideline="# Look twice")
    folder.ask(4)
    lines = "1\nL\nf the end is cut\n2\nr\nf\ne\n12\n3\nq\n"
    done = subprocess.run(
        command(folder, "--labeller", "ann"), input=lines, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "Look twice" in done.stdout and "[bright]" in done.stdout
    assert "'12' means nothing here" in done.stdout and "'3' means nothing here" in done.stdout
    assert remarks(folder) == [
        ("left", 2, ("bright",), None),
        ("right", 1, ("steady",), "the end is cut"),
        ("tie", None, (), ""),
    ]


@pytest.mark.slow
def test_nothing_is_asked_that_the_plan_does_not_ask(folder):
    folder.ask(2)
    lines = "L\n1\nr\nq\n"
    done = subprocess.run(
        command(folder, "--labeller", "ann"), input=lines, capture_output=True, text=True, timeout=240
    )
    assert "'1' means nothing here" in done.stdout and "much" not in done.stdout
    assert remarks(folder) == [("left", None, (), None), ("right", None, (), None)]


@pytest.mark.slow
def test_sessions_have_breaks_and_the_goal_an_end(folder, terminal):
    """The guideline comes first; after two answers a break, in which the pairs are free; after the third one,
    all that is asked of the labeller, there is no pair more."""
    guideline = "# Look twice\n\n" + "\n\n".join(f"rule {n}" for n in range(30)) + "\n\nthe last rule"
    folder.log.set_plan(session=2, goal=3, guideline=guideline)
    folder.ask(5)
    me = terminal()
    me.until("Look twice")
    me.press(" ")
    me.until("rule 9")
    assert folder.free(), "who reads holds no pair"
    me.press("x")
    assert "break in 2" in me.until("0 of 3 answers, break in 2")
    me.press("l")
    me.until("1 of 3 answers, break in 1")
    me.press("r")
    me.until("Time for a break: 2 answers in 1 minute, 2 of 3.")
    eventually(lambda: folder.log.counts()["leased"] == 0)
    me.press("x")
    me.until("2 of 3 answers, break in 2")
    me.press("g")
    me.until("Look twice")
    assert folder.log.counts()["leased"] == 1
    me.press("x")
    me.until("Right")
    me.press("e")
    me.until("You have given all your answers")
    eventually(lambda: folder.log.counts()["leased"] == 0 and folder.free())
    me.press("u")
    me.until("Taken back.")
    me.press("lq")
    assert me.end() == {"labeller": "ann", "answers": 4, "undone": 1, "labels": 3}
    me.close()


@pytest.mark.slow
def test_the_lease_goes_on_while_somebody_thinks_and_ends_with_the_break(folder, terminal):
    folder.ask(1)
    me = terminal("--lease", "8")
    me.until("Left")
    me.watch(9)
    assert folder.log.lease("bob") is None
    me.press("p")
    me.until("A break")
    eventually(lambda: folder.log.lease("bob", 0.1) is not None)
    me.watch(0.2)
    me.press("x")
    me.until("Which is brighter?")
    assert not folder.free()
    me.press("\x03")
    assert me.end()["answers"] == 0 and folder.free()
    me.close()


@pytest.mark.slow
def test_a_terminal_that_goes_away_gives_the_pair_back(folder, terminal):
    folder.ask(1)
    me = terminal("--idle", "1")
    me.until("No key for 1 s")
    eventually(folder.free)
    eventually(lambda: not folder.free() or me.press("x"))  # who comes back may be away again before we look
    me.close()
    me.process.wait(240)
    assert folder.free()


@pytest.mark.slow
def test_lines_through_a_pipe(folder):
    """Every answer of the original, in either case, and what is none is asked again."""
    folder.ask(6)
    folder.log.add_query(
        *(folder.segments.add(Reply([{"role": "user", "content": "hello"}], text)) for text in ("hi", "go")),
        priority=1.0,
    )
    lines = "l\nL\nR\nE\n\nwhat\ns\nu\nQ"
    done = subprocess.run(
        command(folder, "--labeller", "ann"), input=lines, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "labeller": "ann",
        "answers": 6,
        "undone": 1,
        "labels": 4,
    }
    assert (
        "user> hello" in done.stdout
        and "'what' means nothing here" in done.stdout
        and "The conversation so far" in done.stdout
    )
    counts = folder.log.counts()
    assert (counts["labels"], counts["ties"], counts["skipped"], counts["revoked"], counts["waiting"]) == (
        4,
        1,
        1,
        1,
        2,
    )
    # The end of the input is an end like any other.
    assert (
        subprocess.run(
            command(folder, "--labeller", "bob"), input="", capture_output=True, text=True, timeout=240
        ).returncode
        == 0
    )
    assert folder.log.counts()["waiting"] == 2


@pytest.mark.slow
def test_who_reads_the_output_goes_away(folder):
    folder.ask(3)
    process = subprocess.Popen(
        command(folder, "--labeller", "ann"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline()
    eventually(lambda: folder.log.counts()["leased"] == 1)
    process.stdout.close()
    process.stdin.write(b"l\n")
    process.stdin.flush()
    process.wait(240)
    assert b"Traceback" not in process.stderr.read()
    assert folder.log.counts()["leased"] == 0 and folder.log.counts()["labels"] == 1, (
        "the answer counts, the next pair goes back"
    )
    process.stdin.close()
    process.stderr.close()


def test_half_blocks():
    frame = np.zeros((2, 2, 3), np.uint8)
    frame[0, 0], frame[1, 1] = (255, 0, 0), (0, 0, 255)
    (row,) = half_blocks(frame, 2, 9).rows
    assert [(cell.text, str(cell.style)) for cell in row] == [
        ("▀", "rgb(255,0,0) on rgb(0,0,0)"),
        ("▀", "rgb(0,0,0) on rgb(0,0,255)"),
    ]
    (row,) = half_blocks(np.zeros((2, 8, 3), np.uint8), 8, 9).rows
    assert [cell.text for cell in row] == ["▀" * 8], "neighbours that are alike are one piece"
    for height, width in ((210, 160), (84, 84), (10, 400), (400, 10)):
        picture = half_blocks(np.zeros((height, width, 3), np.uint8), 36, 16)
        shown = picture.width / (2 * len(picture.rows))
        assert (
            picture.width <= 36
            and len(picture.rows) <= 16
            and (0.8 < shown * height / width < 1.25 or 1 in (picture.width, len(picture.rows)))
        )
    grey = half_blocks(
        np.repeat(np.linspace(0, 255, 10, dtype=np.uint8)[None, :, None], 2, 0).repeat(3, -1),
        10,
        1,
        colours=False,
    )
    assert grey.rows[0][0].text == "  ░░▒▒▓▓██"
    console = Console(width=20, file=open(os.devnull, "w"))  # noqa: SIM115
    assert console.measure(picture).maximum == picture.width


def test_what_cannot_be_labelled(folder, monkeypatch):
    run = str(folder.path)
    (folder.path / "model").mkdir()  # no run
    for config, says in (
        (LabelConfig(), "--run: expected the folder of a run"),
        (LabelConfig(run=f"{run}/nothing"), "--run: expected the folder of a run"),
        (
            LabelConfig(run=f"{run}/model"),
            "--run: expected the folder of a run, found in .*model' no settings",
        ),
        (LabelConfig(run=run, lease=0.5), "at least 1 second"),
        (LabelConfig(run=run, token="rl-wrong"), "--token: expected the token of a labeller"),
        (LabelConfig(run=run, revoke="nobody"), "nobody"),
        (LabelConfig(run=run, page=True), "--new_token NAME"),
        (LabelConfig(run=run, labels=f"sqlite:///{run}/typo.db", report=f"{run}/r"), "nothing at .*typo.db"),
        (LabelConfig(run=run, page=True, open=True, host="0.0.0.0"), "--open: expected --host 127.0.0.1"),
    ):
        with pytest.raises(UserError, match=says):
            main(config)
    assert not (folder.path / "model" / "labels.db").exists() and not (folder.path / "typo.db").exists()
    monkeypatch.setenv("RL_DIALOG_TOKEN", "rl-wrong")
    with pytest.raises(UserError, match="--token: expected"):
        main(LabelConfig(run=run))


def test_how_observations_look():
    dot = drawing({"env": "moving_dot"})(np.zeros(2, np.float32))
    assert dot.shape == (210, 160, 3) and dot[105, 80].tolist() == [255, 255, 255]
    stack = np.zeros((84, 84, 4), np.uint8)
    stack[3, 5] = (1, 2, 3, 200)
    for settings in ({}, {"env": "pong"}, {"env": "enduro"}, {"env": "moving_dot"}):
        assert drawing(settings)(stack)[3, 5].tolist() == [200, 200, 200]
    with pytest.raises(UserError, match="expected pictures"):
        drawing({})(np.zeros(2, np.float32))


def test_tokens_and_the_page(folder):
    folder.ask(2)
    made = main(LabelConfig(run=str(folder.path), new_token="ann"))
    with pytest.raises(UserError, match="a new name for the key"):
        main(LabelConfig(run=str(folder.path), new_token="ann"))
    with subprocess.Popen(
        command(folder, "--page", "--port", "0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ready = json.loads(process.stdout.readline())
        client = httpx.Client(base_url=ready["ready"], headers={"Authorization": f"Bearer {made['token']}"})
        assert ready["needs_token"] is True and httpx.get(ready["run"]).status_code == 200
        query = client.post("/v1/lease", json={}).json()["query"]
        assert client.post("/v1/answers", json={"query": query["id"], "choice": "left"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        told = json.loads(process.stdout.read())
        assert process.wait(240) == 0 and told["labels"] == 1 and made["token"] not in process.stderr.read()
    line = subprocess.run(
        command(folder, "--token", made["token"]), input="r\nq\n", capture_output=True, text=True, timeout=240
    ).stdout.splitlines()[-1]
    assert json.loads(line) == {"labeller": "ann", "answers": 1, "undone": 0, "labels": 2}
    assert (
        main(LabelConfig(run=str(folder.path), revoke="ann")) == {"labeller": "ann", "revoked": 2}
        and folder.log.labels() == []
    )
    boss = main(LabelConfig(run=str(folder.path), new_token="boss", scopes=("operator",)))
    assert main(LabelConfig(run=str(folder.path), revoke="boss")) == {"labeller": "boss", "revoked": 0}
    assert folder.log.keys.find(boss["token"]) is None


def test_who_is_revoked_hears_it(folder, monkeypatch, tmp_path):
    """In front of a pair, and before the first one."""
    folder.log.add_query(*[folder.segments.add(Reply([], text)) for text in "ab"])
    folder.log.add_labeller("ann")
    lease = folder.log.lease

    def lease_once(*given):
        pair = lease(*given)
        folder.log.revoke_labeller("ann")
        return pair

    monkeypatch.setattr(folder.log, "lease", lease_once)
    (tmp_path / "keys").write_text("l\nl\n")
    for _ in range(2):
        labeller = TerminalLabeller(folder.log, folder.segments, "ann", console=Console(file=io.StringIO()))
        with open(tmp_path / "keys") as keys, monkeypatch.context() as patch:
            patch.setattr("sys.stdin", keys)
            with pytest.raises(UserError, match="the labeller 'ann' was revoked"):
                labeller.run()
    assert folder.log.counts()["labels"] == 0 and folder.free()


def test_who_has_answered_the_pair_elsewhere_is_told_what_stands(folder):
    """The terminal said that the second answer was saved."""
    [query] = folder.ask(1)
    labeller = TerminalLabeller(
        folder.log, folder.segments, "ann", draw=draw_pixels, console=Console(file=io.StringIO())
    )
    labeller._take(folder.log.lease("ann", 60))
    folder.log.answer(query, "ann", "left")
    labeller._answer("right", much=False)
    told = 'You had answered it elsewhere: "left" stands, and "right" was not kept.'
    assert (labeller.notice, labeller.answers, labeller.pair) == (told, 0, None)


def test_the_plan_and_the_report(folder, tmp_path):
    folder.ask(4)
    clips = [folder.clip(), folder.clip()]
    gold, guideline = tmp_path / "gold.jsonl", tmp_path / "guideline.md"
    gold.write_text(json.dumps({"first": clips[0], "second": clips[1], "preference": 0}) + "\n")
    guideline.write_text("# Look twice")
    run = str(folder.path)
    told = main(LabelConfig(run=run, overlap=2, gold=str(gold), guideline=str(guideline), reasons=("dark",)))
    assert (told["overlap"], told["gold"], told["gold_share"], told["reasons"]) == (2, 1, 0.1, ["dark"])
    assert folder.log.plan.guideline == "# Look twice" and list(folder.log.gold().values()) == [0.0]
    queries = {answer.query for who in ("ann", "bob") for answer in _answered(folder, who)}
    assert folder.log.usual_task() == "Which is brighter?" and len(folder.log.labels()) == 4
    told = main(LabelConfig(run=run, gold_of="ann", gold_share=0.2, report=str(tmp_path / "report")))
    assert told["gold"] == len(queries | set(folder.log.gold())) and told["shared_pairs"] == 0
    assert (tmp_path / "report" / "agreement.html").is_file()


def _answered(folder, who):
    given = []
    while query := folder.log.lease(who):
        given.append(folder.log.answer(query.id, who, "left"))
    return given


def test_plans_that_cannot_be(folder, tmp_path):
    run = str(folder.path)
    for config, says in (
        (LabelConfig(run=run, overlap=0.5), "--overlap: expected a number from 1"),
        (LabelConfig(run=run, gold_share=0.1), "--gold_share: expected gold pairs"),
        (LabelConfig(run=run, gold=str(tmp_path / "none")), "--gold: expected a file"),
        (LabelConfig(run=run, gold_of="ann"), "--gold_of ann"),
        (LabelConfig(run=run, guideline=str(tmp_path / "none")), "--guideline: expected a file"),
        (LabelConfig(run=run, session=-1), "--session"),
        (LabelConfig(run=run, reasons=("a", "a")), "--reasons"),
    ):
        with pytest.raises(UserError, match=says):
            main(config)
    assert folder.log.plan == Plan()


def test_a_reply_cannot_write_to_the_terminal(folder):
    evil = "a\x1b]52;c;ZXZpbA==\x07\x1b[2Jb\r\nनमस्ते 👩\u200d👧"
    replies = [folder.segments.add(Reply([{"role": "user", "content": evil}], text)) for text in (evil, "b")]
    folder.log.add_query(*replies)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120, height=24)
    labeller = TerminalLabeller(folder.log, folder.segments, "ann", console=console)
    labeller._take(folder.log.lease("ann", 60))
    console.print(labeller.view(0))
    shown = console.file.getvalue()
    assert "\x1b]" not in shown and "\x1b[2J" not in shown and "\x07" not in shown
    assert shown.count(r"a\x1b]52;c;ZXZpbA==\x07\x1b[2Jb") == 2 and "\\r" not in shown
    assert shown.count("नमस्ते 👩\u200d👧") == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_blocks(folder, encoding):
    """Clips are shown in signs that it has, and replies that differ look different."""
    talk = [{"role": "user", "content": "\u00e4h"}]
    replies = [folder.segments.add(Reply(talk, text)) for text in ("\u2026", "\u2014")]
    pairs = [folder.log.add_query(*replies), *folder.ask(1)]
    with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as out:
        console = Console(file=out, force_terminal=True, color_system="truecolor", width=80, height=24)
        labeller = TerminalLabeller(
            folder.log, folder.segments, "ann", draw=lambda frame: frame, console=console
        )
        for _ in pairs:
            labeller._take(folder.log.lease("ann", 60))
            console.print(labeller._whole(labeller.view(0)))
            folder.log.answer(labeller.pair.id, "ann", "left")
        out.flush()
        shown = out.buffer.getvalue().decode(encoding)
    assert (
        "\\u2026" in shown
        and "\\u2014" in shown
        and ("\u00e4h" if encoding == "latin-1" else "\\xe4h") in shown
    )
    assert "Left" in shown and "48;2;" not in shown
