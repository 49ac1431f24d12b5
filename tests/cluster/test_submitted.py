"""`ray job submit` to a cluster with a token. Of a sweep: its progress is in the job's log, its results on
the cluster's storage. Of a server, whose model `serve deploy` replaces; nobody gets in without a key."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from pipelines.serve import ServeConfig, main
from rl_dialog.config import load_config
from rl_dialog.data.store import Store
from tests.cluster.conftest import submit
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SWEEP = {
    "title": "tiny",
    "about": "Two weights.",
    "write_logs": {"dialogs": 60, "seed": 1},
    "prepare": "--rewards.logged 1 --vocab_size 400 --max_length 256",
    "train": "--model.layers 1 --model.width 16 --max_steps 6 --env small_talk --eval_steps 3 "
    "--env_episodes 4",
    "space": {"learning_rate": [0.001, 0.002]},
    "evaluate": "--env small_talk --episodes 8 --contexts 0 --samples 1 --max_new_tokens 16",
}


def test_a_submitted_sweep_tells_its_progress_and_leaves_its_results(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = head
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    work = [
        sys.executable,
        "-m",
        "pipelines.tune",
        "--sweep",
        str(tmp_path / "sweep.yaml"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    refused = submit((address, environment | {"RAY_AUTH_MODE": "disabled"}), *work)
    assert refused.returncode != 0 and not (tmp_path / "out").exists()
    done = submit(head, *work)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[2/2] learning_rate=0.00" in done.stdout and "succeeded" in done.stdout
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]) == 2
    assert (tmp_path / "out" / "best" / "model.safetensors").is_file()


def test_a_server_on_a_cluster(head, checkpoints, tmp_path):
    address, environment = head
    port = free_port()
    url, store = f"http://127.0.0.1:{port}", Store(f"sqlite:///{tmp_path}/chats.db")
    server = [
        sys.executable,
        "-m",
        "pipelines.serve",
        "--store",
        store.name,
        "--port",
        str(port),
        "--host",
        "0.0.0.0",
        "--threads",
        "1",
    ]

    def run(*arguments, **changed):
        return subprocess.run(
            list(map(str, arguments)),
            cwd=ROOT,
            env=environment | changed,
            capture_output=True,
            text=True,
            timeout=600,
        )

    models = "--models", f"bot={checkpoints['bc']}", "--detach"
    key = store.keys.add("ann", requests_per_minute=1000)
    started = submit(head, *server, *models)
    assert started.returncode == 0, started.stdout[-3000:] + started.stderr[-3000:]
    headers = {"Authorization": f"Bearer {key}"}

    def method():
        return httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["method"]

    body = {"model": "bot", "messages": [{"role": "user", "content": "hello there"}]}
    for wrong in ({}, {"Authorization": "Bearer sk-rl-wrong"}):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=wrong)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).json()["choices"][0][
        "finish_reason"
    ]
    assert method() == "bc"

    config = tmp_path / "serve.yaml"
    built = ["--models", f"bot={checkpoints['ilql']}", "--build", str(config)]
    main(load_config(ServeConfig, [*server[3:], *built]))
    assert (
        key not in config.read_text()
        and yaml.safe_load(config.read_text())["applications"][0]["deployments"][0]["user_config"]["models"]
    )
    refused = run(BIN / "serve", "deploy", config, "--address", address, RAY_AUTH_MODE="disabled")
    assert refused.returncode != 0 and method() == "bc"
    deployed = run(BIN / "serve", "deploy", config, "--address", address)
    assert deployed.returncode == 0, deployed.stderr
    deadline = time.monotonic() + 600  # it waits for a processor like everybody else
    # Another replica, because `serve deploy` counts as another version: the old one answers until the new one
    # does.
    while method() != "ilql":
        assert time.monotonic() < deadline, "the new model never came"
        time.sleep(0.5)
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    config.write_text(config.read_text().replace(checkpoints["ilql"], checkpoints["bc"]))
    loaded = httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["created"]
    assert run(BIN / "serve", "deploy", config, "--address", address).returncode == 0
    deadline, statuses = time.monotonic() + 600, set()
    while method() != "bc":  # only the user_config changed: in place, nobody waits
        statuses.add(httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code)
        assert time.monotonic() < deadline, "the model was not replaced in place"
    assert (
        statuses <= {200}
        and httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["created"] >= loaded
    )
    assert store.counts()["turns"] >= 2
    store.close()
