"""The methods of 2019 reach known answers with 2019's model, a VHRED, in the real trainer.

The decision process is that of test_trainer.py, each message ended by token 4: four replies in two states,
equally often. Cloning is uniform; `then` is worth 0.75 on average and 4 at best.

    go      0: 1, the end    2: 0, the end    3: -1, the end    1: then
    then    0: -2            1: 4             2: 0              3: 1            and the end
"""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from rl_dialog.methods import BC, BCQ, DBCQ, ILQL, KLControl, Method, Psi, WayOffPolicy
from rl_dialog.models.hierarchical import HierarchicalLM
from rl_dialog.models.hierarchical_config import HierarchicalConfig
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.loop import Trainer, TrainerConfig

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

FIRST, SECOND = {0: 1.0, 2: 0.0, 3: -1.0}, {0: -2.0, 1: 4.0, 2: 0.0, 3: 1.0}
GO, THEN = [0, 4], [0, 4, 1, 4, 0, 4]
CLONE: list[HierarchicalLM] = []  # made once


@pytest.fixture
def train(make_row, tokenizer, tmp_path: Path):
    """train(method): the policy after 600 updates on all sixteen conversations, from a clone of them."""
    rows = [make_row([*GO, action], [(2, 2, reward)]) for action, reward in FIRST.items()] * 4
    rows += [make_row([*THEN, action], [(2, 2, 0.0), (6, 6, reward)]) for action, reward in SECOND.items()]

    def run(method: Method, lm: HierarchicalLM | None = None) -> Policy:
        if lm is None and not CLONE:
            CLONE.append(run(BC(), new_lm()).lm)
        lm = copy.deepcopy(CLONE[0]) if lm is None else lm
        prior = Prior([copy.deepcopy(lm).requires_grad_(False)]) if method.uses_prior else None
        torch.manual_seed(0)
        policy = Policy(lm, method, ModelConfig())
        settings = {"max_steps": 600, "learning_rate": 5e-3, "warmup_steps": 10, "report_to": "none"}
        config = TrainerConfig(per_device_train_batch_size=16, value_unit=1.0, logging_steps=600, **settings)
        trainer = Trainer(policy, tokenizer, rows, [], config, tmp_path / type(method).__name__, prior=prior)
        trainer.train()
        return policy.eval()

    return run


def new_lm() -> HierarchicalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 5, "hidden_size": 32, "message_end_ids": (4,), "dropout": 0.05}
    return HierarchicalLM(
        HierarchicalConfig(
            **shape, latent="message", latent_size=2, decoder_reads_context=True, initializer_range=0.2
        )
    )


@torch.no_grad()
def chances(policy: Policy, tokens: list[int], draws: int = 256) -> list[float]:
    """What is said when the reply's latent is drawn anew each time."""
    seeds = torch.arange(draws) + 100
    logits = policy(input_ids=torch.tensor([tokens] * draws), noise=seeds).logits[:, -1]
    return logits.softmax(-1).mean(0).tolist()


def test_cloning_copies_the_shares(train) -> None:  # noqa: ANN001
    policy = train(BC())
    for context in (GO, THEN):
        assert chances(policy, context) == pytest.approx([0.25] * 4 + [0.0], abs=0.03)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(partial(Psi, cql_weight=0.0), id="psi", marks=LONG),
        pytest.param(partial(WayOffPolicy, backup="psi"), id="published", marks=LONG),
    ],
)
def test_psi_learning_reaches_the_prior_times_the_exponential_of_the_reward(train, method) -> None:  # noqa: ANN001
    policy = train(method(c=2.0, gamma=1.0, alpha=0.1))
    later = [math.exp(reward / 2) for _, reward in sorted(SECOND.items())]
    first = [math.exp(FIRST[a] / 2) if a in FIRST else sum(later) / 4 for a in range(4)]
    for context, weights in ((GO, first), (THEN, later)):
        expected = [weight / sum(weights) for weight in weights]
        assert chances(policy, context)[:4] == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(KLControl(tau=0.98, c=0.25, gamma=1.0, alpha=0.1), id="kl_control"),
        pytest.param(WayOffPolicy(c=0.25, gamma=1.0, alpha=0.1, target_passes=5), id="published", marks=LONG),
        pytest.param(BCQ(beta=16.0, gamma=1.0, alpha=0.1), id="bcq", marks=LONG),
        pytest.param(DBCQ(samples=64, gamma=1.0, alpha=0.1), id="dbcq"),
        pytest.param(ILQL(tau=0.98, beta=16.0, gamma=1.0, alpha=0.1, cql_weight=0.0), id="ilql"),
    ],
)
def test_the_best_conversation_is_found(train, method: Method) -> None:  # noqa: ANN001
    policy = train(method)
    assert chances(policy, GO)[1] > 0.9 and chances(policy, THEN)[1] > 0.9
