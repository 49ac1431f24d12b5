"""OpenEnv's WebSocket protocol, both ways: a world of ours served, and the client that plays in it."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect
from websockets.sync.server import serve

from envs import text_env
from envs.adapters.openenv_world import SCHEMAS, OpenEnvWorld
from envs.conformance import Babbler, check_world
from envs.example import House
from envs.text_world import play, restore, snapshot
from pipelines.serve_env import ServeEnvConfig, main
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import play_with
from rl_dialog.evaluation.players import scripted_reply
from rl_dialog.serving.worlds import WorldLimits, create_world_app
from rl_dialog.web_server import Patience, WebServer, listening
from tests.envs.test_text_world import Haggle

ROOT = Path(__file__).parents[2]


class Fragile:
    """Fails, breaks, does not know or goes on, as it is told; it has no end."""

    max_turns = 3

    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": "What now?"}]
        return list(self.messages), {}

    def step(self, reply):
        self.messages.append({"role": "assistant", "content": reply})
        self.messages.append({"role": "user", "content": "And now?"})
        if reply == "break":
            raise KeyError("broken")
        failed = {"failed": "a wheel came off"} if reply == "fail" else {}
        reward = {"unknown": None, "nan": float("nan")}.get(reply, 0.1)
        odd = {(1, 2): np.arange(2), "far": float("inf")} if reply == "odd" else {}
        info = {"said": np.int64(len(reply)), **failed, **odd}
        return list(self.messages), reward, False, bool(failed), info


def served(world, limits: WorldLimits | None = None, patience: Patience | None = None) -> WebServer:
    app, most = create_world_app(world, world.__name__, limits), (limits or WorldLimits()).largest
    place = listening("127.0.0.1", 0)
    return WebServer(app, place, drain=1.0, patience=patience, websocket_bytes=most)


@pytest.fixture(scope="module")
def house() -> Iterator[str]:
    server = served(House, WorldLimits(sessions=40))
    yield server.url.replace("http", "ws")
    server.close()


@pytest.fixture(scope="module")
def fragile() -> Iterator[str]:
    server = served(Fragile, WorldLimits(sessions=2, largest=10_000))
    yield server.url.replace("http", "ws")
    server.close()


def ask(place, message) -> dict:
    place.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(place.recv(timeout=120))


def same(one, other) -> bool:
    return all(
        one.dialogs[role].messages == other.dialogs[role].messages
        and one.dialogs[role].truncated == other.dialogs[role].truncated
        and (one.end, one.returns) == (other.end, other.returns)
        for role in one.dialogs
    )


def test_episodes_are_those_of_the_world_itself(house):
    make = text_env(f"openenv:{house}")
    for seed in range(6):
        assert same(play(House(), Babbler(seed), seed=seed), play(make(), Babbler(seed), seed=seed))


EVIL = "https://evil.example"


@pytest.mark.parametrize(
    ("host", "origin", "is_let_in"),
    [(host, None, True) for host in ("127.0.0.1:8000", "localhost", "[::1]:8000")]
    + [("127.0.0.1", origin, True) for origin in ("http://localhost:3000", "http://[::1]")]
    + [("127.0.0.1", origin, False) for origin in (EVIL, "null", "", "http://[", f"{EVIL}/127.0.0.1")]
    + [("rebound.example:8000", origin, False) for origin in (None, "http://rebound.example:8000")],
)
def test_web_pages_from_elsewhere_are_not_let_in(host, origin, is_let_in):
    headers = {"host": host} | ({} if origin is None else {"origin": origin})

    def begins(**more):
        client = TestClient(create_world_app(House, "house", **more))
        with client.websocket_connect("/ws", headers=headers) as place:
            place.send_json({"type": "reset"})
            return place.receive_json()["type"] == "observation"

    assert begins(hosts=None)  # --public
    if is_let_in:
        assert begins()
    else:
        with pytest.raises(WebSocketDisconnect) as refused:
            begins()
        assert refused.value.code == 1008


class Told(Haggle):
    """Says something for the log when it begins, and pays in numpy's numbers."""

    def reset(self, *, seed=None):
        messages, info = super().reset(seed=seed)
        return messages, info | {"meta": {"price": self.price}}

    def step(self, reply):
        messages, rewards, *rest = super().step(reply)
        return messages, {role: np.float32(value) for role, value in rewards.items()}, *rest


def test_a_served_world_of_several_roles_says_who_begins():
    server = served(Told)
    try:
        make = text_env(f"openenv:{server.url.replace('http', 'ws')}")
        for seed in range(3):
            here, there = (play(each, Babbler(seed), seed=seed) for each in (Told(), make()))
            assert same(here, there) and set(there.dialogs) == {"buyer", "seller"}
            assert there.dialogs["buyer"].meta == here.dialogs["buyer"].meta
    finally:
        server.close()


def test_a_served_world_keeps_the_contract(house):
    found = check_world(text_env(f"openenv:{house}"), but=("order", "side by side", "other process"))
    assert [f"{each.check}: {each.fault}" for each in found if each.fault] == []


def test_sessions_have_worlds_of_their_own(house):
    make = text_env(f"openenv:{house}")
    one, other = make(), make()
    one.reset(seed=1)
    other.reset(seed=2)
    one.step("left")
    assert len(other.step("right")[0]) <= 3
    sent = pickle.loads(pickle.dumps(one))
    saved = snapshot(one)
    assert one.step("right")[:4] == sent.step("right")[:4]
    restore(one, saved)
    assert len(one.messages) == 3


def test_the_protocol_message_for_message(fragile):
    """Written against OpenEnv's own types, not against our client."""
    with connect(f"{fragile}/ws", proxy=None) as place:
        begun = ask(place, {"type": "reset", "data": {"seed": 5, "episode_id": "mine"}})
        assert begun["type"] == "observation"
        assert begun["data"]["observation"]["text"] == "What now?" and begun["data"]["done"] is False
        stepped = ask(place, {"type": "step", "data": {"message": "hi"}})["data"]
        assert stepped["reward"] == 0.1 and stepped["metadata"]["info"] == {"said": 2}
        assert ask(place, {"type": "state"}) == {
            "type": "state",
            "data": {"episode_id": "mine", "step_count": 1},
        }
        codes = [
            ask(place, wrong)["data"]["code"]
            for wrong in (
                "{",
                b"\x00\xff",
                "[]",
                {"type": "dance"},
                {"type": "step", "data": {"text": "hi"}},
                {"type": "reset", "data": {"seed": -1}},
            )
        ]
        assert codes == ["INVALID_JSON"] * 2 + ["VALIDATION_ERROR", "UNKNOWN_TYPE"] + ["VALIDATION_ERROR"] * 2
        assert ask(place, {"type": "step", "data": {"message": "hi"}})["type"] == "observation"
        for message, said in (
            ({"type": "step", "data": {"message": 5}}, "a text, got 5"),
            ({"type": "step", "data": {"reply": "hi"}}, "a text, got the fields reply"),
            ({"type": "reset", "data": {"seed": 2**63}}, "from 0 to 2**63 - 1 as seed"),
        ):
            assert said in ask(place, message)["data"]["message"]
        broken = ask(place, {"type": "step", "data": {"message": "break"}})
        assert broken["type"] == "error" and "broken" in broken["data"]["message"]
        assert ask(place, {"type": "step", "data": {"message": "hi"}})["data"]["code"] == "EXECUTION_ERROR"
        place.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            place.recv(timeout=120)


def test_the_four_ends_stay_apart(fragile):
    make = text_env(f"openenv:{fragile}")
    replies = ("on", "fail", "break", "unknown")
    ends = [play(make(), lambda messages, say=say: say, seed=0).end for say in replies]
    assert ends == ["truncated", "failed", "failed", "unscored"]
    assert make().max_turns == 3


def test_what_cannot_be_said_in_json_is_an_error_and_the_session_goes_on(fragile):
    with connect(f"{fragile}/ws", proxy=None) as place:
        assert ask(place, {"type": "reset"})["type"] == "observation"
        told = ask(place, {"type": "step", "data": {"message": "nan"}})
        assert told["type"] == "error" and told["data"]["code"] == "EXECUTION_ERROR"
        assert ask(place, {"type": "reset"})["type"] == "observation"
        told = ask(place, {"type": "step", "data": {"message": "odd"}})["data"]
        assert told["metadata"]["info"] == {"said": 3, "(1, 2)": [0, 1], "far": None}


def test_a_world_that_cannot_be_made_is_told():
    def unmade():
        raise RuntimeError("no disk")

    server = served(unmade)
    try:
        with connect(f"{server.url.replace('http', 'ws')}/ws", proxy=None) as place:
            assert "no disk" in json.loads(place.recv(timeout=120))["data"]["message"]
        world = OpenEnvWorld(server.url)
        for _ in range(20):  # the server may have closed before the client has asked
            assert "no disk" in world.reset(seed=0)[1]["failed"]
    finally:
        server.close()


class Waiting(Fragile):
    """Waits for ever, exits or is at its end, as it is told. What it holds belongs to its thread."""

    def __init__(self):
        self.table = sqlite3.connect(":memory:")

    def step(self, reply):
        if reply == "wait":
            threading.Event().wait()
        if reply == "exit":
            raise SystemExit(3)
        if reply == "end":
            next(iter(()))
        self.table.execute("select 1")
        return super().step(reply)


def test_a_world_that_waits_or_exits_is_its_own_sessions_affair(caplog):
    """More wait than Python has threads for such work, which are at most 32."""
    before = set(threading.enumerate())
    server = served(Waiting)
    url = f"{server.url.replace('http', 'ws')}/ws"
    try:
        with ExitStack() as open_places:
            places = [open_places.enter_context(connect(url, proxy=None)) for _ in range(34)]
            for place in places:
                ask(place, {"type": "reset"})
            *waiting, last = places
            for place in waiting:
                place.send(json.dumps({"type": "step", "data": {"message": "wait"}}))
            for reply, error in (("exit", "SystemExit: 3"), ("end", "StopIteration")):
                ask(last, {"type": "reset"})
                told = ask(last, {"type": "step", "data": {"message": reply}})
                assert error in told["data"]["message"]
            ask(last, {"type": "reset"})
            assert ask(last, {"type": "step", "data": {"message": "go on"}})["type"] == "observation"
            server.close()
            assert not server.alive()
            of_clients = {thread for thread in threading.enumerate() if "recv_events" in thread.name}
        left = set(threading.enumerate()) - before - of_clients
        assert len(left) >= len(waiting) and all(thread.daemon for thread in left)  # the process can end
        assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    finally:
        server.close()


def test_limits_of_sessions_size_and_silence():
    server = served(Fragile, WorldLimits(sessions=2, largest=10_000))
    short = served(Fragile, WorldLimits(sessions=2, idle=1.0))
    url, quiet = (f"{each.url.replace('http', 'ws')}/ws" for each in (server, short))
    try:
        with connect(quiet, proxy=None) as silent:
            assert json.loads(silent.recv(timeout=120))["data"]["code"] == "SESSION_ERROR"
        with connect(url, proxy=None) as one, connect(url, proxy=None) as two:
            ask(one, {"type": "reset"})
            ask(two, {"type": "reset"})
            with connect(url, proxy=None) as third:
                assert json.loads(third.recv(timeout=120))["data"]["code"] == "CAPACITY_REACHED"
            one.send("x" * 20_000)
            with pytest.raises(ConnectionClosed):
                one.recv(timeout=120)
            assert ask(two, {"type": "reset"})["type"] == "observation"
    finally:
        server.close()
        short.close()


def test_a_session_outlives_the_time_for_a_request_and_is_counted_until_it_ends():
    """A connection that went over to WebSockets is none of HTTP, and one of its address all the same."""
    server = served(House, patience=Patience(head=1.0, body=1.0, answer=1.0, per_address=2))
    try:
        world = OpenEnvWorld(server.url)
        for _ in range(2):
            with opened_once_others_left(server.url) as one, opened_once_others_left(server.url) as two:
                ask(one, {"type": "reset"})
                with socket.create_connection(server.url.removeprefix("http://").split(":")) as third:
                    assert third.recv(100).startswith(b"HTTP/1.1 503")
                time.sleep(1.5)
                assert ask(one, {"type": "step", "data": {"message": "left"}})["type"] == "observation"
                assert ask(two, {"type": "reset"})["type"] == "observation"
                for _ in range(20):  # the server may have refused before the client has asked
                    assert "failed" in world.reset(seed=0)[1]
    finally:
        server.close()


def opened_once_others_left(url: str):
    """A connection, once the server has heard that those before it ended."""
    deadline = time.monotonic() + 240
    while True:
        try:
            return connect(f"{url.replace('http', 'ws')}/ws", proxy=None)
        except (WebSocketException, OSError, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_port_that_is_none_is_told():
    with pytest.raises(UserError, match="with a free port, got 127.0.0.1:99999: "):
        main(ServeEnvConfig(env="small_talk", port=99999))


def test_nobody_there_and_no_address_say_so():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    with pytest.raises(UserError, match=f"expected a server that answers at http://127.0.0.1:{port}/schema"):
        text_env(f"openenv:ws://127.0.0.1:{port}")
    with pytest.raises(UserError, match="expected an address such as"):
        text_env("openenv:ftp://somewhere")
    for wrong in ("ws://[::1", "ws://127.0.0.1:99999999"):
        with pytest.raises(UserError, match="expected an address such as"):
            text_env(f"openenv:{wrong}")
    for options, told in (
        ("speed=3", "expected options action, text, seconds; got speed"),
        ("seconds=soon", "expected seconds to be a number above 0, got 'soon'"),
        ("seconds=-1", "expected seconds to be a number above 0, got -1"),
        ("action=3", "expected action to be the name of a field, got 3"),
    ):
        with pytest.raises(UserError, match=told):
            text_env(f"openenv:ws://127.0.0.1:1?{options}")


@pytest.fixture
def slow_server() -> Iterator[str]:
    """One that answers a reset in another trainer's words, and no step."""

    def talk(place):
        for text in place:
            asked = json.loads(text)
            if asked["type"] == "reset":
                observed = {"prompt": f"seed {asked['data']['seed']}", "legal_players": [0]}
                answer = {"observation": observed, "reward": None, "done": False}
                place.send(json.dumps({"type": "observation", "data": answer}))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(120)


def test_a_slow_server_makes_a_failed_episode(slow_server, monkeypatch):
    monkeypatch.setattr("envs.adapters.openenv_world._schema", lambda url, seconds: {})
    world = OpenEnvWorld(slow_server, {"seconds": 120})
    assert world.reset(seed=7) == ([{"role": "user", "content": "seed 7"}], {})
    world.seconds = 0.5  # what is asked before is answered, however slow the machine is
    _, reward, terminated, truncated, info = world.step("anybody?")
    assert (reward, terminated, truncated) == (None, False, True) and "no answer in 0.5 s" in info["failed"]
    world.seconds = 120
    assert world.reset(seed=8)[0][0]["content"] == "seed 8"  # connects anew


OURS = {"terminated": False, "truncated": False, "info": {}}  # metadata of a server of ours


def observation(reward=0, done=False, observed="go on", **more) -> str:
    data = {"observation": observed, "reward": reward, "done": done, **more}
    return json.dumps({"type": "observation", "data": data})


ODD = {
    "deep": "[" * 100_000,
    "text": observation("a lot"),
    "nan": observation(float("nan")),
    "huge": observation(10**400),
    "roles": observation(metadata=OURS | {"rewards": {"buyer": "all"}}),
    "parts": observation({"format": 0.25}),
    "done": observation(1, "false"),
    "list": json.dumps([1]),
}


@pytest.fixture
def odd_server(monkeypatch) -> Iterator[OpenEnvWorld]:
    """One that answers a step with the odd thing that it names, or a conversation of its own."""
    own = {"messages": [{"role": "user", "content": "you said it"}]}

    def talk(place):
        for text in place:
            said = json.loads(text)["data"].get("message")
            place.send(ODD.get(said) or observation(observed=own, metadata={"info": [said]}))

    monkeypatch.setattr("envs.adapters.openenv_world._schema", lambda url, seconds: {"max_turns": -1})
    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield OpenEnvWorld(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", {"seconds": 120})
        server.shutdown()
        thread.join(120)


def test_what_is_no_answer_makes_a_failed_episode(odd_server):
    for odd in ODD:
        played = play(odd_server, lambda messages, odd=odd: odd, seed=1)
        assert (played.end, played.returns) == ("failed", {"assistant": None}), odd
        assert "expected" in played.infos[-1]["failed"] or "RecursionError" in played.infos[-1]["failed"]


def test_a_conversation_that_is_not_the_one_so_far_is_added_as_words(odd_server):
    played = play(odd_server, lambda messages: "fine", seed=1, max_turns=2)
    words = [message["content"] for message in played.dialogs["assistant"].messages]
    assert words == ["you said it", *["fine", "you said it"] * 2] and played.end == "truncated"
    assert odd_server.max_turns == 64


@pytest.mark.parametrize("metadata", [{}, {"step": 1}, {"truncated": False, "failed": None}])
def test_anothers_reward_may_come_at_the_end(odd_server, monkeypatch, metadata):
    """Ours says with every observation whether it ended; there no reward is an unscored episode."""

    def end_of(last_reward, metadata):
        last = metadata | ({"terminated": True} if OURS.keys() <= metadata.keys() else {})
        said = [observation(None, metadata=metadata)] * 2 + [observation(last_reward, True, metadata=last)]
        answers = iter(json.loads(each)["data"] for each in said)
        monkeypatch.setattr(odd_server, "_ask", lambda message: next(answers))
        played = play(odd_server, lambda messages: "hi", seed=1)
        return played.end, played.returns["assistant"]

    assert end_of(1.0, metadata) == ("terminated", 1.0)
    assert end_of(None, metadata) == ("unscored", None)
    assert end_of(None, metadata | {"truncated": True})[1] is None
    assert end_of(1.0, OURS) == ("unscored", None)
    assert end_of(None, OURS | {"truncated": True})[0] == "unscored"


def test_of_anothers_metadata_nothing_is_taken_for_ours(odd_server, monkeypatch):
    """Parts of a reward are no roles, and `failed` may be of the task."""
    more = {
        "terminated": False,
        "truncated": False,
        "failed": 0,
        "rewards": {"format": 0.25, "correct": 0.75},
    }
    last = {"messages": [{"role": "user", "content": "last"}]}
    said = [
        observation(None, metadata=more),
        *[observation(1.0, i == 2, last, metadata=more) for i in (1, 2)],
    ]
    answers = iter(json.loads(each)["data"] for each in said)
    monkeypatch.setattr(odd_server, "_ask", lambda message: next(answers))
    played = play(odd_server, lambda messages: "hi", seed=1)
    assert (played.end, played.returns) == ("terminated", {"assistant": 2.0})
    words = [message["content"] for message in played.dialogs["assistant"].messages]
    assert words == ["go on", "hi", "last", "hi", "last"]


def test_an_episode_that_is_over_at_its_beginning_is_a_failed_one(odd_server, monkeypatch):
    monkeypatch.setattr(odd_server, "_ask", lambda message: json.loads(observation(None, True))["data"])
    played = play(odd_server, lambda messages: "hi", seed=1)
    assert played.end == "failed" and not played.infos


def test_a_schema_without_end_is_no_answer(monkeypatch):
    """A byte now and then would keep every timer of the connection waiting. A minute passes with each."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("envs.adapters.openenv_world.time", clock)
    with socket.create_server(("127.0.0.1", 0)) as place:

        def drip():
            connection, _ = place.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n{")
                for _ in range(1000):
                    clock.now += 60
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(UserError, match="bytes and no end of the answer"):
            text_env(f"openenv:ws://127.0.0.1:{place.getsockname()[1]}?seconds=120")


def test_what_was_played_before_the_server_died_is_kept():
    """Verbs make a world for each episode: the first after its death ended the command, and all was lost."""
    server = served(House)
    url = server.url.replace("http", "ws")
    said = []

    class Kills:
        def __init__(self, seed):
            pass

        def __call__(self, messages):
            said.append(messages)
            if len(said) == 5:  # in the second episode, which takes three
                server.close()
            return "left right"

    found = play_with(
        lambda tables: [scripted_reply(Kills(0), "kills", each) for each in tables],
        text_env(f"openenv:{url}"),
        range(4),
        batch_size=1,
    )
    assert [each.end for each in found] == ["terminated", "failed", "failed", "failed"]


@pytest.mark.slow
def test_the_verb_serves_and_what_dies_fails(tmp_path):
    """A process of its own: the same episodes; killed in mid-episode, failed ones, and for who comes then a
    clear error."""
    command = [sys.executable, "-m", "pipelines.serve_env", "--env", "small_talk", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        url = json.loads(process.stdout.readline())["ready"]
        here, there = text_env("small_talk"), text_env(f"openenv:{url}")
        for seed in range(20):
            assert same(play(here(), Babbler(seed), seed=seed), play(there(), Babbler(seed), seed=seed))
        found = check_world(there, but=("players", "logs"))
        assert [f"{each.check}: {each.fault}" for each in found if each.fault] == []
        world = there()
        world.reset(seed=1)
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        *_, truncated, info = world.step("Are you there?")
        assert truncated and url in info["failed"]
        assert "failed" in world.reset(seed=1)[1]
        assert "failed" in there().reset(seed=1)[1]
        SCHEMAS.clear()
        with pytest.raises(UserError, match="expected a server that answers"):
            there()
    finally:
        process.kill()
        process.wait(120)


def test_the_verb_says_what_it_cannot_serve():
    with pytest.raises(UserError, match="--public lets other machines talk too"):
        main(ServeEnvConfig(env="small_talk", host="0.0.0.0"))
    with pytest.raises(UserError, match="unknown env 'small_tlk'.*Did you mean small_talk"):
        main(ServeEnvConfig(env="small_tlk"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="a free port"):
            main(ServeEnvConfig(env="small_talk", port=taken.getsockname()[1]))
