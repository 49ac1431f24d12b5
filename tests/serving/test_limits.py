"""Requests per minute with a clock of our own, and the size of bodies however they come."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from rl_dialog.serving.limits import BodyLimit, RateLimit


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_full_bucket_then_an_even_flow(clock):
    """3 per minute: three at once, then one every 20 seconds."""
    limit = RateLimit(clock)
    assert [limit.take("ann", 3) for _ in range(4)] == [0, 0, 0, 20]
    clock.now += 5
    assert limit.take("ann", 3) == 15, "asking too early costs nothing"
    clock.now += 14.5
    assert limit.take("ann", 3) == 1, "whole seconds, rounded up"
    clock.now += 0.5
    assert [limit.take("ann", 3) for _ in range(2)] == [0, 20]


def test_a_bucket_holds_no_more_than_a_minutes_worth(clock):
    limit = RateLimit(clock)
    limit.take("ann", 2)
    clock.now += 1e6
    assert [limit.take("ann", 2) for _ in range(3)] == [0, 0, 30]


def test_each_key_has_its_own(clock):
    limit = RateLimit(clock)
    assert [limit.take(key, 1) for key in ("ann", "bob", "ann", "bob")] == [0, 0, 60, 60]


def test_a_lower_rate_counts_at_once(clock):
    limit = RateLimit(clock)
    limit.take("ann", 100)
    assert [limit.take("ann", 2) for _ in range(3)] == [0, 0, 30]


def test_whoever_waits_as_told_gets_in(clock):
    limit = RateLimit(clock)
    for _ in range(500):
        wait = limit.take("ann", 7)
        if wait:
            clock.now += wait
            assert limit.take("ann", 7) == 0


def test_the_keys_that_are_kept_are_bounded(clock, monkeypatch):
    monkeypatch.setattr(RateLimit, "KEYS", 3)
    limit = RateLimit(clock)
    for key in ("ann", "bob", "cid", "ann", "dan"):
        limit.take(key, 1)
    assert list(limit._buckets) == ["cid", "ann", "dan"], "bob asked longest ago"


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=60))
def test_never_more_than_the_rate_in_any_span(per_minute, pauses):
    """Within any span of s seconds at most per_minute * (1 + s / 60) requests go through."""
    clock = Clock()
    limit, passed = RateLimit(clock), []
    for pause in pauses:
        clock.now += pause
        for _ in range(3):
            if not limit.take("ann", per_minute):
                passed.append(clock.now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= per_minute * (1 + (passed[last] - passed[first]) / 60) + 1e-6


def read_through(parts, *, most, headers=(), kind="http"):
    """What an application behind the limit reads of a body that comes in these parts; HTTPException where it
    is refused."""
    messages = iter(
        [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        + [{"type": "http.request", "body": b""}]
    )
    got = []

    async def receive():
        return next(messages)

    async def application(scope, receive, send):
        while True:
            message = await receive()
            got.append(message.get("body", b""))
            if not message.get("more_body"):
                return

    asyncio.run(BodyLimit(application, most)({"type": kind, "headers": list(headers)}, receive, None))
    return b"".join(got)


def length(value):
    return [(b"content-length", value)]


@pytest.mark.parametrize("parts", [[], [b"x" * 10], [b"x"] * 10, [b"", b"12345", b"", b"12345"]])
def test_a_body_of_at_most_so_many_bytes_passes(parts):
    assert read_through(parts, most=10) == b"".join(parts)
    assert read_through(parts, most=10, headers=length(b"10")) == b"".join(parts)


@pytest.mark.parametrize("parts", [[b"x" * 11], [b"x"] * 11, [b"x" * 10, b"", b"x"]])
@pytest.mark.parametrize("headers", [[], length(b"5"), length(b"nonsense"), length(b""), length(b"-1")])
def test_a_longer_one_is_refused_whatever_it_says_of_itself(parts, headers):
    with pytest.raises(HTTPException, match="at most 10 bytes") as refused:
        read_through(parts, most=10, headers=headers)
    assert refused.value.status_code == 413


@pytest.mark.parametrize("announced", [b"11", b"9" * 30, b"9" * 5000])
def test_one_that_says_it_is_too_long_is_not_read(announced):
    with pytest.raises(HTTPException):
        read_through(iter(()), most=10, headers=length(announced))


def test_other_connections_are_left_alone():
    assert read_through([b"x" * 99], most=10, kind="websocket") == b"x" * 99
