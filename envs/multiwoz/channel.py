"""A noisy channel: what arrives of a turn's acts.

Each act goes wrong with the same probability, and then in one of the ways that are possible for it, all
equally likely (an error model of statistical dialog systems, Schatzmann et al. 2007, with a flat confusion
matrix):

    drop      it does not arrive
    value     ("Inform", "Hotel", "Area", "east")  arrives as  ("Inform", "Hotel", "Area", "west")
    slot      ("Inform", "Hotel", "Area", "east")  arrives as  ("Inform", "Hotel", "Stars", "3")
    insert    it arrives, and an act of the same domain that nobody said behind it
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, NONE, Act, Acts, Vocabulary
from envs.multiwoz.values import Values
from rl_dialog.errors import UserError

SAME_AS = {
    "time": "leaveAt",
    "destination": "name",
    "departure": "name",
}  # of tables and taxis: as of trains and places


class Channel:
    """The rule; it holds nothing of a dialog.

    Args:
        vocabulary: the acts that may arrive.
        values: what may be heard instead of a value.
        noise: probability of an error in an act. Raises UserError outside of 0..1.
    """

    def __init__(self, vocabulary: Vocabulary, values: Values, noise: float) -> None:
        if not 0 <= noise <= 1:
            raise UserError(f"expected noise between 0 and 1, got {noise}")
        self.noise = noise
        self.slots: dict[tuple[str, str], list[str]] = {}  # intent, domain -> slots of the vocabulary
        self.acts: dict[str, list[tuple[str, str, str]]] = {}  # domain -> intent, domain, slot
        for intent, domain, slot, _ in dict.fromkeys((*parts[:3], "") for parts in vocabulary.parts):
            if domain != "general" and slot != NONE:
                self.slots.setdefault((intent, domain), []).append(slot)
                self.acts.setdefault(domain, []).append((intent, domain, slot))
        self.values = {
            (domain, slot): _values(values, GOAL_DOMAIN[domain], GOAL_SLOT[domain].get(slot, slot))
            for domain in self.acts
            for _, _, slot in self.acts[domain]
        }

    def passed(self, acts: Acts, rng: random.Random | None) -> Acts:
        """What arrives. `rng` may be None where the channel has no noise."""
        if not self.noise or not acts:
            return acts
        return tuple(
            arrived
            for act in acts
            for arrived in (self._distorted(act, rng) if rng.random() < self.noise else (act,))
        )

    def _distorted(self, act: Act, rng: random.Random) -> Iterable[Act]:
        intent, domain, slot, value = act
        ways: list[Acts] = [()]
        other_values = (
            [other for other in self.values.get((domain, slot), ()) if other != value]
            if intent != "Request" and slot != NONE
            else []
        )
        if other_values:
            ways.append(((intent, domain, slot, _pick(other_values, rng)),))
        if slots := [
            other for other in self.slots.get((intent, domain), ()) if other != slot and slot != NONE
        ]:
            ways.append((self._with_value(intent, domain, _pick(slots, rng), rng),))
        if domain in self.acts:
            ways.append((act, self._with_value(*_pick(self.acts[domain], rng), rng)))
        return _pick(ways, rng)

    def _with_value(self, intent: str, domain: str, slot: str, rng: random.Random) -> Act:
        if intent == "Request":
            return intent, domain, slot, "?"
        values = self.values[domain, slot]
        return intent, domain, slot, _pick(values, rng) if values else "dontcare"


def _values(values: Values, domain: str, slot: str) -> list[str]:
    """What the slot may be, in order; where the world has no list, what the same thing is elsewhere."""
    if slot in ("people", "stay"):
        return [str(number) for number in range(1, 9)]
    like = SAME_AS.get(slot, slot).lower()
    choices = values.by_slot.get((domain, slot.lower())) or [
        value
        for (_, other_slot), slot_values in values.by_slot.items()
        if other_slot == like
        for value in slot_values
    ]
    return sorted(dict.fromkeys(choices))


def _pick(choices: Sequence, rng: random.Random) -> Any:
    return choices[int(rng.random() * len(choices))]
