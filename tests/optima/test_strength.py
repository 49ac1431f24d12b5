"""How far to lean on values, where nobody says how far: as far in conversations of a hundred replies as in
those of three, whatever unit rewards are in."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.toy import DoubleT
from rl_dialog.data.schema import read_jsonl
from rl_dialog.methods import AWAC, BCQ, CQL, DBCQ, ILQL, KLControl, Method, Psi, UtteranceILQL
from rl_dialog.methods.method import STRENGTH
from rl_dialog.models.checkpoint import read_method
from rl_dialog.models.policy import Policy
from rl_dialog.training.learned_rows import replies_to_go
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.learning.exact_answers import expectile_at, mean, soft_at, tilted
from tests.optima.test_trainer import new_lm

EARNED = (1.0, -2.0, 4.0)  # one conversation; another has the last reply alone
TO_GO = np.array([3.0, 2.0, 4.0, 4.0])
FAR = STRENGTH * math.sqrt((3 + 2 + 1 + 1) / 4)


@pytest.fixture
def rows(make_row):
    ends = [(2 * i + 1, 2 * i + 1, reward) for i, reward in enumerate(EARNED)]
    return [make_row([0, 1, 0, 2, 0, 3], ends), make_row([0, 3], [(1, 1, 4.0)])]


def test_the_replies_that_follow_are_counted(rows, make_row) -> None:
    assert replies_to_go(rows) == 7 / 4
    some = make_row([0, 1, 0, 2, 0, 3, 0, 1], [(1, 1, 1.0), (3, 3, math.nan), (5, 5, 2.0), (7, 7, math.nan)])
    assert replies_to_go([some]) == (2 + 1 + 1) / 3  # unrated ones earn nothing, and nothing follows the last
    cut = replace(make_row([0, 1], [(1, 1, 1.0)]), later_rewards=np.ones(2, np.float32))
    assert replies_to_go([cut]) == 3
    assert replies_to_go([make_row([0, 1], [(1, 1, math.nan)])]) == 1


@pytest.mark.parametrize(
    ("method", "name", "suits"),
    [
        (ILQL(), "beta", FAR),
        (CQL(), "beta", FAR),
        (AWAC(), "awac_beta", FAR / 2),
        (AWAC(), "beta", 0.0),
        (BCQ(), "beta", FAR / 2),
        (DBCQ(), "beta", None),
        (Psi(), "c", 1 / FAR),
        (KLControl(), "c", 1 / FAR),
        (UtteranceILQL(), "rerank_log_prob_weight", 1 / FAR),
        (ILQL(beta=3.0), "beta", 3.0),
        (ILQL(awac_beta=1.0), "awac_beta", 1.0),
        (Psi(c=0.5), "c", 0.5),
        (BCQ(beta=0.0), "beta", 0.0),
        (UtteranceILQL(rerank_log_prob_weight=0.0), "rerank_log_prob_weight", 0.0),
    ],
)
def test_training_says_how_far(
    rows, tokenizer, tmp_path: Path, method: Method, name: str, suits: float | None
) -> None:
    """And the checkpoint keeps it; in units of reward it is the same with values in any unit."""

    def trained(**settings) -> tuple[Policy, dict]:
        torch.manual_seed(0)
        config = TrainerConfig(max_steps=1, warmup_steps=0, report_to="none", **settings)
        policy = Policy(new_lm(), method)
        return policy, Trainer(policy, tokenizer, rows, [], config, tmp_path).train()

    policy, said = trained()
    assert getattr(policy.method, name) == (suits if suits is None else pytest.approx(suits))
    assert getattr(read_method(tmp_path / "checkpoint-1"), name) == getattr(policy.method, name)
    if f"{name}_in_rewards" in said and getattr(method, name) is None:
        spread = TO_GO.std()
        in_rewards = suits * spread if name == "c" else suits / spread
        assert said[f"{name}_in_rewards"] == pytest.approx(in_rewards)
        assert getattr(trained(value_unit=1.0)[0].method, name) == pytest.approx(in_rewards)


def test_before_training_it_is_that_of_single_replies() -> None:
    assert ILQL().in_rewards(2.0) == {"beta": STRENGTH / 2} and Psi().in_rewards(2.0) == {"c": 2 / STRENGTH}


@pytest.mark.parametrize(
    "backup", [mean, expectile_at(0.7), soft_at(2.9)], ids=["mc", "ilql", "psi"]
)  # psi learns V with a tenth of the spread at least
def test_exact_answers_in_a_long_maze(backup, tmp_path: Path) -> None:
    """LMRL's maze, where a step costs 1 and the logs return -77: what mc, ilql and psi would answer if they
    learned their logs perfectly. Leaning 8 spreads of returns, as suits games of three moves, gives -17."""
    DoubleT.write_logs(tmp_path / "maze.jsonl", dialogs=400, seed=1)
    table, starts, to_go = defaultdict(lambda: defaultdict(Counter)), [], []
    for dialog in read_jsonl(tmp_path / "maze.jsonl"):
        said = [dialog.messages[i - 1]["content"] for i in dialog.replies]
        after = dialog.messages[-1]["content"] if dialog.truncated else None
        for i, state, following in zip(dialog.replies, said, [*said[1:], after], strict=True):
            table[state][dialog.messages[i]["content"]][following] += 1
        starts.append(said[0])
        to_go += range(len(said), 0, -1)  # a step costs 1, so these are the returns too
    act = tilted(STRENGTH * math.sqrt(np.mean(to_go)) / np.std(to_go))
    values, earned = {None: 0.0}, {None: 0.0}

    def worth(ends: Counter, rate: float, of: dict) -> float:
        return -1 + rate * sum(n * of.get(end, 0.0) for end, n in ends.items()) / ends.total()

    for _ in range(400):
        for state, replies in table.items():
            total = sum(ends.total() for ends in replies.values())
            p = {move: ends.total() / total for move, ends in replies.items()}
            q = {move: worth(ends, 0.99, values) for move, ends in replies.items()}
            values[state], policy = backup(p, q), act(p, q)
            earned[state] = sum(policy[move] * worth(ends, 1.0, earned) for move, ends in replies.items())
    assert np.mean([earned[state] for state in starts]) > -10
