"""The parts of the CartPole check by hand: targets, priors, logs, true values, and that the seed reaches
everything."""

from __future__ import annotations

import json

import pytest
import torch

from envs.cart_pole import LIMIT
from pipelines.benchmark import cartpole_logs
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.cartpole import experiment, interval, table
from pipelines.benchmark.cartpole_causes import balancing, causes, true_values
from pipelines.benchmark.cartpole_learners import (
    GAMMA,
    Q_LEARNING,
    WOP,
    Added,
    Learner,
    Networks,
    Transitions,
    best_of,
    learn,
    log_probability,
    sampled,
    uniform,
    variational,
)
from pipelines.benchmark.cartpole_logs import record, returns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.errors import UserError
from rl_dialog.methods import BC
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense


def steps_of(*terminated: bool) -> Transitions:
    """One log of made-up steps whose actions are 0, 1, 0, ..."""
    count = len(terminated)
    ended = torch.tensor([terminated])
    return Transitions(
        torch.randn(1, count, 4),
        torch.arange(count)[None] % 2,
        torch.randn(1, count, 4),
        ended,
        ended.clone(),
    )


def test_without_a_prior_term_the_target_is_plain_q_learning():
    """y = 1 + .95 max(3, 5) = 5.75 and, after a fall, 1. Q of the actions 0 and 1 is 5 and 4: Huber(-.75) +
    Huber(3) = .28125 + 2.5."""
    batch, _, _ = steps_of(False, True).batch(torch.tensor([[0, 1]]), torch.tensor([[-0.1, -7.0]]))
    online, target = (
        torch.tensor([[5.0, 9.0], [9.0, 4.0], [0.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 5.0], [8.0, 8.0]]),
    )
    loss = Q_LEARNING.loss(Outputs(Dense(online), lm_target=(Dense(target),)), batch)
    assert pytest.approx(0.95) == GAMMA
    assert loss.total.item() == pytest.approx(0.28125 + 2.5)


def test_the_best_of_two_draws():
    """p = (.2, .3, .5), Q = (3, 1, 2): 1 needs both draws, .09; 2 needs both in {1, 2} and one 2, .64 - .09;
    0 needs one draw, 1 - .64."""
    prior, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([3.0, 1.0, 2.0])
    assert best_of(prior, q, 2).tolist() == pytest.approx([0.36, 0.09, 0.55])
    assert best_of(prior, q, 1).tolist() == pytest.approx(prior.tolist())
    assert best_of(prior[None], -q[None], 200)[0].tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_networks_that_learn_side_by_side_do_not_meet():
    """The second of two networks learns the same alone."""
    logs = Transitions.stack([steps_of(*[False] * 7, True), steps_of(*[False] * 7, True)])
    both, alone = Networks(2), Networks(1)
    for one, two in zip(alone.parameters(), both.parameters(), strict=True):
        one.data.copy_(two.data[1:])
    own = Transitions(
        logs.observations[1:], logs.actions[1:], logs.following[1:], logs.terminated[1:], logs.ended[1:]
    )
    before, logp = both.weights[0].clone(), torch.rand(2, 8).log()
    pair, single = Learner(WOP, both), Learner(WOP, alone)
    columns = torch.randint(0, 8, (20, 2, 4))
    for drawn in columns:
        pair.update(logs, drawn, progress=0.0, prior_logp=logp)
        single.update(own, drawn[1:], progress=0.0, prior_logp=logp[1:])
    assert not torch.equal(both.weights[0], before)
    for one, two in zip(alone.parameters(), both.parameters(), strict=True):
        torch.testing.assert_close(one, two[1:])


def test_several_target_passes_differ():
    """Monte-Carlo targets come from real dropout: its masks differ between passes and not between the samples
    of one."""
    networks = Networks(1, dropout=0.5).train()
    observation = torch.randn(1, 1, 4).expand(1, 3, 4)
    first, second = networks(observation), networks(observation)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(first[:, 0], first[:, 1])


def test_logs_hold_every_step_once_and_know_falls_from_time_limits():
    """Random actions fall within some tens of steps; a step that only resets the environment is not
    recorded."""
    logs = record(lambda observations: torch.randint(0, 2, (len(observations),)), 3, 300, seed=0)
    follows = ~logs.ended[:, :-1]
    assert torch.equal(logs.following[:, :-1][follows], logs.observations[:, 1:][follows])
    assert logs.observations[:, 1:][~follows].abs().max() <= 0.05
    assert torch.equal(logs.terminated, logs.ended) and logs.ended.any(1).all()
    angle, position = logs.following[logs.terminated][:, 2].abs(), logs.following[logs.terminated][:, 0].abs()
    assert ((angle > 0.2094) | (position > 2.4)).all()

    def balance(observations):  # falls towards where the pole leans and turns
        return (
            (
                observations[:, 2]
                + 0.3 * observations[:, 3]
                + 0.02 * observations[:, 0]
                + 0.05 * observations[:, 1]
            )
            > 0
        ).long()

    upright = record(balance, 2, 2 * LIMIT, seed=0)
    assert (
        upright.ended.nonzero()[:, 1].tolist() == [LIMIT - 1, 2 * LIMIT - 1] * 2
        and not upright.terminated.any()
    )
    assert upright.mean_return().tolist() == [LIMIT, LIMIT]


def test_cloning_brings_the_teacher_back():
    """BC on a balancing rule balances, and its mean return is measured per network."""
    rule = torch.tensor([0.02, 0.05, 1.0, 0.3])
    torch.manual_seed(0)
    logs = record(
        lambda observations: torch.where(
            torch.rand(2) < 0.1, torch.randint(0, 2, (2,)), (observations @ rule > 0).long()
        ),
        2,
        1000,
        seed=0,
    )
    networks = Networks(2)
    before = returns(sampled(networks), 2, seed=1, episodes=10)
    learner = Learner(BC(), networks)
    for _ in range(400):
        learner.update(logs, torch.randint(0, 1000, (2, 32)), progress=0.0)
    assert (returns(sampled(networks), 2, seed=1, episodes=10) > before + 50).all()


@pytest.mark.slow
def test_the_vae_finds_known_probabilities():
    """Two states, in which action 1 was taken in 20 % and in 90 %; two networks side by side, the second with
    the states the other way round."""
    states = torch.tensor([[0.0, 0.0, -0.1, 0.0], [0.0, 0.0, 0.1, 0.0]])
    which = torch.arange(1000) % 2
    often = torch.where(which == 0, 0.2, 0.9)
    actions = (torch.arange(1000) // 2 % 10 < 10 * often - 0.5).long()
    logs = Transitions.stack([steps_of(*[False] * 1000)] * 2)
    logs.observations, logs.actions = states[torch.stack([which, 1 - which])], actions.expand(2, -1)
    draws = torch.Generator().manual_seed(0)
    prior = variational(
        logs, lambda step: torch.randint(0, 1000, (2, 64), generator=draws), steps=800, seed=0
    )
    with torch.no_grad():
        found = prior(states.expand(2, -1, -1))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2))
    torch.testing.assert_close(found[..., 1], torch.tensor([[0.2, 0.9], [0.9, 0.2]]), atol=0.06, rtol=0)
    logp = log_probability(prior, logs)
    assert logp.shape == (2, 1000) and -logp.mean().item() == pytest.approx(
        (0.5004 + 0.3251) / 2, abs=0.02
    )  # the entropies of 20 % and 90 %


def test_what_is_added_to_a_clone_starts_at_its_log_probabilities():
    clone, observations = Networks(2), torch.randn(2, 5, 4)
    added = Added(clone).eval()
    torch.testing.assert_close(added(observations), clone(observations).log_softmax(-1))
    logs = Transitions.stack([steps_of(*[False] * 8)] * 2)
    learned = learn(
        WOP,
        logs,
        lambda step: torch.arange(8).expand(2, -1),
        steps=2,
        seed=0,
        prior_logp=torch.zeros(2, 8),
        above=clone,
    )
    assert torch.equal(learned.clone.weights[0], clone.weights[0]), "the clone learned"
    assert not torch.allclose(learned(observations), added(observations))


def test_true_values_are_rolled_out():
    """Upright, either action is made good: 1 + g + ... + g^199. A pole at 0.2 that falls at speed 3 has its
    last step now, whatever is done."""
    states = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.2, 3.0], [0.0, 0.0, 0.15, 1.0]]])
    found = true_values(balancing, states)
    assert found[0, 0].tolist() == pytest.approx([(1 - GAMMA**LIMIT) / (1 - GAMMA)] * 2)
    assert found[0, 1].tolist() == [1.0, 1.0]
    assert found[0, 2, 1] > found[0, 2, 0], "it leans to the right, so a push to the left is the worse one"
    assert returns(balancing, 1, seed=0, episodes=20).tolist() == [LIMIT]


def test_causes_count_what_is_right():
    """Where a choice matters, the rule that never falls is right, its opposite is wrong, and a uniform prior
    has no opinion."""
    torch.manual_seed(0)
    logs = record(lambda observations: torch.randint(0, 2, (len(observations),)), 2, 300, seed=0)
    rule, opposite = Networks(2), Networks(2)
    for networks, sign in ((rule, 1.0), (opposite, -1.0)):
        networks.forward = lambda observations, sign=sign: sign * balancing(observations)
    found = causes(logs, {"uniform": uniform}, {"rule": rule, "opposite": opposite}, seed=0)
    share = {name: interval(pairs).value for name, pairs in found.items()}
    assert share["% of states: the choice matters"] > 5
    assert share["% right there: rule"] > 95
    assert share["% right there: opposite"] == pytest.approx(100 - share["% right there: rule"])
    assert not any("uniform" in name for name in share)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTH": 200, "WINDOW": 50, "EPISODES": 3}.items():
        monkeypatch.setattr(cartpole_logs, name, value)
    monkeypatch.setattr("pipelines.benchmark.cartpole.PRIOR_STEPS", 5)
    monkeypatch.setattr("pipelines.benchmark.cartpole_causes.PROBED", 50)


@pytest.mark.slow
def test_the_command(small, tmp_path, capsys):
    """Both tables, the figures, the plot; the same seed draws the same and another seed other logs, priors
    and networks."""
    settings = {"what": "cartpole", "seeds": 2, "steps": 3}
    found = main(BenchmarkConfig(**settings, output_dir=str(tmp_path)))
    report, printed = json.loads((tmp_path / "benchmark.json").read_text()), capsys.readouterr().out
    assert (
        found["plot"] == str(tmp_path / "cartpole.svg") and "<svg" in (tmp_path / "cartpole.svg").read_text()
    )
    for name, values in report["returns"]["expert"].items():
        assert f"| {name} |" in printed and len(values) == 2
    assert {"p, vae", "DBCQ, clone", "WOP, uniform", "WOP, from the clone, best action"} <= set(
        report["returns"]["full"]
    )
    assert "% right there: DBCQ's Q" in report["causes"]["noisy"]
    again, other = (experiment(2, 3, seed=seed, variants=False).returns for seed in (0, 1))
    for buffer in again:
        assert {name: report["returns"][buffer][name] for name in again[buffer]} == again[buffer]
    differs = [
        name
        for name in again["noisy"]
        if name != "behaviour" and again["noisy"][name] != other["noisy"][name]
    ]
    assert (
        again["full"]["behaviour"] != other["full"]["behaviour"]
        and again["noisy"]["behaviour"] != other["noisy"]["behaviour"]
        and differs
    )


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"steps": 0}, {"priors": ()}, {"seed": -1}])
def test_numbers_that_no_experiment_has(wrong):
    with pytest.raises(UserError, match="cartpole: expected seeds"):
        main(BenchmarkConfig(what="cartpole", **wrong))


def test_figures_of_a_table():
    """A mean over seeds, a ratio of sums, nothing where there is nothing to divide by."""
    lines = table(
        {"full": {"a": [1.0, 3.0], "b": [(1.0, 2.0), (1.0, 0.0)], "c": [(0.0, 0.0)] * 2, "d": [5.0, 5.0]}}
    ).splitlines()
    assert (
        lines[2].startswith("| a | 2 [")
        and lines[3].startswith("| b | 1")
        and lines[4] == "| c |  |"
        and lines[5] == "| d | 5 |"
    )
