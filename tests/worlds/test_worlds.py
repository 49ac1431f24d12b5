"""The text worlds keep the contract of text environments, and their logs are what they claim."""

from __future__ import annotations

import importlib.util
import pickle
import random
from functools import partial

import pytest

from envs.conformance import check_world
from envs.toy.walks import RandomWalks, graph
from rl_dialog.data.schema import Dialog
from tests.worlds.graphs import Graph7, Graph8, Graph9
from tests.worlds.mazes import Maze, Walk
from tests.worlds.text_game import PLAYERS, Game, play_episode, player_return, write_logs

if importlib.util.find_spec("textarena"):
    from tests.worlds import textarena_games

    TEXTARENA = list(textarena_games.GAMES.values())
else:
    TEXTARENA = []
WORLDS = [Maze, Walk, *TEXTARENA]
SLOW = ("ConnectFour", "Chopsticks", "TicTacToe")  # to search
LUCK = ("Blackjack", "KuhnPoker")  # in which 150 games do not tell half a player's skill


@pytest.mark.parametrize("world", WORLDS)
def test_an_episode_grows_by_the_reply_and_depends_on_its_seed_only(world: type[Game]):
    def play() -> tuple[list, float]:
        game, chance, total = world(), random.Random(5), 0.0
        messages, _ = game.reset(seed=11)
        over = False
        while not over:
            before, reply = messages, chance.choice(game.moves(game.state))
            messages, reward, terminated, truncated, _ = game.step(reply)
            assert messages[: len(before)] == before
            assert messages[len(before)] == {"role": "assistant", "content": reply}
            assert all("\n" not in message["content"] for message in messages)
            assert [m["role"] for m in messages[len(before) + 1 :]] == ["user"] * (not terminated)
            total, over = total + reward, terminated or truncated
        if terminated:
            with pytest.raises(RuntimeError, match="reset"):
                game.step("[0]")
        return messages, total

    random.seed(1)
    state = random.getstate()
    first = play()
    assert random.getstate() == state
    random.seed(2)
    assert play() == first


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[pytest.mark.slow] * (world.__name__ in SLOW)) for world in WORLDS]
)
def test_they_keep_the_contract(world: type[Game]):
    assert not [found for found in check_world(world, but=("other process",)) if found.fault]


@pytest.mark.parametrize("world", WORLDS)
def test_a_reply_that_is_no_move_never_pays(world: type[Game]):
    game = world()
    game.reset(seed=3)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = game.step("good morning")
        assert not info["legal"]
        total, over = total + reward, terminated or truncated
    assert total <= -1


@pytest.mark.parametrize("game", TEXTARENA)
def test_textarena_agrees_on_what_is_legal(game: type[Game]):
    chance, states, moves = random.Random(0), [], {"[9 9]", "[nothing]"}
    for seed in range(30):
        env = game()
        env.reset(seed=seed)
        over = False
        while not over:
            states.append(env.state)
            legal = env.moves(env.state)
            moves |= set(legal)
            *_, terminated, truncated, _ = env.step(chance.choice(legal))
            over = terminated or truncated
    for state in chance.sample(states, min(len(states), 40)):
        legal = set(game().moves(state))
        for move in sorted(moves):
            rules = pickle.loads(state)
            rules.step(move)
            assert rules.state.game_info[0]["invalid_move"] == (move not in legal), (game().line(state), move)


@pytest.mark.parametrize("world", [world for world in WORLDS if world.__name__ not in SLOW])
def test_skill_pays(world: type[Game]):
    worst, middle, best = (player_return(world, player, 150) for player in PLAYERS)
    assert worst < middle < best or (world.__name__ in LUCK and worst < best)


@pytest.mark.parametrize("world", [Maze, Walk, *TEXTARENA[:1]])
def test_logs_are_dialogs_of_every_player(world: type[Game], tmp_path):
    found = write_logs(world, tmp_path / "logs.jsonl", episodes=30, seed=4)
    lines = (tmp_path / "logs.jsonl").read_text(encoding="utf-8").splitlines()
    dialogs = [Dialog.from_json(line) for line in lines]
    assert [dialog.meta["player"] for dialog in dialogs] == list(PLAYERS) * 10
    totals = [sum(dialog.messages[i]["reward"] for i in dialog.replies) for dialog in dialogs]
    assert found["logs"] == pytest.approx(sum(totals) / 30, abs=1e-4)
    assert found["truncated"] == sum(dialog.truncated for dialog in dialogs)
    write_logs(world, tmp_path / "again.jsonl", episodes=30, seed=4)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "logs.jsonl").read_bytes()


def test_the_good_player_takes_the_shortest_way():
    maze = Maze(seed=2, size=5, cost=0.5)
    distance, frontier = {maze.goal: 0}, [maze.goal]
    for cell in frontier:  # grows while it is read: breadth first
        new = [a for a in maze.cells if frozenset((a, cell)) in maze.open and a not in distance]
        distance |= dict.fromkeys(new, distance[cell] + 1)
        frontier += new
    assert len(distance) == 25
    for i in range(20):
        messages, truncated = play_episode(maze, "good", f"way {i}")
        start = tuple(map(int, messages[0]["content"].split(";")[0].removeprefix("at ").split(",")))
        assert not truncated
        assert sum(m.get("reward", 0) for m in messages) == -0.5 * (distance[start] - 1)


def test_worlds_differ_by_their_seed_and_scale():
    def text(world: Game) -> list:
        return [play_episode(world, "random", f"same {i}")[0] for i in range(5)]

    assert text(Walk(seed=1)) == text(Walk(seed=1)) != text(Walk(seed=2))
    assert text(Maze(seed=1)) == text(Maze(seed=1)) != text(Maze(seed=2))
    small, large = (player_return(partial(Walk, seed=3, scale=x, slip=0.2), "good", 50) for x in (1, 10))
    assert large == pytest.approx(10 * small)
    assert max(len(play_episode(Walk(seed=s), "random", "steps")[0]) for s in range(20)) <= 2 * 10


def test_references_are_the_logs_players_and_the_good_one():
    """The three players take turns as in the logs, so that every third episode is the good one's."""
    found = Walk.reference_returns(30, 5)
    assert list(found) == ["behaviour policy", "good player"] and {len(each) for each in found.values()} == {
        30
    }
    assert found["behaviour policy"][2::3] == found["good player"][2::3]
    assert sum(found["good player"]) > sum(found["behaviour policy"])
    assert found == Walk.reference_returns(30, 5) != Walk.reference_returns(30, 6)


def test_the_graphs_of_the_comparison_differ():
    seeds = [world.graph_seed for world in (RandomWalks, Graph7, Graph8, Graph9)]
    assert len({graph(seed) for seed in seeds}) == 4
    for world in (Graph7, Graph8, Graph9):
        assert world.optimum() == pytest.approx(1.0) and world().reset(seed=0)[0][0]["role"] == "user"
