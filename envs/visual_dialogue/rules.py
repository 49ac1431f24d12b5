"""What a dialogue pays: when it stops, and which answers are penalised.

A question costs 1, except the one after which the questioner's idea of the picture is half as far from it as
in the beginning (`halfway`), and the last of ten. An answer that a heuristic takes for yes or no costs
`PENALTY` more, on any turn. So returns lie in [-9, 0], with a penalty in [-29, 0].
"""

from __future__ import annotations

from rl_dialog.errors import UserError

ROUNDS = 10
GOAL, SHARE = 1.0, 0.5  # the percentile that is aimed at, and the part of the way to it that is enough
PENALTY = -2.0
ROUNDING = 1e-9  # a sum of differences may miss its target by this much

YES_NO = ("yes", "no")
VAGUE = (
    "not", "don't", "can't", "don’t", "can’t", "cannot", "fairly", "could", "think so", "okay", "maybe",
    "yes", "no", "looks", "appears", "tell", "mostly just",
)  # fmt: skip

# Which answers are penalised. `soft` and `conservative` look for parts of the text: "snow" has a "no".
HEURISTICS = {
    "none": lambda said: False,
    "hard": lambda said: said in YES_NO,
    "soft": lambda said: any(part in said for part in YES_NO),
    "conservative": lambda said: any(part in said for part in VAGUE),
}
KINDS = {
    "standard": "none",
    "yes_no": "hard",
    "soft": "soft",
    "conservative": "conservative",
}  # kind of reward -> its heuristic


def fires(kind: str, answer: str) -> bool:
    """Whether a kind of reward penalises an answer. Raises UserError for an unknown kind."""
    if kind not in KINDS:
        raise UserError(f"kind of reward: expected one of {', '.join(KINDS)}, got {kind!r}")
    return HEURISTICS[KINDS[kind]](answer.lower())


def halfway(first: float, progress: float) -> bool:
    """Whether the sum of the progress so far is SHARE of what was missing: first percentile, sum of its
    changes. At a first percentile of 1 nothing is missing."""
    missing = GOAL - first
    return missing <= 0 or progress / missing >= SHARE - ROUNDING


def reward(kind: str, answer: str, *, last: bool) -> float:
    """What a question earned, by its answer; `last`: the dialogue ends with it."""
    return (0.0 if last else -1.0) + (PENALTY if fires(kind, answer) else 0.0)
