"""Expert turns as vectors: states and the acts that a person, or the rule policy, chose in them.

    from_corpus("shared/data/multiwoz/val.json.zip", simulator)
        people's dialogs, from the published files of MultiWOZ 2.0 or 2.1
    from_rule_policy(simulator, episodes=1000, seed=0)
        the rule policy's conversations with the simulated user

A corpus has belief states of its own, which people annotated and which differ from what the tracker makes of
a running dialog. `features` says whose eyes look at them:

    cleaned   as the tracker has it: "not mentioned" is no constraint, a domain is booked once an earlier
              system turn booked it, and no state is terminated, because nobody answers a goodbye in the
              environment
    raw       as they stand: "not mentioned" counts as a constraint, `booked` is that of the turn to be
              predicted, the last turn is terminated
"""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from envs.multiwoz.acts import GOAL_DOMAIN, ActError, Acts
from envs.multiwoz.acts import from_corpus as acts_from_corpus
from envs.multiwoz.database import ANYTHING
from envs.multiwoz.environment import Simulator
from envs.multiwoz.rollout import play
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.tracker import BOOK, SEMI, DialogState
from rl_dialog.errors import UserError

Features = Literal["cleaned", "raw"]
CORPUS = "val.json.zip"  # in a world's folder
NOTHING = ANYTHING - {
    "dont care",
    "don't care",
    "dontcare",
    "do n't care",
}  # of a belief state: nothing was said about the slot


class CorpusError(UserError):
    """A corpus file that is none; the message names the file and the dialog, what was expected and what is
    there."""


@dataclass(frozen=True)
class Demonstrations:
    """N expert turns, dialog after dialog."""

    states: np.ndarray  # float32 (N, 340)
    actions: np.ndarray  # int8 (N, 209)
    masks: np.ndarray  # int8 (N, 209)
    dialogs: np.ndarray  # int64 (N,): the number of each turn's dialog

    def __len__(self) -> int:
        return len(self.states)


def experts(
    simulator: Simulator, corpus: str = "", *, features: Features = "cleaned", episodes: int, seed: int
) -> Demonstrations:
    """A corpus's turns, by default those of val.json.zip in the world's folder; where there is none the rule
    policy's in so many conversations."""
    beside = Path(simulator.world.source) / CORPUS
    if corpus or beside.is_file():
        return from_corpus(corpus or beside, simulator, features=features)
    return from_rule_policy(simulator, episodes=episodes, seed=seed)


def from_rule_policy(simulator: Simulator, *, episodes: int, seed: int) -> Demonstrations:
    """The rule policy's turns in conversations 0, 1, ... of a seed."""
    rule, rows = RulePolicy(simulator.world.database, simulator.options), []

    def respond(state: DialogState, rng: random.Random) -> Acts:
        acts = rule.respond(state, rng)
        rows.append((id(state), *_vectors(simulator, state, acts)))
        return acts

    played = list(play(simulator, respond, seed=seed, episodes=episodes))
    numbers = {
        id(conversation.talk.state): conversation.episode for conversation in played
    }  # every state lives on in `played`
    return _stacked((numbers[key], *row) for key, *row in sorted(rows, key=lambda row: numbers[row[0]]))


def from_corpus(
    path: str | Path, simulator: Simulator, *, features: Features = "cleaned", dialogs: int | None = None
) -> Demonstrations:
    """The system turns of a MultiWOZ file ({id: {goal, log}} as JSON, or zipped), of its first `dialogs`
    dialogs. Raises CorpusError."""
    rows = []
    for number, (name, log) in enumerate(_logs(Path(path))):
        if number == dialogs:
            break
        where = f"{path}, dialog {name}"
        try:
            rows += [
                (number, *_vectors(simulator, state, acts))
                for state, acts in _turns(log, simulator, features)
            ]
        except (ActError, KeyError, TypeError, AttributeError) as error:
            raise CorpusError(
                f"{where}: expected turns with dialog_act and metadata as in MultiWOZ 2.1, got "
                f"{type(error).__name__} {error}"
            ) from error
    if not rows:
        raise CorpusError(f"{path}: expected dialogs with system turns, found none")
    return _stacked(rows)


def _turns(
    log: Sequence[Mapping[str, Any]], simulator: Simulator, features: Features
) -> Iterator[tuple[DialogState, Acts]]:
    """What the system saw and what it said; even turns are the user's."""
    previous_acts: Acts = ()
    earlier_bookings: dict[str, str] = {}
    for number in range(1, len(log), 2):
        user_acts, acts = (
            acts_from_corpus(log[number - 1]["dialog_act"]),
            acts_from_corpus(log[number]["dialog_act"]),
        )
        state = _state(log[number]["metadata"], simulator, raw=features == "raw")
        state.user_acts, state.system_acts = user_acts, previous_acts
        state.domain = next(
            (GOAL_DOMAIN[domain] for _, domain, *_ in reversed(user_acts) if domain in GOAL_DOMAIN), ""
        )
        bookings = {
            domain: ""
            for domain in SEMI
            if log[number]["metadata"].get(domain, {}).get("book", {}).get("booked")
        }
        if features == "raw":
            state.booked, state.terminated = bookings, number + 2 >= len(log)
        elif simulator.options.set_booked:
            state.booked = earlier_bookings
        yield state, acts
        previous_acts, earlier_bookings = acts, bookings


def _state(metadata: Mapping[str, Any], simulator: Simulator, *, raw: bool) -> DialogState:
    """A belief state as the tracker keeps it."""
    state = simulator.tracker.start()
    nothing = frozenset(("",)) if raw else NOTHING
    for domain, slots in SEMI.items():
        belief = metadata.get(domain, {})
        semi, book = belief.get("semi", {}), belief.get("book", {})
        constraints = {
            slot: semi[slot]
            for slot in slots
            if isinstance(semi.get(slot), str) and semi[slot] not in nothing
        }
        state.semi[domain] = (
            constraints
            if raw
            else {
                slot: simulator.tracker.values.noted(domain, slot, value)
                for slot, value in constraints.items()
            }
        )
        state.book[domain] = {
            slot: book[slot]
            for slot in BOOK.get(domain, ())
            if isinstance(book.get(slot), str) and book[slot] not in nothing
        }
        if domain in state.rows:
            state.rows[domain] = simulator.world.database[domain].match(state.semi[domain].items())
    return state


def _vectors(
    simulator: Simulator, state: DialogState, acts: Acts
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    vectors = simulator.vectors
    return vectors.states([state])[0], vectors.bits(acts), vectors.mask(state)


def _stacked(rows: Any) -> Demonstrations:
    numbers, states, actions, masks = zip(*rows, strict=True)
    return Demonstrations(np.stack(states), np.stack(actions), np.stack(masks), np.array(numbers, np.int64))


def _logs(path: Path) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                text = archive.read(archive.namelist()[0]).decode("utf-8")
        else:
            text = path.read_text(encoding="utf-8")
        dialogs = json.loads(text)
    except FileNotFoundError as error:
        raise CorpusError(
            f"{path}: expected dialogs of MultiWOZ 2.0 or 2.1 (val.json.zip), found no such file"
        ) from error
    except (OSError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise CorpusError(f"{path}: expected JSON, plain or zipped, got {error}") from error
    if not isinstance(dialogs, dict):
        raise CorpusError(f"{path}: expected {{dialog id: {{goal, log}}}}, found {type(dialogs).__name__}")
    for name, dialog in dialogs.items():
        if not isinstance(dialog, dict) or not isinstance(dialog.get("log"), list):
            raise CorpusError(
                f"{path}, dialog {name}: expected an object with goal and log, found {str(dialog):.80}"
            )
        yield name, dialog["log"]
