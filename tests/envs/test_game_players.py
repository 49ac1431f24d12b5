"""Scripted players of TextArena's games are as good as they say, and random movers find moves from words."""

from __future__ import annotations

import pickle
import random
from types import ModuleType

import pytest

from envs import text_env
from envs.adapters.catalogue import measure, table
from envs.adapters.game_players import RULES, hanoi, lights_out, mastermind, nim, players_of_game, tic_tac_toe
from envs.adapters.random_player import heard, propose, random_move
from envs.conformance import check_world
from envs.text_world import play
from rl_dialog.errors import UserError


@pytest.fixture(scope="module")
def textarena() -> ModuleType:
    return pytest.importorskip("textarena", reason="pip install textarena")


def returns(name: str, player: str, seeds: range) -> list[float]:
    make = text_env(f"textarena:{name}")
    players = make().scripted_players()
    played = [play(make(), players[player](seed), seed=seed) for seed in seeds]
    assert {each.end for each in played} == {"terminated"}
    return [each.returns["assistant"] for each in played]


@pytest.mark.parametrize(
    ("name", "player"),
    [
        ("Nim-v0", "perfect"),
        ("Nim-v0-large", "perfect"),  # who moves first wins all of these
        ("Mastermind-v0", "consistent"),
        ("Mastermind-v0?duplicate_numbers=true&code_length=5", "consistent"),
        ("TowerOfHanoi-v0-medium", "optimal"),
        ("GuessTheNumber-v0-hardcore", "bisection"),
        ("FrozenLake-v0-hardcore", "optimal"),
        ("Sudoku-v0-easy", "optimal"),
        ("LightsOut-v0", "optimal"),
        ("LightsOut-v0?size=3", "optimal"),
    ],
)
def test_players_that_solve_their_game(textarena, name, player):
    assert set(returns(name, player, range(4, 7))) == {1.0}


def test_tower_of_hanoi_takes_the_fewest_moves(textarena):
    make = text_env("textarena:TowerOfHanoi-v0")
    assert len(play(make(), make().scripted_players()["optimal"](0), seed=0).infos) == 7
    # from a state that no shortest way passes: 1 makes way for 2, which makes way for 3
    assert hanoi("A: [3]\nB: [1]\nC: [2]", random.Random(0)) == "[B A]"


def test_bisection_needs_no_more_guesses_than_bits(textarena):
    make = text_env("textarena:GuessTheNumber-v0?max_number=31")
    played = [play(make(), make().scripted_players()["bisection"](0), seed=seed) for seed in range(12)]
    assert max(len(each.infos) for each in played) <= 5 and {each.end for each in played} == {"terminated"}


def test_minimax_never_loses_on_either_side(textarena):
    for role in (0, 1):
        found = returns(f"TicTacToe-v0?role={role}", "minimax", range(8))
        assert min(found) >= 0 and max(found) == 1
    both = text_env("textarena:TicTacToe-v0?opponent=minimax")
    assert play(both(), both().scripted_players()["minimax"](1), seed=1).returns == {"assistant": 0}


@pytest.mark.slow
def test_a_scripted_opponent_by_name_is_part_of_the_world(textarena):
    """Nim's first player wins, if it knows how: against itself as against anybody."""
    make = text_env("textarena:Nim-v0?opponent=perfect")
    assert not [each for each in check_world(make, but=("players", "other process")) if each.fault]
    world = pickle.loads(pickle.dumps(make()))
    assert play(world, make().scripted_players()["perfect"](0), seed=2).returns == {"assistant": 1}
    second = text_env("textarena:Nim-v0?role=1&opponent=perfect")
    assert play(second(), second().scripted_players()["perfect"](0), seed=2).returns == {"assistant": -1}
    with pytest.raises(UserError, match="expected random, self, perfect, module:function"):
        text_env("textarena:Nim-v0?opponent=perfekt")


@pytest.mark.parametrize(
    ("name", "player", "least"),
    [
        ("KuhnPoker-v0-extreme", "equilibrium", -0.4),
        ("PigDice-v0-50", "hold_at_20", 0.5),
        ("Blackjack-v0-long", "basic", 0.3),
        ("Secretary-v0", "optimal", 0.2),
    ],
)
def test_players_of_games_of_chance(textarena, name, player, least):
    """What a random mover gets is far below, but for the poker, where it only may not lose."""
    found = returns(name, player, range(12))
    assert sum(found) / len(found) >= least


def test_rules_read_by_hand():
    chance = random.Random(1)
    assert nim("Current Pile:\n  pile 0: 3\n  pile 1: 4\n  pile 2: 5", chance) == "[0 2]"  # 1 ^ 4 ^ 5 is 0
    lost = {nim("Current Pile:\n  pile 0: 1\n  pile 1: 1", chance) for _ in range(20)}
    assert lost == {"[0 1]", "[1 1]"}
    board = "you will be 'X'\nCurrent Board:\n\n O | O | 2 \n---+---+---\n 3 | X | 5 \n---+---\n 6 | 7 | X "
    assert tic_tac_toe(board, chance) == "[2]"
    lake = "Current grid:\n   0 1 2\n0: . . .\n1: . O .\n2: O O O"
    assert lights_out(lake, chance) == "[2 1]"
    prompt = "the code that is 2 digits long, each digit from 1 to 3, with no duplicates"
    told = f"{prompt}\nSubmitted [1 2]. Feedback: 0 black peg(s), 1 white peg(s)"
    assert {mastermind(told, random.Random(i)) for i in range(30)} == {"[2 3]", "[3 1]"}
    with pytest.raises(UserError, match="expected piles in what the game told, got 'hello'"):
        nim("hello", chance)


def test_every_rule_belongs_to_a_game(textarena):
    from textarena.envs.registration import ENV_REGISTRY

    folders = {str(spec.entry_point).partition(":")[0].split(".")[-2] for spec in ENV_REGISTRY.values()}
    assert set(RULES) <= folders and players_of_game("Chess") == {}


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("Type [row col] to press a light, 0 to 4.", "[3 4]"),
        ("Reply with your guess in the format '[<number>]'.", "[7]"),
        ("'[attack M O]' where M is 0 or 1, or '[split L R]'", "[attack 1 0]"),
        ("[Propose] $X.XX or [Accept]", "[Propose] $1.25"),
        ("[Propose] CCAACCCC", "[Propose] AECDBCCA"),
        ("There are 5 buttons: red, blue, green.", "[blue]"),
        ("Allocate 20 units. Format: '[A4 B2 C2]'", "[A7 B11 C2]"),
        ("[place () {(3,2): [C0]}]", "[place () {(1,2): [C0]}]"),
        ("'[park Alice X]'\n      | cafe | pool |\nBob   |  X   |      |", "[pool Bob X]"),
    ],
)
def test_proposals_follow_from_how_moves_are_written(told, wanted):
    """Of each kind, not that very one, which may be one in millions: its shape with digits and letters
    alike."""
    known, chance = heard([{"role": "user", "content": told}]), random.Random(0)
    shape = "".join("0" if c.isdigit() else c for c in wanted)
    code = wanted.startswith("[Propose] A")
    found = {propose(known, chance) for _ in range(3000)}
    shapes = {"".join("0" if c.isdigit() else c for c in each) for each in found}
    numbers = shape.replace("00", "0")
    if code:
        assert len({each for each in found if each.startswith("[Propose] ")}) > 100
    else:
        assert shape in shapes or numbers in {each.replace("00", "0") for each in shapes}


def test_shared_out_numbers_make_up_one_that_was_told():
    known = heard([{"role": "user", "content": "Allocate exactly 20 units: '[A4 B2 C2]'"}])

    def legal(move: str) -> bool:
        return sum(int(part[1:]) for part in move.strip("[]").split() if part[1:].isdigit()) == 20

    assert legal(random_move([{"role": "user", "content": "20: '[A4 B2 C2]'"}], random.Random(3), legal))
    assert 20 in known.numbers


@pytest.mark.parametrize(
    "name",
    [
        *("Bandit-v0", "LightsOut-v0", "PegJump-v0", "Sudoku-v0-very-easy", "Chopsticks-v0", "Tak-v0"),
        *("ColonelBlotto-v0-small", "IteratedTwoThirdsAverage-v0", "TwoDollar-v0", "NewRecruit-v0"),
    ],
)
def test_random_movers_find_a_first_move(textarena, name):
    world = text_env(f"textarena:{name}")()
    found = []
    for seed in range(3):
        world.reset(seed=seed)
        found.append(world.game.legal(world.random_move(random.Random(seed))))
    assert any(found)


@pytest.mark.slow
def test_the_catalogue_has_the_returns_of_those_who_know(textarena):
    row = measure("textarena:Nim-v0", episodes=4)
    assert row.scripted == (("perfect", 1.0),) and "| `perfect` 1.00 |" in table([row], set())
