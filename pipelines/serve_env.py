"""A world to talk in, served to other trainers by OpenEnv's WebSocket protocol.

    python -m pipelines.serve_env --env small_talk --port 8000
    python -m pipelines.check_env --env openenv:ws://127.0.0.1:8000

The protocol is in rl_dialog/serving/worlds.py. Runs until Ctrl-C. There are no keys: whoever reaches the
address can talk, so another --host than this machine's asks for --public. Without it the server answers to
localhost, 127.0.0.1, ::1 and its --host only, and to no web page from elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from envs import text_env
from rl_dialog.errors import UserError
from rl_dialog.run import Quiet, at_least, is_loopback, require, run, told_to_end


@dataclass(frozen=True)
class ServeEnvConfig(Quiet):
    """Which world, and where."""

    env: str = ""
    """the name of a world that is here, module:Class of your own, or textarena:NAME and the like
    (envs/README.md)"""
    host: str = "127.0.0.1"
    """address of the server"""
    port: int = 8000
    """port of the server; 0 takes any free one"""
    public: bool = False
    """let other machines talk in it too; there are no keys"""
    sessions: int = 64
    """clients at a time; the next one is refused"""
    idle: float = 600.0
    """seconds of silence after which a session is ended"""


def main(config: ServeEnvConfig) -> dict[str, Any]:
    """Serves until it is told to end. Raises UserError for a world or an address that is not there."""
    require(config, env="the name of a world, or module:Class")
    at_least(config, sessions=1, idle=1)
    if not config.public and not is_loopback(config.host):
        remedy = "--public lets other machines talk too"
        raise UserError(f"--host: expected 127.0.0.1, got {config.host}: {remedy}")
    if importlib.util.find_spec("websockets") is None:
        raise UserError("expected websockets, which the protocol needs; pip install websockets")
    make_world = text_env(config.env)

    from rl_dialog.serving.worlds import WorldLimits, create_world_app
    from rl_dialog.web_server import LOOPBACK, WebServer, listening

    limits = WorldLimits(sessions=config.sessions, idle=config.idle)
    place = listening(config.host, config.port)
    hosts = None if config.public else (*LOOPBACK, config.host)
    app = create_world_app(make_world, config.env, limits, hosts=hosts)
    server = WebServer(app, place, websocket_bytes=limits.largest)
    url = server.url.replace("http://", "ws://")
    try:
        with told_to_end() as end:
            print(json.dumps({"ready": url, "env": config.env}), flush=True)
            say = Console(quiet=config.quiet, stderr=True, highlight=False).print
            say(f"{config.env} at {url}/ws; in every verb: --env openenv:{url}", soft_wrap=True)
            while not end.wait(0.5):
                if not server.alive():
                    raise OSError("the server ended by itself; what it said before has the reason")
    finally:
        server.close()
    return {"env": config.env, "url": url}


if __name__ == "__main__":
    run(ServeEnvConfig, main)
