"""Caches of several transformers that read the same tokens: the language model's, and those of values."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from rl_dialog.errors import UserError
from rl_dialog.models.causal_lm import keeps_states_only


class TrunkCaches(DynamicCache):
    """The LM's cache with those of the value and target trunks beside it: what beams do to one, they do to
    all. It counts the tokens, which layers that keep states do not."""

    is_compileable = False  # or `generate` would make masks of another kind for it

    def __init__(self, config: Any, others: int) -> None:
        super().__init__(config=config)
        self.others = [DynamicCache(config=config) for _ in range(others)]
        self.read = 0

    @classmethod
    def around(cls, cache: Any, config: Any, others: int) -> TrunkCaches:
        """`cache` itself when it is one of ours, a new one where there is none. Raises UserError for another
        one, even if it is empty: it has no room for the other transformers, and would stay as it is."""
        if isinstance(cache, cls):
            return cache
        if cache is not None:
            raise UserError(
                f"expected no cache or one that this policy returned, got a {type(cache).__name__} with "
                f"{tokens_read(cache) or 'nothing'}, which cannot hold what other transformers read: leave "
                "past_key_values (or cache_implementation) out of the first call and go on with what it "
                "returns"
            )
        return cls(config, others)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read if keeps_states_only(self) else super().get_seq_length(layer_idx)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for cache in self.others:
            cache.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for cache in self.others:
            cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for cache in self.others:
            cache.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for cache in self.others:
            cache.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.read = 0
        for cache in self.others:
            cache.reset()


def tokens_read(cache: Any) -> str:
    """What a foreign cache holds; "" where it is empty."""
    if keeps_states_only(cache):
        return "states" if cache.has_previous_state() else ""
    return f"{count} tokens" if (count := cache.get_seq_length()) else ""
