"""The frame of every command."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_dialog import run
from rl_dialog.config import INSTALLED
from rl_dialog.errors import UserError
from rl_dialog.own import own


def test_what_the_machine_refused_is_told_in_words(tmp_path, monkeypatch, capsys) -> None:
    """A file where a folder is to be, and a folder that cannot be made."""
    monkeypatch.delenv("RL_DIALOG_DEBUG", raising=False)
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path / "file" / "out", "Not a directory"), (Path("/proc/out"), "No such file")):
        monkeypatch.setattr("sys.argv", ["pipelines/x.py", "--output_dir", str(path)])
        with pytest.raises(SystemExit) as end:
            run.run(run.Output, lambda config: {"out": run.claim_output(config, "x")})
        shown = capsys.readouterr().err
        assert end.value.code == 2 and "Errno" not in shown and "Traceback" not in shown
        assert f"error: {path}: {reason}" in shown and "path" in shown.split(reason)[1]


@dataclass(frozen=True)
class Learn(run.Output):
    start: str = ""
    models: tuple[str, ...] = ()
    log: str = ""
    report_to: str = "tensorboard"
    inner: run.OnCluster = run.OnCluster()


@pytest.mark.parametrize(
    "given",
    [
        {"start": "run"},
        {"start": "other/../run/checkpoint-1"},
        {"models": ("other", "v=link/checkpoint-1")},
        {"inner": run.OnCluster(address="run/checkpoint-1")},
    ],
)
def test_what_a_command_is_to_read_is_not_deleted_by_overwrite(given, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run/checkpoint-1", "run/tensorboard", "other"):
        Path(name).mkdir(parents=True)
    Path("link").symlink_to("run")
    Path("run/learn.yaml").touch()
    Path("run/log.jsonl").touch()
    how = {"output_dir": "run", "overwrite": True}
    with pytest.raises(UserError, match=r"--(start|models|inner.address) .* is in .*run, which --overwrite"):
        run.claim_output(Learn(**how, **given), "learn")
    assert Path("run/checkpoint-1").is_dir()
    elsewhere = Learn(**how, start="run/../other", models=("", "v=1"), log="run/log.jsonl")
    run.claim_output(elsewhere, "learn", written=["log"])
    assert [path.name for path in Path("run").iterdir()] == ["learn.yaml"]


def test_a_message_names_commands_as_they_are_typed_here(monkeypatch, capsys) -> None:
    def fails(config: run.Quiet) -> dict:
        raise UserError("talk to a model first (python -m pipelines.serve --help)")

    for installed, told in (("", "python -m pipelines.serve --help"), ("1", "rl-dialog serve --help")):
        monkeypatch.setenv(INSTALLED, installed)
        monkeypatch.setattr("sys.argv", ["count"])
        with pytest.raises(SystemExit):
            run.run(run.Quiet, fails)
        assert f"error: talk to a model first ({told})" in capsys.readouterr().err


def test_a_message_breaks_no_path(monkeypatch, capsys) -> None:
    """Whoever copies it from the terminal gets it whole."""
    path = "/data/" + "long-name-" * 13

    def fails(config: run.Quiet) -> dict:
        raise UserError(f"expected a folder, found nothing at {path}: choose another one")

    monkeypatch.setattr("sys.argv", ["count"])
    with pytest.raises(SystemExit):
        run.run(run.Quiet, fails)
    assert path in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (run.Output, "interrupted"),
        (run.ResumableOutput, "interrupted: the same command with --resume goes on"),
    ],
)
def test_who_interrupts_is_told_how_to_go_on(config, told, monkeypatch, capsys) -> None:  # noqa: ANN001
    def interrupted(_) -> None:  # noqa: ANN001
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["verb"])
    with pytest.raises(SystemExit) as ended:
        run.run(config, interrupted)
    assert ended.value.code == 130 and capsys.readouterr().err.strip() == told


def test_garbage_waits_for_a_verb_to_be_imported_and_no_longer(monkeypatch, capsys) -> None:
    """Where a worker or a notebook imports a verb, nothing changes: nobody would begin to collect there."""
    monkeypatch.setattr("sys.argv", ["pipelines/x.py"])
    gc.disable()
    try:
        run.run(run.Quiet, lambda config: {"collects": gc.isenabled()})
    finally:
        gc.enable()
    assert capsys.readouterr().out == '{"collects": true}\n'
    show = "import gc, sys; sys.argv[0] = {!r}; import pipelines; print(gc.isenabled())"
    for first, collects in (("-m", "False"), ("default_worker.py", "True")):
        command = [sys.executable, "-c", show.format(first)]
        found = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
        )
        assert found.stdout.strip() == collects


def test_a_name_of_the_users_that_is_misspelt_gets_a_suggestion(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_rewards_of_run.py").write_text("def politeness(dialog): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="has no attribute 'polite'. Did you mean politeness?"):
        own("my_rewards_of_run:polite", "reward")
    with pytest.raises(UserError, match="No module named 'my_rewards_nowhere'$"):
        own("my_rewards_nowhere:polite", "reward")


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "LINE_EVERY", 0.05)
    with run.progress("score", 2000, "dialogs", done=500) as step:
        step(700)
        said, deadline = "", time.monotonic() + 120
        while said.count(": 1,200 of") < 2:
            assert time.monotonic() < deadline, f"expected a line now and then, got {said!r}"
            time.sleep(0.01)
            said += capsys.readouterr().err
    lines = (said + capsys.readouterr().err).splitlines()
    assert all(re.fullmatch(r"score: (500|1,200) of 2,000 dialogs after \d+ s", line) for line in lines)
    with run.progress("score", None, "dialogs", quiet=True) as step:
        step(1)
        time.sleep(0.12)
    monkeypatch.setattr(run, "LINE_EVERY", 60.0)
    with run.progress("score", None, "dialogs"):  # over before there was anything to tell
        pass
    assert capsys.readouterr().err == ""


def test_a_signal_ends_whoever_waits_at_any_moment() -> None:
    """What a signal interrupts may hold the lock of the event that the signal sets."""
    code = """
from rl_dialog.run import told_to_end
for _ in range(2000):
    with told_to_end() as end:
        print(flush=True)
        while not end.wait(1e-6):
            pass
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        try:
            for _ in process.stdout:
                time.sleep(0.001)
                process.terminate()
            assert process.wait(240) == 0
        finally:
            process.kill()


def test_the_first_signal_asks_to_save_and_the_second_does_not_wait(capsys) -> None:  # noqa: ANN001
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), run.told_to_save() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set() and "saving what is learned; once more" in capsys.readouterr().err
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


HOLDER = """
import sys, time
from rl_dialog import run


def main(config):
    run.claim_output(config, "x")
    print("claimed", flush=True)
    time.sleep(60)


run.run(run.Output, main)
"""


def test_a_folder_belongs_to_one_running_command(tmp_path: Path) -> None:
    """Not even --overwrite takes it away; a killed one leaves it to the next, and a process to itself."""
    out = tmp_path / "out"
    anew = run.Output(output_dir=str(out), overwrite=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "--output_dir", str(out)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(UserError, match="no other command writes to, but one that is running does"):
            run.claim_output(anew, "x")
        assert (out / "x.yaml").is_file()
        run.claim_output(anew, "x", shared=True)
    finally:
        holder.kill()
        holder.wait()
    for _ in range(2):
        assert run.claim_output(anew, "x") == out
        (out / "result").write_text("mine")
