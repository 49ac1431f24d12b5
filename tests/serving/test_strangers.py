"""Whoever connects has to send a request in time, and to show a key before anybody reads what it sends."""

import asyncio
import json
import os
import select
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path

import httpx
import psutil
import pytest

import rl_dialog.serving
from rl_dialog.data.store import Store
from rl_dialog.serving.api import create_app
from rl_dialog.serving.served import Models
from rl_dialog.web_server import Patience, WebServer, listening
from tests.ports import free_port
from tests.serving.conftest import serving, until

PROXY = Path(rl_dialog.serving.__file__).parent / "haproxy.cfg"
# For those who are too slow, and for those who are not, however slow the machine is.
QUICK = Patience(head=0.4, body=0.8, answer=0.6, connections=40, per_address=30)
PATIENT = replace(QUICK, head=300.0, body=300.0, answer=300.0)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"model": "bc", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}'
LONG = b"Content-Length: 1048576\r\n\r\n"


@pytest.fixture
def served(settings, request):
    """(port, key) of a server that needs one; its patience is short, or what the test says."""
    settings = replace(settings, needs_key=True)
    store = Store(settings.store)
    key = store.keys.add("ann", requests_per_minute=1000)
    place = listening("127.0.0.1", 0)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the kernel holds megabytes
    patience = getattr(request, "param", QUICK)
    server = WebServer(create_app(Models(settings), store), place, patience=patience)
    yield int(server.url.rsplit(":", 1)[1]), key
    server.close()
    store.close()


def connected(port, sent=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(sent)
    return connection


def status(connection):
    """Of the next answer, which is read whole."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def ends(connection):
    """What the server said before it closed the connection."""
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def trickled(connection, byte, *, pause, seconds=120):
    """Whether the server ends the connection while a byte comes every `pause` seconds."""
    deadline = time.monotonic() + seconds
    connection.settimeout(pause)
    while time.monotonic() < deadline:
        try:
            connection.sendall(byte)
            if not connection.recv(65536).startswith(b"HTTP/1.1 100"):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def with_key(key):
    return HEAD + b"Authorization: Bearer " + key.encode() + b"\r\n"


def test_silent_and_slow_connections_are_ended(served):
    port, key = served
    began = time.monotonic()
    silent, half = connected(port), connected(port, HEAD)
    unfinished = connected(port, with_key(key) + LONG + b"{")
    assert ends(silent).startswith(b"HTTP/1.1 408") and time.monotonic() - began >= QUICK.head
    for connection in (half, unfinished):
        assert ends(connection).startswith(b"HTTP/1.1 408")
    assert trickled(connected(port, HEAD), b"X", pause=0.05)
    assert trickled(connected(port, with_key(key) + LONG), b" ", pause=0.05)


def test_a_second_request_of_a_connection_has_its_time_too(served):
    port, _ = served
    whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for _ in range(100):  # on a busy machine the first one may be too slow itself
        later = connected(port)
        with suppress(OSError, HTTPException):
            later.sendall(whole)
            if status(later) == 200:
                break
    with suppress(OSError):
        later.sendall(HEAD)
    assert ends(later)[:12] in (b"HTTP/1.1 408", b"")


@pytest.mark.parametrize("served", [PATIENT], indirect=True)
def test_whoever_keeps_to_the_times_is_answered(served):
    """A reply may take longer than a request: the client waits, not the server."""
    port, key = served
    for pause in (0.0, 0.2):
        connection = connected(port, with_key(key) + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for part in (BODY[:20], BODY[20:]):
            time.sleep(pause)
            connection.sendall(part)
        assert status(connection) == 200
        connection.close()


@pytest.mark.parametrize("served", [PATIENT], indirect=True)
def test_an_address_has_so_many_connections(served):
    port, _ = served
    first = [connected(port) for _ in range(QUICK.per_address)]
    refused = connected(port)
    assert ends(refused).startswith(b"HTTP/1.1 503")
    for connection in first:
        connection.close()
    until(lambda: answers(port), "the server to notice that they have gone")


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def alone(settings, store):
    """The port of the same application on uvicorn as it is, to compare."""
    with serving(settings) as (url, _, _):
        yield int(url.rsplit(":", 1)[1])


@contextmanager
def as_served(settings, store):
    """The port of a server as `serve --backend local` starts it."""
    server = WebServer(create_app(Models(settings), store), listening("127.0.0.1", 0))
    yield int(server.url.rsplit(":", 1)[1])
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("start", [alone, as_served])
def test_a_crowd_of_strangers(start, settings, capsys):
    """600 half-open connections of three addresses, and 400 that announce a megabyte each without a key, send
    a part of it and wait."""
    settings = replace(settings, needs_key=True)
    store, process = Store(settings.store), psutil.Process()
    store.keys.add("ann")
    with start(settings, store) as port:
        places = [(f"127.0.0.{1 + n % 3}", 0) for n in range(600)]
        crowd = [socket.create_connection(("127.0.0.1", port), 120, place) for place in places]
        for connection in crowd:
            connection.sendall(HEAD)
        time.sleep(12)
        if start is not alone:
            with suppress(AssertionError):  # told below, with how many are left
                until(lambda: not held(port), "the half-open ones to be ended")
        left = len(held(port))
        for connection in crowd:
            connection.close()
        memory = process.memory_info().rss
        places = [(f"127.0.0.{1 + n % 4}", 0) for n in range(400)]
        crowd = [socket.create_connection(("127.0.0.1", port), 120, place) for place in places]
        for connection in crowd:
            connection.sendall(HEAD + LONG + b"x" * 100_000)
            assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        grown = (process.memory_info().rss - memory) / 2**20
        healthy = httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    store.close()
    with capsys.disabled():
        print(f"\n{start.__name__}: {left} of 600 half-open after 12 s; 400 unread bodies: {grown:+.0f} MiB")
    assert healthy and grown < 60
    assert left == (600 if start is alone else 0)


def unread(port, sent):
    """A connection whose client reads nothing of what it asked for."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", port))
    connection.settimeout(0.3)
    with suppress(OSError):
        connection.sendall(sent)
    return connection


def held(port):
    """The server's connections that are open, or closed with an answer that waits for its client. A client at
    another of the machine's addresses may have the port's number too."""
    connections = psutil.Process().net_connections("tcp")
    return [each for each in connections if each.laddr == ("127.0.0.1", port) and each.raddr]


def test_clients_that_read_nothing_are_ended(served):
    """Whether their answer comes in one piece or as a stream, and who asks for the page again and again."""
    port, key = served
    asked = {"model": "ilql", "messages": [{"role": "user", "content": "hello"}], "n": 4, "max_tokens": 40}
    asked |= {"logprobs": True, "top_logprobs": 20}
    page = b"GET /page/chat.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for sent in (*(request(key, asked | {"stream": stream}) for stream in (False, True)), page * 40):
        clients = [unread(port, sent) for _ in range(3)]
        until(lambda: not held(port), "the server to end those that read nothing")
        for client in clients:
            client.close()


def request(key, asked):
    body = json.dumps(asked).encode()
    return with_key(key) + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("served", [PATIENT], indirect=True)
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(served, protocol):
    """As Java's client asks for HTTP/2. A later request of the connection is heard too, and none of them
    stays counted as an open connection."""
    port, key = served
    more = b"\r\nConnection: Upgrade\r\nUPGRADE: " + protocol + b"\r\nHTTP2-Settings: AAM\r\n\r\n"
    sent = request(key, json.loads(BODY)).replace(b"\r\n\r\n", more, 1)
    for _ in range(QUICK.per_address + 1):
        connection = connected(port, sent)
        assert status(connection) == 200
        connection.sendall(sent)
        assert status(connection) == 200
        connection.close()


def test_without_a_key_no_byte_of_a_body_is_read(settings):
    """Neither locally nor in a replica: what is asked comes before what is read."""
    store = Store(settings.store)
    app = create_app(Models(replace(settings, needs_key=True)), store)
    said = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        said.append(message)

    for headers in ([(b"content-length", b"1000000")], [(b"transfer-encoding", b"chunked")]):
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
        scope |= {"headers": [(b"host", b"x"), *headers], "scheme": "http", "server": ("x", 80), "state": {}}
        asyncio.run(app(dict(scope), receive, send))
        assert said[0]["status"] == 401 and b"invalid_api_key" in said[1]["body"]
        said.clear()
    app.state.server.models.close()
    store.close()


@contextmanager
def proxied(port):
    """The port where the proxy of haproxy.cfg listens."""
    place = free_port()
    names = {"RL_DIALOG_LISTEN": f"127.0.0.1:{place}", "RL_DIALOG_SERVER": f"127.0.0.1:{port}"}
    command = [shutil.which("haproxy"), "-db", "-f", str(PROXY)]
    proxy = subprocess.Popen(command, env=os.environ | names)
    try:
        until(lambda: takes_connections(place) or proxy.poll() is not None, "the proxy to start")
        yield place, proxy.pid
    finally:
        proxy.terminate()
        proxy.wait(10)


def takes_connections(place):
    try:
        connected(place).close()
    except OSError:
        return False
    return True


def unless_reset(place):
    """A connection with half a request, or None where the proxy resets it before all of that is sent."""
    try:
        return connected(place, HEAD)
    except (ConnectionResetError, BrokenPipeError):
        return None


def wait_for_room(url):
    """Until the proxy has noticed that connections were closed."""
    until(lambda: answers(url.rsplit(":", 1)[1]), "the proxy to take a connection again")


def resident(pid):
    """MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("haproxy"), reason="needs haproxy (apt install haproxy)")
def test_the_proxy_keeps_strangers_out(served):
    """haproxy.cfg as it is: times, keys before bodies, connections by address, memory."""
    port, key = served
    with proxied(port) as (place, pid):
        url = f"http://127.0.0.1:{place}"
        authorization = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        assert httpx.get(f"{url}/health").status_code == 200
        reply = httpx.post(f"{url}/v1/chat/completions", content=BODY, headers=authorization)
        assert reply.status_code == 200
        upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}  # as Java's client asks for HTTP/2
        reply = httpx.post(f"{url}/v1/chat/completions", content=BODY, headers=authorization | upgrade)
        assert reply.status_code == 200
        before = resident(pid)
        strangers = [connected(place, HEAD + LONG) for _ in range(40)]
        assert all(connection.recv(65536).startswith(b"HTTP/1.1 401") for connection in strangers)
        for connection in strangers:
            connection.close()
        wait_for_room(url)
        assert resident(pid) - before < 20
        too_long = connected(place, with_key(key) + b"Content-Length: 99999999\r\n\r\n")
        assert too_long.recv(65536).startswith(b"HTTP/1.1 413")
        half, trickling = [connected(place, HEAD) for _ in range(30)], connected(place, HEAD)
        assert trickled(trickling, b"X", pause=0.5)
        for connection in half:
            ends(connection)
        many = [connection for _ in range(60) if (connection := unless_reset(place))]
        time.sleep(2)  # the proxy's threads count in any order: not the last ten must be those refused
        refused, _, _ = select.select(many, [], [], 0)
        assert 60 - len(many) + len(refused) >= 10
        for connection in many:
            connection.close()
        wait_for_room(url)
        body = connected(place, with_key(key) + LONG)
        assert trickled(body, b" ", pause=0.5)
        assert httpx.get(f"{url}/health").status_code == 200
