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
    rows: list[Row] = []
    logps: list[np.ndarray] = []
    ids: list[int] = []
    mask: list[bool] = []
    ends: list[int] = []
    earned: list[float] = []
    logp: list[float] = []

    def finish(goes_on: bool) -> None:
        rows.append(
            Row(
                np.asarray(ids, np.int32),
                np.asarray(mask, bool),
                np.asarray(ends, np.int32),
                np.asarray(earned, np.float32),
                goes_on,
            )
        )
        logps.append(np.asarray(logp, np.float32))
        for values in (ids, mask, ends, earned, logp):
            values.clear()

    for reply, reward in zip(spoken, rewards, strict=True):
        if ids and not _begins(reply.prompt, ids):
            finish(True)
        read = reply.prompt[len(ids) :]
        ids += [*read, *reply.ids]
        mask += [False] * len(read) + [True] * len(reply.ids)
        ends.append(len(ids) - 1)
        earned.append(reward)
        logp += reply.logp
    if ids:
        tail = list(next_prompt[len(ids) :]) if truncated and _begins(next_prompt, ids) else []
        ids += tail
        mask += [False] * len(tail)
        finish(truncated)
    return tuple(rows), tuple(logps)


def _begins(prompt: Sequence[int], ids: Sequence[int]) -> bool:
    return len(prompt) >= len(ids) and list(prompt[: len(ids)]) == list(ids)
