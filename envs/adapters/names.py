"""Names of worlds with options: `NAME?option=value&option=value`.

The values are YAML, so that `size=3` is a number and `hardcore=true` is true.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import yaml

from rl_dialog.errors import UserError


def parsed(name: str) -> tuple[str, dict[str, Any]]:
    """The name before the question mark, and the options. Raises UserError for options not written so."""
    plain, _, text = name.partition("?")
    options: dict[str, Any] = {}
    for part in filter(None, text.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise UserError(f"env {name!r}: expected ?option=value&option=value after the name, got {part!r}")
        if key.strip() in options:
            raise UserError(f"env {name!r}: expected each option once, got {key.strip()} again")
        try:
            options[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # also of 2026-13-45, which is no date
            raise UserError(f"env {name!r}: expected a YAML value for {key}, got {value!r}") from error
    return plain, options


def unknown(kind: str, name: str, known: Iterable[str], what: str) -> UserError:
    """The error for a name that a library does not have, with near ones."""
    near = get_close_matches(name, list(known), 3)
    hint = f"Did you mean {', '.join(near)}?" if near else "`python -m envs.adapters --list` shows all."
    return UserError(f"env '{kind}:{name}': expected {what}. {hint}")
