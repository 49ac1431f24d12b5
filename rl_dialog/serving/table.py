"""A text world in the terminal: an episode as it goes on, and a person who plays it, alone or one of its
roles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from rl_dialog.data.schema import said
from rl_dialog.evaluation.drawings import plain, uncoloured
from rl_dialog.evaluation.episodes import Episode, Table, play_with
from rl_dialog.evaluation.generation import Reply
from rl_dialog.evaluation.players import PERSON
from rl_dialog.evaluation.roles import SharedTable
from rl_dialog.serving.terminal import typed_lines


class Shown:
    """Shows a table when it begins and after each reply: what was said, the world's drawing, the reward."""

    def __init__(self, *, echo: bool = True, say: Callable[[str], None] | None = None) -> None:
        """echo: show the replies too, which a person has just typed."""
        self.echo, self.say, self.seen = echo, say or (lambda text: print(text, flush=True)), 0
        self.coloured = sys.stdout.isatty()

    def __call__(self, table: Table) -> None:
        if not table.replies:
            self.seen = 0
            self.say(f"\nepisode {table.index}")
        for place in range(self.seen, len(table.messages)):
            message = table.messages[place]
            if self.echo or place not in table.rewards:
                self.say(f"{message['role']:>9}: {plain(said(message))}")
        self.seen = len(table.messages)
        if drawing := table.drawing():
            self.say(drawing if self.coloured else uncoloured(drawing))
        if table.replies:
            reward = list(table.rewards.values())[-1][0]
            self.say("not scored" if reward is None else f"[reward {reward:g}]")
        if table.finished:
            self.say(_ended(table.episode()))


class ShownRoles:
    """Shows a table of several roles: each reply with the role that said it, the world's drawing, and in the
    end what each role earned."""

    def __init__(self) -> None:
        self.coloured = sys.stdout.isatty()

    def __call__(self, table: SharedTable) -> None:
        reply = f"{table.spoke}: {plain(table.replies[-1].text)}" if table.replies else ""
        print(reply or f"\nepisode {table.index}", flush=True)
        if drawing := table.drawing():
            print(drawing if self.coloured else uncoloured(drawing), flush=True)
        if table.finished:
            _show_ends(table)


class Typist:
    """Whoever sits at the keyboard in a world of several roles: sees what their role was told since it spoke
    last, and types its reply."""

    def __init__(self) -> None:
        self.lines, self.seen = typed_lines("you> "), {}

    def __call__(self, table: SharedTable) -> str:
        """What is typed. Raises EOFError where the input is at its end."""
        self._tell(table, table.role)
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        self.seen[table.role] += 1  # their own words stand there already
        return line.strip()

    def watch(self, table: SharedTable) -> None:
        """Says how an episode begins and ends."""
        if not table.replies:
            self.seen = {}
            print(f"\nepisode {table.index}", flush=True)
        if table.finished:
            for role in table.views:
                if table.player_of(role) == PERSON:
                    self._tell(table, role)
            _show_ends(table)

    def _tell(self, table: SharedTable, role: str) -> None:
        messages = table.views[role].messages
        for message in messages[self.seen.get(role, 0) :]:
            if message["role"] != "assistant":
                print(f"{role} is told: {plain(said(message))}", flush=True)
        self.seen[role] = len(messages)


def _show_ends(table: SharedTable) -> None:
    for episode in table.episodes():
        print(f"{episode.dialog.meta['role']}: {_ended(episode)}", flush=True)


def _ended(episode: Episode) -> str:
    why = episode.dialog.meta.get("failed")
    told = "no return" if episode.total is None else f"return {episode.total:g}"
    return f"{episode.end}{f' ({why})' if why else ''}: {told} after {len(episode.replies)} replies"


def play_person(make_env: Callable, episodes: Sequence[int], seed: int, drawn: Sequence[int] = ()
                ) -> Iterator[Episode]:  # fmt: skip
    """Episodes of whoever types, one after the other, until the input ends or Ctrl-C comes: the one that is
    running then does not count."""
    lines, shown = typed_lines("you> "), Shown(echo=False)

    def answer(tables: Sequence[Table]) -> list[Reply]:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return [Reply(line.strip(), (), True) for _ in tables]

    for index in episodes:
        try:
            (episode,) = play_with(
                answer, make_env, [index], seed=seed, batch_size=1, drawn=drawn, watch=shown
            )
        except (EOFError, KeyboardInterrupt):
            print("\nno more replies: this episode does not count", flush=True)
            return
        episode.dialog.meta["player"] = PERSON
        yield episode


def person_plays_roles(
    play: Callable[..., list[Episode]],
    episodes: Sequence[int],
    seed: int,
    drawn: Sequence[int],
    typist: Typist,
) -> Iterator[Episode]:
    """The same where a person plays some of the roles: `play` is a RolePlay that asks `typist`."""
    for index in episodes:
        try:
            played = play([index], seed, 1, drawn, typist.watch)
        except (EOFError, KeyboardInterrupt):
            print("\nno more replies: this episode does not count", flush=True)
            return
        yield from played
