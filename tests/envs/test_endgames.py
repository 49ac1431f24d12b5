"""Chess end-games: distances to mate against what is known and against the chess library, and the world."""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np
import pytest

from envs import text_env
from envs.conformance import check_world
from envs.text_world import play
from envs.toy.__main__ import main
from envs.toy.endgame_tables import DRAW, HOMES, NO_POSITION, distances, folded
from envs.toy.endgames import LONGEST, Endgames, Mover, best_moves, moves_to_mate, read
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError

chess = pytest.importorskip("chess", reason="pip install chess")

OPPONENTS = ("best", "random", 0.5)


def board_of(kind: str, squares: list[int]) -> chess.Board:
    board = chess.Board(None)
    for square, name in zip(squares, kind[:-1] + "k", strict=True):
        board.set_piece_at(square, chess.Piece.from_symbol(name))
    return board


def boards(kind: str, count: int, *, turn: bool, seed: int = 0) -> list[tuple[chess.Board, int]]:
    """Boards of a kind as squares are drawn, also impossible ones, and what the table says of them."""
    chance, found = random.Random(f"{kind} {seed}"), []
    table = distances(kind[1:-1])
    for _ in range(count):
        squares = chance.sample(range(64), len(kind))
        board = board_of(kind, squares)
        board.turn = turn
        found.append((board, int((table.white if turn else table.black)[folded(squares)[0]])))
    return found


# --- the distances ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LONGEST)
def test_the_longest_mates_are_the_known_ones(kind):
    assert distances(kind[1:-1]).longest == LONGEST[kind]


@pytest.mark.parametrize(("kind", "mates"), [("KQK", 364), ("KRK", 216)])
def test_as_many_mates_as_are_known(kind, mates):
    """Each board with the king on a1 to d4 stands for its four mirror images."""
    assert 4 * np.count_nonzero(distances(kind[1:-1]).black == 0) == mates


@pytest.mark.parametrize("kind", LONGEST)
def test_positions_are_those_that_the_library_takes(kind):
    for board, moves in boards(kind, 300, turn=True):
        assert (moves != NO_POSITION) == board.is_valid()
        assert moves == NO_POSITION or 1 <= moves <= LONGEST[kind]  # White to move always mates


@pytest.mark.parametrize("kind", LONGEST)
def test_a_position_is_as_good_as_its_best_move(kind):
    """One move on with the library's rules: White's distance is the least of Black's and one more, Black's
    the greatest of White's, mate is 0, stalemate a draw."""
    for board, moves in boards(kind, 60, turn=True, seed=1):
        if moves != NO_POSITION:
            assert moves == 1 + min(after(board)) == moves_to_mate(board)
    for board, moves in boards(kind, 120, turn=False, seed=2):
        if moves != NO_POSITION:
            mated = 0 if board.is_checkmate() else DRAW
            assert moves == max(after(board), default=mated) == moves_to_mate(board)


def after(board: chess.Board) -> list[int]:
    found = []
    for move in board.legal_moves:
        board.push(move)
        found.append(moves_to_mate(board))
        board.pop()
    return found


def mates(board: chess.Board, moves: int) -> bool:
    """Whether White mates within so many moves: a search that knows no table."""
    for move in list(board.legal_moves):
        board.push(move)
        if moves == 1:
            forced = board.is_checkmate()
        else:
            forced = board.is_checkmate() or (
                any(board.legal_moves)
                and all(mates_after(board, reply, moves - 1) for reply in list(board.legal_moves))
            )
        board.pop()
        if forced:
            return True
    return False


def mates_after(board: chess.Board, reply: chess.Move, moves: int) -> bool:
    board.push(reply)
    found = mates(board, moves)
    board.pop()
    return found


@pytest.mark.parametrize("kind", LONGEST)
def test_short_mates_are_found_by_searching(kind):
    positions = [each for each in boards(kind, 3000, turn=True, seed=3) if each[1] in (1, 2, 3)]
    for number in (1, 2, 3):
        found = [board for board, moves in positions if moves == number][: 4 if number < 3 else 2]
        assert found
        for board in found:
            assert not mates(board, number - 1) if number > 1 else mates(board, 1)
            assert number == 3 or mates(board, number)


def test_the_longest_mates_are_played_out():
    """Best play against best play takes as long as the table says, in the hardest positions."""
    for kind in LONGEST:
        cells = np.argwhere(distances(kind[1:-1]).white == LONGEST[kind])
        squares = ([HOMES[home], *map(int, others)] for home, *others in cells)
        board = board_of(kind, next(each for each in squares if len(set(each)) == len(each)))
        for left in range(LONGEST[kind], 0, -1):
            assert moves_to_mate(board) == left
            board.push(best_moves(board)[-1])
            if left > 1:
                board.push(best_moves(board)[0])
        assert board.is_checkmate()


# --- the world ----------------------------------------------------------------------------------------------


def at(fen: str, **options) -> Endgames:
    """A world in a position."""
    world = Endgames(**options)
    world.reset(seed=1)
    world.fen = fen
    return world


def test_it_keeps_the_contract():
    assert not [each for each in check_world(text_env("toy_endgames?pieces=KQK,KRK")) if each.fault]


def test_it_goes_by_name_with_options():
    make = text_env("toy_endgames?pieces=KRK,KQK&opponent=best&turns=20&mate_in=3")
    assert make.options == {"pieces": "KRK,KQK", "opponent": "best", "turns": 20, "mate_in": 3}
    assert make.__name__ == "toy_endgames?pieces=KRK,KQK&opponent=best&turns=20&mate_in=3"
    world = pickle.loads(pickle.dumps(make))()
    seen = set()
    for seed in range(40):
        messages, info = world.reset(seed=seed)
        seen.add((info["meta"]["pieces"], info["meta"]["mate_in"]))
        assert moves_to_mate(chess.Board(messages[0]["content"])) == info["meta"]["mate_in"]
    assert seen == {(kind, moves) for kind in ("KRK", "KQK") for moves in (1, 2, 3)}


@pytest.mark.parametrize(
    "reply", ["", "Rb9", "Qd4", "--", "O-O", "e4", "Kb1 Kb2", "d1", "Re1xe5", "Kc3", "♖d8"]
)
def test_what_is_no_legal_move_costs_one_and_changes_nothing(reply):
    world = at("8/8/8/4k3/8/8/8/K2R4 w - - 0 1")
    messages, reward, terminated, truncated, info = world.step(reply)
    assert (reward, terminated, truncated, info) == (-1.0, False, False, {"legal": False})
    assert messages[-1] == {"role": "user", "content": "8/8/8/4k3/8/8/8/K2R4 w - - 0 1"}
    assert messages[-2] == {"role": "assistant", "content": reply}


def test_moves_are_read_in_several_spellings():
    board = chess.Board("8/8/8/4k3/8/8/8/K2R4 w - - 0 1")
    for text in ("Rd9", "Kb1", " K b 1\n", "a1b1", "Ka1b1", "Kb1+"):
        found = read(board, text)
        assert (found is None) == (text == "Rd9")
        assert found is None or found.uci() == "a1b1"


def test_mate_pays_one():
    world = at("7k/8/6K1/8/8/8/8/R7 w - - 0 1")
    messages, reward, terminated, truncated, info = world.step("Ra8#")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"legal": True, "result": "checkmate"} and messages[-1]["role"] == "assistant"
    with pytest.raises(RuntimeError, match="call reset first"):
        world.step("Ra7")
    assert "♖" in world.draw().splitlines()[0]


def test_stalemate_and_the_loss_of_the_last_piece_are_draws():
    world = at("7k/8/8/8/8/8/8/K4Q2 w - - 0 1")
    assert chess.Move.from_uci("f1f7") not in best_moves(chess.Board(world.fen))
    assert world.step("Qf7")[1:] == (0.0, True, False, {"legal": True, "result": "stalemate"})
    world = at("8/8/8/4k3/8/8/8/K2R4 w - - 0 1", opponent="best")
    assert world.step("Rd4")[1:] == (0.0, True, False, {"legal": True, "result": "insufficient_material"})


def test_with_a_piece_less_the_game_goes_on():
    world = at("8/8/8/4k3/8/7R/8/K2R4 w - - 0 1", opponent="best")
    assert world.step("Rd4")[1:4] == (0.0, False, False)
    assert world.fen.startswith("8/8/8/8/3k4/7R/8/K7 w")
    assert 1 <= moves_to_mate(chess.Board(world.fen)) <= LONGEST["KRK"]


@pytest.mark.parametrize("mate_in", [16, 254, 255, 1000])
def test_a_position_is_a_legal_one_however_long_mate_may_take(mate_in):
    world = Endgames(mate_in=mate_in)
    for seed in range(20):
        messages, info = world.reset(seed=seed)
        assert chess.Board(messages[0]["content"]).is_valid() and info["meta"]["mate_in"] <= 16


def test_the_limit_counts_every_reply():
    world = Endgames(pieces="KQK", turns=10)
    played = play(world, lambda messages: "pass", seed=2)
    assert (played.end, played.returns["assistant"], len(played.infos)) == ("truncated", -10.0, 10)


@pytest.mark.parametrize("opponent", OPPONENTS)
def test_the_optimal_player_earns_the_optimum(opponent):
    """Against whom it may be, in at most the moves that the table says; against the best in exactly these."""
    make = Endgames(opponent=opponent)
    for seed in range(30):
        played = play(make(), make.scripted_players()["optimal"](seed), seed=seed)
        (dialog,) = played.dialogs.values()
        assert played.returns["assistant"] == make.optimum() == 1.0
        assert len(played.infos) <= dialog.meta["mate_in"]
        assert opponent != "best" or len(played.infos) == dialog.meta["mate_in"]


def test_a_better_opponent_and_a_worse_player_win_less():
    def wins(skill: float, opponent: str) -> float:
        make = Endgames(pieces="KQK,KRK", opponent=opponent)
        return float(np.mean([play(make(), Mover(skill, i), seed=i).returns["assistant"] for i in range(40)]))

    half, against_best = wins(0.5, "random"), wins(0.5, "best")
    assert wins(0.0, "best") < against_best < half < 1


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ("peices=KRK", "options among pieces, opponent, turns, mate_in, got peices. Did you mean pieces"),
        (
            "pieces=KRRRK",
            "pieces of KQK, KQRK, KRK, KRRK, several with commas, got 'KRRRK'. Did you mean KRRK",
        ),
        ("opponent=stockfish", "best, random or a number from 0 to 1 as opponent, got 'stockfish'"),
        ("opponent=1.5", "a number from 0 to 1"),
        ("opponent=true", "a number from 0 to 1"),
        ("turns=many", "a whole number above 0 as turns"),
        ("turns=12", "turns of at least 16, the longest mate of KQK, KQRK, KRK, KRRK, got 12"),
        ("mate_in=0", "a whole number above 0 as mate_in"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, wrong):
    with pytest.raises(UserError, match=wrong):
        text_env(f"toy_endgames?{options}")


def test_other_worlds_have_no_options():
    with pytest.raises(
        UserError, match="expected toy_maze without options, which it does not have, got size"
    ):
        text_env("toy_maze?size=3")
    with pytest.raises(UserError, match="unknown env 'toy_endgame'.*Did you mean toy_endgames"):
        text_env("toy_endgame?pieces=KRK")


def test_without_the_library_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(UserError, match="expected the chess library .*pip install chess"):
        text_env("toy_endgames")()
    with pytest.raises(SystemExit):
        main(["toy_endgames", "--dialogs", "1"])
    assert "pip install chess" in capsys.readouterr().err


def test_logs_are_dialogs_that_replay(tmp_path):
    make = text_env("toy_endgames?pieces=KQK&mate_in=4")
    told = make.write_logs(tmp_path / "logs.jsonl", dialogs=12, seed=4)
    dialogs = list(read_jsonl(tmp_path / "logs.jsonl"))
    assert len({dialog.id for dialog in dialogs}) == told["dialogs"] == 12
    assert {dialog.meta["player"] for dialog in dialogs} == {
        "0% best moves",
        "50% best moves",
        "90% best moves",
    }
    returns = [sum(d.messages[i]["reward"] for i in d.replies) for d in dialogs]
    assert told["mean_return"] == pytest.approx(np.mean(returns)) and 0 < np.mean(returns) < 1
    for dialog in dialogs:
        said = iter([dialog.messages[i]["content"] for i in dialog.replies])
        again = play(make(), lambda _, s=said: next(s), seed=dialog.meta["seed"])
        assert again.dialogs["assistant"].messages == dialog.messages
