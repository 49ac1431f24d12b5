"""What is learned of a reply does not depend on its length: short and long replies, equally often, rewarded
by a coin that knows neither."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import Row, encode_prompt, tokenize, train_tokenizer
from rl_dialog.methods import BC, DT, ILQL, KTO, SARSA, KLControl, MCReturns, Method, Psi
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.loop import Trainer, TrainerConfig

SHORT, LONG = "yes", "no no no no no no no no"
ASK = [{"role": "user", "content": "well"}]
MODEL = ModelConfig(family="llama", layers=1, width=16, attention_heads=2, context=64)
HALF = pytest.approx(0.5, abs=0.02)
CONFIG = TrainerConfig(
    per_device_train_batch_size=32, max_steps=600, learning_rate=5e-3, report_to="none", logging_steps=600
)
# Rewards that say nothing leave kto no slope, and long steps would go astray along it; dt begins with tokens
# that the clone does not know.
STEPS = {
    KTO: replace(CONFIG, learning_rate=2e-4),
    DT: replace(CONFIG, max_steps=1200),
}
SLOW = [
    ILQL(gamma=1.0, tau=0.5),
    SARSA(gamma=1.0),
    MCReturns(gamma=1.0),
    KLControl(gamma=1.0, tau=0.5),
    DT(),
    KTO(),
]
METHODS = [Psi(gamma=1.0), *(pytest.param(method, marks=pytest.mark.slow) for method in SLOW)]


COIN = [0.0, 1.0] * 32
LOTTERY = [64.0] + [0.0] * 63


def rows_of(tokenizer, rewards: list[float] = COIN) -> list[Row]:  # noqa: ANN001
    """Each reply with each of 64 rewards: four updates an epoch, and their rows differ in length by a factor
    of four."""
    dialogs = [
        Dialog(f"{text[:3]}-{i}", [*ASK, {"role": "assistant", "content": text, "reward": reward}])
        for i, reward in enumerate(rewards)
        for text in (SHORT, LONG)
    ]
    return [row for dialog in dialogs for row in tokenize(dialog, tokenizer)]


def learn(
    method: Method,
    folder: Path,
    *,
    start: Policy | None = None,
    config: TrainerConfig = CONFIG,
    rewards: list[float] = COIN,
) -> tuple[Policy, object]:
    tokenizer = method.extend_tokenizer(train_tokenizer(["well yes no"] * 3, vocab_size=280))
    torch.manual_seed(0)
    lm = load_lm(MODEL, tokenizer)
    if start is not None:
        lm.load_state_dict(
            {
                name: value
                for name, value in start.lm.state_dict().items()
                if value.shape == lm.state_dict()[name].shape
            },
            strict=False,
        )
    policy = Policy(lm, method, MODEL)
    prior = Prior([load_lm(MODEL, tokenizer)]) if method.uses_prior else None
    if prior is not None:
        prior.members[0].lm.load_state_dict(lm.state_dict())
    Trainer(policy, tokenizer, rows_of(tokenizer, rewards), [], config, folder, prior=prior).train()
    return policy.eval(), tokenizer


@torch.no_grad()
def chance_of_short(policy: Policy, tokenizer) -> float:  # noqa: ANN001
    """P(short) among the two first tokens that the logs have."""
    prompt = encode_prompt(ASK, tokenizer, max_length=64)
    p = policy(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    short, long = (tokenizer.encode(text, add_special_tokens=False)[0] for text in (SHORT, LONG))
    assert p[short] + p[long] > 0.95
    return float(p[short] / (p[short] + p[long]))


@torch.no_grad()
def first_value(policy: Policy, tokenizer) -> float:  # noqa: ANN001
    """V of the state before the reply, in units of reward."""
    prompt = torch.tensor([encode_prompt(ASK, tokenizer, max_length=64)])
    trunk = policy.value_trunk or policy.lm.base_model
    return float(policy.heads.v(trunk(input_ids=prompt).last_hidden_state[0, -1]) * policy.value_unit)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, object]:
    return learn(BC(), tmp_path_factory.mktemp("bc"))


def test_a_clone_says_both_equally_often(clone) -> None:  # noqa: ANN001
    assert chance_of_short(*clone) == HALF


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_neither_chances_nor_values_depend_on_length(method: Method, clone, tmp_path: Path) -> None:  # noqa: ANN001
    policy, tokenizer = learn(method, tmp_path, start=clone[0], config=STEPS.get(type(method), CONFIG))
    assert chance_of_short(policy, tokenizer) == HALF
    if method.heads.v:
        assert first_value(policy, tokenizer) == HALF


@pytest.mark.slow
def test_a_surprise_counts_its_share(clone, tmp_path: Path) -> None:  # noqa: ANN001
    """One reply of 64 earns 64, eight spreads of the returns: values are means, however rare what they are
    the means of."""
    method, config = ILQL(gamma=1.0, tau=0.5), replace(CONFIG, max_steps=300)
    policy, tokenizer = learn(method, tmp_path, start=clone[0], config=config, rewards=LOTTERY)
    assert chance_of_short(policy, tokenizer) == HALF
    assert first_value(policy, tokenizer) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_accumulated_updates_are_as_unbiased(tmp_path: Path) -> None:
    config = TrainerConfig(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=600,
        learning_rate=5e-3,
        report_to="none",
        logging_steps=600,
    )
    policy, tokenizer = learn(ILQL(gamma=1.0, tau=0.5), tmp_path, config=config)
    assert chance_of_short(policy, tokenizer) == HALF and first_value(policy, tokenizer) == HALF


def test_a_row_s_share_of_an_update_does_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    """The divisor is what an update has on average, 32 rows of (2 + 9) / 2 decisions, whichever were
    drawn."""
    tokenizer = train_tokenizer(["well yes no"] * 3, vocab_size=280)
    rows = rows_of(tokenizer)
    trainer = Trainer(Policy(load_lm(MODEL, tokenizer), BC(), MODEL), tokenizer, rows, [], CONFIG, tmp_path)
    assert trainer.terms_per_update == 32 * np.mean([row.assistant.sum() for row in rows])
    drawn = {
        sum(len(rows[i].input_ids) for part in trainer._micro_batches(step) for i in part)
        for step in range(4)
    }
    assert len(drawn) > 1  # updates hold different numbers of tokens
