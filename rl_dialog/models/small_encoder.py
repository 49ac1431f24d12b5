"""The shape of a small new encoder, which learns from nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import ModernBertConfig, PreTrainedTokenizerFast


def small_encoder(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, num_hidden_layers: int, max_length: int
) -> ModernBertConfig:
    """ModernBERT's, which has rotary positions: a word means the same wherever the context before it ends."""
    from transformers import ModernBertConfig

    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,  # of a gated layer, as much as 4 times of a plain one
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=max(1, hidden_size // 32),
        max_position_embeddings=max_length,
        global_attn_every_n_layers=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
    )
