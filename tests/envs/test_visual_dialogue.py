"""Visual dialogue: the published protocol over HTTP, the rewards, the exact optimum, players, failures."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envs import text_env
from envs.conformance import check_world
from envs.text_world import play
from envs.visual_dialogue import SCENES, HttpPost, VisualDialogue, make_server
from envs.visual_dialogue.__main__ import main
from envs.visual_dialogue.answers import QUESTIONS, Question, answer, read_question
from envs.visual_dialogue.bots import ENDPOINTS, answers_of, fitting, post, undecided_pictures
from envs.visual_dialogue.client import Bots, ServerFailed
from envs.visual_dialogue.players import Optimal
from envs.visual_dialogue.rules import KINDS, fires, halfway, reward
from envs.visual_dialogue.scenes import POOL, captions, features, pool, scene_of, value
from envs.visual_dialogue.search import ASKED, Caption, members, optimum
from envs.visual_dialogue.server import read_address
from envs.visual_dialogue.world import YesNoScenes, read_pictures
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError

RED = '[{"speaker": "question", "text": "is it red?"}]'
SNOW = 147  # a red bench in the park, in snow: ranked 6th of 400 by its caption


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with make_server("127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=120)


def request(url: str, endpoint: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """As any client of the protocol sends it."""
    call = urllib.request.Request(url + endpoint, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(call, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(url: str, endpoint: str, history: list[tuple[str, str]], *, picture: bool = True) -> Any:
    form = {
        "history": json.dumps([{"speaker": speaker, "text": text} for speaker, text in history]),
        "caption": captions()[SNOW],
        "generation_kwargs": json.dumps({"inference": "greedy", "beamSize": 1}),
    }
    if picture:
        form["img_features"] = json.dumps(features()[SNOW].tolist())
    status, value = request(url, endpoint, urllib.parse.urlencode(form).encode())
    assert status == 200, value
    return value


# --------------------------------------------------------------------------------------------- the protocol


def test_a_golden_dialogue_over_http(url):
    """Written down once; the percentiles are ranks 6, 6, 6 and 3 of 400."""
    assert captions()[SNOW] == "a red bench" and features().shape == (400, 64)
    said: list[tuple[str, str]] = []
    assert ask(url, "/fetch_reward_rank", said) == pytest.approx(1 - 6 / 400)
    assert ask(url, "/fetch_reward", said) == pytest.approx(0.005938402305, abs=1e-11)
    golden = [
        ("is it red?", "yes", 0.0, 0.0),
        ("what is it all about?", "i can't understand that", 0.0, 0.0),
        ("What is the weather like?", "snow", 3 / 400, 0.002193786014),
        ("how many are there?", "looks like 3", 2 / 400, 0.003744616291),
    ]
    for asked, told, by_rank, by_error in golden:
        said.append(("question", asked))
        assert ask(url, "/fetch_a_bot_response", said) == told
        assert ask(url, "/step_rank", said) == [told, pytest.approx(by_rank, abs=1e-11)]
        assert ask(url, "/step", said) == [told, pytest.approx(by_error, abs=1e-11)]
        said.append(("answer", told))
        assert ask(url, "/fetch_reward_rank", said) == pytest.approx(by_rank, abs=1e-11)
        assert ask(url, "/fetch_reward", said) == pytest.approx(by_error, abs=1e-11)
    assert ask(url, "/fetch_q_bot_response", said[:6], picture=False) == "how many are there?"
    assert ask(url, "/fetch_q_bot_response", said, picture=False) == "where is it?"


def test_the_percentile_is_the_rank_worked_out_one_by_one():
    scenes = [
        n
        for n in range(POOL)
        if value(pool()[n], "object") == "bench" and value(pool()[n], "colour") == "red"
    ]
    idea = features()[scenes].mean(0)
    own, *others = (float(((features()[n] - idea) ** 2).sum()) for n in [SNOW, *range(POOL)])
    assert 1 + sum(other < own - 1e-9 for other in others) == 6


def test_a_picture_outside_of_the_pool_counts_itself():
    """One that is farther from every idea than the pool is ranked last of one more."""
    assert Bots(post).reward_rank("a red bench", [9.0] * 64, []) == 1 - (POOL + 1) / (POOL + 1)


def test_a_scene_is_read_from_its_feature():
    assert all(scene_of(2.5 * feature) == scene for feature, scene in zip(features(), pool(), strict=True))


@pytest.mark.parametrize(
    ("endpoint", "change", "told"),
    [
        ("/step_rank", {"history": "[]"}, "last entry to be the question"),
        ("/fetch_reward", {"history": '[{"speaker": "question", "text": "who?"}]'}, "to be the answer"),
        ("/step", {"history": "{"}, "expected JSON"),
        ("/step", {"history": '[{"speaker": "answer", "text": "x"}]'}, "as entry 0"),
        ("/step", {"history": '[{"speaker": "question", "text": 3}]'}, "as entry 0"),
        ("/step", {"history": "[" * 5000}, "expected JSON"),
        ("/fetch_reward", {"img_features": "[1, 2]"}, "list of 64 numbers"),
        ("/fetch_reward", {"img_features": json.dumps([float("nan")] * 64)}, "finite"),
        ("/step", {"history": RED, "img_features": json.dumps([10**400] * 64)}, "at most 1e+06"),
        ("/fetch_reward", {"img_features": json.dumps([1e308] * 64)}, "at most 1e+06"),
        ("/fetch_reward", {"img_features": None}, "form field img_features"),
        ("/fetch_reward", {"caption": "x" * 5000}, "at most 4000"),
        ("/fetch_reward", {"generation_kwargs": '{"inference": "sample"}'}, "greedy"),
        ("/fetch_rewards", {}, "/fetch_reward"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(url, endpoint, change, told):
    form = {"history": "[]", "caption": "a red bench", "img_features": json.dumps([1.0] * 64)} | change
    form = {name: text for name, text in form.items() if text is not None}
    status, value = request(url, endpoint, urllib.parse.urlencode(form).encode())
    assert status == (404 if endpoint not in ENDPOINTS else 400) and told in value["error"]
    with pytest.raises(UserError, match=re.escape(told)):
        HttpPost(url)(endpoint, form) if status == 400 else post(endpoint, form)


def test_a_server_does_not_keep_all_that_strangers_say():
    for kept in (read_question, fitting):
        assert kept.cache_info().maxsize < 1e5


def test_what_is_no_form_is_refused(url):
    assert request(url, "/step", b"{}", **{"Content-Type": "application/json"})[0] == 415
    assert request(url, "/step", b"history=%FF%FE")[0] == 400
    with socket.create_connection(tuple(url[7:].split(":")), timeout=120) as raw:
        raw.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
        assert b"413" in raw.recv(100)
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(url + "/step", timeout=120)


# ----------------------------------------------------------------------------------- answers and questions


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("what colour is it?", Question("colour")),
        ("What color is the bus?", Question("colour")),
        ("is the dog red", Question("colour", ("red",))),
        ("Is it a dog?", Question("object", ("dog",))),
        ("is it outside?", Question("place", ("park", "beach", "street"))),
        ("are there any people?", Question("person", ("man", "woman", "child"))),
        ("is it red or blue?", None),
        ("red?", None),
        ("", None),
        ("what is it?", None),
        ("how many people are there?", None),
    ],
)
def test_questions_are_read(text, question):
    assert read_question(text) == question


def test_every_question_of_the_players_is_understood_and_means_something_else():
    meanings = [read_question(text) for text in ASKED]
    assert None not in meanings and len(set(meanings)) == len(ASKED)


def test_a_blurred_photo_hides_what_a_polar_question_finds_out():
    sharp, blurred = ((0, 0, 2, 2, 1, 3, 0, photo) for photo in (0, 1))
    for text, clear, hidden in (
        ("what colour is it?", "green", "i can't tell"),
        ("is it green?", "yes", "yes"),
        ("how big is it?", "fairly large", "fairly large"),
        ("how many are there?", "looks like 3", "i can't tell"),
    ):
        assert (answer(sharp, read_question(text)), answer(blurred, read_question(text))) == (clear, hidden)
    indoors = (0, 3, 2, 2, 1, 3, 0, 0)
    assert answer(indoors, read_question("is it snowing?")) == "i can't tell"


# ------------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    ("said", "fired"),
    [
        ("snow", "soft conservative"),
        ("yes", "yes_no soft conservative"),
        ("No", "yes_no soft conservative"),
        ("yes, it is", "soft conservative"),
        ("i can't tell", "conservative"),
        ("i can’t see", "conservative"),
        ("looks like 3", "conservative"),
        ("fairly large", "conservative"),
        ("green", ""),
        ("a man", ""),
    ],
)
def test_which_answers_are_penalised(said, fired):
    assert [kind for kind in KINDS if fires(kind, said)] == fired.split()


def test_a_dialogue_stops_halfway_and_not_before():
    assert halfway(0.985, 0.0075) and not halfway(0.985, 0.0074) and halfway(0.6, 0.2)
    assert not halfway(0.6, -0.3)


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [
        ("standard", [-1, -1, 0]),
        ("yes_no", [-3, -1, 0]),
        ("soft", [-3, -1, -2]),
        ("conservative", [-3, -3, -2]),
    ],
)
def test_the_golden_dialogue_pays(kind, rewards):
    world = picture_world(kind)(SNOW)
    world.reset()
    steps = [world.step(text) for text in ("is it red?", "hm", "what is the weather like?")]
    assert [step[1] for step in steps] == rewards
    assert [step[2] for step in steps] == [False, False, True]
    assert [step[4].get("polar") for step in steps] == [True, None, False]
    with pytest.raises(RuntimeError, match="call reset first"):
        world.step("who is there?")


@pytest.mark.parametrize(("kind", "lowest"), [("standard", -9), ("yes_no", -29), ("conservative", -29)])
def test_the_lowest_return(kind, lowest):
    """Ten questions whose answers are known, the last of which costs nothing but the penalty."""
    played = play(picture_world(kind)(SNOW), lambda messages: "is it red?", seed=0)
    assert len(played.infos) == 10 and played.returns["assistant"] == lowest and played.end == "terminated"


def test_progress_is_paid_in_the_other_modes():
    class Raw(picture_world("standard")):
        mode = "agent_stops"

    world = Raw(SNOW)
    world.reset()
    paid = [world.step(text)[1] for text in ("what is the weather like?", "how many are there?")]
    assert paid == pytest.approx([3 / 400, 2 / 400])
    assert world.step("<stop>")[1:4] == (0.0, True, False)
    Raw.mode = "10_stop"
    played = play(Raw(SNOW), lambda messages: "how many are there?", seed=0)
    assert len(played.infos) == 10
    assert played.returns["assistant"] == pytest.approx(played.infos[-1]["percentile"] - (1 - 6 / 400))


def test_unknown_kinds_and_modes_are_told():
    for wrong, told in (
        ({"kind": "polite"}, "kind of reward"),
        ({"mode": "stops"}, "mode"),
        ({"dialogs": "x"}, "both"),
    ):
        with pytest.raises(UserError, match=told):
            type("Wrong", (VisualDialogue,), wrong)()
    with pytest.raises(UserError, match="expected a URL"):
        type("Wrong", (VisualDialogue,), {"server": "127.0.0.1:5000"})()


def picture_world(kind: str) -> type:
    """A world of one picture."""

    class Picture(VisualDialogue):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def _draw(self, chance: random.Random) -> tuple[str, list[float]]:
            return captions()[self.number], features()[self.number].tolist()

    Picture.kind = kind
    return Picture


# ------------------------------------------------------------------------------------- players and optimum


class First(random.Random):
    """Breaks ties in one way, so that a player does not depend on luck."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


@pytest.mark.parametrize("kind", ["standard", pytest.param("yes_no", marks=pytest.mark.slow)])
def test_the_optimal_player_earns_the_optimum_over_all_pictures(kind):
    """Exactly, in the world itself."""
    returns = []
    for number in undecided_pictures():
        asker = Optimal(kind, 0)
        asker.chance = First()
        returns += play(picture_world(kind)(number), asker, seed=0).returns.values()
    assert np.mean(returns) == pytest.approx(optimum(kind), abs=1e-9)


def plain_value(known: Caption, heard: int, alive: int, left: int) -> float:
    """The best sum of returns by trying everything."""
    if not alive or not left:
        return 0.0
    return max(
        sum(
            paid + plain_value(known, h, going, left - 1)
            for paid, h, going in known.outcomes(heard, alive, text, left)
        )
        for text in ASKED
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_search_leaves_out_is_no_better(kind):
    for caption in ("a red bench", "a dog on the street"):
        known = Caption(caption, kind)
        found = known.value(known.everyone, known.begins, 2)
        assert found == pytest.approx(plain_value(known, known.everyone, known.begins, 2))


def test_the_penalty_turns_the_best_player_to_open_questions():
    """Without it the better half of its questions is polar, with it a fifth."""
    shares = {}
    for kind in ("standard", "yes_no"):
        infos = [i for seed in range(60) for i in play(picture_world(kind)(undecided_pictures()[5 * seed]),
                 Optimal(kind, seed), seed=seed).infos]  # fmt: skip
        shares[kind] = np.mean([info["polar"] for info in infos])
    assert shares["standard"] > 0.4 > 0.3 > shares["yes_no"]


@pytest.mark.parametrize("name", SCENES)
def test_they_keep_the_contract(name):
    found = check_world(text_env(name), but=("other process", "players", "references"))
    assert not [each for each in found if each.fault]


def test_logs_say_whose_they_are(tmp_path, capsys):
    main(["--kind", "yes_no", "--logs", str(tmp_path / "logs.jsonl"), "--dialogs", "40", "--seed", "3"])
    about = json.loads(capsys.readouterr().out.splitlines()[-1])
    dialogs = list(read_jsonl(tmp_path / "logs.jsonl"))
    assert len(dialogs) == about["dialogs"] == 40 and {d.meta["player"] for d in dialogs} == {
        "polar",
        "open",
        "random",
    }
    for dialog in dialogs:
        texts = [message["content"] for message in dialog.messages]
        told = [dialog.messages[i + 1]["content"] for i in dialog.replies]
        earned = [dialog.messages[i]["reward"] for i in dialog.replies]
        assert texts[0] in captions() and set(texts[1::2]) <= set(QUESTIONS)
        assert earned == [reward("yes_no", said, last=n == len(told) - 1) for n, said in enumerate(told)]
    YesNoScenes.write_logs(tmp_path / "again.jsonl", dialogs=40, seed=3)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "logs.jsonl").read_bytes()
    with pytest.raises(UserError, match="expected one of optimal"):
        YesNoScenes.write_logs(tmp_path / "x.jsonl", dialogs=1, seed=3, player="polite")


def test_the_belief_of_an_asker_holds_the_picture():
    """Whatever was asked: the scenes that agree with the answers hold the true one."""
    for number in undecided_pictures()[::40]:
        fits = fitting(captions()[number])
        for text in QUESTIONS:
            fits = fits & (answers_of(read_question(text)) == answer(pool()[number], read_question(text)))
        assert fits[number]
    assert list(members(0b1011)) == [0, 1, 3]


def test_the_command_says_what_is_wrong(capsys, monkeypatch):
    wrong = {
        "--serve here": "HOST:PORT",
        "--dialogs 0": "at least 1",
        "--serve 0.0.0.0:0": "--public lets other machines",
        "--serve 127.0.0.1:0 --logs x": "not allowed with",
    }
    # Without the check the server would answer until it is interrupted.
    monkeypatch.setattr("envs.visual_dialogue.server._Server.serve_forever", lambda server: None)
    for arguments, told in wrong.items():
        with pytest.raises(SystemExit):
            main(arguments.split())
        assert told in capsys.readouterr().err
    main(["--serve", "0.0.0.0:0", "--public"])
    assert read_address("5000") == ("127.0.0.1", 5000) and read_address("0.0.0.0:1") == ("0.0.0.0", 1)


# ------------------------------------------------------------------------------------ servers elsewhere


def published(tmp_path, server: str) -> type[VisualDialogue]:
    """A world as the user of a published server writes it, with pictures of three scenes."""
    numbers = [SNOW, 293, 319]
    (tmp_path / "val.json").write_text(
        json.dumps([{"caption": captions()[n], "dialog": []} for n in numbers])
    )
    np.save(tmp_path / "val.npy", (3 * features()[numbers]).astype("float32"))  # of any length
    where = {"server": server, "dialogs": tmp_path / "val.json", "features": tmp_path / "val.npy"}
    return type("Published", (VisualDialogue,), where)


def test_the_pictures_and_the_server_of_others(url, tmp_path):
    """Over HTTP as in this process, episode for episode."""
    make = SCENES["visual_dialogue"].scripted_players()["polar"]
    worlds = [published(tmp_path, server) for server in ("", url)]
    for seed in range(4):
        here, there = (play(world(), make(seed), seed=seed) for world in worlds)
        assert here.dialogs["assistant"].messages == there.dialogs["assistant"].messages
        assert here.dialogs["assistant"].messages[0]["content"] in [captions()[n] for n in (SNOW, 293, 319)]
    for dialogs, rows, told in (
        ("val.npy", "val.npy", "JSON list"),
        ("val.json", "val.json", "expected PATH.npy"),
        ("val.json", "none.npy", "array of features"),
        ("none.json", "val.npy", "JSON list"),
    ):
        with pytest.raises(UserError, match=told):
            read_pictures(tmp_path / dialogs, tmp_path / rows)
    np.save(tmp_path / "few.npy", features()[:2])
    with pytest.raises(UserError, match="a row of numbers per caption"):
        read_pictures(tmp_path / "val.json", tmp_path / "few.npy")


def test_features_in_an_hdf5_file(tmp_path):
    """As they are published: a data set of each split."""
    h5py = pytest.importorskip("h5py", reason="HDF5 files: pip install h5py")
    published(tmp_path, "")
    with h5py.File(tmp_path / "data_img.h5", "w") as file:
        file["images_val"] = features()[[SNOW, 293, 319]]
    told, rows = read_pictures(tmp_path / "val.json", f"{tmp_path}/data_img.h5:images_val")
    assert told[0] == "a red bench" and np.array_equal(rows[2], features()[319])
    with pytest.raises(UserError, match="array of features, got KeyError"):
        read_pictures(tmp_path / "val.json", f"{tmp_path}/data_img.h5:images_test")


def test_a_server_that_is_not_there_fails_the_episode(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    played = play(published(tmp_path, f"http://127.0.0.1:{free}")(), lambda messages: "who is there?", seed=1)
    assert played.end == "failed" and played.returns["assistant"] is None
    assert (
        "Connection" in played.dialogs["assistant"].meta["failed"]
        and "--serve" in played.dialogs["assistant"].meta["failed"]
    )
    away = type("Away", (YesNoScenes,), {"server": f"http://127.0.0.1:{free}"})
    about = away.write_logs(tmp_path / "logs.jsonl", dialogs=2, seed=1)
    assert (about["dialogs"], about["failed"], about["mean_return"]) == (2, 2, None)
    world = away()
    world.reset(seed=1)
    assert world.draw() == f"user      {world.caption}"  # what a film of it shows


@pytest.mark.parametrize("drips", [False, True])
def test_a_slow_server_is_not_waited_for(drips):
    """One that says nothing, and one that sends a byte now and then."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def serve() -> None:
            taken, _ = slow.accept()
            with taken:
                if drips:
                    taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
                while not over.wait(0.1):  # as long as anybody waits
                    try:
                        taken.sendall(b" " if drips else b"")
                    except OSError:
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ServerFailed, match=r"within 0\.3 s"):
            HttpPost(f"http://127.0.0.1:{slow.getsockname()[1]}", seconds=0.3)("/step", {})
        over.set()
        thread.join(timeout=120)


@pytest.mark.parametrize(
    "got", [None, "yes", ["yes"], ["yes", "0.5"], ["yes", float("nan")], [1, 0.5], {"a": 1}]
)
def test_answers_of_another_shape_are_failures(got):
    bots = Bots(lambda endpoint, form: got)
    with pytest.raises(ServerFailed, match=r"expected \[answer, number\]"):
        bots.step_rank("a red bench", [1.0], [])
    with pytest.raises(ServerFailed, match="expected a number"):
        bots.reward_rank("a red bench", [1.0], [])
