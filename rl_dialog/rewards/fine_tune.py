"""A transformers classifier of two labels, fine-tuned on labelled texts: what `--scorers sentiment=PATH` or `toxicity=PATH` loads again."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from rl_dialog.data.tokenize import require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.rewards.scorers import FITTED


def fine_tune(
    base: str,
    texts: Sequence[str],
    good: np.ndarray,
    out: str | Path,
    *,
    learning_rate: float,
    batch_size: int,
    epochs: float,
    max_length: int,
    seed: int,
    quiet: bool,
) -> None:
    """Trains all weights of the pretrained model `base` and a new head by cross-entropy on `good` (R,) bool; saves them with the tokenizer in `out`.

    Snell et al. (2022) trained their upvote model so (RoBERTa-base, learning rate 1e-5, 16 texts of at most 256 tokens). Raises UserError for a base
    that cannot be loaded, and for labels that are all the same.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

    if len(set(good.tolist())) != 2:
        raise UserError(f"expected good and bad replies to learn from, got {int(good.sum())} good ones of {len(good)}")
    require_hub_name_or_directory(base)
    transformers_logging.set_verbosity_error()  # it warns that the head is new
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)  # of the new head
    names = dict(enumerate(FITTED))
    labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, ignore_mismatched_sizes=True, **labels)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--model_name_or_path {base}: expected a folder with config.json and weights, or a hub name ({error})") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    length = min(max_length, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
    encoded = [dict(tokenizer(text, truncation=True, max_length=length)) for text in texts]
    rows = [{**row, "labels": int(label)} for row, label in zip(encoded, good, strict=True)]
    with tempfile.TemporaryDirectory() as work:
        settings = {"learning_rate": learning_rate, "per_device_train_batch_size": batch_size, "num_train_epochs": epochs, "warmup_steps": 0.1}
        reporting = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 50, "log_level": "error"}
        reporting["dataloader_pin_memory"] = torch.cuda.is_available()
        arguments = TrainingArguments(work, **settings, **reporting, seed=seed, logging_strategy="no" if quiet else "steps")
        Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer)).train()
    model.eval().cpu().save_pretrained(out)
    tokenizer.save_pretrained(out)
