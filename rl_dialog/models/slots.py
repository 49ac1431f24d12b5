"""Keys and values of many conversations side by side, each of its own length: what a server keeps of the
chats it answers.

A slot is a row of every layer's tensors. Conversations join and leave without a copy of the others, and a
prompt that begins like what a slot still holds is read from there on. The rows of one forward pass lie next
to each other, so attention sees views and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs

from rl_dialog.errors import UserError

LOWEST = torch.finfo(torch.float32).min  # added to the score of what may not be seen
SMALLEST = 64  # tokens a slot has room for at first; doubled when a conversation outgrows it


def common_beginning(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for n, (one, other) in enumerate(zip(held, prompt, strict=False)):
        if one != other:
            return n
    return min(len(held), len(prompt))


class Slots(Cache):
    """A cache of `slots` conversations of up to `context` tokens. `others` hold the same conversations in the
    value and target trunks."""

    def __init__(self, config: Any, slots: int, context: int, *, others: tuple[Slots, ...] = ()) -> None:
        """config: of the model whose keys and values these are. Raises UserError for one whose layers keep
        something else, or see other tokens than those before them."""
        super().__init__(layers=[])
        self.kinds = frozenset(get_layer_types_and_kwargs(config)[0])
        local = set(getattr(config, "attention_layers", ())) - {"global"}  # of GPT-Neo
        if unknown := sorted(self.kinds - {"full_attention", "sliding_attention"} | local):
            raise UserError(
                f"{config.model_type}: expected layers that attend to the conversation or to a window of it, "
                f"got {', '.join(unknown)}"
            )
        self.window = config.sliding_window if "sliding_attention" in self.kinds else None
        self.adds_masks = not config._attn_implementation.startswith("sdpa")
        self.count, self.context, self.others = slots, context, list(others)
        self.capacity = min(SMALLEST, context)
        # of each layer, (slots, heads, capacity + 1, size); padding is written to the last column
        self.stores: list[tuple[Tensor, Tensor] | None] = [None] * config.num_hidden_layers
        self.first, self.width = 0, 0
        self.columns = torch.empty(0, 0, dtype=torch.int64)

    def aim(self, first: int, positions: Tensor, real: Tensor) -> Tensor | dict[str, Tensor]:
        """Says where the next pass writes: rows `first`, `first` + 1, ... at `positions` (B, T); where `real`
        (B, T) is false stands padding.

        Returns the mask (B, 1, T, width) of what each position may see, everything of its row up to itself or
        the last of it; where layers differ, a mask for each kind.
        """
        self.width = int(positions[real].max()) + 1
        if self.width > self.context:
            raise UserError(f"expected at most {self.context} tokens in a conversation, got {self.width}")
        for slots in (self, *self.others):
            slots._grow(self.width)
            slots.first, slots.width = first, self.width
            slots.columns = positions.where(real, slots.capacity)
        back = (positions[:, :, None] - torch.arange(self.width, device=positions.device))[:, None]
        masks = {kind: back >= 0 for kind in self.kinds}
        if self.window is not None:
            masks["sliding_attention"] &= back < self.window
        if self.adds_masks:  # eager attention adds them to its scores, where sdpa takes truth values
            masks = {kind: torch.where(seen, 0.0, LOWEST) for kind, seen in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes (B, heads, T, size) states where `aim` said; returns what those rows hold, (B, heads, width,
        size)."""
        if self.stores[layer_idx] is None:
            self.stores[layer_idx] = tuple(
                new.new_zeros(self.count, new.shape[1], self.capacity + 1, new.shape[3])
                for new in (key_states, value_states)
            )
        rows = torch.arange(len(key_states), device=key_states.device)[:, None]
        views = [store[self.first : self.first + len(key_states)] for store in self.stores[layer_idx]]
        for view, new in zip(views, (key_states, value_states), strict=True):
            view[rows, :, self.columns] = new.transpose(1, 2)
        return views[0][:, :, : self.width], views[1][:, :, : self.width]

    def swap(self, one: int, other: int) -> None:
        """Exchanges two slots."""
        order = torch.tensor([one, other])
        for store in self._tensors():
            store[order] = store[order.flip(0)]

    def copy(self, source: int | list[int], target: int | list[int], length: int) -> None:
        """The first `length` tokens of a slot, written over another; or of several."""
        for store in self._tensors():
            store[target, :, :length] = store[source, :, :length]

    def reusable(self, held: Sequence[int], prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens need not be read again behind a slot that has read `held`; the last
        one always is."""
        return min(common_beginning(held, prompt), len(prompt) - 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # every row has its own; positions and mask are always given

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.width, 0

    def _tensors(self) -> list[Tensor]:
        return [
            store
            for slots in (self, *self.others)
            for pair in slots.stores
            if pair is not None
            for store in pair
        ]

    def _grow(self, width: int) -> None:
        if width <= self.capacity:
            return
        capacity, grown = min(self.context, max(width, 2 * self.capacity)), []
        for pair in self.stores:
            grown.append(
                pair
                and tuple(store.new_zeros(*store.shape[:2], capacity + 1, store.shape[3]) for store in pair)
            )
            for new, store in zip(grown[-1] or (), pair or (), strict=True):
                new[:, :, : self.capacity] = store[:, :, : self.capacity]
        self.stores, self.capacity = grown, capacity  # at the end: where memory runs out, all stays as it was
