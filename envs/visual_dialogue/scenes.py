"""Scenes instead of photographs: attributes with values, a fixed pool of scenes, their captions and features.

A scene is a tuple with one value's number per attribute of `ATTRIBUTES`. Its feature is what a vision network
would give: the one-hot values through a fixed random projection to `WIDTH` numbers, of length 1.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "object": ("dog", "cat", "bus", "bench", "kite", "cake"),
    "place": ("park", "beach", "street", "kitchen", "office", "garage"),
    "colour": ("red", "blue", "green", "yellow", "black", "white"),
    "count": ("one", "two", "three"),
    "size": ("small", "large"),
    "weather": ("sun", "clouds", "rain", "snow"),
    "person": ("man", "woman", "child", "nobody"),
    "photo": ("sharp", "blurred"),  # nobody can ask about it
}
NAMES = tuple(ATTRIBUTES)
OUTDOORS = ("park", "beach", "street")
POOL = 400  # scenes that the true one is ranked among
WIDTH = 64  # numbers in a feature
SEED = 2017  # of the pool and of the projection

Scene = tuple[int, ...]


def value(scene: Scene, attribute: str) -> str:
    """The word for a scene's value."""
    return ATTRIBUTES[attribute][scene[NAMES.index(attribute)]]


@cache
def pool() -> tuple[Scene, ...]:
    """The scenes of the stand-in, all different, in a fixed order."""
    chance = random.Random(f"scenes {SEED}")
    found: dict[Scene, None] = {}
    while len(found) < POOL:
        found[tuple(chance.randrange(len(values)) for values in ATTRIBUTES.values())] = None
    return tuple(found)


@cache
def captions() -> tuple[str, ...]:
    """What is told of each scene of the pool beforehand: its object, and its place or its colour."""
    chance = random.Random(f"captions {SEED}")
    return tuple(_caption(scene, chance.random() < 0.5) for scene in pool())


def _caption(scene: Scene, place: bool) -> str:
    thing = value(scene, "object")
    return f"a {thing} {where(value(scene, 'place'))}" if place else f"a {value(scene, 'colour')} {thing}"


def where(place: str) -> str:
    """A place with its preposition."""
    return f"{'on' if place in ('beach', 'street') else 'in'} the {place}"


@cache
def projection() -> np.ndarray:
    """(values, WIDTH) of -1 and 1: a row for each value of each attribute."""
    chance = random.Random(f"projection {SEED}")
    values = sum(map(len, ATTRIBUTES.values()))
    return np.array([[chance.choice((-1.0, 1.0)) for _ in range(WIDTH)] for _ in range(values)])


@cache
def features() -> np.ndarray:
    """(POOL, WIDTH) the features of the pool, each of length 1."""
    found = np.stack([_one_hot(scene) for scene in pool()]) @ projection()
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def _one_hot(scene: Scene) -> np.ndarray:
    return np.concatenate(
        [np.eye(len(values))[v] for values, v in zip(ATTRIBUTES.values(), scene, strict=True)]
    )


def scene_of(feature: np.ndarray) -> Scene:
    """The scene behind a feature, by least squares: what a vision network's reader does with any picture."""
    weights = np.linalg.lstsq(projection().T, feature, rcond=None)[0]
    starts = np.cumsum([0, *map(len, ATTRIBUTES.values())])
    return tuple(int(weights[a:b].argmax()) for a, b in zip(starts, starts[1:], strict=False))
