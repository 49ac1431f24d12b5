"""Real games of ale-py: shapes, stacks, ends, blank rows, and the same chance however many are played."""

from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("ale_py", reason="Atari games need ale-py: pip install ale-py")

from envs import ENVS, control_env, text_env
from envs.atari import AtariVector, EnduroVector, PongVector


def test_pong():
    envs = PongVector(3)
    seen, _ = envs.reset(seed=0)
    assert seen.shape == (3, 84, 84, 4) and seen.dtype == np.uint8 and envs.single_action_space.n == 6
    assert not seen[..., :3].any() and seen[..., 3].any()
    after, rewards, terminated, truncated, _ = envs.step(np.zeros(3, int))
    assert (
        np.array_equal(after[..., :3], seen[..., 1:])
        and rewards.dtype == np.float32
        and not (terminated | truncated).any()
    )
    assert envs.draw(after[0]).shape == (84, 84, 3)


def test_points_are_signs_and_an_end_empties_the_stack():
    """Standing still loses 21 to 0."""
    envs = PongVector(1)
    envs.reset(seed=1)
    total, steps, ended = 0.0, 0, [False]
    while not ended[0]:
        seen, rewards, ended, _, _ = envs.step([0])
        total, steps = total + rewards[0], steps + 1
    assert total == -21 and 700 < steps < 1200
    seen, rewards, ended, truncated, _ = envs.step([2])
    assert not seen[..., :3].any() and rewards[0] == 0 and not ended[0] and not truncated[0]


@pytest.mark.slow
def test_enduro_ends_at_its_limit_and_is_blank_below():
    """3000 frames, waiting of 1 to 30 included: 743 to 750 actions; rows of 160 and more of 210 are those of
    64 and more of 84."""
    envs = EnduroVector(3)
    seen, _ = envs.reset(seed=0)
    assert not seen[:, 64:].any() and seen[:, 60:64].any()
    ends = np.zeros(3, int)
    for step in range(1, 760):
        seen, rewards, terminated, truncated, _ = envs.step(np.ones(3, int))
        assert not seen[:, 64:].any() and not terminated.any()
        started = ends == step - 1 if step > 1 else np.zeros(3, bool)
        assert not seen[started, ..., :3].any() and not rewards[started].any()
        ends[truncated & (ends == 0)] = step
    assert ((ends >= 743) & (ends <= 750)).all()


@pytest.mark.slow
def test_a_game_is_the_same_among_1_and_among_5():
    def played(n, **more):
        envs = AtariVector(n, "breakout", **more)
        found = [envs.reset(seed=7)[0][0]]
        for t in range(80):
            found.append(envs.step(np.full(n, t % 4))[0][0])
        return np.array(found)

    assert np.array_equal(played(1), played(5)) and not np.array_equal(played(1), played(1, worker=1))


def test_lives():
    """Five of them, unless the first is an episode."""
    lengths = []
    for episodic_life in (False, True):
        envs, ended, steps = AtariVector(1, "breakout", episodic_life=episodic_life), [False], 0
        envs.reset(seed=0)
        while not ended[0]:
            ended, steps = envs.step([steps % 4])[2], steps + 1
        lengths.append(steps)
    assert lengths[0] > 3 * lengths[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AtariVector(1, "Pong"), "unknown game 'Pong': expected one of"),
        (lambda: AtariVector(0, "pong"), "num_envs and max_frames of at least 1"),
        (lambda: PongVector(1).step([0]), "call reset first"),
        (
            lambda: text_env("pong"),
            "unsuitable env 'pong': expected one of small_talk, multiwoz, .* observations are messages",
        ),
        (
            lambda: control_env("movingdot"),
            "unknown env 'movingdot': expected one of moving_dot, .* Did you mean moving_dot",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(Exception, match=message):
        make()


def test_every_world_has_one_kind():
    for name in ENVS:
        kinds = 0
        for choose in (text_env, control_env):
            with suppress(ValueError):
                kinds += choose(name) is ENVS[name]
        assert kinds == 1
