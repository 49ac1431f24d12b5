"""The server on Ray Serve, as its command starts it: replaced models, killed replicas, clients that
misbehave. What was acknowledged is in the store.

`RL_DIALOG_LOAD_SECONDS=600 pytest -m slow tests/faults/test_serve.py -k misbehave -s` runs the load test for
ten minutes and prints what it saw.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from rl_dialog.data.store import Store
from rl_dialog.methods import BC, ILQL
from tests.ports import free_port
from tests.processes import title

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
ROOT = Path(__file__).parents[2]
TALK = [{"role": "user", "content": "hello there"}]
LOAD_SECONDS = float(os.environ.get("RL_DIALOG_LOAD_SECONDS", "12"))
PAIR = ["--num_replicas", "2", "--cpus_per_replica", "0.5", "--threads", "1", "--max_tokens", "60"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def checkpoints(make_policy, tokenizer, folder):
    """{"bc": folder, "ilql": folder}: tiny checkpoints."""
    found = {"bc": str(folder / "bc"), "ilql": str(folder / "ilql")}
    for method, where in ((BC(), found["bc"]), (ILQL(), found["ilql"])):
        make_policy(method).save_pretrained(where)
        tokenizer.save_pretrained(where)
    return found


@pytest.fixture
def store(tmp_path):
    found = Store(f"sqlite:///{tmp_path}/chats.db")
    yield found
    found.close()


class Server:
    """The running command, and commands beside it."""

    def __init__(self, store, environment, process, url, cluster, output):
        self.store, self.environment, self.process, self.url, self.cluster, self.output = (
            store,
            environment,
            process,
            url,
            cluster,
            output,
        )

    def command(self, *flags):
        port = self.url.rpartition(":")[2]
        arguments = [
            sys.executable,
            "-m",
            "pipelines.serve",
            "--store",
            self.store.name,
            "--address",
            self.cluster,
            "--port",
            port,
            *flags,
        ]
        environment = self.environment | {
            "RAY_AUTH_MODE": "token"
        }  # a local cluster has one; only --address auto finds that out itself
        return subprocess.run(
            arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )

    def replicas(self):
        """The processes that answer."""
        everyone = self.process.children(recursive=True)
        return [process for process in everyone if title(process).startswith("ray::ServeReplica")]

    def client(self, key):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=240)


@contextmanager
def serving(store, output, *flags):
    """The running command, on a Ray of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "RAY_worker_niceness": "0"
    }
    where = ["--store", store.name, "--port", str(free_port()), "--address", "local"]
    arguments = [sys.executable, "-m", "pipelines.serve", *where, *flags]
    with output.open("w") as log:
        process = psutil.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _until(lambda: '"ready"' in output.read_text() or process.poll() is not None, "the server to start")
        assert process.poll() is None, output.read_text()
        ready = next(
            json.loads(line) for line in output.read_text().splitlines() if line.startswith('{"ready"')
        )
        yield Server(store, environment, process, ready["ready"], ready["cluster"], output)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(240)


def _until(condition, what, seconds=400):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


class Clients:
    """Threads that talk until told to stop, and what each of their requests came to."""

    def __init__(self, count, work):
        self.outcomes, self.problems, self._stop = [], [], threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work, random.Random(n))) for n in range(count)
        ]

    def _run(self, work, rng):
        while not self._stop.is_set():
            try:
                self.outcomes.append(work(rng))
            except Exception as error:
                self.problems.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"


def _stored(store):
    """How often each completion is in the store."""
    return Counter(
        message["completion"]
        for dialog in store.dialogs()
        for message in dialog.messages
        if message["role"] == "assistant"
    )


def test_clients_that_misbehave_leave_no_trace(store, tmp_path, checkpoints):
    """At capacity: more clients than slots and queue, a third of which vanish, send garbage or read
    slowly."""
    key = store.keys.add("ann", scopes=["chat", "metrics"], requests_per_minute=10_000_000)
    headers = {"Authorization": f"Bearer {key}"}
    flags = [
        "--models",
        f"ilql={checkpoints['ilql']}",
        "--slots",
        "4",
        "--queue",
        "4",
        "--threads",
        "1",
        "--max_tokens",
        "40",
    ]
    with serving(store, tmp_path / "server.log", *flags) as server:
        acknowledged, votes, url = [], {}, f"{server.url}/v1/chat/completions"
        body = {"model": "ilql", "messages": TALK}

        def good(http, rng):
            answer = http.post(
                url, json=body | {"user": f"u{rng.randrange(50)}", "seed": rng.randrange(10**6)}
            )
            if answer.status_code == 429:
                assert (
                    int(answer.headers["retry-after"]) >= 1 and answer.json()["error"]["code"] == "queue_full"
                )
                time.sleep(0.05)
                return "429"
            assert answer.status_code == 200, answer.text
            # Its own id: the last of `acknowledged` may be another client's by now.
            completion, vote = answer.json()["id"], rng.choice([-1, 1])
            acknowledged.append(completion)
            feedback = {"completion_id": completion, "vote": vote}
            assert http.post(f"{server.url}/v1/feedback", json=feedback).status_code == 200
            votes[completion] = vote
            return "200"

        def vanishing(http, rng):
            try:
                http.post(
                    url, json=body | {"stream": rng.random() < 0.5}, timeout=rng.random() * 0.05 + 0.001
                )
            except httpx.TimeoutException:
                return "vanished"
            return "answered"

        def garbage(http, rng):
            content = rng.choice(
                [
                    rng.randbytes(200),
                    b"{" * 500,
                    json.dumps(body | {"temperature": "x"}).encode(),
                    json.dumps(body | {"n": 10**9}).encode(),
                ]
            )
            answer = http.post(url, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
            return "garbage"

        def slow(http, rng):
            """Opens a stream and reads a byte now and then."""
            host, port = server.url.removeprefix("http://").split(":")
            data = json.dumps(body | {"stream": True}).encode()
            lines = [
                "POST /v1/chat/completions HTTP/1.1",
                "Host: x",
                f"Authorization: Bearer {key}",
                "Content-Type: application/json",
            ]
            head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
            with socket.create_connection((host, int(port)), timeout=240) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                connection.sendall(head.encode() + data)
                for _ in range(rng.randrange(20)):
                    connection.recv(1)
                    time.sleep(0.1)
            return "slow"

        def work(rng):
            kind = rng.choices([good, vanishing, garbage, slow], [10, 2, 2, 1])[0]
            with httpx.Client(headers=headers, timeout=240) as http:
                return kind(http, rng)

        (replica,) = server.replicas()
        memory, began = [], time.monotonic()
        kinds = {"200", "429", "vanished", "garbage", "slow"}
        with Clients(14, work) as clients:
            while (took := time.monotonic() - began) < LOAD_SECONDS or not kinds <= set(clients.outcomes):
                assert took < LOAD_SECONDS + 300, f"of {kinds} there came {Counter(clients.outcomes)}"
                time.sleep(1)
                memory.append(
                    sum(process.memory_info().rss for process in (replica, *replica.children())) / 2**20
                )
        assert not clients.problems, clients.problems[:3]
        _until(
            lambda: (
                _gauge(server, headers, "serve_running_rows")
                == _gauge(server, headers, "serve_queue_depth")
                == 0
            ),
            "the requests of those who have gone to end",
        )
        assert _gauge(server, headers, "serve_healthy") == 1 and server.replicas() == [replica]
        took = []
        for _ in range(10):
            began = time.monotonic()
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
            took.append(time.monotonic() - began)
        # it would give up after 2 s, each time
        assert min(took) < 1, f"the replica waits in vain for the rate that all replicas share: {took}"
        stored = _stored(store)
        assert set(stored.values()) == {1} and set(acknowledged) <= set(stored)
        kept = {
            m["completion"]: vote
            for d in store.dialogs()
            for m in d.messages
            for name, vote in m.get("feedback", {}).items()
            if name in ("vote", "repeated_vote")  # one user may draw the same reply twice: a vote counts once
        }
        assert kept == votes
        outcomes = Counter(clients.outcomes)
        third = len(memory) // 3
        middle, end = (sum(part) / len(part) for part in (memory[third : 2 * third], memory[2 * third :]))
        print(
            f"{LOAD_SECONDS:g} s, {dict(outcomes)}, {len(stored)} turns, memory of the replica "
            f"{memory[0]:.0f} -> {middle:.0f} -> {end:.0f} MiB"
        )
        assert end < middle + 30, (middle, end)
    said = server.output.read_text()
    assert json.loads(said.splitlines()[-1])["turns"] == len(_stored(store))
    assert "/v1/chat/completions 200" not in said, "no line for each request"


def _gauge(server, headers, name):
    lines = httpx.get(f"{server.url}/metrics", headers=headers).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def pair(folder, checkpoints):
    """A server of two replicas, which tests share: it takes a minute to start."""
    models = ["--models", f"ilql={checkpoints['ilql']}"]
    store = Store(f"sqlite:///{folder}/pair.db")
    store.keys.add("somebody")  # a store without any would let everybody in
    with serving(store, folder / "pair.log", *models, *PAIR) as server:
        yield server
    store.close()


def test_two_replicas_share_a_rate_take_over_models_and_lose_nothing(pair, checkpoints):
    store = pair.store
    ample, tight = (
        store.keys.add("ample", requests_per_minute=100_000),
        store.keys.add("tight", requests_per_minute=7),
    )
    other = ["--models", f"ilql={checkpoints['bc']}", *PAIR]
    assert len(pair.replicas()) == 2
    for headers in ({}, {"Authorization": "Bearer sk-rl-nobody"}):
        assert httpx.get(f"{pair.url}/v1/models", headers=headers).status_code == 401
    began, statuses, alone = time.monotonic(), Counter(), 0
    for _ in range(30):
        asked = time.monotonic()
        told = httpx.get(f"{pair.url}/v1/models", headers={"Authorization": f"Bearer {tight}"})
        statuses[told.status_code] += 1
        alone += time.monotonic() - asked >= 2  # a replica that waits so long for the others counts by itself
    most = 7 * (1 + (time.monotonic() - began) / 60) + 1 + alone
    assert set(statuses) == {200, 429} and 7 <= statuses[200] <= most, "one rate for both replicas"
    create = pair.client(ample).chat.completions.create

    def talk(rng):
        time.sleep(0.3)  # the commands below need the processor too
        asked = {"model": "ilql", "messages": TALK, "seed": 1, "max_tokens": 12}
        if rng.random() < 0.5:
            answer = create(**asked)
            return answer.id, answer.choices[0].message.content
        chunks = list(create(**asked, stream=True))
        assert chunks[-1].choices[0].finish_reason
        return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with Clients(4, talk) as clients:
        _until(lambda: len(clients.outcomes) > 8, "replies of the model before")
        done = pair.command(*other)
        assert done.returncode == 0, done.stderr
        replaced = len(clients.outcomes)
        refused = pair.command("--models", "ilql=/nowhere/at/all", *PAIR)
        assert refused.returncode == 2 and "/nowhere/at/all" in refused.stderr, refused.stderr
        elsewhere = pair.command(*other, "--port", "1")
        assert elsewhere.returncode == 2 and "where this cluster serves already" in elsewhere.stderr, (
            elsewhere.stderr
        )
        victim = random.choice(pair.replicas())
        victim.send_signal(signal.SIGKILL)  # its successor must not get the models that were refused
        _until(lambda: len([each for each in pair.replicas() if each != victim]) == 2, "its successor")
        time.sleep(5)  # it loads, and answers
        answered = len(clients.outcomes)
        _until(lambda: len(clients.outcomes) > answered + 20, "more replies")
    assert len(clients.problems) <= 4, "those that the killed replica had"
    assert len({text for _, text in clients.outcomes}) == 2, "the model before and the one after"
    after = {text for _, text in clients.outcomes[replaced + 8 :]}
    assert len(after) == 1, "nobody gets the old one any more"
    stored = _stored(store)
    assert set(stored.values()) == {1} and {completion for completion, _ in clients.outcomes} <= set(stored)
    assert len(stored) - len(clients.outcomes) <= len(clients.problems)


def test_a_killed_replica_costs_its_own_requests_only(pair):
    """A replica does not outlive its engine, nor the other way round."""
    store = pair.store
    key, earlier = store.keys.add("ann", requests_per_minute=1_000_000), _stored(store)
    client, acknowledged = pair.client(key), []

    def talk(rng):
        if rng.random() < 0.5:
            answer = client.chat.completions.create(model="ilql", messages=TALK)
            acknowledged.append(answer.id)
            return "whole"
        with client.chat.completions.create(model="ilql", messages=TALK, stream=True) as stream:
            for chunk in stream:
                if chunk.choices[0].finish_reason:
                    acknowledged.append(chunk.id)
                    return "stream"
        raise EOFError("a stream ended without its last chunk")

    kills = []
    with Clients(6, talk) as clients:
        for which in ("replica", "engine"):
            time.sleep(3)
            replica = random.Random(len(kills)).choice(pair.replicas())
            before, answered = len(clients.problems), len(clients.outcomes)
            # the second one was made just now
            _until(lambda new=replica: len(new.children()) == 1, "a replica to have its engine")
            (engine,) = replica.children()
            (engine if which == "engine" else replica).send_signal(signal.SIGKILL)
            _until(lambda n=answered: len(clients.outcomes) > n + 20, "replies of the other replica")
            _until(
                lambda gone=replica: len([each for each in pair.replicas() if each != gone]) == 2,
                "a successor of the killed one",
            )
            kills.append(len(clients.problems) - before)
            _until(lambda gone=engine: not gone.is_running(), "the engine of a killed replica to end")
    assert all(count <= 6 for count in kills), kills
    assert clients.problems, "no kill met a running request: the test shows nothing"
    answers = [problem for problem in clients.problems if isinstance(problem, openai.APIStatusError)]
    assert {(answer.status_code, answer.code) for answer in answers} <= {(503, "replica_failed")}, {
        answer.response.text for answer in answers
    }
    for problem in clients.problems:
        assert isinstance(
            problem,
            openai.APIConnectionError | openai.APIStatusError | openai.APIError | EOFError | httpx.HTTPError,
        ), repr(problem)
    stored = _stored(store) - earlier
    assert set(stored.values()) == {1}, "a turn is there once"
    assert set(acknowledged) <= set(stored), "what was acknowledged is there"
    assert len(stored) - len(acknowledged) <= len(clients.problems)
    kinds = Counter(type(problem).__name__ for problem in clients.problems)
    print(
        f"{len(acknowledged)} replies, {len(kills)} kills, {len(clients.problems)} requests failed: "
        f"{dict(kinds)}"
    )
