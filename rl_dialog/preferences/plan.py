"""How a run is labelled: how many people see a pair, how often one with a known answer is among them, what
beside the choice is asked, and how long a session lasts.

The plan stands in the label log, so that every page and terminal of the run keeps to it, whoever started it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rl_dialog.data.storable import check_storable
from rl_dialog.errors import UserError

MOST_PEOPLE = 100  # who see a pair
MOST_REASONS = 12  # tags fit a phone
LONGEST_REASON = 40  # characters
LONGEST_GUIDELINE = 200_000  # characters


@dataclass(frozen=True)
class Plan:
    """Raises UserError for what cannot be."""

    overlap: float = 1.0  # people who see a pair; 1.2: a fifth of the pairs is seen by two
    gold_share: float = 0.0  # of what a labeller is shown
    goal: int = 0  # answers that are asked of each labeller; 0: as many as there are
    session: int = 0  # answers between two breaks; 0: no breaks
    strength: bool = False  # is it asked how much better?
    reasons: tuple[str, ...] = ()  # tags that an answer may have
    guideline: str = ""  # Markdown

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("overlap", 1 <= self.overlap <= MOST_PEOPLE, f"a number from 1 to {MOST_PEOPLE}"),
            ("gold_share", 0 <= self.gold_share <= 0.5, "a share from 0 to 0.5"),
            ("goal", self.goal >= 0, "a number of at least 0"),
            ("session", self.session >= 0, "a number of at least 0"),
        ):
            if not fits:
                raise UserError(f"--{name}: expected {expected}, got {getattr(self, name)}")
        self._check_texts()

    def _check_texts(self) -> None:
        if len(self.reasons) > MOST_REASONS or len(set(self.reasons)) != len(self.reasons):
            got = ", ".join(self.reasons)
            raise UserError(f"--reasons: expected at most {MOST_REASONS} different ones, got {got}")
        for reason in self.reasons:
            if not 0 < len(reason.strip()) <= LONGEST_REASON:
                raise UserError(f"--reasons: expected 1 to {LONGEST_REASON} characters each, got {reason!r}")
            check_storable(reason, "--reasons")
        if len(self.guideline) > LONGEST_GUIDELINE:
            expected = f"expected at most {LONGEST_GUIDELINE:,} characters"
            raise UserError(f"--guideline: {expected}, got {len(self.guideline):,}")

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Plan:
        """What a log has of it; a name that a later version wrote means nothing here."""
        known = {field.name for field in fields(cls)}
        found = {name: value for name, value in values.items() if name in known}
        return cls(**found | ({"reasons": tuple(found["reasons"])} if "reasons" in found else {}))

    def changed(self, **values: Any) -> Plan:
        """With the values that are not None."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def rows(self) -> list[dict[str, Any]]:
        """As a log has it."""
        return [{"name": name, "value": value} for name, value in asdict(self).items()]
