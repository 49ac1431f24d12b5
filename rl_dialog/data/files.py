"""Files that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_dialog.errors import UserError, room_for


def write_atomically(directory: Path, fill: Callable[[Path], Any]) -> None:
    """Calls `fill(temporary directory)` and renames it to `directory`, so that nobody ever sees half a
    checkpoint. What fails leaves nothing; what a killed process left, `claim_output` removes. Raises NoRoom.
    """
    temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with room_for(directory):
            temporary.mkdir(parents=True)
            fill(temporary)
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_appendable(path: str | Path) -> None:
    """Raises UserError unless lines can be appended to the file. One that is missing stays missing; its
    folder is made."""
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise UserError(f"{path}: expected a file to append to, got: {error.strerror}") from error


def write_text_atomically(path: Path, text: str) -> None:
    """The same for a small file."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with room_for(path):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, values: Any) -> None:
    """Readable JSON; NaN and infinity become null."""
    write_text_atomically(
        path,
        json.dumps(
            json.loads(json.dumps(values), parse_constant=lambda _: None), indent=1, ensure_ascii=False
        )
        + "\n",
    )
