"""The closed circle for real and small, and its simulated users against a server made of a function."""

from __future__ import annotations

import json
import threading
from itertools import count

import httpx
import psutil
import pytest
import ray

from envs.small_talk_rules import TURNS
from pipelines import circle_users
from pipelines.circle import CircleConfig, main
from pipelines.circle_users import Crowd, Server
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import read_dialogs
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError

LINES = ["What do you like about jazz?", "I play songs too.", "Tell me more about it.", "That is good.", "Really?", "I see what you mean."]


class Book:
    """A server that says LINES in order and writes down what it was asked."""

    def __init__(self, fails_at=None):
        self.asked, self.fails_at, self.lock = [], fails_at, threading.Lock()

    def __call__(self, request):
        path, body = request.url.path, json.loads(request.content)
        with self.lock:
            self.asked.append((path, body, request.headers["authorization"]))
            number = len(self.asked)
        if number == self.fails_at:
            return httpx.Response(503, json={"error": {"message": "no"}})
        if path == "/v1/chats":
            return httpx.Response(200, json={"id": f"chat-{body['user']}"})
        reply = LINES[len(body.get("messages", [])) // 2]
        return httpx.Response(200, json={"id": f"c{number}", "choices": [{"message": {"content": reply}}]})


@pytest.fixture
def book(monkeypatch):
    client, book = httpx.Client, Book()
    monkeypatch.setattr(circle_users.httpx, "Client", lambda **given: client(transport=httpx.MockTransport(book), **given))
    return book


def meet(numbers, **given):
    with Crowd(Server("http://server", "sk"), numbers, **{"at_once": 3, "seed": 0} | given) as crowd:
        return crowd.finish()


def test_a_user_talks_to_the_end_votes_on_some_replies_and_rates(book):
    [talk] = meet([7])
    paths = [path for path, _, _ in book.asked]
    asked = [body for path, body, _ in book.asked if path == "/v1/chat/completions"]
    assert {key for *_, key in book.asked} == {"Bearer sk"} and len(paths) == talk.requests and talk.chat == "chat-user-7"
    assert paths[0] == "/v1/chats" and paths[-1] == "/v1/chats/chat-user-7/ratings" and 1 <= len(asked) <= TURNS
    assert paths.count("/v1/feedback") == talk.votes > 0
    assert all(later["messages"][: len(first["messages"])] == first["messages"] for first, later in zip(asked, asked[1:], strict=False))
    assert all(body["model"] == "assigned" and body["chat_id"] == talk.chat and body["messages"][-1]["role"] == "user" for body in asked)
    assert len({body["seed"] for body in asked}) == len(asked)
    votes = [(body["completion_id"], body["vote"]) for path, body, _ in book.asked if path == "/v1/feedback"]
    assert all(vote in (-1, 0, 1) for _, vote in votes) and 1 <= book.asked[-1][1]["quality"] <= 5
    replied = [f"c{number}" for number, path in enumerate(paths, 1) if path == "/v1/chat/completions"]
    assert {completion for completion, _ in votes} <= set(replied)


def test_the_same_users_come_whatever_the_number_at_a_time(book):
    alone = sorted((talk.chat, talk.total) for talk in meet(range(8), at_once=1))
    assert alone == sorted((talk.chat, talk.total) for talk in meet(range(8), at_once=8))
    assert alone != sorted((talk.chat, talk.total) for talk in meet(range(8), seed=1))


def test_at_the_end_of_the_block_nobody_new_comes_and_who_talks_finishes(book):
    with Crowd(Server("http://server", "sk"), count(), at_once=2, seed=0) as crowd:
        while len(crowd.talks) < 3:
            pass
    assert len(crowd.talks) == sum(path.endswith("/ratings") for path, *_ in book.asked) == sum(path == "/v1/chats" for path, *_ in book.asked)
    assert not any(thread.is_alive() for thread in crowd._threads)


def test_a_refused_request_ends_the_crowd(book):
    book.fails_at = 20
    with pytest.raises(RuntimeError, match="a user's request failed: POST .* 503"):
        meet(count())


def test_an_interrupt_ends_the_crowd(book):
    with pytest.raises(KeyboardInterrupt), Crowd(Server("http://server", "sk"), count(), at_once=2, seed=0) as crowd:
        raise KeyboardInterrupt
    assert not any(thread.is_alive() for thread in crowd._threads)


def test_what_cannot_be_run_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a circle's folder"):
        main(CircleConfig(output_dir=str(tmp_path)))
    with pytest.raises(UserError, match="expected --users of at least 1, got 0"):
        main(CircleConfig(output_dir=str(tmp_path / "new"), users=0))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_the_circle_closes(tmp_path, capsys):
    """Small, so nothing is said about who is better: tests/learning is for that."""
    sizes = {"dialogs": 120, "chats": 24, "ab_chats": 40, "users": 8, "bc_steps": 20, "steps": 15}
    found = main(CircleConfig(output_dir=str(tmp_path / "out"), quiet=True, **sizes))
    assert capsys.readouterr().out == "" and not ray.is_initialized()
    store = Store(found["store"])
    dialogs = list(store.dialogs())

    # No request failed: main raises otherwise. Every reply that a user was given is in the store, and every vote.
    during = found["chats_during_rollout"]
    assert during >= 1 and store.counts()["chats"] == len(dialogs) == store.counts()["ratings"] == 24 + during + 40
    counts = store.counts()
    assert found["requests"] == 2 * counts["chats"] + counts["turns"] + counts["votes"]

    # The votes of the first chats, and nothing else, are the rewards that the successor learnt from.
    learnt = {dialog.id: dialog for split in SPLITS for dialog in read_dialogs(tmp_path / "out" / "served", split)}
    assert list(learnt) and set(learnt) == {dialog.id for dialog in dialogs[:24]}
    for dialog in dialogs[:24]:
        given = [dialog.messages[i].get("feedback", {}).get("vote") for i in dialog.replies]
        assert [learnt[dialog.id].messages[i].get("rewards", {}).get("vote") for i in dialog.replies] == given
        assert [learnt[dialog.id].messages[i].get("reward") or 0.0 for i in dialog.replies] == [vote or 0.0 for vote in given]

    # The successor got its half of the new chats, and every chat was answered by the model drawn for it.
    assert {dialog.meta["drawn"] for dialog in dialogs[:24]} == {"bc"}
    assert 6 <= sum(dialog.meta["drawn"] == "mc" for dialog in dialogs[24 + during :]) <= 34  # less likely than 1 in 100,000 otherwise
    assert all(dialog.messages[i]["model"] == dialog.meta["drawn"] for dialog in dialogs for i in dialog.replies)
    assert {dialog.meta["checkpoint"].rsplit("/", 2)[1] for dialog in dialogs} == {"bc", "mc"}

    # The report compares the two by votes and, beside them, by what the world knows.
    text = (tmp_path / "out" / "ab" / "ab.md").read_text()
    assert "mc - bc" in text and "return per dialog" in text and set(found["differences"]["mc - bc"]) == {"vote", "return"}
    assert sum(model["chats"] for model in found["models"].values()) == len(dialogs)
    assert not [child.name() for child in psutil.Process().children(recursive=True) if "ray" in child.name()]
