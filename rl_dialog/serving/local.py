"""What `pipelines.serve` does beside Ray: keys, where the server is, and the server in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from rl_dialog.config import at_least
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError
from rl_dialog.serving.settings import ServeSettings, shown_store
from rl_dialog.web_server import WebServer, listening


def serve_here(
    settings: ServeSettings, host: str, port: int, *, ready: Callable[[], None], end: threading.Event
) -> Store:
    """Serves from this process until `end`; calls `ready` when it does. Returns the store, still open."""
    from rl_dialog.serving.api import create_app
    from rl_dialog.serving.served import Models

    with listening(host, port) as place:
        store = Store(settings.store)
        server = WebServer(create_app(Models(settings), store), place, drain=settings.drain)
        ready()
        while server.alive() and not end.wait(1.0):
            pass
        server.close()
    return store


def say_ready(
    settings: ServeSettings, url: str, *, store: str, cluster: str | None = None, quiet: bool = False
) -> None:
    """Where the server is, as a line of JSON for scripts and in words for people. `store` is its URL as it
    was given."""
    models = list(settings.models)
    line = {
        "ready": url,
        "api": f"{url}/v1",
        "models": models,
        "needs_key": settings.needs_key,
        "cluster": cluster,
    }
    print(json.dumps(line), flush=True)
    say = Console(quiet=quiet, stderr=True, highlight=False, soft_wrap=True).print
    who = "needs an API key" if settings.needs_key else "open to everyone on this machine"
    say(f"chat page  {url}/{'#key=YOUR_KEY' if settings.needs_key else ''}")
    say(f"API        {url}/v1/chat/completions   models {', '.join(models)}")
    say(f"chats      {shown_store(store)}   {who}")


@dataclass(frozen=True)
class KeyOptions:
    """API keys to make or to take away, in place of serving."""

    new_key: str = ""
    """make an API key of this name, print it with a link to the page (both are shown only now) and return"""
    number: int = 1
    """so many keys at once, called NAME-1, NAME-2, ..."""
    scopes: tuple[str, ...] = ("chat",)
    """what a new key may do: chat, participant, labeller, operator, metrics, or several of them"""
    requests_per_minute: int = 60
    """requests per minute that a new key may send"""
    revoke_key: str = ""
    """take this key away and return"""


def change_keys(options: KeyOptions, url: str, *, page: str) -> dict[str, Any]:
    """{"name", "key", "link" to the page at this address} of a new key, {"keys": [those]} of several; or the
    name that was revoked. Raises UserError for a name that has a key already, or has none."""
    if not options.new_key:
        with _store_of_keys(url) as store:
            store.keys.revoke(options.revoke_key)
        return {"revoked": options.revoke_key}
    at_least(options, number=1)
    names = [options.new_key]
    if options.number > 1:
        names = [f"{options.new_key}-{n}" for n in range(1, options.number + 1)]
    given = {"scopes": options.scopes, "requests_per_minute": options.requests_per_minute}
    with _store_of_keys(url) as store:
        made = {one: store.keys.add(one, **given) for one in names}
    keys = [{"name": one, "key": key, "link": f"{page}/#key={key}"} for one, key in made.items()]
    return {"keys": keys} if options.number > 1 else keys[0]


@contextmanager
def _store_of_keys(url: str) -> Iterator[Store]:
    """The store, whose complaint of a key is one to people."""
    with closing(Store(url)) as store:
        try:
            yield store
        except KeyError as error:
            raise UserError(error.args[0]) from None
