"""Games of TextArena as text environments for one player: TextArena knows the rules, a random mover is the opponent.

    python -m tests.worlds.textarena_games nim --logs nim.jsonl --episodes 2500 --seed 1

The player of the conversation moves first. The reward is 0 until the end, then 1 for a win, -1 for a loss or an
illegal move and 0 for a draw; games for one player keep the reward of TextArena.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import textarena as ta
from textarena.envs.Nim.env import NimEnv
from textarena.envs.TicTacToe.env import TicTacToeEnv

from tests.worlds import text_game
from tests.worlds.text_game import Game, Outcome, choose, player_return, write_logs

__all__ = ["GAMES", "choose", "player_return", "write_logs"]


@contextmanager
def own_luck(chance: random.Random) -> Iterator[None]:
    """Lets the process-wide generator, which TextArena draws from, follow `chance` for a while and then restores it."""
    saved = random.getstate()
    random.seed(chance.getrandbits(62))
    try:
        yield
    finally:
        random.setstate(saved)


class TextArenaGame(Game):
    """A game whose states are pickled TextArena environments, so that a search can go back to them."""

    players = 2

    def rules(self) -> ta.Env:
        """A fresh TextArena environment."""
        raise NotImplementedError

    def show(self, rules: ta.Env) -> str:
        """The state in one line, for player 0 when it is that player's turn."""
        raise NotImplementedError

    def legal(self, rules: ta.Env) -> list[str]:
        """The legal moves of the player whose turn it is."""
        raise NotImplementedError

    def start(self, chance: random.Random) -> bytes:
        rules = self.rules()
        with own_luck(chance):
            rules.reset(num_players=self.players)
        rules.state.error_allowance = 0
        return _freeze(rules)

    def line(self, state: bytes) -> str:
        return self.show(pickle.loads(state))

    def moves(self, state: bytes) -> list[str]:
        return self.legal(pickle.loads(state))

    def play(self, state: bytes, move: str, chance: random.Random) -> tuple[float, bytes | None]:
        rules = pickle.loads(state)
        with own_luck(chance):
            _step(rules, move)
            while not rules.state.done and rules.state.current_player_id != 0:
                _step(rules, chance.choice(self.legal(rules)))
        return _reward(rules), None if rules.state.done else _freeze(rules)

    def outcomes(self, state: bytes, move: str) -> list[Outcome]:
        """Every answer of the random opponent. Only for games without dice."""
        rules, found = pickle.loads(state), []
        _step(rules, move)
        todo = [(1.0, rules)]
        while todo:
            odds, rules = todo.pop()
            if rules.state.done or rules.state.current_player_id == 0:
                found.append((odds, _reward(rules), None if rules.state.done else _freeze(rules)))
                continue
            frozen, answers = _freeze(rules), self.legal(rules)
            for answer in answers:
                after = pickle.loads(frozen)
                _step(after, answer)
                todo.append((odds / len(answers), after))
        return found


def _freeze(rules: ta.Env) -> bytes:
    """The environment without the record of what was said."""
    rules.state.logs.clear()
    for said in rules.state.observations.values():
        said.clear()
    return pickle.dumps(rules)


def _step(rules: ta.Env, move: str) -> None:
    player = rules.state.current_player_id
    rules.step(move)
    if rules.state.game_info[player]["invalid_move"]:
        raise ValueError(f"expected a move that TextArena takes for legal, got {move!r}")


def _reward(rules: ta.Env) -> float:
    return float(rules.state.rewards[0]) if rules.state.done else 0.0


def _marks(board: list[list[str]]) -> str:
    """A board in one line: X is player 0, whom TextArena calls O."""
    return "".join({"": ".", "O": "X", "X": "O"}[mark] for row in board for mark in row)


class Nim(TextArenaGame):
    """Three piles; a move such as `[2 3]` takes 3 from the last pile, and whoever takes the last object wins."""

    def rules(self) -> ta.Env:
        return NimEnv([3, 4, 5])

    def show(self, rules: ta.Env) -> str:
        return " ".join(map(str, rules.state.game_state["piles"]))

    def legal(self, rules: ta.Env) -> list[str]:
        piles = rules.state.game_state["piles"]
        return [f"[{i} {count}]" for i, pile in enumerate(piles) for count in range(1, pile + 1)]


class TicTacToe(TextArenaGame):
    """The board is `X..O.....`, row by row, the player's marks are X; `[4]` marks the centre."""

    def rules(self) -> ta.Env:
        return TicTacToeEnv()

    def show(self, rules: ta.Env) -> str:
        return _marks(rules.state.game_state["board"])

    def legal(self, rules: ta.Env) -> list[str]:
        return [f"[{i}]" for i, mark in enumerate(self.show(rules)) if mark == "."]


GAMES = {game.__name__.lower(): game for game in (Nim, TicTacToe)}

if __name__ == "__main__":
    text_game.main(GAMES, __doc__.splitlines()[0])
