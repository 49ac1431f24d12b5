"""`play --roles`: each role of a world of several by its own player."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from pipelines.play import PlayConfig, main
from rl_dialog.data.schema import read_jsonl
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.roles import RolePlay
from rl_dialog.methods import BC, ILQL
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from tests.envs.test_text_world import Haggle

HAGGLE = f"{__name__}:Market"


class Market(Haggle):
    """Two who haggle, with players by name."""

    @staticmethod
    def scripted_players():
        return {"firm": lambda seed: lambda messages: "no", "soft": lambda seed: lambda messages: "yes"}

    def draw(self):
        return f"\x1b[42m{len(self.said)} said\x1b[0m"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Policies that babble."""
    root = tmp_path_factory.mktemp("policies")
    tokenizer = train_tokenizer(["yes no six"] * 20, vocab_size=300)
    for seed, (name, method) in enumerate({"bc": BC(), "ilql": ILQL()}.items()):
        torch.manual_seed(seed)
        config = ModelConfig(layers=1, attention_heads=2, width=16, context=256)
        policy = Policy(load_lm(config, tokenizer), method, config)
        policy.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def playing(*roles: str, **more) -> PlayConfig:
    return PlayConfig(
        **{"env": HAGGLE, "roles": roles, "episodes": 6, "seed": 4, "quiet": True, "max_new_tokens": 6} | more
    )


def dialogs(path) -> list:
    return list(read_jsonl(path))


def test_each_role_has_its_figures_and_its_dialog(tmp_path):
    """Firm buyers meet soft sellers: a buyer gets -.1 for the first word and -.5 in the end."""
    found = main(playing("buyer=firm", "seller=soft", logs=str(tmp_path / "logs.jsonl")))
    buyer, seller = (found["players"][name] for name in ("buyer=firm", "seller=soft"))
    assert (buyer["return"], seller["return"], buyer["stderr"]) == (-0.6, 0.5, 0)
    assert buyer["n"] == seller["n"] == buyer["terminated"] == 6 and "return" not in found
    told = dialogs(tmp_path / "logs.jsonl")
    assert len(told) == len({each.id for each in told}) == 12
    assert [(each.meta["role"], each.meta["player"]) for each in told[:2]] == [
        ("buyer", "firm"),
        ("seller", "soft"),
    ]
    assert len({each.meta["group"] for each in told}) == 6
    seen = [[(m["role"], m["content"]) for m in each.messages[1:]] for each in told[:2]]
    assert seen[0] == [("assistant", "no"), ("user", "yes")]
    assert seen[1] == [("user", "no"), ("assistant", "yes")]


def test_two_checkpoints_and_a_checkpoint_against_itself(checkpoints, tmp_path, monkeypatch):
    """A checkpoint says the same to the same words, whatever is played beside it and how many at a time."""
    monkeypatch.chdir(checkpoints)
    one, other = (
        main(playing("buyer=bc", "others=ilql", batch_size=size, logs=str(tmp_path / f"{size}.jsonl")))
        for size in (1, 64)
    )
    assert one["players"] == other["players"] and set(one["players"]) == {"buyer=bc", "seller=ilql"}
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "64.jsonl").read_bytes()
    alone = main(playing("others=bc", logs=str(tmp_path / "alone.jsonl")))
    assert set(alone["players"]) == {"buyer=bc", "seller=bc"}
    first = [each.messages[1] for each in dialogs(tmp_path / "1.jsonl") if each.meta["role"] == "buyer"]
    again = [each.messages[1] for each in dialogs(tmp_path / "alone.jsonl") if each.meta["role"] == "buyer"]
    assert [m["content"] for m in first] == [m["content"] for m in again]  # nobody had answered yet


def test_a_role_that_never_had_its_turn_is_told_and_no_error(capsys):
    """Who says yes at once ends the episode before the other speaks: the role is there all the same."""
    found = main(playing("buyer=soft", "seller=firm"))
    assert set(found["players"]) == {"buyer=soft"}
    assert capsys.readouterr().err == "never spoke in these episodes: seller\n"


def test_films_show_what_a_role_saw(tmp_path):
    out = tmp_path / "out"
    found = main(playing("buyer=firm", "seller=firm", output_dir=str(out), films=1, format="gif"))
    assert [Path(film).parent.name for film in found["films"]] == ["buyer_firm", "seller_firm"]
    film = Image.open(found["films"][0])
    assert film.n_frames == 4  # the beginning and after each of three replies of six
    colours = {colour for _, colour in film.convert("RGB").getcolors(1 << 16)}
    assert any(red < 120 < green and blue < 120 for red, green, blue in colours)  # behind the drawing


def test_a_person_plays_against_a_script(tmp_path, monkeypatch, capsys):
    lines = iter(["nein\n", "vielleicht\n", "yes\n"])
    monkeypatch.setattr(sys, "stdin", _Typed(lines))
    more = {"episodes": 2, "quiet": False, "logs": str(tmp_path / "mine.jsonl")}
    found, shown = main(playing("buyer=person", "seller=firm", **more)), capsys.readouterr().out
    assert "buyer is told: The price is" in shown and shown.count("buyer is told: no") == 2
    assert "buyer: terminated: return" in shown and "this episode does not count" in shown
    buyer, seller = dialogs(tmp_path / "mine.jsonl")
    assert [buyer.messages[i]["content"] for i in buyer.replies] == ["nein", "vielleicht", "yes"]
    assert seller.meta["player"] == "firm" and found["players"]["buyer=person"]["n"] == 1


class _Typed:
    """Lines of a pipe."""

    encoding = "utf-8"

    def __init__(self, lines):
        self.lines = lines

    def isatty(self):
        return False

    def __iter__(self):
        return self.lines


def test_watching_shows_who_said_what(capsys):
    main(playing("buyer=firm", "seller=soft", watch=1, quiet=False))
    shown = capsys.readouterr().out
    assert "episode 0" in shown and "episode 1" not in shown
    assert "buyer: no\n1 said\nseller: yes\n2 said\n" in shown and "seller: terminated: return 0.5" in shown


def test_an_episode_is_the_same_whoever_else_is_asked(tmp_path):
    """Played alone it is episode 5 of the same seed."""
    main(playing("others=firm", episodes=6, logs=str(tmp_path / "six.jsonl")))
    by_hand = Market()
    messages, _ = by_hand.reset(seed=stream(4, 5))
    assert dialogs(tmp_path / "six.jsonl")[-1].messages[0] == messages[0]


@pytest.mark.parametrize(
    ("roles", "more", "message"),
    [
        (("buyer=firm",), {}, "expected who plays 'seller' of Market, or others=WHO, got buyer=firm"),
        (("buyer=firmm", "seller=soft"), {}, "expected one of firm, soft, person, .*Did you mean firm"),
        (("buyer",), {}, "ROLE=WHO, each role once"),
        (("buyer=firm", "buyer=soft"), {}, "ROLE=WHO, each role once"),
        (("buyer=person", "seller=person"), {"quiet": False}, "one person at the keyboard"),
        (("buyer=person", "seller=soft"), {}, "no --quiet"),
        (("byer=firm", "others=firm"), {}, "--roles byer: expected roles that speak .*buyer, seller"),
        (("buyer=firm", "seller=soft"), {"player": ("firm",)}, "got --player and --roles"),
        (("buyer=firm", "seller=soft"), {"beta": (1.0,)}, "--beta: expected a --checkpoint"),
        (("assistant=random",), {"env": "wordle"}, "expected a world of several roles for --roles"),
        (("buyer=nowhere:Player", "seller=soft"), {}, "player 'nowhere:Player'"),
    ],
)
def test_what_cannot_be(roles, more, message):
    with pytest.raises(UserError, match=message):
        main(playing(*roles, **more))


class Numbered(Market):
    """Its roles are numbers."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], {"role": 0}


class Nobody(Market):
    """At the end it is nobody's turn."""

    def step(self, reply):
        messages, reward, over, cut, info = super().step(reply)
        return messages, reward, over, cut, {"role": None} if over else info


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (Numbered, r"Numbered: expected text as info\['role'\] of reset, got 0 in episode 0, whose seed is"),
        (Nobody, r"Nobody: expected text as info\['role'\] of step, got None in episode 0, whose seed is"),
    ],
)
def test_a_role_that_is_no_text_is_told(world, message):
    with pytest.raises(UserError, match=message):
        main(playing("others=soft", env=f"{__name__}:{world.__name__}"))


def test_a_player_that_is_sent_elsewhere_plays_the_same(checkpoints, tmp_path, monkeypatch):
    """As a worker has it: pickled, made in another folder than the one that checkpoints are named from."""
    monkeypatch.chdir(checkpoints)
    main(playing("buyer=bc", "seller=firm", logs=str(tmp_path / "here.jsonl")))
    roles, decoding = {"buyer": "bc", "seller": "firm"}, Decoding(max_new_tokens=6)
    make = pickle.dumps(partial(RolePlay, Market, roles, decoding, "cpu", str(checkpoints)))
    monkeypatch.chdir(tmp_path)
    played = pickle.loads(make)()(range(6), 4, 128)
    here = [(each.meta["role"], each.messages) for each in dialogs(tmp_path / "here.jsonl")]
    assert [(each.dialog.meta["role"], each.dialog.messages) for each in played] == here
