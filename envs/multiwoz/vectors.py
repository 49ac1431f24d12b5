"""Dialog states and acts as vectors: 340 bits that a policy sees and 209 bits that it sets, for MultiWOZ's
vocabularies.

    state   user's last acts (78) | system's last acts (209) | constraints given (24) | domains booked (4) |
            number of rows (4 x 6) | terminated (1)
    action  one bit per token of the system's vocabulary; several may be set
    mask    1 where the bit may be set

A token says "the name of the second row that fits"; `acts` looks the row up. Other worlds have other
vocabularies and sizes, in the same order.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, NONE, Act, Acts, Vocabulary
from envs.multiwoz.database import Database, each, reference
from envs.multiwoz.options import Options
from envs.multiwoz.tracker import ROWED, SEMI, DialogState
from rl_dialog.errors import UserError

VENUE_BINS = (0, 1, 2, 3, 4)  # the largest number of rows of each bin but the last
TRAIN_BINS = (0, 2, 5, 10, 40)
DEGREES = len(VENUE_BINS) + 1
MOST = 6  # entities that a token can point at, and one more
ENTITY_INTENTS = frozenset(("Inform", "Select", "Recommend"))
REFUSALS = frozenset(("NoOffer", "NoBook"))
SILENCE: Act = ("reqmore", "general", NONE, NONE)
MEMO = 1 << 14  # remembered masks; the memory starts anew beyond


class Vectoriser:
    """The rule; what it remembers are masks it has built before."""

    def __init__(
        self, database: Database, user_acts: Vocabulary, system_acts: Vocabulary, options: Options
    ) -> None:
        self.database, self.user_acts, self.system_acts, self.options = (
            database,
            user_acts,
            system_acts,
            options,
        )
        start = len(user_acts) + len(system_acts)
        pairs = [(domain, slot) for domain, slots in SEMI.items() for slot in slots]
        self.given = {pair: start + i for i, pair in enumerate(pairs)}
        self.booked = {domain: start + len(pairs) + i for i, domain in enumerate(ROWED)}
        degrees = start + len(pairs) + len(ROWED)
        bins = {
            domain: TRAIN_BINS if domain == "train" and options.train_degree_bins == "paper" else VENUE_BINS
            for domain in ROWED
        }
        self.degrees = [(domain, degrees + i * DEGREES, bins[domain]) for i, domain in enumerate(ROWED)]
        self.terminated = degrees + DEGREES * len(ROWED)
        self.state_size = self.terminated + 1
        self.action_size = len(system_acts)
        tokens = "\n".join([*user_acts.tokens, "", *system_acts.tokens])
        self.vocabulary = hashlib.sha256(tokens.encode()).hexdigest()[
            :16
        ]  # of the acts that the bits stand for
        self._masks: dict[tuple, np.ndarray] = {}

    # --- the state

    def positions(self, state: DialogState) -> list[int]:
        """The bits that are on, for one state."""
        bits = self.user_acts.positions(state.user_acts)
        shift = len(self.user_acts)
        bits += [shift + i for i in self.system_acts.positions(state.system_acts)]
        for domain, slots in state.semi.items():
            bits += [self.given[domain, slot] for slot, value in slots.items() if value]
        bits += [self.booked[domain] for domain in state.booked if domain in self.booked]
        for domain, start, bins in self.degrees:
            bits.append(start + bisect_left(bins, state.rows[domain].bit_count()))
        if state.terminated:
            bits.append(self.terminated)
        return bits

    def states(self, states: Sequence[DialogState], out: np.ndarray | None = None) -> np.ndarray:
        """A batch of states, float32 # (N, 340); `out` is overwritten where it is given."""
        if out is None:
            out = np.empty((len(states), self.state_size), np.float32)
        out.fill(0)
        rows, columns = [], []
        for i, state in enumerate(states):
            bits = self.positions(state)
            rows += [i] * len(bits)
            columns += bits
        out[rows, columns] = 1
        return out

    # --- the action

    def bits(self, acts: Iterable[Act]) -> np.ndarray:
        """A system turn as an action, int8 # (209,); acts that the vocabulary lacks are left out."""
        vector = np.zeros(self.action_size, np.int8)
        vector[self.system_acts.positions(acts)] = 1
        return vector

    def acts(self, bits: np.ndarray, state: DialogState, rng: random.Random) -> Acts:
        """What an action says in this state; nothing at all becomes "anything else?". Raises UserError for a
        wrong shape."""
        if np.shape(bits) != (self.action_size,):
            raise UserError(f"expected an action of shape ({self.action_size},), got {np.shape(bits)}")
        acts: list[Act] = []
        entities: dict[str, list[int]] = {}
        for number in np.flatnonzero(bits).tolist():
            intent, domain, slot, index = self.system_acts.parts[number]
            acts.append(
                (intent, domain, slot, self._value(intent, domain, slot, index, state, entities, rng))
            )
        return tuple(acts) or (SILENCE,)

    def _value(
        self,
        intent: str,
        domain: str,
        slot: str,
        index: int,
        state: DialogState,
        entities: dict[str, list[int]],
        rng: random.Random,
    ) -> str:
        if intent == "Request":
            return "?"
        if slot == NONE or domain == "general":
            return NONE
        name = state.domain if domain == "Booking" else GOAL_DOMAIN[domain]
        long = GOAL_SLOT[domain].get(slot, slot)
        book, semi = state.book.get(name, {}), state.semi.get(name, {})
        if intent in REFUSALS:
            return (book if domain == "Booking" else semi).get(long, NONE)
        if name == "taxi":
            return self.database.taxi(rng)[long] if slot in ("Car", "Phone") else semi.get(long, NONE)
        if name not in self.database:
            return NONE
        if slot == "Choice":
            return str(state.rows[name].bit_count())
        if long in ("people", "stay", "time") or (domain == "Booking" and long == "day"):
            return book.get(long, NONE)
        if name not in entities:
            entities[name] = [row for row, _ in zip(each(state.rows[name]), range(MOST), strict=False)]
        rows = entities[name]
        if index > len(rows):
            return NONE
        value = (
            reference(rows[index - 1])
            if slot == "Ref"
            else self.database[name].rows[rows[index - 1]].get(long)
        )
        return value if isinstance(value, str) else NONE

    # --- the mask

    def mask(self, state: DialogState) -> np.ndarray:
        """Which bits make sense in this state, int8 # (209,), not to be written to."""
        key = (
            tuple(min(rows.bit_count(), MOST) for rows in state.rows.values()),
            state.domain,
            tuple(sorted(state.book.get(state.domain, ()))),
            tuple(sorted(state.semi.get("taxi", ()))),
        )
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= MEMO:
                self._masks.clear()
            allowed = [
                self.options.action_mask == "none" or self._allowed(*parts, state)
                for parts in self.system_acts.parts
            ]
            mask = self._masks[key] = np.array(allowed, np.int8)
            mask.flags.writeable = False
        return mask

    def _allowed(self, intent: str, domain: str, slot: str, index: int, state: DialogState) -> bool:
        """The rules of ConvLab-3's mask."""
        if domain == "general":
            return True
        name = state.domain if domain == "Booking" else GOAL_DOMAIN[domain]
        count = state.rows[name].bit_count() if name in state.rows else None
        if intent in REFUSALS and (slot != NONE or bool(count)):
            return False
        if intent in ENTITY_INTENTS and count is not None and index > count:
            return False
        long = GOAL_SLOT[domain].get(slot, slot)
        if intent == "Inform" and domain == "Booking" and slot not in (NONE, "Name", "Ref"):
            return long in state.book.get(name, ())
        return not (
            intent == "Inform"
            and domain == "Taxi"
            and slot not in ("Car", "Phone")
            and long not in state.semi.get("taxi", ())
        )

    def masks(self, states: Sequence[DialogState]) -> np.ndarray:
        """A batch of masks, int8 # (N, 209)."""
        return np.stack([self.mask(state) for state in states])
