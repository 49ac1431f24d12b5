"""The exceptions that are messages to people."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the repository, or where pip put its packages
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_IN_WORDS = f"(os error {errno.ENOSPC})"  # of safetensors and tokenizers, whose exceptions are their own
FULL_DATABASE = {"sqlite_errorcode": 13, "sqlstate": "53100"}  # of SQLite and PostgreSQL


class UserError(ValueError):
    """Something that who runs the program can repair: the message says what was expected, what came, where,
    and how to fix it. Any other exception is a defect of ours and shows its traceback."""


class NoRoom(UserError):
    """A file system, or somebody's share of it, is full."""


def page(name: str) -> str:
    """A file of ours as it can be opened from here: by its name in the repository, or in full where that is
    not the working directory."""
    return name if Path(name).exists() else str(ROOT / name)


@contextmanager
def room_for(path: str | Path) -> Iterator[None]:
    """Raises NoRoom for whatever the block raises because a disk is full: most such errors do not say which
    one. `path` is what the block writes to."""
    try:
        yield
    except NoRoom:
        raise
    except Exception as error:
        if not _is_full(error):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(_cause(error))
        reason = " ".join(reason.split())[:200]
        raise NoRoom(
            f"no room to write {path}: {reason}{_how_full(Path(path))}. Free some, or "
            "choose another place; then the same command goes on, with --resume where it asks for that"
        ) from error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, shutil.Error):
        return any(f"[Errno {number}]" in str(_cause(error)) for number in FULL)
    if isinstance(error, OSError):
        return error.errno in FULL
    cause = _cause(error)
    full = any(getattr(cause, name, None) == code for name, code in FULL_DATABASE.items())
    return full or FULL_IN_WORDS in str(error)


def _cause(error: BaseException) -> BaseException:
    """The database's own error, where SQLAlchemy tells of it; the first reason of those why a folder could
    not be copied."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return OSError(error.args[0][0][-1])
    return getattr(error, "orig", None) or error


def _how_full(path: Path) -> str:
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    usage = shutil.disk_usage(there)
    return f" ({usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB free)"
