"""The verb `play` in worlds of words: returns that are known, the same episodes however they are played, logs
that `prepare` reads, and a person at a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
from dataclasses import replace
from xml.etree import ElementTree

import gymnasium
import pyarrow.parquet as parquet
import pytest
import torch

from envs import text_env
from envs.text_world import play as play_one
from pipelines import prepare
from pipelines.play import PlayConfig, main
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.playing import rounds_of
from rl_dialog.cluster.rollout import CheckpointPlayer
from rl_dialog.data.schema import read_jsonl
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.drawings import Style, moving_svg, spans
from rl_dialog.evaluation.episodes import play_episodes, play_with
from rl_dialog.evaluation.generation import Decoding, Reply, load_for_decoding, stream
from rl_dialog.evaluation.players import LUCK, cast_of
from rl_dialog.methods import BC, CHAI, ILQL
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy

SHORT = Decoding(max_new_tokens=8)


class Counting:
    """One point a reply; three replies, of which an odd episode's third breaks the world."""

    def reset(self, *, seed=None):
        self.messages, self.odd = [{"role": "user", "content": "one"}], seed % 2
        return list(self.messages), {}

    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
        third = len(self.messages) == 7
        info = {"failed": "the well is dry"} if third and self.odd else {}
        return list(self.messages), 1.0, third and not self.odd, bool(info), info


def silent(seed):
    return lambda messages: "..."


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Policies that babble, by the name of their method."""
    root, tokenizer = (
        tmp_path_factory.mktemp("policies"),
        train_tokenizer(["hello there"] * 20, vocab_size=300),
    )
    for name, method in {"bc": BC(), "ilql": ILQL(), "chai": CHAI()}.items():
        torch.manual_seed(0)
        config = ModelConfig(layers=2, attention_heads=2, width=16, context=512)
        policy = Policy(load_lm(config, tokenizer), method, config)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        policy.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def playing(**more) -> PlayConfig:
    return PlayConfig(
        **{"env": "wordle", "episodes": 12, "seed": 5, "quiet": True, "max_new_tokens": 8} | more
    )


def dialogs(path) -> list:
    return list(read_jsonl(path))


def test_a_scripted_players_return_is_what_the_world_says():
    assert main(playing(env="toy_graph", player=("optimal",)))["return"] == text_env("toy_graph").optimum()
    expert = main(playing(player=("optimal",), episodes=300))
    assert abs(expert["return"] + 2.02) < 4 * expert["stderr"]  # envs/README.md
    assert expert["n"] == expert["terminated"] == 300


def test_an_episode_is_that_of_the_world_played_by_hand():
    world = text_env("wordle")
    found = main(playing(player=("half",), episodes=3))
    seeds = [(stream(5, i), stream(5, i, LUCK)) for i in range(3)]
    by_hand = [play_one(world(), world.scripted_players()["half"](luck), seed=seed) for seed, luck in seeds]
    assert found["return"] == pytest.approx(sum(p.returns["assistant"] for p in by_hand) / 3, abs=1e-4)


def test_players_share_the_episodes_and_say_who_they_are(tmp_path):
    found = main(playing(player=("optimal=1", "random=3"), episodes=200, logs=str(tmp_path / "logs.jsonl")))
    assert found["players"]["random"]["n"] == pytest.approx(150, abs=25)
    logged = dialogs(tmp_path / "logs.jsonl")
    alone = main(playing(player=("random",), episodes=200, logs=str(tmp_path / "random.jsonl")))
    same = {d.meta["episode"]: d.messages for d in dialogs(alone["dialogs"])}
    theirs = [d for d in logged if d.meta["player"] == "random"]
    assert len(theirs) == found["players"]["random"]["n"] and len({d.id for d in logged}) == 200
    assert all(same[d.meta["episode"]] == d.messages for d in theirs)  # whoever else plays


class Puzzled(Counting):
    """Has two puzzles; `prepare` is to keep the episodes of one together."""

    def reset(self, *, seed=None):
        messages, info = super().reset(seed=seed)
        return messages, info | {"meta": {"group": f"puzzle {self.odd}"}}


@pytest.mark.parametrize(("world", "groups"), [("Puzzled", 2), ("Counting", 12)])
def test_what_a_world_puts_together_stays_together(tmp_path, world, groups):
    env, logs = f"{__name__}:{world}", str(tmp_path / "logs.jsonl")
    main(playing(env=env, player=(f"{__name__}:silent",), logs=logs))
    assert len({each.meta["group"] for each in dialogs(logs)}) == groups


def test_ends_are_counted_apart_and_failures_stand_in_no_mean():
    found = main(playing(env=f"{__name__}:Counting", player=(f"{__name__}:silent",), episodes=40))
    assert found["return"] == 3 and found["stderr"] == 0 and found["n"] == found["terminated"]
    assert found["failed"] == 40 - found["n"] > 0 and found["truncated"] == found["unscored"] == 0
    assert found["failures"] == {"the well is dry": found["failed"]}


@pytest.mark.parametrize(("name", "env"), [("bc", "small_talk"), ("ilql", "wordle")])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.8}, {"do_sample": False}])
def test_kept_caches_and_batches_change_nothing(checkpoints, monkeypatch, name, env, how):
    from rl_dialog.data.tokenize import load_tokenizer

    policy, tokenizer = load_for_decoding(checkpoints / name), load_tokenizer(checkpoints / name)
    decoding, reads, read = Decoding(max_new_tokens=6, **how), [], policy.read
    plain = play_episodes(policy, tokenizer, text_env(env), range(5), decoding, seed=3)
    monkeypatch.setattr(policy, "read", lambda *a, **k: reads.append(len(a[0])) or read(*a, **k))
    for size in (3, 128):
        kept = play_episodes(
            policy, tokenizer, text_env(env), range(5), decoding, seed=3, batch_size=size, keep_caches=True
        )
        assert [(each.dialog, each.replies) for each in kept] == [(e.dialog, e.replies) for e in plain]
    assert max(reads) == 5  # they were kept, and played side by side


def test_a_cache_reads_only_what_is_new(checkpoints):
    """Counted in tokens: after the first turn of small talk a prompt is never read from its beginning."""
    from rl_dialog.data.tokenize import encode_prompt, load_tokenizer

    policy, tokenizer = load_for_decoding(checkpoints / "bc"), load_tokenizer(checkpoints / "bc")
    widths, policy_read = [], policy.read
    policy.read = lambda tokens, *a, **k: widths.append(tokens.shape[1]) or policy_read(tokens, *a, **k)
    decoding = Decoding(max_new_tokens=1)
    how = {"seed": 1, "keep_caches": True}
    (episode,) = play_episodes(policy, tokenizer, text_env("small_talk"), [0], decoding, **how)
    messages = episode.dialog.messages
    prompts = [len(encode_prompt(messages[: i + 1], tokenizer, max_length=512)) for i in (0, 2, 4)]
    turns = widths[-len(episode.replies) :]
    assert turns[0] == prompts[0] and turns[1] <= prompts[1] - prompts[0] + 1 and turns[2] < prompts[1]


def test_what_chooses_among_replies_is_played_without_kept_caches(checkpoints):
    player = CheckpointPlayer(text_env("wordle"), "cpu", keep_caches=True)
    again = CheckpointPlayer(text_env("wordle"), "cpu")
    told = (range(2), str(checkpoints / "chai"), None, SHORT, 1, 8)
    assert [each.dialog for each in player(*told)] == [each.dialog for each in again(*told)]


def test_a_sweep_of_beta_plays_the_same_episodes_with_each(checkpoints, tmp_path):
    swept = main(playing(checkpoint=str(checkpoints / "ilql"), beta=(0, 4), output_dir=str(tmp_path / "out")))
    assert list(swept["players"]) == ["ilql beta 0", "ilql beta 4"] and "return" not in swept
    told = dialogs(swept["dialogs"])
    assert [d.meta["episode"] for d in told] == [*range(12), *range(12)] and len({d.id for d in told}) == 24
    alone = main(playing(checkpoint=str(checkpoints / "ilql"), beta=(4,), logs=str(tmp_path / "four.jsonl")))
    assert [d.messages for d in dialogs(alone["dialogs"])] == [d.messages for d in told[12:]]
    assert [d.messages for d in told[:12]] != [d.messages for d in told[12:]]
    assert swept["players"]["ilql beta 4"] == alone["players"]["ilql beta 4"]
    figures = json.loads((tmp_path / "out" / "play.json").read_text())
    assert figures["players"] == swept["players"]
    assert len(swept["films"]) == 6 and all(ElementTree.parse(film) for film in swept["films"])


@pytest.mark.slow
def test_prepare_reads_the_logs_with_the_same_rewards(tmp_path):
    played = main(playing(player=("half",), episodes=60, logs=str(tmp_path / "logs.jsonl")))
    out = tmp_path / "data"
    how = {"vocab_size": 262, "rewards": {"logged": 1.0}, "quiet": True}
    prepare.main(prepare.PrepareConfig(logs=(played["dialogs"],), output_dir=str(out), **how))
    rows = [row for path in out.rglob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    written = {d.id: [d.messages[i]["reward"] for i in d.replies] for d in dialogs(played["dialogs"])}
    assert {row["id"] for row in rows} == set(written)
    for row in rows:
        assert [reward for piece in row["rows"] for reward in piece["rewards"]] == written[row["id"]]
    shards = {path.name.partition("-")[0] for path in out.rglob("*.parquet")}
    assert shards > {"train"}  # episodes are not all in one split, though all begin alike


@pytest.mark.slow
def test_workers_play_the_same_episodes(checkpoints, tmp_path):
    learned = {"checkpoint": str(checkpoints / "ilql"), "beta": (1, 4)}
    with connect(num_cpus=2):
        for who in ({"player": ("half", "random")}, learned):
            here, there = (
                main(playing(**who, num_workers=n, logs=str(tmp_path / f"{n}.jsonl"), overwrite=True))
                for n in (0, 2)
            )
            assert here["players"] == there["players"]
            assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"player": ("optimall",)}, "unknown player 'optimall'.*Did you mean optimal"),
        ({"player": ("persson",)}, "Did you mean person"),
        ({"env": "wordl", "player": ("random",)}, "unknown env 'wordl'.*Did you mean wordle"),
        ({"env": f"{__name__}:Counting", "player": ("random",)}, "Counting brings no scripted_players"),
        ({"player": ("http://ann:hush@127.0.0.1:1/v1",)}, "--player: expected an address without password"),
        ({"player": ("random=0",)}, "NAME=SHARE with a share above 0"),
        ({"player": ("random", "random")}, "each player once"),
        ({}, "expected --checkpoint or --player, who plays, got neither"),
        ({"player": ("random",), "beta": (1.0,)}, "--beta: expected a --checkpoint"),
        ({"player": ("random",), "fps": 3}, "--fps does not apply to a world in words"),
        ({"player": ("random",), "format": "mp4"}, "expected svg or gif"),
        ({"player": ("person", "random")}, "expected person alone"),
        ({"player": ("person",)}, "no --quiet"),
        ({"player": ("nowhere:Player",)}, "player 'nowhere:Player'"),
        ({"player": ("random",), "episodes": 0}, "--episodes of at least 1"),
        ({"checkpoint": "runs/x", "beta": (2.0, -1.0)}, "--beta: expected a number of at least 0, .* got -1"),
    ],
)
def test_what_cannot_be(wrong, message):
    with pytest.raises(UserError, match=message):
        main(playing(**wrong))


class Registered(Counting, gymnasium.Env):
    """A world of words that is an environment of Gymnasium's."""


def test_a_language_model_plays_in_words_what_is_a_gymnasium_env_too(checkpoints, tmp_path):
    env = f"{__name__}:Registered"
    found = main(playing(env=env, checkpoint=str(checkpoints / "bc"), episodes=4))
    assert found["n"] + found["failed"] == 4 and found["return"] == 3
    with pytest.raises(UserError, match="--max_new_tokens does not apply to a policy of `prefer`"):
        main(playing(env=env, checkpoint=str(tmp_path)))


def test_a_method_without_beta_and_logs_that_are_there(checkpoints, tmp_path):
    with pytest.raises(UserError, match="trained with bc, which has none"):
        main(playing(checkpoint=str(checkpoints / "bc"), beta=(1.0,)))
    (tmp_path / "logs.jsonl").write_text("precious\n")
    with pytest.raises(UserError, match="is there already"):
        main(playing(player=("random",), logs=str(tmp_path / "logs.jsonl")))
    assert (tmp_path / "logs.jsonl").read_text() == "precious\n"
    with pytest.raises(UserError, match="--logs: expected a file, got the folder"):
        main(playing(player=("random",), logs=str(tmp_path), overwrite=True))


def test_betas_that_are_near_are_told_apart_and_equal_ones_refused(checkpoints):
    config = playing(checkpoint=str(checkpoints / "ilql"), beta=(0.1234567, 0.1234568))
    assert list(rounds_of(config, Counting)) == ["ilql beta 0.1234567", "ilql beta 0.1234568"]
    with pytest.raises(UserError, match="--beta: expected each once, got 2 2"):
        rounds_of(replace(config, beta=(2.0, 2.0)), Counting)


def test_a_checkpoint_named_by_dots_has_its_folders_name(checkpoints, monkeypatch):
    """`..` would put its films beside the output folder."""
    (checkpoints / "ilql" / "inner").mkdir(exist_ok=True)
    monkeypatch.chdir(checkpoints / "ilql" / "inner")
    assert list(rounds_of(playing(checkpoint=".."), Counting)) == ["ilql"]


def test_a_player_that_says_no_text_is_told_so():
    cast = cast_of([f"{__name__}:silent"], Counting)
    assert cast.player(0, 0)([]) == "..."
    with pytest.raises(UserError, match="expected a reply, a string, got '7'"):
        main(playing(env=f"{__name__}:Counting", player=(f"{__name__}:numbers",)))


def numbers(seed):
    return lambda messages: 7


def test_an_episode_is_shown_as_it_goes_on(capsys):
    main(playing(env="toy_maze", player=("optimal",), episodes=2, watch=1, quiet=False))
    shown = capsys.readouterr().out
    moves = shown.count("assistant: ")
    assert shown.count("episode 0") == 1 and "episode 1" not in shown
    assert shown.count("@") == moves + 1 and shown.count("G") == moves and "terminated: return" in shown


def test_a_drawing_keeps_its_colours_and_nothing_that_a_viewer_would_trip_over():
    frame = "\x1b[30;42m A \x1b[0m<b>&\x07\x1b]0;title\x07 \x1b[38;5;196mred\x1b[38;2;1;2;3mown\x1b[0m 世界"
    for frames in ([frame], [frame, "second"]):
        root = ElementTree.fromstring(moving_svg(frames))
        texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        inks = [node.get("fill") for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert texts[:1] == [" A "] and "<b>&" in "".join(texts) and "title" not in "".join(texts)
        assert "#ff0000" in inks and "#010203" in inks
    words, styles = zip(*spans("a\x1b[1mb\x1b[2Jc", Style()), strict=True)
    assert words == ("a", "b", "c", "") and [style.bold for style in styles] == [False, True, True, True]


def test_seats_are_taken_by_the_next_episode_and_answers_stay_with_theirs():
    """Episodes of different lengths side by side: every table hears what was meant for it."""

    class Long:
        def reset(self, *, seed=None):
            self.left, self.messages = 1 + seed % 4, [{"role": "user", "content": str(seed)}]
            return list(self.messages), {}

        def step(self, reply):
            self.left -= 1
            self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "so"}]
            return list(self.messages), float(reply == self.messages[0]["content"]), not self.left, False, {}

    widths = []

    def answer(tables):
        widths.append(len(tables))
        return [Reply(table.messages[0]["content"], (), True) for table in tables]

    played = play_with(answer, Long, range(20), seed=2, batch_size=3)
    assert [each.index for each in played] == list(range(20)) and max(widths) == 3
    assert all(each.total == len(each.replies) for each in played)
    assert sum(widths) == sum(len(each.replies) for each in played) and len(widths) < sum(widths) / 2


@pytest.mark.slow
def test_a_person_plays_in_a_terminal(tmp_path):
    """Two guesses by whoever types, and the end of the input, in a pseudo terminal."""
    logs = tmp_path / "mine.jsonl"
    world = text_env("toy_graph")()
    messages, _ = world.reset(seed=stream(0, 0))
    player, lines = text_env("toy_graph").scripted_players()["optimal"](0), []
    while True:
        lines.append(player(messages))
        messages, _, terminated, truncated, _ = world.step(lines[-1])
        if terminated or truncated:
            break
    arguments = ["--env", "toy_graph", "--player", "person", "--logs", str(logs)]
    seen = typed(arguments, lines)
    assert b"return -2" in seen and b"this episode does not count" in seen
    (dialog,) = dialogs(logs)
    assert [dialog.messages[i]["content"] for i in dialog.replies] == lines
    (result,) = (line for line in seen.splitlines() if line.startswith(b"{"))
    assert dialog.meta["player"] == "person" and json.loads(result)["n"] == 1


def typed(arguments: list[str], lines: list[str]) -> bytes:
    """What a pseudo terminal shows of the verb into which the lines are typed, and then the end."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "pipelines.play", *arguments],
            os.environ | {"OMP_NUM_THREADS": "1"},
        )
    seen, left = b"", [*(line.encode() + b"\n" for line in lines), b"\x04"]
    while select.select([terminal], [], [], 120)[0]:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if left and seen.count(b"you> ") > len(lines) + 1 - len(left):
            os.write(terminal, left.pop(0))
    os.close(terminal)
    os.waitpid(pid, 0)
    return seen
