"""Clips as pictures: the frames that people see, and all of them on one sheet that a browser plays."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from rl_dialog.errors import UserError
from rl_dialog.preferences.segments import Clip

Draw = Callable[[np.ndarray], np.ndarray]  # an observation -> uint8 (H, W, 3)
MOST_PIXELS = 12_000_000  # on a sheet: what a phone's browser still takes


@dataclass(frozen=True)
class Sheet:
    """All frames of a clip in one PNG, row by row."""

    png: bytes
    frames: int
    columns: int
    width: int  # of a frame
    height: int


def draw_pixels(observation: np.ndarray) -> np.ndarray:
    """Observations that are pictures: colours (H, W, 3) as they are, of grey ones (H, W) or stacks of them
    (H, W, S) the newest, the last."""
    if observation.dtype != np.uint8 or observation.ndim not in (2, 3):
        raise UserError(
            f"expected pictures, uint8 (H, W), (H, W, 3) or (H, W, S), got {observation.dtype} "
            f"{observation.shape}: say how to draw them"
        )
    if observation.ndim == 3 and observation.shape[2] == 3:
        return observation
    return np.repeat(observation.reshape(*observation.shape[:2], -1)[..., -1:], 3, axis=-1)


def drawn_frames(clip: Clip, draw: Draw) -> np.ndarray:
    """uint8 (steps, H, W, 3): the steps that were taken, without the padding; the clip's own pictures where
    it has some. Raises UserError where `draw` returns something else."""
    if clip.pictures is not None:
        return clip.pictures[: clip.steps]
    frames = [np.asarray(draw(observation)) for observation in clip.observations[: clip.steps]]
    first_frame = frames[0]
    if (
        first_frame.dtype != np.uint8
        or first_frame.ndim != 3
        or first_frame.shape[2] != 3
        or any(frame.shape != first_frame.shape for frame in frames)
    ):
        kinds = sorted({f"{frame.dtype} {frame.shape}" for frame in frames})
        raise UserError(
            f"expected frames of one size, uint8 (H, W, 3), got {', '.join(kinds)} for observations of "
            f"{clip.observations.shape[1:]}"
        )
    return np.stack(frames)


def sheet(clip: Clip, draw: Draw) -> Sheet:
    """The clip's frames as one picture, about as wide as high. What would be too many pixels is made smaller
    by a whole factor."""
    frames = drawn_frames(clip, draw)
    factor = math.ceil(math.sqrt(frames.size / 3 / MOST_PIXELS))
    if factor > 1:
        frames = np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in frames])
    count, height, width, _ = frames.shape
    columns = min(count, max(1, round(math.sqrt(count * height / width))))
    rows = math.ceil(count / columns)
    canvas = np.zeros((rows * columns, height, width, 3), np.uint8)
    canvas[:count] = frames
    canvas = (
        canvas.reshape(rows, columns, height, width, 3)
        .swapaxes(1, 2)
        .reshape(rows * height, columns * width, 3)
    )
    file = io.BytesIO()
    Image.fromarray(canvas).save(file, "png", compress_level=3)
    return Sheet(file.getvalue(), count, columns, width, height)
