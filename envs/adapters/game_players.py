"""Scripted players of games of TextArena whose good play is known. Each reads what it was told, as anybody
could, and nothing of the game's inside.

    python -m pipelines.play --env textarena:Nim-v0 --player perfect=1 random=3 --logs logs.jsonl
    python -m pipelines.play --env "textarena:Nim-v0?role=1&opponent=perfect" --checkpoint runs/ilql

A rule is a function (what was told, chance) -> reply; replies of its own stand there as lines `YOU: ...`.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial, reduce
from operator import xor

from envs.text_world import Message
from rl_dialog.errors import UserError

Rule = Callable[[str, random.Random], str]


@dataclass(frozen=True)
class ScriptedPlayer:
    """A rule as a player. Raises UserError for words that the rule cannot read."""

    rule: Rule
    seed: int

    def __call__(self, messages: list[Message]) -> str:
        """The reply, the same to the same conversation."""
        told = "\n".join(
            f"YOU: {each['content']}" if each["role"] == "assistant" else each["content"] or ""
            for each in messages
        )
        return self.rule(told, random.Random(f"{self.seed} {len(messages)}"))


def players_of_game(folder: str) -> dict[str, Callable[[int], ScriptedPlayer]]:
    """Those of the game whose code is in `folder` of TextArena's games, by name."""
    return {name: partial(ScriptedPlayer, rule) for name, rule in RULES.get(folder, {}).items()}


def _all(pattern: str, told: str, what: str) -> list[tuple[str, ...]]:
    """The groups of everything that fits."""
    found = [match.groups() for match in re.finditer(pattern, told, re.MULTILINE)]
    if not found:
        raise UserError(f"scripted player: expected {what} in what the game told, got {told[-300:]!r}")
    return found


def _last(pattern: str, told: str, what: str) -> tuple[str, ...]:
    return _all(pattern, told, what)[-1]


def nim(told: str, chance: random.Random) -> str:
    """Leaves piles whose exclusive or is 0 (Bouton 1901); where it cannot, takes one object of any pile."""
    piles = [int(size) for (size,) in _all(r"pile \d+: (\d+)", told.rpartition("Current Pile")[2], "piles")]
    total = reduce(xor, piles)
    moves = [(i, size - (size ^ total)) for i, size in enumerate(piles) if size ^ total < size]
    pile, count = chance.choice(moves or [(i, 1) for i, size in enumerate(piles) if size])
    return f"[{pile} {count}]"


LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def _worth(board: str, mover: str) -> int:
    """Of a position of tic-tac-toe for whose turn it is: 1 won, 0 drawn, -1 lost, by minimax."""
    other = "XO"[mover == "X"]
    if any(board[a] == board[b] == board[c] == other for a, b, c in LINES):
        return -1
    after = [board[:i] + mover + board[i + 1 :] for i, cell in enumerate(board) if cell == " "]
    return max((-_worth(each, other) for each in after), default=0)


def tic_tac_toe(told: str, chance: random.Random) -> str:
    """Minimax: never loses."""
    rows = _all(r"^ ([XO\d]) \| ([XO\d]) \| ([XO\d])", told.rpartition("Current Board")[2], "a board")[-3:]
    board = "".join(cell if cell in "XO" else " " for row in rows for cell in row)
    (mine,) = _last(r"you will be '([XO])'", told, "a mark")
    other = "XO"[mine == "X"]
    worth = {i: -_worth(board[:i] + mine + board[i + 1 :], other) for i in range(9) if board[i] == " "}
    return f"[{chance.choice([i for i in worth if worth[i] == max(worth.values())])}]"


def mastermind(told: str, chance: random.Random) -> str:
    """Any code that all answers so far allow."""
    length, digits = map(int, _last(r"is (\d+) digits long, each digit from 1 to (\d+)", told, "a code"))
    answers = re.findall(r"Submitted \[([\d ]+)\]. Feedback: (\d+) black peg\(s\), (\d+) white", told)
    known = [([int(digit) for digit in code.split()], int(b), int(w)) for code, b, w in answers]

    def fits(code: list[int]) -> bool:  # also of the beginning of a code: as far as it goes
        left = length - len(code)
        for guess, black, white in known:
            same = sum(a == b for a, b in zip(code, guess, strict=False))
            common = (Counter(code) & Counter(guess)).total()
            if not (same <= black <= same + left and common <= black + white <= common + left):
                return False
        return True

    def codes(begun: list[int]) -> Iterator[list[int]]:
        if len(begun) == length:
            yield begun
            return
        for digit in chance.sample(range(1, digits + 1), digits):
            if (digit not in begun or "possible repeats" in told) and fits([*begun, digit]):
                yield from codes([*begun, digit])

    code = next(codes([]), None)
    if code is None:
        raise UserError(f"scripted player: expected answers that some code fits, got {answers}")
    return f"[{' '.join(map(str, code))}]"


def hanoi(told: str, chance: random.Random) -> str:
    """The shortest way from any state: the largest disk that is not in its place waits for all smaller
    ones."""
    towers = _all(r"([ABC]): \[([\d, ]*)\]", told, "towers")[-3:]
    place = {int(disk): name for name, disks in towers for disk in re.findall(r"\d+", disks)}
    goal, move = "C", "[A C]"
    for disk in sorted(place, reverse=True):
        if place[disk] != goal:
            move = f"[{place[disk]} {goal}]"
            goal = next(name for name in "ABC" if name not in (place[disk], goal))
    return move


def bisection(told: str, chance: random.Random) -> str:
    """The middle of what is left."""
    low, high = map(int, _last(r"number between (\d+) and (\d+)", told, "a range"))
    for guess, hint in re.findall(r"YOU: \[(\d+)\]\n.*target number is (higher|lower)", told):
        low, high = (max(low, int(guess) + 1), high) if hint == "higher" else (low, min(high, int(guess) - 1))
    return f"[{(low + high) // 2}]"


def frozen_lake(told: str, chance: random.Random) -> str:
    """The first step of a shortest way around the holes."""
    lines = _all(r"^\|(.*)\|$", told.rpartition("Current Board")[2], "a lake")
    grid = [[cell.strip() for cell in line.split("|")] for (line,) in lines]
    cells = {(r, c): cell for r, row in enumerate(grid) for c, cell in enumerate(row)}
    start = next((place for place, cell in cells.items() if cell == "P"), (0, 0))
    ways, seen = deque([(start, "")]), {start}
    while ways:
        (r, c), first = ways.popleft()
        if cells[r, c] == "G":
            return f"[{first}]"
        for name, down, right in (("down", 1, 0), ("right", 0, 1), ("up", -1, 0), ("left", 0, -1)):
            place = r + down, c + right
            if cells.get(place, "H") != "H" and place not in seen:
                seen.add(place)
                ways.append((place, first or name))
    return "[up]"


def sudoku(told: str, chance: random.Random) -> str:
    """The next digit of the solution."""
    rows = [row for (row,) in _all(r"^R\d +(.*)$", told, "a grid")]
    first, grid = (
        tuple(int(cell.replace(".", "0")) for row in part for cell in re.findall(r"[\d.]", row))
        for part in (rows[:9], rows[-9:])
    )
    solved, empty = _solved(first), [i for i, digit in enumerate(grid) if not digit]
    if solved is None or not empty:
        raise UserError(f"scripted player: expected a sudoku that can be solved, got {rows[-9:]}")
    place = chance.choice(empty)
    return f"[{place // 9 + 1} {place % 9 + 1} {solved[place]}]"


@lru_cache(maxsize=1024)
def _solved(grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """All digits of a sudoku, by trying where the fewest fit; None where none do."""
    free = {}
    for i in (i for i, digit in enumerate(grid) if not digit):
        r, c = divmod(i, 9)
        box = [grid[9 * (r // 3 * 3 + k // 3) + c // 3 * 3 + k % 3] for k in range(9)]
        free[i] = set(range(1, 10)) - {*grid[9 * r : 9 * r + 9], *grid[c::9], *box}
    if not free:
        return grid
    place = min(free, key=lambda i: len(free[i]))
    for digit in sorted(free[place]):
        if found := _solved((*grid[:place], digit, *grid[place + 1 :])):
            return found
    return None


def lights_out(told: str, chance: random.Random) -> str:
    """A press of the shortest solution. The first row decides on all others, and all its choices are
    tried."""
    rows = _all(r"^(\d+): ([O.](?: [O.])*)$", told.rpartition("Current grid")[2], "a grid")
    size = len(rows)
    lit = [sum((cell == "O") << c for c, cell in enumerate(row.split())) for _, row in rows]
    best: list[int] | None = None
    for first in range(2**size):
        presses, above, state = [], first, list(lit)
        for r in range(size):
            presses.append(above)
            cross = above ^ above << 1 ^ above >> 1
            for k, change in ((r - 1, above), (r, cross & (2**size - 1)), (r + 1, above)):
                if 0 <= k < size:
                    state[k] ^= change
            above = state[r]
        if not state[-1] and (best is None or _count(presses) < _count(best)):
            best = presses
    places = [(r, c) for r, row in enumerate(best or [1]) for c in range(size) if row >> c & 1]
    row, column = places[0] if places else (0, 0)
    return f"[{row} {column}]"


def _count(presses: list[int]) -> int:
    return sum(row.bit_count() for row in presses)


def kuhn_poker(told: str, chance: random.Random) -> str:
    """The equilibrium of one round (Kuhn 1950) in which whoever moves first bets a jack with probability 1/3:
    a queen calls with 2/3 first and 1/3 second."""
    (card,) = _last(r"Your card is: '([JQK])'", told, "a card")
    (actions,) = _last(r"available actions are: (.*)", told, "actions")
    if "check" in actions:
        bets = card == "K" or (card == "J" and chance.random() < 1 / 3)
        return "[bet]" if bets else "[check]"
    first = "YOU: " in told.rpartition("Starting round")[2]
    calls = {"J": 0.0, "Q": 2 / 3 if first else 1 / 3, "K": 1.0}[card]
    return "[call]" if chance.random() < calls else "[fold]"


def blackjack(told: str, chance: random.Random) -> str:
    """Basic strategy of hit and stand, for cards from decks without end."""
    cards, score, shown = _last(r"Your hand: (.*) \(Score: (\d+)\)\nDealer shows: (\w+)", told, "a hand")
    ranks = [card[:-1] for card in cards.split(", ")]
    low = sum(1 if rank == "A" else 10 if rank in "JQK" else int(rank) for rank in ranks)
    weak = shown in ("2", "3", "4", "5", "6")
    if int(score) > low:  # an ace counts 11
        enough = 19 if shown in ("9", "10", "J", "Q", "K", "A") else 18
    else:
        enough = (12 if shown in "456" else 13) if weak else 17
    return "[stand]" if int(score) >= enough else "[hit]"


def secretary(told: str, chance: random.Random) -> str:
    """The classical rule: the first that is better than all before it, but none of the first r - 1, where r
    is the smallest with 1/r + 1/(r + 1) + ... + 1/(n - 1) <= 1."""
    count = int(_last(r"observe (\d+) hidden values", told, "how many values there are")[0])
    values = [float(value) for (value,) in _all(r"current value is (\d\.\d+)", told, "a value")]
    least = next(r for r in range(1, count + 1) if sum(1 / k for k in range(r, count)) <= 1)
    return "[accept]" if len(values) >= least and values[-1] == max(values) else "[continue]"


def pig(told: str, chance: random.Random) -> str:
    """Holds at 20, or where that wins."""
    (goal,) = _last(r"First to (\d+) points", told, "a goal")
    (mine,) = _last(r"You are Player (\d+)", told, "a number")
    (banked,) = _last(rf"Player {mine}: '(\d+)'", told, "scores")
    (turn,) = _last(r"turn total is (\d+)", told, "a total")
    return "[hold]" if int(turn) >= min(20, int(goal) - int(banked)) else "[roll]"


RULES: dict[str, dict[str, Rule]] = {  # by the folder of the game in TextArena
    "Blackjack": {"basic": blackjack},
    "FrozenLake": {"optimal": frozen_lake},
    "GuessTheNumber": {"bisection": bisection},
    "KuhnPoker": {"equilibrium": kuhn_poker},
    "LightsOut": {"optimal": lights_out},
    "Mastermind": {"consistent": mastermind},
    "Nim": {"perfect": nim},
    "PigDice": {"hold_at_20": pig},
    "Secretary": {"optimal": secretary},
    "Sudoku": {"optimal": sudoku},
    "TicTacToe": {"minimax": tic_tac_toe},
    "TowerOfHanoi": {"optimal": hanoi},
}
