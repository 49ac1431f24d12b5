"""Worlds by name.

small_talk, multiwoz, wordle, visual_dialogue and the toy worlds are talked in: `reset` and `step` as
Gymnasium has them, whose observations are messages (`multiwoz/` can be spoken in acts too). The others are
vectors of environments with numbers or pictures, where policies learn from preferences; atari is any of its
games: `game`.

One of your own is named `module:Class`, from the folder where the command starts or an installed module. A
world to talk in is made by `Class()` and has `reset(seed=...)` and `step(reply)`: `text_world.py` has the
contract, `conformance.py` the check of it. Those of other libraries and servers have a prefix:
`textarena:Nim-v0` (`adapters/`). Some take options after their name: `toy_endgames?pieces=KRK&opponent=best`.

A world that is watched is any environment of Gymnasium's: `Pendulum-v1`, or `module:Class` of a plain
gymnasium.Env (`gymnasium_vector.py`). What is to be fast is a gymnasium.vector.VectorEnv that
`Class(num_envs, worker=i)` makes, with the options of `--env_options`, and that starts an episode one step
after the last one ended (AutoresetMode.NEXT_STEP) and returns new arrays. Its class has `clip_length`, the
steps that people compare at a time, `frames_per_second` of clips, `task`, what people are asked, and
`draw(observation)`, a static
method: what an observation looks like, uint8 (height, width, 3). Films name its `action_names`, if it has
them.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from envs.adapters import PREFIXES, adapter
from envs.adapters.names import parsed
from envs.atari import AtariVector, EnduroVector, PongVector
from envs.gymnasium_vector import GymnasiumEnv, GymnasiumVector, known, near_ids
from envs.moving_dot import MovingDotVector
from envs.multiwoz.text import MultiWOZText
from envs.small_talk_world import SmallTalk
from envs.toy import TOYS
from envs.visual_dialogue.world import SCENES
from envs.wordle.world import Wordle
from rl_dialog.errors import UserError
from rl_dialog.own import own

ENVS = {
    "small_talk": SmallTalk,
    "multiwoz": MultiWOZText,
    "wordle": Wordle,
    **TOYS,
    **SCENES,
    "moving_dot": MovingDotVector,
    "pong": PongVector,
    "enduro": EnduroVector,
    "atari": AtariVector,
}
CONTROL = ("moving_dot", "pong", "enduro", "atari")  # whose observations are numbers or pictures


def text_env(name: str) -> Callable[..., Any]:
    """The constructor of a world to talk in; `module:Class` is imported, and `textarena:Nim-v0` is an adapter
    (`adapters/`). Raises UserError for other names."""
    if name.partition(":")[0] in PREFIXES:
        return adapter(name)
    if ":" not in name:
        return _with_options(name, [known for known in ENVS if known not in CONTROL])
    try:
        found = _own(name, ("reset", "step"), "a world to talk in")
    except UserError as error:
        prefix, _, rest = name.partition(":")
        near = get_close_matches(prefix.lower(), PREFIXES, 1)
        raise UserError(f"{error}. Did you mean {near[0]}:{rest}?") if near else error from error
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UserError(f"env {name!r}: expected a class made without arguments, got {error}") from error
    return found


def control_env(name: str) -> Callable[..., Any]:
    """The constructor of a vector of environments with numbers or pictures: one of ours, an id of
    Gymnasium's, or `module:Class` of a vector or of a plain gymnasium.Env. Raises UserError for any other
    name."""
    if name in CONTROL:
        return ENVS[name]
    in_words = name.partition(":")[0] in PREFIXES
    if not in_words and known(name):
        return GymnasiumEnv(name)
    if in_words or ":" not in name:
        return _choose(name, CONTROL, "numbers or pictures", near_ids(name))
    if is_plain(own(name, "env")):
        return GymnasiumEnv(name)
    return _own(name, ("clip_length", "frames_per_second", "task", "draw"), "a vector of environments")


def is_plain(found: Any) -> bool:
    """Is this the class of a single environment of Gymnasium's?"""
    return isinstance(found, type) and issubclass(found, gymnasium.Env)


OF_ALL_VECTORS = ("num_envs", "worker", "pictures")  # arguments that are no options
OPTIONS = {"bool": bool, "int": int, "float": (int, float), "str": str}  # what one so annotated may be


def vectors_of(name: str, options: str = "") -> partial:
    """The constructor of `control_env` with options as text, `observations=position,continuous=true`.

    Raises UserError for an unknown name, for options that are not written so, and for those that the
    environment does not have.
    """
    values = {}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--env_options: expected name=value,name=value, got {part!r}")
        if key.strip() in values:
            raise UserError(f"--env_options: expected each option once, got {key.strip()} again")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # also of 2026-13-45, which is no date
            raise UserError(f"--env_options: expected a YAML value for {key}, got {value!r}") from error
    made = control_env(name)
    signature = inspect.signature(partial(GymnasiumVector, name) if isinstance(made, GymnasiumEnv) else made)
    try:
        signature.bind_partial(1, **values)
    except TypeError as error:
        known = [each for each in signature.parameters if each not in OF_ALL_VECTORS]
        raise UserError(f"--env_options of {name}: expected some of {', '.join(known)}; {error}") from error
    for key, value in values.items():
        said = getattr(signature.parameters.get(key), "annotation", Any)  # of **options nothing is said
        kind = inspect.formatannotation(said).strip("'")
        if not isinstance(value, OPTIONS.get(kind.removesuffix(" | None"), object)):
            raise UserError(f"--env_options of {name}: expected {kind} for {key}, got {value!r}")
    return partial(made, **values)


def with_options(name: str, options: str, given: Mapping[str, Any]) -> str:
    """The options of `vectors_of` as text, with those `given` as flags of their own, which replace them, None
    left out. Raises UserError where the environment is none of Gymnasium's, which alone has such flags."""
    given = {option: value for option, value in given.items() if value is not None}
    if given and not isinstance(control_env(name), GymnasiumEnv):
        flags = ", ".join(f"--{option}" for option in given)
        expected = "expected an environment of Gymnasium's"
        raise UserError(f"{flags}: {expected}, got {name}; see --env_options")
    others = (part for part in options.split(",") if part.partition("=")[0].strip() not in given)
    return ",".join(filter(None, [*others, *(f"{option}={value}" for option, value in given.items())]))


def write_logs_of(asked: Mapping[str, Any], path: Path) -> None:
    """Logs of small talk, or of a `world`, whose class has write_logs(path, dialogs=..., seed=...), or whose
    module has write_logs(world, path, dialogs, seed). `asked`: dialogs, seed, world, and options of the
    class's write_logs. Raises UserError for other options and for worlds that write none."""
    options = dict(asked)
    world = options.pop("world", None) or "small_talk"
    dialogs, seed = options.pop("dialogs"), options.pop("seed")
    made = text_env(world)
    maker = importlib.import_module("envs.small_talk") if world == "small_talk" else made
    module = sys.modules.get(world.partition(":")[0])  # text_env imported it
    write = getattr(maker, "write_logs", None) or getattr(module, "write_logs", None)
    if write is None:
        raise UserError(f"logs of {world}: expected a class or a module with write_logs, it has none")
    if unknown := sorted(options.keys() - inspect.signature(write).parameters.keys()):
        raise UserError(f"logs of {world}: expected dialogs and seed, got {', '.join(unknown)} too")
    path.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(maker, "write_logs"):
        write(path, dialogs=dialogs, seed=seed, **options)
    else:
        write(made, path, dialogs, seed, **options)


def _own(name: str, wanted: tuple[str, ...], what: str) -> Callable[..., Any]:
    found = own(name, "env")
    missing = [each for each in wanted if not hasattr(found, each)]
    if missing or not callable(found):
        lacking = ", ".join(missing) or f"a constructor, got {type(found).__name__}"
        where = "envs/__init__.py says what they are"
        raise UserError(f"env {name!r}: expected {what} whose class has {lacking}; {where}")
    return found


def _with_options(name: str, names: Sequence[str]) -> Callable[..., Any]:
    """A world to talk in that may have options after its name, `toy_endgames?pieces=KRK`."""
    plain, options = parsed(name)
    found = _choose(plain, names, "messages")
    if options and not hasattr(found, "with_options"):
        given = ", ".join(options)
        raise UserError(
            f"env {name!r}: expected {plain} without options, which it does not have, got {given}"
        )
    return found.with_options(options) if options else found


def _choose(
    name: str, names: Sequence[str], observations: str, ids: Sequence[str] = ()
) -> Callable[..., Any]:
    """`ids`: of Gymnasium's, that are spelt like the name."""
    if name in names:
        return ENVS[name]
    near = [*get_close_matches(name, names, 1), *ids]
    kind = "unsuitable" if name in ENVS else "unknown"
    expected = f"one of {', '.join(names)}, whose observations are {observations}"
    raise UserError(
        f"{kind} env {name!r}: expected {expected}, or module:Class for one of your own."
        + (f" Did you mean {' or '.join(near[:3])}?" if near else "")
    )
