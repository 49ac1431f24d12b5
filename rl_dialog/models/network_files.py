"""The two files of a small network: config.json says what it is and its shape, model.safetensors has the
weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rl_dialog.config import from_dict
from rl_dialog.errors import UserError

FORMAT = 1
Shape = TypeVar("Shape")
Network = TypeVar("Network", bound=nn.Module)


def save_network(
    network: nn.Module,
    shape: Any,
    directory: str | Path,
    *,
    kind: str,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes both into `directory`, which is made if needed."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous().cpu() for name, value in network.state_dict().items()}
    save_file(weights, directory / "model.safetensors")
    description = {"format": FORMAT, "model_type": kind, **(about or {}), **asdict(shape)}
    (directory / "config.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def shape_in(values: Any, shape: type[Shape], path: Path, *, kind: str, remedy: str = "") -> Shape:
    """What the parsed config.json at `path` says. Raises UserError, which ends with the remedy, where it is
    not of this kind."""
    is_ours = isinstance(values, dict) and (values.get("model_type"), values.get("format")) == (kind, FORMAT)
    if not is_ours:
        raise UserError(
            f"{path}: expected model_type {kind} of format {FORMAT}, got {str(values)[:120]}{remedy}"
        )
    fields = {name: values[name] for name in values if name not in ("format", "model_type", "version")}
    return from_dict(shape, fields, where=str(path))


def read_shape(shape: type[Shape], directory: str | Path, *, kind: str, remedy: str = "") -> Shape:
    """What config.json says of a network that `prefer` writes. Raises UserError where there is none."""
    path = Path(directory) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = kind.replace("_", " ")
        raise UserError(
            f"{path}: expected the description of a {what}, got {error}; `prefer` writes one"
        ) from error
    return shape_in(values, shape, path, kind=kind, remedy=remedy)


def load_weights(network: Network, directory: str | Path, shape: Any) -> Network:
    """The network with the weights of a directory, in eval mode. Raises UserError where they do not fit."""
    path = Path(directory) / "model.safetensors"
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{path}: expected the weights of {shape}, got: {error}") from error
    return network.eval()
