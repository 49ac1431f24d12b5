"""A checkpoint behind an OpenAI-compatible endpoint and a chat page, on Ray Serve.

    python -m pipelines.serve --models ilql=runs/ilql
    python -m pipelines.serve --models bc=runs/bc ilql=runs/ilql --split bc=1 ilql=1
    python -m pipelines.serve --new_key app                                  # an API key, shown once
    python -m pipelines.serve --new_key p --number 20 --scopes participant   # links for 20 people of a study
    python -m pipelines.prepare --logs sqlite:///chats.db --output_dir data/served --rewards.vote 1

Chats and votes are stored: the next round's training data. The same command on a cluster where it
serves already replaces the models in place. rl_dialog/serving/README.md has the routes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rl_dialog.data.store import Store
from rl_dialog.run import OnCluster, Quiet, is_loopback, run, told_to_end
from rl_dialog.serving.local import KeyOptions, change_keys, say_ready, serve_here
from rl_dialog.serving.settings import (
    ServerOptions,
    ServeSettings,
    check_settings,
    settings_from,
    shown_store,
)
from rl_dialog.web_server import url_of


@dataclass(frozen=True)
class ServeConfig(KeyOptions, ServerOptions, Quiet, OnCluster):
    """What to serve, to whom, and how much at a time."""

    models: tuple[str, ...] = ()
    """NAME=CHECKPOINT each: a run folder (its best checkpoint), a checkpoint directory or a hub name"""
    split: tuple[str, ...] = ()
    """NAME=WEIGHT each: how often the model `assigned` is this one; without any, all are equally likely"""
    host: str = "127.0.0.1"
    """address to listen on; another one than this machine's own needs API keys"""
    port: int = 8000
    """port to listen on"""
    store: str = "sqlite:///chats.db"
    """database of chats, votes and keys: sqlite:///FILE, or postgresql://USER@HOST/NAME with the password in
    PGPASSWORD or ~/.pgpass"""
    backend: Literal["ray", "local"] = "ray"
    """ray: Ray Serve with replicas; local: the same server in one plain process"""
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


def main(config: ServeConfig) -> dict[str, Any]:
    """Serves until it is told to end (Ctrl-C, a termination signal); returns what was stored."""
    if config.new_key or config.revoke_key:
        return change_keys(config, config.store, page=url_of(config.host, config.port))
    if config.stop:
        from rl_dialog.cluster.serve import stop_at

        stop_at(config.address or None)
        return {"stopped": True}
    settings = settings_of(config)
    check_settings(settings)
    args = settings.changed() | {"replicas": config.num_replicas, "cpus_per_replica": config.cpus_per_replica}
    if config.build:
        from rl_dialog.cluster.serve import write_serve_config

        write_serve_config(config.build, args, host=config.host, port=config.port)
        return {"config": config.build, "deploy": f"serve deploy {config.build}"}
    if config.backend == "local":
        return _serve_locally(config, settings)
    return _serve_on_ray(config, settings, args)


def settings_of(config: ServeConfig) -> ServeSettings:
    """The settings for the server. Raises UserError for what it cannot be told."""
    named = {name: getattr(config, name) for name in ("models", "split", "store")}
    public = "" if is_loopback(config.host) else config.host
    return settings_from(config, **named, public_host=public, shown=config.backend == "ray")


def _serve_locally(config: ServeConfig, settings: ServeSettings) -> dict[str, Any]:
    from rl_dialog.models.causal_lm import load_quietly

    load_quietly()
    with told_to_end() as end:
        ready = partial(_say_ready, config, settings)
        store = serve_here(settings, config.host, config.port, ready=ready, end=end)
    return _stored(config, store)


def _serve_on_ray(config: ServeConfig, settings: ServeSettings, args: dict[str, Any]) -> dict[str, Any]:
    from rl_dialog.cluster import serve
    from rl_dialog.cluster.data import connect

    serve.prepare_proxies()
    with connect(config.address or None):
        serve.require_shared_store(settings.store)
        serve.require_place(config.host, config.port)
        mine = not serve.running()
        serve.deploy(args, host=config.host, port=config.port)
        _say_ready(config, settings, cluster=serve.address())
        if mine and not config.detach:
            with told_to_end() as end:
                serve.stop_when(end)
    return _stored(config, Store(settings.store))


def _say_ready(config: ServeConfig, settings: ServeSettings, cluster: str | None = None) -> None:
    url = url_of(config.host, config.port)
    say_ready(settings, url, store=config.store, cluster=cluster, quiet=config.quiet)


def _stored(config: ServeConfig, store: Store) -> dict[str, Any]:
    with closing(store):
        return {"store": shown_store(config.store), **store.counts()}


if __name__ == "__main__":
    run(ServeConfig, main)
