"""The weights of a model of transformers as its files have them: none is read from a pickle, and none that is
missing there is drawn at random without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_dialog.data.tokenize import require_hub_name_or_directory
from rl_dialog.errors import UserError

PICKLED = {"pytorch_model*.bin": "*model*.safetensors", "adapter_model.bin": "adapter_model.safetensors"}
Lacking = Mapping[str, str]  # {weight: what the files have instead}


def require_readable(name_or_path: str | Path) -> None:
    """Raises UserError for what is meant as a path and is not there, and for a directory whose weights are
    pickled: reading a pickle may run what it says."""
    require_hub_name_or_directory(name_or_path)
    place = Path(name_or_path)
    for pickles, safe in PICKLED.items():
        pickled = sorted(path.name for path in place.glob(pickles))
        if pickled and not any(place.glob(safe)):
            raise UserError(
                f"{place}: expected weights in {safe.lstrip('*').replace('*', '')}, got {pickled[0]}, a "
                "pickle, which is not read: where you trust it, load it with transformers and "
                "`save_pretrained` it anew"
            )


def load_strictly(kind: Any, name_or_path: str | Path, **settings: Any) -> tuple[Any, Lacking]:
    """(the model in float32, which of its weights its files lack). Raises what transformers raises, also for
    pickled weights of a hub."""
    model, report = kind.from_pretrained(
        name_or_path,
        dtype=torch.float32,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **settings,
    )
    absent = {name: f"no {name}" for name in sorted(report["missing_keys"])}
    other = {
        name: f"{name} of shape {tuple(stored)} instead of {tuple(built)}"
        for name, stored, built in sorted(report["mismatched_keys"])
    }
    return model, absent | other


def require_weights(model: Any, lacking: Lacking, where: str) -> None:
    """Raises UserError for weights that transformers would have drawn at random."""
    if lacking:
        raise UserError(
            f"{where}: expected the weights of the {type(model).__name__} that its config.json describes, "
            f"found {in_words(lacking)}: copy config.json and weights from the same model"
        )


def of_trunk(model: Any, lacking: Lacking) -> Lacking:
    """Without a pooler and what stands above the trunk, such as the head of another task."""
    inside = "" if model is model.base_model else f"{model.base_model_prefix}."
    return {name: said for name, said in lacking.items() if name.startswith(inside) and "pooler" not in name}


def in_words(lacking: Lacking) -> str:
    """The first three, and how many more."""
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    return ", ".join(list(lacking.values())[:3]) + more


def positions_of(model: Any) -> int | None:
    """How many tokens it has positions for; None where it names no limit. RoBERTa and its relatives count
    them from behind the padding token's number on, so that they have fewer than their config says."""
    most = getattr(model.config, "max_position_embeddings", None) or 0
    places = [layer for name, layer in model.named_modules() if name.endswith("position_embeddings")]
    skipped = [layer.padding_idx + 1 for layer in places if getattr(layer, "padding_idx", None) is not None]
    return most - max(skipped, default=0) if most > 0 else None
