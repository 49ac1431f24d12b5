"""Processes by what they are called: one that ends while it is looked at has no name."""

from __future__ import annotations

import psutil


def title(process: psutil.Process) -> str:
    """Its command line, which Ray changes to what it does; empty once it is gone."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def of_a_job(pid: int) -> list[psutil.Process]:
    """What a command has started, but for Ray's agents, which linger for a minute."""
    started = psutil.Process(pid).children(recursive=True)
    return [each for each in started if title(each) and not title(each).endswith("Agent")]
