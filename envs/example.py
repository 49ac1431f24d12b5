"""A world of your own to talk in: a class with `reset` and `step`. In this one a caller wants to be led out
of a house.

    python -m pipelines.evaluate --checkpoints runs/bc --env envs.example:House --output_dir runs/report

A copy of this file, say `my_worlds.py` in the folder where the command starts, is `--env my_worlds:House`, in
`train`, `evaluate` and `tune`.
"""

from __future__ import annotations

import random
from typing import Any

Message = dict[str, Any]


class House:
    """Three rooms; each has one door, and its side is told. -1 for every reply, so the best return is -3;
    after nine replies the caller gives up."""

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """A new conversation; the same seed, the same house."""
        self.doors = random.Random(seed).choices(["left", "right"], k=3)
        self.messages: list[Message] = [{"role": "user", "content": f"I see a door on the {self.doors[0]}."}]
        return list(self.messages), {}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """The messages with the caller's answer, the reward, whether the caller is out, whether the caller
        gave up, and nothing more."""
        self.messages.append({"role": "assistant", "content": reply})
        if self.doors[0] in reply:
            self.doors.pop(0)
        out, tired = not self.doors, len(self.messages) >= 18
        if not out:
            self.messages.append({"role": "user", "content": f"I see a door on the {self.doors[0]}."})
        return list(self.messages), -1.0, out, tired and not out, {}
