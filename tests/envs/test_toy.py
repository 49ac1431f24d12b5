"""The toy worlds: known answers (spec: ilql, section 10), optima by other ways to compute them, logs."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

import numpy as np
import pytest

from envs import text_env
from envs.conformance import check_world
from envs.text_world import play
from envs.toy import TOYS, BranchingGraph, DoubleT, HiddenDoubleT, HiddenHouse, House, RandomWalks
from envs.toy.__main__ import main
from envs.toy.graphs import Luck, Stitching
from envs.toy.maze import FREE, GOAL, PARTS, STEPS, distances
from envs.toy.process import Guided, TextProcess
from envs.toy.questions import GuessingGame, GuessMyCity, TwentyQuestions
from envs.toy.walks import NODES
from envs.toy.walks import distances as fewest_steps
from rl_dialog.data.schema import Dialog, read_jsonl

WORLDS = [*(world for world in TOYS.values() if isinstance(world, type)), Stitching, Luck]


@pytest.mark.parametrize("world", WORLDS)
def test_they_keep_the_contract(world):
    found = check_world(world, but=("other process", "players", "references"))
    assert not [each for each in found if each.fault]


@pytest.mark.parametrize("name", TOYS)
def test_they_go_by_name(name):
    assert text_env(name) is TOYS[name]


@pytest.mark.parametrize("world", WORLDS)
def test_the_optimal_player_earns_the_optimum(world):
    """Within 4 standard errors over 200 episodes, and never above it with its own luck averaged."""
    make = world.scripted_players()["optimal"]
    returns = [sum(play(world(), make(i), seed=i).returns.values()) for i in range(200)]
    error = np.std(returns, ddof=1) / np.sqrt(len(returns))
    assert abs(np.mean(returns) - world.optimum()) <= 4 * error + 1e-9


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_no_move_does_not_pay(world):
    played = play(world(), lambda messages: "good morning", seed=3)
    assert not any(info["legal"] for info in played.infos)
    assert sum(played.returns.values()) < world.optimum()


def test_moves_are_read_in_any_spelling():
    world = DoubleT()
    world.reset(seed=1)
    before = world.state
    assert world.step(f"  Move {next(iter(STEPS))}.\n")[-1] == {"legal": True}
    assert world.step("move north")[1:] == (-4.0, False, False, {"legal": False})
    assert before in FREE


# --- the graphs ---------------------------------------------------------------------------------------------


def logged(world: type[TextProcess], dialogs: int) -> list[Dialog]:
    return [next(iter(played.dialogs.values())) for played in world.logged(dialogs, seed=2)]


def expectile(values: list[float], tau: float) -> float:
    """By fixed points of its definition: the weights are tau above it and 1 - tau below."""
    found = float(np.mean(values))
    for _ in range(200):
        weights = [tau if value > found else 1 - tau for value in values]
        found = float(np.average(values, weights=weights))
    return found


def values_of(dialogs: list[Dialog], tau: float, gamma: float = 1.0) -> tuple[dict, dict]:
    """V and Q of what the user said last and the reply: expectile backups over the logs, to the fixed
    point."""
    steps = defaultdict(list)
    for dialog in dialogs:
        texts = [message["content"] for message in dialog.messages]
        for i in dialog.replies:
            after = texts[i + 1] if i + 1 < len(texts) else None
            steps[texts[i - 1], texts[i]].append((dialog.messages[i]["reward"], after))
    q, v = dict.fromkeys(steps, 0.0), {}
    for _ in range(6):
        v = {
            state: expectile([q[s, a] for (s, a), found in steps.items() for _ in found if s == state], tau)
            for state in {state for state, _ in steps}
        }
        q = {key: np.mean([r + gamma * (v[s] if s else 0) for r, s in found]) for key, found in steps.items()}
    return v, q


@pytest.mark.parametrize(
    ("tau", "bridge"), [(0.5, -5.333), (0.7, -4.727), (0.8, -4.222), (0.9, -3.429), (0.95, -2.833)]
)
def test_the_branching_graph(tau, bridge):
    v, q = values_of(logged(BranchingGraph, 33), tau)
    assert v["A bridge. North or south?"] == pytest.approx(bridge, abs=5e-4)
    left, right = (q["The road forks. Left or right?", side] for side in ("left", "right"))
    assert left == -4.0 and (right > left) == (tau > 5 / 6)


def test_the_branch_flips_at_five_sixths():
    _, q = values_of(logged(BranchingGraph, 11), 5 / 6)
    assert q["The road forks. Left or right?", "right"] == pytest.approx(-4.0)


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.9])
def test_stitching(tau):
    v, q = values_of(logged(Stitching, 20), tau, gamma=0.9)
    assert v["You are in the hall. Left or right?"] == pytest.approx(tau)
    assert q["You are at the gate.", "go"] == pytest.approx(0.9 * tau)


def test_luck_is_no_choice():
    dialogs = logged(Luck, 400)
    v, _ = values_of(dialogs, 0.9)
    returns = [sum(dialog.messages[i]["reward"] for i in dialog.replies) for dialog in dialogs]
    assert abs(np.mean(returns)) < 4 / np.sqrt(400)
    assert v["Toss or wait?"] == pytest.approx(
        np.mean(returns)
    )  # the luck of the coin, and no expectile of it
    assert expectile([-1.0, 1.0], 0.9) == pytest.approx(0.8)  # what an expectile of returns would say
    assert expectile(returns, 0.9) == pytest.approx(0.8, abs=0.08)


# --- the walks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph_seed", [1002, 1, 2])
def test_the_best_walk_is_the_shortest(graph_seed):
    world = type("Walks", (RandomWalks,), {"graph_seed": graph_seed})
    assert world.optimum() == pytest.approx(1.0)
    make, fewest = world.scripted_players()["optimal"], fewest_steps(graph_seed)
    for seed in range(30):
        played = play(world(), make(seed), seed=seed)
        first = ord(played.dialogs["assistant"].messages[0]["content"]) - ord("a")
        assert len(played.infos) == fewest[first] and played.returns["assistant"] == 1.0


def test_a_walk_pays_its_optimality():
    """A detour of one step of three, in a graph where a node leads to the goal by 1 and by 2 steps."""
    world = RandomWalks()
    edges = {n: [ord(m) - ord("a") for m in world.moves((n, 0, 1))] for n in range(1, NODES)}
    found = next((n, m) for n in edges if 0 in edges[n] for m in edges[n] if m and 0 in edges[m])
    world.reset(seed=0)
    world.state = (found[0], 0, 1)
    assert world.step(chr(ord("a") + found[1]))[1:3] == (0.0, False)
    assert world.step("a")[1:3] == (pytest.approx(8 / 9), True)


def test_walks_of_the_logs_are_random_and_end_after_ten_steps():
    dialogs = logged(RandomWalks, 300)
    lengths = [len(dialog.replies) for dialog in dialogs]
    assert max(lengths) == 10 and not any(dialog.truncated for dialog in dialogs)
    mean = np.mean([sum(d.messages[i]["reward"] for i in d.replies) for d in dialogs])
    assert 0.05 < mean < 0.3


# --- the maze -----------------------------------------------------------------------------------------------


def test_the_maze_has_the_published_figures():
    distance = distances(GOAL)
    starts = FREE - {GOAL}
    assert (len(FREE), len(starts), GOAL in FREE) == (26, 25, True)
    assert max(row for row, _ in FREE) < 10 and max(column for _, column in FREE) < 13
    assert np.mean([distance[cell] for cell in starts]) == pytest.approx(7.84)
    assert max(distance.values()) == 12
    assert DoubleT.optimum() == pytest.approx(-6.84)


def test_the_maze_with_walls_only_costs_finding_out_where_one_is():
    """The optimum over beliefs, against a search of its own: the best expected number of moves from a set of
    cells that the walls so far leave possible."""
    assert HiddenDoubleT.optimum() == pytest.approx(best_of_sets(), abs=1e-6)
    assert DoubleT.optimum() - 1 < HiddenDoubleT.optimum() < DoubleT.optimum()


def best_of_sets() -> float:
    world = HiddenDoubleT()

    def seen(cells) -> dict[str, frozenset]:
        groups = defaultdict(set)
        for cell in cells:
            groups[world.line(cell)].add(cell)
        return {line: frozenset(group) for line, group in groups.items()}

    @cache
    def total(cells: frozenset, left: int) -> float:
        """The best sum of returns over these cells."""
        if left == 0:
            return -len(cells)
        worths = []
        for move in world.moves(None):
            after = [world.outcomes(cell, move)[0] for cell in sorted(cells)]
            rest = seen([state for _, _, state in after if state is not None]).values()
            worths.append(sum(reward for _, reward, _ in after) + sum(total(each, left - 1) for each in rest))
        return max(worths)

    return sum(total(cells, 24) for cells in seen(FREE - {GOAL}).values()) / 25


def test_logs_of_the_maze_keep_to_its_parts():
    """No dialog from the upper parts reaches the goal, and together they cover the maze."""
    covered = set()
    for dialog in logged(DoubleT, 60):
        text = [m["content"].split("You are at ")[1].split(".")[0] for m in dialog.messages[::2]]
        cells = {tuple(map(int, place.split(", "))) for place in text if place}
        assert any(cells <= part for part, _ in PARTS)
        covered |= cells
        if not dialog.truncated:
            assert cells <= PARTS[0][0]
    assert covered == FREE - {GOAL}


def test_logs_of_the_maze_are_mostly_random():
    dialogs = logged(DoubleT, 120)
    solvers = [dialog for dialog in dialogs if dialog.meta["player"] == "solver"]
    assert 0.05 < len(solvers) / 120 < 0.25
    assert max(len(dialog.replies) for dialog in solvers) < 60
    returns = [sum(d.messages[i]["reward"] for i in d.replies) for d in dialogs]
    assert -90 < np.mean(returns) < -60


# --- the house ----------------------------------------------------------------------------------------------


def test_the_stale_food_can_always_be_put_away():
    assert House.optimum() == pytest.approx(1.0)
    assert HiddenHouse.optimum() == pytest.approx(1.0)


def test_the_best_player_of_the_house_takes_the_shortest_way():
    """Against breadth-first search over its states."""
    world = House()
    for seed in range(10):
        world.reset(seed=seed)
        frontier, steps, seen = [world.state], 0, {world.state}
        while None not in frontier:
            frontier = [world.outcomes(s, move)[0][2] for s in frontier for move in world.moves(s)]
            frontier = [state for state in dict.fromkeys(frontier) if state not in seen]
            seen |= set(frontier)
            steps += 1
        assert len(play(House(), House.scripted_players()["optimal"](seed), seed=seed).infos) == steps


def test_food_out_of_sight_is_not_told():
    world = HiddenHouse()
    lines = {world.line((room, food, False)) for room in ("hall", "study") for food in ("study", "garden")}
    assert len(lines) == 3 and sum("stale bread" in line for line in lines) == 1


# --- the questions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", [TwentyQuestions, GuessMyCity])
def test_every_question_and_guess_is_read_as_itself(game):
    world = game()
    moves = [world.read(None, move) for move in world.moves(None)]
    assert moves == [*game.questions, *game.things]
    assert world.read(None, "Is it an apple or a banana, in Paris or Rome?") is None
    assert world.read(None, "hm") is None


def test_all_things_can_be_told_apart():
    answers = {tuple(held.values()) for held in TwentyQuestions.things.values()}
    assert len(answers) == len(TwentyQuestions.things) == 40
    assert all(len(set(held)) == 5 for held in GuessMyCity.things.values())


def test_a_game_of_questions():
    world = TwentyQuestions()
    world.reset(seed=1)
    world.state = ("otter", "", 0)
    for reply, answer in [("An animal?", "Yes."), ("wheels?", "No."), ("frog", "No."), ("Eh?", "I do not")]:
        messages, reward, terminated, *_ = world.step(reply)
        assert (reward, terminated) == (-1.0, False) and messages[-1]["content"].startswith(answer)
    assert world.step("Is it an OTTER?")[1:3] == (0.0, True)
    lost = play(TwentyQuestions(), lambda messages: "hm", seed=1)
    assert (lost.end, lost.returns["assistant"]) == ("terminated", -20.0)


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_questions_and_guesses_is_better(seed):
    """The search that asks first and guesses then, against one that tries everything in any order."""
    chance = random.Random(seed)
    things = {
        f"thing{'abcdefg'[i]}": {q: chance.choice(["Yes.", "No.", "Maybe."]) for q in "xyz"} for i in range(7)
    }
    game = type("Small", (GuessingGame,), {"things": things, "questions": {q: q for q in "xyz"}})

    @cache
    def total(names: frozenset) -> float:
        worths = [float(-len(names) + 1 + total(names - {name})) for name in names]
        for question in "xyz":
            parts = defaultdict(set)
            for name in names:
                parts[things[name][question]].add(name)
            if len(parts) > 1:
                worths.append(-len(names) + sum(total(frozenset(part)) for part in parts.values()))
        return max(worths, default=0.0)

    assert game.optimum() == pytest.approx(total(frozenset(things)) / 7)


def test_the_best_questions_are_known():
    """40 things cannot be told apart by fewer replies than the cheapest tree of yes and no would need."""

    @cache
    def ideal(n: int) -> float:
        """The best return if every split of n things could be asked for."""
        if n <= 1:
            return 0.0
        splits = (k / n * ideal(k) + (n - k) / n * ideal(n - k) for k in range(1, n // 2 + 1))
        return max(-(n - 1) / 2, max(splits) - 1)

    assert -6.0 < TwentyQuestions.optimum() <= ideal(40)
    assert TwentyQuestions.optimum() == pytest.approx(-5.2)
    assert GuessMyCity.optimum() == pytest.approx(-188 / 65)


# --- logs and command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy_graph", "toy_maze", "toy_twenty_questions"])
def test_logs_are_dialogs_that_replay(name, tmp_path):
    world = TOYS[name]
    told = world.write_logs(tmp_path / "logs.jsonl", dialogs=11, seed=4)
    dialogs = list(read_jsonl(tmp_path / "logs.jsonl"))
    assert len({dialog.id for dialog in dialogs}) == told["dialogs"] == 11
    returns = [sum(d.messages[i]["reward"] for i in d.replies) for d in dialogs]
    assert told["mean_return"] == pytest.approx(np.mean(returns))
    for dialog in dialogs:
        said = iter([dialog.messages[i]["content"] for i in dialog.replies])
        again = play(
            world(), lambda _, s=said: next(s), seed=dialog.meta["seed"], max_turns=len(dialog.replies)
        )
        assert again.dialogs["assistant"].messages == dialog.messages


def test_a_mixed_player_is_between_the_others():
    means = [
        np.mean(
            [sum(play(DoubleT(), Guided(DoubleT(), skill, i), seed=i).returns.values()) for i in range(40)]
        )
        for skill in (0.0, 0.5, 1.0)
    ]
    assert means == sorted(means)


def test_the_command_line(tmp_path, capsys):
    main(["toy_graph", "--dialogs", "11"])
    out = capsys.readouterr().out
    assert "optimum -2.00   optimal -2.00" in out and "logs -4.73" in out
    assert "assistant: north   [-2]" in out
    main(["toy_walks", "--logs", str(tmp_path / "walks.jsonl"), "--dialogs", "5"])
    assert '"dialogs": 5' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--logs", "x.jsonl"])
    with pytest.raises(SystemExit):
        main(["toy_graph", "--seed", "-1"])
    assert "expected --seed of at least 0, got -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["toy_walks", "--logs", str(tmp_path), "--dialogs", "5"])
    assert f"{tmp_path}: expected a file in a folder that is there, got: Is a" in capsys.readouterr().err
