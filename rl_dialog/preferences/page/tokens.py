"""Who may label: a token per labeller. The file keeps names and hashes; a token itself is shown once, when it is made."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import uuid
from pathlib import Path

NAME = 64  # characters of a labeller's name


class Tokens:
    """The tokens of a run, in one JSON file that is read again whenever it changed: a new or revoked token needs no restart."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read: tuple[tuple[int, int, int], dict[str, str]] = (0, 0, 0), {}

    def names(self) -> list[str]:
        """Everybody with a token."""
        return sorted(self._hashes())

    def add(self, name: str) -> str:
        """A new token for a labeller. Raises ValueError for a name that has one, or that is no name."""
        hashes = self._hashes()
        if not name_fits(name):
            raise ValueError(f"expected a name of 1 to {NAME} printable characters, got {name!r}")
        if name in hashes:
            raise ValueError(f"expected the name of somebody without a token, got {name!r}: revoke that token first")
        token = "lab-" + secrets.token_urlsafe(24)
        self._write(hashes | {name: _hash(token)})
        return token

    def revoke(self, name: str) -> None:
        """From now on the token is nobody's; the labels stay. Raises ValueError for somebody without a token."""
        hashes = self._hashes()
        if name not in hashes:
            raise ValueError(f"expected the name of somebody with a token, one of {', '.join(sorted(hashes)) or 'none'}, got {name!r}")
        self._write({known: value for known, value in hashes.items() if known != name})

    def labeller(self, token: str) -> str | None:
        """Whose token it is; None where it is nobody's."""
        sent = _hash(token)
        found = [name for name, known in self._hashes().items() if hmac.compare_digest(known, sent)]
        return found[0] if found else None

    def _hashes(self) -> dict[str, str]:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            return {}
        stamp = state.st_ino, state.st_mtime_ns, state.st_size
        if self._read[0] != stamp:
            try:
                values = json.loads(self.path.read_text(encoding="utf-8"))
                valid = all(isinstance(value, str) for value in values.values())
            except (ValueError, AttributeError):
                valid = False
            if not valid:
                raise ValueError(f"{self.path}: expected a JSON object of names and hashes of tokens: it was changed by hand, restore or remove it")
            self._read = stamp, values
        return self._read[1]

    def _write(self, hashes: dict[str, str]) -> None:
        temporary = self.path.with_name(f".{uuid.uuid4().hex}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(hashes, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def name_fits(name: str) -> bool:
    """Can a labeller be called so?"""
    return 0 < len(name) <= NAME and name.isprintable() and name == name.strip()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
