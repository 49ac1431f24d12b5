"""A world: databases, goal statistics, values, vocabularies and sentence templates, read from a folder or
generated.

    db/{attraction,hotel,restaurant,train,hospital,police}_db.json   lists of rows
    db/taxi_db.json                                                  {"taxi_types": [...], ...}
    goal/new_goal_model.json                                         the goal statistics
    value_dict.json                                                  known values
    usr_da_voc.txt, sys_da_voc.txt                                   one token per line
    nlg/{manual,auto}_{user,system}_template_nlg.json                sentences, read when first needed

These are the files of ConvLab-2's `data/multiwoz`, with the goal model as JSON. Without a folder, `town.py`
generates a town of the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from envs.multiwoz.acts import ActError, Vocabulary
from envs.multiwoz.database import Database
from envs.multiwoz.goals import GoalModel
from envs.multiwoz.templates import Speaker
from envs.multiwoz.values import Values
from rl_dialog.errors import UserError
from rl_dialog.own import own

TABLES = ("attraction", "hotel", "restaurant", "train", "hospital", "police")
NEEDED = {
    "attraction": ("name", "area", "type"),
    "hotel": ("name", "area", "pricerange", "stars", "type", "internet", "parking"),
    "restaurant": ("name", "area", "pricerange", "food"),
    "train": ("arriveBy", "day", "departure", "destination", "duration", "leaveAt", "price", "trainID"),
    "hospital": ("department", "phone", "address"),
    "police": ("name", "phone", "address"),
}
GOAL_MODEL = "goal/new_goal_model.json"
WHENCE = (
    "The files are those of ConvLab-2's data/multiwoz, see envs/multiwoz/README.md; without --world a "
    "generated town is used"
)


class WorldError(UserError):
    """A folder that is no world; the message names the file, what was expected and what is there."""


@dataclass(frozen=True, repr=False)
class World:
    """Everything that dialogs share; nothing in it ever changes."""

    source: str  # the folder, or which generated town
    database: Database
    goals: GoalModel
    values: Values
    user_acts: Vocabulary  # MultiWOZ: 78 tokens
    system_acts: Vocabulary  # MultiWOZ: 209 tokens
    sentences: Mapping[str, Any] | Path  # {"user": ..., "system": ...}, or the folder that has them

    def __repr__(self) -> str:
        return f"World({self.source!r})"

    @cached_property
    def templates(self) -> Mapping[str, Mapping[str, Mapping[str, list[str]]]]:
        """Side ("user", "system") -> Domain-Intent -> slot -> sentences with #DOMAIN-INTENT-SLOT# for the
        value. Raises WorldError."""
        return self._sentences("manual") if isinstance(self.sentences, Path) else self.sentences

    @cached_property
    def group_templates(self) -> Mapping[str, Mapping[str, Mapping[str, list[str]]]]:
        """The same for whole groups of acts: side -> Domain-Intent -> "Area;Name;" -> sentences. The town has
        none. Raises WorldError."""
        return self._sentences("auto") if isinstance(self.sentences, Path) else {"user": {}, "system": {}}

    def speakers(self, templates: str = "manual") -> dict[str, Speaker]:
        """The voices of both sides: with a sentence for each act, or with `auto_manual` one for all acts of a
        kind where there is one."""
        groups = self.group_templates if templates == "auto_manual" else {"user": {}, "system": {}}
        return {
            side: Speaker(self.templates[side], side=side, groups=groups[side]) for side in ("user", "system")
        }

    def _sentences(self, kind: str) -> dict[str, Any]:
        templates = {}
        for side in ("user", "system"):
            path = self.sentences / f"nlg/{kind}_{side}_template_nlg.json"
            templates[side] = _json(path, dict)
            for key, slots in templates[side].items():
                if not isinstance(slots, dict) or not all(
                    isinstance(x, list) and x and all(isinstance(y, str) for y in x) for x in slots.values()
                ):
                    raise WorldError(
                        f"{path}, {key}: expected {{slots: [sentence, ...]}} with at least one sentence each"
                    )
        return templates


def load_world(folder: str | Path = "") -> World:
    """The world of a folder, or what a function `module:name` of one's own returns; the generated town for
    an empty name. Raises WorldError for missing and broken files."""
    if not folder:
        from envs.multiwoz.town import generate_town  # here, because the town is made of a World

        return generate_town()
    path = Path(folder)
    if ":" in str(folder) and not path.exists():
        return own(str(folder), "a world of task dialogs")()
    if not path.is_dir():
        raise WorldError(
            f"{path}: expected a folder with world files, found {'a file' if path.exists() else 'nothing'}. "
            f"{WHENCE}"
        )
    tables = {domain: _rows(path / f"db/{domain}_db.json", NEEDED[domain]) for domain in TABLES}
    taxi = _json(path / "db/taxi_db.json", dict)
    if not isinstance(taxi.get("taxi_types"), list) or not taxi["taxi_types"]:
        raise WorldError(
            f"{path}/db/taxi_db.json: expected a list of makes under taxi_types, found the keys "
            f"{sorted(taxi)}"
        )
    return build_world(
        str(path),
        tables,
        taxi_types=taxi["taxi_types"],
        goal_model=_json(path / GOAL_MODEL, dict),
        values=_json(path / "value_dict.json", dict),
        user_tokens=_lines(path / "usr_da_voc.txt"),
        system_tokens=_lines(path / "sys_da_voc.txt"),
        sentences=path,
    )


def build_world(source: str, tables: Mapping[str, Any], *, taxi_types: list[str],
                goal_model: Mapping[str, Any], values: Mapping[str, Any], user_tokens: list[str],
                system_tokens: list[str], sentences: Mapping[str, Any] | Path) -> World:  # fmt: skip
    """A world from what the files hold. Raises WorldError where the parts do not fit together."""
    database = Database(tables, taxi_types=taxi_types)
    try:
        goals = GoalModel(goal_model, database)
    except KeyError as error:
        raise WorldError(
            f"{source}/{GOAL_MODEL}: expected the key {error}, found {sorted(goal_model)} at the top"
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise WorldError(f"{source}/{GOAL_MODEL}: {error}") from error
    try:
        known_values = Values(values)
    except (AttributeError, TypeError) as error:
        raise WorldError(
            f"{source}/value_dict.json: expected {{domain: {{slot: [value, ...]}}}}, {error}"
        ) from error
    try:
        vocabularies = (
            Vocabulary(user_tokens, where="usr_da_voc.txt"),
            Vocabulary(system_tokens, where="sys_da_voc.txt"),
        )
    except ActError as error:
        raise WorldError(f"{source}/{error}") from error
    return World(source, database, goals, known_values, *vocabularies, sentences)


def _rows(path: Path, needed: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = _json(path, list)
    if not rows:
        raise WorldError(f"{path}: expected at least one row, found an empty list")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise WorldError(f"{path}, row {number}: expected an object, found {row!r:.80}")
        if missing := [slot for slot in needed if not isinstance(row.get(slot), str)]:
            raise WorldError(
                f"{path}, row {number}: expected text in {missing[0]!r}, found {row.get(missing[0])!r:.80} "
                f"(the row has {sorted(row)})"
            )
    return rows


def _json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        pickled = path.with_suffix(".pkl")
        instead = (
            f"{pickled.name}, and pickles are not read: convert it to JSON, tuple keys joined by |"
            if pickled.exists()
            else "no such file"
        )
        raise WorldError(f"{path}: expected a JSON file, found {instead}. {WHENCE}") from error
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise WorldError(f"{path}: expected JSON in UTF-8, found {error}. Download the file again") from error
    if not isinstance(value, kind):
        raise WorldError(
            f"{path}: expected {'an object' if kind is dict else 'a list'} at the top, found "
            f"{type(value).__name__}"
        )
    return value


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except FileNotFoundError as error:
        raise WorldError(
            f"{path}: expected a vocabulary, one Domain-Intent-Slot-V a line, found no such file. {WHENCE}"
        ) from error
    except (OSError, ValueError) as error:
        raise WorldError(f"{path}: expected text in UTF-8, found {error}") from error
    if not lines:
        raise WorldError(
            f"{path}: expected a vocabulary, one Domain-Intent-Slot-V a line, found an empty file"
        )
    return lines
