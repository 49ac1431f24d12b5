"""RLlib's parts as we use them, in this process and by hand arithmetic; and that a policy learns, stops, and
goes on."""

from functools import partial

import numpy as np
import pytest

from rl_dialog.errors import UserError

pytest.importorskip("ray")

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData

from envs.multiwoz import MultiWOZVector, Options
from envs.multiwoz.rollout import Player
from pipelines.task_agents import shape_of
from rl_dialog.cluster.env_runner import VectorEnvRunner
from rl_dialog.cluster.learner import ActDistribution
from rl_dialog.cluster.rllib import algorithm_config, metrics_of, steps_sampled
from rl_dialog.models.act_policy import ActPolicy, MaskedBernoulli
from rl_dialog.training.policy_gradient import APPO, PG, PPO

ENVS = 4


@pytest.fixture(scope="module")
def world():
    return Player("", Options()).simulator.world


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return ActPolicy(shape_of(Player("", Options()).simulator))


def parts(policy, world, settings, reward=None, **run):
    """An env runner and a learner in this process; no Ray is started."""
    run = {
        "make_envs": partial(MultiWOZVector, world=world),
        "seed": 0,
        "first_round": 0,
        "renew_every": 1,
    } | run
    config = algorithm_config(policy, run, settings)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS)
    config.validate()
    runner = VectorEnvRunner(config=config, worker_index=0)
    learner = config.build_learner(env=runner.env.unwrapped)
    if reward:
        learner.learn_from(reward)
    return runner, learner


def update(learner, episodes):
    data = TrainingData(episodes=episodes)
    steps = {"num_env_steps_sampled_lifetime": sum(map(len, episodes))}
    learner.update(training_data=data, timesteps=steps)


def network(learner):
    return learner.module[DEFAULT_MODULE_ID].unwrapped().network


def test_the_distribution_is_ours():
    logits = torch.tensor([[0.3, -0.2, 5.0]])
    found, ours, bits = (
        ActDistribution.from_logits(logits),
        MaskedBernoulli(logits),
        torch.tensor([[1, 0, 1]]),
    )
    assert torch.equal(found.logp(bits), ours.log_prob(bits)) and torch.equal(found.entropy(), ours.entropy())
    assert found.to_deterministic().sample().tolist() == [[1, 0, 1]] and found.kl(found).item() == 0


def test_what_is_stored_is_what_was_sampled(policy, world):
    """log pi(a|s) recomputed from stored states, masks and bits is the behaviour's, and no stored bit was
    masked."""
    runner, _ = parts(policy, world, PPO())
    episodes = runner.sample(num_timesteps=40)
    assert sum(map(len, episodes)) >= 40
    for episode in episodes:
        seen, n = episode.get_observations(slice(0, len(episode))), len(episode)
        bits, masks = (
            torch.from_numpy(np.asarray(episode.get_actions(slice(0, n)))),
            torch.from_numpy(seen["action_mask"]),
        )
        found = MaskedBernoulli(policy.logits(torch.from_numpy(seen["obs"]), masks)).log_prob(bits)
        stored = episode.get_extra_model_outputs(Columns.ACTION_LOGP, slice(0, n))
        np.testing.assert_allclose(
            found.detach().numpy(), stored, atol=1e-4
        )  # sums of 170 logarithms in float32
        assert bits.sum() > 0 and not (bits.bool() & ~masks.bool()).any()


@pytest.mark.slow
def test_a_round_can_be_repeated_and_another_is_different(policy, world):
    def acts(first_round):
        runner, _ = parts(policy, world, PPO(), first_round=first_round)
        return [np.asarray(e.get_actions(slice(0, len(e)))).tolist() for e in runner.sample(num_timesteps=30)]

    assert acts(3) == acts(3) != acts(4)
    runner, _ = parts(policy, world, PPO(), first_round=2)
    runner.sample(num_timesteps=30)
    assert [
        np.asarray(e.get_actions(slice(0, len(e)))).tolist() for e in runner.sample(num_timesteps=30)
    ] == acts(3)


@pytest.mark.parametrize(
    "settings",
    [
        PPO(batch_size=64, minibatch_size=16),
        PG(batch_size=64),
        PPO(batch_size=64, minibatch_size=0, passes=1),
    ],
)
def test_an_update_moves_the_policy(settings, policy, world):
    runner, learner = parts(policy, world, settings)
    update(learner, runner.sample(num_timesteps=64))
    moved = {
        name: not torch.equal(value, policy.state_dict()[name])
        for name, value in network(learner).state_dict().items()
    }
    assert all(on for name, on in moved.items() if name.startswith("policy."))
    assert all(on == settings.baseline for name, on in moved.items() if name.startswith("value_network."))


def test_learned_rewards_replace_the_environments(policy, world):
    """The reward function sees states, acts and the environment's rewards; what it returns is what the
    learner goes on with."""
    told, settings = [], PPO(batch_size=32, minibatch_size=16)

    def reward(trajectories):
        told.extend(trajectories)
        return [np.full(len(each.actions), 7.0) for each in trajectories]

    runner, learner = parts(policy, world, settings, reward)
    episodes = runner.sample(num_timesteps=32)
    before, sizes = (
        [np.asarray(each.get_rewards()).tolist() for each in episodes],
        [len(each) for each in episodes],
    )
    update(learner, episodes)
    assert [len(each.actions) for each in told] == sizes and [
        each.rewards.tolist() for each in told
    ] == before
    assert all(
        len(each.observations) == len(each.actions) + 1 and len(each.log_probs) == len(each.actions)
        for each in told
    )
    assert all(
        np.asarray(each.get_rewards(slice(0, n))).tolist() == [7.0] * n
        for each, n in zip(episodes, sizes, strict=True)
    )


def test_a_reward_of_the_wrong_length_is_refused(policy, world):
    runner, learner = parts(policy, world, PPO(), lambda trajectories: [np.zeros(500) for _ in trajectories])
    with pytest.raises(
        UserError, match=r"expected (\d+) rewards for an episode of \1 steps, got the shape \(500,\)"
    ):
        update(learner, runner.sample(num_timesteps=8))


@pytest.mark.parametrize("sampled", [{}, {"num_env_steps_sampled": float("nan")}])
def test_a_round_in_which_all_env_runners_died_has_no_steps(sampled):
    """RLlib returns it as a round like others."""
    result = {"env_runners": sampled, "learners": {}}
    assert steps_sampled(result) == 0 == metrics_of(result)["episodes"]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(PPO, {"batch_size": 0}), (PPO, {"minibatch_size": 5000}), (APPO, {"gamma": 1.5}), (PG, {"clip": 0.0})],
)
def test_bad_settings_are_refused(kind, wrong):
    with pytest.raises(UserError, match="expected"):
        kind(**wrong)
