"""Wordle: both rules of colours, sets of words, the state machine, its players, logs and people's squares."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections import Counter
from itertools import islice, product

import numpy as np
import pytest

from envs import text_env
from envs.wordle import KINDS, Wordle, write_logs
from envs.wordle.__main__ import main
from envs.wordle.colours import RULES, code, colour, colour_codes, letters
from envs.wordle.logs import branching, rank_pairs
from envs.wordle.people import (
    Fitter,
    people_games,
    puzzle_number,
    read_answers,
    read_grid,
    read_texts,
    squares,
)
from envs.wordle.policies import (
    POLICIES,
    MonteCarlo,
    Optimal,
    Player,
    RandomMixture,
    Repeat,
    StartWords,
    Wrong,
    game_chance,
    play,
    play_on,
)
from envs.wordle.rules import MALFORMED, TRIES, State, after, first_guesses, messages_of, read_state
from envs.wordle.terminal import Person, grid
from envs.wordle.words import OPENERS, SHIPPED, Words, load_words, read_words, well_formed
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError


@pytest.fixture(params=RULES)
def words(request) -> Words:
    return load_words(colouring=request.param)


def start(words: Words) -> State:
    return State(words.every)


def expected(words: Words, policy, state: State) -> float:
    """The exact mean return of a policy that does not draw, over all targets."""
    if state.over:
        return state.total
    left = words.members(state.left)
    return sum(expected(words, policy, after(words, state, policy(state), t)) for t in left) / len(left)


# ---------------------------------------------------------------------------------------------------- colours


@pytest.mark.parametrize(
    ("guess", "target", "simple", "official"),
    [
        ("eerie", "crane", "yyybg", "bbybg"),
        ("speed", "abide", "bbyyy", "bbyby"),
        ("crane", "crane", "ggggg", "ggggg"),
        ("sheep", "eager", "bbygb", "bbygb"),
        ("level", "eagle", "yybyy", "yybyb"),
        ("geese", "eager", "yyyby", "yyybb"),
    ],
)
def test_colours_worked_out_by_hand(guess, target, simple, official):
    assert (colour(guess, target, "simple"), colour(guess, target, "official")) == (simple, official)


@pytest.mark.parametrize("rule", RULES)
def test_all_colours_at_once_are_those_one_at_a_time(rule):
    chance = random.Random(3)
    guesses, targets = (["".join(chance.choices("abcde", k=5)) for _ in range(n)] for n in (60, 70))
    codes = colour_codes(letters(guesses), letters(targets), rule)
    assert codes.tolist() == [[code(colour(g, t, rule)) for t in targets] for g in guesses]


# ------------------------------------------------------------------------------------------------------ words


def test_the_shipped_list_has_words_of_five_letters_and_none_twice():
    found = SHIPPED.read_text(encoding="utf-8").split()
    assert found == sorted(set(found)) and 300 <= len(found) <= 1000
    assert all(map(well_formed, found)) and set(OPENERS.split()) <= set(found)


def test_sets_of_words_are_those_of_a_plain_search(words):
    chance = random.Random(1)
    odd = ["".join(chance.choices("aeerst", k=5)) for _ in range(40)]
    for guess in [*chance.sample(words.words, 60), *odd]:
        shown = colour(guess, chance.choice(words.words), words.colouring)
        plain = tuple(word for word in words.words if colour(guess, word, words.colouring) == shown)
        assert words.members(words.allowed(guess, shown)) == plain


@pytest.mark.parametrize("rule", RULES)
def test_colours_that_no_word_gives_leave_none(rule):
    few = Words(["aabbb", "ababa", "bbaaa", "ccccc"], rule)
    for shown in map("".join, product("gyb", repeat=5)):
        plain = tuple(word for word in few.words if colour("abaab", word, rule) == shown)
        assert few.members(few.allowed("abaab", shown)) == plain


def test_copies_of_a_vocabulary_are_itself(words):
    assert copy.deepcopy(words) is words
    assert pickle.loads(pickle.dumps(words)) is words


def test_the_best_guesses_are_those_of_a_plain_search(words):
    left = words.allowed("stare", "bbybb")
    members = words.members(left)

    def gain(guess: str) -> float:
        sizes = Counter(colour(guess, target, words.colouring) for target in members)
        return math.log(len(members)) - sum(n * math.log(n) for n in sizes.values()) / len(members)

    gains = {guess: gain(guess) for guess in members}
    assert len(members) > 10
    assert set(words.best(left)) == {guess for guess in members if gains[guess] > max(gains.values()) - 1e-9}


@pytest.mark.parametrize(
    ("text", "fault"), [("", "0 words"), ("house cat\n", None), ("cat\nmouses\n", "2 words and none")]
)
def test_lists_of_ones_own(tmp_path, text, fault):
    path = tmp_path / "list.txt"
    path.write_text(text, encoding="utf-8")
    if fault is None:
        assert read_words(path) == ["house"]
        return
    with pytest.raises(UserError, match=fault):
        read_words(path)


def test_the_mark_before_a_files_text_is_no_part_of_it(tmp_path):
    """A byte order mark, as editors and spreadsheets of Windows write it."""
    path = tmp_path / "file"
    path.write_text("ABOUT\r\ncrane\r\n", encoding="utf-8-sig", newline="")
    assert read_words(path) == ["about", "crane"]
    path.write_text("text,id\r\nhello,1\r\n", encoding="utf-8-sig", newline="")
    assert list(read_texts(path)) == ["hello"]
    path.write_text("1 about\r\n", encoding="utf-8-sig", newline="")
    assert read_answers(path) == {1: "about"}


def test_wrong_vocabularies():
    with pytest.raises(UserError, match="five|5 letters.*'Crane'"):
        Words(["Crane", "house"])
    with pytest.raises(UserError, match="got none"):
        Words([])
    with pytest.raises(UserError, match="simple, official, got 'strict'"):
        Words(["crane"], "strict")
    with pytest.raises(UserError, match="no/list.txt.*word per line"):
        read_words("no/list.txt")


# ------------------------------------------------------------------------------------------------------ world


def test_known_returns_of_the_best_player():
    assert expected(Words(["crane"]), lambda state: "crane", State(1)) == 0
    for few, value in ((["crane", "house"], -0.5), (["aaaaa", "bbbbb", "ccccc"], -1.0)):
        words = Words(few)
        assert expected(words, lambda state, w=words: w.best(state.left)[0], start(words)) == value
        assert {play(words, "optimal", seed=0, index=i).total for i in range(30)} == set(
            range(1 - len(few), 1)
        )


def test_drawing_the_target_anew_is_the_game_with_one_hidden_word(words):
    few = Words(random.Random(5).sample(words.words, 12), words.colouring)

    def policy(state: State) -> str:
        return few.best(state.left)[-1]

    def hidden(target: str) -> int:
        state = start(few)
        while not state.over:
            state = after(few, state, policy(state), target)
        return state.total

    assert expected(few, policy, start(few)) == pytest.approx(sum(map(hidden, few.words)) / 12)


@pytest.mark.parametrize("guess", ["", "cat", "cranes", "cr4ne", "crâne", "cra\nne", "🙂" * 5])
def test_a_malformed_guess_costs_a_try_and_shows_nothing(guess):
    world, total, over = Wordle(), 0.0, False
    before, _ = world.reset(seed=1)
    while not over:
        messages, reward, over, truncated, info = world.step(guess)
        assert messages[: len(before)] == before and not truncated and not info["well_formed"]
        assert messages[len(before) :] == [
            {"role": "assistant", "content": guess},
            {"role": "user", "content": MALFORMED},
        ]
        assert info["left"] == len(world.words) and not info["vocabulary"]
        before, total = messages, total + reward
    assert total == -6 and len(messages) == 13
    with pytest.raises(RuntimeError, match="reset"):
        world.step("crane")


def test_any_five_letters_are_a_guess():
    world = Wordle()
    world.reset(seed=1)
    messages, reward, *_, info = world.step(" ZZZXJ ")
    assert messages[1]["content"] == " ZZZXJ " and len(messages[2]["content"]) == 5
    assert (reward, info["well_formed"], info["vocabulary"]) == (-1, True, False)


def test_episodes_depend_on_the_seed_and_the_replies():
    def play_text(seed: int) -> list:
        world, player = Wordle(), Player(Wordle.vocabulary(), "mixture", 4)
        messages, over = world.reset(seed=seed)[0], False
        while not over:
            messages, _, over, _, _ = world.step(player(messages))
        return messages

    state = random.getstate()
    assert [play_text(seed) for seed in range(5)] == [play_text(seed) for seed in range(5)]
    assert random.getstate() == state
    assert len({json.dumps(play_text(seed)) for seed in range(10)}) > 5


def test_a_copy_of_a_running_game_goes_on_alike():
    world = Wordle()
    world.reset(seed=3)
    world.step("stare")
    copies = [copy.deepcopy(world), pickle.loads(pickle.dumps(world))]
    steps = [each.step("cloud") for each in (world, *copies)]
    assert steps[0] == steps[1] == steps[2]


def test_the_state_is_read_back_from_the_messages(words):
    world_state = start(words)
    for guess, target in (("stare", "crane"), ("nope", "crane"), ("crane", "crane")):
        world_state = after(words, world_state, guess, target)
        assert read_state(words, messages_of(world_state)) == world_state
    assert world_state.won and world_state.total == -2
    assert [m.get("reward") for m in messages_of(world_state, rewards=True)[1::2]] == [-1, -1, 0]
    assert first_guesses(words, world_state, 1) == after(words, start(words), "stare", "crane")


def test_messages_of_another_conversation_are_refused(words):
    said = [{"role": "user", "content": "wordle"}, {"role": "assistant", "content": "zebra"}]
    with pytest.raises(UserError, match="no word agrees with zebra ggggb"):
        read_state(words, [*said, {"role": "user", "content": "ggggb"}])
    with pytest.raises(UserError, match="'hello'"):
        read_state(words, [*said, {"role": "user", "content": "hello"}])


def test_the_world_goes_by_its_name_and_takes_a_list_of_ones_own(tmp_path, monkeypatch):
    assert text_env("wordle") is Wordle
    with pytest.raises(UserError, match="Did you mean wordle"):
        text_env("wordl")
    (tmp_path / "mine.txt").write_text("crane\nhouse\nsix\n", encoding="utf-8")
    (tmp_path / "word_games.py").write_text(
        "from envs.wordle import Wordle\nclass Mine(Wordle):\n    word_list = 'mine.txt'\n"
        "    colouring = 'official'\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    world = text_env("word_games:Mine")()
    assert world.words.words == ("crane", "house") and world.words.colouring == "official"
    lines = type(world).reference_returns(40, 0)
    assert set(lines["information gain"]) == {0.0, -1.0} and len(lines["behaviour policy"]) == 40


# ---------------------------------------------------------------------------------------------------- players


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_player_plays_to_the_end_by_seed_and_in_words(name):
    words = Words(load_words().words[::6])
    ends = [play(words, name, seed=2, index=i) for i in range(8)]
    assert ends == [play(words, name, seed=2, index=i) for i in range(8)]
    assert all(end.over and 1 <= len(end.guesses) <= TRIES for end in ends)
    messages = messages_of(first_guesses(words, ends[0], 1))
    assert Wordle.scripted_players()[name](7)(messages) == Wordle.scripted_players()[name](7)(messages)
    assert well_formed(Wordle.scripted_players()[name](7)(messages))


def test_players_do_what_their_names_say(words):
    chance = random.Random(0)
    state = after(words, after(words, start(words), "stare", "crane"), "ocean", "crane")
    left = set(words.members(state.left))
    assert 1 <= len(left) < 10 and "crane" in left
    for _ in range(30):
        assert StartWords(words, chance)(start(words)) in OPENERS.split()
        assert Optimal(words, chance)(start(words)) in OPENERS.split()
        assert Optimal(words, chance)(state) in words.best(state.left)
        assert StartWords(words, chance)(state) in left
        assert Wrong(words, chance)(state) not in left
        assert Repeat(words, chance)(state) in ("stare", "ocean")
        assert RandomMixture(words, chance, 1.0)(state) in left
    smart = sum(RandomMixture(words, chance, 0.5)(state) in left for _ in range(600)) / 600
    assert smart == pytest.approx(0.5, abs=0.08)


def test_monte_carlo_prefers_the_guess_that_wins(words):
    state = after(words, start(words), "crane", "crane")  # as if nobody had noticed
    state = State(state.left, ("stare",), ("bbybb",))
    chance = random.Random(0)
    player = MonteCarlo(words, chance, RandomMixture(words, chance, 0.5), samples=20)
    assert {player(state) for _ in range(10)} == {"crane"}


def test_the_better_player_earns_more():
    words = load_words()
    means = [
        np.mean([play(words, name, seed=0, index=i).total for i in range(200)])
        for name in ("optimal", "consistent", "half", "mixture", "wrong")
    ]
    assert means == sorted(means, reverse=True)


def test_a_person_plays_in_the_terminal():
    words, said = load_words(), []
    lines = iter(["", " stare ", "what?", *["crane"] * TRIES])
    person = Person(words, lambda state: "hints", read=lambda _: next(lines), say=said.append)
    end = play_on(words, person, random.Random(1), start(words))
    assert end.guesses[:3] == ("stare", "what?", "crane") and end.colours[1] == MALFORMED
    assert "perhaps hints" in said[1]
    assert any("'what?' is no guess" in text for text in said)
    assert "\x1b[" in grid(end) and " S " in grid(end)
    assert grid(start(words)).count(".") == 30


# ------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("kind", ["mixture", "branching", "adversarial", "optimal or random"])
def test_logs_are_games_whose_colours_come_back(kind, tmp_path, words):
    path = tmp_path / "logs.jsonl"
    about = write_logs(path, dialogs=60, seed=3, kind=kind, words=words)
    dialogs = list(read_jsonl(path))
    totals = []
    for dialog in dialogs:
        state = read_state(words, dialog.messages)
        target = words.members(state.left)[0]  # any word that is left gives the colours of all guesses
        assert [colour(guess, target, words.colouring) for guess in state.guesses] == list(state.colours)
        assert state.over and not dialog.truncated and "group" in dialog.meta
        totals.append(sum(dialog.messages[i]["reward"] for i in dialog.replies))
        assert totals[-1] == state.total
    assert (len(dialogs), about["dialogs"]) == (60, 60)
    assert about["mean_return"] == pytest.approx(sum(totals) / 60, abs=1e-4)
    write_logs(tmp_path / "again.jsonl", dialogs=60, seed=3, kind=kind, words=words)
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_the_adversarial_set_is_composed_as_published():
    games = list(islice(KINDS["adversarial"](load_words(), 0), 1500))
    kinds = Counter(game.policy for game in games)
    assert 0.08 < kinds["optimal"] / 1500 < 0.11  # published: 9 %, 45.5 %, 45.5 %
    assert 0.35 < kinds["adversarial"] / 1500 < 0.47 and 0.43 < kinds["suboptimal"] / 1500 < 0.55
    experts = {game.meta["group"]: game.state for game in games if game.policy == "optimal"}
    for game in games:
        if game.policy == "adversarial":
            expert = experts[game.meta["group"]]
            assert game.state.total == -6 and len(expert.guesses) >= 3
            assert game.state.guesses[:2] == expert.guesses[:2]
            assert set(game.state.guesses) == set(expert.guesses[:2])


def test_branches_leave_each_beginning_of_the_experts_game():
    games = list(islice(branching(load_words(), 0, branches=2), 200))
    groups: dict[str, list] = {}
    for game in games:
        groups.setdefault(game.meta["group"], []).append(game)
    for expert, *others in list(groups.values())[:-1]:
        starts = [other.meta["start"] for other in others]
        assert starts == [i for i in range(len(expert.state.guesses)) for _ in range(2)]
        for other in others:
            begun = other.meta["start"]
            assert other.state.guesses[:begun] == expert.state.guesses[:begun]
            assert begun == 0 or not other.state.won


def test_one_word_has_no_pairs():
    with pytest.raises(UserError, match="at least two words, got crane"):
        next(rank_pairs(Words(["crane"]), 0))


def test_pairs_for_q_rank():
    words = load_words()
    pairs = list(islice(rank_pairs(words, 0), 100))
    assert {pair["kind"] for pair in pairs} == {"initial", "branch"}
    for pair in pairs:
        state = read_state(words, pair["messages"])
        assert len(state.guesses) == (0 if pair["kind"] == "initial" else 2)
        assert pair["better"] != pair["worse"] and {pair["better"], pair["worse"]} <= words.known
        if pair["kind"] == "branch":
            assert pair["better"] in words.members(state.left) and pair["worse"] in state.guesses


def test_a_guess_is_six_tokens_and_its_reward_arrives_at_the_last():
    """With a token for each byte (--vocab_size 262) the published token MDP: the reward of guess k at action
    6k - 1, colours being no actions."""
    from rl_dialog.data.schema import Dialog
    from rl_dialog.data.tokenize import LEAST_VOCABULARY, tokenize, train_tokenizer

    tokenizer = train_tokenizer(["wordle"], vocab_size=LEAST_VOCABULARY)
    words = Words(["crane", "house", "stare"])
    won = start(words)
    for guess in ("stare", "house", "crane"):
        won = after(words, won, guess, "crane")
    lost = start(words)
    for _ in range(TRIES):
        lost = after(words, lost, "zzzzz", "crane")
    for state, value in ((won, -1.84633), (lost, -4.93351)):
        (row,) = tokenize(Dialog("game", messages_of(state, rewards=True)), tokenizer)
        actions = np.flatnonzero(row.assistant)
        assert len(actions) == 6 * len(state.guesses) and not row.truncated
        at = np.searchsorted(actions, row.reply_ends)
        assert at.tolist() == [6 * k - 1 for k in range(1, len(state.guesses) + 1)]
        assert sum(reward * 0.99**k for reward, k in zip(row.rewards, at, strict=True)) == pytest.approx(
            value, abs=1e-5
        )


# ----------------------------------------------------------------------------------------------------- people

SHARED = "Wordle 215 3/6\n\n⬛🟨⬛⬛🟩\n🟩⬜🟦⬛️🟧\n🟩🟩🟩🟩🟩\n\nwhat a day"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (SHARED, ("bybbg", "gbybg", "ggggg")),
        ("no game", ()),
        ("🟩🟩🟩🟩🟩", ("ggggg",)),
        ("🟩🟩🟩🟩\n⬛⬛⬛⬛⬛⬛", ()),
        ("⬛⬛⬛⬛⬛\n🟨⬛⬛⬛⬛", ()),  # not over
        ("⬛⬛⬛⬛⬛\n" * 6, ("bbbbb",) * 6),
        ("⬛⬛⬛⬛⬛\n" * 6 + "🟩🟩🟩🟩🟩", ()),  # seven rows
        ("🟩🟩🟩🟩🟩\n⬛⬛⬛⬛⬛", ()),  # went on after it had won
        ("⬛⬛⬛⬛⬛\n\n⬛🟨⬛⬛🟩\n🟩🟩🟩🟩🟩", ("bybbg", "ggggg")),
    ],
)
def test_grids_in_what_people_share(text, rows):
    assert read_grid(text) == rows


def test_words_are_fitted_to_the_squares_of_games(words):
    fitter, chance = Fitter(words, ["soare", "roate"]), random.Random(0)
    for index in range(40):
        played = play(words, "half", seed=1, index=index)
        rows = read_grid(squares(played))
        assert rows == played.colours
        fitted = fitter.fit(rows, chance)
        assert fitted.colours == rows and fitted.left and fitted.total == played.total
        target = words.members(fitted.left)[0]
        assert [colour(guess, target, words.colouring) for guess in fitted.guesses] == list(rows)
    assert Fitter(Words(["aaaaa"])).fit(("bbbbb",) * 6, chance) is None


def test_the_days_answer_is_kept_where_it_is_known(words):
    texts = [SHARED.replace("215", number) for number in ("215", "1,216", "217")] * 3
    assert (
        puzzle_number(SHARED) == 215 and puzzle_number(texts[1]) == 1216 and puzzle_number("Wordle") is None
    )
    games = list(people_games(texts, words, 0, answers={215: "crane", 1216: "house"}))
    assert {game.state.guesses[-1] for game in games} <= {"crane", "house"} and len(games) <= 6
    assert all(game.state.won for game in people_games(texts, words, 0))
    with pytest.raises(UserError, match="zzzzz"):
        next(people_games(texts, words, 0, answers={1: "zzzzz"}))


@pytest.mark.parametrize(
    ("text", "number"),
    [(f"Wordle 1{mark}234 4/6", 1234) for mark in ",.' \u00a0\u2009\u202f\u2019"]
    + [("Wordle 234 4/6", 234), ("Wordle 1234 X/6", 1234), ("Wordle #2\u202f345 3/6*", 2345)]
    + [("Wordle 234, 4/6", 234), ("Wordle 12 3/6", 12), ("Wordle 4/6", None), ("Wordle 234\n100 tries", 234)],
)
def test_a_days_number_in_every_country(text, number):
    assert puzzle_number(text) == number


def test_wrong_files_of_people(tmp_path):
    path = tmp_path / "tweets.csv"
    path.write_text("id,tweet\n1,hello\n", encoding="utf-8")
    assert list(read_texts(path, "tweet")) == ["hello"]
    with pytest.raises(UserError, match="'text'.*id, tweet"):
        list(read_texts(path, "text"))
    with pytest.raises(UserError, match="no.csv"):
        list(read_texts(tmp_path / "no.csv"))
    with pytest.raises(UserError, match="id,tweet"):
        read_answers(path)


# --------------------------------------------------------------------------------------------------- commands


def test_the_command_line(tmp_path, capsys):
    logs, pairs, people = (tmp_path / name for name in ("logs.jsonl", "pairs.jsonl", "people.jsonl"))

    def told(*arguments: str) -> dict:
        main([*map(str, arguments)])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert told("--logs", logs, "--kind", "adversarial", "--games", "33")["dialogs"] == 33
    assert sum(told("--pairs", pairs, "--games", "12")["pairs"].values()) == 12
    assert len(pairs.read_text(encoding="utf-8").splitlines()) == 12
    (tmp_path / "texts.csv").write_text(f'text\n"{SHARED}"\nhello\n', encoding="utf-8")
    assert told("--logs", people, "--people", tmp_path / "texts.csv")["dialogs"] == 1
    (dialog,) = read_jsonl(people)
    assert [m["content"] for m in dialog.messages[2::2]] == ["bybbg", "gbybg", "ggggg"]
    (tmp_path / "two.txt").write_text("crane\nhouse\n", encoding="utf-8")
    table = told("--words", tmp_path / "two.txt", "--games", "50", "--colouring", "official")
    assert list(table) == list(POLICIES) and -0.75 < table["optimal"]["return"] < -0.25
    for wrong in (["--games", "0"], ["--people", "x.csv"], ["--words", str(tmp_path / "none.txt")]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert "expected" in capsys.readouterr().err


def test_all_games_of_people_are_written_and_texts_are_counted(tmp_path, capsys):
    """Nobody who has a file of tweets wants the first thousand games of it."""
    texts, logs = tmp_path / "texts.csv", tmp_path / "logs.jsonl"
    texts.write_text("text\n" + f'"{SHARED}"\nhello\n' * 1100, encoding="utf-8")
    main(["--logs", str(logs), "--people", str(texts)])
    told = json.loads(capsys.readouterr().out)
    assert (told["texts"], told["dialogs"], len(list(read_jsonl(logs)))) == (2200, 1100, 1100)
    main(["--logs", str(logs), "--people", str(texts), "--games", "7"])
    assert json.loads(capsys.readouterr().out)["dialogs"] == 7


def test_logs_stay_where_the_files_of_people_are_wrong(tmp_path, capsys):
    logs, texts, days = (tmp_path / name for name in ("logs.jsonl", "texts.csv", "days.txt"))
    logs.write_text("kept", encoding="utf-8")
    texts.write_text(f'text\n"{SHARED}"\n', encoding="utf-8")
    days.write_text("215 zzzzz\n", encoding="utf-8")
    for wrong in (
        ["--people", str(tmp_path / "none.csv")],
        ["--people", str(texts), "--column", "tweet"],
        ["--people", str(texts), "--answers", str(days)],
    ):
        with pytest.raises(SystemExit):
            main(["--logs", str(logs), *wrong])
        assert "expected" in capsys.readouterr().err and logs.read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--logs a.jsonl --pairs b.jsonl", "one of --play, --pairs and --logs, got --pairs and --logs"),
        ("--play --logs a.jsonl", "one of --play, --pairs and --logs"),
        ("--kind half", "--logs PATH beside --kind"),
        ("--logs a.jsonl --answers days.txt", "--people PATH beside --answers"),
        ("--logs a.jsonl --guesses words.txt", "--people PATH beside --guesses"),
        ("--logs a.jsonl --column text", "--people PATH beside --column"),
        ("--logs a.jsonl --people a.csv --kind half", "--people or --kind"),
        ("--pairs none/pairs.jsonl --games 2", "a file in a folder that is there"),
    ],
)
def test_flags_that_would_do_nothing(flags, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a game began"))
    with pytest.raises(SystemExit):
        main(flags.split())
    assert expected in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_unknown_logs():
    with pytest.raises(UserError, match="branching, adversarial.*'best'"):
        write_logs("never.jsonl", dialogs=1, seed=0, kind="best")
    assert set(POLICIES) < set(KINDS)


def test_games_of_a_seed_are_their_own():
    draws = {game_chance(seed, index).random() for seed in range(10) for index in range(10)}
    assert len(draws) == 100
