"""Several learners: each learns from its share of the episodes that the first one plays, and together they
make the update of one."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import multiprocessing

from rl_dialog.data.rollout import Rollout
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.methods import GRPO, PPO, RLOO, VHRL, Method, Reinforce
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from tests.ports import free_port
from tests.training.test_loop import parameters, plain_descent
from tests.training.test_online import episodes

MODEL = ModelConfig(family="llama", layers=2, attention_heads=2, width=32, context=128)
SETTINGS = OnlineSettings(
    max_steps=3, eval_steps=0, warmup_steps=0, learning_rate=0.05, lr_scheduler_type="constant",
    per_device_train_batch_size=2, max_grad_norm=0.5, report_to="none",
)  # fmt: skip
METHODS: dict[str, Method] = {
    "rloo": RLOO(),
    "grpo": GRPO(),
    "ppo, values of their own": PPO(),
    "supervised": RLOO(),
    "fewer episodes than learners": Reinforce(baseline="none"),
    "latents": VHRL(learns="decoupled", worker_rate=0.5),
}


def make(folder: Path, name: str, rank: int = 0) -> OnlineTrainer:
    """The same in every process; only the first learner plays."""

    def play(*_):
        assert rank == 0
        played = episodes(1 if "fewer" in name else 7)
        return [with_latents(each) for each in played] if name == "latents" else played

    tokenizer = train_tokenizer(["hello there, how are you?", "that is all"] * 20, vocab_size=330)
    torch.manual_seed(0)
    method, trunk = METHODS[name], "separate" if "own" in name else "shared"
    family = {"family": "vhred", "latent_size": 3} if name == "latents" else {}
    model = replace(MODEL, value_trunk=trunk, **family)
    policy = Policy(load_lm(model, tokenizer), method, model)
    prior = Prior([copy.deepcopy(load_lm(replace(MODEL, **family), tokenizer))])
    settings, logged = SETTINGS, []
    if name == "supervised":
        settings = replace(SETTINGS, supervised_weight=0.5)
        talks = [
            [{"role": "user", "content": f"hello {n}"}, {"role": "assistant", "content": "that is all " * n}]
            for n in range(1, 6)
        ]
        logged = [row for talk in talks for row in tokenize(Dialog("talk", talk), tokenizer)]
    made = OnlineTrainer(policy, tokenizer, play, settings, folder / name, prior=prior, logged=logged)
    return plain_descent(made)


def with_latents(rollout: Rollout) -> Rollout:
    """As a policy with latents would have said it; each reply is a message (1 ends one)."""
    rows = []
    for row in rollout.rows:
        ids = np.where(row.input_ids == 2, 1, row.input_ids)
        rows.append(
            replace(row, input_ids=ids, latent_seeds=row.reply_ends.astype(np.int64) + rollout.episode)
        )
    return replace(rollout, rows=tuple(rows))


def learner(rank: int, world: int, port: int, folder: str) -> None:
    """One run after the other."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name in METHODS:
        trainer = make(Path(folder), name, rank)
        trainer.train()
        save_file(parameters(trainer), Path(folder, f"{name}-{rank}.safetensors"))
    dist.destroy_process_group()


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{name: value for name, value in line.items() if name.startswith("train")} for line in found]


@pytest.mark.slow
def test_two_learners_make_the_updates_of_one(tmp_path: Path) -> None:
    """Of parameters, metrics and checkpoints, by plain gradient descent (test_loop.py tells why), with an odd
    number of episodes, two passes in two steps each for ppo, logged rows, and a single episode."""
    multiprocessing.spawn(learner, args=(2, free_port(), str(tmp_path / "two")), nprocs=2)
    for name in METHODS:
        one = make(tmp_path / "one", name)
        start = parameters(one)
        one.train()
        first, second = (load_file(tmp_path / "two" / f"{name}-{rank}.safetensors") for rank in (0, 1))
        moved = max(float((value - start[key]).abs().max()) for key, value in parameters(one).items())
        assert moved > 1e-3, name
        for key, expected in parameters(one).items():
            torch.testing.assert_close(first[key], expected, atol=2e-6, rtol=0, msg=f"{name}: {key}")
            assert torch.equal(first[key], second[key]), (name, key)
        ours, theirs = lines(tmp_path / "one" / name), lines(tmp_path / "two" / name)
        assert len(ours) == len(theirs) == 3
        for mine, other in zip(ours, theirs, strict=True):
            assert other == pytest.approx(mine, rel=2e-3, abs=2e-5), name
