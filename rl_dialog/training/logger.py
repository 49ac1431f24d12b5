"""What a run writes while it trains: one JSON line per logged step, TensorBoard, and a progress bar for people."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from tqdm import tqdm


class Logger:
    """Writes `metrics.jsonl` and TensorBoard events into `directory`. A resumed run drops the lines after the step it resumes from."""

    def __init__(self, directory: Path, *, total: int, first_step: int = 0, report_to: str = "tensorboard", quiet: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step] if path.exists() and first_step else []
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(directory / "tensorboard", first_step) if report_to == "tensorboard" else None
        self._quiet = quiet
        terminal = sys.stderr.isatty() and not quiet
        self._bar = tqdm(total=total, initial=first_step, unit="step", disable=not terminal, dynamic_ncols=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line; values that are not finite become null."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()
        if self._board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        if self._bar.disable and not self._quiet:
            print(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)

    def advance(self, loss: float | None = None) -> None:
        """One step further on the progress bar."""
        self._bar.update(1)
        if loss is not None:
            self._bar.set_postfix(loss=f"{loss:.4g}", refresh=False)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        self._bar.close()
        if self._board:
            self._board.close()


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the last line of a killed run may be cut
        return sys.maxsize


def _tensorboard(directory: Path, first_step: int):  # noqa: ANN202
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=first_step + 1)
