"""Games of TextArena as text environments for one player, against a random mover where they need an opponent.

    python -m tests.worlds.textarena_games nim --logs nim.jsonl --episodes 2500 --seed 1

TextArena knows the rules. The player of the conversation moves first. The reward is 0 until the end, then 1
for a win, -1 for a loss and 0 for a draw; games for one player keep the reward of TextArena. An illegal move
ends the episode with -1, and `limit` replies truncate it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import textarena as ta
from textarena.envs.Blackjack.env import BlackjackEnv
from textarena.envs.Chopsticks.env import ChopsticksEnv
from textarena.envs.ConnectFour.env import ConnectFourEnv
from textarena.envs.FrozenLake.env import FrozenLakeEnv
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv
from textarena.envs.KuhnPoker.env import KuhnPokerEnv
from textarena.envs.LightsOut.env import LightsOutEnv
from textarena.envs.Nim.env import NimEnv
from textarena.envs.PigDice.env import PigDiceEnv
from textarena.envs.TicTacToe.env import TicTacToeEnv
from textarena.envs.TowerOfHanoi.env import TowerOfHanoiEnv

from tests.worlds import text_game
from tests.worlds.text_game import Game, Outcome, choose, player_return, write_logs

__all__ = ["GAMES", "choose", "player_return", "write_logs"]


UNLIMITED = 1_000_000  # turns for TextArena: `Game.limit` counts instead, so that the state needs no clock


@contextmanager
def own_luck(chance: random.Random) -> Iterator[None]:
    """Lets the process-wide generator, which TextArena draws from, follow `chance`, and restores it after."""
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
    """Three piles; a move such as `[2 3]` takes 3 from the last pile, and who takes the last object wins."""

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


class ConnectFour(TextArenaGame):
    """Four in a line on 4 rows and 5 columns, from the top row down; `[2]` drops into the middle column."""

    limit = 20
    horizon = 2

    def rules(self) -> ta.Env:
        return ConnectFourEnv(num_rows=4, num_cols=5)

    def show(self, rules: ta.Env) -> str:
        return "/".join("".join(row) for row in rules.state.game_state["board"])

    def legal(self, rules: ta.Env) -> list[str]:
        return [f"[{i}]" for i, mark in enumerate(rules.state.game_state["board"][0]) if mark == "."]


class Chopsticks(TextArenaGame):
    """Fingers of two hands each, the player's first; `[attack 0 1]` adds the left hand to the other's right
    one, which is out at five, and `[split 1 2]` shares out one's own. States come back, so it can go on."""

    limit = 20
    horizon = 3

    def rules(self) -> ta.Env:
        return ChopsticksEnv(max_turns=UNLIMITED)

    def show(self, rules: ta.Env) -> str:
        hands = rules.state.game_state["hands"]
        return " / ".join(" ".join(map(str, hands[player])) for player in (0, 1))

    def legal(self, rules: ta.Env) -> list[str]:
        player = rules.state.current_player_id
        own, other = (rules.state.game_state["hands"][who] for who in (player, 1 - player))
        attacks = [f"[attack {i} {j}]" for i in (0, 1) for j in (0, 1) if own[i] and other[j]]
        fingers = sum(own)
        return attacks + [f"[split {i} {fingers - i}]" for i in range(fingers + 1) if i != own[0]]


class PigDice(TextArenaGame):
    """A race to 20 points: `[roll]` adds a die to the turn's sum, a 1 loses the sum and the turn, and
    `[hold]` banks it. The line holds the player's points, the opponent's and the sum of the turn."""

    GOAL, ENOUGH = 20, 12  # the good player holds at a sum of 12, or when that wins

    def rules(self) -> ta.Env:
        return PigDiceEnv(winning_score=self.GOAL, max_turns=UNLIMITED)

    def show(self, rules: ta.Env) -> str:
        return " ".join(map(str, [*rules.state.game_state["scores"], rules.state.game_state["turn_total"]]))

    def legal(self, rules: ta.Env) -> list[str]:
        return ["[roll]", "[hold]"]

    def good_moves(self, state: bytes) -> list[str]:
        banked, _, held = map(int, self.line(state).split())
        return ["[hold]" if held >= min(self.ENOUGH, self.GOAL - banked) else "[roll]"]


class Blackjack(TextArenaGame):
    """One hand against the dealer: the line holds the player's score, `soft` if an ace may yet count 1, and
    the dealer's open card. A win is worth 1, a draw nothing."""

    players = 1

    def rules(self) -> ta.Env:
        return BlackjackEnv(num_hands=1)

    def show(self, rules: ta.Env) -> str:
        hand, dealer = (rules.state.game_state[who] for who in ("player_hand", "dealer_hand"))
        low = sum({"A": 1, "J": 10, "Q": 10, "K": 10}.get(card[:-1]) or int(card[:-1]) for card in hand)
        score, shown = rules._hand_score(hand), dealer[0][:-1]
        return f"{'soft' if score > low else 'hard'} {score} against {'10' if shown in 'JQK' else shown}"

    def legal(self, rules: ta.Env) -> list[str]:
        return ["[hit]", "[stand]"]

    def good_moves(self, state: bytes) -> list[str]:
        kind, score, _, dealer = self.line(state).split()
        enough = 18 if kind == "soft" else 12 if dealer in "23456" else 17
        return ["[stand]" if int(score) >= enough else "[hit]"]


class LightsOut(TextArenaGame):
    """Nine lights, row by row, `O` is lit; `[0 2]` switches the last of the first row and its neighbours.
    Worth 1 when all are out."""

    players = 1
    limit = 20
    horizon = 9
    SIZE = 3

    def rules(self) -> ta.Env:
        return LightsOutEnv(size=self.SIZE, max_turns=UNLIMITED)

    def start(self, chance: random.Random) -> bytes:
        while True:
            try:
                return super().start(chance)
            except ZeroDivisionError:  # it divides by the number of lit ones and sometimes lights none
                continue

    def show(self, rules: ta.Env) -> str:
        return "".join("O" if light else "." for row in rules.state.game_state["grid"] for light in row)

    def legal(self, rules: ta.Env) -> list[str]:
        return [f"[{row} {column}]" for row in range(self.SIZE) for column in range(self.SIZE)]


class TowerOfHanoi(TextArenaGame):
    """Three disks, each tower from the bottom up as in `321 - -`; `[A C]` moves the top disk of the first
    tower to the last. Worth 1 when all are there."""

    players = 1
    horizon = 8

    def rules(self) -> ta.Env:
        return TowerOfHanoiEnv(num_disks=3, max_turns=UNLIMITED)

    def show(self, rules: ta.Env) -> str:
        towers = rules.state.game_state["towers"]
        return " ".join("".join(map(str, towers[name])) or "-" for name in "ABC")

    def legal(self, rules: ta.Env) -> list[str]:
        towers = rules.state.game_state["towers"]
        top = {name: towers[name][-1] if towers[name] else 9 for name in "ABC"}
        return [f"[{a} {b}]" for a in "ABC" for b in "ABC" if top[a] < top[b]]


class FrozenLake(TextArenaGame):
    """A lake of four rows, from the top row down: P is the player, H a hole, G the goal, below on the right.
    Holes are elsewhere in each episode. Worth 1 at the goal, and in a hole the share of the way that was
    gone."""

    players = 1
    limit = 20

    def rules(self) -> ta.Env:
        return FrozenLakeEnv(size=4, num_holes=3)

    def show(self, rules: ta.Env) -> str:
        grid = [[cell.strip() or "." for cell in row] for row in rules.state.game_state["grid"]]
        row, column = rules.state.game_state["player_pos"]
        grid[row][column] = "P"
        return "/".join("".join(row) for row in grid)

    def legal(self, rules: ta.Env) -> list[str]:
        return list(self._around(rules, rules.state.game_state["player_pos"]))

    def good_moves(self, state: bytes) -> list[str]:
        """Along the shortest ways round the holes."""
        rules = pickle.loads(state)
        steps, todo = {rules.state.game_state["goal_pos"]: 0}, [rules.state.game_state["goal_pos"]]
        for place in todo:
            for near in self._around(rules, place).values():
                if near not in steps and rules.state.game_state["grid"][near[0]][near[1]] != "H":
                    steps[near] = steps[place] + 1
                    todo.append(near)
        far = {
            move: steps[near]
            for move, near in self._around(rules, rules.state.game_state["player_pos"]).items()
            if near in steps
        }
        return [move for move in far if far[move] == min(far.values())]

    def _around(self, rules: ta.Env, place: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Where each move leads from there."""
        near = {
            f"[{name}]": (place[0] + down, place[1] + right) for name, (down, right) in rules.actions.items()
        }
        return {
            move: (row, column) for move, (row, column) in near.items() if 0 <= row < 4 and 0 <= column < 4
        }


class GuessTheNumber(TextArenaGame):
    """A number from 1 to 20 in five guesses, worth 1. The user says `higher` or `lower`, so the state is the
    whole conversation, and no exact answer can be read off the last message."""

    players = 1
    tells_all = False

    def rules(self) -> ta.Env:
        return GuessTheNumberEnv(1, 20, max_turns=4)  # it counts from 0

    def show(self, rules: ta.Env) -> str:
        guesses = rules.state.game_state["guess_history"]
        return guesses[-1][1] if guesses else "a number from 1 to 20"

    def legal(self, rules: ta.Env) -> list[str]:
        return [f"[{number}]" for number in range(1, 21) if number not in rules.guessed_numbers]

    def play(self, state: bytes, move: str, chance: random.Random) -> tuple[float, bytes | None]:
        """TextArena pays for near misses too."""
        reward, after = super().play(state, move, chance)
        return float(reward == 1), after

    def good_moves(self, state: bytes) -> list[str]:
        """The middle of what is left."""
        low, high = 1, 20
        for guess, hint in pickle.loads(state).state.game_state["guess_history"]:
            low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        return [f"[{(low + high) // 2}]"]


class KuhnPoker(TextArenaGame):
    """Three rounds with jack, queen and king; the line holds the round, the chips won so far, one's card and
    what was said in this round. The reward is what all chips won are worth, 250 each."""

    CHIP, LOST = 250.0, -1000.0

    def rules(self) -> ta.Env:
        return KuhnPokerEnv(max_rounds=3)

    def start(self, chance: random.Random) -> bytes:
        rules = self.rules()
        with own_luck(chance):
            rules.reset(num_players=self.players)
            rules.state.error_allowance, rules.said = 0, []  # in this round
            self._until_our_turn(rules, chance)
        return _freeze(rules)

    def show(self, rules: ta.Env) -> str:
        table = rules.state.game_state
        card, said = "JQK"[table["player_cards"][0]], " ".join(rules.said) or "you begin"
        return f"round {table['current_round']}, chips {self._won(rules)}, {card}, {said}"

    def legal(self, rules: ta.Env) -> list[str]:
        return [f"[{name}]" for name in rules.state.game_state["current_legal_action_tree"]]

    def play(self, state: bytes, move: str, chance: random.Random) -> tuple[float, bytes | None]:
        rules = pickle.loads(state)
        with own_luck(chance):
            self._say(rules, move)
            self._until_our_turn(rules, chance)
        return (self.CHIP * self._won(rules), None) if rules.state.done else (0.0, _freeze(rules))

    def blunder(self, state: bytes) -> tuple[float, None]:
        return self.LOST, None

    def good_moves(self, state: bytes) -> list[str]:
        """Bets with a king, bluffs with a jack, and calls with all but that."""
        card = self.line(state).split(", ")[2]
        if "[bet]" in self.moves(state):
            return ["[check]"] if card == "Q" else ["[bet]"]
        return ["[fold]"] if card == "J" else ["[call]"]

    def _until_our_turn(self, rules: ta.Env, chance: random.Random) -> None:
        while not rules.state.done and rules.state.current_player_id != 0:
            self._say(rules, chance.choice(self.legal(rules)))

    def _say(self, rules: ta.Env, move: str) -> None:
        number = rules.state.game_state["current_round"]
        _step(rules, move)
        rules.said = [*rules.said, move] if rules.state.game_state["current_round"] == number else []

    def _won(self, rules: ta.Env) -> int:
        """Without the chip that is in the pot of every round, and of one more that TextArena deals at the
        end."""
        return rules.state.game_state["player_chips"][0] + 1


GAMES = {
    game.__name__.lower(): game
    for game in (
        Nim,
        TicTacToe,
        ConnectFour,
        Chopsticks,
        PigDice,
        Blackjack,
        LightsOut,
        TowerOfHanoi,
        FrozenLake,
        GuessTheNumber,
        KuhnPoker,
    )
}

if __name__ == "__main__":
    text_game.main(GAMES, __doc__.splitlines()[0])
