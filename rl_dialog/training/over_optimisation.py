"""The alarm for rewards that are learned from in a world whose own reward is known: the policy earns more of
the one and less of the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CERTAIN = 1.96  # standard errors of a difference: 95 %
FIGURES = ("eval/return", "eval/true_return", "eval/true_return_stderr")


class OverOptimisation:
    """Compares each evaluation with the one whose true return was highest."""

    def __init__(self) -> None:
        self.best: dict[str, float] | None = None  # FIGURES of that evaluation, and its step

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What is wrong at this evaluation: the true return has fallen from its best by more than chance (95
        %), and the return that is learned from has risen since. None where nothing is, or nothing is known.
        """
        if any(name not in metrics for name in FIGURES):
            return None
        now = {name: float(metrics[name]) for name in FIGURES} | {"step": step}
        if self.best is None or now["eval/true_return"] > self.best["eval/true_return"]:
            self.best = now
            return None
        fall = self.best["eval/true_return"] - now["eval/true_return"]
        error = math.hypot(self.best["eval/true_return_stderr"], now["eval/true_return_stderr"])
        rise = now["eval/return"] - self.best["eval/return"]
        if rise <= 0 or fall <= CERTAIN * error:
            return None
        return (
            f"step {step}: over-optimisation: since step {self.best['step']:.0f} the reward that is learned "
            f"from rose by {rise:.3g}, and the world's own fell by {fall:.3g}, more than chance; stay nearer "
            "to the prior (a larger --method.c, or --target_kl), or label what the policy says now"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"best": self.best}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.best = state.get("best")
