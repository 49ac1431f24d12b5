"""Chess end-games in words: mate a lone king with king, queen and rooks.

LMRL-Gym's task: the user says the position in Forsyth-Edwards Notation (FEN), the reply is White's move in
Standard Algebraic Notation (SAN); 1 for mate, 0 for any other move, -1 for a reply that is no legal move,
which leaves the position as it is; queen, rook, queen and rook, or two rooks. There the opponent is Stockfish
at a strength of 1200; here it plays by an exact table (`endgame_tables.py`), at random, or now and then by
either. Positions are drawn from the episode's seed; the limit of moves is ours.

    toy_endgames?pieces=KQK,KRK&opponent=best&turns=30&mate_in=3

The rules of chess are those of the `chess` library: pip install chess
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from envs.text_world import Message, Played, Player, play
from envs.toy.endgame_tables import distances, folded
from envs.toy.process import told, write_played
from rl_dialog.errors import UserError

LONGEST = {"KQK": 10, "KQRK": 6, "KRK": 16, "KRRK": 7}  # moves to mate, by the pieces of both sides
HABITS = (0.0, 0.0, 0.5, 0.9)  # shares of best moves in the logs, dialog by dialog
GLYPHS = {"K": "♔", "Q": "♕", "R": "♖", "k": "♚"}
LIGHT, DARK = "\x1b[30;48;5;223m", "\x1b[30;48;5;180m"  # squares, in the colours of a terminal


class Endgames:
    """A world, and, when it is called, the constructor of worlds with the same options.

    White is to move and can always mate. An episode ends with mate, with a draw (stalemate, or the last piece
    is taken) or after `turns` replies, legal or not; nobody claims a draw by repetition or by 50 moves.
    """

    def __init__(
        self,
        pieces: str = "KQK,KQRK,KRK,KRRK",
        opponent: str | float = 0.5,
        turns: int = 30,
        mate_in: int = max(LONGEST.values()),
    ) -> None:
        """Args:
            pieces: what is on the board, of KQK, KQRK, KRK and KRRK; several, with commas, are equally likely
            opponent: `best` puts mate off as long as it can, or takes a piece; `random` makes any legal move;
                a number from 0 to 1 is the probability that it makes a best move, otherwise it makes any
            turns: replies after which an unfinished episode is truncated
            mate_in: most moves to mate in the first position

        Raises UserError for what does not fit, and where mate could take more than `turns`.
        """
        self.options = {"pieces": pieces, "opponent": opponent, "turns": turns, "mate_in": mate_in}
        self.kinds = _kinds(pieces)
        self.skill = _skill(opponent)
        for name, number in (("turns", turns), ("mate_in", mate_in)):
            if type(number) is not int or number < 1:
                raise UserError(
                    f"env 'toy_endgames': expected a whole number above 0 as {name}, got {number!r}"
                )
        longest = min(mate_in, max(LONGEST[kind] for kind in self.kinds))
        if turns < longest:
            expected = f"turns of at least {longest}, the longest mate of {', '.join(self.kinds)}"
            raise UserError(f"env 'toy_endgames': expected {expected}, got {turns}; or a smaller mate_in")
        self.max_turns, self.mate_in = turns, longest
        self.fen: str | None = None

    def __call__(self) -> Endgames:
        """Another world with the same options. Raises UserError where the `chess` library is missing."""
        library()
        return Endgames(**self.options)

    @property
    def __name__(self) -> str:
        given = {name: value for name, value in self.options.items() if value != DEFAULTS[name]}
        options = "&".join(f"{name}={value}" for name, value in given.items())
        return f"toy_endgames?{options}" if options else "toy_endgames"

    def with_options(self, options: Mapping[str, Any]) -> Endgames:
        """The constructor with other options. Raises UserError for unknown ones and values that do not
        fit."""
        for name in options:
            if name not in DEFAULTS:
                near = get_close_matches(name, DEFAULTS, 1)
                hint = f". Did you mean {near[0]}?" if near else ""
                expected = f"options among {', '.join(DEFAULTS)}"
                raise UserError(f"env 'toy_endgames': expected {expected}, got {name}{hint}")
        return Endgames(**self.options | options)

    # --- the world ------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The position of a seed; `info["meta"]` has the pieces and the moves to mate."""
        chess = library()
        self.chance = random.Random(seed)
        kind = self.chance.choice(self.kinds)
        names = kind[:-1] + "k"
        while True:
            squares = self.chance.sample(range(64), len(names))
            moves = int(distances(names[1:-1]).white[folded(squares)[0]])
            if moves <= self.mate_in:
                break
        board = chess.Board(None)
        for square, name in zip(squares, names, strict=True):
            board.set_piece_at(square, chess.Piece.from_symbol(name))
        self.fen, self.over, self.turns = board.fen(), False, 0
        self.messages: list[Message] = [{"role": "user", "content": self.fen}]
        return self._observation(), {"meta": {"pieces": kind, "mate_in": moves}}

    def step(self, reply: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """The reply's move and Black's; `info["legal"]` says whether it was one, `info["result"]` at the end
        how the game ended. Raises RuntimeError outside of an episode."""
        if self.fen is None or self.over:
            raise RuntimeError("expected a running episode, got a reply outside of one; call reset first")
        board = library().Board(self.fen)
        move = read(board, reply)
        self.turns += 1
        self.messages.append({"role": "assistant", "content": reply})
        if move is not None:
            board.push(move)
            if not board.outcome():
                board.push(self._answer(board))
        self.fen, ended = board.fen(), board.outcome()
        reward = -1.0 if move is None else float(board.is_checkmate())
        self.over = ended is not None
        how = {"result": ended.termination.name.lower()} if ended else {}
        if not ended:
            self.messages.append({"role": "user", "content": self.fen})
        truncated = not ended and self.turns >= self.max_turns
        return self._observation(), reward, bool(ended), truncated, {"legal": move is not None, **how}

    def _answer(self, board: Any) -> Any:
        """Black's move. Draws as much chance whatever it is."""
        coin, which = self.chance.random(), self.chance.random()
        moves = best_moves(board) if coin < self.skill else list(board.legal_moves)
        return moves[int(which * len(moves))]

    def _observation(self) -> list[Message]:
        return [dict(message) for message in self.messages]

    def draw(self) -> str:
        """The board, White below, in the colours of a terminal."""
        board = library().Board(self.fen)
        rows = []
        for rank in range(7, -1, -1):
            cells = ""
            for file in range(8):
                piece = board.piece_at(8 * rank + file)
                glyph = GLYPHS[piece.symbol()] if piece else "·"
                cells += f"{LIGHT if (rank + file) % 2 else DARK}{glyph} "
            rows.append(f"{rank + 1} {cells}\x1b[0m")
        return "\n".join([*rows, "  a b c d e f g h"])

    # --- what it brings -------------------------------------------------------------------------------------

    def scripted_players(self) -> dict[str, Callable[[int], Player]]:
        """Scripted players, from the best to a random one. All make legal moves only."""
        return {
            "optimal": lambda seed: Mover(1.0, seed),
            "half": lambda seed: Mover(0.5, seed),
            "random": lambda seed: Mover(0.0, seed),
        }

    def optimum(self) -> float:
        """The best mean return: 1, because every first position is won against any opponent in at most
        `turns` moves. Exact."""
        return 1.0

    def logged(self, dialogs: int, seed: int) -> Iterator[Played]:
        """The episodes of the logs, one after the other; `meta.player` says whose they are."""
        for number in range(dialogs):
            skill = HABITS[number % len(HABITS)]
            start = random.Random(f"{seed} {number}").getrandbits(62)
            yield told(play(self(), Mover(skill, start), seed=start), player=f"{skill:.0%} best moves")

    def write_logs(self, path: str | Path, *, dialogs: int, seed: int) -> dict[str, Any]:
        """Writes Dialogs of mixed quality, one JSON line each; returns their number and mean return."""
        return write_played(self.logged(dialogs, seed), path, f"Endgames-{seed}")

    def reference_returns(self, episodes: int, seed: int) -> dict[str, list[float]]:
        """Of the logs, of a player that makes any legal move, and the optimum."""
        said = [play(self(), Mover(0.0, i), seed=i) for i in range(seed, seed + episodes)]
        logs = [total for played in self.logged(episodes, seed) for total in played.returns.values()]
        random_moves = [total for played in said for total in played.returns.values()]
        return {"behaviour policy": logs, "random moves": random_moves, "optimum": [self.optimum()]}


class Mover:
    """White: a best move with probability `skill`, and any legal move otherwise."""

    def __init__(self, skill: float, seed: int) -> None:
        self.skill, self.chance = skill, random.Random(f"player {seed}")

    def __call__(self, messages: list[Message]) -> str:
        board = library().Board(messages[-1]["content"])
        best = self.chance.random() < self.skill
        return board.san(self.chance.choice(best_moves(board) if best else list(board.legal_moves)))


def library() -> Any:
    """The `chess` library. Raises UserError where it is not installed."""
    try:
        import chess
    except ImportError as error:
        raise UserError(
            f"expected the chess library for the world toy_endgames, got {error}; pip install chess"
        ) from error
    return chess


def read(board: Any, reply: str) -> Any:
    """The legal move that a reply is: SAN (`Qb7`, with `+` and `#` or without, long forms too) or the two
    squares (`a7b7`), with any spaces in it; None for everything else."""
    try:
        return board.parse_san("".join(reply.split())) or None
    except ValueError:
        return None


def moves_to_mate(board: Any) -> int:
    """Moves of White until mate if both sides play their best, `endgame_tables.DRAW` where there is none.
    Black has its king alone, White a king and at most two of queen and rook."""
    placed = sorted(board.piece_map().items(), key=lambda item: (-item[1].piece_type, item[0]))
    white = [(square, piece) for square, piece in placed if piece.color]
    names = "".join(piece.symbol() for _, piece in white[1:])
    cell = folded([square for square, _ in white] + [board.king(False)])[0]
    table = distances(names)
    return int((table.white if board.turn else table.black)[cell])


def best_moves(board: Any) -> list[Any]:
    """The moves that mate soonest, or, for Black, that put it off longest; a draw is longer than any mate."""
    worths = {}
    for move in board.legal_moves:
        board.push(move)
        worths[move] = moves_to_mate(board)
        board.pop()
    best = (min if board.turn else max)(worths.values())
    return [move for move, worth in worths.items() if worth == best]


def _kinds(pieces: Any) -> list[str]:
    """The kinds of end-games of an option. Raises UserError for others."""
    kinds = [kind.strip() for kind in str(pieces).split(",")]
    for kind in kinds:
        if kind not in LONGEST:
            near = get_close_matches(kind.upper(), LONGEST, 3)
            hint = f". Did you mean {' or '.join(near)}?" if near else ""
            expected = f"pieces of {', '.join(LONGEST)}, several with commas"
            raise UserError(f"env 'toy_endgames': expected {expected}, got {kind!r}{hint}")
    return kinds


def _skill(opponent: Any) -> float:
    """The probability of a best move. Raises UserError for what is none."""
    skill = {"random": 0.0, "best": 1.0}.get(str(opponent), opponent)
    if isinstance(skill, bool) or not isinstance(skill, int | float) or not 0 <= skill <= 1:
        expected = "best, random or a number from 0 to 1 as opponent"
        raise UserError(f"env 'toy_endgames': expected {expected}, got {opponent!r}")
    return float(skill)


DEFAULTS = Endgames().options
