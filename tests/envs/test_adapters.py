"""Worlds behind adapters: names and options, TextArena's games, reasoning-gym's tasks."""

from __future__ import annotations

import json
import pickle
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

import numpy as np
import pytest

from envs import control_env, text_env
from envs.adapters import reasoning_gym_world
from envs.adapters.__main__ import main
from envs.adapters.catalogue import measure, table
from envs.adapters.cost import cost
from envs.adapters.luck import own_luck
from envs.adapters.names import parsed
from envs.adapters.random_player import heard, propose, random_move
from envs.conformance import check_world
from envs.text_world import play, restore, snapshot
from pipelines.play import PlayConfig, talks
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.methods import BC

FAST = ("players", "other process", "references")


@pytest.fixture(scope="module")
def textarena() -> ModuleType:
    return pytest.importorskip("textarena", reason="pip install textarena")


@pytest.fixture(scope="module")
def gym() -> ModuleType:
    return pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")


def faults(name: str, but: tuple[str, ...] = FAST) -> list[str]:
    found = check_world(text_env(name), but=but)
    return [f"{each.check}: {each.fault}" for each in found if each.fault]


def random_legal(name: str, seed: int):
    world, chance = text_env(name)(), random.Random(seed)
    return play(world, lambda messages: world.random_move(chance), seed=seed)


def test_the_check_knows_what_an_adapter_brings_beside_its_world(textarena):
    found = check_world(text_env("textarena:Nim-v0"), but=("other process",))
    notes = {each.check: each.note for each in found}
    assert notes["references"] == "random legal" and notes["logs"] == "written as Dialogs"


def test_options_are_yaml():
    assert parsed("Nim-v0?role=1&piles=[1, 2]&opponent=a:B&deep=true") == (
        "Nim-v0",
        {"role": 1, "piles": [1, 2], "opponent": "a:B", "deep": True},
    )
    assert parsed("chain_sum") == ("chain_sum", {})
    with pytest.raises(UserError, match="expected .option=value&option=value after the name, got 'role'"):
        parsed("Nim-v0?role")
    with pytest.raises(UserError, match="expected each option once, got role again"):
        parsed("Nim-v0?role=1&role=0")


def test_own_luck_leaves_the_generators_and_the_output_alone(capsys):
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    drawn = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), own_luck(7, with_numpy=True):
            print("chatter")
            drawn.append((random.random(), np.random.random()))
            raise ZeroDivisionError
    assert drawn[0] == drawn[1]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert capsys.readouterr().out == ""


def test_proposals_come_from_what_is_in_brackets():
    seen = [
        {"role": "user", "content": "[GAME] Say '[pile quantity]', e.g. [0 3]. [Player 1] [2 2] [ ]"},
        {"role": "assistant", "content": "[9 9]"},
    ]
    assert heard(seen).snippets == ("[pile quantity]", "[0 3]", "[2 2]")
    chance = random.Random(0)
    told = {propose(heard(seen), chance) for _ in range(300)}
    assert {"[0 3]", "[2 2]"} < told and len(told) > 20
    only = random_move(seen, random.Random(1), lambda move: move == "[1 2]" or move.startswith("[3"))
    assert only == "[1 2]" or only.startswith("[3")


def test_a_long_word_of_another_player_is_read_once():
    began = time.process_time()
    assert heard([{"role": "user", "content": "x" * 60_000 + " red, blue"}]).words == ("red", "blue")
    assert time.process_time() - began < 1  # letter by letter it took six seconds


@pytest.mark.parametrize("name", ["Nim-v0", "TicTacToe-v0?role=any", "Nim-v0?opponent=self"])
def test_games_keep_the_contract(textarena, name):
    assert faults(f"textarena:{name}") == []


def test_a_random_mover_makes_moves_that_the_game_takes(textarena):
    for seed in range(4):
        for message in random_legal("textarena:TicTacToe-v0", seed).dialogs["assistant"].messages:
            assert "invalid" not in message["content"].lower()


def test_who_asks_for_more_turns_plays_a_long_game_to_its_end(textarena):
    """To 500 points one holds at 20 more than 200 times."""
    for turns, end, earned in ((200, "truncated", 0.0), (500, "terminated", 1.0)):
        world = text_env(f"textarena:PigDice-v0-500?turns={turns}")()
        played = play(world, world.scripted_players()["hold_at_20"](0), seed=0)
        assert (played.end, played.returns) == (end, {"assistant": earned})


def test_a_pickled_game_goes_on_as_it_would_have(textarena):
    """In mid-episode, with dice to come, and whatever the generator of the process says."""
    world = text_env("textarena:PigDice-v0")()
    world.reset(seed=3)
    world.step("[roll]")
    saved, sent = snapshot(world), pickle.loads(pickle.dumps(world))
    on = [world.step("[roll]") for _ in range(3)]
    random.seed(99)
    assert [sent.step("[roll]") for _ in range(3)] == on
    restore(world, saved)
    assert [world.step("[roll]") for _ in range(3)] == on


def test_rewards_are_the_players_own(textarena):
    """Both roles of the same games: what one wins the other loses, and the sides add up over the game. Both
    learn how it ended."""
    for seed in range(4):
        both = random_legal("textarena:TicTacToe-v0?opponent=self", seed)
        assert both.end == "terminated"
        assert sum(both.returns.values()) == 0 and set(both.dialogs) == {"player_0", "player_1"}
        last = [dialog.messages[-1] for dialog in both.dialogs.values()]
        assert all(each["role"] == "user" and "[GAME] The game is over." in each["content"] for each in last)
    first = text_env("textarena:Nim-v0?piles=[2]")()
    first.reset(seed=0)
    assert first.step("[0 2]")[1:3] == (1.0, True)
    second = text_env("textarena:Nim-v0?piles=[1, 1, 1]&role=1")()
    messages, _ = second.reset(seed=0)
    assert "Player 0 removes" in messages[0]["content"]
    lost = None
    for pile in range(3):  # three single objects: who moves second never takes the last
        if f"pile {pile}: 1" in messages[-1]["content"].rpartition("Current Pile")[2]:
            messages, lost, over, *_ = second.step(f"[{pile} 1]")
            break
    assert (lost, over) == (-1.0, True)


def test_an_invalid_move_is_answered_and_the_next_one_costs_the_game(textarena):
    world = text_env("textarena:Nim-v0")()
    world.reset(seed=0)
    messages, reward, over, *_ = world.step("seven")
    assert "invalid move" in messages[-1]["content"] and (reward, over) == (0.0, False)
    messages, reward, over, cut, info = world.step("eight")
    assert (reward, over, cut, info) == (-1.0, True, False, {})


def test_a_scripted_opponent_sees_its_own_side(textarena, tmp_path, monkeypatch):
    (tmp_path / "nim_players.py").write_text(
        "def first(messages):\n"
        "    assert 'Player 1' in messages[0]['content'] and messages[-1]['role'] == 'user'\n"
        "    piles = messages[-1]['content'].rpartition('Current Pile')[2].splitlines()[1:]\n"
        "    counts = [int(line.rpartition(':')[2]) for line in piles if ':' in line]\n"
        "    return next(f'[{pile} {count}]' for pile, count in enumerate(counts) if count)\n"
        "class Seeded:\n"
        "    def __init__(self, seed):\n"
        "        self.seed = seed\n"
        "    def __call__(self, messages):\n"
        "        return first(messages)\n"
        "def broken(messages):\n"
        "    raise KeyError('nothing to say')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for player in ("first", "Seeded"):
        world = pickle.loads(pickle.dumps(text_env(f"textarena:Nim-v0?opponent=nim_players:{player}")()))
        world.reset(seed=1)
        messages, *_ = world.step("[2 1]")
        assert "[Player 1] [0 3]" in messages[-1]["content"]
    world = text_env("textarena:Nim-v0?opponent=nim_players:broken")()
    world.reset(seed=1)
    *_, cut, info = world.step("[2 1]")
    assert cut and "nothing to say" in info["failed"]
    sys.modules.pop("nim_players")


def test_a_game_that_the_others_lost_before_the_first_turn_is_a_failed_episode(
    textarena, tmp_path, monkeypatch
):
    """TextArena pays the player who never moved, which no reply of a policy may be credited with."""
    (tmp_path / "nim_losers.py").write_text("def babble(messages):\n    return 'nonsense'\n")
    monkeypatch.syspath_prepend(tmp_path)
    make = text_env("textarena:Nim-v0?role=1&opponent=nim_losers:babble")
    messages, info = make().reset(seed=1)
    assert "before the turn of player 1" in info["failed"] and "valid move" in info["failed"]
    assert "Welcome to Nim, Player 1" in messages[0]["content"]
    played = play(make(), lambda messages: "[0 1]", seed=1)
    assert (played.end, played.returns) == ("failed", {"assistant": None})
    with pytest.raises(UserError, match="expected 2 dialogs, got 0 from 8 episodes: .*before the turn of"):
        make.write_logs(tmp_path / "logs.jsonl", dialogs=2, seed=1)
    assert not (tmp_path / "logs.jsonl").exists()
    sys.modules.pop("nim_losers")


def test_play_takes_the_prefixes_for_worlds_in_words():
    """With a checkpoint alone the name is all that there is to go by."""
    for env in ("textarena:Nim-v0?role=1", "reasoning_gym:chain_sum", "openenv:ws://localhost:8000"):
        assert talks(PlayConfig(env=env, checkpoint="runs/bc"))
    with pytest.raises(UserError, match="expected one of moving_dot, pong, enduro, atari"):
        control_env("textarena:Nim-v0")


def test_a_policy_takes_one_role(textarena, make_policy, tokenizer):
    """Said after the first reply, whoever speaks next."""
    args = make_policy(BC()), tokenizer, text_env("textarena:TicTacToe-v0?opponent=self")
    with pytest.raises(UserError, match="expected a world of one player, got 'player_0' and 'player_1'"):
        play_episodes(*args, range(1), Decoding(max_new_tokens=2), seed=1)


def test_a_game_that_crashes_is_a_failed_episode(textarena, monkeypatch):
    from textarena.envs.Nim.env import NimEnv

    world = text_env("textarena:Nim-v0")()
    world.reset(seed=0)

    def crash(self, action):
        raise IndexError("no such pile")

    monkeypatch.setattr(NimEnv, "step", crash)
    played = play(text_env("textarena:Nim-v0")(), lambda messages: "[0 1]", seed=0)
    assert played.end == "failed" and played.returns == {"assistant": None}
    assert "no such pile" in played.infos[-1]["failed"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("textarena:Nimm-v0", "one of the .* games of TextArena. Did you mean .*Nim-v0"),
        ("textarena:Nim-v0?opponet=self", "options that fit, of piles, role, opponent, players, turns; got"),
        ("textarena:Nim-v0?piles=three", "options that fit, of piles"),
        ("textarena:Nim-v0?role=2", "role to be one of 0, 1 or any, got 2"),
        ("textarena:Nim-v0?role=true", "role to be one of 0, 1 or any, got True"),
        ("textarena:Nim-v0?players=3", "number of players has to be 2"),
        ("textarena:Nim-v0?players=two", "players to be a whole number, got 'two'"),
        ("textarena:Nim-v0?turns=0", "turns to be a whole number of at least 1, got 0"),
        ("textarena:Nim-v0?opponent=http://", "expected random, self, perfect, module:function"),
        (
            "textarena:Nim-v0?opponent=http://me:secret@127.0.0.1:1/v1",
            "opponent: expected an address",
        ),
        ("text_arena:Nim-v0", "Did you mean textarena:Nim-v0"),
        ("textarena:Nim-v0?opponent=clever", "expected random, self, perfect, module:function"),
        ("textarena:Nim-v0?opponent=nowhere:one", "opponent 'nowhere:one'"),
        ("textarena:Debate-v0", "without a key"),
    ],
)
def test_what_cannot_be_played_says_why(textarena, monkeypatch, name, said):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(UserError, match=said):
        text_env(name)


def test_a_missing_library_is_named(monkeypatch):
    for library, package, name in (
        ("textarena", "textarena", "textarena:Nim-v0"),
        ("reasoning_gym", "reasoning-gym", "reasoning_gym:chain_sum"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        if library == "reasoning_gym":
            monkeypatch.setattr(reasoning_gym_world, "DATA", {})
        with pytest.raises(UserError, match=f"pip install {package}"):
            text_env(name)


@pytest.mark.slow
def test_the_cost_of_the_adapter_is_small(textarena):
    """30 microseconds are aimed at; what this asserts leaves room for a busy machine."""
    assert cost("Nim-v0")["adapter_us"] < 300


def test_logs_are_dialogs_with_the_games_rewards(textarena, tmp_path):
    text_env("textarena:Nim-v0").write_logs(tmp_path / "logs.jsonl", dialogs=6, seed=1)
    logs = list(read_jsonl(tmp_path / "logs.jsonl"))
    assert len(logs) == 6 and len({log.id for log in logs}) == 6
    assert {log.messages[log.replies[-1]]["reward"] for log in logs} <= {-1.0, 1.0}


def test_evaluate_gets_the_random_movers_returns(textarena):
    """The same for the same seed."""
    returns = text_env("textarena:Nim-v0").reference_returns(5, 3)
    assert set(returns) == {"random legal"} and len(returns["random legal"]) == 5
    assert set(returns["random legal"]) <= {-1.0, 1.0}
    assert text_env("textarena:Nim-v0").reference_returns(5, 3) == returns


def test_tasks_keep_the_contract(gym):
    assert faults("reasoning_gym:chain_sum") == []


def test_the_score_of_an_answer_is_the_reward(gym):
    world = text_env("reasoning_gym:chain_sum?max_terms=3&seed=4")()
    world.reset(seed=8)
    right, wrong = world.known_answer(right=True), world.known_answer(right=False)
    assert right != wrong
    for reply, reward in ((right, 1.0), (f"I think <answer>{right}</answer>!", 1.0)):
        world.reset(seed=8)
        assert world.step(reply)[1:4] == (reward, True, False)
    world.reset(seed=8)
    assert world.step(wrong)[1] < 1.0
    questions = {world.reset(seed=seed)[0][0]["content"] for seed in range(20)}
    assert len(questions) == 20


def test_no_logs_of_a_task_that_knows_no_answers(gym, tmp_path):
    """They were the word None, five of five times, for a reward of 0."""
    with pytest.raises(UserError, match="expected a task that knows answers.*: let a model play"):
        text_env("reasoning_gym:graph_color").write_logs(tmp_path / "logs.jsonl", dialogs=5, seed=1)
    found = check_world(text_env("reasoning_gym:graph_color"), but=("other process",))
    assert not [each for each in found if each.fault]


def test_an_answer_that_breaks_the_scorer_is_a_failed_episode(gym, monkeypatch):
    world = text_env("reasoning_gym:chain_sum?seed=77")()
    world.reset(seed=1)

    def crash(answer, entry):
        raise ValueError("not a number")

    monkeypatch.setattr(list(reasoning_gym_world.DATA.values())[-1], "score_answer", crash)
    *_, cut, info = world.step("x")
    assert cut and "not a number" in info["failed"]
    monkeypatch.setattr(
        list(reasoning_gym_world.DATA.values())[-1], "score_answer", lambda answer, entry: np.nan
    )
    world.reset(seed=1)
    _, reward, over, cut, info = world.step("x")
    assert (reward, over, cut) == (None, False, True) and "a score of nan" in info["failed"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reasoning_gym:chain_sums", "Did you mean chain_sum"),
        ("reasoning_gym:chain_sum?terms=3", "min_terms"),
        ("reasoning_gym:chain_sum?size=0", "size to be a whole number of at least 1, got 0"),
        ("reasoning_gym:chain_sum?size=2.5", "size to be a whole number of at least 1, got 2.5"),
        ("reasoning-gym:chain_sum", "Did you mean reasoning_gym:chain_sum"),
    ],
)
def test_unknown_tasks_and_options_are_named(gym, name, said):
    with pytest.raises(UserError, match=said):
        text_env(name)


def test_the_catalogue_says_where_the_random_mover_is_at_a_loss(textarena):
    """The game breaks at any word: returns there, and those against such opponents, say nothing."""
    rows = [measure(f"textarena:{name}", episodes=1) for name in ("CharacterConclave-v0", "Nim-v0")]
    assert [row.at_a_loss for row in rows] == [True, False]
    assert table(rows, set()).count("the random mover finds no first move") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["small_talk"], "expected names such as textarena:Nim-v0, got small_talk"),
        (["textarena:Nim-v0", "--logs", "x.jsonl", "--dialogs", "0"], "--dialogs: expected at least 1"),
        (["textarena:Nim-v0", "--logs", "x.jsonl", "--seed", "-1"], "--seed: expected at least 0, got -1"),
    ],
)
def test_the_command_says_what_it_cannot_do(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_catalogue_of_two_worlds(textarena, gym, capsys):
    """One that runs and one that does not, in processes of their own."""
    main(["textarena:Nim-v0", "textarena:Debate-v0", "--episodes", "4"])
    out = capsys.readouterr().out
    assert "| textarena:Nim-v0 | 2 |" in out and "`textarena:Debate-v0`" in out
    assert '"keep_the_contract": 1' in out.splitlines()[-1]


def test_a_policy_is_measured_in_games_and_tasks(textarena, gym, make_policy, tokenizer):
    """As `train --env` and `evaluate --env` do it, whatever else the batch holds."""
    decoding = Decoding(max_new_tokens=4, do_sample=True)
    for name in ("textarena:TicTacToe-v0?role=any", "reasoning_gym:chain_sum"):
        make = text_env(name)
        args = make_policy(BC()), tokenizer, make
        played = play_episodes(*args, range(4), decoding, seed=1)
        alone = play_episodes(*args, [2], decoding, seed=1)
        assert alone[0].dialog.messages == played[2].dialog.messages
        assert all(-1 <= episode.total <= 1 for episode in played)
        assert played[0].dialog.source == name


class _Endpoint(BaseHTTPRequestHandler):
    """Plays Nim from the first pile that has something, for who asks as OpenAI's clients do."""

    asked: list[dict] = []

    def do_GET(self):
        self._answer({"data": [{"id": "nim-player"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(request)
        piles = request["messages"][-1]["content"].rpartition("Current Pile")[2].splitlines()
        counts = [int(line.rpartition(":")[2]) for line in piles if line.strip().startswith("pile")]
        move = next(f"[{pile} 1]" for pile, count in enumerate(counts) if count)
        self._answer({"choices": [{"message": {"role": "assistant", "content": move}}]})

    def _answer(self, body):
        self.send_response(200 if self.path in ("/v1/models", "/v1/chat/completions") else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


def test_an_endpoint_plays_the_other_role(textarena, monkeypatch):
    monkeypatch.setattr("envs.adapters.chat_endpoint.PAUSES", (0.0, 0.0))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        name = f"textarena:Nim-v0?opponent=http://127.0.0.1:{server.server_port}/v1"
        world = pickle.loads(pickle.dumps(text_env(name)()))
        world.reset(seed=4)
        messages, *_ = world.step("[2 5]")
        root = text_env(name.removesuffix("/v1"))()
        root.reset(seed=4)
        assert "got 404" in (why := root.step("[2 5]")[4]["failed"]) and "end in /v1" in why
        server.shutdown()
    assert "[Player 1] [0 1]" in messages[-1]["content"]
    request = _Endpoint.asked[-1]
    assert request["model"] == "nim-player" and "Player 1" in request["messages"][0]["content"]
    *_, truncated, info = world.step("[1 1]")  # nobody is there any more
    assert truncated and "ConnectError" in info["failed"]
