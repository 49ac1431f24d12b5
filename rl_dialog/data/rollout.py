"""Episodes as they were sampled: the ids that a policy read and drew, never a text rendered anew.

    reply 1   read  <u> hi <a>                         drew  a1 a2 <end>
    reply 2   read  <u> hi <a> a1 a2 <end> <u> ? <a>   drew  b1 b2            cut off: no end was drawn
    row             <u> hi <a> a1 a2 <end> <u> ? <a> b1 b2
    trained          .   .  .   1  1   1    .  .  .   1  1

What a policy read before a reply begins, most often, with all that it read and drew before: then both stand
in one row. Where it does not (a template that rewrites earlier turns, ids that a text gives again as others,
old messages that were left out), the reply begins a row of its own behind what was really read. An end of
turn that the template adds behind a reply that was cut off is something read, not something drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_dialog.data.tokenize import Row


@dataclass(frozen=True)
class Spoken:
    """One reply in ids."""

    prompt: tuple[int, ...]  # what was read
    ids: tuple[int, ...]  # what was drawn, the end of turn included where it was drawn
    logp: tuple[float, ...]  # log-probability of each under the distribution that it was drawn from
    latent_seed: int | None = None  # that the reply's latent was drawn with, by a policy that has latents


@dataclass(frozen=True)
class Rollout:
    """One episode. A row whose conversation goes on after it is `truncated`, as any other Row."""

    episode: int
    group: int  # episodes of one group begin alike
    rows: tuple[Row, ...]
    logp: tuple[np.ndarray, ...]  # of each row (n,) float32: `Spoken.logp` of its decisions
    total: float | None  # the undiscounted return; None where the episode failed or was not scored
    role: str = ""  # that the policy played, in a world of several
    components: Mapping[str, float] = field(default_factory=dict)  # sums of the rewards that were named
    # Of rewards that are weighed and added up: the weight of each by name, and (R,) what each reply earned
    parts: Mapping[str, tuple[float, np.ndarray]] = field(default_factory=dict)
    staleness: int = 0  # rounds between the weights that played and those that learn


def rollout_rows(
    spoken: Sequence[Spoken],
    rewards: Sequence[float],
    *,
    truncated: bool,
    next_prompt: Sequence[int] = (),
) -> tuple[tuple[Row, ...], tuple[np.ndarray, ...]]:
    """Rows and log-probabilities of an episode's replies in their order, with what each earned (NaN:
    unknown).

    `next_prompt` is what would have been read next where the episode was cut off: a value stands for what
    follows it.
    """
    finished: list[tuple[Row, np.ndarray]] = []
    row = _Growing()
    for reply, reward in zip(spoken, rewards, strict=True):
        if row.ids and not _begins(reply.prompt, row.ids):
            finished.append(row.finished(truncated=True))
            row = _Growing()
        row.read(reply.prompt[len(row.ids) :])
        row.draw(reply, reward)
    if row.ids:
        if truncated and _begins(next_prompt, row.ids):
            row.read(next_prompt[len(row.ids) :])
            next_prompt = ()
        finished.append(row.finished(truncated, next_prompt if truncated else ()))
    return tuple(row for row, _ in finished), tuple(logp for _, logp in finished)


@dataclass
class _Growing:
    """A row to which replies are added, each behind what was read before it."""

    ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    latent_seeds: list[int] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.drawn += [False] * len(ids)

    def draw(self, reply: Spoken, reward: float) -> None:
        self.ids += reply.ids
        self.drawn += [True] * len(reply.ids)
        self.ends.append(len(self.ids) - 1)
        self.earned.append(reward)
        self.logp += reply.logp
        self.latent_seeds += [] if reply.latent_seed is None else [reply.latent_seed]

    def finished(self, truncated: bool, next_prompt: Sequence[int] = ()) -> tuple[Row, np.ndarray]:
        """The row, and the log-probabilities of its decisions. next_prompt: the state it leads to, where that
        does not begin with it."""
        row = Row(
            np.asarray(self.ids, np.int32),
            np.asarray(self.drawn, bool),
            np.asarray(self.ends, np.int32),
            np.asarray(self.earned, np.float32),
            truncated,
            next_prompt=np.asarray(next_prompt, np.int32),
            latent_seeds=np.asarray(self.latent_seeds, np.int64),
        )
        return row, np.asarray(self.logp, np.float32)


def _begins(prompt: Sequence[int], ids: Sequence[int]) -> bool:
    return len(prompt) >= len(ids) and list(prompt[: len(ids)]) == list(ids)
