"""What users bring: `module:Name`, from a file in the folder where a command starts or from an installed
module."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from rl_dialog.errors import UserError


def own(name: str, what: str) -> Any:
    """The object that `module:Name` names. Raises UserError that says `what` it was to be (a reward, a
    method) where there is none."""
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise AttributeError("no colon in the name")
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, SyntaxError, AttributeError, ValueError) as error:
        file = f"{module.replace('.', '/')}.py"
        where = f"{file} in the folder where the command starts, or in an installed module"
        expected = f"{what} {name!r}: expected {attribute or 'module:Name'} in {where}"
        got = f"{type(error).__name__}: {error}"
        raise UserError(f"{expected}, got {got}{_nearest(module, attribute)}") from error


def line_in(module: str, error: Exception) -> str:
    """Which line of a user's module raised something, as the end of a message; "" where none of it did."""
    code = getattr(sys.modules.get(module), "__file__", None)
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == code]
    return f" in line {lines[-1]} of {code}" if lines else ""


def _nearest(module: str, attribute: str) -> str:
    """A name of the module that may have been meant."""
    names = [name for name in vars(sys.modules.get(module, object)) if not name.startswith("_")]
    near = difflib.get_close_matches(attribute, names, 1)
    return f". Did you mean {near[0]}?" if near else ""


def files_of_own(names: Iterable[str]) -> list[str]:
    """The files that `module:Name`s are written in; other names have none."""
    modules = [module for module, colon, _ in (name.partition(":") for name in names) if colon]
    return [importlib.util.find_spec(module).origin for module in modules]
