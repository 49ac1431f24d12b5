"""Logs of scripted games: plain, branching and adversarial ones; and pairs of guesses for Q-rank.

Every game depends on the seed and its number alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from envs.wordle.policies import POLICIES, Optimal, RandomMixture, Repeat, Wrong, game_chance, play, play_on
from envs.wordle.rules import State, first_guesses, messages_of
from envs.wordle.words import Words, load_words
from rl_dialog.errors import UserError

ADVERSARIAL, SUBOPTIMAL = 5, 5  # games beside each expert's in the adversarial set


@dataclass(frozen=True)
class Logged:
    """A game that is over, and whose it was."""

    state: State
    policy: str
    meta: dict[str, Any] = field(default_factory=dict)


def plain(name: str, words: Words, seed: int) -> Iterator[Logged]:
    """Games of one of `POLICIES`, without end."""
    for index in count():
        yield Logged(play(words, name, seed=seed, index=index), name, {"group": f"{seed}-{index}"})


def branching(words: Words, seed: int, *, branches: int = 1) -> Iterator[Logged]:
    """Games of the expert, each followed by `branches` games from each of its beginnings on (the empty one
    too) that go on with words that cannot be right. `start`: the guesses that such a game took over."""
    for index in count():
        chance, group = game_chance(seed, index), {"group": f"{seed}-{index}"}
        expert = play_on(words, Optimal(words, chance), chance, State(words.every))
        yield Logged(expert, "optimal", group)
        for start in range(len(expert.guesses)):
            begun = first_guesses(words, expert, start)
            for _ in range(branches):
                end = play_on(words, Wrong(words, chance), chance, begun)
                yield Logged(end, "wrong", group | {"start": start})


def adversarial(words: Words, seed: int) -> Iterator[Logged]:
    """The set on which multi-step and single-step value learning part.

    A round is one game of the expert; where that took three guesses or more, five that begin with its first
    two guesses and then only repeat them (return -6); and five of a mediocre player. Averaged over the data
    the expert's opening looks worse than a mediocre one; only who sees that one may go on as the expert did
    knows better.
    """
    for index in count():
        chance, group = game_chance(seed, index), {"group": f"{seed}-{index}"}
        start = State(words.every)
        expert = play_on(words, Optimal(words, chance), chance, start)
        yield Logged(expert, "optimal", group)
        if len(expert.guesses) >= 3:
            begun = first_guesses(words, expert, 2)
            for _ in range(ADVERSARIAL):
                end = play_on(words, Repeat(words, chance), chance, begun)
                yield Logged(end, "adversarial", group | {"start": 2})
        for _ in range(SUBOPTIMAL):
            end = play_on(words, RandomMixture(words, chance, 0.5), chance, start)
            yield Logged(end, "suboptimal", group)


KINDS: dict[str, Callable[[Words, int], Iterator[Logged]]] = {
    "branching": branching,
    "adversarial": adversarial,
    **{name: partial(plain, name) for name in POLICIES},
}


def write_logs(
    path: str | Path, *, dialogs: int, seed: int, kind: str = "mixture", words: Words | None = None
) -> dict[str, Any]:
    """Writes so many games of one of `KINDS` as JSON lines of Dialogs, with `reward` on every guess. Returns
    counts and mean returns, of all and by policy. Raises UserError for an unknown kind."""
    if kind not in KINDS:
        raise UserError(f"kind of logs: expected one of {', '.join(KINDS)}, got {kind!r}")
    games = KINDS[kind](words or load_words(), seed)
    return write_games(path, islice(games, dialogs), name=f"wordle-{kind.replace(' ', '_')}-{seed}")


def write_games(path: str | Path, games: Iterable[Logged], *, name: str) -> dict[str, Any]:
    """Writes games as JSON lines of Dialogs called `name` and a number; returns what they are like."""
    from rl_dialog.data.schema import Dialog, write_jsonl  # here: it brings pyarrow, which no game needs

    returns: dict[str, list[int]] = {}

    def dialog(number: int, game: Logged) -> Dialog:
        returns.setdefault(game.policy, []).append(game.state.total)
        return Dialog(
            id=f"{name}-{number:06d}",
            messages=messages_of(game.state, rewards=True),
            source="wordle",
            meta={"policy": game.policy} | game.meta,
        )

    write_jsonl((dialog(*numbered) for numbered in enumerate(games)), path)
    every = [total for totals in returns.values() for total in totals]
    by_policy = {policy: _about(totals) for policy, totals in returns.items()}
    return {"path": str(path), **_about(every), "policies": by_policy}


def _about(returns: list[int]) -> dict[str, Any]:
    mean = sum(returns) / len(returns) if returns else None
    return {"dialogs": len(returns), "mean_return": mean if mean is None else round(mean, 4)}


def rank_pairs(words: Words, seed: int) -> Iterator[dict[str, Any]]:
    """Two guesses in one conversation, of which the first is the expert's, for `evaluation/q_rank.py`:

    initial   in the beginning, the expert's against a mediocre player's
    branch    after two guesses of an expert's game, its third against one of the two repeated

    Where the mediocre player happens to say the expert's word there is no pair. Raises UserError for a
    vocabulary of one word, where it always does.
    """
    if len(words) < 2:
        raise UserError(f"pairs: expected a vocabulary of at least two words, got {', '.join(words.words)}")
    for index in count():
        chance, start = game_chance(seed, index), State(words.every)
        expert = play_on(words, Optimal(words, chance), chance, start)
        other = RandomMixture(words, chance, 0.5)(start)
        if other != expert.guesses[0]:
            yield _pair("initial", start, expert.guesses[0], other)
        if len(expert.guesses) >= 3:
            begun = first_guesses(words, expert, 2)
            yield _pair("branch", begun, expert.guesses[2], Repeat(words, chance)(begun))


def _pair(kind: str, state: State, better: str, worse: str) -> dict[str, Any]:
    return {"kind": kind, "messages": messages_of(state), "better": better, "worse": worse}


def write_pairs(path: str | Path, *, pairs: int, seed: int, words: Words | None = None) -> dict[str, Any]:
    """Writes so many of `rank_pairs` as JSON lines; returns how many there are of each kind. Raises UserError
    where no file can be made."""
    found = list(islice(rank_pairs(words or load_words(), seed), pairs))
    try:
        Path(path).write_text("".join(json.dumps(pair) + "\n" for pair in found), encoding="utf-8")
    except OSError as error:
        expected = "expected a file in a folder that is there"
        raise UserError(f"{path}: {expected}, got: {error.strerror}") from error
    return {"path": str(path), "pairs": dict(Counter(pair["kind"] for pair in found))}
