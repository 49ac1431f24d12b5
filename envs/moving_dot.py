"""MovingDot: a white dot that should go to the middle of a black picture.

The world of Rahtz's reproduction of learning from human preferences (gym-moving-dot): 160 wide, 210 high, y
grows downwards, the middle is (80, 105). A step moves the dot by one pixel, then keeps it inside [2, 157] x
[2, 207], and earns +1, 0 or -1 for a Euclidean distance to the middle that became smaller, stayed or grew. An
episode has 1000 steps and no other end.

    MovingDot         one dot, step by step, as pictures                                 (210, 160, 3) bytes
    MovingDotVector   N dots that agents play, stepped together by array operations; 4 steps to one action;
                      observations:
        pixels        what Atari agents see: the last 4 pictures, grey, the newest last  (84, 84, 4) bytes
        features      where the dot is in the newest of those pictures, [-1, 1], by array
                      arithmetic                                                         (2,)
        position      x / 80 - 1, y / 105 - 1; rewards are sums, episodes 100 actions    (2,)

With `pixels` and `features` an episode begins with 1 to 30 steps of waiting, the reward of an action is the
sign of its steps' sum, a picture is the maximum over the last two steps, and an episode has 243 to 250
actions. A policy that waits or moves at random earns 0, a greedy one 23.6 on average.

Unlike in the original, the end of an episode is a truncation: no observation tells when it comes, so the last
state's value counts. Missing are its fake `lives()` and the environments' "NoFrameskip" names, which only
served to get past the wrappers' checks. What else is odd there has an option: `clipped_start` and
`dead_zone`. Its reward model's features are the columns and rows that are brightest, in 84ths; here they are
exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_dialog.errors import UserError

WIDTH, HEIGHT, SMALL = 160, 210, 84  # of the world; sides of the picture that agents see
MIDDLE = np.array([80, 105])
LOW, HIGH = np.array([2, 2]), np.array([157, 207])
ACTIONS = ("NOOP", "DOWN", "RIGHT", "UP", "LEFT")
DIRECTIONS = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])
THRESHOLD = 0.1  # a continuous action of at least this moves by +1 along its axis, any other by -1
MAX_STEPS = 1000
SKIP, STACK, NOOP_MAX = 4, 4, 30

Observations = Literal["pixels", "features", "position"]


def directions(actions: np.ndarray, *, dead_zone: bool = False) -> np.ndarray:
    """Where actions go, -1, 0 or +1 along x and y: (N,) whole numbers or (N, 2) in [-1, 1] to (N, 2).

    A continuous action can never stand still, unless values within +-0.1 are a `dead_zone`.
    """
    if actions.ndim == 1:
        return DIRECTIONS[actions]
    forward = np.where(actions >= THRESHOLD, 1, -1)
    return np.where(np.abs(actions) < THRESHOLD, 0, forward) if dead_zone else forward


def path(starts: np.ndarray, moves: np.ndarray, steps: int) -> np.ndarray:
    """Positions before and after each of `steps` steps into the same direction: (N, 2) and (N, 2) to (steps +
    1, N, 2).

    The first step counts as clipped to the walls by itself, because only a start may lie beyond them.
    """
    first_positions = np.clip(starts + moves, LOW, HIGH)
    later = np.clip(first_positions + np.arange(1, steps)[:, None, None] * moves, LOW, HIGH)
    return np.concatenate([starts[None], first_positions[None], later])


def step_rewards(positions: np.ndarray) -> np.ndarray:
    """+1, 0 or -1 for each step of a path, closer, equal or farther: (S + 1, N, 2) to (S, N)."""
    squares = ((positions - MIDDLE) ** 2).sum(-1)
    return np.sign(squares[:-1] - squares[1:])


def picture(position: np.ndarray) -> np.ndarray:
    """The world with the dot, white on black, x-2..x+1 and y-2..y+1 # (210, 160, 3) bytes. With x or y below
    2 it is empty, as published."""
    frame = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    x, y = position
    frame[y - 2 : y + 2, x - 2 : x + 2] = 255
    return frame


def start(rng: np.random.Generator, *, random_start: bool, clipped_start: bool) -> np.ndarray:
    """Where an episode begins # (2,)"""
    position = (
        np.array([rng.integers(WIDTH), rng.integers(HEIGHT)]) if random_start else np.zeros(2, np.int64)
    )
    return np.clip(position, LOW, HIGH) if clipped_start else position


def spaces_of_actions(continuous: bool) -> gymnasium.Space:
    return Box(-1.0, 1.0, (2,), np.float32) if continuous else Discrete(len(ACTIONS))


class MovingDot(gymnasium.Env):
    """One dot, one pixel per step.

    Args:
        continuous: actions are two numbers in [-1, 1], instead of noop, down, right, up, left.
        random_start: anywhere, otherwise at (0, 0).
        max_steps: of an episode.
        clipped_start: start inside the walls. As published a start may be beyond them: its picture is empty,
            and waiting at (0, 0) earns +1, because the first step moves the dot to (2, 2).
        dead_zone: small continuous actions stand still, see `directions`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}

    def __init__(self, *, continuous: bool = False, random_start: bool = True, max_steps: int = MAX_STEPS,
                 clipped_start: bool = False, dead_zone: bool = False,
                 render_mode: str | None = None) -> None:  # fmt: skip
        self.random_start, self.max_steps, self.clipped_start, self.dead_zone = (
            random_start,
            max_steps,
            clipped_start,
            dead_zone,
        )
        self.render_mode = render_mode
        self.observation_space = Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        self.action_space = spaces_of_actions(continuous)
        self.position: np.ndarray | None = None  # (2,) x and y
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A new episode. There are no options."""
        super().reset(seed=seed)
        self.position = start(
            self.np_random, random_start=self.random_start, clipped_start=self.clipped_start
        )
        self.steps = 0
        return picture(self.position), {}

    def step(self, action: int | np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One pixel. Raises UserError for what is no action, ResetNeeded before the first reset."""
        if self.position is None:
            raise gymnasium.error.ResetNeeded("expected a running episode; call reset first")
        if not self.action_space.contains(action):
            raise UserError(f"expected an action of {self.action_space}, got {action!r}")
        positions = path(
            self.position[None], directions(np.asarray(action)[None], dead_zone=self.dead_zone), 1
        )
        self.position, self.steps = positions[1, 0], self.steps + 1
        return (
            picture(self.position),
            float(step_rewards(positions)[0, 0]),
            False,
            self.steps >= self.max_steps,
            {},
        )

    def render(self) -> np.ndarray | None:
        """The picture as it is now, if asked for by `render_mode`."""
        return (
            picture(self.position) if self.render_mode == "rgb_array" and self.position is not None else None
        )


class MovingDotVector(VectorEnv):
    """`num_envs` dots as agents play them, see above. Environment i is the same, however many others there
    are.

    As in Gymnasium's own vector environments, the step after an end ignores that environment's action and
    starts its next episode, with reward 0.

    Args:
        observations: pixels, features or position.
        worker: of several vectors with the same seed, which one.
        noop_max: an episode begins with 1 to this many steps of waiting; 0 for none. By default 30, and 0
            with `position`.
        sign_rewards: the sign of the rewards of an action's steps, instead of their sum. By default yes, and
            no with `position`.
        max_steps: of one pixel, in an episode. By default 1000, and 400 with `position`.
        continuous, random_start, clipped_start, dead_zone: as for MovingDot.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}
    clip_length = 25  # actions that people compare at a time
    frames_per_second = 15  # of `draw`: the world's 60 steps per second
    task = "Move the white dot to the middle of the picture, and keep it there."

    def __init__(self, num_envs: int = 1, observations: Observations = "features", *, worker: int = 0,
                 continuous: bool = False, random_start: bool = True, noop_max: int | None = None,
                 sign_rewards: bool | None = None, max_steps: int | None = None, clipped_start: bool = False,
                 dead_zone: bool = False) -> None:  # fmt: skip
        if num_envs < 1:
            raise UserError(f"expected at least one environment, got {num_envs}")
        if observations not in ("pixels", "features", "position"):
            raise UserError(f"expected observations of pixels, features or position, got {observations!r}")
        atari = observations != "position"
        self.num_envs, self.observations, self.worker = num_envs, observations, worker
        self.noop_max = NOOP_MAX * atari if noop_max is None else noop_max
        self.sign_rewards = atari if sign_rewards is None else sign_rewards
        self.max_steps = (MAX_STEPS if atari else 100 * SKIP) if max_steps is None else max_steps
        if self.noop_max < 0 or self.max_steps <= self.noop_max:
            raise UserError(
                f"expected max_steps of more than noop_max, which is at least 0, got {self.max_steps} and "
                f"{self.noop_max}"
            )
        self.random_start, self.clipped_start, self.dead_zone = random_start, clipped_start, dead_zone
        pixels = observations == "pixels"
        self.single_observation_space = (
            Box(0, 255, (SMALL, SMALL, STACK), np.uint8) if pixels else Box(-1.0, 1.0, (2,), np.float32)
        )
        self.single_action_space = spaces_of_actions(continuous)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.action_names = () if continuous else ACTIONS
        self.rngs: list[np.random.Generator] = []
        self.positions = np.zeros((num_envs, 2), np.int64)
        self.steps = np.zeros(num_envs, np.int64)  # of one pixel, in this episode
        self.ended = np.zeros(num_envs, bool)
        self.frames = np.zeros((num_envs, SMALL, SMALL, STACK), np.uint8) if pixels else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A new episode in every environment; a seed makes their chance anew. There are no options."""
        if options:
            raise UserError(f"expected no options, got {sorted(options)}")
        if seed is not None or not self.rngs:
            seeds = [np.random.SeedSequence(seed, spawn_key=(self.worker, i)) for i in range(self.num_envs)]
            self.rngs = [np.random.default_rng(sequence) for sequence in seeds]
        before, starting = self.positions.copy(), np.ones(self.num_envs, bool)
        self._start(starting, before)
        return self._observe(before, starting), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One action per environment # (N,) or (N, 2). Raises UserError for another shape or unknown actions,
        ResetNeeded before the first reset."""
        if not self.rngs:
            raise gymnasium.error.ResetNeeded("expected running episodes; call reset first")
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise UserError(f"expected actions of shape {self.action_space.shape}, got {actions.shape}")
        if actions.ndim == 1 and not ((actions >= 0) & (actions < len(ACTIONS))).all():
            raise UserError(
                f"expected actions of 0 to {len(ACTIONS) - 1}, got {actions.min()} to {actions.max()}"
            )
        positions = path(self.positions, directions(actions, dead_zone=self.dead_zone), SKIP)  # (5, N, 2)
        counts = np.minimum(self.max_steps - self.steps, SKIP)  # the last action of an episode may have fewer
        rewards = (step_rewards(positions) * (np.arange(SKIP)[:, None] < counts)).sum(0).astype(np.float32)
        starting, numbers = self.ended, np.arange(self.num_envs)
        rewards[starting] = 0
        before = positions[
            np.maximum(counts - 1, 0), numbers
        ]  # a picture is the maximum over the last two steps
        self.positions, self.steps = positions[np.maximum(counts, 0), numbers], self.steps + counts
        if starting.any():
            self._start(starting, before)
        self.ended = self.steps >= self.max_steps
        never = np.zeros(self.num_envs, bool)
        return (
            self._observe(before, starting),
            np.sign(rewards) if self.sign_rewards else rewards,
            never,
            self.ended,
            {},
        )

    @staticmethod
    def draw(observation: np.ndarray) -> np.ndarray:
        """What people see of one observation: bytes (84, 84, 3) of pixels, otherwise (210, 160, 3) with a
        cross in the middle."""
        if observation.ndim == 3:
            return np.repeat(observation[..., -1:], 3, axis=-1)
        frame = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        frame[MIDDLE[1] - 6 : MIDDLE[1] + 6, MIDDLE[0] - 1 : MIDDLE[0] + 1] = frame[
            MIDDLE[1] - 1 : MIDDLE[1] + 1, MIDDLE[0] - 6 : MIDDLE[0] + 6
        ] = 80
        x, y = np.clip(np.rint((np.asarray(observation) + 1) * MIDDLE).astype(int), LOW, HIGH)
        frame[y - 2 : y + 2, x - 2 : x + 2] = 255
        return frame

    def _start(self, starting: np.ndarray, before: np.ndarray) -> None:
        """New episodes where `starting`; `before` gets the positions one step before."""
        self.ended = self.ended & ~starting
        for i in np.flatnonzero(starting):
            place = start(self.rngs[i], random_start=self.random_start, clipped_start=self.clipped_start)
            waits = int(self.rngs[i].integers(1, self.noop_max + 1)) if self.noop_max else 0
            self.positions[i] = before[i] = np.clip(place, LOW, HIGH) if waits else place
            self.steps[i] = waits

    def _observe(self, before: np.ndarray, starting: np.ndarray) -> np.ndarray:
        if self.observations == "position":
            return (self.positions / MIDDLE - 1).astype(np.float32)
        if self.observations == "features":
            # The middle of what is white in the picture, whose edges are -1 and 1: of the dot's two last
            # places.
            return ((before + self.positions) / (WIDTH, HEIGHT) - 1).astype(np.float32)
        earlier = np.where(
            starting[:, None, None, None], np.uint8(0), self.frames[..., 1:]
        )  # what was returned before stays as it was
        self.frames = np.concatenate([earlier, small_pictures(before, self.positions)[..., None]], axis=-1)
        return self.frames


def small_pictures(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Grey pictures of dots at the maximum over two neighbouring positions, shrunk to (N, 84, 84) bytes.

    Shrinking is linear and each dot a product of an interval of columns and one of rows, so nothing has to be
    drawn: the maximum of two squares is their sum without what both cover.
    """
    pictures = (
        _shrunk(before, before)
        + _shrunk(after, after)
        - _shrunk(np.maximum(before, after), np.minimum(before, after))
    )
    return np.rint(pictures).astype(np.uint8)


def _shrunk(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """255 in the columns and rows low-2 .. high+1, shrunk: (N, 2) and (N, 2) to (N, 84, 84). Dots beyond the
    walls are invisible."""
    columns, rows = _cumulative(WIDTH), _cumulative(HEIGHT)
    inside = (low >= 2).all(-1) & (high >= low - 3).all(-1)
    low, high = np.maximum(low, 2), np.maximum(high, 2)
    across = columns[high[:, 0] + 2] - columns[low[:, 0] - 2]  # (N, 84)
    down = 255 * inside[:, None] * (rows[high[:, 1] + 2] - rows[low[:, 1] - 2])
    return down[:, :, None] * across[:, None, :]


@cache
def _cumulative(size: int) -> np.ndarray:
    """Row i: how much of each of the 84 small pixels the first i pixels of a side make up, with bilinear
    shrinking as in Pillow # (size + 1, 84)."""
    scale = size / SMALL
    middles = (np.arange(SMALL) + 0.5) * scale
    weights = np.clip(1 - np.abs(np.arange(size)[:, None] + 0.5 - middles) / scale, 0, None)  # (size, 84)
    weights /= weights.sum(0)
    return np.concatenate([np.zeros((1, SMALL)), weights.cumsum(0)])
