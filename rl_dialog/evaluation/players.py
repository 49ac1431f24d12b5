"""Scripted players: a world's own by name, or anybody's, alone or each with a share of the episodes.

A player is made of a seed and maps messages to a reply. One that has `in_world(world)` may ask the world, as
the random mover of games asks which moves are legal: what that returns is asked for replies. Who plays
episode i, and with which luck, depends on the seed and i alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from rl_dialog.data.schema import TEXT, can_be_encoded
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Episode, Table, Watch, play_with
from rl_dialog.evaluation.generation import Message, Reply, stream
from rl_dialog.own import own

Player = Callable[[list[Message]], str]
MakePlayer = Callable[[int], Player]

PERSON = "person"  # whoever sits at the keyboard
LUCK, TURN = 1 << 40, 1 << 41  # streams of an episode that no reply has: a player's own, and who plays


@dataclass(frozen=True)
class Cast:
    """Players by name, and the share of the episodes that each plays."""

    makers: Mapping[str, MakePlayer]
    shares: Mapping[str, float]  # they sum to 1

    def name(self, seed: int, index: int) -> str:
        """Who plays an episode."""
        names = list(self.makers)
        if len(names) == 1:
            return names[0]
        bounds = np.cumsum([self.shares[name] for name in names])
        number = np.random.default_rng(stream(seed, index, TURN)).random()
        return names[min(int(np.searchsorted(bounds, number, side="right")), len(names) - 1)]

    def player(self, seed: int, index: int) -> Player:
        """One that has played nothing yet."""
        return self.makers[self.name(seed, index)](stream(seed, index, LUCK))


def cast_of(wanted: Sequence[str], make_env: Callable[[], Any]) -> Cast:
    """The cast of names, `optimal`, or names with shares, `optimal=1 random=3`; without shares all are equal.
    A name is one of the world's `scripted_players()`, or `module:function` for one's own.

    Raises UserError for an unknown name, and for shares that are none.
    """
    parts = [_split(text) for text in wanted]
    if len({name for name, _ in parts}) < len(parts):
        raise UserError(f"--player: expected each player once, got {' '.join(wanted)}")
    total = sum(share for _, share in parts)
    known = scripted_players(make_env)
    world = getattr(make_env, "__name__", "the world")
    makers = {name: player_maker(name, known, world) for name, _ in parts}
    return Cast(makers, {name: share / total for name, share in parts})


def scripted_players(make_env: Callable[[], Any]) -> Mapping[str, MakePlayer]:
    """The world's own, by name; none where its class brings none."""
    world = make_env if hasattr(make_env, "scripted_players") else make_env()
    return dict(world.scripted_players()) if hasattr(world, "scripted_players") else {}


def _split(text: str) -> tuple[str, float]:
    """A name and its share."""
    name, equals, share = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        number = float(share)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"--player {text}: expected NAME=SHARE with a share above 0, got {share!r}")
    return name, number


def player_maker(name: str, known: Mapping[str, MakePlayer], world: str) -> MakePlayer:
    """What makes the player of a name, one of `known` or module:function. Raises UserError for nobody."""
    if name in known:
        return known[name]
    if ":" in name:
        found = own(name, "player")
        if not callable(found):
            got = type(found).__name__
            raise UserError(f"player {name!r}: expected a class or function made of a seed, got {got}")
        return found
    near = get_close_matches(name, [*known, PERSON], 1)
    other = "person (you, in this terminal), or module:Class for one of your own, made of a seed"
    expected = f"one of {', '.join(known)}, {other}" if known else other
    brings = "" if known else f", and {world} brings no scripted_players()"
    raise UserError(
        f"unknown player {name!r}{brings}: expected {expected}"
        + (f". Did you mean {near[0]}?" if near else "")
    )


class ScriptedPlay:
    """A cast that plays numbered episodes of a world."""

    def __init__(self, make_env: Callable[[], Any], wanted: Sequence[str]) -> None:
        self.make_env, self.cast = make_env, cast_of(wanted, make_env)

    def __call__(
        self, episodes: Sequence[int], seed: int, drawn: Container[int] = (), watch: Watch | None = None
    ) -> list[Episode]:
        """One after the other: to a script a batch is worth nothing. `meta.player` says who played."""
        played = []
        for index in episodes:
            player, name = self.cast.player(seed, index), self.cast.name(seed, index)

            def answer(tables: Sequence[Table], player: Player = player, name: str = name) -> list[Reply]:
                return [scripted_reply(player, name, table) for table in tables]

            how = {"seed": seed, "batch_size": 1, "drawn": drawn, "watch": watch}
            played += play_with(answer, self.make_env, [index], **how)
            played[-1].dialog.meta["player"] = name
        return played


def scripted_reply(player: Player, name: str, table: Table) -> Reply:
    """What a player says next. Raises UserError for what is no text."""
    says = player.in_world(table.env) if hasattr(player, "in_world") else player
    text = says([dict(message) for message in table.messages])
    if not isinstance(text, str):
        raise UserError(f"player {name!r}: expected a reply, a string, got {str(text)[:200]!r}")
    if not can_be_encoded(text):
        raise UserError(f"player {name!r}: expected {TEXT} as its reply, got {text[:200]!r}")
    return Reply(text, (), True)
