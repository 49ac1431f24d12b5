"""Where the replies that people compare come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rl_dialog.data.readers import dialogs_of_logs
from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import read_dialogs
from rl_dialog.errors import UserError

READ = {"candidates": ("data",), "logs": ("logs",), "checkpoints": ("data", "checkpoints")}  # by each source


@dataclass(frozen=True)
class ReplySource:
    """Candidates, logs, or checkpoints."""

    source: Literal["", "candidates", "logs", "checkpoints"] = ""
    """what to add. candidates: of --data, a directory of `candidates`, or any with several replies to one
    context. logs: of --logs. checkpoints: a reply of each of two --checkpoints to the contexts of --data.
    Without it nothing is added"""
    data: str = ""
    """a directory that `prepare` or `candidates` wrote"""
    logs: tuple[str, ...] = ()
    """files and folders of any known format: TRL's preferences, rated replies, chats"""
    checkpoints: tuple[str, ...] = ()
    """two checkpoints or run folders"""
    splits: tuple[str, ...] = SPLITS
    """splits of --data; labels of all but train are for validation"""

    def check_source(self) -> None:
        """Raises UserError for a source without what it reads, and for what it does not read."""
        inputs = READ.get(self.source, ())
        for name in ("data", "logs", "checkpoints"):
            if name in inputs and not getattr(self, name):
                raise UserError(f"--source {self.source}: expected --{name}")
            if name not in inputs and getattr(self, name):
                used = f"not used with --source {self.source or '(none)'}"
                raise UserError(f"--{name}: {used}: expected it with another source")
        if self.source == "checkpoints" and len(self.checkpoints) != 2:
            raise UserError(f"expected two --checkpoints, got {len(self.checkpoints)}")
        if not set(self.splits) <= set(SPLITS) or not self.splits:
            raise UserError(
                f"expected --splits among {', '.join(SPLITS)}, got {' '.join(self.splits) or 'none'}"
            )

    def dialogs(self) -> Iterator[Dialog]:
        """Those with the replies, or with the contexts that checkpoints reply to."""
        if self.source == "logs":
            return dialogs_of_logs(self.logs)
        return (dialog for split in self.splits for dialog in read_dialogs(self.data, split))
