"""What is asked and what is answered: a query as it is added and as it is shown, and the label that comes of
it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_dialog.data.storable import check_storable, name_of
from rl_dialog.errors import UserError

Choice = Literal["left", "right", "tie", "skip"]
PREFERENCES: dict[str, float | None] = {
    "left": 1.0,
    "right": 0.0,
    "tie": 0.5,
    "skip": None,
}  # of what is shown on the left
STRENGTHS = {1: "slightly better", 2: "much better"}
CHOICES = {preference: choice for choice, preference in PREFERENCES.items()}


@dataclass(frozen=True)
class NewQuery:
    """What `add_query` takes. Raises UserError for what no database can hold, and for a segment compared with
    itself."""

    first: str
    second: str
    id: str | None = None
    task: str = ""
    priority: float = 0.0
    reward_version: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    validation: bool | None = None
    gold: float | None = None  # P(first preferred) as it is known: the answers measure the labellers

    def __post_init__(self) -> None:
        name_of(self.first, "first segment")
        name_of(self.second, "second segment")
        if self.id is not None:
            name_of(self.id, "id of a query")
        if self.first == self.second:
            raise UserError(f"expected two different segments, got {self.first} twice")
        if self.gold not in (None, 1.0, 0.5, 0.0):
            raise UserError(f"expected 1, 0 or 0.5 as the known preference of a gold pair, got {self.gold!r}")
        for name in ("task", "priority", "reward_version", "about"):
            check_storable(getattr(self, name), name)


@dataclass(frozen=True)
class Query:
    """A question as it is shown to one labeller, who holds it until `until`."""

    id: str
    first: str  # segments, here and below
    second: str
    swapped: bool  # the second one is shown on the left
    task: str = ""
    priority: float = 0.0
    reward_version: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    validation: bool = False
    shown: float = 0.0  # seconds since 1970, here and below
    until: float = 0.0

    @property
    def left(self) -> str:
        return self.second if self.swapped else self.first

    @property
    def right(self) -> str:
        return self.first if self.swapped else self.second


@dataclass(frozen=True)
class Remarks:
    """What a labeller says beside the choice. Raises UserError for what no log can hold."""

    strength: int | None = None  # 1 slightly better, 2 much better
    reasons: tuple[str, ...] = ()
    flag: str | None = None  # what is wrong with the pair

    def __post_init__(self) -> None:
        if self.strength not in (None, *STRENGTHS):
            raise UserError(f"expected a strength of 1 or 2, or none, got {self.strength!r}")
        for text in (*self.reasons, *([] if self.flag is None else [self.flag])):
            check_storable(text, "remark")

    def check(self, choice: str) -> None:
        """Raises UserError where the choice has no strength."""
        if self.strength is not None and choice not in ("left", "right"):
            raise UserError(f"expected a strength only with left or right, got one with {choice!r}")


NO_REMARKS = Remarks()


@dataclass(frozen=True)
class Label:
    """An answer about (first, second), whatever side they were shown on."""

    number: int  # of the answer: 1, 2, 3, ...
    query: str
    first: str
    second: str
    preference: float | None  # P(first preferred): 1, 0, 0.5 for a tie; None: incomparable
    labeller: str
    shown: float
    answered: float
    reward_version: int  # of the reward model when the query was made
    validation: bool  # for validation, not for training


@dataclass(frozen=True)
class Answer(Label):
    """A label's full record, and that of answers that are none."""

    choice: Choice  # as shown
    swapped: bool
    late: bool  # others had given all answers that the query wanted
    revoked: float | None
    reason: str | None  # of the revocation
    strength: int | None = None  # 1 slightly better, 2 much better
    reasons: Sequence[str] | None = None  # tags
    flag: str | None = None  # what is wrong with the pair
    gold: float | None = None  # P(first preferred) as it is known; None: nobody knows

    @property
    def remarks(self) -> Remarks:
        """What was said beside the choice."""
        return Remarks(self.strength, tuple(self.reasons or ()), self.flag)

    @property
    def counts(self) -> bool:
        """Does it stand, and prefer something?"""
        return self.revoked is None and self.preference is not None


def pair_id(first: str, second: str) -> str:
    """The id of the query about a pair, in either order."""
    return hashlib.sha256("\n".join(sorted((first, second))).encode()).hexdigest()[:32]
