"""Which checkpoints a user means: run folders and checkpoint directories, and the groups of runs that differ
by seed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_dialog.errors import UserError
from rl_dialog.models.causal_lm import is_model
from rl_dialog.models.checkpoint import resolve


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a run and the group it belongs to."""

    group: str
    which: str  # best, last, checkpoint-<step>, or nothing
    run: str
    directory: str
    folder: Path  # where the run's metrics.jsonl is


def find_entries(checkpoints: Sequence[str], names: Sequence[str] = ()) -> list[Entry]:
    """What to evaluate, in the order given. Raises UserError for a path that is no checkpoint, or for runs
    that cannot be told apart."""
    if names and len(names) != len(checkpoints):
        raise UserError(
            f"expected one name per checkpoint, got {len(names)} names for {len(checkpoints)} checkpoints"
        )
    entries: list[Entry] = []
    for number, checkpoint in enumerate(checkpoints):
        entries += _entries_of(existing(checkpoint), names[number] if names else "")
    paths: dict[tuple[str, str, str], str] = {}
    for entry in entries:
        key = entry.group, entry.which, entry.run
        if key in paths:
            raise UserError(
                f"{paths[key]} and {entry.directory} are both run {entry.run} of group {entry.group}: tell "
                "them apart with --names"
            )
        paths[key] = entry.directory
    return _without_copies(entries)


def _without_copies(entries: list[Entry]) -> list[Entry]:
    """Where best and last are one checkpoint in every run of a group, the group once and without that
    distinction."""
    directories = {(e.group, e.run, e.which): e.directory for e in entries}
    differ = {
        e.group
        for e in entries
        if e.which != "last" and directories.get((e.group, e.run, "last")) != e.directory
    }
    differ |= {
        e.group
        for e in entries
        if e.which == "last" and directories.get((e.group, e.run, "best")) != e.directory
    }
    return [
        e if e.group in differ else replace(e, which="")
        for e in entries
        if e.group in differ or e.which == "last"
    ]


def _entries_of(path: Path, name: str) -> list[Entry]:
    if is_model(path):
        inside = re.fullmatch(r"checkpoint-\d+", path.name)
        folder = path.absolute().parent if inside else path.absolute()
        group, run_name = _group_of(folder)
        return [Entry(name or group, path.name if inside and not name else "", run_name, str(path), folder)]
    group, run_name = _group_of(path.absolute())
    pointers = {
        which: path / file
        for which, file in (("best", "best"), ("last", "latest"))
        if (path / file).is_file()
    }
    if not pointers:
        resolve(path)  # raises, and says what a checkpoint is
    directories = {which: path / file.read_text(encoding="utf-8").strip() for which, file in pointers.items()}
    return [
        Entry(name or group, which, run_name, str(directory), path.absolute())
        for which, directory in directories.items()
    ]


def _group_of(folder: Path) -> tuple[str, str]:
    """(group, run): `runs/ilql-seed3` and `runs/ilql/seed3` are runs of ilql."""
    match = re.fullmatch(r"(.*?)[-_.]?seed[-_]?\d+", folder.name)
    if not match:
        return folder.name, folder.name
    return (
        (match[1], folder.name) if match[1] else (folder.parent.name, f"{folder.parent.name}/{folder.name}")
    )


def existing(name: str) -> Path:
    """A directory that the user named. Raises UserError with the nearest one beside it."""
    path = Path(name)
    if path.is_dir():
        return path
    siblings = (
        [sibling.name for sibling in path.parent.iterdir() if sibling.is_dir()]
        if path.parent.is_dir()
        else []
    )
    close = nearest(path.name, siblings, prefix=f"{path.parent}/" if path.parent != Path() else "")
    raise UserError(
        f"no such checkpoint: {name}. Expected a run folder (best, latest) or a checkpoint directory "
        f"(config.json).{close}"
    )


def nearest(word: str, names: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean X?`, or nothing."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""
