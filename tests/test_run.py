"""The frame of every command."""

from __future__ import annotations

import time

from rl_dialog import run


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "LINE_EVERY", 0.05)
    with run.progress("score", 2000, "dialogs", done=500) as step:
        step(700)
        time.sleep(0.12)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and set(lines) == {"score: 1,200 of 2,000 dialogs after 0 s"}
    with run.progress("score", None, "dialogs", quiet=True) as step:
        step(1)
        time.sleep(0.12)
    with run.progress("score", None, "dialogs"):  # over before there was anything to tell
        pass
    assert capsys.readouterr().err == ""
