"""What the text worlds share: the conversation, the players of mixed skill, and the logs of what they played.

A world is a Markov decision process whose states and moves are written in one short line each. The user says
the state, the assistant answers with a move, and nothing but the last user message matters.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Outcome = tuple[float, float, Any]  # probability, reward, next state (None when the episode is over)
PLAYERS = ("random", "mediocre", "good")
MEDIOCRE = 0.5  # probability that the mediocre player makes a good move


class Game:
    """A text environment for one player. Subclasses say how an episode begins (`start`), how states look
    (`line`), what may be said (`moves`) and what follows (`outcomes`, or `play` and `good_moves`). States are
    hashable."""

    limit = 40  # replies after which an unfinished episode is truncated
    horizon = 12  # replies that the good player looks ahead
    discount = 0.98  # of the good player's search, so that it likes to win soon
    tells_all = True  # is the last user message all that matters?

    def start(self, chance: random.Random) -> Any:
        """The first state of an episode."""
        raise NotImplementedError

    def line(self, state: Any) -> str:
        """The state in one line; two states with the same line must be the same to the player."""
        raise NotImplementedError

    def moves(self, state: Any) -> list[str]:
        """The legal moves."""
        raise NotImplementedError

    def outcomes(self, state: Any, move: str) -> list[Outcome]:
        """Everything that a legal move can lead to."""
        raise NotImplementedError

    def play(self, state: Any, move: str, chance: random.Random) -> tuple[float, Any]:
        """One outcome of a legal move, drawn: the reward and the next state, None at the end."""
        found = self.outcomes(state, move)
        _, reward, after = chance.choices(found, [probability for probability, _, _ in found])[0]
        return reward, after

    def blunder(self, state: Any) -> tuple[float, Any]:
        """What follows a reply that is no legal move: here it loses."""
        return -1.0, None

    def good_moves(self, state: Any) -> list[str]:
        """The moves that the good player chooses from: the best that its search finds."""
        if not hasattr(self, "search"):
            self.search = Search(self)
        return self.search.best(state)

    @classmethod
    def reference_returns(cls, episodes: int, seed: int) -> dict[str, list[float]]:
        """Of the players behind the logs, and of the good one alone."""

        def returns(players: Sequence[str]) -> list[float]:
            game = cls()
            played = (
                play_episode(game, players[i % len(players)], f"{seed} log {i}")[0] for i in range(episodes)
            )
            return [sum(message.get("reward", 0.0) for message in messages) for messages in played]

        return {"behaviour policy": returns(PLAYERS), "good player": returns(("good",))}

    def read(self, reply: str) -> str:
        """The move in a reply: its first part in square brackets, or else all of it."""
        found = re.search(r"\[[^\[\]]*\]", reply)
        return " ".join((found.group() if found else reply).split())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        """Begins an episode, which depends on `seed` and the replies only."""
        self.chance = random.Random(None if seed is None else int(seed))
        self.state, self.turns = self.start(self.chance), 0
        self.messages: list[Message] = [{"role": "user", "content": self.line(self.state)}]
        return self._observation(), {}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Plays the reply and, where there is an opponent, its answer. A truncated episode ends with a user
        message, a finished one with the reply."""
        if getattr(self, "state", None) is None:
            raise RuntimeError("expected a running episode, got a reply outside of one; call reset first")
        move = self.read(reply)
        legal = move in self.moves(self.state)
        reward, self.state = self.play(self.state, move, self.chance) if legal else self.blunder(self.state)
        self.turns += 1
        self.messages.append({"role": "assistant", "content": reply})
        terminated = self.state is None
        if not terminated:
            self.messages.append({"role": "user", "content": self.line(self.state)})
        truncated = not terminated and self.turns >= self.limit
        return self._observation(), reward, terminated, truncated, {"legal": legal}

    def _observation(self) -> list[Message]:
        return [dict(message) for message in self.messages]


class Search:
    """Looks `game.horizon` replies ahead and remembers what it found, by the lines of the states."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.found: dict[tuple[str, str], list[Outcome]] = {}
        self.lines: dict[Any, str] = {}
        self.legal: dict[str, list[str]] = {}
        self.values: dict[tuple[str, int], float] = {}
        self.chosen: dict[str, list[str]] = {}

    def best(self, state: Any) -> list[str]:
        """The moves of the highest value; more than one when they tie."""
        line = self._line(state)
        if line not in self.chosen:
            worth = {move: self._worth(state, move, self.game.horizon) for move in self._moves(state)}
            self.chosen[line] = [move for move in worth if worth[move] > max(worth.values()) - 1e-9]
        return self.chosen[line]

    def _value(self, state: Any, depth: int) -> float:
        if state is None or depth == 0:
            return 0.0
        key = self._line(state), depth
        if key not in self.values:
            self.values[key] = max(self._worth(state, move, depth) for move in self._moves(state))
        return self.values[key]

    def _worth(self, state: Any, move: str, depth: int) -> float:
        key = self._line(state), move
        if key not in self.found:
            self.found[key] = self.game.outcomes(state, move)
        rate, left = self.game.discount, depth - 1
        return sum(odds * (paid + rate * self._value(after, left)) for odds, paid, after in self.found[key])

    def _line(self, state: Any) -> str:
        if state not in self.lines:
            self.lines[state] = self.game.line(state)
        return self.lines[state]

    def _moves(self, state: Any) -> list[str]:
        line = self._line(state)
        if line not in self.legal:
            self.legal[line] = self.game.moves(state)
        return self.legal[line]


def choose(game: Game, player: str, chance: random.Random) -> str:
    """The move of a player in the game's present state."""
    if player not in PLAYERS:
        raise ValueError(f"expected one of {', '.join(PLAYERS)}, got {player!r}")
    skilled = player == "good" or (player == "mediocre" and chance.random() < MEDIOCRE)
    return chance.choice(game.good_moves(game.state) if skilled else game.moves(game.state))


def play_episode(game: Game, player: str, seed: str) -> tuple[list[Message], bool]:
    """The messages of an episode, the replies with their rewards, and whether it was truncated."""
    chance = random.Random(seed)
    messages, _ = game.reset(seed=chance.getrandbits(62))
    rewards, terminated, truncated = [], False, False
    while not (terminated or truncated):
        messages, reward, terminated, truncated, _ = game.step(choose(game, player, chance))
        rewards.append(float(reward))
    paid = iter(rewards)
    return [m | {"reward": next(paid)} if m["role"] == "assistant" else m for m in messages], truncated


def player_return(make_env: Callable[[], Game], player: str, episodes: int = 200, seed: int = 0) -> float:
    """The mean undiscounted return of a player."""
    game = make_env()
    played = (play_episode(game, player, f"{seed} {player} {i}")[0] for i in range(episodes))
    return sum(m.get("reward", 0.0) for messages in played for m in messages) / episodes


def write_logs(
    make_env: Callable[[], Game], path: str | Path, episodes: int = 2500, seed: int = 1
) -> dict[str, Any]:
    """Writes episodes of the three players in turn, one JSON line each, and returns what they are like."""
    game = make_env()
    name = getattr(make_env, "__name__", type(game).__name__)
    total: dict[str, list[float]] = {player: [] for player in PLAYERS}
    states, turns, cut = set(), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        for i in range(episodes):
            player = PLAYERS[i % len(PLAYERS)]
            messages, truncated = play_episode(game, player, f"{seed} log {i}")
            record: dict[str, Any] = {"id": f"{name}-{i:06d}", "source": name, "messages": messages}
            record |= {"truncated": True} if truncated else {}
            file.write(json.dumps(record | {"meta": {"player": player}}) + "\n")
            total[player].append(sum(m.get("reward", 0.0) for m in messages))
            states |= {m["content"] for m in messages if m["role"] == "user"}
            turns += sum(m["role"] == "assistant" for m in messages)
            cut += truncated
    returns = {player: round(_mean(total[player]), 4) for player in PLAYERS}
    logs = round(_mean([x for sums in total.values() for x in sums]), 4)
    about = {"episodes": episodes, "states": len(states), "turns": round(turns / max(episodes, 1), 2)}
    return {"game": name, **about, "truncated": cut, "logs": logs, **returns}


def main(games: dict[str, Callable[[], Game]], description: str, arguments: list[str] | None = None) -> None:
    """The command line of a module of games."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("game", type=str.lower, choices=sorted(games))
    parser.add_argument("--logs", help="file for the episodes; without it the players' returns are printed")
    parser.add_argument("--episodes", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    make_env = games[options.game]
    if options.logs:
        print(json.dumps(write_logs(make_env, options.logs, options.episodes, options.seed)))
    else:
        for player in PLAYERS:
            print(f"{player:9s} {player_return(make_env, player, options.episodes, options.seed):8.3f}")


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
