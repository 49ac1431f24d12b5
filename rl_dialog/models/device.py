"""Where torch computes, by the name that flags give it."""

from __future__ import annotations

import torch

from rl_dialog.errors import UserError


def named_device(name: str) -> torch.device:
    """cpu, cuda, cuda:1, ...; auto: a GPU where there is one. Raises UserError for a name that torch does not
    know, and where there is no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, or another name that torch knows"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: expected a GPU that torch knows of, found none")
    return device
