"""What a run tells of itself in its folder: prefer.yaml, its settings, status.json, replaced as a whole every
second, metrics.jsonl, a line per logged step, and where its labels, its newest policy and reward are."""

from __future__ import annotations

import json
import math
import time
import zlib
from pathlib import Path
from typing import Any, Literal

from rl_dialog.config import read_yaml
from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import rounded

PIECE = 1 << 20  # bytes of metrics in one answer
MARK = 256  # bytes before a cursor by which it is known again


class RunFiles:
    """The files of one run. None of them need be there yet."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def own_labels(self) -> str:
        """The URL of the label log in the folder, for a run whose labels are kept nowhere else."""
        return f"sqlite:///{self.folder / 'labels.db'}"

    def settings(self) -> dict[str, Any]:
        """What prefer.yaml says; {} without one."""
        path = self.folder / "prefer.yaml"
        return read_yaml(str(path)) if path.is_file() else {}

    def status(self) -> dict[str, Any]:
        """What status.json says, and `age`, the seconds since it was written; {} without one. Raises
        UserError for a file that is no JSON object."""
        path = self.folder / "status.json"
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            age = max(0.0, time.time() - path.stat().st_mtime)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(f"{path}: expected JSON, got {error}") from None
        if not isinstance(status, dict):
            raise UserError(f"{path}: expected a JSON object, got {type(status).__name__}")
        return finite(status) | {"age": age}

    def metrics(self, cursor: str = "") -> dict[str, Any]:
        """The lines behind a cursor: {"lines", "cursor" for the next call, "more": there are lines left,
        "reset": all earlier lines are void}.

        A resumed run drops the lines after its checkpoint and writes others. A cursor therefore holds a
        checksum of what stood before it: where that is not so any more, reading begins anew. A line that is
        not finished is left for the next call, one that is no JSON object is left out.
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
                raise UserError(
                    f"{path}: expected lines of less than {PIECE} bytes, got a longer one at byte {offset}"
                )
            before = offset
            offset += end
            file.seek(max(0, offset - MARK))
            mark = file.read(min(offset, MARK))
            more = end > 0 and before + len(data) < path.stat().st_size
        lines = [line for text in data[:end].splitlines() if (line := _line(text))]
        return {"lines": lines, "cursor": _cursor(offset, mark), "more": more, "reset": reset}

    def headline(self) -> dict[str, Any]:
        """Steps, the mean true return of the last tenth of the run's episodes, and of the last evaluation."""
        lines = [
            json.loads(line)
            for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        ended = [
            (line["train/return"], line["train/episodes"])
            for line in lines
            if line.get("train/return") is not None
        ]
        evaluated = [line for line in lines if line.get("eval/return") is not None]
        figures: dict[str, Any] = {"steps": lines[-1]["step"] if lines else 0}
        if ended:
            recent, remaining = [], sum(count for _, count in ended) / 10
            while ended and remaining > 0:
                value, count = ended.pop()
                recent.append((value, min(count, remaining)))
                remaining -= count
            mean = sum(value * count for value, count in recent) / sum(count for _, count in recent)
            figures["return"] = rounded(mean)
        for name in ("return", "return_sampled") if evaluated else ():
            figures[f"eval_{name}"] = rounded(evaluated[-1][f"eval/{name}"])
        return figures

    def latest(self) -> dict[str, str]:
        """Paths of the newest reward and of the latest checkpoint, as far as they are there."""
        paths = {}
        if version := newest_version(self.folder / "reward"):
            paths["reward"] = str(self.folder / "reward" / str(version))
        if (self.folder / "latest").is_file():
            paths["checkpoint"] = str(
                self.folder / (self.folder / "latest").read_text(encoding="utf-8").strip()
            )
        return paths


def latest_of(folder: str, what: Literal["reward", "checkpoint"]) -> str:
    """What a run has newest of it, where the folder is a run's; else the folder."""
    return RunFiles(folder).latest().get(what, folder) if folder else ""


def find_checkpoint(folder: str) -> tuple[Path, Path | None]:
    """The folder of the checkpoint that is meant, and of the run around it. Raises UserError where there is
    none."""
    path = (
        Path(folder) if Path(folder).name not in ("", "..") else Path(folder).resolve()
    )  # whose parent is not in its text
    if folder and (path / "config.json").is_file():
        return path, path.parent if (path.parent / "prefer.yaml").is_file() else None
    if folder and (path / "latest").is_file():
        return path / (path / "latest").read_text(encoding="utf-8").strip(), path
    if folder and (path / "prefer.yaml").is_file():
        when = "`prefer` does so every --save_every rounds and at its end"
        raise UserError(f"--checkpoint: {path} holds a run that has saved no policy yet; {when}")
    expected = "expected the folder of a run of `prefer` or of a checkpoint"
    raise UserError(f"--checkpoint: {expected}, got {folder!r}, which holds neither")


def find_reward(folder: Path, checkpoint: Path | None) -> tuple[Path | None, int]:
    """The folder of a run's reward model, None where it has none, and the version that was asked for and is
    deleted, or 0.

    It is the one that `checkpoint` was trained on last, and without it, or where that was deleted, the
    newest.
    """
    progress = checkpoint and checkpoint / "trainer" / "progress.json"
    exists = progress and progress.is_file()
    version = json.loads(progress.read_text(encoding="utf-8")).get("reward_version", 0) if exists else 0
    if version and (folder / "reward" / str(version)).is_dir():
        return folder / "reward" / str(version), 0
    newest = newest_version(folder / "reward")
    return (folder / "reward" / str(newest), version) if newest else (None, 0)


def versions(folder: Path) -> list[int]:
    """The rewards that are published there, ascending."""
    return (
        sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.is_dir() else []
    )


def newest_version(folder: str | Path) -> int:
    """Of the rewards there; 0: none."""
    return max(versions(Path(folder)), default=0)


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
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def finite(value: Any) -> Any:
    """The same with None in the place of what JSON cannot say: NaN and infinities."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
