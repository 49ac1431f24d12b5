"""Films of episodes: each frame enlarged, and below it the step, the action, and the true and the predicted
reward with their sums so far.

A GIF is written by Pillow, an MP4 (H.264) by PyAV, which is not needed otherwise. Frames are made one by one:
an episode may have thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rl_dialog.errors import UserError
from rl_dialog.evaluation.control_episodes import ControlEpisode
from rl_dialog.evaluation.plots import COLOURS, GREY

LEAST_WIDTH = 320  # of a film: smaller frames are enlarged by a whole factor
INK = "#202020"
GIF_COLOURS = 32  # of a frame: games are grey, and the strip has few colours
MOST_GIF_FPS = 50  # players show a GIF's frames for a fiftieth of a second at least


def film(episode: ControlEpisode, action_names: Sequence[str] = ()) -> Iterator[Image.Image]:
    """The episode's frames as they are shown. Sides are even numbers, as H.264 wants them."""
    true = np.cumsum(episode.rewards, dtype=float)
    predicted = None if episode.predicted is None else np.cumsum(episode.predicted, dtype=float)
    for i, frame in enumerate(episode.frames):
        values = [("true", COLOURS[0], episode.rewards[i], true[i])]
        if predicted is not None:
            values.append(("predicted", COLOURS[1], episode.predicted[i], predicted[i]))
        yield _shown(
            frame,
            f"step {i + 1} of {len(episode.rewards)}",
            action_text(episode.actions[i], action_names),
            values,
        )


def action_text(action: np.ndarray, names: Sequence[str] = ()) -> str:
    """An action's name, or its number or numbers."""
    if action.ndim:
        return " ".join(f"{value:+.2f}" for value in action)
    return names[int(action)] if names else str(int(action))


def save_gif(path: Path, frames: Iterable[Image.Image], fps: float) -> None:
    """Writes an endless GIF. Raises UserError for more frames per second than players show."""
    if not 0 < fps <= MOST_GIF_FPS:
        raise UserError(
            f"a GIF has at most {MOST_GIF_FPS} frames per second, got {fps:g}: expected fewer, or mp4"
        )
    images = (frame.quantize(GIF_COLOURS, dither=Image.Dither.NONE) for frame in frames)
    next(images).save(path, "gif", save_all=True, append_images=images, duration=round(1000 / fps), loop=0)


def save_mp4(path: Path, frames: Iterable[Image.Image], fps: float) -> None:
    """Writes an MP4 that browsers play. Raises UserError without PyAV."""
    av, frames = mp4_library(), iter(frames)
    first = next(frames)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("h264", rate=round(fps))
        stream.width, stream.height, stream.pix_fmt = first.width, first.height, "yuv420p"
        for image in chain([first], frames):
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())


def mp4_library() -> ModuleType:
    """PyAV. Raises ImportError that says how to get it."""
    try:
        import av
    except ImportError as error:
        raise UserError("MP4 films are written by PyAV: pip install av; GIFs need nothing more") from error
    return av


def _shown(
    frame: np.ndarray, step: str, action: str, values: Sequence[tuple[str, str, float, float]]
) -> Image.Image:
    """A frame above its strip; `values`: heading, colour, reward and sum of each column."""
    height, width = frame.shape[:2]
    factor = max(1, -(-LEAST_WIDTH // width))
    picture = Image.fromarray(frame).resize((width * factor, height * factor), Image.Resampling.NEAREST)
    size = max(14, picture.width // 22)
    line, margin, font = round(1.4 * size), size, _font(size)
    image = Image.new("RGB", (_even(picture.width), _even(picture.height + 4 * line + margin)), "white")
    image.paste(picture)
    pen, top = ImageDraw.Draw(image), picture.height + margin // 2
    pen.text((margin, top), step, INK, font)
    pen.text((picture.width - margin, top), action, INK, font, anchor="ra")
    for row, name in enumerate(("reward", "sum"), 2):
        pen.text((margin, top + row * line), name, GREY, font)
    for place, (heading, colour, reward, total) in enumerate(reversed(values)):
        right = picture.width - margin - place * picture.width * 3 // 10
        for row, text in enumerate((heading, f"{reward:+.2f}", f"{total:+.2f}"), 1):
            pen.text((right, top + row * line), text, colour, font, anchor="ra")
    return image


def _even(number: int) -> int:
    return number + number % 2


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Matplotlib's, whose digits are all of one width."""
    from matplotlib.font_manager import findfont

    return ImageFont.truetype(findfont("DejaVu Sans"), size)
