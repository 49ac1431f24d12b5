"""Replies of six tokens, three turns, a transformer, and logs of players good and bad: trained policies
against what each method would answer if it learned perfectly."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rl_dialog.methods import BC, CQL, ILQL, SARSA, MCReturns, Method, Psi
from rl_dialog.models.policy import Policy
from tests.learning.exact_answers import exact_of, return_in_logs
from tests.learning.test_games import Trial
from tests.worlds.locks import Locks

SMALL = {"max_steps": 400}


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A world that no setting was chosen in, paid in thousands."""
    torch.set_num_threads(1)
    return Trial(partial(Locks, seed=1, scale=1000.0), tmp_path_factory.mktemp("locks"), episodes=400)


@pytest.fixture(scope="module")
def clone(locks: Trial) -> Policy:
    return locks.train(BC(), 0, max_steps=800)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        MCReturns(),
        pytest.param(SARSA(), marks=pytest.mark.long),  # ILQL with another tau
        ILQL(),
        CQL(),
        Psi(),
    ],
    ids=lambda method: type(method).__name__,
)
def test_most_of_the_way_to_what_the_method_itself_would_answer(
    method: Method, locks: Trial, clone: Policy
) -> None:
    policy = locks.train(method, 0, clone, **SMALL)
    cloned, learned = locks.returns(clone).mean(), locks.returns(policy).mean()
    answer = exact_of(policy.method, policy.value_unit, locks.table, locks.dialogs)
    exact = return_in_logs(answer, locks.table, locks.starts)
    print(type(method).__name__, "clone", cloned, "learned", learned, "exact", exact)
    assert exact > cloned + 500 and learned - cloned > 0.8 * (exact - cloned)
