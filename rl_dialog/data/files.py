"""Files that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(directory: Path, fill: Callable[[Path], Any]) -> None:
    """Calls `fill(temporary directory)` and renames it to `directory`, so that a killed process never leaves
    half a checkpoint."""
    temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def write_text_atomically(path: Path, text: str) -> None:
    """The same for a small file."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, values: Any) -> None:
    """Readable JSON; NaN and infinity become null."""
    write_text_atomically(
        path,
        json.dumps(
            json.loads(json.dumps(values), parse_constant=lambda _: None), indent=1, ensure_ascii=False
        )
        + "\n",
    )
