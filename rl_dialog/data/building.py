"""A data directory in the making: a folder beside it, which a run by the same recipe takes over from one that
was killed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rl_dialog.data.formats import served
from rl_dialog.data.readers import LogFile
from rl_dialog.data.shards import MANIFEST, RECIPE, VERSION, load_manifest
from rl_dialog.errors import UserError, room_for

OWNER = re.compile(r"(\d+)-[^-]+")  # what follows this machine's name; what gpu-head left is not gpu's


@contextmanager
def building(out: Path, *, overwrite: bool, recipe: str = "") -> Iterator[Path]:
    """A sibling of `out` that takes its place when the block ends well, so that a killed run never leaves
    half a data directory under the name.

    What a killed or interrupted run on this machine left is taken over if its `recipe` was the same, and
    removed otherwise; an error leaves nothing. Raises NoRoom on a full disk, UserError when `out` holds
    something: with `overwrite` a data directory is replaced, and nothing else. A link is followed.
    """
    out = out.resolve()
    _check_place(out, overwrite=overwrite)
    with room_for(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = _take_over(out, recipe)
    try:
        with room_for(out):
            yield directory
    except Exception:
        shutil.rmtree(directory)
        raise
    (directory / RECIPE).unlink(missing_ok=True)
    if out.exists():
        old = directory.with_name(f"{directory.name}.old")
        out.rename(old)
        directory.rename(out)
        shutil.rmtree(old)
    else:
        directory.rename(out)


def _check_place(out: Path, *, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UserError(
            f"{out} exists and is not empty: choose another --output_dir, or replace the data directory there"
            " with --overwrite"
        )
    try:
        load_manifest(out)
    except UserError as error:
        if not (out / MANIFEST).is_file():
            left_alone = f"{out} exists and is no data directory, so --overwrite leaves it alone"
            raise UserError(f"{left_alone}: choose another --output_dir ({error})") from None


def _take_over(out: Path, recipe: str) -> Path:
    """The folder to build in: what a killed run by the same recipe left, else a new one.

    Leftovers by other recipes are removed.
    """
    mine = f"{out.name}.tmp-{platform.node()}-"
    directory = Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-", dir=out.parent))
    directory.chmod(0o755)  # mkdtemp's 0700 would shut out other users and workers
    try:
        (directory / RECIPE).write_text(recipe, encoding="utf-8")
    except OSError:
        shutil.rmtree(directory)
        raise
    has_leftover = False
    for leftover in sorted(out.parent.glob(f"{glob.escape(mine)}*")):
        pid = OWNER.fullmatch(leftover.name.removeprefix(mine))
        if pid is None or psutil.pid_exists(int(pid[1])):
            continue
        noted = leftover / RECIPE
        if recipe and not has_leftover and noted.is_file() and noted.read_text(encoding="utf-8") == recipe:
            shutil.rmtree(directory)
            leftover.rename(directory)
            has_leftover = True
        else:
            shutil.rmtree(leftover)
    for unfinished in directory.rglob("*.part"):  # half written
        unfinished.unlink()
    return directory


def recipe_of(
    settings: Mapping[str, Any],
    weights: Mapping[str, float],
    logs: Sequence[LogFile],
    *,
    paths: Sequence[str] = (),
) -> str:
    """All that the finished parts of a run follow from, besides this program: only a run by the same one may
    go on with them.

    `paths` are what it reads beside the logs: files, folders, or names of a hub.
    """
    stores = {
        log.path: log for log in logs if log.reader == "served"
    }  # reading one may tidy its file, which changes the file's time
    stamps = {
        path: _stamps(Path(path)) for path in [*(log.path for log in logs), *paths] if path not in stores
    }
    for log in stores.values():
        stamps |= fingerprint(log)
    return json.dumps(
        {"version": VERSION, "settings": settings, "weights": weights, "files": stamps}, default=str
    )


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of every file in a folder; nothing for the name of a hub."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]


def fingerprint(log: LogFile) -> dict[str, dict[str, Any]]:
    """{path: its size and sha256}, read in pieces; of a store, which is seldom twice the same file, how far
    it had come."""
    if log.reader == "served":
        return {log.path: served.fingerprint(log)}
    with open(log.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {log.path: {"bytes": os.path.getsize(log.path), "sha256": digest}}
