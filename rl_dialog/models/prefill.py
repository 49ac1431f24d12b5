"""The KV cache of prompts that are read once and continued several times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from rl_dialog.models.causal_lm import keeps_states_only
from rl_dialog.models.hierarchical import is_hierarchical


def read_prompts(model: nn.Module, ids: Tensor, mask: Tensor, rows: Tensor, *, room: int) -> Any:
    """The cache of all but the last token of the prompts (C, T), padded on the left, one row for each of
    `rows` (R,), with room for the replies.

    None for prompts of one token, which leave nothing to read, and for models without a cache of keys and
    values in any layer; a hierarchical model's state would have drawn one latent for all replies.
    """
    if ids.shape[1] == 1 or is_hierarchical(model) or is_hierarchical(getattr(model, "lm", model)):
        return None
    positions = (mask[:, :-1].cumsum(1) - 1).clamp(min=0)
    read = model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
    )
    cache = getattr(read, "past_key_values", None)
    if not isinstance(cache, Cache) or keeps_states_only(cache):
        return None
    cache.reorder_cache(rows)  # every kind of layer can, where not all can select
    if type(cache) is DynamicCache:
        cache.layers = [
            RoomyLayer(layer, room) if type(layer) is DynamicLayer else layer for layer in cache.layers
        ]
    return cache


class RoomyLayer(DynamicLayer):
    """A layer of a KV cache with room behind its tokens: a new one is written there, where DynamicLayer
    copies all before it."""

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.keys, self.values, self.room = layer.keys, layer.values, room
        self.stores: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """(R, heads, T, size) states of all tokens, the new ones last."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        if (
            self.stores is None
            or end > self.stores[0].shape[-2]
            or self.keys.data_ptr() != self.stores[0].data_ptr()
        ):  # beams replace `keys`
            self.stores = tuple(
                torch.cat([old, old.new_empty(*old.shape[:2], end - begin + self.room, old.shape[3])], 2)
                for old in (self.keys, self.values)
            )
        for store, new in zip(self.stores, (key_states, value_states), strict=True):
            store[:, :, begin:end] = new
        self.keys, self.values = (store[:, :, :end] for store in self.stores)
        return self.keys, self.values
