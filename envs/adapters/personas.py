"""Who the users are that an endpoint plays: a file with one persona a line, a text or a JSON object.

    You are Ada. You write short messages and want a table for two tonight.
    {"name": "vegan", "goal": "a vegan main course under 15 euros", "split": "validation"}
    {"system": "You are rude.", "opening": "hey you", "stop": "<END>", "request": {"temperature": 0.7}}

A text is the system prompt that the endpoint gets. Keys of an object:

    system    the system prompt, or instead of it
    goal      what the person wants, as text or any JSON: it is put into a prompt of ours (`PURSUING`)
    name      how the log calls it, by default persona-<line>
    opening   the person's first words; without them the endpoint says something first
    greeting  what the assistant said before that, seen by both
    stop      what the person writes when the conversation is over, which is not shown to the policy; with a
              goal by default ###STOP###, else nothing: then turns alone end it
    split     train or validation: whether the policy learns with this person, or is measured with it. Where
              no persona says it, every fifth is measured with (the last one of fewer than five)
    request   more fields of each request: model, temperature, max_tokens, ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rl_dialog.errors import UserError

SPLITS = ("train", "validation")
STOP = "###STOP###"
OURS = ("messages", "stream", "n")  # fields of a request that are not for a persona to say
PURSUING = (
    "You play a person who writes to an assistant in a chat. What you want:\n{goal}\n\n"
    "Write that person's next message and nothing else: one or two sentences in the person's own words, one "
    "thing at a time. You are not the assistant: ask, answer and decide, but do not serve. When you have what"
    " you want, or see that you will not get it, write {stop}"
)


@dataclass(frozen=True)
class Persona:
    """One person; fields are those of the file, with the goal in the system prompt."""

    name: str
    system: str
    goal: Any = None
    opening: str = ""
    greeting: str = ""
    stop: str = ""
    split: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)


KEYS = tuple(each.name for each in fields(Persona))


def read_personas(path: str) -> dict[str, list[Persona]]:
    """The personas of each of SPLITS. Raises UserError for a file without any, with a line that is none, or
    where one person would be in both splits."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--personas {path}: expected a file of text in UTF-8, got {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if numbered and numbered[0][1].startswith("["):
        raise UserError(f"--personas {path}: expected one JSON object per line, got a list over several")
    personas = [_persona(line, number, f"{path}:{number}") for number, line in numbered]
    names = [persona.name for persona in personas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--personas {path}: expected another name for each persona, got {twice[0]!r} twice")
    return _apart(personas, path)


def _apart(personas: Sequence[Persona], path: str) -> dict[str, list[Persona]]:
    if any(persona.split for persona in personas):
        held_out = [persona for persona in personas if persona.split == "validation"]
    else:
        held_out = list(personas[4::5] or personas[-1:])
    train = [persona for persona in personas if persona not in held_out]
    if not train or not held_out:
        raise UserError(
            f"--personas {path}: expected at least one persona to learn with and one to measure with, got "
            f"{len(train)} and {len(held_out)}"
        )
    same = {_who(persona) for persona in train} & {_who(persona) for persona in held_out}
    if same:
        raise UserError(
            f"--personas {path}: expected other people to measure with than to learn with, got in both: "
            f"{sorted(same)[0][0][:100]!r}"
        )
    return {"train": train, "validation": held_out}


def _who(persona: Persona) -> tuple[str, str, str]:
    return persona.system, persona.opening, persona.greeting


def _persona(line: str, number: int, where: str) -> Persona:
    """A line of the file. Raises UserError."""
    if not line.startswith("{"):
        return Persona(f"persona-{number}", line)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected one JSON object in the line, got {error}") from error
    if unknown := sorted(record.keys() - set(KEYS)):
        raise UserError(f"{where}: expected keys of {', '.join(KEYS)}, got {unknown[0]!r}")
    _check(record, where)
    goal = record.pop("goal", None)
    stop = record.get("stop") or (STOP if goal else "")
    if goal:
        told = goal if isinstance(goal, str) else json.dumps(goal, ensure_ascii=False)
        record |= {"goal": goal, "system": PURSUING.format(goal=told, stop=stop)}
    return Persona(**{"name": f"persona-{number}", **record, "stop": stop})


def _check(record: Mapping[str, Any], where: str) -> None:
    for key in KEYS:
        if key not in ("goal", "request") and not isinstance(record.get(key, ""), str):
            raise UserError(f"{where}: expected text as {key}, got {record[key]!r}")
    system, goal = record.get("system", "").strip(), record.get("goal")
    if bool(system) == bool(goal):
        got = "both" if system else "neither"
        raise UserError(f"{where}: expected either system, the whole prompt, or goal, a wish, got {got}")
    if not record.get("name", "persona").strip():
        raise UserError(f"{where}: expected a name that is not empty")
    if record.get("split", "") not in ("", *SPLITS):
        raise UserError(f"{where}: expected split to be train or validation, got {record['split']!r}")
    request = record.get("request", {})
    if not isinstance(request, dict) or any(name in request for name in OURS):
        expected = f"an object as request, without {', '.join(OURS)}"
        raise UserError(f"{where}: expected {expected}, got {str(request)[:100]}")
    try:
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise UserError(f"{where}: expected text that UTF-8 holds and finite numbers, got {error}") from error
