"""Any environment of Gymnasium's: what agents see and do there, that episodes have one length, and what is
refused."""

import pickle
import sys

import gymnasium
import numpy as np
import pytest

from envs import control_env, vectors_of, with_options
from envs.gymnasium_vector import GymnasiumEnv, GymnasiumVector, acting, grey, seeing
from rl_dialog.errors import UserError

PLAIN = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Tuple

class Walk(gymnasium.Env):
    '''The sum of the actions; 7 steps.'''
    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = Box(-np.inf, np.inf, (1,)), Discrete(2, start=1)
    length = 7

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sum, self.n = 0, 0
        return np.array([0.0], np.float32), {}

    def step(self, action):
        self.sum, self.n = self.sum + action, self.n + 1
        return np.array([self.sum], np.float32), 1.0, False, self.n == self.length, {}

    def render(self):
        return np.full((300, 500, 3), self.sum, np.uint8)

class Falls(Walk):
    '''It ends where two more 2 than 1 were chosen.'''
    def step(self, action):
        observation, reward, _, truncated, _ = super().step(action)
        return observation, reward, self.sum - 1.5 * self.n >= 1, truncated, {}

class Seen(Falls):
    '''The same as pictures.'''
    observation_space = Box(0, 255, (84, 84), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full((84, 84), 9, np.uint8), {}

    def step(self, action):
        _, *told = super().step(action)
        return (np.full((84, 84), 9, np.uint8), *told)

class Guess(Walk):
    '''It ends where the action is not the number that was drawn.'''
    action_space, length = Discrete(3), 80

    def step(self, action):
        observation, reward, _, truncated, _ = super().step(action)
        return observation, reward, action != self.np_random.integers(3), truncated, {}

class Endless(Walk):
    length = 10**9

class Blind(Walk):
    metadata = {}

class Undrawn(Walk):
    def render(self):
        return "a picture"

class Mixed(Walk):
    observation_space = Tuple((Discrete(2), Box(0, 1, (1,))))

class Both(Walk):
    action_space = Tuple((Discrete(2), Box(0, 1, (1,))))

class OldReset(Walk):
    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0]

class OldStep(Walk):
    def step(self, action):
        return super().step(action)[:4]

class NoSeed(Walk):
    def reset(self):
        return super().reset()

class Hot(Walk):
    def step(self, action):
        raise RuntimeError("the motor is hot")

class Unmade(Walk):
    def __init__(self, render_mode=None):
        raise KeyError("joints")

class Nothing(Walk):
    observation_space = Box(-1, 1, (0,))
"""


@pytest.fixture(autouse=True)
def plain(tmp_path, monkeypatch):
    (tmp_path / "plain_worlds.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("plain_worlds", None)


def played(envs, actions, seed=0):
    """Observations (T + 1, N, ...), rewards (T, N) and ends (T, N)."""
    seen, rewards, ends = [envs.reset(seed=seed)[0]], [], []
    for action in actions:
        observation, reward, terminated, truncated, _ = envs.step(action)
        seen.append(observation)
        rewards.append(reward)
        ends.append(terminated | truncated)
    return np.stack(seen), np.stack(rewards), np.stack(ends)


def test_a_plain_environment_by_its_module():
    """Its time limit is found out by playing it; actions count from 0; the step after an end starts anew."""
    make = pickle.loads(pickle.dumps(control_env("plain_worlds:Walk")))
    envs = make(2, worker=1)
    assert envs.horizon == 7 and envs.single_action_space.n == 2
    seen, rewards, ends = played(envs, [[0, 1]] * 9)
    assert seen[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert seen[:, 1, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 0, 2]
    assert ends[:, 0].nonzero()[0].tolist() == [6]
    assert rewards[:, 0].tolist() == [1, 1, 1, 1, 1, 1, 1, 0, 1]


def test_it_is_what_gymnasium_makes():
    """Pendulum step by step, its torque between -2 and 2 scaled to -1 and 1."""
    envs = control_env("Pendulum-v1")(3, worker=2)
    assert envs.horizon == 200 and envs.single_action_space == gymnasium.spaces.Box(-1.0, 1.0, (1,))
    seed = int(np.random.SeedSequence(5, spawn_key=(2, 1)).generate_state(1)[0] >> 1)
    alone = gymnasium.make("Pendulum-v1")
    expected = [alone.reset(seed=seed)[0]]
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 3, 1)).astype(np.float32)
    for action in actions[:, 1]:
        observation, reward, *_ = alone.step(2 * action)
        expected.append(observation)
    seen, rewards, _ = played(envs, actions, seed=5)
    np.testing.assert_allclose(seen[:, 1], expected, rtol=1e-6)
    assert rewards[-1, 1] == pytest.approx(reward)


def test_episodes_longer_than_what_an_id_is_registered_with():
    """200 steps of Pendulum become 250; of what ends by itself nothing is hidden."""
    envs = control_env("Pendulum-v1")(1, max_episode_steps=250)
    _, rewards, ends = played(envs, np.zeros((250, 1, 1), np.float32))
    assert ends[:, 0].nonzero()[0].tolist() == [249] and (rewards != 0).all()
    with pytest.raises(UserError, match="may end before their 600 steps"):
        control_env("CartPole-v1")(1, max_episode_steps=600)


def test_an_environment_is_the_same_among_1_and_among_5():
    many = played(control_env("CartPole-v1")(5, ends="restart"), [[1, 0, 1, 0, 1]] * 60)
    one = played(control_env("CartPole-v1")(1, ends="restart"), [[1]] * 60)
    for all_of_them, alone in zip(many, one, strict=True):
        np.testing.assert_array_equal(all_of_them[:, 0], alone[:, 0])


def test_a_flag_of_its_own_replaces_an_option():
    """As one behind --config does, whose file has all options as text."""
    given = {"max_episode_steps": 7, "ends": None}
    merged = with_options("CartPole-v1", "frames=2,max_episode_steps=5", given)
    assert merged == "frames=2,max_episode_steps=7"
    assert vectors_of("CartPole-v1", merged).keywords == {"frames": 2, "max_episode_steps": 7}


def test_episodes_that_end_sooner():
    """The fall after two steps: absorbed the end state follows without reward, others stay there, restarted
    it goes on from 0, allowed it ends."""
    make = vectors_of("plain_worlds:Falls", "max_episode_steps=5")
    actions = [[1]] * 5
    seen, rewards, ends = played(make(1, ends="absorb"), actions)
    assert seen[:, 0].tolist() == [[0, 0], [2, 0], [0, 1], [0, 1], [0, 1], [0, 1]]
    assert rewards[:, 0].tolist() == [1, 1, 0, 0, 0] and ends[:, 0].tolist() == [False] * 4 + [True]
    seen, rewards, ends = played(make(1, ends="hold"), actions)
    assert seen[:, 0, 0].tolist() == [0, 2, 4, 4, 4, 4]
    assert rewards[:, 0].tolist() == [1, 1, 0, 0, 0] and ends[:, 0].tolist() == [False] * 4 + [True]
    seen, rewards, ends = played(make(1, ends="restart"), actions)
    assert seen[:, 0, 0].tolist() == [0, 2, 0, 2, 0, 2]
    assert rewards.sum() == 5 and ends[:, 0].tolist() == [False] * 4 + [True]
    seen, rewards, ends = played(make(1, ends="allow"), actions)
    assert ends[:, 0].tolist() == [False, True, False, False, True]


def test_an_end_state_that_is_left():
    """After two steps in it the episode is cut off, not terminated, and its time limit holds as before; in
    pictures the end state is black, and a stack of frames fills with it."""
    make = vectors_of("plain_worlds:Falls", "max_episode_steps=9,ends=absorb,absorbed_steps=2,frames=2")
    envs = make(1)
    envs.reset(seed=1)
    steps = [envs.step(np.ones(1, int)) for _ in range(8)]
    assert [seen[0].tolist() for seen, *_ in steps] == [
        *([0, 0, 2, 0], [2, 0, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1]),
        *([0, 0, 0, 0], [0, 0, 2, 0], [2, 0, 0, 1], [0, 1, 0, 1]),
    ]
    assert [step[1][0] for step in steps] == [1, 1, 0, 0, 0, 1, 1, 0]
    assert not any(step[2][0] for step in steps) and [step[3][0] for step in steps] == [
        *(False, False, False, True, False, False, False, False)
    ]
    short = vectors_of("plain_worlds:Falls", "max_episode_steps=3,ends=absorb,absorbed_steps=2")
    assert played(short(1), [[1]] * 3)[2][:, 0].tolist() == [False, False, True]
    seen, _, _ = played(control_env("plain_worlds:Seen")(1, ends="absorb", max_episode_steps=4), [[1]] * 3)
    assert seen[:, 0].any((1, 2)).sum(1).tolist() == [4, 4, 3, 2]  # of four frames


def test_an_end_that_chance_did_not_show():
    """Where random play never ended sooner, the first policy that does is told so."""
    envs = GymnasiumVector("plain_worlds:Walk", 1)
    envs.envs[0].length = 4
    with pytest.raises(UserError, match="expected episodes of 7 steps, got one that ended after 4: its ends"):
        played(envs, [[0]] * 7)


def test_the_actions_of_the_probe_are_not_the_worlds_chance():
    """Drawn from the same seed they would be every number that the world draws, and no episode would end."""
    with pytest.raises(UserError, match=r"expected episodes of one length, got .*--ends absorb"):
        GymnasiumVector("plain_worlds:Guess")
    with pytest.raises(UserError, match="its episodes may end before their 80 steps"):
        GymnasiumVector("plain_worlds:Guess", max_episode_steps=80)


def test_frames_are_the_last_ones():
    seen, *_ = played(control_env("plain_worlds:Walk")(1, frames=3), [[1], [0], [1]])
    assert seen[:, 0].tolist() == [[0, 0, 0], [0, 0, 2], [0, 2, 3], [2, 3, 5]]


def test_kinds_of_observations():
    spaces = gymnasium.spaces
    see, space = seeing("x", spaces.Discrete(3))
    assert see(1).tolist() == [0, 1, 0] and space.shape == (3,)
    see, space = seeing("x", spaces.Box(0, 1, (2, 2)))
    assert see(np.array([[1, 2], [3, 4]], np.float32)).tolist() == [1, 2, 3, 4]
    see, space = seeing("x", spaces.Box(0, 255, (168, 168, 3), np.uint8))
    picture = np.zeros((168, 168, 3), np.uint8)
    picture[:2, :4] = 255
    assert space.shape == (84, 84, 1) and see(picture)[:1, :3, 0].tolist() == [[255, 255, 0]]
    assert grey(picture[..., 0]).shape == grey(picture[..., :1]).shape == (84, 84, 1)


@pytest.mark.parametrize("shape", [(84, 84, 4), (4, 84, 84), (84, 84, 2)])
def test_a_stack_of_pictures_is_no_picture(shape):
    """Four in the last place would be read as red, green, blue and an opacity."""
    with pytest.raises(UserError, match=r"x: expected pictures .*height, width, 3.*got bytes .*: wrap it"):
        seeing("x", gymnasium.spaces.Box(0, 255, shape, np.uint8))


def test_actions_of_any_shape_and_bounds():
    spaces = gymnasium.spaces
    act, space = acting("x", spaces.Box(np.float32([[0, -4]]), np.float32([[1, 4]])))
    assert space.shape == (2,) and act(np.array([0.0, 0.5])).tolist() == [[0.5, 2.0]]
    act, space = acting("x", spaces.Box(-np.inf, np.inf, (2,)))
    assert act(np.array([7.0, -8.0])).tolist() == [7, -8]
    act, space = acting("x", spaces.Box(np.float32([0, 0, -np.inf]), np.float32([np.inf, 4, 1])))
    assert space == spaces.Box(np.float32([0, -1, -np.inf]), np.float32([np.inf, 1, 1]))
    assert act(np.array([-3.0, 0.5, 9.0])).tolist() == [0, 3, 1]  # inside of what bounds there are
    widest = float(np.finfo(np.float32).max)
    act, space = acting("x", spaces.Box(-widest, widest, (1,)))
    assert act(np.array([0.0])).tolist() == [0]  # the width is no float32


def test_pictures_of_the_first_environments():
    """A quarter of them, as `render` draws them before each action, shrunk by a whole factor."""
    envs = control_env("plain_worlds:Walk")(5, pictures=True)
    _, infos = envs.reset(seed=0)
    assert infos["pictures"].shape == (2, 100, 167, 3) and not infos["pictures"].any()
    *_, infos = envs.step([0, 1, 0, 0, 0])
    assert infos["pictures"][0].max() == 1 and infos["pictures"][1].max() == 2
    assert "pictures" not in control_env("plain_worlds:Walk")(5).reset(seed=0)[1]


@pytest.mark.parametrize(("where", "sizes"), [("of two environments", (3, 4)), ("of two steps", (3, 3))])
def test_pictures_of_several_sizes_are_no_film(where, sizes):
    envs = control_env("plain_worlds:Walk")(5, pictures=True)
    drawn = lambda size: lambda: np.zeros((size, 5, 3), np.uint8)  # noqa: E731
    for env, size in zip(envs.envs, sizes, strict=False):
        env.render = drawn(size)
    with pytest.raises(UserError, match=r"Walk: expected .* of one size, got \(4, 5, 3\) after \(3, 5, 3\)"):
        envs.reset(seed=0)
        envs.envs[0].render = drawn(4)
        envs.step(np.zeros(5, np.int64))


@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.parametrize("value", [np.nan, 1e60])
def test_numbers_that_are_none_are_told_with_their_step(what, value):
    """1e60 is finite where it comes from, and none of the float32 that networks read."""
    envs = control_env("Pendulum-v1")(2)
    envs.reset(seed=0)
    envs.step(np.zeros((2, 1)))
    broken = {"observation": (np.full(3, value), 0.0), "reward": (np.zeros(3), value)}[what]
    envs.envs[1].step = lambda action: (*broken, False, False, {})
    with pytest.raises(UserError, match=f"Pendulum-v1: expected a finite {what}, got .* after 2 steps"):
        envs.step(np.zeros((2, 1)))


@pytest.mark.parametrize("reward", [10**30, 10**400], ids=["large", "too large"])
def test_a_whole_number_of_any_size_is_a_reward_or_refused(reward):
    envs = control_env("plain_worlds:Walk")(1)
    envs.reset(seed=0)
    envs.envs[0].step = lambda action: (np.zeros(1), reward, False, False, {})
    if reward < 10**38:
        assert envs.step(np.zeros(1, np.int64))[1].tolist() == [np.float32(1e30)]
        return
    with pytest.raises(UserError, match="Walk: expected a finite reward, got 1000"):
        envs.step(np.zeros(1, np.int64))


@pytest.mark.parametrize("reward", [None, np.array([1.0]), "good"])
def test_a_reward_that_is_no_number(reward):
    envs = control_env("plain_worlds:Walk")(1)
    envs.reset(seed=0)
    envs.envs[0].step = lambda action: (np.zeros(1), reward, False, False, {})
    with pytest.raises(UserError, match=r"Walk: expected one number as the reward, got .* after 1 steps"):
        envs.step([0])


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (gymnasium.spaces.Box(-1, 1, (3,)), np.zeros(1)),  # not three times the same
        (gymnasium.spaces.Box(-1, 1, (3,)), None),
        (gymnasium.spaces.Discrete(3), -1),  # not the last one
        (gymnasium.spaces.Discrete(3), 3),
        (gymnasium.spaces.MultiDiscrete([3, 4]), np.array([1, 4])),  # not what follows behind it
        (gymnasium.spaces.Box(0, 255, (9, 9, 3), np.uint8), np.zeros((9, 9, 3))),
        (gymnasium.spaces.Box(0, 255, (9, 9, 3), np.uint8), np.zeros((9, 9), np.uint8)),
    ],
)
def test_an_observation_that_its_space_does_not_have(space, observation):
    see, _ = seeing("my:Arm", space)
    with pytest.raises(UserError, match="my:Arm: expected observations of its .*, got "):
        see(observation)
    assert seeing("my:Arm", gymnasium.spaces.Box(-1, 1, (2,)))[0]([0.5, 7]).tolist() == [0.5, 7]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Pendulem-v1", {}, "unknown env 'Pendulem-v1': .*Did you mean Pendulum-v1"),
        ("cartpole", {}, "unknown env 'cartpole': .*Did you mean CartPole-v1"),
        ("nowhere:Pole-v1", {}, "expected an installed module nowhere"),
        ("CartPole-v1", {}, "may end before their 500 steps: its ends would tell .*--ends absorb"),
        ("plain_worlds:Falls", {}, "of one length, got .*--ends absorb.* and the time limit"),
        ("plain_worlds:Falls", {"ends": "absorb"}, "Say the time limit, --max_episode_steps"),
        ("plain_worlds:Falls", {"max_episode_steps": 50}, "may end before their 50 steps"),
        ("plain_worlds:Endless", {}, "got none that ended in 20000 steps: say .*--max_episode_steps"),
        ("plain_worlds:Mixed", {}, "expected observations that are numbers or pictures, got Tuple"),
        ("plain_worlds:Both", {}, "expected actions that are Discrete or a Box of real numbers, got Tuple"),
        ("plain_worlds:OldReset", {}, r"expected reset to return \(observation, info\), got array"),
        ("plain_worlds:OldStep", {}, "expected step to return .*terminated, truncated, .*got 4 parts"),
        ("plain_worlds:NoSeed", {}, "NoSeed: expected reset to return, got TypeError: .*argument 'seed'"),
        ("plain_worlds:Hot", {}, "expected step to return, got RuntimeError: the motor is hot in line .*py"),
        ("plain_worlds:Unmade", {}, "Unmade cannot be made: KeyError: 'joints' in line .*plain_worlds.py"),
        ("plain_worlds:Nothing", {}, "expected observations of at least one number, got Box"),
        ("plain_worlds:Blind", {"pictures": True}, "people can watch, with the render mode rgb_array"),
        ("Pendulum-v1", {"ends": "stay"}, "--ends: expected one of refuse, absorb, restart, allow"),
        ("Pendulum-v1", {"frames": -1}, "no negative frames"),
    ],
)
def test_what_is_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        control_env(name)(1, **options)


def test_more_that_is_refused():
    with pytest.raises(UserError, match="expected render.. to give bytes"):
        control_env("plain_worlds:Undrawn")(1, pictures=True).reset(seed=0)
    envs = control_env("Pendulum-v1")(2)
    with pytest.raises(gymnasium.error.ResetNeeded):
        envs.step(np.zeros((2, 1)))
    envs.reset(seed=0)
    with pytest.raises(UserError, match="expected actions of Box"):
        envs.step(np.full((2, 1), 3.0))
    with pytest.raises(UserError, match="what an oracle answers is not drawn"):
        GymnasiumEnv("Pendulum-v1").draw(np.zeros(3, np.float32))
