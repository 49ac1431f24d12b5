"""`benchmark candidates`: several replies to each of many contexts, against one context at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pipelines.benchmark.backbone import new_lm
from pipelines.benchmark.measuring import Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.tokenize import encode_prompt, train_tokenizer
from rl_dialog.evaluation.draws import Context, draw_replies
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.methods import BC
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.models.policy import Policy


def measure(config: BenchmarkConfig) -> Result:
    """Contexts of a round and its seconds. Nearly no reply ends early, the model being random."""
    writer = _Writer(config)
    with multiprocessing.get_context("spawn").Pool(config.threads, _start_writer, (config,)) as pool:
        parts = [range(start, config.contexts, config.threads) for start in range(config.threads)]
        contenders = {
            "plain": writer.one_at_a_time,
            "batched": lambda: writer.batched(range(config.contexts)),
            f"batched, {config.threads} processes of one thread": lambda: pool.map(
                _write, parts, chunksize=1
            ),
        }
        seconds = take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    setting = f"{config.replies} sampled replies to each of {config.contexts} contexts"
    return speeds(config, {setting: (config.contexts, seconds)})


class _Writer:
    """A random policy, and contexts of random words of very different length."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config, rng = config, np.random.default_rng(config.seed)
        words = [
            "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), size=rng.integers(2, 9)))
            for _ in range(1000)
        ]
        texts = [
            " ".join(rng.choice(words, size=rng.integers(4, config.prompt_words + 1)))
            for _ in range(config.contexts)
        ]
        self.tokenizer = train_tokenizer([" ".join(words)] * 3, vocab_size=config.vocabulary)
        self.contexts = [
            Context((0, i), [{"role": "user", "content": text}], "") for i, text in enumerate(texts)
        ]
        self.decoding = Decoding(max_new_tokens=32, max_prompt_length=96)
        self.policy = Policy(new_lm(replace(config, length=128)), BC(), ModelConfig()).eval()

    def one_at_a_time(self) -> None:
        """As transformers does it: the prompt of one context, several sequences returned."""
        for context in self.contexts:
            prompt = torch.tensor([encode_prompt(context.messages, self.tokenizer, max_length=96)])
            settings = {
                "max_new_tokens": self.decoding.max_new_tokens,
                "eos_token_id": self.tokenizer.eos_token_id,
                "pad_token_id": 0,
            }
            mask = torch.ones_like(prompt)
            self.policy.lm.generate(
                prompt,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                num_return_sequences=self.config.replies,
                **settings,
            )

    def batched(self, numbers: Sequence[int]) -> None:
        contexts = [self.contexts[i] for i in numbers]
        draw_replies(self.policy, self.tokenizer, contexts, self.decoding, count=self.config.replies, tries=1)


def _start_writer(config: BenchmarkConfig) -> None:
    """Once per process: what a generating actor has."""
    global _writer
    torch.set_num_threads(1)
    _writer = _Writer(config)


def _write(numbers: Sequence[int]) -> None:
    _writer.batched(numbers)
