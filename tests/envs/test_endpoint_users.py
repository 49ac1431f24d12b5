"""Users that an endpoint plays, over a real connection: what both sides see, who ends it, and what goes
wrong."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import time
from pathlib import Path

import pytest

from envs.adapters import chat_endpoint
from envs.adapters.chat_endpoint import ChatEndpoint, EndpointError, checked_address
from envs.adapters.endpoint_users import BEGIN, Users, users_of
from envs.adapters.personas import STOP, Persona, read_personas
from envs.text_world import play
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import play_with
from rl_dialog.evaluation.generation import Reply
from tests.envs.chat_server import Raw, chat_server

ADA = Persona("ada", "You are Ada.", stop="<END>")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(chat_endpoint, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(chat_endpoint, "GONE", set())
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def users(url: str, *personas: Persona, turns: int = 3, concurrency: int = 4, **more) -> Users:  # noqa: ANN003
    return Users(ChatEndpoint(url, "people", **more), personas or [ADA], turns=turns, concurrency=concurrency)


# --- a conversation -----------------------------------------------------------------------------------------


def test_each_side_sees_the_other_and_the_marker_ends_it() -> None:
    """The policy never sees the marker; what was really said is in the log."""
    said = iter(["hello", "a table", "thanks <END> bye"])
    with chat_server(lambda request: next(said)) as server:
        talk = users(server.url)()
        first, told = talk.reset(seed=3)
        assert first == [{"role": "user", "content": "hello"}]
        talk.step("welcome")
        messages, reward, terminated, truncated, info = talk.step("")
    assert messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "welcome"},
        {"role": "user", "content": "a table"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "thanks"},
    ]
    assert (reward, terminated, truncated) == (None, True, False)
    system = {"role": "system", "content": "You are Ada."}
    seen = [request["messages"] for request in server.requests]
    assert seen[0] == [system, {"role": "user", "content": BEGIN}]
    assert seen[2] == [
        system,
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "welcome"},
        {"role": "assistant", "content": "a table"},
        {"role": "user", "content": "..."},
    ]
    assert len({request["seed"] for request in server.requests}) == 3
    assert told["meta"]["user"]["said"] == [{"text": "hello", "finish_reason": "stop", "tries": 1}]
    assert info["meta"]["user"]["persona"] == "ada" and info["meta"]["user"]["model"] == "people"
    assert [each["text"] for each in info["meta"]["user"]["said"]][-1] == "thanks <END> bye"
    assert info["meta"]["group"] == "users: ada"


def test_turns_end_it_too_and_the_last_reply_is_answered() -> None:
    persona = Persona("bo", "You are Bo.", opening="hi", greeting="what can I do?")
    with chat_server(lambda request: "go on <END>") as server:
        played = play(users(server.url, persona, turns=2)(), lambda messages: "well", seed=1)
    (dialog,) = played.dialogs.values()
    assert played.end == "unscored" and dialog.truncated  # nobody pays here
    assert [m["content"] for m in dialog.messages] == [
        "what can I do?", "hi", "well", "go on <END>", "well", "go on <END>",
    ]  # fmt: skip
    assert dialog.messages[0]["weight"] == 0 and len(dialog.replies) == 2
    assert len(server.requests) == 2  # the opening is the persona's own
    assert server.requests[0]["messages"][1] == {"role": "user", "content": "what can I do?"}
    assert dialog.meta["user"]["persona"] == "bo" and Dialog.from_json(dialog.to_json()) == dialog


def test_a_seed_is_a_persona_and_its_first_words_are_asked_for_once() -> None:
    """Or the episodes of a group could not be compared."""
    number = itertools.count()
    people = [Persona(name, f"You are {name}.", request={"temperature": 0.5}) for name in "abcd"]
    with chat_server(lambda request: f"words {next(number)}") as server:
        maker = users(server.url, *people)
        begun = {seed: [maker().reset(seed=seed) for _ in range(3)] for seed in range(20)}
        assert all(same == others[0] for others in begun.values() for same in others)
        assert len(server.requests) == 20
        assert {told["meta"]["user"]["persona"] for (_, told), *_ in begun.values()} == {*"abcd"}
        assert all(request["temperature"] == 0.5 for request in server.requests)
        elsewhere = pickle.loads(pickle.dumps(maker))  # an actor's
        assert elsewhere.persona_of(7) == maker.persona_of(7)


# --- what goes wrong ----------------------------------------------------------------------------------------


def completion(content) -> Raw:  # noqa: ANN001
    return Raw(json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "length"}]}))


PASSING = {
    "busy": lambda: Raw("busy", 429),
    "broken": lambda: Raw("<html>bad gateway</html>", 502),
    "empty": lambda: completion(" \n"),
    "null": lambda: completion(None),
    "no text": lambda: completion([{"type": "text"}]),
    "half a pair": lambda: completion("\ud800"),
    "no JSON": lambda: Raw("data: [DONE]"),
    "no choices": lambda: Raw('{"error": {"message": "overloaded"}}'),
    "a list": lambda: Raw("[1]"),
    "nested": lambda: Raw("[" * 100_000),
    "late": lambda: Raw(_drip(b"{")),
    "endless": lambda: Raw(iter([b" " * (1 << 20)] * 5)),
    "cut short": lambda: Raw("{", content_length="100"),
}


class Clock:
    """Stands in for `time`: seconds pass only with the pieces of a late answer."""

    now = 0.0
    sleep = time.sleep

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


def _drip(piece: bytes):  # noqa: ANN202
    for _ in range(20):
        Clock.now += 10
        yield piece


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_asked_again_and_then_is_a_failed_episode(name: str, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(chat_endpoint, "time", Clock)
    wrong = PASSING[name]
    answers = iter([wrong(), "hello", wrong(), wrong(), wrong()])
    with chat_server(lambda request: next(answers)) as server:
        talk = users(server.url, seconds=120.0)()
        messages, told = talk.reset(seed=0)
        assert messages == [{"role": "user", "content": "hello"}]
        assert told["meta"]["user"]["said"][0]["tries"] == 2
        assert len({request["seed"] for request in server.requests}) == 2  # or it would say the same again
        messages, reward, terminated, truncated, info = talk.step("welcome")
    assert messages[-1] == {"role": "assistant", "content": "welcome"}
    assert (reward, terminated, truncated) == (None, False, True)
    assert "expected a reply within 3 tries, got" in info["failed"] and len(server.requests) == 5
    assert len(info["failed"]) < 500 and Dialog("x", messages, meta={"failed": info["failed"]}).to_json()


def test_a_pause_that_the_endpoint_names_is_kept_within_bounds(monkeypatch) -> None:  # noqa: ANN001
    slept: list[float] = []
    monkeypatch.setattr(chat_endpoint.time, "sleep", slept.append)
    answers = iter([Raw("", 429, Retry_After="7"), Raw("", 503, Retry_After="9999"), "hello"])
    with chat_server(lambda request: next(answers)) as server:
        assert users(server.url)().reset(seed=0)[0][0]["content"] == "hello"
    assert slept == [7.0, chat_endpoint.LONGEST_PAUSE]


def test_a_refusal_is_not_repeated_and_the_key_is_in_no_message(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1\n")
    with chat_server(lambda request: Raw(f"bad key sk-secret-1 {'x' * 999}", 401)) as server:
        _, told = users(server.url)().reset(seed=0)
    assert server.keys == ["Bearer sk-secret-1"]
    assert "expected status 200, got 401: bad key ***" in told["failed"] and len(told["failed"]) < 400
    monkeypatch.setenv("OPENAI_API_KEY", "sk-gehe\u00efm")
    with pytest.raises(UserError, match="OPENAI_API_KEY: expected printable ASCII") as error:
        users(server.url)().reset(seed=0)
    assert "gehe" not in str(error.value)


def test_nobody_there_is_a_failed_episode() -> None:
    with chat_server(lambda request: "hello") as server:
        pass
    messages, told = users(server.url)().reset(seed=0)
    assert "ConnectError" in told["failed"] and messages[0]["role"] == "user"


def test_an_endpoint_that_is_gone_is_waited_for_in_one_episode_and_asked_in_all(monkeypatch) -> None:  # noqa: ANN001
    slept: list[float] = []
    monkeypatch.setattr(chat_endpoint.time, "sleep", slept.append)
    with chat_server(lambda request: "hello") as server:
        maker = users(server.url)
        talks = [maker() for _ in range(4)]
        assert all("failed" not in talk.reset(seed=seed)[1] for seed, talk in enumerate(talks))
    told = [talk.step("welcome")[-1]["failed"] for talk in talks]
    assert "within 3 tries" in told[0] and len(slept) == len(chat_endpoint.PAUSES)
    assert all("at once from an endpoint that was gone before, got Connect" in each for each in told[1:])
    asked: list[int] = []

    def back(request) -> Raw | str:  # noqa: ANN001
        asked.append(0)
        return Raw("busy", 429) if len(asked) < 3 else "hello"

    with chat_server(back) as again:
        chat_endpoint.GONE.add(again.url)
        assert "429" in users(again.url)().reset(seed=0)[1]["failed"] and len(asked) == 1
        assert users(again.url)().reset(seed=0)[0][0]["content"] == "hello" and len(asked) == 3


def test_a_conversation_that_is_over_at_once_has_no_return() -> None:
    with chat_server(lambda request: "<END>") as server:
        assert "before it began" in users(server.url)().reset(seed=0)[1]["failed"]


def test_a_group_whose_first_words_fail_asks_for_them_once(monkeypatch) -> None:  # noqa: ANN001
    """And again a while later: an evaluation begins with the same seeds each time."""
    good: list[str] = []
    with chat_server(lambda request: good[-1] if good else Raw("", 500)) as server:
        maker = users(server.url)
        assert all("failed" in maker().reset(seed=0)[1] for _ in range(4))
        assert len(server.requests) == 3
        good.append("hello")
        assert "failed" in maker().reset(seed=0)[1]
        now = time.monotonic()
        monkeypatch.setattr("envs.adapters.endpoint_users.time.monotonic", lambda: now + 60)
        assert "failed" not in maker().reset(seed=0)[1]


# --- many at a time -----------------------------------------------------------------------------------------


def echo(tables) -> list[Reply]:  # noqa: ANN001
    return [Reply(f"re: {table.messages[-1]['content']}", (1,), True) for table in tables]


def test_users_are_waited_for_together_and_the_order_stays() -> None:
    """As many at a time as asked for, no more; what comes of each is what comes of it alone. One whose
    requests are refused fails by itself."""
    here, running, most = threading.Condition(), [0], [0]

    def answer(request):  # noqa: ANN001, ANN202
        with here:
            running[0] += 1
            most[0] = max(most[0], running[0])
            here.notify_all()
            here.wait_for(lambda: most[0] >= 4, timeout=240)
        time.sleep(0.01)
        with here:
            running[0] -= 1
        if "Eve" in request["messages"][0]["content"]:
            return Raw("no such model", 404)
        return f"{request['seed']} {request['messages'][-1]['content']}"[:60]

    people = [ADA, Persona("eve", "You are Eve."), Persona("cy", "You are Cy.")]

    def played(concurrency: int) -> list[tuple[Dialog, str]]:
        maker = users(server.url, *people, turns=2, concurrency=concurrency)
        found = play_with(echo, maker, range(12), seed=5, batch_size=12, group_size=2)
        return [(each.dialog, each.end) for each in found]

    with chat_server(answer) as server:
        together = played(6)
        assert 4 <= most[0] <= 6
        assert together == played(1)
    ends = {dialog.meta["user"]["persona"]: end for dialog, end in together}
    assert ends == {"ada": "unscored", "eve": "failed", "cy": "unscored"}
    assert [dialog.meta["episode"] for dialog, _ in together] == list(range(12))


# --- who they are -------------------------------------------------------------------------------------------


def test_personas_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "people.jsonl"
    goal = {"table": {"people": 2}, "price": "{cheap}"}
    lines = [
        "You are Ada.",
        "",
        json.dumps({"goal": goal, "name": "bo", "split": "validation"}),
        json.dumps({"system": "You are Cy.", "stop": "<END>", "opening": "hey", "request": {"top_p": 0.5}}),
    ]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    splits = read_personas(str(path))
    (bo,) = splits["validation"]
    ada, cy = splits["train"]
    assert (ada.name, ada.system, ada.stop, cy.name, cy.stop) == (
        "persona-1", "You are Ada.", "", "persona-4", "<END>",
    )  # fmt: skip
    assert json.dumps(goal) in bo.system and bo.system.endswith(STOP) and bo.goal == goal and bo.stop == STOP
    assert cy.request == {"top_p": 0.5} and cy.opening == "hey"
    path.write_text("\n".join(f"You are {i}." for i in range(11)))
    splits = read_personas(str(path))
    assert [each.system for each in splits["validation"]] == ["You are 4.", "You are 9."]
    assert len(splits["train"]) == 9
    path.write_text("one\ntwo\n")
    assert [len(read_personas(str(path))[name]) for name in ("train", "validation")] == [1, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "at least one persona to learn with and one to measure with, got 0 and 0"),
        ("only one", "got 0 and 1"),
        ('["a", "b"]', "one JSON object per line, got a list"),
        ('a\n{"system": "b"', ":2: expected one JSON object in the line"),
        ('a\n{"prompt": "b"}', ":2: expected keys of name, system, .*got 'prompt'"),
        ('a\n{"name": "b"}', "either system, .*or goal.*got neither"),
        ('a\n{"system": "b", "goal": "c"}', "got both"),
        ('a\n{"system": 3}', "expected text as system, got 3"),
        ('a\n{"system": "b", "split": "test"}', "split to be train or validation, got 'test'"),
        ('a\n{"system": "b", "request": {"stream": true}}', "an object as request, without messages"),
        ('a\n{"system": "b", "request": [1]}', "an object as request"),
        ('a\n{"system": "b", "request": {"x": NaN}}', "finite numbers"),
        ('a\n{"system": "\\ud800"}', "text that UTF-8 holds"),
        ('{"system": "a", "name": "n"}\n{"system": "b", "name": "n"}', "got 'n' twice"),
        ('{"system": "a", "split": "train"}\nb', "got 2 and 0"),
        ('a\n{"system": "a", "split": "validation"}', "other people to measure with.*got in both: 'a'"),
    ],
)
def test_files_that_say_nothing_of_use(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "people"
    path.write_text(lines)
    with pytest.raises(UserError, match=message):
        read_personas(str(path))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--personas .*: expected a file of text in UTF-8"):
        read_personas(str(tmp_path))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost:8000", "expected the address of an endpoint, http://host:port/v1, got 'localhost:8000'"),
        ("http://", "expected the address"),
        ("http://host:port/v1", "expected the address"),
        ("http://ho\nst/v1", "expected the address"),
        ("http://ann:hush@host/v1", "without password"),
        ("https://host/v1?key=hush", "without password"),
    ],
)
def test_addresses(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        checked_address("--users", address)
    assert "hush" not in str(error.value)
    assert checked_address("--users", "https://host/v1") == "https://host/v1"


def test_an_endpoint_that_does_not_answer_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "people.txt"
    path.write_text("one\ntwo\n")
    how = {"turns": 1, "concurrency": 1, "seconds": 120.0}
    with chat_server(lambda request: "hello", models=("first", "second")) as server:
        train, held_out = users_of(server.url, str(path), model="", **how)
        assert train.endpoint.model == "first" and server.requests[0]["messages"][0]["content"] == "one"
        assert [each.personas[0].system for each in (train, held_out)] == ["one", "two"]
    with (
        chat_server(lambda request: "hello", models={"data": []}) as server,
        pytest.raises(UserError, match="expected a list of models, got .*--user_model names a model"),
    ):
        users_of(server.url, str(path), model="", **how)
    with (
        chat_server(lambda request: Raw("no such model", 404), models={}) as server,
        pytest.raises(UserError, match="--users: .*expected status 200, got 404: no such model"),
    ):
        users_of(server.url, str(path), model="x", **how)


def test_an_endpoint_that_has_another_model_by_now_is_asked_for_it() -> None:
    models = ["old"]

    def answer(request):  # noqa: ANN001, ANN202
        return "hello" if request["model"] == models[0] else Raw("no such model", 404)

    with chat_server(answer, models={"data": [{"id": "old"}]}) as server:
        endpoint, hello = ChatEndpoint(server.url), [{"role": "user", "content": "hi"}]
        assert endpoint.answer(hello, seed=0).text == "hello"
        models[0], server.models = "new", {"data": [{"id": "new"}]}
        with pytest.raises(EndpointError):
            endpoint.answer(hello, seed=0)
        assert endpoint.answer(hello, seed=0).text == "hello"
