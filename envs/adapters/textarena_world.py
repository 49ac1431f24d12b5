"""Games of TextArena as worlds to talk in: `textarena:Nim-v0?opponent=random&role=1`.

Options of the name, beside those that the game's class takes (`size=3`):

    role       the player that the policy plays, from 0; `any` draws it from the seed. By default 0
    opponent   who plays the others: random (by default), self (all of them are the policy's: the world has
               several roles, `player_0`, `player_1`, ...), a scripted player of the game by name
               (`game_players.py`), module:function (messages -> reply), module:Class
               (`Class(seed)` is such a function), or the address of an endpoint, http://host:port/v1, where
               `serve` has a checkpoint
    players    how many take part, by default the fewest that the game takes
    turns      replies after which an episode is cut off, by default 200

Messages are what TextArena tells the player since it spoke last; all players that are the policy's learn how
the game ended. The reward is 0 until it is over, then the player's own of TextArena. A move that the game
does not take is answered with its complaint, and costs what TextArena makes it cost. A game that raises an
error, and an opponent that does, is a failed episode; so is a game that the others ended before the policy's
first turn, which no reply has earned.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from envs.adapters.chat_endpoint import checked_address
from envs.adapters.endpoint_player import EndpointPlayer
from envs.adapters.game_players import players_of_game
from envs.adapters.random_player import RandomTalker, random_move
from envs.adapters.textarena_game import GameCrash, TextArenaGame, fresh_seed
from envs.text_world import ALONE, Message
from rl_dialog.errors import UserError
from rl_dialog.own import own

PATIENCE = 200  # moves of the others in a row, after which the policy is taken to be left out
Stepped = tuple[list[Message], Any, bool, bool, dict[str, Any]]


class TextArenaWorld:
    """A game, with players for all roles but the policy's."""

    max_turns = 200  # most games end sooner, by a limit of their own

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Raises UserError for a game that cannot be played here, and for options that do not fit."""
        rest = dict(options or {})
        self.role, self.opponent = rest.pop("role", 0), str(rest.pop("opponent", "random"))
        turns = rest.pop("turns", self.max_turns)
        if type(turns) is not int or turns < 1:
            expected = "turns to be a whole number of at least 1"
            raise UserError(f"env 'textarena:{name}': expected {expected}, got {turns!r}")
        self.max_turns = turns
        self.game = TextArenaGame(name, rest.pop("players", None), rest)
        players = range(self.game.players)
        if self.role != "any" and not (type(self.role) is int and self.role in players):
            fits = ", ".join(map(str, players))
            expected = f"role to be one of {fits} or any"
            raise UserError(f"env 'textarena:{name}': expected {expected}, got {self.role!r}")
        self.make_opponent = _opponent(self.opponent, players_of_game(self.game.folder))
        self.seed, self.ours, self.views = 0, (), {}

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The beginning of the game, up to the policy's first move."""
        self.seed = fresh_seed() if seed is None else seed
        players = range(self.game.players)
        mine = random.Random(f"role {self.seed}").choice(players) if self.role == "any" else self.role
        self.ours = tuple(players) if self.opponent == "self" else (mine,)
        self.views = {player: [] for player in players}
        self.other = self.make_opponent(self.seed) if self.make_opponent else None
        self.speaker, info = mine, {}
        try:
            self.game.begin(self.seed)
            self._go_on()
        except GameCrash as crash:
            info = {"failed": str(crash)}
        if not info and self.game.done:
            reason = self.game.result()[1] or "no reason was given"
            info = {"failed": f"the game was over before the turn of player {mine}: {reason}"}
            self._tell(mine, self._text(mine, self.game.read(mine)))
        if not self.views[self.speaker]:
            self._tell(self.speaker, "The game did not start.")
        return list(self.views[self.speaker]), self._whose() | info

    def step(self, reply: str) -> Stepped:
        """A move of the policy, and those of the others up to its next."""
        spoke, info = self.speaker, {}
        self.views[spoke].append({"role": "assistant", "content": reply})
        try:
            self.game.act(reply)
            self._go_on()
        except GameCrash as crash:
            info = {"failed": str(crash)}
        done = not info and self.game.done
        rewards, reason = self._earned(done)
        if done:
            self.speaker = spoke
            info = self._told_the_end(reason)
        if len(self.ours) == 1:
            rewards = rewards[ALONE]
        return list(self.views[self.speaker]), rewards, done, "failed" in info, self._whose() | info

    def _told_the_end(self, reason: str) -> dict[str, Any]:
        """All players of ours learn how it ended; the views of those who had not the last word."""
        for player in self.ours:
            told = self._text(player, self.game.read(player))
            end = f"[GAME] The game is over. {reason}".rstrip()
            self._tell(player, "\n".join(filter(None, (told, end))))
        others = [player for player in self.ours if player != self.speaker]
        return {"views": {f"player_{each}": list(self.views[each]) for each in others}} if others else {}

    def draw(self) -> str:
        """What whose turn it is was told last."""
        told = [message["content"] for message in self.views[self.speaker] if message["role"] == "user"]
        return told[-1] if told else self.game.name

    def scripted_players(self) -> dict[str, Callable[[int], Any]]:
        """One that moves at random, and those who know the game."""
        return {"random": RandomTalker, **players_of_game(self.game.folder)}

    def random_move(self, chance: random.Random) -> str:
        """A move that the game takes, for whose turn it is (`random_player.py`)."""
        return random_move(self.views[self.game.player], chance, self.game.legal)

    def _whose(self) -> dict[str, Any]:
        return {"role": f"player_{self.speaker}"} if len(self.ours) > 1 else {}

    def _go_on(self) -> None:
        """The others move until the game is over or the policy's turn comes."""
        for _ in range(PATIENCE):
            if self.game.done:
                return
            player = self.game.player
            self._tell(player, self._text(player, self.game.read(player)) or "[GAME] Your turn.")
            if player in self.ours:
                self.speaker = player
                return
            reply = self._others_move(player)
            self.views[player].append({"role": "assistant", "content": reply})
            self.game.act(reply)
        raise GameCrash(f"the others moved {PATIENCE} times without a turn of player {self.ours[0]}")

    def _others_move(self, player: int) -> str:
        if self.other is None:
            return self.random_move(random.Random(f"{self.seed} {len(self.game.actions)}"))
        try:
            reply = self.other([dict(message) for message in self.views[player]])
        except Exception as error:
            raise GameCrash(f"opponent {self.opponent}: {type(error).__name__}: {error}") from error
        if not isinstance(reply, str):
            got = f"{type(reply).__name__}: {str(reply)[:100]}"
            raise UserError(f"opponent {self.opponent}: expected a reply, which is a text, got {got}")
        return reply

    def _tell(self, player: int, text: str) -> None:
        self.views[player].append({"role": "user", "content": text})

    def _text(self, player: int, said: list[tuple[int, str, str]]) -> str:
        """What a player was told, less its own words, which stand in the conversation."""
        lines = [
            f"[{self.game.name_of(who)}] {what}"
            for who, what, kind in said
            if not (who == player and kind == "PLAYER_ACTION")
        ]
        return "\n".join(lines)

    def _earned(self, done: bool) -> tuple[dict[str, float | None], str]:
        rewards, reason = self.game.result() if done else (dict.fromkeys(range(self.game.players), 0.0), "")
        if len(self.ours) == 1:
            return {ALONE: rewards[self.ours[0]]}, reason
        return {f"player_{player}": reward for player, reward in rewards.items()}, reason


def _opponent(named: str, scripted: Mapping[str, Callable[[int], Any]]) -> Callable[[int], Any] | None:
    """What makes the other players' player of a seed; None for random movers, and where there is nobody."""
    if named in ("random", "self"):
        return None
    if named in scripted:
        return scripted[named]
    if named.startswith(("http://", "https://")) and urlsplit(named).netloc:
        return EndpointPlayer(checked_address("opponent", named)).of_seed
    if ":" not in named or "//" in named:
        names = ", ".join(["random", "self", *scripted])
        expected = f"{names}, module:function, module:Class or the http address of an endpoint"
        raise UserError(f"opponent: expected {expected}, got {named!r}")
    return _Brought(named)


class _Brought:
    """A player by its name, so that it can be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = own(name, "opponent")
        if not callable(found):
            got = type(found).__name__
            raise UserError(f"opponent {name!r}: expected a function of messages, got {got}")
        self.is_class = inspect.isclass(found)

    def __call__(self, seed: int) -> Any:
        found = own(self.name, "opponent")
        return found(seed) if self.is_class else found
