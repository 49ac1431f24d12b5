"""`benchmark generate`: ilql's guided decoding, against the backbone's own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.benchmark.backbone import new_lm
from pipelines.benchmark.contenders import model_of
from pipelines.benchmark.measuring import Measured, Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.errors import UserError
from rl_dialog.methods import ILQL
from rl_dialog.models.policy import Policy

GUIDED = ("ilql mlp", "ilql lowrank", "ilql, own trunk")  # of CONTENDERS


def measure(config: BenchmarkConfig) -> Result:
    """New tokens of a call and its seconds, for each batch size."""
    method = ILQL(beta=config.beta, top_k=config.top_k)
    lm = new_lm(config).eval()
    guided = {
        name: Policy(new_lm(config), method, model_of(name, rank=config.rank)).eval() for name in GUIDED
    }
    for policy in guided.values():
        for parameter in policy.heads.parameters():
            nn.init.normal_(parameter, std=0.02)  # new heads are zero and would steer nowhere
    measured: Measured = {}
    for batch_size in config.batch_sizes:
        prompt = torch.randint(
            config.vocabulary,
            (batch_size, config.prompt),
            generator=torch.Generator().manual_seed(config.seed),
        )
        contenders = {"plain": _generation(config, lm, prompt, top_k=config.top_k)}
        contenders |= {name: _generation(config, policy, prompt, top_k=0) for name, policy in guided.items()}
        measured[f"batch {batch_size}"] = (
            prompt.shape[0] * config.new_tokens,
            take_turns(contenders, rounds=config.rounds, warmup=config.warmup),
        )
    return speeds(config, measured)


def _generation(config: BenchmarkConfig, model: Any, prompt: Tensor, *, top_k: int) -> Callable[[], None]:
    """One call of `generate`; there is no end-of-sequence token, so every reply has the same length."""
    mask = torch.ones_like(prompt)

    def call() -> None:
        ids = model.generate(
            prompt,
            attention_mask=mask,
            do_sample=True,
            top_k=top_k,
            max_new_tokens=config.new_tokens,
            use_cache=True,
        )
        if ids.shape[1] != config.prompt + config.new_tokens:
            raise UserError(f"expected {config.new_tokens} new tokens, got {ids.shape[1] - config.prompt}")

    return call
