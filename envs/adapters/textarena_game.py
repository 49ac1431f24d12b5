"""A game of TextArena that keeps to itself: its chance is its own, and it can be pickled and copied at any
time.

TextArena draws from the generator of the process. Here every call gets luck of its own, from the seed of the
episode and the number of the move (`luck.py`). What is pickled or copied is the seed and the moves, which are
then played again: its environments cannot be pickled.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import numbers
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from envs.adapters.luck import own_luck
from envs.adapters.names import unknown
from rl_dialog.errors import UserError

MOST_PLAYERS = 15
OURS = ("role", "opponent", "players", "turns")  # options of the name that are not the game's
STEP = 0x9E3779B97F4A7C15  # between the seeds of an episode's moves
GAME = -1  # who TextArena's messages of the game itself come from
Said = tuple[int, str, str]  # who, what, the kind of TextArena's ObservationType


class GameCrash(Exception):
    """The game raised an error in mid-episode."""


def library() -> Any:
    """TextArena. Raises UserError where it is not installed."""
    try:
        import textarena
    except ImportError as error:
        raise UserError(
            f"expected TextArena for worlds named textarena:..., got {error}; pip install textarena"
        ) from error
    return textarena


def game_names() -> list[str]:
    """Every id that TextArena has registered."""
    library()
    from textarena.envs.registration import ENV_REGISTRY

    return list(ENV_REGISTRY)


@contextmanager
def _offline() -> Iterator[None]:
    """Games that ask nltk for a download find what is on this machine, or nothing."""
    import nltk

    download, nltk.download = nltk.download, lambda *names, **settings: False
    try:
        yield
    finally:
        nltk.download = download


class TextArenaGame:
    """One game; `begin` starts an episode."""

    def __init__(self, name: str, players: int | None = None, options: Mapping[str, Any] | None = None):
        """Raises UserError for a game that does not exist or cannot be played on this machine."""
        self.name, self.options = name, dict(options or {})
        self.actions: list[str] = []
        self.seed = 0
        self.crashed = ""
        library()
        self.players = players_of(name, self.options, players)
        self.folder = folder_of(name)

    def begin(self, seed: int) -> None:
        """The episode of a seed. Raises UserError where the game cannot start here, GameCrash for an error of
        the game."""
        self.seed, self.actions, self.crashed = seed, [], ""
        with own_luck(seed, with_numpy=True), _offline():
            self._build()
            try:
                self._env.reset(num_players=self.players, seed=seed)
            except Exception as error:
                self.crashed = f"{type(error).__name__}: {error}"
                raise GameCrash(self.crashed) from error

    def _build(self) -> None:
        env = made(self.name, self.options)
        self._writers = []  # what TextArena does to a reply before the game reads it
        while hasattr(env, "env"):
            if hasattr(type(env), "action"):
                self._writers.append(env.action)
            env = env.env
        self._env = env
        self._numpy = draws_from_numpy(type(env).__module__)
        self._observes = type(env).get_observation is not library().Env.get_observation  # in a way of its own

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        return bool(self._env.state.done)

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return int(self._env.state.current_player_id)

    def act(self, reply: str) -> None:
        """The move of whose turn it is. Raises GameCrash for an error of the game."""
        try:
            with own_luck(self._luck(), with_numpy=self._numpy):
                self._env.step(self._written(reply))
        except Exception as error:
            self.crashed = f"{type(error).__name__}: {error}"
            raise GameCrash(self.crashed) from error
        self.actions.append(reply)

    def _luck(self) -> int:
        return (self.seed + STEP * (1 + len(self.actions))) % 2**64

    def _written(self, reply: str) -> str:
        for write in self._writers:
            reply = write(reply)
        return reply

    def read(self, player: int) -> list[Said]:
        """What the player was told since it last read."""
        state = self._env.state
        if self._observes and player == state.current_player_id and not state.done:
            try:
                with own_luck(self._luck(), with_numpy=self._numpy):
                    _, told = self._env.get_observation()
            except Exception as error:
                self.crashed = f"{type(error).__name__}: {error}"
                raise GameCrash(self.crashed) from error
        else:
            told, state.observations[player] = state.observations[player], []
        if isinstance(told, str):
            return [(GAME, told, "GAME_MESSAGE")]
        return [_said(*each) for each in told]

    def name_of(self, player: int) -> str:
        """What TextArena calls a player, as in `Player 1`."""
        if player == GAME:
            return "GAME"
        return str(self._env.state.role_mapping.get(player, f"Player {player}"))

    def result(self) -> tuple[dict[int, float | None], str]:
        """Each player's reward, None where the game gave none, and the reason that it gave."""
        rewards, infos = self._env.close()
        told = {player: (rewards or {}).get(player) for player in range(self.players)}
        reasons = [str(info["reason"]) for info in (infos or {}).values() if info.get("reason")]
        return {player: _number(reward) for player, reward in told.items()}, next(iter(reasons), "")

    def legal(self, reply: str) -> bool:
        """Whether the game would take the reply for a move. It is tried in a copy; one that crashes the game
        is none."""
        state = self._env.state
        unread: dict[int, list[Any]] = {player: [] for player in state.observations}
        try:
            with own_luck(self._luck(), with_numpy=self._numpy):
                trial = copy.deepcopy(self._env, {id(state.observations): unread, id(state.logs): []})
                mover, told = trial.state.current_player_id, trial.state.game_info
                trial.step(self._written(reply))
        except Exception:
            return False
        said = " ".join(what for _, what, kind in (_said(*each) for each in unread[mover]) if "ADMIN" in kind)
        return not told[mover].get("invalid_move") and "invalid move" not in said.lower()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        actions, crashed = state["actions"], state["crashed"]
        vars(self).update(state)
        if crashed and not actions:
            return
        self.begin(self.seed)
        for action in actions:
            if not self.done:
                self.read(self.player)
            self.act(action)
        self.crashed = crashed
        if not self.done:
            self.read(self.player)


def _said(who: int, what: Any, kind: Any = "") -> Said:
    return who, str(what), getattr(kind, "name", str(kind))  # some games give texts as kinds


def _number(reward: Any) -> float | None:
    """The reward; None for what is no number, as where a game takes the reason for it."""
    known = isinstance(reward, numbers.Real) and math.isfinite(reward)
    return float(reward) if known else None


def made(name: str, options: Mapping[str, Any]) -> Any:
    """TextArena's environment. Raises UserError where it cannot be made on this machine."""
    textarena = library()
    if name not in (known := game_names()):
        raise unknown("textarena", name, known, f"one of the {len(known)} games of TextArena")
    try:
        return textarena.make(name, **options)
    except Exception as error:
        raise _cannot(name, options, error) from error


def _cannot(name: str, options: Mapping[str, Any], error: BaseException) -> UserError:
    """Why a game does not start on this machine, and what would help."""
    text = re.sub(r"(?:/[\w.-]+)+/", "", " ".join(str(error).split()))  # files without their folders
    where = f"env 'textarena:{name}'"
    if isinstance(error, SyntaxError):
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        return UserError(f"{where}: expected a game for Python {here}, got one for a later one: {text}")
    if isinstance(error, LookupError) and "nltk" in text.lower():
        lists = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
        return UserError(f"{where}: expected the word lists of nltk on this machine; {lists} downloads them")
    if "api key" in text.lower() or "api_key" in text.lower():
        return UserError(f"{where}: expected a game without a key, got one that needs it: {text[:300]}")
    if options:
        takes = ", ".join([*_options_of(name), *OURS])
        return UserError(f"{where}: expected options that fit, of {takes}; got {text[:300]}")
    return UserError(
        f"{where}: expected a game that can start on this machine, got {type(error).__name__}: {text[:300]}"
    )


def folder_of(name: str) -> str:
    """The folder of the game's code among TextArena's games: `Nim` of Nim-v0-large too."""
    from textarena.envs.registration import ENV_REGISTRY

    return str(ENV_REGISTRY[name].entry_point).partition(":")[0].split(".")[-2]


def _options_of(name: str) -> list[str]:
    from textarena.envs.registration import ENV_REGISTRY

    module, _, attribute = str(ENV_REGISTRY[name].entry_point).partition(":")
    return list(inspect.signature(getattr(importlib.import_module(module), attribute)).parameters)


def draws_from_numpy(module: str) -> bool:
    """Whether a game's package uses numpy, whose generator must then be kept too."""
    package = module.rpartition(".")[0]
    loaded = [each for name, each in list(sys.modules.items()) if name.startswith(package)]
    return any(hasattr(each, "np") or hasattr(each, "numpy") for each in loaded)


def players_of(name: str, options: Mapping[str, Any], asked: int | None = None) -> int:
    """The smallest number of players that the game takes, or the one that was asked for. Raises UserError
    where it takes none."""
    key = name, repr(sorted(options.items())), asked
    if key not in _PLAYERS:
        _PLAYERS[key] = _try_players(name, options, asked)
    return _PLAYERS[key]


_PLAYERS: dict[tuple[str, str, int | None], int] = {}  # trying takes a while


def _try_players(name: str, options: Mapping[str, Any], asked: int | None) -> int:
    why: Exception = ValueError("no number of players fits")
    if asked is not None and (type(asked) is not int or asked < 1):
        raise UserError(f"env 'textarena:{name}': expected players to be a whole number, got {asked!r}")
    for players in range(1, MOST_PLAYERS + 1) if asked is None else (asked,):
        with own_luck(0, with_numpy=True), _offline():
            env = made(name, options)
            try:
                env.reset(num_players=players, seed=0)
            except Exception as error:
                why = why if isinstance(error, AssertionError) and asked is None else error
                continue
        if asked or players > 1 or type(env.state).__name__ == "SinglePlayerState":
            return players
    raise _cannot(name, options, why) from why


def fresh_seed() -> int:
    """For an episode that nobody asked to repeat."""
    return random.SystemRandom().getrandbits(62)
