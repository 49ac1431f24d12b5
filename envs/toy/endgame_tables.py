"""Exact distances to mate against a lone king, by retrograde analysis.

White has a king and none, one or two of queen and rook. From the mates backwards: White mates in n where a
move leads to a position in which Black is mated within n - 1, and Black is mated within n where every move
leads to a position in which White mates within n. All positions of one kind of pieces are the cells of an
array, and each step is a few operations on whole arrays: pieces slide over all boards at once.

Squares are numbers as in the `chess` library, 8 * rank + file, a1 = 0. Boards that are mirror images of each
other are one: the white king stands on one of the 16 squares a1 to d4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

DRAW, NO_POSITION = 254, 255  # instead of a number of moves
LINES = ((1, 0), (-1, 0), (0, 1), (0, -1))
AROUND = (*LINES, (1, 1), (1, -1), (-1, 1), (-1, -1))
SLIDES = {"Q": AROUND, "R": LINES}
HOMES = [8 * rank + file for rank in range(4) for file in range(4)]  # where the white king may stand


class Distances:
    """Moves of White to mate, for every position of White's king and `pieces` ("", "Q", "R", "QR", "RR")
    against the black king; two queens would do as well.

    Two arrays of bytes, (16, 64, ..., 64): the white king, the pieces in their order, the black king. `white`
    has White to move, at least 1; `black` has Black to move, 0 where Black is mated now. DRAW is no mate,
    NO_POSITION what cannot be. Where the black king stands on a piece, `white` is about the board on which it
    has just been taken. `longest` is the longest mate with White to move.
    """

    def __init__(self, pieces: str) -> None:
        self.pieces = pieces
        count = len(pieces)
        self.shape = (16, *[64] * count, 64)
        king, black_king = self._squares(0), self._squares(count + 1)
        near = (abs(king // 8 - black_king // 8) <= 1) & (abs(king % 8 - black_king % 8) <= 1)
        apart, check = ~np.broadcast_to(near, self.shape), np.zeros(self.shape, bool)
        for axis in range(1, count + 1):
            piece = self._squares(axis)
            free = np.ones(self.shape, bool)
            for other in {*range(count + 1)} - {axis}:
                free &= piece != self._squares(other)
            apart = apart & free & (piece != black_king)
            check |= self._slides(np.broadcast_to(piece == black_king, self.shape), free, axis)
        self._solve(apart, apart & check)

    def _solve(self, apart: np.ndarray, check: np.ndarray) -> None:
        """`apart`: boards with every piece on its own square and the kings not side by side, of these `check`
        those with Black in check."""
        quiet = apart & ~check
        self.white = np.where(quiet, np.uint8(DRAW), np.uint8(NO_POSITION))
        self.black = np.where(apart, np.uint8(DRAW), np.uint8(NO_POSITION))
        longest = self._captures()
        moves = self._black_moves(self.white != NO_POSITION)
        self.black[check & ~moves] = 0
        number, found = 0, True
        while found or number < longest:
            number += 1
            wins = quiet & (self.white == DRAW) & self._white_moves(self.black < number, apart)
            self.white[wins] = number
            escapes = self._black_moves((self.white > number) & (self.white != NO_POSITION))
            lost = apart & (self.black == DRAW) & moves & ~escapes
            self.black[lost] = number
            found = bool(wins.any() or lost.any())
        self.longest = int(np.max(self.white, where=quiet & (self.white < DRAW), initial=0))

    def _captures(self) -> int:
        """Writes what it is worth to Black to take a piece; returns the longest mate without that piece."""
        longest = 0
        for axis in range(1, len(self.pieces) + 1):
            fewer = distances(self.pieces[: axis - 1] + self.pieces[axis:])
            longest = max(longest, fewer.longest)
            for square in range(64):
                here: list = [slice(None)] * len(self.shape)
                here[axis] = here[-1] = square
                self.white[tuple(here)] = fewer.white[..., square]
        return longest

    def _white_moves(self, goal: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """Boards from which a move of White leads to the boards of `goal`."""
        found = np.zeros(self.shape, bool)
        boards = goal.reshape(16, *[8, 8] * (len(self.shape) - 1))
        for number, home in enumerate(HOMES):
            for target in beside(home):
                index, mirror = folded([target])
                axes = [*range(0, boards.ndim - 1, 2)] if mirror & 56 else []
                axes += [*range(1, boards.ndim - 1, 2)] if mirror & 7 else []
                found[number] |= np.flip(boards[index[0]], axes).reshape(self.shape[1:])
        for axis in range(1, len(self.pieces) + 1):
            found |= self._slides(goal, apart, axis)
        return found

    def _slides(self, goal: np.ndarray, free: np.ndarray, axis: int) -> np.ndarray:
        """Boards from which the piece of an axis slides to a board of `goal`. All boards on its way, and the
        last, must be `free`: on them it stands where nothing else does."""
        found = np.zeros(self.shape, bool)
        goal, free = (np.moveaxis(each, axis, 0).reshape(8, 8, -1) for each in (goal, free))
        for rank, file in SLIDES[self.pieces[axis - 1]]:
            seen = np.zeros_like(goal)
            for step in range(6, -1, -1):  # from the far end, so that the square beyond is known
                here, there = _line(step, rank, file)
                seen[here] = free[there] & (goal[there] | seen[there])
            along = seen.reshape(64, *[size for at, size in enumerate(self.shape) if at != axis])
            found |= np.moveaxis(along, 0, axis)
        return found

    def _black_moves(self, goal: np.ndarray) -> np.ndarray:
        """Boards from which a step of the black king leads to a board of `goal`."""
        found = np.zeros((*self.shape[:-1], 8, 8), bool)
        goal = goal.reshape(found.shape)
        for rank, file in AROUND:
            (rank_here, rank_there), (file_here, file_there) = _shift(rank), _shift(file)
            found[..., rank_here, file_here] |= goal[..., rank_there, file_there]
        return found.reshape(self.shape)

    def _squares(self, axis: int) -> np.ndarray:
        """The square of the piece of an axis, in a shape that goes with all boards."""
        squares = np.array(HOMES) if axis == 0 else np.arange(64)
        return squares.reshape([-1 if at == axis else 1 for at in range(len(self.shape))])


@cache
def distances(pieces: str) -> Distances:
    """The distances of "", "Q", "R", "QR" or "RR", computed once in a process: two pieces take about a
    second."""
    return Distances(pieces)


def folded(squares: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Squares of the white king, the pieces and the black king as an index into the arrays of `Distances`,
    and what every square was xored with."""
    mirror = (7 if squares[0] % 8 > 3 else 0) | (56 if squares[0] // 8 > 3 else 0)
    king, *others = (square ^ mirror for square in squares)
    return (HOMES.index(king), *others), mirror


def beside(square: int) -> Iterator[int]:
    """The squares that a king steps to."""
    for rank, file in AROUND:
        if 0 <= square // 8 + rank < 8 and 0 <= square % 8 + file < 8:
            yield square + 8 * rank + file


def _shift(step: int) -> tuple[slice, slice]:
    """Those along an axis of 8 that a step does not lead off the board, and where it leads them."""
    return (slice(max(-step, 0), 8 - max(step, 0)), slice(max(step, 0), 8 - max(-step, 0)))


def _line(number: int, rank: int, file: int) -> tuple[tuple, tuple]:
    """The rank or file, as an index, that is `number` steps of a slide from the edge of the board, and the
    next one."""
    at = number if (rank or file) > 0 else 7 - number
    if rank:
        here, there = _shift(file)
        return (at, here), (at + rank, there)
    return (slice(None), at), (slice(None), at + file)
