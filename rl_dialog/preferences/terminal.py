"""The labeller in a terminal: two clips side by side in half-block characters, or a conversation with two
replies; one key for an answer.

It works on the run's label log from a process of its own. The pair is leased while the person looks at it,
and given back when they take a break, leave, or the terminal goes away. Where the input is no terminal it is
read line by line, for scripts.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

import numpy as np
from PIL import Image
from rich.align import Align
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment as Cell
from rich.style import Style
from rich.table import Table
from rich.text import Text

from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import Draw, drawn_frames
from rl_dialog.preferences.label_log import LabelLog, Query
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Clip, Segment, Segments

RATE = 15  # frames per second: what an agent that acts on every fourth frame sees at 60 Hz
HOLD = 7  # frames that the end is held before the next round
EMPTY = 0.5  # seconds between two questions for a pair while there is none
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)
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
ARROWS = {"A": "tie", "B": "skip", "C": "right", "D": "left"}  # after ESC [ or ESC O
CHOICES = {"left": "left", "right": "right", "tie": "equal", "skip": "can't tell"}
HELP = "L left   R right   E equal   blank can't tell   U undo   P break   + - speed   Q quit"


class TerminalLabeller:
    """One sitting of one person.

    Args:
        draw: how observations look; needed for clips.
        files: the run, for the number of labels that it wants now.
        lease: seconds that a pair is kept after the last sign of life of this process.
        idle: seconds without a key after which the person counts as away and the pair goes back.
    """

    def __init__(self, log: LabelLog, segments: Segments, labeller: str, *, draw: Draw | None = None,
                 files: RunFiles | None = None, lease: float = 60.0, idle: float = 300.0,
                 console: Console | None = None) -> None:  # fmt: skip
        self.log, self.segments, self.labeller, self.draw, self.files = log, segments, labeller, draw, files
        self.seconds, self.idle, self.console = lease, idle, console or Console(highlight=False)
        self.pair: Query | None = None
        self.view: Callable[[float], RenderableType] = lambda _: Text()
        self.speed, self.paused, self.notice = 1.0, False, ""
        self.answers = self.undone = 0
        self.renewed = self.active = self.asked = self.began = 0.0

    def run(self) -> dict[str, Any]:
        """Asks until the person leaves; what they did. The pair they hold goes back, however it ends."""
        try:
            with Keyboard(sys.stdin) as keyboard, Screen(self.console) as screen:
                self.active = time.monotonic()
                while self._turn(keyboard, screen):
                    pass
        except (
            KeyboardInterrupt,
            OSError,
        ):  # OSError: the terminal is gone; rich itself ends a program whose output nobody reads
            pass
        finally:
            try:
                self._give_back()
            except (
                KeyboardInterrupt
            ):  # the terminal's end may come twice, as the end of the input and as a signal
                self._give_back()
        return {
            "labeller": self.labeller,
            "answers": self.answers,
            "undone": self.undone,
            "labels": self.log.counts()["labels"],
        }

    def _turn(self, keyboard: Keyboard, screen: Screen) -> bool:
        """A frame, and what was typed meanwhile; False when the person wants to leave."""
        now = time.monotonic()
        if not self.paused and now - self.active > self.idle and keyboard.terminal:
            self._pause(f"No key for {self.idle:g} s: the pair went back for others.")
        if not self.paused:
            self._hold(now)
        frames = (now - self.began) * RATE * self.speed
        screen.show(
            self._whole(self.view(frames) if self.pair else Text()),
            key=(self.pair and self.pair.id, self.paused, self.notice),
        )
        typed = keyboard.next(1 / RATE if self.pair and screen.live else EMPTY)
        if typed is None:
            return True
        self.active, self.notice = time.monotonic(), ""
        return self._obey(typed)

    def _obey(self, typed: str) -> bool:
        if typed == "quit":
            return False
        if self.paused:
            self.paused = False
        elif typed in CHOICES and self.pair:
            self.log.answer(self.pair.id, self.labeller, typed)
            self.answers, self.pair = self.answers + 1, None
            self.notice = f"Saved: {CHOICES[typed]}."
        elif typed == "undo":
            self._undo()
        elif typed == "pause":
            self._pause("A break: the pair went back for others.")
        elif typed in ("faster", "slower"):
            place = SPEEDS.index(self.speed) + (1 if typed == "faster" else -1)
            self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, place))]
            self.notice = f"Speed {self.speed:g}."
        elif typed not in CHOICES:
            self.notice = f"{typed!r} means nothing here. {HELP}"
        return True

    def _undo(self) -> None:
        self._give_back()
        pair = self.log.undo(self.labeller, self.seconds)
        self.notice = "Taken back." if pair else "There is no answer to take back."
        if pair:
            self.undone += 1
            self._take(pair)

    def _pause(self, why: str) -> None:
        self._give_back()
        self.paused, self.notice = True, why

    def _hold(self, now: float) -> None:
        """The pair stays ours while somebody looks at it; where there is none, the next one becomes ours as
        soon as it is there."""
        if self.pair and now - self.renewed > self.seconds / 3:
            self.renewed = now
            if not self.log.renew(self.pair.id, self.labeller, self.seconds):
                self.pair, self.notice = (
                    None,
                    "The pair went to somebody else, or was answered. Here is another one.",
                )
        if not self.pair and now - self.asked > EMPTY / 2:
            pair = self.log.lease(self.labeller, self.seconds)
            if pair:
                self._take(pair)
            else:
                self.asked = now

    def _take(self, pair: Query) -> None:
        self.pair = pair  # first: whatever comes now, it goes back
        left, right = self.segments[pair.left], self.segments[pair.right]
        self.view = self._clips(left, right) if isinstance(left, Clip) else self._replies(left, right)
        self.renewed, self.began, self.asked = time.monotonic(), time.monotonic(), 0.0

    def _give_back(self) -> None:
        if self.pair:
            self.log.renew(self.pair.id, self.labeller, 0.0)
            self.pair = None

    def _whole(self, middle: RenderableType) -> RenderableType:
        """Task, pair, and a line of what there is to know."""
        if self.paused:
            head, middle = "Press a key to go on, Q to leave.", Text()
        elif self.pair:
            head = self.pair.task or "Which is better?"
        else:
            head = "Waiting for the next pair. It appears by itself."
        labels_wanted = self.files.status().get("labels_wanted") if self.files else None
        progress = f"{self.answers - self.undone} answered" + (
            "" if labels_wanted is None else f", {labels_wanted} wanted now"
        )
        return Group(
            Text(head, style="bold", justify="center"),
            middle,
            Text(self.notice or HELP, style="dim"),
            Text(progress, style="dim"),
        )

    def _clips(self, left: Segment, right: Segment) -> Callable[[float], RenderableType]:
        if self.draw is None:
            raise UserError(
                "expected a function that draws observations, TerminalLabeller(draw=...), to show clips"
            )
        width, height = (self.console.width - 6) // 2, max(4, self.console.height - 8)
        blocks = self._shown(SHADES + "▀") == SHADES + "▀"
        style = {
            "colours": blocks and self.console.color_system is not None,
            "shades": SHADES if blocks else ASCII_SHADES,
        }
        clips = [
            [half_blocks(frame, width, height, **style) for frame in drawn_frames(clip, self.draw)]
            for clip in (left, right)
        ]
        longest = max(map(len, clips))

        def at(frame: float) -> RenderableType:
            n = int(frame) % (longest + HOLD)
            table = Table.grid(expand=True, padding=(0, 1))
            sides = []
            for name, pictures, clip in zip(("Left", "Right"), clips, (left, right), strict=True):
                place = min(n, len(pictures) - 1)
                ended = (
                    ", the episode ends"
                    if clip.steps < len(clip.actions) and place == len(pictures) - 1
                    else ""
                )
                sides.append(
                    Panel(
                        Align.center(pictures[place]),
                        title=name,
                        subtitle=f"{place + 1}/{len(pictures)}{ended}",
                        style="none",
                    )
                )
            table.add_row(*sides)
            return table

        return at

    def _replies(self, left: Segment, right: Segment) -> Callable[[float], RenderableType]:
        talk = Text(
            "\n".join(f"{message['role']}> {self._shown(message['content'])}" for message in left.context)
        )
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        sides = (("Left", left), ("Right", right))
        table.add_row(
            *(Panel(Text(self._shown(reply.text) or "(an empty reply)"), title=name) for name, reply in sides)
        )
        view = Group(Panel(talk, title="The conversation so far", border_style="dim"), table)
        return lambda _: view

    def _shown(self, text: str) -> str:
        """The text with escapes for what the terminal's encoding does not have: two replies that differ must
        not look alike."""
        return text.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)


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

    def next(self, seconds: float) -> str | None:
        """What the next key or line means (one of the values of KEYS, or itself where it means nothing);
        None: nothing within so many seconds."""
        if not self._whole() and not self.ended and select.select([self.file], [], [], seconds)[0]:
            try:
                data = os.read(self.file, 1024)
            except OSError:  # the terminal is gone
                data = b""
            self.ended = not data
            self.typed += data
        if not self._whole():
            return "quit" if self.ended else None
        return self._key() if self.terminal else self._line()

    def _whole(self) -> bool:
        return bool(self.typed) if self.terminal else b"\n" in self.typed

    def _line(self) -> str:
        line, _, self.typed = self.typed.partition(b"\n")
        text = line.decode("utf-8", "replace").strip()
        return KEYS.get(text.lower(), text)

    def _key(self) -> str:
        text = self.typed.decode("utf-8", "replace")
        if text[:1] == "\x1b" and text[1:2] in ("[", "O"):
            key, remainder = ARROWS.get(text[2:3], text[:3]), text[3:]
        else:
            key, remainder = KEYS.get(text[0].lower(), text[0]), text[1:]
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
