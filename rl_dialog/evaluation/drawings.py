"""Drawings of a text world, lines with the colours of a terminal, as an SVG or a GIF that moves.

Colours are those of ANSI's "select graphic rendition": the 16 named ones, the 256, and RGB; bold, and
inverse. Everything else that a terminal would obey is left out.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from rl_dialog.data.schema import said
from rl_dialog.evaluation.episodes import Episode

INK, PAPER = "#202020", "#ffffff"
WIDTH, HEIGHT, MARGIN = 9, 20, 16  # pixels of a character and around all
COLUMNS = 72  # of what is said; drawings may be wider
SAID_LINES = 8  # of one message
NAMED = (  # black red green yellow blue magenta cyan white, then the bright ones
    *("#202020", "#c0392b", "#4f9d4c", "#d0a92f", "#2f6db5", "#8e44ad", "#2a9d8f", "#e4e4e4"),
    *("#787c7e", "#e74c3c", "#6aaa64", "#f1c40f", "#5dade2", "#bb8fce", "#76d7c4", "#ffffff"),
)
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
CUBE = (0, 95, 135, 175, 215, 255)  # levels of the 6 x 6 x 6 colours


@dataclass(frozen=True)
class Style:
    """How characters look."""

    ink: str = INK
    paper: str = PAPER
    bold: bool = False
    inverse: bool = False

    @property
    def colours(self) -> tuple[str, str]:
        return (self.paper, self.ink) if self.inverse else (self.ink, self.paper)


def frames_of(episode: Episode) -> list[str]:
    """An episode's pictures, of the beginning and after each reply: the drawing, what was said, the reward
    and the sum so far."""
    messages, frames, total = episode.dialog.messages, [], 0.0
    replies = episode.dialog.replies
    ends = [*replies, len(messages)]
    for number, drawing in enumerate(episode.drawings):
        begin = replies[number - 1] if number else 0
        until = ends[number] if number < len(ends) else len(messages)
        lines = [line for message in messages[begin:until] for line in _told(message)]
        reward = messages[begin].get("reward") if number else None
        total += reward or 0.0
        earned = "not scored" if reward is None else f"reward {reward:g}, sum {total:g}"
        heading = f"\x1b[90mreply {number}: {earned}\x1b[0m" if number else "\x1b[90mthe beginning\x1b[0m"
        frames.append(
            "\n".join([heading, *([*drawing.rstrip("\n").split("\n"), ""] if drawing else []), *lines])
        )
    return frames


def _told(message: dict) -> list[str]:
    """A message in lines."""
    lines = textwrap.wrap(f"{message['role']}: {plain(said(message))}", COLUMNS, subsequent_indent="  ")
    return lines if len(lines) <= SAID_LINES else [*lines[: SAID_LINES - 1], "  ..."]


def plain(text: str) -> str:
    """Text without escapes and other characters that a terminal obeys."""
    return "".join(c if c.isprintable() or c in "\n\t" else "" for c in ESCAPE.sub("", text))


def uncoloured(drawing: str) -> str:
    """A drawing for a file or a pipe."""
    return ESCAPE.sub("", drawing)


def moving_svg(frames: Sequence[str], *, seconds: float = 1.0) -> str:
    """One picture after the other, again and again; the last one stays three times as long, and is what a
    viewer shows that does not move."""
    drawn = [_frame(frame) for frame in frames]
    columns, rows = max(each[1] for each in drawn), max(each[2] for each in drawn)
    width, height = columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN
    times = len(frames) + 2
    still = len(frames) - 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" '
        'font-size="14">',
        f"<style>.f{{opacity:0}}.last{{opacity:1}}{_keyframes(times, seconds, still)}</style>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *(
            f'<g class="f" style="animation-delay:{i * seconds:g}s">{body}</g>'
            if i < still
            else f'<g class="f last">{body}</g>'
            for i, (body, _, _) in enumerate(drawn)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def save_gif(path: Path, frames: Sequence[str], *, seconds: float = 1.0) -> None:
    """The same as an endless GIF. Characters that DejaVu Sans Mono does not have are boxes there."""
    from matplotlib.font_manager import findfont
    from PIL import ImageFont

    font = ImageFont.truetype(findfont("DejaVu Sans Mono"), 14)
    sizes = [_frame(frame)[1:] for frame in frames]
    columns, rows = (max(each) for each in zip(*sizes, strict=True))
    images = [_picture(frame, columns, rows, font) for frame in frames]
    times = [round(1000 * seconds)] * len(images)
    times[-1] *= 3
    images[0].save(path, "gif", save_all=True, append_images=images[1:], duration=times, loop=0)


def _picture(text: str, columns: int, rows: int, font: Any) -> Any:
    """A frame as Pillow's image."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN), PAPER)
    pen, style = ImageDraw.Draw(image), Style()
    for row, line in enumerate(text.split("\n")):
        left, top = MARGIN, MARGIN + row * HEIGHT
        for words, style in spans(line, style):  # noqa: B020  a style goes on in the next line
            ink, paper = style.colours
            for character in words:
                width = _cells(character) * WIDTH
                if paper != PAPER and width:
                    pen.rectangle((left, top, left + width - 1, top + HEIGHT - 1), paper)
                pen.text((left, top + 2), character, ink, font)
                left += width
    return image


def _keyframes(times: int, seconds: float, still: int) -> str:
    """The rules by which each picture shows for its time; a single one needs none."""
    if not still:
        return ""
    one, end = 100 / times, 100 * still / times
    return (
        f"@keyframes one{{0%{{opacity:1}}{one:.4f}%{{opacity:1}}{one + 1e-3:.4f}%{{opacity:0}}"
        "100%{opacity:0}}"
        f"@keyframes end{{0%{{opacity:0}}{end:.4f}%{{opacity:0}}{end + 1e-3:.4f}%{{opacity:1}}"
        "100%{opacity:1}}"
        f".f{{animation:one {times * seconds:g}s infinite}}"
        f".last{{animation:end {times * seconds:g}s infinite}}"
    )


def _frame(text: str) -> tuple[str, int, int]:
    """The elements of a picture, and its columns and rows."""
    parts, widest, style = [], 1, Style()
    lines = text.split("\n")
    for row, line in enumerate(lines):
        column = 0
        for words, style in spans(line, style):  # noqa: B020  a style goes on in the next line
            cells = sum(_cells(c) for c in words)
            parts.append(_span(words, style, column, row, cells))
            column += cells
        widest = max(widest, column)
    return "".join(parts), widest, len(lines)


def _span(words: str, style: Style, column: int, row: int, cells: int) -> str:
    ink, paper = style.colours
    left, top, width = MARGIN + column * WIDTH, MARGIN + row * HEIGHT, cells * WIDTH
    box = (
        f'<rect x="{left}" y="{top}" width="{width}" height="{HEIGHT}" fill="{paper}"/>'
        if paper != PAPER
        else ""
    )
    if not words.strip():
        return box
    weight = ' font-weight="bold"' if style.bold else ""
    return (
        f'{box}<text x="{left}" y="{top + 15}" fill="{ink}"{weight} textLength="{width}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(words)}</text>'
    )


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def spans(line: str, style: Style) -> Iterator[tuple[str, Style]]:
    """Pieces of a line that look alike, with how they look; at its end an empty one with the style that the
    next line begins with."""
    place = 0
    for found in ESCAPE.finditer(line):
        if words := plain(line[place : found.start()]).expandtabs(4):
            yield words, style
        style, place = (_styled(style, found[1]) if found[1] is not None else style), found.end()
    if words := plain(line[place:]).expandtabs(4):
        yield words, style
    yield "", style


def _styled(style: Style, codes: str) -> Style:
    """The style after one escape, `1;38;5;200`."""
    numbers = [int(code or 0) for code in codes.split(";")]
    while numbers:
        code = numbers.pop(0)
        if code == 0:
            style = Style()
        elif code in (1, 22):
            style = replace(style, bold=code == 1)
        elif code in (7, 27):
            style = replace(style, inverse=code == 7)
        elif code in (38, 48):
            colour = _long_colour(numbers)
            style = (
                replace(style, **({"ink": colour} if code == 38 else {"paper": colour})) if colour else style
            )
        elif code in (39, 49):
            style = replace(style, **({"ink": INK} if code == 39 else {"paper": PAPER}))
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = replace(style, ink=NAMED[code - 30 if code < 90 else code - 82])
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style = replace(style, paper=NAMED[code - 40 if code < 100 else code - 92])
    return style


def _long_colour(numbers: list[int]) -> str | None:
    """The colour behind 38 or 48, `5;N` or `2;R;G;B`, whose numbers are taken; None for another kind."""
    kind = numbers.pop(0) if numbers else 0
    if kind == 2 and len(numbers) >= 3:
        red, green, blue = (min(numbers.pop(0), 255) for _ in range(3))
    elif kind == 5 and numbers:
        number = min(numbers.pop(0), 255)
        if number < 16:
            return NAMED[number]
        if number >= 232:
            red = green = blue = 8 + 10 * (number - 232)
        else:
            red, green, blue = (CUBE[(number - 16) // step % 6] for step in (36, 6, 1))
    else:
        return None
    return f"#{red:02x}{green:02x}{blue:02x}"
