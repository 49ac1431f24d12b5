"""Models with latents in the real training loop: an update is one update however it is cut, a resumed run is
the run that never stopped, and nets that are compared read the same latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.methods import BC, ILQL, KTO, WayOffPolicy
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.loop import Trainer, TrainerConfig

WORDS = ("yes", "no", "maybe", "good", "bad", "fine", "hello", "there", "what", "how")


def make_trainer(folder: Path, method, family="vhcr", *, accumulated=1, steps=4, **fields) -> Trainer:  # noqa: ANN001
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=280)
    generator, rows = np.random.default_rng(0), []
    for i in range(16):
        messages = []
        for _ in range(int(generator.integers(1, 4))):
            text, reply = (" ".join(generator.choice(WORDS, generator.integers(1, 6))) for _ in range(2))
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": reply, "reward": float(generator.normal())})
        rows += tokenize(Dialog(str(i), messages, truncated=bool(i % 3 == 0)), tokenizer)
    torch.manual_seed(0)
    config = ModelConfig(family=family, width=16, latent_size=4, context=128, **fields)
    policy = Policy(load_lm(config, tokenizer), method, config)
    prior = Prior([load_lm(config, tokenizer)]) if method.uses_prior else None
    if prior:
        prior.members[0].lm.load_state_dict(policy.lm.state_dict())
    settings = TrainerConfig(
        per_device_train_batch_size=8 // accumulated,
        gradient_accumulation_steps=accumulated,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to="none",
    )
    return Trainer(policy, tokenizer, rows, rows[:5], settings, folder, prior=prior)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.policy.named_parameters())


@pytest.mark.parametrize("method", [BC(), ILQL()])
def test_latents_do_not_depend_on_how_an_update_is_cut(method, tmp_path: Path) -> None:  # noqa: ANN001
    whole, parts = (
        make_trainer(tmp_path / str(accumulated), method, accumulated=accumulated, steps=1)
        for accumulated in (1, 4)
    )
    results = [trainer.train() for trainer in (whole, parts)]
    assert results[0]["train/grad_norm"] == pytest.approx(results[1]["train/grad_norm"], rel=1e-4)
    assert results[0]["train/loss"] == pytest.approx(results[1]["train/loss"], rel=1e-5)
    if method == BC():
        assert results[0]["train/kl"] > 0


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    dropping = {"dropout": 0.1, "word_drop": 0.2, "sentence_drop": 0.2, "bow_weight": 0.5, "free_bits": 0.1}
    whole = make_trainer(tmp_path / "whole", BC(), **dropping)
    whole.train()
    stopped = make_trainer(tmp_path / "stopped", BC(), **dropping)
    update = stopped._update

    def stop(objective):  # noqa: ANN001, ANN202
        if stopped.step == 2:
            raise KeyboardInterrupt
        return update(objective)

    stopped._update = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(tmp_path / "stopped", BC(), **dropping)
    resumed.train()
    for name, expected in weights(whole).items():
        assert torch.equal(weights(resumed)[name], expected), name


def test_held_out_nll_is_the_bound(tmp_path: Path) -> None:
    """-log p <= reconstruction + KL, whose exponential is the perplexity told; the same in each evaluation of
    the same weights."""
    trainer = make_trainer(tmp_path / "run", BC(), steps=2, kl_annealing=0.5, free_bits=9.0)
    metrics = trainer.train()
    assert metrics["eval/nll"] == pytest.approx(metrics["eval/reconstruction"] + metrics["eval/kl"])
    assert metrics["eval/loss"] == pytest.approx(metrics["eval/nll"])
    assert metrics["eval/perplexity"] == pytest.approx(np.exp(metrics["eval/nll"]))
    assert trainer._evaluation()["eval/nll"] == metrics["eval/nll"]


def test_policy_and_prior_read_the_same_latents(tmp_path: Path) -> None:
    """A policy that is its prior has log pi - log p = 0 at every token, whatever is drawn."""
    trainer = make_trainer(tmp_path / "run", WayOffPolicy(), "vhred", steps=1)
    batch = trainer._collate(range(8), trainer.train_rows, 0)
    other = trainer._collate(range(8), trainer.train_rows, 0)
    other.noise = batch.noise + 1
    trainer.policy.eval()
    said = []
    for each in (batch, other):
        trainer.objective(each)
        logp = -trainer.policy.outputs(each).lm.nll(each.actions)[1]
        torch.testing.assert_close(each.prior_logp, logp)
        said.append(logp)
    assert (said[0] - said[1]).abs().max() > 1e-3
    assert trainer._prior_logp is None and len(batch.prior_lse) == len(batch.states)


def test_what_is_measured_before_an_update_reads_its_latents(tmp_path: Path) -> None:
    """kto compares policy and prior over the whole update before it learns from any of it."""
    metrics = make_trainer(tmp_path / "run", KTO(), "vhred", steps=2).train()
    assert metrics["step"] == 2 and np.isfinite(metrics["eval/loss"])


@pytest.mark.filterwarnings("ignore:the held-out loss was still falling")
@pytest.mark.parametrize("family", ["hred", "vhred", "vhcr"])
def test_cloning_learns(tmp_path: Path, family: str) -> None:
    trainer = make_trainer(tmp_path / family, BC(), family, steps=40)
    before = trainer._evaluation()["eval/nll"]
    after = trainer.train()["eval/nll"]
    assert after < before - 1


@pytest.mark.parametrize("family", ["hred", "vhred"])
def test_what_was_said_before_is_soon_read(tmp_path: Path, family: str) -> None:
    """A reply that repeats one of ten words, ln 10 nats for who has not read it: a decoder that knows its
    context at its start alone, from small embeddings, first learns what is said anywhere, and stays there."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=280)
    rows = []
    for word in WORDS:
        messages = [{"role": "user", "content": f"what is {word} ?"}, {"role": "assistant", "content": word}]
        rows += tokenize(Dialog(word, messages), tokenizer)
    torch.manual_seed(0)
    config = ModelConfig(family=family, width=32, latent_size=4, context=64)
    policy = Policy(load_lm(config, tokenizer), BC(), config)
    settings = {"max_steps": 120, "learning_rate": 4e-2, "eval_steps": 0, "report_to": "none"}
    trainer = Trainer(policy, tokenizer, rows, rows, TrainerConfig(**settings), tmp_path)
    metrics = trainer.train()
    decisions = np.mean([row.assistant.sum() for row in rows])
    assert metrics["eval/nll"] * decisions < 1.0
