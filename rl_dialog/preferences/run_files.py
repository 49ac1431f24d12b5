"""What a run tells of itself in its folder: status.json, replaced as a whole every second, and metrics.jsonl, a line per logged step."""

from __future__ import annotations

import json
import math
import time
import zlib
from pathlib import Path
from typing import Any

from rl_dialog.errors import UserError

PIECE = 1 << 20  # bytes of metrics in one answer
MARK = 256  # bytes before a cursor by which it is known again


class RunFiles:
    """The files of one run. None of them need be there yet."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def status(self) -> dict[str, Any]:
        """What status.json says, and `age`, the seconds since it was written; {} without one. Raises UserError for a file that is no JSON object."""
        path = self.folder / "status.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            age = max(0.0, time.time() - path.stat().st_mtime)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(f"{path}: expected JSON, got {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"{path}: expected a JSON object, got {type(found).__name__}")
        return finite(found) | {"age": age}

    def metrics(self, cursor: str = "") -> dict[str, Any]:
        """The lines behind a cursor: {"lines", "cursor" for the next call, "more": there are lines left, "reset": all earlier lines are void}.

        A resumed run drops the lines after its checkpoint and writes others. A cursor therefore holds a checksum of what stood before it: where that
        is not so any more, reading begins anew. A line that is not finished is left for the next call, one that is no JSON object is left out.
        """
        path = self.folder / "metrics.jsonl"
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return {"lines": [], "cursor": "", "more": False, "reset": bool(cursor)}
        with file:
            offset = _offset(cursor)
            file.seek(max(0, offset - MARK))
            reset = offset > 0 and cursor != _cursor(offset, file.read(min(offset, MARK)))
            offset = 0 if reset else offset
            file.seek(offset)
            data = file.read(PIECE)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == PIECE:
                raise UserError(f"{path}: expected lines of less than {PIECE} bytes, got a longer one at byte {offset}")
            before = offset
            offset += end
            file.seek(max(0, offset - MARK))
            mark = file.read(min(offset, MARK))
            more = end > 0 and before + len(data) < path.stat().st_size
        lines = [line for text in data[:end].splitlines() if (line := _line(text))]
        return {"lines": lines, "cursor": _cursor(offset, mark), "more": more, "reset": reset}


def _cursor(offset: int, before: bytes) -> str:
    return f"{offset}-{zlib.crc32(before):08x}"


def _offset(cursor: str) -> int:
    number = cursor.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0


def _line(text: bytes) -> dict[str, Any] | None:
    """A line's numbers by name."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    return {name: value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)}


def finite(value: Any) -> Any:
    """The same with None in the place of what JSON cannot say: NaN and infinities."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
