"""Worlds by name.

small_talk and multiwoz are talked in: Gymnasium environments whose observations are messages (`multiwoz/` can be spoken in acts too). The others are
vectors of environments with numbers or pictures, where policies learn from preferences; atari is any of its games: `game`.
"""

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
    """The constructor of a vector of environments with numbers or pictures. Raises ValueError for any other name."""
    return _choose(name, ("moving_dot", "pong", "enduro", "atari"), "numbers or pictures")


def _choose(name: str, names: tuple[str, ...], observations: str) -> Callable[..., Any]:
    if name in names:
        return ENVS[name]
    near = get_close_matches(name, names, 1)
    raise ValueError(
        f"{'unsuitable' if name in ENVS else 'unknown'} env {name!r}: expected one of {', '.join(names)}, whose observations are {observations}."
        + (f" Did you mean {near[0]}?" if near else "")
    )
