"""What a server is told: its models, its store, what its page says, and how much it takes on at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rl_dialog.config import at_least
from rl_dialog.data.database import SECRET, database_url, shown_url
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError


@dataclass(frozen=True)
class ServerOptions:
    """What the page says, and how much the server takes on at a time."""

    title: str = "Chat"
    """heading of the chat page"""
    consent: str = (
        "Your messages and the replies are stored and used to train and to study chat bots. Please do not "
        "write anything private."
    )
    """what a user of the page agrees to before the first message; it is stored with the chat"""
    min_messages: int = 3
    """messages of a user before the page asks for ratings"""
    max_tokens: int = 0
    """longest reply in tokens unless the request says otherwise; 0 is what the model's context leaves"""
    most_tokens: int = 0
    """longest reply in tokens that a request may ask for; 0 is what the model's context leaves"""
    max_prompt_length: int = 0
    """longest prompt in tokens, older messages are left out first; 0 is the model's context, and of one that
    was made here what it has learned to read"""
    slots: int = 16
    """replies in one running batch, per model and replica"""
    kept: int = 16
    """ended conversations whose keys and values stay in memory for their next turn"""
    queue: int = 256
    """requests that may wait for a slot; more are answered with 429 and Retry-After"""
    piece: int = 512
    """prompt tokens read between two tokens of the replies under way"""
    max_body_bytes: int = 1 << 20
    """longest request in bytes"""
    request_timeout: float = 300.0
    """seconds from a request to the end of its reply"""
    drain: float = 60.0
    """seconds that the requests of a replaced model, or of a server that ends, have to finish"""
    threads: int = 0
    """threads of torch per replica; 0 leaves it to torch"""
    device: str = "auto"
    """where the models run: cpu, cuda, which sets a GPU aside for each replica, or auto: a GPU if there
    is one"""


@dataclass(frozen=True)
class ServeSettings(ServerOptions):
    """Everything a server needs to know: plain values, which travel to replicas and stand in a Serve
    config."""

    models: dict[str, str] = field(
        default_factory=dict
    )  # name -> run folder, checkpoint directory or hub name
    split: dict[str, float] = field(default_factory=dict)  # name -> weight in draws for new chats
    store: str = "sqlite:///chats.db"  # URL of the database with chats, votes and keys
    needs_key: bool = True  # off: everyone who reaches the server may use it
    apart: bool = False  # each engine in a process of its own

    def changed(self) -> dict[str, Any]:
        """The settings that are not the usual ones."""
        return {name: value for name, value in vars(self).items() if value != getattr(ServeSettings(), name)}


def settings_from(
    options: ServerOptions,
    *,
    models: Sequence[str],
    split: Sequence[str],
    store: str,
    public_host: str = "",
    shown: bool,
) -> ServeSettings:
    """The settings of a server whose models and weights are given as NAME=VALUE.

    public_host: the address where other machines reach it. shown: others can read its settings, as on Ray's
    dashboard. Raises UserError for names without a value, a password that would be shown, and an open server
    that others reach.
    """
    with closing(Store(store)) as chats:
        keys = chats.keys.all()
    needs_key = any(key.revoked is None for key in keys)
    if not needs_key and public_host:
        name = shown_store(store)
        raise UserError(
            f"host {public_host}: expected API keys before others can reach the server, there are none in "
            f"{name}: make one with `python -m pipelines.serve --store {name} --new_key NAME`, or serve this "
            "machine alone with --host 127.0.0.1"
        )
    weights = {name: _number(weight, name) for name, weight in _named("split", split).items()}
    places = {name: _absolute(place) for name, place in _named("models", models).items()}
    given = {field.name: getattr(options, field.name) for field in fields(ServerOptions)}
    return ServeSettings(
        **given, models=places, split=weights, store=_url(store, shown=shown), needs_key=needs_key
    )


def check_settings(settings: ServeSettings) -> None:
    """Raises UserError for what cannot be served, before anything is loaded."""
    if not settings.models:
        raise UserError("expected at least one model, e.g. --models ilql=runs/ilql")
    at_least(settings, max_tokens=0, most_tokens=0, max_prompt_length=0, threads=0, drain=0)
    at_least(settings, max_body_bytes=1, request_timeout=0.1)
    for name, weight in settings.split.items():
        if name not in settings.models:
            raise UserError(f"split: expected names of models ({', '.join(settings.models)}), got {name!r}")
        if not 0 <= weight < float("inf"):
            raise UserError(f"split: expected a weight of at least 0 for {name!r}, got {weight}")
    if settings.split and not sum(settings.split.values()):
        raise UserError("split: expected a weight above 0 for at least one model")


def shown_store(store: str) -> str:
    """The URL of a store without its password."""
    return shown_url(database_url(store))


def _url(store: str, *, shown: bool) -> str:
    """The store's URL with an absolute path; a password must not be in one that is shown."""
    url = database_url(store)
    if shown and (url.password or set(SECRET) & set(url.query)):
        where = "in PGPASSWORD or ~/.pgpass on every machine, not in the URL"
        raise UserError(f"store: expected the password {where} {shown_store(store)}, which Ray shows")
    return url.render_as_string(hide_password=False)


def _named(flag: str, values: Sequence[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not (name and equals and rest) or name in named:
            example = f"{Path(value).name}={value}" if flag == "models" else f"{value}=1"
            hint = "" if equals else f", such as {example}"
            raise UserError(f"--{flag}: expected NAME=VALUE with a name of its own each, got {value!r}{hint}")
        named[name] = rest
    return named


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--split: expected a number as the weight of {name}, got {text!r}") from None


def _absolute(place: str) -> str:
    """The checkpoint that a run folder means now, as an absolute path; a hub name stays.

    Every replica has this one, and a later one is another.
    """
    if not Path(place).exists():
        return place
    from rl_dialog.models.checkpoint import resolve  # it imports transformers, which keys need not wait for

    return str(Path(resolve(place)).resolve())
