"""The serve verb without Ray: keys, what it refuses before it loads anything, the config for `serve deploy`,
and the plain process."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from pipelines.serve import ServeConfig, main
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints["ilql"]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/chats.db"


def test_keys_come_and_go(url):
    made = main(ServeConfig(store=url, new_key="ann", requests_per_minute=7))
    store = Store(url)
    assert store.keys.find(made["key"]).requests_per_minute == 7
    with pytest.raises(UserError, match="'ann', which there is"):
        main(ServeConfig(store=url, new_key="ann"))
    assert main(ServeConfig(store=url, revoke_key="ann")) == {"revoked": "ann"}
    assert store.keys.find(made["key"]) is None
    with pytest.raises(UserError, match="got 'bob'; there are ann"):
        main(ServeConfig(store=url, revoke_key="bob"))
    links = main(ServeConfig(store=url, new_key="p", number=2, scopes=("participant",), port=8123))["keys"]
    assert [link["name"] for link in links] == ["p-1", "p-2"]
    for made in links:
        assert made["link"] == f"http://127.0.0.1:8123/#key={made['key']}"
        assert store.keys.find(made["key"]).scopes == ("participant",)
    with pytest.raises(UserError, match="expected scopes of a key .*, got admin"):
        main(ServeConfig(store=url, new_key="q", scopes=("admin",)))
    store.close()


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "at least one model, e.g. --models ilql=runs/ilql"),
        (
            {"models": ("runs/ilql",)},
            "--models: expected NAME=VALUE .*, got 'runs/ilql', such as ilql=runs/ilql",
        ),
        ({"models": ("a=x",), "split": ("a",)}, "--split: expected NAME=VALUE .*, got 'a', such as a=1"),
        ({"models": ("a=x", "a=y")}, "name of its own each, got 'a=y'"),
        ({"models": ("assigned=x",), "backend": "local"}, "another name for a model than 'assigned'"),
        ({"models": ("a=x",), "split": ("b=1",)}, "split: expected names of models .a., got 'b'"),
        ({"models": ("a=x",), "split": ("a=much",)}, "expected a number as the weight of a, got 'much'"),
        ({"models": ("a=x",), "split": ("a=0",)}, "a weight above 0"),
        ({"models": ("a=/nowhere/x",), "backend": "local"}, "/nowhere/x: expected a directory with a model"),
        (
            {"models": ("a=x",), "host": "0.0.0.0"},
            "host 0.0.0.0: expected API keys before others can reach the server",
        ),
        ({"models": ("a=x",), "request_timeout": 0.0}, "--request_timeout of at least 0.1, got 0.0"),
        ({"models": ("a=x",), "max_body_bytes": 0}, "--max_body_bytes of at least 1, got 0"),
        ({"models": ("a=x",), "threads": -2}, "--threads of at least 0, got -2"),
        ({"models": ("a=x",), "drain": -1.0}, "--drain of at least 0, got -1.0"),
        ({"new_key": "q", "requests_per_minute": 10**20}, "requests_per_minute, and below 2,147,483,648"),
        ({"models": ("a=x",), "store": "mysql://x"}, "expected the URL of an SQLite or PostgreSQL store"),
    ],
)
def test_what_cannot_be_served_is_refused(url, given, words):
    with pytest.raises(UserError, match=words):
        main(ServeConfig(**{"store": url} | given))


def test_pickled_weights_are_refused_in_words(url, checkpoint):
    """Reading them might run what they say."""
    (Path(checkpoint) / "model.safetensors").rename(Path(checkpoint) / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights in model.safetensors, got pytorch_model.bin, a pickle"):
        main(ServeConfig(models=(f"a={checkpoint}",), store=url, backend="local"))


def test_a_password_does_not_reach_rays_dashboard(monkeypatch):
    opened = []
    monkeypatch.setattr("rl_dialog.serving.settings.Store", lambda found: opened.append(found) or _Closed())
    with pytest.raises(UserError, match="password in PGPASSWORD or ~/.pgpass") as refused:
        main(ServeConfig(models=("a=x",), store="postgresql://u:hidden-word@db/chats"))
    assert opened and "hidden-word" not in str(refused.value)


class _Closed:
    @property
    def keys(self):
        return self

    def all(self):
        return []

    def close(self):
        pass


def test_the_config_for_serve_deploy(url, checkpoint, tmp_path):
    options = {"store": url, "models": (f"bot={checkpoint}",), "build": str(tmp_path / "serve.yaml")}
    built = main(ServeConfig(**options, num_replicas="1-3", max_tokens=9, port=8123))
    config = yaml.safe_load(Path(built["config"]).read_text())
    (application,) = config["applications"]
    assert config["http_options"]["port"] == 8123 and config["http_options"]["host"] == "127.0.0.1"
    assert application["import_path"] == "rl_dialog.cluster.serve:build"
    assert application["deployments"] == [
        {"name": "chat", "user_config": {"models": {"bot": checkpoint}, "split": {}}}
    ]
    assert application["args"] == {
        "store": url,
        "needs_key": False,
        "max_tokens": 9,
        "replicas": "1-3",
        "cpus_per_replica": 1.0,
    }
    with pytest.raises(UserError, match="replicas: expected a number or a range such as 1-4, got 'many'"):
        main(ServeConfig(**options, num_replicas="many"))


def test_the_plain_process(url, checkpoint):
    port = free_port()
    flags = [
        "--models",
        f"bot={checkpoint}",
        "--store",
        url,
        "--port",
        str(port),
        "--backend",
        "local",
        "--threads",
        "1",
        "--quiet",
    ]
    command = [sys.executable, "-m", "pipelines.serve", *flags]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        ready = json.loads(process.stdout.readline())
        assert ready["models"] == ["bot"] and ready["needs_key"] is False
        body = {"model": "bot", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{ready['api']}/chat/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"]
        with pytest.raises(UserError, match=f"a free port, got 127.0.0.1:{port}: .*in use"):
            main(ServeConfig(models=(f"bot={checkpoint}",), store=url, port=port, backend="local"))
        assert "text/html" in httpx.get(ready["ready"]).headers["content-type"]
        process.send_signal(signal.SIGTERM)
        *_, last = process.stdout.read().splitlines()
        assert process.wait(240) == 0
    assert json.loads(last) == {"store": url, "chats": 1, "turns": 1, "votes": 0, "ratings": 0}
