"""The synthetic oracle: answers queries from what it knows to be true, a clip's own rewards or a value of a
reply, as well or as badly as it is told.

(The labeller in a terminal is terminal.py, people in browsers are page/.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_dialog.errors import UserError
from rl_dialog.preferences.segments import Clip, Segment


@dataclass(frozen=True)
class Oracle:
    """P(first preferred) = sigmoid((R1 - R2) / temperature), R = sum_t discount^t r_t of the *true* rewards
    (Christiano et al. 2017, section 2.2.3).

    What is drawn depends on the seed and the two segments alone: neither on the side on which each is shown
    nor on the order of the queries, so that any number of oracles, after any restart, give the same answers.
    Raises UserError for settings that mean nothing, and where a reply has no truth.

    `Oracle(temperature=1, ties=None)` is `imitation`'s SyntheticGatherer with sample=True; `Oracle()` is the
    original reproduction's oracle.
    """

    truth: Callable[[Segment], float] | None = None
    """the value of a segment; by default the discounted sum of a clip's rewards"""
    temperature: float = 0.0
    """0: the larger value wins; above, the answer is drawn from the softmax of the two"""
    noise: float = 0.0
    """share of answers that are a coin's, left or right, whatever is compared: 0.1 turns 5 % of all
    preferences round"""
    discount: float = 1.0
    """of a clip's rewards, by step"""
    threshold: float = 50.0
    """values divided by the temperature never differ by more: no probability is exactly 0"""
    ties: float | None = 0.0
    """values that differ by no more are equally good; None: there are no ties, and equal values are drawn"""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a number of at least 0"),
            ("noise", 0 <= self.noise <= 1, "a share between 0 and 1"),
            ("discount", 0 <= self.discount <= 1, "a number between 0 and 1"),
            ("threshold", self.threshold > 0, "a number above 0"),
            ("ties", self.ties is None or 0 <= self.ties < math.inf, "a number of at least 0, or None"),
        ):
            if not fits:
                raise UserError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def value(self, segment: Segment) -> float:
        """What a segment is truly worth."""
        if self.truth:
            worth = float(self.truth(segment))
        elif isinstance(segment, Clip):
            worth = float(
                segment.rewards.astype(np.float64) @ self.discount ** np.arange(len(segment.rewards))
            )
        else:
            raise UserError(
                "expected a function for the truth of replies, Oracle(truth=...), to answer for the reply "
                f"{segment.text[:80]!r}"
            )
        if not math.isfinite(worth):
            raise UserError(
                f"expected a finite number as the value of segment {segment.id[:12]}, got {worth}"
            )
        return worth

    def probability(self, first: Segment, second: Segment) -> float:
        """P(first preferred) of an answer that is no coin's; 0.5 for a tie."""
        return self._probability(self.value(first) - self.value(second))

    def preference(self, first: Segment, second: Segment) -> float:
        """The answer: 1 first, 0 second, 0.5 equally good."""
        if first.id > second.id:  # drawn for the pair in one order, whoever is first
            return 1.0 - self.preference(second, first)
        digest = hashlib.sha256(f"{self.seed} {first.id} {second.id}".encode()).digest()
        coin, tossed, drawn = (
            int.from_bytes(digest[start : start + 8], "big") / 2**64 for start in (0, 8, 16)
        )  # uniform in [0, 1)
        if coin < self.noise:
            return float(tossed < 0.5)
        difference = self.value(first) - self.value(second)
        if self.ties is not None and abs(difference) <= self.ties:
            return 0.5
        return float(drawn < self._probability(difference))

    def choice(self, left: Segment, right: Segment) -> str:
        """The answer as LabelLog.answer takes it: left, right or tie."""
        return {1.0: "left", 0.0: "right", 0.5: "tie"}[self.preference(left, right)]

    def _probability(self, difference: float) -> float:
        if self.ties is not None and abs(difference) <= self.ties:
            return 0.5
        if self.temperature == 0:
            return (1.0 + np.sign(difference)) / 2
        scaled = max(-self.threshold, min(self.threshold, difference / self.temperature))
        return 1.0 / (1.0 + math.exp(-scaled))
