"""Psi-learning on tokens (Jaques et al. 2019, arXiv 1907.00456, eq. 8-9): KL-control with the soft backup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_dialog.methods.kl_control import KLControl


@dataclass(frozen=True)
class Psi(KLControl):
    """kl_control with `backup="psi"`; pi = exp Psi / Z, and at the optimum pi = p exp(R/c) / Z over whole conversations."""

    backup: Literal["max", "psi"] = "psi"
    """psi is what makes this Psi-learning"""
