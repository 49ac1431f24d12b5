"""Normal numbers that depend on seeds alone: not on what else is drawn, in which batch, or on which device.

Latents are drawn with them, so that nets that are compared read the same ones, and a reply does not depend on
the others in its batch. SplitMix64 (Steele et al. 2014) makes bits of a counter, Box and Muller's formula
normal numbers of bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15 - 2**64  # between two counters; int64 wraps around
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def mixed(seeds: Tensor) -> Tensor:
    """int64 of any shape to int64 that share no pattern with their neighbours."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        seeds = (seeds ^ _shifted(seeds, shift)) * factor
    return seeds ^ _shifted(seeds, 31)


def derived(seeds: Tensor, number: Tensor | int) -> Tensor:
    """The seeds of stream `number` of each of `seeds`, which broadcast."""
    steps = (torch.as_tensor(number, device=seeds.device) + 1) * STEP
    return mixed(mixed(seeds) + steps)


def standard_normal(seeds: Tensor, size: int) -> Tensor:
    """(...,) int64 seeds -> (..., size) float32 drawn from N(0, 1)."""
    half = (size + 1) // 2
    counters = torch.arange(1, 2 * half + 1, device=seeds.device) * STEP
    bits = _shifted(mixed(seeds[..., None] + counters), 11)  # 53 of them, as many as a double holds
    radius, angle = ((bits.double() + 0.5) / 2**53).chunk(2, -1)
    radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :size].float()


def _shifted(seeds: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (seeds >> by) & ((1 << (64 - by)) - 1)
