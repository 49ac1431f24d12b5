"""MovingDot's rules and known answers, and that a vector of dots is many single ones."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from PIL import Image

from envs.moving_dot import (
    DIRECTIONS,
    MIDDLE,
    MovingDot,
    MovingDotVector,
    directions,
    path,
    picture,
    small_pictures,
    step_rewards,
)
from rl_dialog.errors import UserError

NOOP, DOWN, RIGHT, UP, LEFT = range(5)


def at(x, y, **options):
    env = MovingDot(**options)
    env.reset(seed=0)
    env.position = np.array([x, y])
    return env


@pytest.mark.parametrize(
    ("place", "action", "after", "reward"),
    [
        ((80, 105), RIGHT, (81, 105), -1),
        ((2, 2), LEFT, (2, 2), 0),
        ((0, 0), NOOP, (2, 2), 1),
        ((80, 105), NOOP, (80, 105), 0),
        ((10, 10), DOWN, (10, 11), 1),
        ((10, 10), UP, (10, 9), -1),
        ((157, 207), DOWN, (157, 207), 0),
    ],
)
def test_a_step(place, action, after, reward):
    env = at(*place)
    _, found, terminated, truncated, _ = env.step(action)
    assert (tuple(env.position), found, terminated, truncated) == (after, reward, False, False)


def test_an_episode_is_1000_steps_and_greedy_earns_the_distance():
    """|2 - 80| + |2 - 105| = 181: every step to the middle earns 1, and waiting there 0."""
    env = at(2, 2)
    rewards, ends = [], []
    for _ in range(1000):
        dx, dy = MIDDLE - env.position
        action = RIGHT if dx else DOWN if dy else NOOP
        _, reward, _, truncated, _ = env.step(action)
        rewards.append(reward)
        ends.append(truncated)
    assert sum(rewards) == 181 and ends == [False] * 999 + [True]


def test_pictures():
    """A block of 4 x 4 is 16 * 255 of each channel; a start with x or y below 2 cannot be seen, as
    published."""
    assert (picture((80, 105)).sum((0, 1)) == 16 * 255).all()
    assert picture((80, 105))[103:107, 78:82].min() == 255
    assert not picture((1, 50)).any() and not picture((50, 0)).any()


def test_the_odd_start_can_be_mended():
    assert MovingDot(random_start=False).reset()[0].sum() == 0
    env = MovingDot(random_start=False, clipped_start=True)
    assert env.reset()[0].sum() == 3 * 16 * 255 and env.step(NOOP)[1] == 0


def test_continuous_actions():
    """At least 0.1 goes forward, anything else back, along both axes; a dead zone is ours."""
    actions = np.array([[0.1, 0.05], [-1, 1], [0, -0.5]], np.float32)
    assert directions(actions).tolist() == [[1, -1], [-1, 1], [-1, -1]]
    assert directions(actions, dead_zone=True).tolist() == [[1, 0], [-1, 1], [0, -1]]
    env = at(80, 105, continuous=True)
    assert env.step(np.zeros(2, np.float32))[1] == -1 and tuple(env.position) == (79, 104)


def test_gymnasium_accepts_it():
    check_env(MovingDot(), skip_render_check=True)
    with pytest.raises(UserError, match="expected an action of Discrete"):
        at(5, 5).step(7)


@pytest.mark.parametrize("continuous", [False, True])
def test_a_vector_is_what_wrapped_single_dots_would_be(continuous):
    """Skip 4 with the maximum over the last two pictures, sign of the sum, waiting, end: step by step with
    MovingDot, and with Pillow's shrinking."""
    envs = MovingDotVector(3, "pixels", continuous=continuous)
    seen, _ = envs.reset(seed=5)
    singles = [at(*place, continuous=continuous) for place in envs.positions]
    for each, steps in zip(singles, envs.steps, strict=True):
        each.steps = steps
    rng, lengths = np.random.default_rng(0), np.zeros(3, int)
    for t in range(250):
        actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32) if continuous else rng.integers(0, 5, 3)
        seen, rewards, terminated, truncated, _ = envs.step(actions)
        assert not terminated.any()
        for i, single in enumerate(singles):
            if single.steps >= 1000:
                continue
            lengths[i] += 1
            total, pictures = 0.0, []
            for _ in range(4):
                image, reward, _, end, _ = single.step(actions[i])
                total, pictures = total + reward, [*pictures, image]
                if end:
                    break
            assert (rewards[i], truncated[i]) == (np.sign(total), end) and (
                envs.positions[i] == single.position
            ).all()
            if t % 10 == 0:
                grey = np.max(pictures[-2:], axis=0)[..., 0]
                wanted = np.asarray(Image.fromarray(grey).resize((84, 84), Image.BILINEAR))
                assert np.abs(seen[i, ..., -1].astype(int) - wanted).max() <= 1  # Pillow rounds twice
    assert ((lengths >= 243) & (lengths <= 250)).all()


def test_a_path_is_clipped_step_by_step():
    """A start beyond the walls is inside after its first step, so it cannot be clipped after all of them."""
    starts, moves = np.array([[0, 0], [157, 3], [1, 209]]), DIRECTIONS[[RIGHT, UP, DOWN]]
    found = path(starts, moves, 4)
    place = starts
    for t in range(4):
        place = np.clip(place + moves, [2, 2], [157, 207])
        assert (found[t + 1] == place).all()
    assert step_rewards(found).shape == (4, 3)


def test_stacks_are_empty_before_the_first_picture():
    envs = MovingDotVector(2, "pixels", max_steps=60)
    seen, _ = envs.reset(seed=0)
    assert not seen[..., :3].any() and (seen[..., 3].sum((1, 2)) > 0).all()
    ended = np.zeros(2, bool)
    for _ in range(40):
        was, before = ended, seen
        seen, rewards, _, ended, _ = envs.step(np.full(2, RIGHT))
        assert not seen[was, ..., :3].any() and not rewards[was].any()
        assert np.array_equal(seen[~was, ..., :3], before[~was, ..., 1:])
    assert was.any() or ended.any()


def test_an_environment_is_the_same_among_1_and_among_64():
    def played(n):
        envs, found = MovingDotVector(n, "features", max_steps=50), []
        found.append(envs.reset(seed=3)[0][0])
        rng = np.random.default_rng(1)
        for _ in range(100):
            found.append(envs.step(np.full(n, rng.integers(5)))[0][0])
        return np.array(found)

    assert np.array_equal(played(1), played(64))
    first, again = MovingDotVector(64), MovingDotVector(64, worker=1)
    assert (
        not np.array_equal(first.reset(seed=3)[0], again.reset(seed=3)[0])
        and len(np.unique(first.positions, axis=0)) > 60
    )


def greedy(envs):
    totals = [
        step_rewards(path(envs.positions, np.tile(move, (envs.num_envs, 1)), 4)).sum(0) for move in DIRECTIONS
    ]
    return np.argmax(totals, axis=0)


def returns(envs, choose):
    envs.reset(seed=0)
    total, length, going = np.zeros(envs.num_envs), np.zeros(envs.num_envs, int), np.ones(envs.num_envs, bool)
    while going.any():
        _, rewards, _, ended, _ = envs.step(choose(envs))
        total, length, going = total + rewards * going, length + going, going & ~ended
    return total, length


@pytest.mark.parametrize("observations", ["features", "pixels"])
def test_what_wrapped_policies_earn(observations):
    """Greedy 23.6 +- 1.5 over 400 starts; random about 0 with a deviation of 10.5."""
    n = 400 if observations == "features" else 40
    rng = np.random.default_rng(0)
    best, lengths = returns(MovingDotVector(n, observations), greedy)
    assert set(lengths) <= set(range(243, 251)) and lengths.min() < 246 and lengths.max() > 247
    if observations == "pixels":
        return
    random, _ = returns(MovingDotVector(2000, observations), lambda envs: rng.integers(0, 5, 2000))
    assert abs(best.mean() - 23.6) < 1.5 and abs(random.mean()) < 0.8 and 9.5 < random.std() < 11.5


def test_positions():
    """x / 80 - 1 and y / 105 - 1; sums of rewards; 100 actions from anywhere."""
    envs = MovingDotVector(400, "position")
    seen, _ = envs.reset(seed=0)
    np.testing.assert_allclose(seen, envs.positions / [80, 105] - 1, atol=1e-6)
    envs.positions[:] = [10, 105]
    seen, rewards, _, _, _ = envs.step(np.full(400, RIGHT))
    assert (rewards == 4).all() and np.allclose(seen, [14 / 80 - 1, 0])
    total, lengths = returns(envs, greedy)
    assert (lengths == 100).all() and abs(
        total.mean() - 90.5
    ) < 6  # distances of 92.5 in the mean, less what 4 pixels at a time leave over


def test_features_are_where_the_white_is():
    envs, pixels = MovingDotVector(16, "features"), MovingDotVector(16, "pixels")
    seen, pictures = envs.reset(seed=2)[0], pixels.reset(seed=2)[0]
    for t in range(50):
        grey = pictures[..., -1].astype(float)
        centre = [(grey.sum(axis) @ (np.arange(84) + 0.5) / grey.sum((1, 2))) / 42 - 1 for axis in (1, 2)]
        inside = (np.abs(seen) < 0.95).all(1)  # shrinking moves what is at the edges
        np.testing.assert_allclose(seen[inside], np.stack(centre, -1)[inside], atol=2e-3)
        actions = np.full(16, t % 5)
        seen, pictures = envs.step(actions)[0], pixels.step(actions)[0]


def test_drawn_for_people():
    envs = MovingDotVector(1, "position")
    seen, _ = envs.reset(seed=1)
    drawn, (x, y) = envs.draw(seen[0]), np.clip(envs.positions[0], [2, 2], [157, 207])
    assert (
        drawn.shape == (210, 160, 3)
        and drawn.dtype == np.uint8
        and (drawn[y - 2 : y + 2, x - 2 : x + 2] == 255).all()
    )
    stack = MovingDotVector(1, "pixels").reset(seed=1)[0][0]
    assert (
        MovingDotVector.draw(stack).shape == (84, 84, 3)
        and (MovingDotVector.draw(stack)[..., 0] == stack[..., -1]).all()
    )
    assert (
        MovingDotVector.clip_length == 25
        and MovingDotVector.task
        and MovingDotVector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    )


def test_small_pictures_keep_the_light():
    """Shrinking by 160/84 and 210/84 leaves 1/4.76 of the light of 16 pixels of 255, but for rounding."""
    found = small_pictures(np.array([[80, 105]]), np.array([[80, 105]]))
    assert abs(found.sum() - 16 * 255 * 84 * 84 / (160 * 210)) < 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MovingDotVector(0), "at least one environment, got 0"),
        (
            lambda: MovingDotVector(1, "picture"),
            "expected observations of pixels, features or position, got 'picture'",
        ),
        (lambda: MovingDotVector(1, max_steps=20), "expected max_steps of more than noop_max"),
        (lambda: MovingDotVector(1).step([0]), "call reset first"),
        (lambda: _stepped([0, 0]), r"expected actions of shape \(1,\), got \(2,\)"),
        (lambda: _stepped([5]), "expected actions of 0 to 4, got 5 to 5"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(Exception, match=message):
        make()


def _stepped(actions):
    envs = MovingDotVector(1)
    envs.reset(seed=0)
    envs.step(actions)


def test_the_last_picture_of_an_episode_stays_as_it_was():
    """The next episode begins with black pictures in its stack; the array that was returned before is the
    learner's."""
    envs = MovingDotVector(2, "pixels", max_steps=8, noop_max=0)
    envs.reset(seed=0)
    envs.step(np.array([RIGHT, RIGHT]))
    last, _, _, ended, _ = envs.step(np.array([RIGHT, RIGHT]))
    kept = last.copy()
    first = envs.step(np.array([RIGHT, RIGHT]))[0]
    assert ended.all() and kept.any() and np.array_equal(last, kept) and not first[..., :3].any()
