"""A Ray cluster that asks for a token, started as its own process, and jobs of it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port

RAY = str(Path(sys.executable).with_name("ray"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a cluster's dashboard, and the environment that lets a caller in."""
    token, dashboard = tmp_path_factory.mktemp("head") / "token", free_port()
    token.write_text(secrets.token_hex(16))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)}
    environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "rl_dialog.cluster.serve:proxy_errors"
    # a short path, as Ray keeps sockets there; a process that is just ending may still write
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        where = [
            "--port",
            str(free_port()),
            "--dashboard-port",
            str(dashboard),
            "--temp-dir",
            folder,
            "--num-cpus",
            "2",
        ]
        where += [
            "--dashboard-agent-listen-port",
            str(free_port()),
        ]  # the usual one may belong to another Ray of this machine
        with subprocess.Popen(
            [RAY, "start", "--head", "--block", *where],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as run:
            deadline = time.monotonic() + 300
            while not listening(dashboard):
                assert run.poll() is None, f"the cluster ended with status {run.poll()}"
                assert time.monotonic() < deadline, "waited 300 s for the cluster's dashboard"
                time.sleep(0.5)
            yield f"http://127.0.0.1:{dashboard}", environment
            kill([psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)])


def submit(
    head: tuple[str, dict[str, str]], *command: str, seconds: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """`ray job submit`, asked again while the cluster has only just started: its dashboard is there before
    what runs jobs."""
    address, environment = head
    deadline = time.monotonic() + 240
    while True:
        done = subprocess.run(
            [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", *command],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(0.5)


def kill(processes: list[psutil.Process]) -> None:
    """At once: told to end, Ray takes half a minute."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes, timeout=30)


def listening(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version", timeout=20).close()
    except urllib.error.HTTPError as error:
        return error.code == 401  # it is there, and asks for the token
    except OSError:
        return False
    return True
