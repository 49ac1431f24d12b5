"""Simulated users against a server made of a function."""

from __future__ import annotations

import json
import threading
from itertools import count

import httpx
import pytest

from envs import small_talk_users
from envs.small_talk_users import Crowd, Server
from envs.small_talk_world import TURNS

LINES = [
    "What do you like about jazz?",
    "I play songs too.",
    "Tell me more about it.",
    "That is good.",
    "Really?",
    "I see what you mean.",
]


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
    monkeypatch.setattr(
        small_talk_users.httpx, "Client", lambda **given: client(transport=httpx.MockTransport(book), **given)
    )
    return book


def meet(numbers, **given):
    with Crowd(Server("http://server", "sk"), numbers, **{"at_once": 3, "seed": 0} | given) as crowd:
        return crowd.finish()


def test_a_user_talks_to_the_end_votes_on_some_replies_and_rates(book):
    [talk] = meet([7])
    paths = [path for path, _, _ in book.asked]
    asked = [body for path, body, _ in book.asked if path == "/v1/chat/completions"]
    assert (
        {key for *_, key in book.asked} == {"Bearer sk"}
        and len(paths) == talk.requests
        and talk.chat == "chat-user-7"
    )
    assert (
        paths[0] == "/v1/chats" and paths[-1] == "/v1/chats/chat-user-7/ratings" and 1 <= len(asked) <= TURNS
    )
    assert paths.count("/v1/feedback") == talk.votes > 0
    assert all(
        later["messages"][: len(first["messages"])] == first["messages"]
        for first, later in zip(asked, asked[1:], strict=False)
    )
    assert all(
        body["model"] == "assigned"
        and body["chat_id"] == talk.chat
        and body["messages"][-1]["role"] == "user"
        for body in asked
    )
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
    assert (
        len(crowd.talks)
        == sum(path.endswith("/ratings") for path, *_ in book.asked)
        == sum(path == "/v1/chats" for path, *_ in book.asked)
    )
    assert not any(thread.is_alive() for thread in crowd._threads)


def test_a_refused_request_ends_the_crowd(book):
    book.fails_at = 20
    with pytest.raises(RuntimeError, match="a user's request failed: POST .* 503"):
        meet(count())


def test_an_interrupt_ends_the_crowd(book):
    with (
        pytest.raises(KeyboardInterrupt),
        Crowd(Server("http://server", "sk"), count(), at_once=2, seed=0) as crowd,
    ):
        raise KeyboardInterrupt
    assert not any(thread.is_alive() for thread in crowd._threads)
