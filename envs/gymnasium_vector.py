"""Any environment of Gymnasium's, for policies that learn from preferences: an id of its registry, or
`module:Class` of a plain `gymnasium.Env`.

    make = GymnasiumEnv("Pendulum-v1")                # what `envs.control_env` gives
    envs = make(16, worker=1)                         # GymnasiumVector: 16 of them, stepped one after the
    other

What agents see and do:

    observations   numbers (Box, Discrete as one of n, MultiBinary), flattened; of the last `frames`, by
    default 1
                   pictures (uint8), grey and shrunk to 84 x 84; the last `frames`, by default 4, the newest
                   last
    actions        Discrete, counted from 0; Box, flattened, between -1 and 1 where its bounds are finite

All episodes must have one length, because their ends tell what nobody has labelled: whoever fell had fewer
steps of reward. Where an environment ends some of them sooner, `ends` says what is to be done:

    refuse    raise UserError
    absorb    the end state follows, with reward 0, until the time limit: an observation of zeros with a 1
              behind them, where all others have a 0 (Kostrikov et al. 2019, arXiv 1809.02925); of pictures a
              black one
    restart   go on with the environment's next start until the time limit
    allow     let them end
    hold      the last observation follows, with reward 0, until the time limit

With `pictures` what `render` draws of the first environments is in `infos["pictures"]`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, Literal, SupportsFloat, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from PIL import Image

from rl_dialog.errors import UserError
from rl_dialog.own import line_in, own

SMALL = 84  # sides of the pictures that agents see
WIDEST = 240  # of the longer side of a picture that people see
PROBED = 3  # episodes by which the time limit is found out
PATIENCE = 20_000  # steps of such an episode
LARGEST = float(np.finfo(np.float32).max)  # of what networks read
FILMED = 4  # one in so many environments is drawn
Ends = Literal["refuse", "absorb", "restart", "allow", "hold"]
# Of Gymnasium's own, those whose episodes end sooner for some policies; a random one may not show it.
ENDING = frozenset(
    {
        *("CartPole", "Acrobot", "MountainCar", "MountainCarContinuous", "LunarLander", "CarRacing"),
        *("LunarLanderContinuous", "BipedalWalker", "BipedalWalkerHardcore", "Hopper", "Walker2d", "Ant"),
        *("Humanoid", "InvertedPendulum", "InvertedDoublePendulum", "FrozenLake", "FrozenLake8x8"),
        *("Taxi", "CliffWalking", "Blackjack"),
    }
)
REMEDY = (
    "its ends would tell the policy what nobody has labelled. Say `--ends absorb` (a state without reward "
    "follows, as long as the others go on), `--ends restart` (its next start follows), or `--ends allow`"
)


@dataclass(frozen=True)
class GymnasiumEnv:
    """The constructor of vectors of one environment; it can be pickled. Raises UserError for an id that
    Gymnasium does not know."""

    name: str
    is_drawn_when_seen = True  # by `pictures`: its observations do not show what people see

    def __post_init__(self) -> None:
        _maker(self.name)

    def __call__(self, num_envs: int = 1, **options: Any) -> GymnasiumVector:
        return GymnasiumVector(self.name, num_envs, **options)

    @property
    def task(self) -> str:
        """What people are asked, where nobody says more."""
        return f"Which of the two does better at {self.name}?"

    @staticmethod
    def draw(observation: np.ndarray) -> np.ndarray:
        """Of observations that are pictures the newest # (84, 84, 3) bytes. Raises UserError for numbers:
        these are drawn when they are seen."""
        if observation.ndim == 3:
            return np.repeat(observation[..., -1:], 3, axis=-1)
        raise UserError(
            "expected clips with pictures, got numbers alone: what an oracle answers is not drawn. Gather "
            "clips for people with --labeller page or none"
        )


class GymnasiumVector(VectorEnv):
    """`num_envs` environments. Environment i is the same, however many others there are.

    As in Gymnasium's own vector environments, the step after an end ignores that environment's action and
    starts its next episode, with reward 0.

    Args:
        name: id or module:Class.
        worker: of several vectors with the same seed, which one.
        frames: observations that are seen at a time; 0: 1 of numbers, 4 pictures.
        max_episode_steps: the time limit; 0: what the environment itself says or shows.
        ends: see above.
        absorbed_steps: with absorb, how long an episode is in the end state before it is cut off, as it is by
            its time limit; 0: until then. What is to come of a state that never changes is soon known, and
            where most episodes fall at once, little else would be seen.
        pictures: True: draw a quarter of the environments, the first ones; a number: so many.

    Raises UserError for spaces that policies do not understand, for an environment without a time limit, with
    episodes of varying length unless `ends` allows it, and with `pictures` for one that cannot be drawn.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}
    envs: Sequence[gymnasium.Env] = ()

    def __init__(self, name: str, num_envs: int = 1, *, worker: int = 0, frames: int = 0,
                 max_episode_steps: int = 0, absorbed_steps: int = 0, ends: Ends = "refuse",
                 pictures: bool | int = False) -> None:  # fmt: skip
        if num_envs < 1 or min(frames, max_episode_steps, absorbed_steps) < 0:
            sizes = f"{num_envs}, {frames}, {max_episode_steps}, {absorbed_steps}"
            raise UserError(
                "expected num_envs of at least 1, and no negative frames, max_episode_steps or "
                f"absorbed_steps, got {sizes}"
            )
        if ends not in get_args(Ends):
            raise UserError(f"--ends: expected one of {', '.join(get_args(Ends))}, got {ends!r}")
        self.name, self.num_envs, self.worker = name, num_envs, worker
        self.ends, self.absorbed_steps = ends, absorbed_steps
        self.filmed = -(-num_envs // FILMED) if pictures is True else min(int(pictures), num_envs)
        self.envs = [made(name, drawn=i < self.filmed, steps=max_episode_steps) for i in range(num_envs)]
        self._see, single = seeing(name, self.envs[0].observation_space)
        if ends == "absorb" and single.dtype != np.uint8:
            self._see, single = _with_a_place_for_the_end(self._see, single)
        self.frames = frames or (4 if single.dtype == np.uint8 else 1)
        self.single_observation_space = _stacked(single, self.frames)
        self._act, self.single_action_space = acting(name, self.envs[0].action_space)
        self.horizon = max_episode_steps or time_limit(name, ends)
        _check_ends(name, ends, self.horizon)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.action_names: tuple[str, ...] = ()
        self.frames_per_second = int(self.envs[0].metadata.get("render_fps") or 30)
        self.seen = np.zeros(self.observation_space.shape, single.dtype)
        self.steps = np.zeros(num_envs, np.int64)  # of the running episode
        self.ended = np.zeros(num_envs, bool)
        self.absorbed = np.zeros(num_envs, np.int64)  # steps since its end, with the last before it
        self.running = False
        self.picture_shape: tuple[int, ...] = ()  # of the first one that was drawn

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A new episode in every environment; a seed makes their chance anew. There are no options."""
        if options:
            raise UserError(f"expected no options, got {sorted(options)}")
        for i in range(self.num_envs):
            self._start(i, None if seed is None else _seed(seed, self.worker, i))
        self.running = True
        return self.seen.copy(), self._infos()

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One action per environment # (N,) or (N, A). Raises UserError for another shape, unknown actions,
        and an episode that ended before its time; ResetNeeded before the first reset."""
        if not self.running:
            raise gymnasium.error.ResetNeeded("expected running episodes; call reset first")
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape or not self.action_space.contains(
            actions.astype(self.action_space.dtype)
        ):
            raise UserError(f"expected actions of {self.action_space}, got {actions}")
        rewards = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        for i in range(self.num_envs):
            if self.ended[i]:
                self._start(i, None)
            else:
                rewards[i], terminated[i], truncated[i] = self._step(i, actions[i])
        self.ended = terminated | truncated
        return self.seen.copy(), rewards, terminated, truncated, self._infos()

    def draw(self, observation: np.ndarray) -> np.ndarray:
        """As `GymnasiumEnv.draw`."""
        return GymnasiumEnv.draw(observation)

    def close_extras(self, **_: Any) -> None:
        for env in self.envs:
            env.close()

    def _start(self, i: int, seed: int | None) -> None:
        self.steps[i], self.ended[i], self.absorbed[i] = 0, False, 0
        seen = self._see(started(self.name, self.envs[i], seed))
        self._check(i, "observation", seen)
        self.seen[i] = np.tile(seen, self.frames)

    def _check(self, i: int, what: str, value: Any) -> None:
        """What is learned from one number that is none would be lost with all that was learned before."""
        if np.asarray(value).dtype != np.uint8 and not np.all(np.abs(value) < LARGEST):
            step = f"after {self.steps[i]} steps of an episode"
            raise UserError(f"{self.name}: expected a finite {what}, got {value} {step}")

    def _check_reward(self, i: int, reward: Any) -> None:
        if np.ndim(reward) or not isinstance(reward, SupportsFloat):
            step = f"after {self.steps[i]} steps of an episode: return 0.0 where nobody knows it"
            raise UserError(f"{self.name}: expected one number as the reward, got {reward!r} {step}")
        self._check(i, "reward", reward)

    def _step(self, i: int, action: Any) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated."""
        self.steps[i] += 1
        limit = bool(self.steps[i] >= self.horizon)
        if self.absorbed[i]:
            self._take(i, self.seen[i][..., -(self.seen.shape[-1] // self.frames) :])
            cut = self.absorbed[i] == self.absorbed_steps
            self.absorbed[i] += 1
            return 0.0, False, bool(limit or cut)
        observation, reward, terminated, truncated, _ = stepped(self.name, self.envs[i], self._act(action))
        self._check_reward(i, reward)
        early = (terminated or truncated) and not limit
        if early and self.ends == "refuse":
            raise UserError(
                f"{self.name}: expected episodes of {self.horizon} steps, got one that ended after "
                f"{self.steps[i]}: {REMEDY}"
            )
        seen = self._see(observation)
        if not early or self.ends == "allow":
            self._take(i, seen)
            return float(reward), bool(terminated and self.ends == "allow"), bool(truncated or limit)
        if self.ends == "restart":
            self._take(i, seen)
            self._take(i, self._see(started(self.name, self.envs[i])))
        else:
            self._take(i, _end_like(seen) if self.ends == "absorb" else seen)
            self.absorbed[i] = 1
        return float(reward), False, False

    def _take(self, i: int, observation: np.ndarray) -> None:
        """The newest behind the others."""
        self._check(i, "observation", observation)
        kept = self.seen[i][..., observation.shape[-1] :]
        self.seen[i] = np.concatenate([kept, observation], -1)

    def _infos(self) -> dict[str, Any]:
        drawn = [drawing(env) for env in self.envs[: self.filmed]]
        for picture in drawn:  # a clip is a film, and what an environment films is one array
            self.picture_shape = self.picture_shape or picture.shape
            if picture.shape != self.picture_shape:
                got = f"got {picture.shape} after {self.picture_shape}"
                raise UserError(f"{self.name}: expected render() to give pictures of one size, {got}")
        return {"pictures": np.stack(drawn)} if drawn else {}


def known(name: str) -> bool:
    """Is this an id of Gymnasium's, or written like one?"""
    return name in gymnasium.registry or bool(re.search(r"-v\d+$", name))


def near_ids(name: str) -> list[str]:
    """The ids of Gymnasium's that are spelt most like a name."""
    ids = {id.lower(): id for id in gymnasium.registry if id.rpartition("-v")[0]}
    return [ids[near] for near in get_close_matches(name.lower(), ids, 3, cutoff=0.5)]


def made(name: str, *, drawn: bool = False, steps: int = 0) -> gymnasium.Env:
    """One environment, which draws itself on demand if `drawn`; `steps`: the time limit, in place of the one
    that an id is registered with. Raises UserError where it cannot be made or drawn."""
    make = _maker(name)
    more: dict[str, Any] = {"render_mode": "rgb_array"} if drawn else {}
    if steps and known(name):
        more["max_episode_steps"] = steps
    try:
        env = make(**more)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:  # of somebody's environment and its libraries
        what = _told(name, error)
        if drawn and "render" in str(error):
            raise UserError(f"{name}: {_undrawn(what)}") from error
        raise UserError(f"--env {name} cannot be made: {what}") from error
    for space in ("observation_space", "action_space"):
        if not isinstance(getattr(env, space, None), spaces.Space):
            got = f"got one without, {type(env.unwrapped).__name__}"
            raise UserError(f"--env {name}: expected an environment that says its {space}, {got}")
    if drawn and "rgb_array" not in (env.metadata.get("render_modes") or ()):
        raise UserError(f"{name}: {_undrawn(str(env.metadata.get('render_modes')))}")
    return env


def started(name: str, env: gymnasium.Env, seed: int | None = None) -> Any:
    """The first observation of a new episode. Raises UserError for a `reset` that does not keep Gymnasium's
    contract."""
    told = _asked(name, "reset", env.reset, seed=seed)
    if not (isinstance(told, tuple) and len(told) == 2):
        raise UserError(f"{name}: expected reset to return (observation, info), got {_short(told)}")
    return told[0]


def stepped(name: str, env: gymnasium.Env, action: Any) -> tuple[Any, Any, bool, bool, Any]:
    """What `step` returns. Raises UserError where that is not what a step returns."""
    told = _asked(name, "step", env.step, action)
    if not (isinstance(told, tuple) and len(told) == 5):
        expected = "expected step to return (observation, reward, terminated, truncated, info)"
        raise UserError(f"{name}: {expected}, got {_short(told)}")
    return told


def _asked(name: str, what: str, method: Callable[..., Any], *given: Any, **more: Any) -> Any:
    try:
        return method(*given, **more)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:  # of somebody's environment and its libraries
        got = _told(name, error)
        debug = "RL_DIALOG_DEBUG=1 shows the whole way"
        raise UserError(f"{name}: expected {what} to return, got {got}. {debug}") from error


def _told(name: str, error: Exception) -> str:
    """What an environment raised, with the line of its module, where it is of one."""
    reason = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {reason}{line_in(name.partition(':')[0], error)}"


def _short(told: Any) -> str:
    parts = f"{len(told)} parts, " if isinstance(told, tuple) else ""
    return f"{parts}{' '.join(repr(told).split())[:200]}"


def drawing(env: gymnasium.Env) -> np.ndarray:
    """What `render` shows, shrunk by a whole factor where it is large # (H, W, 3) bytes. Raises UserError
    where that is no picture, or where it cannot draw, whatever the reason."""
    try:
        picture = env.render()
    except NotImplementedError as error:
        raise UserError(f"{env}: {_undrawn('that mode and no method `render`')}") from error
    except Exception as error:  # of somebody's environment, its libraries, or a display that is not there
        reason = " ".join(str(error).split())[:500]
        failed = f"{type(error).__name__} from its `render` ({reason})" if reason else type(error).__name__
        raise UserError(f"{env}: {_undrawn(failed)}") from error
    is_array = isinstance(picture, np.ndarray) and picture.dtype == np.uint8
    if not (is_array and picture.shape[2:] == (3,) and picture.size):
        got = getattr(picture, "shape", type(picture).__name__)
        kind = f" of {picture.dtype}" if isinstance(picture, np.ndarray) else ""
        raise UserError(f"{env}: expected render() to give bytes (height, width, 3), got {got}{kind}")
    factor = -(-max(picture.shape) // WIDEST)
    return np.asarray(Image.fromarray(picture).reduce(factor)) if factor > 1 else picture


def seeing(name: str, space: spaces.Space) -> tuple[Callable[[Any], np.ndarray], spaces.Box]:
    """How observations of a space become arrays, and the space of these. Raises UserError for a space of
    several parts, and for bytes that are neither one picture nor a row."""
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3):
        if space.shape[2:] not in ((), (1,), (3,)):
            raise UserError(
                f"{name}: expected pictures (height, width), (height, width, 1) or (height, width, 3), got "
                f"bytes of the shape {space.shape}: wrap it so that it gives one such picture, of which "
                "--frames stacks the last ones, or numbers (gymnasium.wrappers.FlattenObservation), and pass "
                "your module:Class"
            )
        return partial(_as_said, name, space, grey), spaces.Box(0, 255, (SMALL, SMALL, 1), np.uint8)
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        raise UserError(
            f"{name}: expected observations that are numbers or pictures, got {type(space).__name__} "
            f"({str(space)[:120]}): wrap it so that it gives one array, as "
            "gymnasium.wrappers.FlattenObservation does, and pass your module:Class"
        )
    size = spaces.flatdim(space)
    if not size:
        raise UserError(f"{name}: expected observations of at least one number, got {space}")
    see = lambda observation: spaces.flatten(space, observation).astype(np.float32)  # noqa: E731
    return partial(_as_said, name, space, see), spaces.Box(-np.inf, np.inf, (size,), np.float32)


def _with_a_place_for_the_end(
    see: Callable[[Any], np.ndarray], space: spaces.Box
) -> tuple[Callable[[Any], np.ndarray], spaces.Box]:
    """The same with a 0 behind the numbers, which is 1 in the end state alone."""
    wider = spaces.Box(-np.inf, np.inf, (space.shape[0] + 1,), np.float32)
    return lambda observation: np.append(see(observation), np.float32(0)), wider


def _end_like(seen: np.ndarray) -> np.ndarray:
    """The end state, of one observation's shape."""
    end = np.zeros_like(seen)
    if end.dtype != np.uint8:
        end[-1] = 1
    return end


def _as_said(
    name: str, space: spaces.Space, see: Callable[[Any], np.ndarray], observation: Any
) -> np.ndarray:
    """What is seen of an observation. Raises UserError for one that is none of its space: one number would be
    taken for each of several, and one out of range for another. Of a Box the size alone counts, and of
    pictures the shape and that they are bytes: bounds are often too narrow."""
    if see is grey:
        fits = isinstance(observation, np.ndarray) and observation.dtype == np.uint8
        fits = fits and observation.shape == space.shape
    elif isinstance(space, spaces.Box):
        fits = np.size(observation) == np.prod(space.shape)
    else:
        fits = space.contains(observation)
    if not fits:
        shape = f" of the shape {np.shape(observation)}" if isinstance(observation, np.ndarray) else ""
        raise UserError(f"{name}: expected observations of its {space}, got {_short(observation)}{shape}")
    return see(observation)


def acting(name: str, space: spaces.Space) -> tuple[Callable[[Any], Any], spaces.Space]:
    """How a policy's action becomes one of a space, and the space of the policy's. Raises UserError for what
    is neither Discrete nor a Box of real numbers. Numbers with two bounds are between -1 and 1 there; others
    stay as they are, inside of the bound that they may have."""
    if isinstance(space, spaces.Discrete):
        return lambda action: int(action) + int(space.start), spaces.Discrete(int(space.n))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        raise UserError(
            f"{name}: expected actions that are Discrete or a Box of real numbers, got {space}: wrap it, and "
            "pass your module:Class"
        )
    size = int(np.prod(space.shape))
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    bounded = np.isfinite(low) & np.isfinite(high)
    least, width = np.where(bounded, low, 0.0), np.where(bounded, high, 0.0) - np.where(bounded, low, 0.0)

    def scaled(action: np.ndarray) -> np.ndarray:
        given = np.asarray(action, np.float64).reshape(space.shape)
        between = np.where(bounded, least + (given + 1) / 2 * width, given)
        return np.clip(between, low, high).astype(space.dtype)

    ends = np.where(bounded, -1.0, low), np.where(bounded, 1.0, high)
    seen_low, seen_high = (end.astype(np.float32).reshape(size) for end in ends)
    return scaled, spaces.Box(seen_low, seen_high, dtype=np.float32)


def grey(picture: np.ndarray) -> np.ndarray:
    """(H, W), (H, W, 1) or (H, W, 3) bytes to (84, 84, 1)."""
    image = Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture).convert("L")
    return np.asarray(image.resize((SMALL, SMALL), Image.Resampling.BOX))[..., None]


@lru_cache
def time_limit(name: str, ends: str) -> int:
    """Steps of an episode: what its registration says, or else what a few episodes of random actions show.
    Raises UserError where these have no end, or not all the same."""
    env = made(name)
    limit = env.spec.max_episode_steps if env.spec else None
    lengths = [] if limit else [_length(name, env, seed) for seed in range(PROBED)]
    env.close()
    if limit:
        return limit
    if not all(lengths):
        raise UserError(
            f"{name}: expected episodes with a time limit, got none that ended in {PATIENCE} steps: say how "
            "many steps by --max_episode_steps"
        )
    if len(set(lengths)) > 1:
        said = f"{name}: expected episodes of one length, got {', '.join(map(str, lengths))} steps"
        more = "" if ends == "refuse" else ". Say the time limit, --max_episode_steps"
        raise UserError(said + (more or f": {REMEDY}, and the time limit, --max_episode_steps"))
    return lengths[0]


def _check_ends(name: str, ends: str, horizon: int) -> None:
    if ends == "refuse" and (_ending(name) or (0 < _first_length(name, horizon) < horizon)):
        raise UserError(f"{name}: its episodes may end before their {horizon} steps: {REMEDY}")


def _ending(name: str) -> bool:
    return name in gymnasium.registry and name.rpartition("-v")[0] in ENDING


@lru_cache
def _first_length(name: str, horizon: int) -> int:
    """Of the shortest of a few episodes of random actions, at most `horizon`."""
    env = made(name, steps=horizon)
    lengths = [_length(name, env, seed, min(horizon, PATIENCE)) for seed in range(PROBED)]
    env.close()
    return min(length or horizon for length in lengths)


def _length(name: str, env: gymnasium.Env, seed: int, most: int = PATIENCE) -> int:
    """Steps of an episode of random actions; 0 where it is not over by then."""
    started(name, env, seed)
    # Not by the episode's own seed: actions from the same stream as the world's chance would be no chance.
    env.action_space.seed(_seed(seed, 0, 0))
    for step in range(1, most + 1):
        _, _, terminated, truncated, _ = stepped(name, env, env.action_space.sample())
        if terminated or truncated:
            return step
    return 0


def _maker(name: str) -> Callable[..., gymnasium.Env]:
    """A constructor that takes `render_mode`. Raises UserError for an unknown id."""
    if ":" in name and not known(name):
        return own(name, "env")
    module, _, id = name.rpartition(":")
    if module:
        _import(module, name)
    if id not in gymnasium.registry:
        near = near_ids(id)
        raise UserError(
            f"unknown env {name!r}: expected an id of Gymnasium's registry (of a package's environments with "
            "its module before it, seals:seals/CartPole-v0), or module:Class"
            + (f". Did you mean {' or '.join(near)}?" if near else "")
        )
    return lambda **more: gymnasium.make(id, disable_env_checker=True, **more)


def _import(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--env {name}: expected an installed module {module}, got {error}") from error


def _undrawn(got: str) -> str:
    return (
        "expected an environment that people can watch, with the render mode rgb_array, got "
        f"{got}: give it one, or let the true reward answer, --labeller oracle"
    )


def _stacked(space: spaces.Box, frames: int) -> spaces.Box:
    shape = (*space.shape[:-1], space.shape[-1] * frames)
    return spaces.Box(float(space.low.min()), float(space.high.max()), shape, space.dtype)


def _seed(seed: int, worker: int, i: int) -> int:
    state: Sequence[np.uint32] = np.random.SeedSequence(seed, spawn_key=(worker, i)).generate_state(1)
    return int(state[0] >> 1)
