"""Commands that stop by themselves where a test is going to kill them: a poll, however often it looks, may
come when all is over."""

from __future__ import annotations

import os
from pathlib import Path

# Python imports this module when it starts: the command does, and every process that Ray starts for it.
HELD = """
import fnmatch, glob, os, time

def held(real):
    def replace(source, target, *more, **named):
        hold, pattern, most = os.environ["RL_DIALOG_TEST_HOLD"].split("|")
        if fnmatch.fnmatch(os.path.abspath(os.fspath(target)), pattern):
            while os.path.exists(hold) and len(glob.glob(pattern)) >= int(most):
                time.sleep(0.02)
        return real(source, target, *more, **named)
    return replace

os.replace, os.rename = held(os.replace), held(os.rename)
"""


class Hold:
    """As long as it lasts, of the files or folders that match `pattern` no more than `most` come to be (one
    more for each process beside the first that writes them): whoever would write the next one waits.
    `environment` is for the command."""

    def __init__(self, folder: Path, pattern: str, most: int) -> None:
        place = folder / f"hold of {most}"
        place.mkdir()
        (place / "sitecustomize.py").write_text(HELD)
        self.file = place / "hold"
        self.file.touch()
        path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
        self.environment = {"PYTHONPATH": path, "RL_DIALOG_TEST_HOLD": f"{self.file}|{pattern}|{most}"}

    def end(self) -> None:
        self.file.unlink()
