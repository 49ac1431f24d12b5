"""Learning from teachers in the real training loop: one update however it is cut, a resumed run is the one
that never stopped, and a head learns what depends on the words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rl_dialog.data.schema import Dialog
from rl_dialog.data.taught import Taught
from rl_dialog.data.tokenize import Row, tokenize
from rl_dialog.methods import BC
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.training.test_loop import (
    WORDS,
    _join,
    _two_processes,
    make_tokenizer,
    parameters,
    plain_descent,
)

TEACHERS = {"emotion": {"name": "a", "labels": ["no", "yes"]}, "embedding": {"name": "b", "size": 2}}
SHARED = {"report_to": "none", "logging_steps": 1}


def make_rows(tokenizer, count: int = 16, shuffled: int | None = None) -> list[Row]:  # noqa: ANN001
    """Dialogs whose teachers say how many of a message's words are "yes", and how long it is; `shuffled`:
    what they say is dealt out anew among all messages, by this seed."""
    generator, dialogs, lessons = np.random.default_rng(0), [], []
    for i in range(count):
        texts = [
            generator.choice(WORDS[:3], generator.integers(1, 6)) for _ in range(2 * generator.integers(1, 4))
        ]
        messages = [
            {"role": ("user", "assistant")[n % 2], "content": " ".join(text)} for n, text in enumerate(texts)
        ]
        dialogs.append(Dialog(str(i), messages, truncated=bool(i % 3 == 0)))
        lessons.append(np.array([[np.mean(text == "yes"), len(text)] for text in texts]))
    if shuffled is not None:
        dealt = np.random.default_rng(shuffled).permutation(np.concatenate(lessons))
        lessons = np.split(dealt, np.cumsum([len(each) for each in lessons])[:-1])
    return [
        row
        for dialog, said in zip(dialogs, lessons, strict=True)
        for row in tokenize(dialog, tokenizer, max_length=48, taught=_taught(said))
    ]


def _taught(said: np.ndarray) -> Taught:
    emotions = np.stack([1 - said[:, 0], said[:, 0]], 1).astype(np.float32)
    return Taught(np.arange(len(said), dtype=np.int32), emotions, said.astype(np.float16))


def make_trainer(
    folder: Path, family: str, config: TrainerConfig, *, shuffled: int | None = None, count: int = 16,
    **fields: float,
) -> Trainer:  # fmt: skip
    tokenizer = make_tokenizer()
    rows = make_rows(tokenizer, count, shuffled)
    torch.manual_seed(0)
    weights = {"emotion_weight": 1.0, "embedding_weight": 0.5} | fields
    model = ModelConfig(family=family, width=16, latent_size=4, context=128, **weights)
    policy = Policy(load_lm(model, tokenizer, teachers=TEACHERS), BC(), model)
    return Trainer(policy, tokenizer, rows, make_rows(tokenizer, 8), config, folder)


def _worker(rank: int, world: int, port: int, folder: str) -> None:
    _join(rank, world, port)
    config = TrainerConfig(2, 2, max_steps=2, learning_rate=0.1, lr_scheduler_type="constant", **SHARED)
    trainer = plain_descent(make_trainer(Path(folder), "vhcr", config))
    trainer.train()
    if rank == 0:
        save_file(parameters(trainer), Path(folder, "parameters.safetensors"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_and_accumulation_make_the_update_of_one_batch(tmp_path: Path) -> None:
    """Micro-batches hold other numbers of messages and of decisions; the sums are divided by one count."""
    shape = {"max_steps": 2, "learning_rate": 0.1, "lr_scheduler_type": "constant", **SHARED}
    one, cut = (
        plain_descent(make_trainer(tmp_path / name, "vhcr", TrainerConfig(size, 8 // size, **shape)))
        for name, size in (("one", 8), ("cut", 2))
    )
    start = parameters(one)
    results = [trainer.train() for trainer in (one, cut)]
    for name in ("train/emotion", "train/embedding", "train/loss", "eval/emotion"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-4), name
    (tmp_path / "two").mkdir()
    _two_processes(_worker, str(tmp_path / "two"))
    two = load_file(tmp_path / "two" / "parameters.safetensors")
    moved = max((value - start[name]).abs().max() for name, value in parameters(one).items())
    for name, expected in parameters(one).items():
        for other in (parameters(cut), two):
            assert (other[name] - expected).abs().max() < 1e-3 * moved, name


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    config = TrainerConfig(8, max_steps=4, learning_rate=1e-2, save_steps=2, **SHARED)
    whole = make_trainer(tmp_path / "whole", "vhred", config)
    whole.train()
    stopped = make_trainer(tmp_path / "stopped", "vhred", config)
    update = stopped._update

    def stop(objective):  # noqa: ANN001, ANN202
        if stopped.step == 2:
            raise KeyboardInterrupt
        return update(objective)

    stopped._update = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(tmp_path / "stopped", "vhred", config)
    resumed.train()
    for name, expected in parameters(whole).items():
        assert torch.equal(parameters(resumed)[name], expected), name


def test_a_teacher_that_tells_no_message_from_another_is_told(tmp_path: Path) -> None:
    """VADER, say, of a language whose words it does not know."""
    tokenizer = make_tokenizer()
    rows = make_rows(tokenizer)
    for row in rows:
        row.taught.emotions[:] = (0.0, 1.0)
    model = ModelConfig(family="hred", width=16, context=128, emotion_weight=1.0, embedding_weight=0.5)
    policy = Policy(load_lm(model, tokenizer, teachers=TEACHERS), BC(), model)
    count = sum(len(row.taught.places) for row in rows)
    with pytest.warns(UserWarning, match=rf"a \(emotion\) says the same of all {count} messages") as told:
        Trainer(policy, tokenizer, rows, rows, TrainerConfig(8, max_steps=1, **SHARED), tmp_path)
    assert len(told) == 1


def test_best_is_chosen_by_the_bound_alone(tmp_path: Path) -> None:
    """Runs with other weights of the teachers have held-out losses that compare."""
    trainer = make_trainer(tmp_path / "run", "vhred", TrainerConfig(8, max_steps=2, **SHARED))
    metrics = trainer.train()
    assert metrics["eval/loss"] == pytest.approx(metrics["eval/nll"])
    assert metrics["train/loss"] > metrics["train/nll"] - metrics["train/kl"]
    tokens = sum(row.assistant.sum() for row in trainer.eval_rows)
    messages = sum(len(row.taught.places) for row in trainer.eval_rows)
    assert metrics["eval/messages"] == pytest.approx(messages / tokens)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the held-out loss was still falling")
@pytest.mark.parametrize("family", ["hred", "vhcr"])
def test_heads_learn_what_depends_on_the_words(tmp_path: Path, family: str) -> None:
    """A permutation test: of held-out messages, what is learned of their own words is nearer to the teacher
    than what is learned of values that were dealt out anew, each of four times (p = 1/5 each, 1/25 of both
    heads together)."""
    config = TrainerConfig(16, max_steps=120, learning_rate=1e-2, **SHARED | {"logging_steps": 120})
    own, *dealt = (
        make_trainer(tmp_path / str(seed), family, config, shuffled=seed, count=48).train()
        for seed in (None, 1, 2, 3, 4)
    )
    for name in ("eval/emotion", "eval/embedding"):
        assert own[name] < min(other[name] for other in dealt), name
    assert own["eval/embedding"] < 0.5 * min(other["eval/embedding"] for other in dealt)
