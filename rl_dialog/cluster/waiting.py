"""What a command waits for on a cluster, said while it waits: Ray itself is silent when actors or groups of
workers find no place, because a node is gone or because other jobs hold its cores."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import ray
from ray._private import state  # the state API proper asks the dashboard, which a Ray of our own has not

SOON = 20.0  # seconds without a place after which it is said for the first time; then twice as long each time
IDLE = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")  # of every Ray, and doing nothing
OF_RAY = ("ray::", "ray-dashboard-")  # jobs that its dashboard runs, for those who submit and deploy
LOOK = 5.0  # seconds between two looks


@contextmanager
def told_what_is_awaited() -> Iterator[None]:
    """While the block lasts a thread says on stderr what of this job has had no place for a while, and when
    it goes on. Ray must be running."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(ended,), daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join(LOOK)


def _watch(ended: threading.Event) -> None:
    waited, announced, due = 0.0, False, SOON
    while not ended.wait(LOOK):
        what = ""
        with suppress(Exception):  # a Ray that is just ending; who uses it hears of that
            what = awaited()
        if not what:
            if announced:
                print(f"goes on after {waited:.0f} s", file=sys.stderr, flush=True)
            waited, announced, due = 0.0, False, SOON
            continue
        waited += LOOK
        if waited >= due:
            print(f"waiting for {waited:.0f} s: {what}", file=sys.stderr, flush=True)
            announced, due = True, 2 * due


def awaited() -> str:
    """What of this job has no place on the cluster, and why; empty if nothing."""
    job = ray.get_runtime_context().get_job_id()
    actors = state.actors(job_id=ray.JobID.from_hex(job)).values()
    starting = [each for each in actors if each["State"] == "PENDING_CREATION"]
    again = [each for each in actors if each["State"] == "RESTARTING"]
    # one that has a place is a process already
    homeless = [*again, *(each for each in starting if not each["Pid"])]
    groups = [
        each
        for key, each in ray.util.placement_group_table().items()
        if key.endswith(job) and each["state"] in ("PENDING", "RESCHEDULING")
    ]
    if not groups and _is_room_for(len(homeless)):  # Ray is about to start them
        starting, homeless = [*starting, *again], []
    parts = [f"{_counted(len(homeless), 'process')} of this job"] if homeless else []
    for group in groups:
        bundles = list(group["bundles"].values())
        wants = ", ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
        parts.append(f"a group of {_counted(len(bundles), 'process')} ({wants} each)")
    if parts:
        return f"no place for {' and '.join(parts)}. {cpus_of_cluster()}{_others(job)}{_neighbours()}"
    return f"{_counted(len(starting), 'process')} of this job to start{_neighbours()}" if starting else ""


def _is_room_for(count: int) -> bool:
    """Is a CPU free for each of so many processes, and a GPU where there are any?"""
    all_of_it, free = ray.cluster_resources(), ray.available_resources()
    return all(
        free.get(kind, 0.0) >= count for kind in ("CPU", "GPU") if kind == "CPU" or all_of_it.get(kind)
    )


def cpus_of_cluster() -> str:
    """How many nodes and CPUs there are, and how many CPUs are free."""
    all_of_it, free = ray.cluster_resources(), ray.available_resources()
    kinds = [kind for kind in ("CPU", "GPU") if kind == "CPU" or all_of_it.get(kind)]
    counts = [f"{free.get(kind, 0.0):g} of {all_of_it.get(kind, 0.0):g} {kind}s free" for kind in kinds]
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"The cluster has {_counted(nodes, 'node')}, {' and '.join(counts)}"


def _counted(count: int, noun: str) -> str:
    """1 node, 2 nodes, 3 processes."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _others(job: str) -> str:
    """The other jobs of the cluster, by what their drivers run; those of Ray's dashboard hold nothing."""
    others = {each["JobID"]: each.get("Entrypoint", "") for each in state.jobs() if not each["IsDead"]}
    theirs = [name for name, runs in others.items() if name != job and not runs.startswith(OF_RAY)]
    named = [f"{name} ({others[name][:80]})" for name in theirs[:3]]
    return f"; other jobs on it: {', '.join(named)}" if named else ""


def _neighbours() -> str:
    """Other Rays at work on this machine: each lends all of its cores, as if it were alone there."""
    ours, busy = ray.get_runtime_context().gcs_address, 0
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] != "raylet" or f"--gcs-address={ours}" in (process.info["cmdline"] or ()):
            continue
        with suppress(psutil.Error):
            below = (" ".join(each.cmdline()) for each in process.children(recursive=True))
            busy += sum(line.startswith("ray::") and not line.startswith(IDLE) for line in below)
    cores = f"{os.cpu_count()} cores of this machine"
    return f"; another Ray has {_counted(busy, 'process')} on the {cores}" if busy else ""
