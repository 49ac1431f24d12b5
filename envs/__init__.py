"""Worlds by name.

small_talk and multiwoz are talked in: Gymnasium environments whose observations are messages (`multiwoz/` can be spoken in acts too). The others are
vectors of environments with numbers or pictures, where policies learn from preferences; atari is any of its games: `game`.

One of your own is named `module:Class`: a gymnasium.vector.VectorEnv that `Class(num_envs, worker=i)` makes, with the options of `--env_options`, and
that starts an episode one step after the last one ended (AutoresetMode.NEXT_STEP) and returns new arrays. Its class has `clip_length`, the steps that
people compare at a time, `frames_per_second` of clips, `task`, what people are asked, and `draw(observation)`, a static method: what an observation
looks like, uint8 (height, width, 3). Films name its `action_names`, if it has them.
"""

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from envs.atari import AtariVector, EnduroVector, PongVector
from envs.moving_dot import MovingDotVector
from envs.multiwoz.text import MultiWOZText
from envs.small_talk_world import SmallTalk

ENVS = {
    "small_talk": SmallTalk,
    "multiwoz": MultiWOZText,
    "moving_dot": MovingDotVector,
    "pong": PongVector,
    "enduro": EnduroVector,
    "atari": AtariVector,
}


def text_env(name: str) -> Callable[..., Any]:
    """The constructor of a world to talk in. Raises ValueError for any other name."""
    return _choose(name, ("small_talk", "multiwoz"), "messages")


def control_env(name: str) -> Callable[..., Any]:
    """The constructor of a vector of environments with numbers or pictures; `module:Class` is imported. Raises ValueError for any other name."""
    return _own(name) if ":" in name else _choose(name, ("moving_dot", "pong", "enduro", "atari"), "numbers or pictures")


def _own(name: str) -> Callable[..., Any]:
    module, _, kind = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ValueError(
            f"env {name!r}: expected the class {kind} in {module}.py in the folder where the command starts, or in an installed module, "
            f"got {type(error).__name__}: {error}"
        ) from error
    if missing := [each for each in ("clip_length", "frames_per_second", "task", "draw") if not hasattr(found, each)]:
        raise ValueError(f"env {name!r}: expected a vector of environments whose class has {', '.join(missing)}; envs/__init__.py says what they are")
    return found


def _choose(name: str, names: tuple[str, ...], observations: str) -> Callable[..., Any]:
    if name in names:
        return ENVS[name]
    near = get_close_matches(name, names, 1)
    raise ValueError(
        f"{'unsuitable' if name in ENVS else 'unknown'} env {name!r}: expected one of {', '.join(names)}, whose observations are {observations}."
        + (f" Did you mean {near[0]}?" if near else "")
    )
