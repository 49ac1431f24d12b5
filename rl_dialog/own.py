"""What users bring: `module:Name`, from a file in the folder where a command starts or from an installed
module."""

from __future__ import annotations

import importlib
import importlib.util
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
        where = (
            f"{module.replace('.', '/')}.py in the folder where the command starts, or in an installed module"
        )
        raise UserError(
            f"{what} {name!r}: expected {attribute or 'module:Name'} in {where}, got {type(error).__name__}: "
            f"{error}"
        ) from error


def files_of_own(names: Iterable[str]) -> list[str]:
    """The files that `module:Name`s are written in; other names have none."""
    modules = [module for module, colon, _ in (name.partition(":") for name in names) if colon]
    return [importlib.util.find_spec(module).origin for module in modules]
