"""Offline learning works: from logs whose replies are good or bad half of the time, every method that reads
rewards says the good ones.

Text, tokenizer, template, `prepare`, the trainer with its own AdamW and `generate` are the real ones; the
language model is a table.
"""

from __future__ import annotations

import pytest
import torch

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import encode_prompt, load_tokenizer, tokenize, train_tokenizer
from rl_dialog.methods import BC, DT, ILQL, TFAll, TFTop
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.optima.tabular import tabular_lm, tabular_policy

QUESTIONS = "how are you?", "thank you"
SAMPLES = 300


def dialogs() -> list[Dialog]:
    """Every question once with a good and once with a bad reply (rewards 1 and 0), then `bye` with one of the
    two that are left open."""
    made = []
    for question in QUESTIONS:
        for first, reward in (("good", 1.0), ("bad", 0.0)):
            for last, later in (("good", 1.0), ("bad", 0.0)):
                turns = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": first, "reward": reward},
                ]
                turns += [
                    {"role": "user", "content": "bye"},
                    {"role": "assistant", "content": last, "reward": later},
                ]
                made.append(Dialog(f"{question} {first} {last}", turns))
    return made


@pytest.fixture(scope="module")
def words():
    """A tokenizer with a token for each word of the corpus."""
    return train_tokenizer([*QUESTIONS, "good", "bad", "bye"] * 20, vocab_size=320)


@pytest.fixture
def talk(words, tmp_path):
    """talk(method, ask=...): trains `method` and returns the share of good replies among samples; `ask`,
    another method to prompt with."""

    def run(method, *, ask=None):
        words.save_pretrained(tmp_path / "tokenizer")
        made, asked = (
            each.extend_tokenizer(load_tokenizer(tmp_path / "tokenizer")) for each in (method, ask or method)
        )
        rows = [row for dialog in dialogs() for row in tokenize(dialog, words)]
        lm = tabular_lm(method.prepare(rows, [], made)[0], len(made))
        lm.generation_config.eos_token_id = made.eos_token_id
        policy = tabular_policy(lm, method)
        config = TrainerConfig(
            per_device_train_batch_size=len(rows),
            max_steps=250,
            learning_rate=0.1,
            max_grad_norm=0,
            report_to="none",
        )
        Trainer(policy, made, rows, [], config, tmp_path / "run").train()
        said = []
        for question in QUESTIONS:
            prompt = torch.tensor(
                encode_prompt([{"role": "user", "content": question}], asked, max_length=64)
            )
            replies = policy.eval().generate(prompt.expand(SAMPLES, -1), max_new_tokens=8)[:, len(prompt) :]
            said += made.batch_decode(replies, skip_special_tokens=True)
        assert said.count("good") + said.count("bad") > 0.97 * len(
            said
        )  # the rest are words that no log has, each with a chance of 1e-4
        return said.count("good") / len(said)

    return run


VALUES = {"gamma": 1.0, "cql_weight": 0.0, "alpha": 0.5}
ABOUT_HALF = pytest.approx(0.5, abs=0.1)  # 600 samples: five standard deviations


@pytest.mark.parametrize(
    "method", [BC(), TFAll(), ILQL(beta=0.0, **VALUES)], ids=["bc", "tf_all", "ilql beta 0"]
)
def test_clones_are_as_good_as_the_logs(talk, method):
    assert talk(method) == ABOUT_HALF


@pytest.mark.parametrize(
    "method",
    [TFTop(by="reply", threshold=1.0), DT(by="reply"), ILQL(beta=6.0, **VALUES)],
    ids=["tf_top", "dt", "ilql"],
)
def test_what_reads_rewards_says_the_good_reply(talk, method):
    """ilql at beta 6: Q differs by 1, sigmoid(6) = .9975 of clones that are at one half."""
    assert talk(method) >= 0.95


def test_a_return_that_is_asked_for_is_delivered(talk):
    """The other bin must give the other replies."""
    assert talk(DT(by="reply"), ask=DT(by="reply", want=0)) <= 0.05


def test_a_smaller_beta_steers_less(talk):
    """sigmoid(1) = .73."""
    assert talk(ILQL(beta=1.0, **VALUES)) == pytest.approx(0.731, abs=0.1)
