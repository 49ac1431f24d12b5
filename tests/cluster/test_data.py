"""The parts that both passes share."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest
import ray

from rl_dialog.cluster import data
from rl_dialog.cluster.data import connect, errors_of_workers
from rl_dialog.errors import UserError
from rl_dialog.run import handling


def test_ray_takes_no_signal_from_who_saves_at_it():
    """Its handler is set before it looks for anything: so also where it finds nothing."""

    def save(*_):
        raise AssertionError("expected no signal")

    with handling(save, signal.SIGTERM):
        with pytest.raises(UserError, match="expected a running Ray"), connect("nowhere.invalid"):
            pass
        assert signal.getsignal(signal.SIGTERM) is save


def test_the_workers_own_error_comes_out_of_rays_wrapper():
    error = ray.exceptions.RayTaskError(
        "write",
        "a long traceback of Ray's",
        UserError("fix the template\nFailed to apply UDF transform after 1/1 attempts"),
    )
    with pytest.raises(UserError, match="^fix the template$"), errors_of_workers():
        raise error.as_instanceof_cause()
    with pytest.raises(ray.exceptions.RayTaskError), errors_of_workers():
        raise ray.exceptions.RayTaskError("write", "a long traceback of Ray's", KeyError("a defect"))


def test_ray_data_is_silent_from_its_first_use():
    code = (
        "import logging; from rl_dialog.cluster.data import errors_of_workers\n"
        "with errors_of_workers():\n import ray.data; print(logging.getLogger('ray.data').level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{logging.CRITICAL}\n", done.stderr


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "expected a running Ray at 127.0.0.1:1, could not join it: .*refused"),
        ("ray://127.0.0.1:1", "could not join it: .*refused"),
    ],
)
def test_a_ray_that_is_not_there_is_told_at_once(address, message):
    with pytest.raises(UserError, match=message), connect(address):
        raise AssertionError("expected no Ray")


@pytest.mark.parametrize(("slow", "starts"), [(2, True), (3, False)])
def test_a_ray_that_a_busy_machine_is_slow_to_start_is_started_again(slow, starts, monkeypatch, capsys):
    """Ray itself gives up after 30 s."""
    came = []

    def init(**how):
        came.append(how["address"])
        if len(came) <= slow:
            raise RuntimeError("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(data, "told_what_is_awaited", nullcontext)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    expected = (
        nullcontext() if starts else pytest.raises(UserError, match="3 attempts: the machine is too busy")
    )
    with expected, connect():
        pass
    assert came == ["local"] * 3 and capsys.readouterr().err.count("once more") == 2


def test_a_ray_that_wants_a_token_says_so(monkeypatch):
    """Ray's own message names the address alone: what the cluster said is in its cause."""

    def init(**_):
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(
            "RPC error: InvalidAuthToken: Authentication token is missing or incorrect"
        )

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match="Failed to connect.*RAY_AUTH_MODE=token"), connect("auto"):
        raise AssertionError("expected no Ray")
