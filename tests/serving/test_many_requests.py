"""Requests of every kind with every kind of key, many at once, to running servers: no server error, what a
key may not do stays refused, memory stays flat.

`RL_DIALOG_FUZZ_REQUESTS=100000 pytest -m slow tests/serving/test_many_requests.py -k chats` says what it saw.
"""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from rl_dialog.data.keys import SCOPES
from rl_dialog.data.store import Store
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.page.app import create_page
from rl_dialog.preferences.page.server import PageServer
from rl_dialog.preferences.segments import Segments
from tests.ports import free_port
from tests.serving.test_roles import CHATS, EVERYBODY, LABELS

ROOT = Path(__file__).parents[2]
REQUESTS = int(os.environ.get("RL_DIALOG_FUZZ_REQUESTS", "2000"))
CLIENTS = 4
RATE = {"requests_per_minute": 10**7}
STRANGE = [
    "",
    "\0",
    "\ud800",
    "a" * 3000,
    "..",
    "%00",
    "é",
    -1,
    2**70,
    10**400,
    1e308,
    float("nan"),
    None,
    True,
]
STRANGE += [
    [],
    {},
    [[[]]],
    {"a": {"b": []}},
    ["x"] * 40,
    {"9" * 5000: 1},
    {"1": 1e9},
    [{"role": "user"}] * 99,
]
FIELDS = [
    *("model", "messages", "stream", "n", "stop", "user", "chat_id", "completion_id", "metadata", "store"),
    *("temperature", "top_p", "max_tokens", "seed", "beta", "logit_bias", "frequency_penalty", "logprobs"),
    *("top_logprobs", "tools", "response_format", "generation_config", "decoder", "num_generations"),
    *(
        "reasoning_effort",
        "return_values",
        "vote",
        "index",
        "edit",
        "consent",
        "quality",
        "comments",
        "nonsense",
    ),
    *("query", "queries", "choice", "labeller", "seconds"),
]
HEADERS = [{}] * 9 + [
    {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x"},
    {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings"},
    {"Range": "bytes=0-1,3-9", "Origin": "http://elsewhere", "Accept": "\xff"},
    {"Host": "["},
    {"Content-Type": "text/plain"},
    {"Content-Encoding": "gzip", "Expect": "200-ok", "X-Forwarded-For": "\xff", "Cookie": "=;;"},
]


class Fuzz:
    """One client's requests, and what came of them."""

    def __init__(self, url, table, keys, seed):
        self.rng, self.table, self.keys = random.Random(seed), table, keys
        self.http = http.client.HTTPConnection(url.removeprefix("http://"), timeout=240)
        self.chats, self.completions = ["chat-none"], ["chatcmpl-none"]  # of anybody
        self.outcomes, self.wrong = Counter(), []

    def run(self, count):
        while self.outcomes.total() < count and len(self.wrong) < 20:
            (method, path), may = self.rng.choice(list(self.table.items()))
            if method == "DELETE" and self.rng.random() < 0.9:  # else nothing would be left to work on
                continue
            scope = self.rng.choice([*EVERYBODY, "wrong"])
            if self.rng.random() < 0.1:
                method, may = self.rng.choice(["PUT", "PATCH", "OPTIONS", "GET", "POST", "DELETE"]), EVERYBODY
            try:
                self.send(method, self.place(path), scope, may, self.body(path))
            except (http.client.HTTPException, OSError) as error:
                self.http.close()
                self.wrong.append((method, path, scope, repr(error)))

    def send(self, method, path, scope, may, body):
        headers = {"Authorization": f"Bearer {self.keys[scope]}"} if scope else {}
        headers |= {"Content-Type": "application/json"} | self.rng.choice(HEADERS)
        self.http.request(method, path, body, headers)
        answer = self.http.getresponse()
        status, told = answer.status, answer.read()
        self.outcomes[status] += 1
        # bytes that are no text are told so, whoever sent them
        refusals = (401, 403) if body.isascii() else (400, 401, 403)
        may_not = scope not in may and may is not EVERYBODY
        if (status >= 500 and status != 503) or (may_not and status not in refusals):
            self.wrong.append((method, path, scope, status, body[:300], told[:300]))
        if status == 200 and answer.getheader("content-type") == "application/json":
            value = json.loads(told)
            found = value.get("id") if isinstance(value, dict) else None
            if isinstance(found, str) and found.startswith("chat"):
                known = self.completions if found.startswith("chatcmpl") else self.chats
                known.append(found)
                del known[1:-20]

    def place(self, path):
        names = {
            "{chat}": self.chats[-1],
            "{user:path}": ["u", "a/b", "%FF", "%00", "ann", "u?key=chat&key=x"],
        }
        names |= {
            "{name:path}": ["bc", "assigned", "x/../y", "%00", "[", "a" * 9000],
            "{id}": ["0" * 64, "..", "%00"],
        }
        for name, values in names.items():
            path = path.replace(name, values if isinstance(values, str) else self.rng.choice(values))
        return path + (self.rng.choice(["/chat.js", "/..%2Fapi.py", "/"]) if path == "/page" else "")

    def body(self, path):
        rng = self.rng
        if rng.random() < 0.05:
            return rng.choice([rng.randbytes(rng.randrange(60)) + b"\xff", b"[" * 3000 + b"\xff"])
        text = rng.choice(["hello", "my secret is 4711", "how are you?"])
        value = {
            "model": rng.choice(["assigned", "bc", "ilql", "x"]),
            "user": rng.choice(["u", "ann", "a/b"]),
        }
        if path == "/v1/chat/completions":
            value |= {"messages": [{"role": "user", "content": text}], "max_tokens": rng.randrange(1, 4)}
            value |= {"stream": rng.random() < 0.3}
            value |= {"chat_id": rng.choice(self.chats)} if rng.random() < 0.3 else {}
        elif path == "/v1/feedback":
            value = {"completion_id": rng.choice(self.completions), "vote": rng.choice([-1, 0, 1])}
        elif path.endswith("/ratings"):
            value = {"quality": rng.randrange(1, 8)}
        elif path == "/v1/answers":
            value = {"query": "x", "choice": rng.choice(["left", "right", "equal"])}
        elif path in ("/v1/renew", "/v1/release"):
            value = {"queries": rng.choice([[], ["x"]])}
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            value[rng.choice(FIELDS)] = rng.choice(STRANGE)
        return json.dumps(value).encode()


def memory_while(process, clients, count):
    """MiB of the process every half a second, while each client sends so many requests."""
    threads = [threading.Thread(target=client.run, args=(count,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads):
        memory.append(process.memory_info().rss / 2**20)
        time.sleep(0.5)
    return memory


@contextmanager
def chats(tmp_path, checkpoints):
    """(process, URL, keys) of a server of chats as its command starts it."""
    port = str(free_port())
    database, output = f"sqlite:///{tmp_path}/chats.db", tmp_path / "server.log"
    with closing(Store(database)) as store:
        keys = {scope: store.keys.add(scope, scopes=[scope], **RATE) for scope in SCOPES}
    command = [
        sys.executable,
        "-m",
        "pipelines.serve",
        "--backend",
        "local",
        "--store",
        database,
        "--port",
        port,
    ]
    command += ["--max_tokens", "4", "--queue", "64", "--threads", "1"]
    models = [f"{name}={place}" for name, place in checkpoints.items()]
    with output.open("w") as log:
        process = psutil.Popen(
            [*command, "--models", *models], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 400
        while '"ready"' not in output.read_text():
            assert time.monotonic() < deadline and process.poll() is None, output.read_text()
            time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}", keys
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(240)
    told = output.read_text()
    assert (ended, "Traceback" in told) == (0, False), told[-3000:]
    assert not [key for key in keys.values() if key in told], "a key in the log"


@contextmanager
def labels(tmp_path):
    """(process, URL, keys) of a page for labels; it runs in this process."""
    with closing(LabelLog(f"sqlite:///{tmp_path}/labels.db")) as log:
        keys = {scope: log.keys.add(scope, scopes=[scope], **RATE) for scope in SCOPES}
        with PageServer(create_page(log, Segments(tmp_path), run=tmp_path)) as server:
            yield psutil.Process(), server.url, keys


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("which", ["chats", "labels"])
def test_every_route_with_every_key_many_times(which, tmp_path, checkpoints, capsys):
    table, serving = (CHATS, chats(tmp_path, checkpoints)) if which == "chats" else (LABELS, labels(tmp_path))
    with serving as (process, url, keys):
        clients = [Fuzz(url, table, keys | {"wrong": "sk-rl-no"}, seed) for seed in range(CLIENTS)]
        began = time.monotonic()
        memory = memory_while(process, clients, REQUESTS // CLIENTS)
        outcomes = sum((client.outcomes for client in clients), Counter())
        third = max(1, len(memory) // 3)
        middle, end = (
            sum(part) / len(part) for part in (memory[third : 2 * third] or memory, memory[-third:])
        )
        with capsys.disabled():
            print(
                f"\n{which}: {outcomes.total()} requests in {time.monotonic() - began:.0f} s, "
                f"{dict(sorted(outcomes.items()))}, memory {memory[0]:.0f} -> {middle:.0f} -> {end:.0f} MiB"
            )
        assert [wrong for client in clients for wrong in client.wrong] == []
        assert {200, 400, 401, 403, 404} <= set(outcomes)
        assert end < middle + 30
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
