"""A job that finds no place says so, and who holds the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import ray

from rl_dialog.cluster import waiting
from rl_dialog.cluster.data import connect

HOLD = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False, **({"num_cpus": 1} if sys.argv[1] == "local" else {}))
class Holder:
    def here(self): return True
holder = ray.remote(num_cpus=1)(Holder).remote()
print(ray.get(holder.here.remote()), flush=True)
time.sleep(600)
"""


@ray.remote(num_cpus=1)
class Wanted:
    def here(self) -> bool:
        return True


@ray.remote(num_cpus=1)
class Slow:
    def __init__(self) -> None:
        time.sleep(5)


def holding(address: str) -> subprocess.Popen:
    """A process that has a core of that Ray, once it has said so."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", HOLD, address]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_job_beside_another_ray_says_so() -> None:
    with connect("local", num_cpus=1), holding("local") as other:
        assert other.stdout.readline() == "True\n"
        waits = Slow.remote()
        deadline, said = time.monotonic() + 30, ""
        while "to start" not in said:
            assert time.monotonic() < deadline and waits
            said = waiting.awaited()
        assert said.startswith("1 process of this job to start; another Ray has ")
        assert f"on the {os.cpu_count()} cores of this machine" in said
        other.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_job_whose_cores_another_job_holds_says_so_and_goes_on(monkeypatch, capfd) -> None:
    monkeypatch.setattr(waiting, "SOON", 1.0)
    monkeypatch.setattr(waiting, "LOOK", 0.5)
    with connect("local", num_cpus=1):
        address = ray.get_runtime_context().gcs_address
        with holding(address) as other:
            assert other.stdout.readline() == "True\n"
            wanted = Wanted.remote()
            deadline = time.monotonic() + 30
            while not (said := waiting.awaited()):
                assert time.monotonic() < deadline
            assert "no place for 1 process of this job. The cluster has 1 node, 0 of 1 CPUs free" in said
            assert "other jobs on it: " in said and "-c" in said
            time.sleep(3)
            group = ray.util.placement_group([{"CPU": 1}] * 2)
            assert "and a group of 2 processes (1 CPU each)" in waiting.awaited()
            ray.util.remove_placement_group(group)
            other.kill()
        assert ray.get(wanted.here.remote(), timeout=60) and not waiting.awaited()
        time.sleep(2)
    said = capfd.readouterr().err.splitlines()
    assert any(line.startswith("waiting for 1 s: no place for") for line in said)
    assert any(line.startswith("goes on after") for line in said)
