"""`benchmark train`: steps of every method, against cross-entropy training of the same backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from pipelines.benchmark.backbone import new_lm
from pipelines.benchmark.contenders import CONTENDERS, model_of
from pipelines.benchmark.measuring import Measured, Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.loop import Objective, TrainerConfig
from rl_dialog.training.optim import make_optimizer


def measure(config: BenchmarkConfig) -> Result:
    """Tokens of a step and its seconds, in three settings."""
    measured: Measured = {}
    half = f"half of the tokens the user's, blocks of {config.user_block}"
    for setting, block, prompt in (
        ("every token a decision", 0, 0),
        (half, config.user_block, 0),
        (
            f"{half}, behind a system prompt of {config.system_prompt}",
            config.user_block,
            config.system_prompt,
        ),
    ):
        batch = make_batch(config, block, prompt)
        contenders = {"plain": plain_training(config, batch)} | {
            name: our_training(config, name, batch) for name in config.contenders
        }
        measured[setting] = (
            batch.input_ids.numel(),
            take_turns(contenders, rounds=config.rounds, warmup=config.warmup),
        )
    return speeds(config, measured)


def plain_training(config: BenchmarkConfig, batch: Batch) -> Callable[[], None]:
    """A step of cross-entropy training as transformers does it, on the same tokens."""
    lm = new_lm(config).train()
    labels = batch.input_ids.clone()
    labels[:, 1:][~batch.act[:, :-1]] = -100  # position t decides token t + 1
    labels[:, 0] = -100
    return _step(lm, lambda: lm(input_ids=batch.input_ids, labels=labels, use_cache=False).loss)


def our_training(config: BenchmarkConfig, name: str, batch: Batch) -> Callable[[], None]:
    """The same step as the training loop takes it."""
    method, model = CONTENDERS[name]
    lm = new_lm(config, dropout=model.get("dropout", 0.0))
    policy = Policy(lm, method, model_of(name, rank=config.rank)).start_training().train()
    prior = Prior([new_lm(config)]) if method.prior_every_step else None
    objective, inputs = Objective(policy, prior), replace(batch)
    if method.uses_prior:
        inputs.prior_logp = torch.full((batch.decisions,), -np.log(config.vocabulary), dtype=torch.float32)
        inputs.prior_lse = torch.full((len(batch.states),), np.log(config.vocabulary), dtype=torch.float32)
    if method.proposals:
        shape = int(batch.turn_end.sum()), method.proposals
        inputs.proposals, inputs.proposal_logp = torch.rand(*shape, config.width), torch.full(shape, -10.0)
    if method.measures:
        with torch.no_grad():
            inputs.measured = method.measure(policy.outputs(inputs), inputs)
    return _step(policy, lambda: objective(inputs)[0] / batch.decisions, alpha=method.target_rate(1000, 0.0))


def _step(model: nn.Module, loss: Callable[[], Tensor], alpha: float = 0.0) -> Callable[[], None]:
    """Forward, backward, clipping, optimizer, targets: the order of training/loop.py."""
    trainer = TrainerConfig()
    optimizer = make_optimizer(model, learning_rate=1e-4, weight_decay=trainer.weight_decay)

    def step() -> None:
        loss().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
        if not torch.isfinite(norm):
            raise UserError("expected a finite gradient")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if alpha:
            model.update_targets(alpha)

    return step


def make_batch(config: BenchmarkConfig, user_block: int, system_prompt: int = 0) -> Batch:
    """Random tokens.

    Without a `user_block` the assistant writes all but the first, otherwise every second block; nothing of
    the first `system_prompt` tokens, which all rows have.
    """
    generator = np.random.default_rng(config.seed)
    t = np.arange(config.length)
    assistant = t > 0 if not user_block else t // user_block % 2 == 1
    assistant &= t >= system_prompt
    said_to_all = generator.integers(config.vocabulary, size=system_prompt, dtype=np.int32)
    ends = np.flatnonzero(assistant & ~np.append(assistant[1:], False)).astype(np.int32)
    rows = []
    for _ in range(config.batch_size):
        ids = generator.integers(config.vocabulary, size=config.length, dtype=np.int32)
        ids[:system_prompt] = said_to_all
        rows.append(
            Row(ids, assistant, ends, generator.normal(size=len(ends)).astype(np.float32), truncated=False)
        )
    return collate(rows)
