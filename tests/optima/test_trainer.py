"""The real trainer with a real (tiny) transformer reaches known answers, as the tables of the other files
here do.

Four tokens; every one of them is tried in both states, equally often (a value that no data speaks about is
whatever the network makes of it):

    go      0: 1, the end    2: 0, the end    3: -1, the end    1: then
    then    0: -2            1: 4             2: 0              3: 1            and the end

Cloning is uniform. On average `then` is worth 0.75 < 1, so an average prefers 0 at first; the best
conversation is 1, 1.
"""

from __future__ import annotations

import math
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import encode_prompt, tokenize, train_tokenizer
from rl_dialog.methods import BC, BCQ, ILQL, KLControl, Method, Psi, WayOffPolicy
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.optima.tabular import PUBLISHED

FIRST, SECOND = {0: 1.0, 2: 0.0, 3: -1.0}, {0: -2.0, 1: 4.0, 2: 0.0, 3: 1.0}
GO, THEN = [0], [0, 1, 0]  # the user's tokens are 0 in both turns


def new_lm() -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=4, max_position_embeddings=8, initializer_range=0.2, **sizes)
    )


CLONE: list[Policy] = []  # made by the first test that starts from it; always the same, because seeds are


@pytest.fixture
def train(make_row, tokenizer, tmp_path: Path):
    """train(method, start): the policy after 600 updates on all sixteen conversations at once."""
    rows = [make_row([*GO, action], [(1, 1, reward)]) for action, reward in FIRST.items()] * 4
    rows += [make_row([*THEN, action], [(1, 1, 0.0), (3, 3, reward)]) for action, reward in SECOND.items()]

    def run(method: Method, start: Policy | None = None) -> Policy:
        torch.manual_seed(0)
        lm, prior = new_lm(), new_lm().eval().requires_grad_(False)
        for model in (lm, prior) if start else ():
            model.load_state_dict(start.lm.state_dict())
        config = TrainerConfig(
            per_device_train_batch_size=16,
            max_steps=600,
            learning_rate=5e-3,
            warmup_steps=10,
            report_to="none",
            value_unit=1.0,
        )
        policy = Policy(lm, method)
        Trainer(
            policy,
            tokenizer,
            rows,
            [],
            config,
            tempfile.mkdtemp(dir=tmp_path),
            prior=Prior([prior]) if method.uses_prior else None,
        ).train()
        return policy.eval()

    return run


def clone(train) -> Policy:
    """The cloned policy that others start from."""
    if not CLONE:
        CLONE.append(train(BC()))
    return CLONE[0]


@torch.no_grad()
def chances(policy: Policy, tokens: list[int]) -> list[float]:
    return policy(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(-1).tolist()


def test_cloning_copies_the_shares(train) -> None:
    policy = clone(train)
    assert chances(policy, GO) == pytest.approx([0.25] * 4, abs=0.02)
    assert chances(policy, THEN) == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize("c", [1.0, pytest.param(4.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method",
    [partial(Psi, cql_weight=0.0), pytest.param(partial(WayOffPolicy, backup="psi"), marks=pytest.mark.slow)],
    ids=["heads", "published"],
)
def test_psi_learning_reaches_the_prior_times_the_exponential_of_the_reward(train, method, c: float) -> None:  # noqa: ANN001
    """The optimum of reward / c - KL over whole conversations: pi = p exp(R/c) / Z, with values in heads and
    with the logits as values."""
    policy = train(method(c=c, gamma=1.0, alpha=0.1), clone(train))
    later = [math.exp(reward / c) for _, reward in sorted(SECOND.items())]
    first = [math.exp(FIRST[a] / c) if a in FIRST else sum(later) / 4 for a in range(4)]
    assert chances(policy, GO) == pytest.approx([weight / sum(first) for weight in first], abs=0.03)
    assert chances(policy, THEN) == pytest.approx([weight / sum(later) for weight in later], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("method", [partial(KLControl, tau=0.98), WayOffPolicy], ids=["heads", "published"])
def test_kl_control_with_a_weak_prior_takes_the_best_conversation(train, method) -> None:  # noqa: ANN001
    policy = train(method(c=0.25, gamma=1.0, alpha=0.1), clone(train))
    assert chances(policy, GO)[1] > 0.9 and chances(policy, THEN)[1] > 0.9


@pytest.mark.parametrize(("tau", "first"), [(0.98, 1), pytest.param(0.5, 0, marks=pytest.mark.slow)])
def test_ilql_looks_through_the_second_choice_and_an_average_does_not(train, tau: float, first: int) -> None:
    policy = train(ILQL(tau=tau, beta=16.0, gamma=1.0, alpha=0.1, cql_weight=0.0), clone(train))
    assert chances(policy, GO)[first] > 0.9 and chances(policy, THEN)[1] > 0.9


@pytest.mark.slow
def test_on_text_only_the_support_keeps_q_learning_from_words_that_nobody_said(tmp_path: Path) -> None:
    """Every reply costs, so states from which nobody went on with some word look better than they are: plain
    double Q-learning chooses wrong.

    The assistant says A and pays 4, or B and then C (2) or D (6); B then C is best, five of six chose D. BCQ
    keeps to what the logs make likely.
    """
    letters = train_tokenizer(["go then? A B C D"] * 3, vocab_size=270)
    go, then = {"role": "user", "content": "go"}, {"role": "user", "content": "then?"}

    def says(text: str, reward: float = 0.0) -> dict:
        return {"role": "assistant", "content": text, "reward": reward}

    dialogs = (
        [[go, says("A", -4.0)]] * 5
        + [[go, says("B"), then, says("C", -2.0)]]
        + [[go, says("B"), then, says("D", -6.0)]] * 5
    )
    rows = [row for i, messages in enumerate(dialogs) for row in tokenize(Dialog(str(i), messages), letters)]
    config = TrainerConfig(
        per_device_train_batch_size=11,
        max_steps=600,
        learning_rate=5e-3,
        warmup_steps=10,
        report_to="none",
        value_unit=1.0,
    )
    shape = ModelConfig(
        family="llama", layers=1, width=32, attention_heads=2, context=32, heads="mlp", value_trunk="shared"
    )
    chosen = {}
    for threshold in (0.05, 0.0):
        torch.manual_seed(0)
        policy = Policy(
            load_lm(shape, letters),
            BCQ(**PUBLISHED, threshold=threshold, beta=8.0, gamma=1.0, alpha=0.1, include_logits=False),
            shape,
        )
        Trainer(policy, letters, rows, [], config, tmp_path / str(threshold)).train()
        for name, messages in (("first", [go]), ("second", [go, says("B"), then])):
            p = chances(policy.eval(), encode_prompt(messages, letters, max_length=32))
            chosen[threshold, name] = {letter: p[letters.convert_tokens_to_ids(letter)] for letter in "ABCD"}
    assert chosen[0.05, "first"]["B"] > 0.9 and chosen[0.05, "second"]["C"] > 0.9
    assert chosen[0.0, "second"]["C"] < 0.5
