"""Episodes to learn from: groups that begin alike, played by the policy as it is, and logged as Dialogs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.rollout import Rollout, rollout_rows
from rl_dialog.data.schema import Dialog, end_of
from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.contexts import Contexts
from rl_dialog.evaluation.episodes import Answers, Episode, Table, Tables, play_episodes, return_figures
from rl_dialog.evaluation.generation import Decoding, Reply, prompt_limits
from rl_dialog.evaluation.openings import WORLD, Openings, RewardMix
from rl_dialog.evaluation.roles import SharedTable
from rl_dialog.evaluation.self_play import COPY, LEARNER, Opponent, Sides
from rl_dialog.models.policy import Policy
from rl_dialog.training.versions import Versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Judge = Callable[[Dialog], None]  # gives each reply its reward, once the conversation is over
# (a round's episodes before they are judged, who played them, its tokenizer, step)
Watch = Callable[[Sequence[Episode], Policy, "PreTrainedTokenizerFast", int], None]
Source = Callable[[Policy, int], Sequence[Episode]]  # (policy, step) -> the step's episodes, in order


@dataclass(frozen=True)
class Playing:
    """How whole groups of episodes are played, by this process or by an actor: what is played follows from
    the numbers of the episodes and the weights, whoever plays."""

    make_env: Callable[[], Any]
    decoding: Decoding
    group_size: int
    seed: int
    batch_size: int = 128
    self_play: bool = False
    learner_role: str = ""
    threads: int = 1  # of torch: the last digits of what is computed depend on them

    def units(self, episodes: Sequence[int]) -> list[list[int]]:
        """The episodes that are played side by side: whole groups, as many as `batch_size` holds, at least
        one."""
        size = max(1, self.batch_size // self.group_size) * self.group_size
        return [list(episodes[start : start + size]) for start in range(0, len(episodes), size)]

    def __call__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerFast,
        episodes: Sequence[int],
        opponent: Policy | None = None,
    ) -> list[Episode]:
        """The numbered episodes of a unit; in self-play as each role saw them. `opponent` plays against the
        policy; without it the policy is its own copy."""
        with with_threads(self.threads):
            return self._play(policy, tokenizer, episodes, opponent)

    def _play(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerFast,
        episodes: Sequence[int],
        opponent: Policy | None,
    ) -> list[Episode]:
        size = min(self.batch_size, len(episodes))
        policies = {LEARNER: policy, COPY: opponent or policy}
        how = {"seed": self.seed, "rows": size, "keep_caches": True, "recorded": True}
        speakers = {
            player: Answers(speaking, tokenizer, self.decoding, **how)
            for player, speaking in policies.items()
        }
        tables = Tables(self.make_env, self.seed, self.batch_size, group_size=self.group_size)
        if not self.self_play:
            return tables.play(speakers[LEARNER], episodes, Table.episode)

        sides = Sides(opponent is not None, self.learner_role)
        kind = partial(SharedTable, who=sides, purpose="self-play")

        def answer(together: Sequence[SharedTable]) -> list[Reply]:
            said: dict[int, Reply] = {}
            for player, speaker in speakers.items():
                part = [table for table in together if table.player_of(table.role) == player]
                said |= {table.index: reply for table, reply in zip(part, speaker(part), strict=True)}
            return [said[table.index] for table in together]

        played = replace(tables, kind=kind).play(answer, episodes, sides.episodes)
        return [each for roles in played for each in roles]


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """So many threads of torch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Rollouts:
    """Plays the episodes of a step of a run: `groups` groups of `group_size` in one world.

    Group g of step k has the conversation partner number k * groups + g of `seed`, whatever is played beside
    it and however often it is played again; within a group only what is drawn differs. In a world of several
    roles a group is compared role by role.
    """

    make_env: Callable[[], Any]
    decoding: Decoding
    groups: int
    group_size: int
    seed: int
    folder: Path | None = None  # where each step's Dialogs go, a file of JSON lines each
    batch_size: int = 128
    self_play: bool = False
    learner_role: str = ""
    threads: int = 1  # that play, of torch
    judge: Judge | None = None  # rewards that are learned from instead of the world's
    watch: Watch | None = None  # of a judge that learns from what is played
    versions: Versions | None = None  # of the policy, where older ones play
    opponent: Opponent | None = None  # the copy that plays the other roles; None: the policy plays them all
    source: Source | None = None  # who plays, if not this process

    @property
    def playing(self) -> Playing:
        """How units of episodes are played."""
        more = {"self_play": self.self_play, "learner_role": self.learner_role, "threads": self.threads}
        how = (self.make_env, self.decoding, self.group_size, self.seed, self.batch_size)
        return Playing(*how, **more)

    def __call__(self, policy: Policy, tokenizer: PreTrainedTokenizerFast, step: int) -> list[Rollout]:
        """The episodes of step `step`, counted from 0. Raises UserError for a world that begins differently
        for the same seed."""
        played = self.episodes(policy, tokenizer, step)
        _expect_groups_that_begin_alike(played, self.group_size)
        if self.watch is not None:
            self.watch(played, policy, tokenizer, step)
        judged(played, self.judge)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [self._dialog(episode, step) for episode in played]
            write_text_atomically(self.folder / f"step-{step + 1:06d}.jsonl", "".join(lines))
        limits = prompt_limits(policy, self.decoding)
        mine = [each for each in played if each.dialog.meta.get("player") != COPY]
        if not mine:
            raise UserError(
                f"step {step}: expected episodes in which the policy speaks, got {len(played)} in which only "
                "its copy did: leave out --learner_role, or set --opponent_lag 0"
            )
        roles = sorted({each.dialog.meta.get("role", "") for each in mine})
        return [self._rollout(each, tokenizer, limits, roles, step) for each in mine]

    def units(self, step: int) -> list[list[int]]:
        """The numbers of the episodes of a step, as they are handed out."""
        count = self.groups * self.group_size
        return self.playing.units(range(step * count, (step + 1) * count))

    def episodes(self, policy: Policy, tokenizer: PreTrainedTokenizerFast, step: int) -> list[Episode]:
        """What is played in step `step`."""
        if self.source is not None:
            return list(self.source(policy, step))
        other = None
        if self.opponent is not None:
            version = self.versions.opponent(step)
            other = self.opponent.at(version, self.versions.kept[version])
        playing = self.playing
        return [each for unit in self.units(step) for each in playing(policy, tokenizer, unit, other)]

    def _dialog(self, episode: Episode, step: int) -> str:
        dialog = episode.dialog
        meta = dialog.meta | {"step": step + 1, "partner": episode.index // self.group_size}
        if isinstance(self.make_env, Openings):  # both sides of all talks that begin alike stay in one split
            meta["group"] = f"{dialog.source}: {dialog.messages[0]['content'][:200]}"
        elif not isinstance(self.make_env, Contexts):  # `prepare` knows them by what the user said
            # a partner's episodes stay in one split, and so does whatever the world puts together
            meta.setdefault("group", f"{dialog.source}-{meta['seed']}")
        return replace(dialog, meta=meta).to_json() + "\n"

    def _rollout(
        self,
        episode: Episode,
        tokenizer: PreTrainedTokenizerFast,
        limits: dict[str, int],
        roles: list[str],
        step: int,
    ) -> Rollout:
        dialog, total = episode.dialog, episode.total
        rewards = [dialog.messages[i]["reward"] for i in dialog.replies]
        rows, logp = rollout_rows(
            [reply.spoken for reply in episode.replies],
            [float("nan") if reward is None else reward for reward in rewards],
            truncated=dialog.truncated,
            next_prompt=(encode_prompt(dialog.messages, tokenizer, **limits) if dialog.truncated else ()),
        )
        role = dialog.meta.get("role", "")
        group = episode.index // self.group_size * len(roles) + roles.index(role)
        staleness = step - self.versions.played(step) if self.versions else 0
        return Rollout(
            episode.index,
            group,
            rows,
            logp,
            total if rows else None,
            role,
            components_of(dialog),
            parts_of(dialog, self.weights),
            staleness,
        )

    @property
    def weights(self) -> Mapping[str, float]:
        """Of the named rewards that are added up; none where the world's own is learned from."""
        source = self.judge or self.make_env
        return source.weights if isinstance(source, RewardMix | Contexts) else {}


def judged(played: Sequence[Episode], judge: Judge | None) -> None:
    """Gives the replies of all episodes that did not fail the rewards of `judge`."""
    for episode in played if judge else ():
        dialog = episode.dialog
        if episode.end == "failed" or not dialog.replies:
            continue
        judge(dialog)
        rewards = [dialog.messages[i]["reward"] for i in dialog.replies]
        episode.end = end_of(rewards, terminated=not dialog.truncated, failed=False)
        dialog.meta["end"] = episode.end


def parts_of(dialog: Dialog, weights: Mapping[str, float]) -> dict[str, tuple[float, np.ndarray]]:
    """The weight of each reward that counts, and (R,) what each reply earned; 0 where it does not apply."""
    replies = [dialog.messages[i].get("rewards") or {} for i in dialog.replies]
    return {
        name: (weight, np.array([reply.get(name) or 0.0 for reply in replies]))
        for name, weight in weights.items()
        if weight
    }


def components_of(dialog: Dialog) -> dict[str, float]:
    """The sum over replies of each reward that judged them, whatever its weight; what the world itself paid
    is one of them where others are learned from. A reply that one does not apply to adds nothing."""
    sums: dict[str, float] = {}
    for i in dialog.replies:
        for name, value in (dialog.messages[i].get("rewards") or {}).items():
            if value is not None:
                sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def reward_figures(played: Sequence[Episode]) -> dict[str, float]:
    """The mean of each reward over the episodes that have it."""
    found: dict[str, list[float]] = {}
    for episode in played:
        for name, value in components_of(episode.dialog).items() if episode.total is not None else ():
            found.setdefault(name, []).append(value)
    return {f"eval/reward_{name}": float(np.mean(values)) for name, values in found.items() if name != WORLD}


def judged_return(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    step: int = 0,
    *,
    make_env: Callable[[], Any],
    episodes: int,
    seed: int,
    decoding: Decoding,
    batch_size: int,
    judge: Judge,
) -> dict[str, float]:
    """`env_return` by other rewards than the world's, whose own is `eval/true_return`."""
    how = {"seed": seed, "batch_size": batch_size}
    played = play_episodes(policy, tokenizer, make_env, range(episodes), decoding, **how)
    paid = [each.total for each in played]
    judged(played, judge)
    return return_figures(played) | reward_figures(played) | true_return_figures(played, paid)


def true_return_figures(played: Sequence[Episode], paid: Sequence[float | None]) -> dict[str, float]:
    """What the world itself paid for episodes, where other rewards judge them; nothing where nobody pays."""
    known = [
        total
        for each, total in zip(played, paid, strict=True)
        if total is not None and WORLD in components_of(each.dialog)
    ]
    if not known:
        return {}
    spread = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
    stderr = spread / float(np.sqrt(len(known)))
    return {"eval/true_return": float(np.mean(known)), "eval/true_return_stderr": stderr}


def self_play_return(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    step: int = 0,
    *,
    playing: Playing,
    opponent: Opponent,
    start: Mapping[str, Tensor],
    episodes: int,
    judge: Judge | None = None,
) -> dict[str, float]:
    """The mean return against the policy as it was at the start, for the training loop: the same episodes at
    every `step`, in every role that the learner takes."""
    other = opponent.at(0, start)
    played = [
        each for unit in playing.units(range(episodes)) for each in playing(policy, tokenizer, unit, other)
    ]
    mine = [each for each in played if each.dialog.meta["player"] == LEARNER]
    paid = [each.total for each in mine]
    judged(played, judge)
    by_role: dict[str, list[float]] = {}
    for each in mine:
        if each.total is not None:
            by_role.setdefault(each.dialog.meta["role"], []).append(each.total)
    return (
        return_figures(mine)
        | reward_figures(mine)
        | true_return_figures(mine, paid)
        | {f"eval/return_{role}": float(np.mean(totals)) for role, totals in sorted(by_role.items())}
    )


def _expect_groups_that_begin_alike(played: Sequence[Episode], group_size: int) -> None:
    groups: dict[int, list[Episode]] = {}
    for episode in played:
        if episode.replies and episode.opens:
            groups.setdefault(episode.index // group_size, []).append(episode)
    for group in groups.values():
        first = group[0]
        read = first.replies[0].spoken.prompt
        second = next((episode for episode in group if episode.replies[0].spoken.prompt != read), None)
        if second is not None:
            pairs = zip(first.dialog.messages, second.dialog.messages, strict=False)
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            raise UserError(
                f"{first.dialog.source}: expected episodes of the same seed to begin alike, because those of "
                f"a group are compared with each other, got {str(here)[:100]} and {str(there)[:100]} for "
                f"seed {first.dialog.meta['seed']}: draw from the "
                "seed of reset alone (`check_env` tells), or set --group_size 1"
            )
