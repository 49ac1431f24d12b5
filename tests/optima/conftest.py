"""`train` and `learn`: the real trainer on a table."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def train(tokenizer, tmp_path: Path):
    """train(policy, rows, steps, rate, prior=..., ...): the trainer's last metrics after `steps` updates on
    all rows at once.

    Plain gradient descent stands in for Adam: on a table its error shrinks by a constant factor with every
    update, so that eighty reach the fixed point to five digits, while Adam's steps, which do not shrink with
    the gradient, go on circling it. Gradients are not clipped.
    """
    import torch

    from rl_dialog.training.loop import Trainer, TrainerConfig

    def run(policy, rows, steps, rate, *, prior=None, **options):
        settings = {
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0,
            "report_to": "none",
            "logging_steps": steps,
            "value_unit": 1.0,
        } | options
        config = TrainerConfig(
            per_device_train_batch_size=len(rows), max_steps=steps, learning_rate=rate, **settings
        )
        trainer = Trainer(policy, tokenizer, rows, [], config, tempfile.mkdtemp(dir=tmp_path), prior=prior)
        trainer.optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=rate)
        return trainer.train()

    return run


@pytest.fixture
def learn(train):
    """learn(method, rows, vocabulary, key=..., prior=[log p, ...], steps=..., rate=...): a `Learned`. `prior`
    holds in every state."""
    import torch

    from rl_dialog.models.prior import Prior
    from tests.optima.tabular import Learned, tabular_lm, tabular_policy

    def run(method, rows, vocabulary, *, key=tuple, prior=None, steps=80, rate=1.0, **options):
        frozen = None
        if prior is not None:
            frozen = tabular_lm(rows, vocabulary, key=key)
            frozen.table.weight.data.copy_(torch.tensor(prior)[:, None].expand_as(frozen.table.weight))
            frozen = Prior([frozen])
        policy = tabular_policy(tabular_lm(rows, vocabulary, key=key), method)
        train(policy, rows, steps, rate, prior=frozen, **options)
        return Learned(policy)

    return run


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tables are far too small to share."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
