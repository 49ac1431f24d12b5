"""A job that finds no place says so, and who holds the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from rl_dialog.cluster import waiting
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.jobs import each

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
    """Starts until there is a file."""

    def __init__(self, until: Path) -> None:
        while not until.exists():
            time.sleep(0.05)

    def here(self) -> bool:
        return True


def holding(address: str) -> subprocess.Popen:
    """A process that has a core of that Ray, once it has said so."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", HOLD, address]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def said_at_last(what: Callable[[str], bool]) -> str:
    """What `awaited` says, once it is so."""
    deadline = time.monotonic() + 240
    while not what(said := waiting.awaited()):
        assert time.monotonic() < deadline, f"after 240 s it still says {said!r}"
        time.sleep(0.05)
    return said


@pytest.mark.parametrize(
    ("free", "told"),
    [
        ({"CPU": 2.0}, "2 processes of this job to start"),
        ({"CPU": 0.0}, "no place for 1 process of this job. The cluster has 1 node, 0 of 2 CPUs free"),
        ({"CPU": 2.0, "GPU": 0.0}, "no place for 1 process of this job"),
    ],
)
def test_where_cpus_are_free_a_process_is_about_to_start(free, told, monkeypatch) -> None:
    """One has a process id, so a place; the other has none yet."""
    actors = {pid: {"State": "PENDING_CREATION", "Pid": pid} for pid in (7, 0)}
    monkeypatch.setattr(waiting.state, "actors", lambda job_id: actors)
    monkeypatch.setattr(waiting.state, "jobs", list)
    monkeypatch.setattr(waiting, "_neighbours", str)
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "placement_group_table", dict)
    monkeypatch.setattr(ray, "cluster_resources", lambda: dict.fromkeys(free, 2.0))
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    assert waiting.awaited().startswith(told)


def follow(item: tuple[Path, str]) -> str:
    """Leaves a file of its name; fails for b, and where nobody left the file of the one before."""
    folder, name = item
    if name == "b" or not (folder / name[:-1]).exists():
        raise ValueError(name)
    (folder / name).touch()
    return name


@pytest.mark.slow
def test_calls_wait_for_those_they_start_from(tmp_path: Path) -> None:
    """With room for one call at a time, however many wait; what one raised stands for those behind it too."""
    names, after = ["a", "b", "aa", "bb", "aaa"], [None, None, 0, 1, 2]
    with connect("local", num_cpus=1):
        items = [(tmp_path, name) for name in names]
        ended = dict(each(follow, items, waiting=lambda left: None, after=after))
    assert [ended[position] for position in (0, 2, 4)] == ["a", "aa", "aaa"]
    assert [str(ended[position]) for position in (1, 3)] == ["b", "b"]


@pytest.mark.slow
def test_a_job_beside_another_ray_says_so(tmp_path: Path) -> None:
    with connect("local", num_cpus=1), holding("local") as other:
        assert other.stdout.readline() == "True\n"
        waits = Slow.remote(tmp_path / "go")
        said = said_at_last(lambda said: "to start" in said)
        assert said.startswith("1 process of this job to start; another Ray has ")
        assert f"on the {os.cpu_count()} cores of this machine" in said
        (tmp_path / "go").touch()
        assert ray.get(waits.here.remote(), timeout=240)
        other.send_signal(signal.SIGINT)


def test_the_jobs_of_rays_own_dashboard_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        "01": 'ray::DashboardAgent "" ""',
        "02": "ray-dashboard-ServeHead-0 (python)",
        "03": "python a.py",
    }
    jobs = [{"JobID": name, "IsDead": False, "Entrypoint": line} for name, line in runs.items()]
    monkeypatch.setattr(waiting.state, "jobs", lambda: [*jobs, {"JobID": "04", "IsDead": True}])
    assert waiting._others("05") == "; other jobs on it: 03 (python a.py)"
    assert waiting._others("03") == ""


@pytest.mark.slow
def test_a_job_whose_cores_another_job_holds_says_so_and_goes_on(monkeypatch, capfd) -> None:
    monkeypatch.setattr(waiting, "SOON", 1.0)
    monkeypatch.setattr(waiting, "LOOK", 0.5)
    with connect("local", num_cpus=1):
        address = ray.get_runtime_context().gcs_address
        with holding(address) as other:
            assert other.stdout.readline() == "True\n"
            wanted = Wanted.remote()
            # What is free is told to the cluster a while after it is taken.
            homeless = "no place for 1 process of this job. The cluster has 1 node, 0 of 1 CPUs free"
            said = said_at_last(lambda said: homeless in said)
            assert "other jobs on it: " in said and "-c" in said
            err = shown_at_last(capfd, "waiting for 1 s: ")
            group = ray.util.placement_group([{"CPU": 1}] * 2)
            said_at_last(lambda said: "and a group of 2 processes (1 CPU each)" in said)
            ray.util.remove_placement_group(group)
            other.kill()
        assert ray.get(wanted.here.remote(), timeout=240)
        said_at_last(lambda said: not said)
        shown_at_last(capfd, "goes on after", err)


def shown_at_last(capfd: pytest.CaptureFixture[str], begins: str, shown: str = "") -> str:
    """All that was written to stderr since, once there is a line that begins so."""
    deadline = time.monotonic() + 120
    while not any(line.startswith(begins) for line in shown.splitlines()):
        assert time.monotonic() < deadline, f"expected a line {begins!r}, got {shown!r}"
        time.sleep(0.1)
        shown += capfd.readouterr().err
    return shown
