"""TRL's trainers in a process of their own, by a Python that has TRL: they do what they are told, one order
after the other."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from rl_dialog.errors import UserError

RIVAL = Path(__file__).parent / "trl_rival.py"
START = 300.0  # seconds from the start of Python to the first order, its imports among them


class TrlProcess:
    """The process, as a context manager. One call is one step of GRPO's or RLOO's trainer, from the drawing
    of replies to new weights; what it is asked of reward models, trl_rival.py says."""

    def __init__(self, python: str, settings: dict[str, Any], *, patience: float) -> None:
        self.python, self.settings, self.patience = python, settings, patience
        self.tokens: list[int] = []

    def __enter__(self) -> Self:
        self.errors = tempfile.TemporaryFile()
        offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.settings["threads"])}
        try:
            self.process = subprocess.Popen(
                [self.python, str(RIVAL), json.dumps(self.settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=os.environ | offline,
            )
        except OSError as error:
            self.errors.close()
            raise UserError(
                f"--trl_python {self.python}: expected the Python of an environment with TRL, such as "
                f"trl/bin/python ({error})"
            ) from error
        try:
            self._hear(START)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __call__(self) -> None:
        """A step."""
        self.tokens.append(self.ask({})["tokens"])

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers. Raises UserError when the process ends, TimeoutError when nothing comes."""
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return self._hear(self.patience)

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            stream.close()

    @property
    def mean_tokens(self) -> float:
        """Drawn in a step."""
        return round(float(np.mean(self.tokens)), 1)

    def _hear(self, seconds: float) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            raise TimeoutError(f"waited {seconds:.0f} s for TRL's trainer ({self.python})")
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        raise UserError(
            f"--trl_python {self.python}: expected TRL's {self.settings['trainer']} trainer to run there, it "
            f"ended with: {' / '.join(said[-3:])[-600:]} (pip install trl datasets)"
        )
