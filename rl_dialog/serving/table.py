"""A text world in the terminal: an episode as it goes on, and a person who plays it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from rl_dialog.data.schema import said
from rl_dialog.evaluation.drawings import plain, uncoloured
from rl_dialog.evaluation.episodes import Episode, Table, play_with
from rl_dialog.evaluation.generation import Reply
from rl_dialog.evaluation.players import PERSON
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
