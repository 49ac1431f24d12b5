"""A checkpoint behind an OpenAI-compatible endpoint and a chat page, on Ray Serve; chats and votes are stored as the next round's training data.

    python -m pipelines.serve --models ilql=runs/ilql
    python -m pipelines.serve --models bc=runs/bc ilql=runs/ilql --split bc=1 ilql=1      # new chats on the page get one of them at random
    python -m pipelines.serve --new_key ann                                              # an API key, shown once
    python -m pipelines.prepare --logs sqlite:///chats.db --output_dir data/served --rewards.vote 1

The same command on a cluster where it serves already replaces the models in place. rl_dialog/serving/README.md has the routes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console

from rl_dialog.data.database import SECRET, database_url, shown_url
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError
from rl_dialog.models.checkpoint import resolve
from rl_dialog.run import OnCluster, Quiet, is_loopback, run, told_to_end
from rl_dialog.serving.served import ServeSettings, check_settings


@dataclass(frozen=True)
class ServeConfig(Quiet, OnCluster):
    """What to serve, to whom, and how much at a time."""

    models: tuple[str, ...] = ()
    """NAME=CHECKPOINT each: a run folder (its best checkpoint), a checkpoint directory or a hub name"""
    split: tuple[str, ...] = ()
    """NAME=WEIGHT each: how often new chats on the page get a model; without any, all are equally likely"""
    host: str = "127.0.0.1"
    """address to listen on; another one than this machine's own needs API keys"""
    port: int = 8000
    """port to listen on"""
    store: str = "sqlite:///chats.db"
    """database of chats, votes and keys: sqlite:///FILE, or postgresql://USER@HOST/NAME with the password in PGPASSWORD or ~/.pgpass"""
    backend: Literal["ray", "local"] = "ray"
    """ray: Ray Serve with replicas; local: one plain process, for debugging"""
    num_replicas: str = "1"
    """how many processes answer: a number, or a range such as 1-4 to follow the load"""
    cpus_per_replica: float = 1
    """CPUs that Ray sets aside for a replica"""
    detach: bool = False
    """leave the server running on its cluster and return; otherwise it ends with this process"""
    stop: bool = False
    """end the server that runs on the cluster, once its requests are answered"""
    build: str = ""
    """write a config for `serve deploy` to this file and return"""
    new_key: str = ""
    """make an API key of this name, print it (it is shown only now) and return"""
    requests_per_minute: int = 60
    """the rate of a new key"""
    revoke_key: str = ""
    """take this key away and return"""
    title: str = ServeSettings.title
    """heading of the chat page"""
    consent: str = ServeSettings.consent
    """what a user of the page agrees to before the first message; it is stored with the chat"""
    min_messages: int = ServeSettings.min_messages
    """messages of a user before the page asks for ratings"""
    max_tokens: int = ServeSettings.max_tokens
    """longest reply in tokens unless the request says otherwise"""
    most_tokens: int = ServeSettings.most_tokens
    """longest reply a request may ask for; never more than half of the model's context"""
    max_prompt_length: int = ServeSettings.max_prompt_length
    """longest prompt in tokens; older messages are left out first"""
    slots: int = ServeSettings.slots
    """replies in one running batch, per model and replica"""
    kept: int = ServeSettings.kept
    """ended conversations whose keys and values stay in memory for their next turn"""
    queue: int = ServeSettings.queue
    """requests that may wait for a slot; more are answered with 429 and Retry-After"""
    piece: int = ServeSettings.piece
    """prompt tokens read between two tokens of the replies under way"""
    max_body_bytes: int = ServeSettings.max_body_bytes
    """longest request"""
    request_timeout: float = ServeSettings.request_timeout
    """seconds from a request to the end of its reply"""
    drain: float = ServeSettings.drain
    """seconds that the requests of a replaced model, or of a server that ends, have to finish"""
    threads: int = ServeSettings.threads
    """threads of torch per replica; 0 leaves it to torch"""
    device: str = ServeSettings.device
    """where the models run: cpu, cuda, which sets a GPU aside for each replica, or auto: a GPU if there is one"""


def main(config: ServeConfig) -> dict[str, Any]:
    """Serves until it is told to end (Ctrl-C, a termination signal); returns what was stored. Raises UserError for what cannot be served."""
    if config.new_key or config.revoke_key:
        return _change_keys(config)
    if config.stop:
        return _stop(config)
    settings = settings_of(config)
    check_settings(settings)
    args = deployment_args(config, settings)
    if config.build:
        from rl_dialog.cluster.serve import serve_config

        Path(config.build).write_text(yaml.safe_dump(serve_config(args, host=config.host, port=config.port), sort_keys=False), encoding="utf-8")
        return {"config": config.build, "deploy": f"serve deploy {config.build}"}
    return _serve_locally(config, settings) if config.backend == "local" else _serve_on_ray(config, settings, args)


def settings_of(config: ServeConfig) -> ServeSettings:
    """The settings for the server. Raises UserError for names without a value, and for an open server that others could reach."""
    given = {field.name: getattr(config, field.name) for field in fields(ServeSettings) if hasattr(config, field.name)}
    store = Store(config.store)
    try:
        known = store.keys()
        keys = [key for key in known if key.revoked is None]
    finally:
        store.close()
    if not keys and not is_loopback(config.host):
        raise UserError(
            f"host {config.host}: expected API keys before others can reach the server, there are none in {_shown(config)}: make one with "
            f"`python -m pipelines.serve --store {_shown(config)} --new_key NAME`, or serve this machine alone with --host 127.0.0.1"
        )
    split = {name: _number(weight, name) for name, weight in _pairs("split", config.split).items()}
    models = {name: _absolute(place) for name, place in _pairs("models", config.models).items()}
    return ServeSettings(**given | {"models": models, "split": split, "needs_key": bool(keys), "store": _store_url(config)})


def deployment_args(config: ServeConfig, settings: ServeSettings) -> dict[str, Any]:
    """What Ray Serve is told: the settings that are not the usual ones, and the replicas."""
    args = {name: value for name, value in vars(settings).items() if value != getattr(ServeSettings(), name)}
    return args | {"replicas": config.num_replicas, "cpus_per_replica": config.cpus_per_replica}


def _serve_locally(config: ServeConfig, settings: ServeSettings) -> dict[str, Any]:
    import uvicorn

    from rl_dialog.serving.api import create_app
    from rl_dialog.serving.served import Models

    with told_to_end() as end, _listening(config) as place:
        store = Store(settings.store)
        app = create_app(Models(settings), store)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(settings.drain)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})  # in the main thread it would end the process by the signal it got
        thread.start()
        _say_ready(config, settings)
        while thread.is_alive() and not end.wait(1.0):
            pass
        server.should_exit = True
        thread.join()
    return _stored(config, store)


def _serve_on_ray(config: ServeConfig, settings: ServeSettings, args: dict[str, Any]) -> dict[str, Any]:
    from rl_dialog.cluster import serve
    from rl_dialog.cluster.data import connect

    os.environ |= {name: value for name, value in serve.PROXY.items() if name not in os.environ}  # for a Ray that is started here
    with connect(config.address or None):
        serve.require_shared_store(settings.store)
        _check_place(config, settings, serve.place())
        mine = not serve.running()
        serve.deploy(args, host=config.host, port=config.port)
        _say_ready(config, settings, cluster=serve.address())
        if mine and not config.detach:
            with told_to_end() as end:
                while not end.wait(2.0) and serve.running():
                    pass
            if serve.running():
                serve.stop()
    return _stored(config, Store(settings.store))


def _stop(config: ServeConfig) -> dict[str, Any]:
    from rl_dialog.cluster import serve
    from rl_dialog.cluster.data import connect

    with connect(config.address or None):
        if not serve.running():
            raise UserError("expected a server on this cluster, there is none; --address names another cluster")
        serve.stop()
    return {"stopped": True}


def _change_keys(config: ServeConfig) -> dict[str, Any]:
    store = Store(config.store)
    try:
        if config.new_key:
            return {"name": config.new_key, "key": store.add_key(config.new_key, requests_per_minute=config.requests_per_minute)}
        store.revoke_key(config.revoke_key)
        return {"revoked": config.revoke_key}
    except KeyError as error:
        raise UserError(error.args[0]) from None
    finally:
        store.close()


def _say_ready(config: ServeConfig, settings: ServeSettings, cluster: str | None = None) -> None:
    """Where the server is, as a line of JSON for scripts and in words for people."""
    url = f"http://{config.host}:{config.port}"
    told = {"ready": url, "api": f"{url}/v1", "models": list(settings.models), "needs_key": settings.needs_key, "cluster": cluster}
    print(json.dumps(told), flush=True)
    say = Console(quiet=config.quiet, stderr=True, highlight=False).print
    say(f"chat page  {url}/{'#key=YOUR_KEY' if settings.needs_key else ''}")
    say(f"API        {url}/v1/chat/completions   models {', '.join(settings.models)}")
    say(f"chats      {_shown(config)}   {'needs an API key' if settings.needs_key else 'open to everyone on this machine'}")


def _stored(config: ServeConfig, store: Store) -> dict[str, Any]:
    counts = store.counts()
    store.close()
    return {"store": _shown(config), **counts}


def _check_place(config: ServeConfig, settings: ServeSettings, place: tuple[str, int] | None) -> None:
    """Serve listens where it was started, whatever a later command says. Raises UserError where that is not what the flags say, or is taken."""
    if place is None:
        _listening(config).close()
    elif place != (config.host, config.port):
        wanted = f"--host {place[0]} --port {place[1]}"
        raise UserError(f"expected {wanted}, where this cluster serves already, got {config.host}:{config.port} (`serve shutdown` would end that)")


def _listening(config: ServeConfig) -> socket.socket:
    """A socket at the address, which shows that it is free. Raises UserError where it is not."""
    place = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((config.host, config.port))
    except OSError as error:
        place.close()
        raise UserError(
            f"expected an address of this machine with a free port, got {config.host}:{config.port}: {error}; --port names another"
        ) from None
    return place


def _pairs(flag: str, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not (name and equals and rest) or name in found:
            raise UserError(f"--{flag}: expected NAME=VALUE with a name of its own each, got {value!r}")
        found[name] = rest
    return found


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--split: expected a number as the weight of {name}, got {text!r}") from None


def _absolute(place: str) -> str:
    """The checkpoint that a run folder means now, as an absolute path: every replica has this one, and a later one is another. A hub name stays."""
    return str(Path(resolve(place)).resolve()) if Path(place).exists() else place


def _shown(config: ServeConfig) -> str:
    """The store without its password."""
    return shown_url(database_url(config.store))


def _store_url(config: ServeConfig) -> str:
    """The store's URL with an absolute path. Ray shows a deployment's arguments on its dashboard, so a password must not be among them."""
    url = database_url(config.store)
    if (url.password or set(SECRET) & set(url.query)) and config.backend == "ray":
        raise UserError(f"store: expected the password in PGPASSWORD or ~/.pgpass on every machine, not in the URL {_shown(config)}, which Ray shows")
    return url.render_as_string(hide_password=False)


if __name__ == "__main__":
    run(ServeConfig, main)
