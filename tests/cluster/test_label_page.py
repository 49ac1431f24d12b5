"""The labelling page on Ray Serve: as a process that people start, and with a replica that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.segments import Clip, Segments

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
        str(port),
        "--quiet",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_ADDRESS": ""}
    ) as process:
        try:
            ready = json.loads(next(line for line in process.stdout if line.startswith("{")))
            client = httpx.Client(
                base_url=ready["ready"], headers={"Authorization": f"Bearer {token}"}, timeout=10
            )
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

            (replica,) = [line.split()[0] for line in _processes() if "ServeReplica:rl_dialog_labels" in line]
            os.kill(int(replica), signal.SIGKILL)
            answer, deadline = {"query": query["id"], "choice": "left"}, time.monotonic() + 60
            while (
                response := client.post("v1/answers", json=answer, headers={"Idempotency-Key": "k"})
            ).status_code != 200:
                assert response.status_code >= 500 and time.monotonic() < deadline, response.text
                time.sleep(0.2)
            assert [label.labeller for label in log.labels()] == ["ann"]
        finally:
            process.send_signal(signal.SIGTERM)
            told = process.stdout.read()
        assert process.wait(60) == 0 and json.loads(told.splitlines()[-1])["labels"] == 1
    log.close()


def _processes():
    return subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
