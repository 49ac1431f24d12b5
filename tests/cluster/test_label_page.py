"""The labelling page on Ray Serve: as a process that people start, and with a replica that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.segments import Clip, Segments
from tests.ports import free_port
from tests.processes import title

pytestmark = pytest.mark.slow


def test_the_page_outlives_its_replica(tmp_path):
    log, segments = LabelLog(f"sqlite:///{tmp_path}/labels.db", validation=0.0), Segments(tmp_path / "clips")
    clips = [
        Clip(np.full((4, 8, 8, 3), n, np.uint8), np.zeros(4, np.int64), np.zeros(4, np.float32), 4)
        for n in range(4)
    ]
    ids = [segments.add(clip) for clip in clips]
    for first, second in zip(ids[::2], ids[1::2], strict=True):
        log.add_query(first, second)
    token = log.add_labeller("ann")
    command = [
        sys.executable,
        "-m",
        "pipelines.label",
        "--run",
        str(tmp_path),
        "--page",
        "--backend",
        "ray",
        "--port",
        str(free_port()),
        "--quiet",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_ADDRESS": ""}
    ) as process:
        try:
            ready = json.loads(next((line for line in process.stdout if line.startswith("{")), "null"))
            assert ready, "it ended without a page"
            client = httpx.Client(base_url=ready["ready"], headers={"Authorization": f"Bearer {token}"})
            page = client.get("")
            assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
            assert client.get("page/label.js").status_code == client.get("run").status_code == 200, (
                "below a prefix"
            )
            query = client.post("v1/lease", json={}).json()["query"]
            assert client.get(f"v1/segments/{query['left']['id']}.png").headers["content-type"] == "image/png"
            assert (
                client.post("v1/lease", json={}, headers={"Authorization": "Bearer rl-wrong"}).status_code
                == 401
            )

            (replica,) = _replicas(process)
            replica.kill()
            answer = {"query": query["id"], "choice": "left"}
            taken = sent_until_taken(client, "v1/answers", json=answer, headers={"Idempotency-Key": "k"})
            assert taken.status_code == 200, taken.text
            assert replica not in _replicas(process) and [one.labeller for one in log.labels()] == ["ann"]
        finally:
            process.send_signal(signal.SIGTERM)
            told = process.stdout.read()
        assert process.wait(120) == 0 and json.loads(told.splitlines()[-1])["labels"] == 1
    log.close()


def sent_until_taken(
    client: httpx.Client, path: str, *, within: float = 240.0, **request: Any
) -> httpx.Response:
    """The response to a request that is sent again as the page does it: who asks while a replica dies, or its
    successor loads, gets errors of the proxy, connections that end, and no answer at all."""
    deadline, last = time.monotonic() + within, ""
    while time.monotonic() < deadline:
        try:
            response = client.post(path, timeout=15, **request)
            if response.status_code < 500:
                return response
            last = f"{response.status_code}: {response.text}"
        except httpx.TransportError as error:
            last = repr(error)
        time.sleep(0.2)
    raise AssertionError(f"expected a replica to take it within {within:g} s, got at last {last}")


def _replicas(process: subprocess.Popen) -> list[psutil.Process]:
    everyone = psutil.Process(process.pid).children(recursive=True)
    return [each for each in everyone if "ServeReplica:rl_dialog_labels" in title(each)]
