"""What a run writes while it trains, one JSON line per logged step and TensorBoard, and how it is shown to whoever started it."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm


class Logger:
    """Writes `metrics.jsonl` and TensorBoard events into `directory`. A resumed run drops the lines after the step it resumes from."""

    def __init__(self, directory: Path, *, first_step: int = 0, report_to: str = "tensorboard") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step] if path.exists() and first_step else []
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(directory / "tensorboard", first_step) if report_to == "tensorboard" else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line; values that are not finite become null."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()
        if self._board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        if self._board:
            self._board.close()


@contextmanager
def following(directory: Path) -> Iterator[None]:
    """Shows a run while the block lasts, from what its workers write to `metrics.jsonl`: a bar in a terminal, else a line per logged step."""
    over = threading.Event()
    path = directory / "metrics.jsonl"
    before = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    thread = threading.Thread(target=_follow, args=(path, before, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(path: Path, shown: int, over: threading.Event) -> None:
    bar = tqdm(
        total=1.0, disable=not sys.stderr.isatty(), dynamic_ncols=True, bar_format="{percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}"
    )
    while True:
        last = over.wait(0.5)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        shown = min(shown, len(lines))  # a resumed run drops what came after its checkpoint
        for line in lines[shown:]:
            if not line.endswith("\n"):
                break
            shown, values = shown + 1, json.loads(line)
            text = f"step {values.pop('step')}: " + "  ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
            if bar.disable:
                print(text, flush=True)
            else:
                bar.n = values.get("train/progress", bar.n)
                bar.set_postfix_str(text[:120])
        if last:
            bar.close()
            return


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the last line of a killed run may be cut
        return sys.maxsize


def _tensorboard(directory: Path, first_step: int):  # noqa: ANN202
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=first_step + 1)
