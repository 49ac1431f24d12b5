"""Commands that stop by themselves where a test is going to kill them: a poll, however often it looks, may
come when all is over."""

from __future__ import annotations

import os
from pathlib import Path

# Python imports this module when it starts: the command does, and every process that Ray starts for it.
HELD = """
import fnmatch, glob, os, time

def must_wait(target):
    try:
        with open(os.environ["RL_DIALOG_TEST_HOLD"]) as file:
            most, pattern = file.read().split(" ", 1)
    except (OSError, ValueError):  # it is over, or just being written
        return False
    return fnmatch.fnmatch(target, pattern) and len(glob.glob(pattern)) >= int(most)

def held(real):
    def replace(source, target, *more, **named):
        while must_wait(os.path.abspath(os.fspath(target))):
            time.sleep(0.02)
        return real(source, target, *more, **named)
    return replace

os.replace, os.rename = held(os.replace), held(os.rename)
"""


class Hold:
    """From `begin` to `end`, of the files or folders that match `pattern` no more than `most` come to be (one
    more for each process beside the first that writes them): whoever would write the next one waits. So it is
    in processes that are started with `environment`, and those that these start."""

    def __init__(self, folder: Path) -> None:
        place = folder / "hold"
        place.mkdir()
        (place / "sitecustomize.py").write_text(HELD)
        self.file = place / "file"
        path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
        self.environment = {"PYTHONPATH": path, "RL_DIALOG_TEST_HOLD": str(self.file)}

    def begin(self, pattern: str, most: int) -> None:
        self.file.write_text(f"{most} {pattern}")

    def end(self) -> None:
        self.file.unlink(missing_ok=True)
