"""The trainer with policies for control, in this process: what is sampled, what is learned, chance, and how a
run goes on."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("ray")

import torch

from envs.moving_dot import MovingDotVector
from rl_dialog.cluster.rllib import PolicyTrainer
from rl_dialog.models.control_policy import ControlPolicy, shape_of
from rl_dialog.training.policy_gradient import A2C, PG, PPO

SMALL = {"batch_size": 120, "minibatch_size": 40, "passes": 2}
POSITION = partial(MovingDotVector, observations="position", max_steps=80)  # 20 actions


def trainer(settings=None, make_envs=POSITION, policy=None, **more):
    torch.manual_seed(0)
    policy = policy or ControlPolicy(
        shape_of(
            make_envs(1), hidden=(512,) if len(make_envs(1).single_observation_space.shape) == 3 else (16,)
        )
    )
    return PolicyTrainer(
        policy, make_envs, settings or PPO(**SMALL), **{"workers": 0, "envs": 4, "renew_every": 0} | more
    )


def weights(each):
    return {name: value.clone() for name, value in each.policy().state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def replayed(trajectories, envs):
    """By environment: its trajectories in the order they were sampled."""
    return {i: [each for each in trajectories if each.env == i] for i in range(envs)}


def test_sampling_learns_nothing_and_tells_everything():
    """Trajectories of a frozen policy: played again with the same seed, they are what it does; pieces of an
    episode follow one another."""
    with trainer() as each:
        before = weights(each)
        found = each.sample() + each.sample()
        assert same(before, weights(each)) and each.steps == 0
        by_env = replayed(found, 4)
        each.train()
        assert not same(before, weights(each)) and each.steps == 120
    envs = POSITION(4, worker=1)
    seen, _ = envs.reset(seed=0)
    for i, pieces in by_env.items():
        pieces.sort(key=lambda piece: (int(piece.episode.rsplit("-", 1)[1]), piece.start))
        assert (
            np.array_equal(pieces[0].observations[0], seen[i])
            and sum(len(piece.actions) for piece in pieces) >= 56
        )
        for piece, following in zip(pieces, pieces[1:], strict=False):
            assert (
                len(piece.observations)
                == len(piece.actions) + 1
                == len(piece.log_probs) + 1
                == len(piece.rewards) + 1
            )
            if piece.truncated:
                assert (
                    piece.start + len(piece.actions) == 20
                    and following.start == 0
                    and following.episode != piece.episode
                )
            else:
                assert following.episode == piece.episode and following.start == piece.start + len(
                    piece.actions
                )
                assert np.array_equal(piece.observations[-1], following.observations[0])
        assert all((piece.worker, piece.terminated) == (0, False) for piece in pieces)
    actions = {i: np.concatenate([piece.actions for piece in pieces]) for i, pieces in by_env.items()}
    earned = {i: np.concatenate([piece.rewards for piece in pieces]) for i, pieces in by_env.items()}
    for i in range(4):
        envs, t = POSITION(4, worker=1), 0
        envs.reset(seed=0)
        while t < len(actions[i]):
            starting = envs.ended[i]
            _, rewards, _, _, _ = envs.step(np.full(4, actions[i][t]))
            if not starting:
                assert rewards[i] == earned[i][t]
                t += 1


@pytest.mark.slow
def test_a_learned_reward_never_sees_learned_ones():
    """Whatever it returns: what it is told are the environment's rewards, and the return that is reported is
    theirs."""
    told = []

    def reward(trajectories):
        told.append(trajectories)
        return [np.full(len(each.rewards), -100.0) for each in trajectories]

    with trainer(reward=reward) as each, trainer() as plain:
        found, wanted = [each.train() for _ in range(2)], [plain.train() for _ in range(2)]
        assert (
            found[0]["return"] == wanted[0]["return"]
            and found[0]["episodes"] == 4
            and found[0]["length"] == 20
        )
        assert not same(weights(each), weights(plain))
    assert (
        all(abs(each.rewards).max() <= 4 for trajectories in told for each in trajectories) and len(told) == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "nothing", [lambda trajectories: None, lambda trajectories: [each.rewards for each in trajectories]]
)
def test_a_reward_may_have_nothing_to_say_yet(nothing):
    with trainer(reward=nothing) as each, trainer() as plain:
        each.train(), plain.train()
        assert same(weights(each), weights(plain))


@pytest.mark.slow
def test_chance_is_the_seeds():
    def run(seed):
        with trainer(seed=seed) as each:
            return [each.train() for _ in range(3)], weights(each)

    (first, one), (again, two), (_, other) = run(5), run(5), run(6)
    assert first == again and same(one, two) and not same(one, other)


@pytest.mark.parametrize(
    "settings", [PPO(**SMALL, lr_zero_steps=1000), pytest.param(A2C(batch_size=20), marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_is_one_that_never_stopped(settings, tmp_path):
    """Four rounds, and two and two: the same weights, steps and learning rates. Episodes start anew every
    second round."""
    with trainer(settings, renew_every=2) as whole:
        expected = [whole.train() for _ in range(4)]
        wanted = weights(whole)
    with trainer(settings, renew_every=2) as half:
        half.train(), half.train()
        half.save(tmp_path / "trainer")
        half.policy().save_pretrained(tmp_path)
    with trainer(
        settings, policy=ControlPolicy.from_pretrained(tmp_path), first_round=2, renew_every=2
    ) as rest:
        rest.load(tmp_path / "trainer")
        found = [rest.train(), rest.train()]
        assert same(weights(rest), wanted) and found == expected[2:]
    assert {path.suffix for path in (tmp_path / "trainer").iterdir()} == {".json", ".safetensors"}


@pytest.mark.slow
def test_a_run_that_was_stopped_between_renewals_goes_on_from_the_next_one(tmp_path):
    """Gone on with at round 1 of every second, and again at round 2: as if the second stop had not been."""

    def went_on(source, rounds, first):
        policy = ControlPolicy.from_pretrained(source)
        with trainer(policy=policy, first_round=first, renew_every=2) as each:
            each.load(source / "trainer")
            return [each.train() for _ in range(rounds)], save(each, source / str(first))

    def save(each, folder):
        each.save(folder / "trainer")
        each.policy().save_pretrained(folder)
        return weights(each)

    with trainer(renew_every=2) as one:
        one.train()
        save(one, tmp_path)
    whole, wanted = went_on(tmp_path, 3, 1)
    began, _ = went_on(tmp_path, 1, 1)
    rest, found = went_on(tmp_path / "1", 2, 2)
    assert began + rest == whole and same(found, wanted)


def test_the_learning_rate_falls_to_zero_and_no_further():
    with trainer(PPO(**SMALL, learning_rate=7e-4, lr_zero_steps=240)) as each:
        rates = [each.train()["learning_rate"] for _ in range(2)]
        before = weights(each)
        last = each.train()["learning_rate"]
        moved = [
            name
            for name, value in weights(each).items()
            if not torch.equal(value, before[name]) and name not in ("value_mean", "value_std")
        ]
    assert rates[0] == pytest.approx(3.5e-4) and (rates[1], last) == (0.0, 0.0)
    assert all(
        name.startswith("value_network.4") or name.startswith("value_network.2") for name in moved
    )  # Pop-Art rescales the last layer


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PPO(**SMALL), PG(batch_size=120), A2C(batch_size=20)])
@pytest.mark.parametrize(
    "make_envs",
    [POSITION, partial(MovingDotVector, continuous=True), partial(MovingDotVector, observations="pixels")],
)
def test_every_kind_of_policy_is_updated(settings, make_envs):
    if len(make_envs(1).single_observation_space.shape) == 3:
        settings = type(settings)(
            **{
                **{name: getattr(settings, name) for name in settings.__dataclass_fields__},
                "batch_size": 16,
                "minibatch_size": 0,
            }
        )
    with trainer(settings, make_envs) as each:
        before, metrics = weights(each), each.train()
        moved = {name for name, value in weights(each).items() if not torch.equal(value, before[name])}
        assert {name.split(".")[0] for name in moved} >= {"policy"} and np.isfinite(
            list(metrics.values())
        ).all()
        assert metrics["entropy"] > 1 and (
            settings.baseline or not any(name.startswith("value_network") for name in moved)
        )


def test_it_learns():
    """The middle from anywhere, 20 actions: after 6,000 steps the return is over three times that of the
    first episodes."""
    with trainer(
        PPO(
            batch_size=600,
            minibatch_size=100,
            passes=4,
            learning_rate=3e-3,
            value_learning_rate=3e-3,
            gamma=0.9,
        ),
        envs=30,
    ) as each:
        returns = [each.train()["return"] for _ in range(10)]
    assert np.mean(returns[-3:]) > 3 * max(returns[0], 8), returns


@pytest.mark.gpu
def test_it_learns_on_an_accelerator():
    with trainer(PPO(**SMALL), device="cuda") as each:
        before = weights(each)
        assert np.isfinite(list(each.train().values())).all() and not same(before, weights(each))


@pytest.mark.slow
def test_two_workers_sample_learn_and_go_on(tmp_path):
    """With Ray: frozen sampling, trajectories of both workers, and a resumed run that is the uninterrupted
    one."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        shape = {"workers": 2, "envs": 2, "renew_every": 2}
        told = []
        settings = PPO(**SMALL, lr_zero_steps=1000)
        with trainer(settings, **shape, reward=lambda trajectories: told.extend(trajectories)) as whole:
            before = weights(whole)
            starts = whole.sample_starts(3, 7)
            assert {(each.worker, each.start, len(each.actions)) for each in starts} == {(1, 0, 3), (2, 0, 3)}
            assert len(starts) == 8
            found = whole.sample()
            assert (
                same(before, weights(whole))
                and whole.steps == 0
                and {each.worker for each in found} == {1, 2}
            )
            assert sum(len(each.actions) for each in found) >= 120 and not told
            expected, wanted = [whole.train() for _ in range(4)], weights(whole)
            assert {(each.worker, each.env) for each in told} == {(1, 0), (1, 1), (2, 0), (2, 1)}
            assert whole.steps == sum(len(each.actions) for each in told)
        with trainer(settings, **shape) as half:
            half.sample(), half.train()  # two rounds, after which episodes start anew
            half.save(tmp_path / "trainer")
            half.policy().save_pretrained(tmp_path)
        policy = ControlPolicy.from_pretrained(tmp_path)
        with trainer(settings, policy=policy, first_round=2, **shape) as rest:
            rest.load(tmp_path / "trainer")
            assert [rest.train() for _ in range(3)] == expected[1:] and same(weights(rest), wanted)
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_reward_that_nothing_confirms_does_not_move_the_policy():
    """Pace 0 keeps the policy and trains the values; pace 1 is as without."""
    with trainer() as paced, trainer() as free:
        before = weights(paced)
        paced.pace(0.0)
        paced.train()
        after = weights(paced)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved and all(name.startswith("value") for name in moved)
    with trainer() as paced, trainer() as free:
        paced.pace(1.0)
        paced.train(), free.train()
        assert same(weights(paced), weights(free))


@pytest.mark.slow
def test_beginnings_of_episodes_are_no_round():
    """Each its own episode, from its start on, the same again with the same seed; what is sampled after them
    starts anew and is what it would have been."""
    with trainer() as each, trainer() as other:
        found, again = each.sample_starts(5, 10), other.sample_starts(5, 10)
        assert len(found) == 12 and len({one.episode for one in found}) == 12  # of 4 environments
        assert all(one.start == 0 and len(one.actions) == 5 for one in found)
        assert len({one.observations[0].tobytes() for one in found}) > 6
        assert all(np.array_equal(a.actions, b.actions) for a, b in zip(found, again, strict=True))
        assert each.steps == each.round == 0
        after = each.sample()
        assert all(one.start == 0 for one in after if one.episode.endswith("-0"))
    with trainer() as plain:
        for one, two in zip(plain.sample(), after, strict=True):
            np.testing.assert_array_equal(one.actions, two.actions)
            assert one.episode == two.episode


def test_observations_are_taken_in_before_and_after_learning():
    """What was sampled before there was a reward, and each batch that was learned from; the sampling policy
    has the same statistics."""
    policy = ControlPolicy(shape_of(POSITION(1), normalise_observations=True))
    with trainer(policy=policy) as each:
        first = each.sample()
        each.observe(first)
        seen = np.concatenate([trajectory.observations[:-1] for trajectory in first])
        trunk = each.policy().trunk
        assert trunk.count == len(seen)
        np.testing.assert_allclose(trunk.mean, seen.mean(0), atol=1e-5)
        assert torch.equal(each.runner.module.network.trunk.mean, trunk.mean)
        each.train()
        assert each.policy().trunk.count > len(seen)
        assert torch.equal(each.runner.module.network.trunk.mean, each.policy().trunk.mean)
