"""What a run would report, found by rehearsing it: one update of a tiny model on made-up dialogs, in moments.

Names of metrics are what a method's loss says (methods/method.py), so nothing but the loss knows them.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.methods.method import Method
from rl_dialog.models.checkpoint import freeze_prior
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.loop import Trainer, TrainerConfig

SAID = ("yes", "no", "perhaps", "never")  # replies to the same question that earned 1, -1, 0.5, 0
EARNED = (1.0, -1.0, 0.5, 0.0)


def reported_metrics(method: Method) -> set[str]:
    """Names of what training's own evaluations say of held-out dialogs: `eval/loss`, `eval/nll`, ..."""
    dialogs = [_dialog(i) for i in range(16)]
    texts = [message["content"] for dialog in dialogs for message in dialog.messages]
    tokenizer = method.extend_tokenizer(train_tokenizer(texts, vocab_size=270))
    rows = [row for dialog in dialogs for row in tokenize(dialog, tokenizer, max_length=96)]
    model = ModelConfig(layers=1, attention_heads=2, width=16, context=128)
    heard: set[str] = set()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        policy = Policy(load_lm(model, tokenizer), method, model)
        prior = freeze_prior(policy, Path(folder) / "prior", tokenizer) if method.uses_prior else None
        settings = TrainerConfig(per_device_train_batch_size=8, max_steps=1, report_to="none")
        trainer = Trainer(
            policy, tokenizer, rows, rows, settings, Path(folder) / "run",
            prior=prior, report=lambda metrics, last: heard.update(metrics),
        )  # fmt: skip
        trainer.train()
    return heard - {"step"}


def _dialog(number: int) -> Dialog:
    """Two questions with an answer each."""
    messages = []
    for question in ("is it so?", "and now?"):
        k = number % len(SAID)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": SAID[k], "reward": EARNED[k]})
    return Dialog(str(number), messages, "rehearsal", "train")
