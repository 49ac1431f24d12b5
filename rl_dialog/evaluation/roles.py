"""Worlds of several roles: a conversation that several players share, and who plays which role.

A role sees the conversation its own way (envs/text_world.py): what it said is the assistant's. So an episode
becomes one Dialog per role.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rl_dialog.data.schema import Dialog, View, end_of, failure_of
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Answers, Episode, Table, Tables, Watch, in_parts
from rl_dialog.evaluation.generation import Decoding, Reply, load_for_decoding, stream
from rl_dialog.evaluation.players import LUCK, PERSON, Player, player_maker, scripted_players, scripted_reply
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.device import named_device

OTHERS = "others"  # in `--roles`: every role that is not named
Answer = Callable[[Sequence[Any]], Sequence[Reply]]  # what is said next at each of several tables


class SharedTable(Table):
    """One running conversation of several roles."""

    def __init__(
        self, *given: Any, who: Callable[[SharedTable, str], str], purpose: str = "--roles", **more: Any
    ) -> None:
        """who: the name of whoever plays a role at this table. purpose: what needs several roles."""
        super().__init__(*given, **more)
        if self.role is None and self.failed is None:
            raise UserError(
                f"{self.name}: expected a world of several roles for {purpose}, whose info names the one "
                "that speaks (envs/text_world.py), got one of a single player; "
                "textarena:NAME?opponent=self is a world of several"
            )
        self.who, self.first = who, self.role or "assistant"
        self.views = {self.first: View(list(self.messages))}
        self.said: dict[str, list[Reply]] = {}
        self.turns: dict[str, list[int]] = {}  # of each role: how many replies there were before its own
        self.spoke = ""  # the role of the last reply

    def player_of(self, role: str) -> str:
        """The name of whoever plays it."""
        return self.who(self, role)

    def step(self, reply: Reply) -> None:
        """Says the reply of whose turn it is."""
        messages, reward, self.terminated, truncated, info = self.answer_to(reply.text)
        spoke, heard = self.role, info.get("role", self.role)
        if heard is None:
            raise self.broken("text as info['role'] of step", "None")
        said = {"role": "assistant", "content": reply.text}
        view, where = self.views[spoke], f"{self.name}, {self.where}"
        view.say(messages if heard == spoke else [*view.messages, said], where)
        if heard != spoke:
            self.views.setdefault(heard, View()).see(messages, where)
        for role, seen in info.get("views", {}).items():
            self.views.setdefault(role, View()).see(seen, where)
        self.failed, self.told = failure_of(info), self.told | info.get("meta", {})
        for role, value in (reward if isinstance(reward, Mapping) else {spoke: reward}).items():
            self.views.setdefault(role, View()).earn(None if self.failed is not None else value)
        self.spoke = spoke
        self.said.setdefault(spoke, []).append(reply)
        self.turns.setdefault(spoke, []).append(len(self.replies))
        self.role, self.messages = heard, self.views[heard].messages
        self.replies.append(reply)
        last = len(self.replies) >= self.max_turns
        self.finished = self.terminated or truncated or last or self.failed is not None
        self.drawings += [self.drawing()] if self.draws else []

    def episodes(self) -> list[Episode]:
        """What became of it, as each role saw it that spoke, in the order of their names."""
        spoke = {role: view for role, view in sorted(self.views.items()) if view.rewards}
        earned = [value for view in self.views.values() for value in (*view.rewards.values(), view.early)]
        end = end_of(earned, terminated=bool(self.terminated), failed=self.failed is not None)
        seen = spoke or {self.first: self.views[self.first]}
        return [self._episode(role, view, end) for role, view in seen.items()]

    def _episode(self, role: str, view: View, end: str) -> Episode:
        meta = self.told | {"episode": self.index, "seed": self.seed, "end": end, "role": role}
        meta |= {"player": self.player_of(role)} | ({} if self.failed is None else {"failed": self.failed})
        dialog = Dialog(
            id=f"{self.name}-{self.index:06d}-{role}",
            messages=view.marked(),
            source=self.name,
            truncated=not self.terminated,
            meta=meta,
        )
        drawn = [self.drawings[turn] for turn in (*self.turns.get(role, ()), -1)] if self.drawings else []
        return Episode(self.index, dialog, self.said.get(role, []), end, drawn, opens=role == self.first)


def roles_of(wanted: Sequence[str], make_env: Callable[[], Any]) -> dict[str, str]:
    """Role -> who plays it, from `player_0=runs/ilql`: a scripted player of the world, module:Class, `person`
    or a checkpoint. Raises UserError for who is nobody."""
    found: dict[str, str] = {}
    known = scripted_players(make_env)
    for text in wanted:
        role, equals, who = text.partition("=")
        if not equals or not role or not who or role in found:
            expected = "ROLE=WHO, each role once: player_0=runs/ilql player_1=random"
            raise UserError(f"--roles: expected {expected}, got {text!r}")
        if who not in (*known, PERSON) and not Path(who).exists():
            if ":" not in who:
                near = get_close_matches(who, [*known, PERSON], 1)
                players = ", ".join([*known, PERSON])
                expected = f"one of {players}, module:Class or the folder of a checkpoint"
                hint = f". Did you mean {near[0]}?" if near else ""
                raise UserError(f"--roles {text}: expected {expected}, got {who!r}{hint}")
            player_maker(who, known, getattr(make_env, "__name__", "the world"))
        found[role] = who
    if sum(who == PERSON for who in found.values()) > 1:
        raise UserError(f"--roles: expected one person at the keyboard, got {' '.join(wanted)}")
    return found


@dataclass
class RolePlay:
    """Plays numbered episodes of a world of several roles, each role by its own player."""

    make_env: Callable[[], Any]
    roles: Mapping[str, str]  # role -> who plays it
    decoding: Decoding
    device: str = "cpu"
    folder: str = "."  # that checkpoints are named from; workers start in another one
    person: Callable[[SharedTable], str] | None = None  # whoever sits at the keyboard
    policies: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # with their tokenizers, once loaded

    def __call__(
        self,
        episodes: Sequence[int],
        seed: int,
        batch_size: int,
        drawn: Container[int] = (),
        watch: Watch | None = None,
    ) -> list[Episode]:
        """As each role saw them, one after the other; `meta` says `role` and `player`."""
        answers: dict[str, Answer] = {}

        def say(part: Sequence[SharedTable], who: str) -> Sequence[Reply]:
            if who not in answers:
                answers[who] = self._answer(who, seed, min(batch_size, len(episodes)))
            return answers[who](part)

        def answer(tables: Sequence[SharedTable]) -> list[Reply]:
            return in_parts(tables, lambda table: table.player_of(table.role), say)

        tables = Tables(self.make_env, seed, batch_size, drawn, watch=watch)
        played = replace(tables, kind=self._table).play(answer, episodes, SharedTable.episodes)
        return [each for roles in played for each in roles]

    def _table(self, *given: Any, **more: Any) -> SharedTable:
        return SharedTable(*given, who=self._who, **more)

    def _who(self, table: SharedTable, role: str) -> str:
        who = self.roles.get(role) or self.roles.get(OTHERS)
        if who is None and table.failed is None:
            named = " ".join(f"{known}={who}" for known, who in self.roles.items())
            expected = f"who plays {role!r} of {table.name}, or {OTHERS}=WHO"
            raise UserError(f"--roles: expected {expected}, got {named}")
        return who or ""

    def _answer(self, who: str, seed: int, rows: int) -> Answer:
        """What answers for a player."""
        known = scripted_players(self.make_env)
        if who == PERSON:
            return lambda tables: [Reply(self.person(table), (), True) for table in tables]
        if who in known or not Path(self.folder, who).exists():
            return ScriptedRoles(who, player_maker(who, known, "the world"), seed)
        how = {"seed": seed, "rows": rows, "keep_caches": True}
        return Answers(*self._policy(who), self.decoding, **how)

    def _policy(self, place: str) -> tuple[Any, Any]:
        if place not in self.policies:
            directory = resolve(Path(self.folder, place))
            policy = load_for_decoding(directory).to(named_device(self.device))
            self.policies[place] = policy, load_tokenizer(directory)
        return self.policies[place]


class ScriptedRoles:
    """A scripted player at many tables, made anew for each of them and for each role that it plays there."""

    def __init__(self, name: str, make: Callable[[int], Player], seed: int) -> None:
        self.name, self.make, self.seed = name, make, seed
        self.players: dict[tuple[int, str], Player] = {}

    def __call__(self, tables: Sequence[SharedTable]) -> list[Reply]:
        """What is said next at each table."""
        return [scripted_reply(self._player(table), self.name, table) for table in tables]

    def _player(self, table: SharedTable) -> Player:
        key = table.index, table.role
        if key not in self.players:
            luck = LUCK + zlib.crc32(table.role.encode())
            self.players[key] = self.make(stream(self.seed, table.index, luck))
        return self.players[key]
