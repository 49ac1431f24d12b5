"""Shared fixtures: a tiny tokenizer, tiny policies with random heads, hand-made rows. Nothing here downloads anything."""

from __future__ import annotations

import os
import random
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported; these models are too small to share between cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer of about 330 tokens with our chat template."""
    from rl_dialog.data.tokenize import train_tokenizer

    return train_tokenizer(["hello there, how are you?", "what would you like to eat today?", "thank you, that is all"] * 20, vocab_size=330)


@pytest.fixture
def make_row():
    """make_row(ids, [(first, last, reward), ...], truncated): a Row whose replies are the token spans first..last, ends included."""
    from rl_dialog.data.tokenize import Row

    def build(ids, replies, truncated=False):
        assistant = np.zeros(len(ids), bool)
        for first, last, _ in replies:
            assistant[first : last + 1] = True
        ends = np.asarray([last for _, last, _ in replies], np.int32)
        rewards = np.asarray([reward for *_, reward in replies], np.float32)
        return Row(np.asarray(ids, np.int32), assistant, ends, rewards, truncated)

    return build


@pytest.fixture
def make_policy(tokenizer):
    """make_policy(method, family, heads=..., trunk=..., target=..., ...): a two-layer policy in eval mode, its heads random, no two alike."""
    import torch

    from rl_dialog.models.policy import ModelConfig, Policy, load_lm

    def build(method, family="gpt2", *, heads="mlp", trunk="shared", target="shared", peft=False, spread=0.3, dropout=0.0, seed=0):
        torch.manual_seed(seed)
        config = ModelConfig(
            family=family,
            layers=2,
            attention_heads=2,
            width=32,
            context=128,
            dropout=dropout,
            heads=heads,
            rank=4,
            value_trunk=trunk,
            target_trunk=target,
            use_peft=peft,
            lora_r=2,
        )
        lm = load_lm(config, tokenizer)
        with torch.no_grad():
            for name, parameter in lm.named_parameters():  # a new model is near uniform, or repeats its last token
                parameter.add_(torch.randn_like(parameter) * (0.1 if "wte" in name or "embed_tokens" in name else 0.3))
        policy = Policy(lm, method, config)
        with torch.no_grad():
            named = sorted(policy.named_parameters(), key=lambda each: each[0].startswith("target_trunk."))  # last: what it adds is its own
            for name, parameter in named:
                if name.startswith(("heads.", "value_trunk.", "target_trunk.")) or "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * spread)
        return policy.eval()

    return build
