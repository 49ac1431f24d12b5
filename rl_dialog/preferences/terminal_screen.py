"""The terminal that terminal.py asks in: pictures in half-block characters, keys and lines, the screen."""

from __future__ import annotations

import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

import numpy as np
from PIL import Image
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.segment import Segment as Cell
from rich.style import Style

SHADES = " ░▒▓█"  # dark to bright, where there are no colours ...
ASCII_SHADES = " .:*#"  # ... and no blocks
KEYS = {
    "l": "left",
    "r": "right",
    "e": "tie",
    "": "skip",
    "\n": "skip",
    "\r": "skip",
    " ": "skip",
    "s": "skip",
}
KEYS |= {"u": "undo", "p": "pause", "q": "quit", "\x04": "quit", "+": "faster", "-": "slower"}
KEYS |= {"f": "flag", "g": "guideline", "L": "much left", "R": "much right"}
ARROWS = {"A": "tie", "B": "skip", "C": "right", "D": "left"}  # after ESC [ or ESC O; ESC [1;2 with Shift


class Picture:
    """Rows of cells, as rich shows them."""

    def __init__(self, rows: list[list[Cell]], width: int) -> None:
        self.rows, self.width = rows, width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for row in self.rows:
            yield from row
            yield Cell.line()


def half_blocks(
    frame: np.ndarray, columns: int, rows: int, *, colours: bool = True, shades: str = SHADES
) -> Picture:
    """A frame (H, W, 3) in at most so many characters: each shows two pixels, the upper one in its colour and
    the lower one in that of the ground."""
    height, width, _ = frame.shape
    scale = min(columns / width, 2 * rows / height)
    across, down = max(1, round(width * scale)), max(1, round(height * scale / 2))
    kind = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    pixels = np.asarray(Image.fromarray(frame).resize((across, 2 * down), kind))
    pixels = (pixels * (frame.max() / max(1, pixels.max()))).astype(
        np.uint8
    )  # what is small and bright is not averaged away
    if not colours:
        bright = pixels.reshape(down, 2, across, 3).mean((1, 3)) / 256 * len(shades)
        return Picture([[Cell("".join(shades[int(value)] for value in row))] for row in bright], across)
    return Picture(
        [
            list(_runs(upper, lower))
            for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True)
        ],
        across,
    )


def _runs(upper: list[list[int]], lower: list[list[int]]) -> Iterator[Cell]:
    """Neighbours of the same two colours are one piece of text."""
    begin = 0
    for n in range(1, len(upper) + 1):
        if n == len(upper) or (upper[n], lower[n]) != (upper[begin], lower[begin]):
            colours = (f"rgb({r},{g},{b})" for r, g, b in (upper[begin], lower[begin]))
            yield Cell("▀" * (n - begin), Style.parse(" on ".join(colours)))
            begin = n


class Keyboard:
    """Keys of a terminal as they are pressed; lines of anything else, the end of which means quit."""

    def __init__(self, stream: IO[str]) -> None:
        self.terminal, self.file = stream.isatty(), stream.fileno()
        self.typed = b""
        self.ended = False

    def __enter__(self) -> Keyboard:
        if self.terminal:
            self.before = termios.tcgetattr(self.file)
            tty.setcbreak(self.file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.terminal:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self.file, termios.TCSADRAIN, self.before)

    def next(self, seconds: float, *, raw: bool = False) -> str | None:
        """What the next key or line means (one of the values of KEYS, or itself where it means nothing, or
        if `raw`); None: nothing within so many seconds."""
        if not self._whole() and not self.ended and select.select([self.file], [], [], seconds)[0]:
            try:
                data = os.read(self.file, 1024)
            except OSError:  # the terminal is gone
                data = b""
            self.ended = not data
            self.typed += data
        if not self._whole():
            return "quit" if self.ended else None
        return self._key(raw=raw) if self.terminal else self._line()

    def _whole(self) -> bool:
        return bool(self.typed) if self.terminal or self.ended else b"\n" in self.typed

    def _line(self) -> str:
        line, _, self.typed = self.typed.partition(b"\n")
        text = line.decode("utf-8", "replace").strip()
        meaning = KEYS.get(text, KEYS.get(text.lower(), text))
        return "f " if meaning == "flag" else meaning  # a line is the whole of it

    def _key(self, *, raw: bool) -> str:
        text = self.typed.decode("utf-8", "replace")
        if text[:1] == "\x1b" and text[1:2] in ("[", "O"):
            shift = "1;2" if text[2:].startswith("1;2") else ""
            end = 3 + len(shift)
            key, remainder = ARROWS.get(text[end - 1 : end], text[:end]), text[end:]
            key = f"much {key}" if shift and key in ("left", "right") else key
        else:
            key, remainder = text[0], text[1:]
            key = key if raw else KEYS.get(key, KEYS.get(key.lower(), key))
        self.typed = remainder.encode()
        return key


class Screen:
    """A terminal's whole screen, drawn anew with every frame; elsewhere every new state once."""

    def __init__(self, console: Console) -> None:
        self.console, self.live, self.shown = (
            console,
            console.is_terminal and not console.is_dumb_terminal,
            None,
        )
        self.screen = Live(console=console, screen=True, auto_refresh=False) if self.live else None

    def __enter__(self) -> Screen:
        if self.screen:
            self.screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.screen:
            with suppress(OSError):
                self.screen.stop()

    def show(self, content: RenderableType, *, key: Any) -> None:
        """`key`: changes whenever there is something new to say, not with every frame."""
        if self.screen:
            self.screen.update(content, refresh=True)
        elif key != self.shown:
            self.console.print(content)
            self.console.file.flush()
        self.shown = key
