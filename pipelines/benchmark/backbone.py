"""The language model that is measured, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.models.language_model import ModelConfig, load_lm


@dataclass(frozen=True)
class _Vocabulary:
    """As much of a tokenizer as a new LM needs."""

    size: int
    bos_token_id: None = None
    eos_token_id: None = None
    pad_token_id: None = None

    def __len__(self) -> int:
        return self.size


def new_lm(config: BenchmarkConfig, *, dropout: float = 0.0) -> Any:
    """A GPT-2 of the settings' shape; the same one each time."""
    torch.manual_seed(config.seed)
    context = max(config.length, config.prompt + config.new_tokens)
    shape = {
        "layers": config.layers,
        "attention_heads": config.attention_heads,
        "width": config.width,
        "context": context,
    }
    model = ModelConfig(family="gpt2", **shape, dropout=dropout)
    return load_lm(model, _Vocabulary(config.vocabulary))
