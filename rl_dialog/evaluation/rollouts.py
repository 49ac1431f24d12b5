"""Episodes to learn from: groups that begin alike, played by the policy as it is, and logged as Dialogs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.rollout import Rollout, rollout_rows
from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.contexts import Contexts
from rl_dialog.evaluation.episodes import Episode, Table, play_with
from rl_dialog.evaluation.generation import Decoding, Reply, prompt_room, recorded_replies, stream
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Rollouts:
    """Plays the episodes of a step of a run: `groups` groups of `group_size` in one world.

    Group g of step k has the conversation partner number k * groups + g of `seed`, whatever is played beside
    it and however often it is played again; within a group only what is drawn differs.
    """

    make_env: Callable[[], Any]
    decoding: Decoding
    groups: int
    group_size: int
    seed: int
    folder: Path | None = None  # where each step's Dialogs go, a file of JSON lines each
    batch_size: int = 128

    def __call__(self, policy: Policy, tokenizer: PreTrainedTokenizerFast, step: int) -> list[Rollout]:
        """The episodes of step `step`, counted from 0. Raises UserError for a world that begins differently
        for the same seed."""
        played = self.episodes(policy, tokenizer, step)
        _expect_groups_that_begin_alike(played, self.group_size)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [self._dialog(episode, step) for episode in played]
            write_text_atomically(self.folder / f"step-{step + 1:06d}.jsonl", "".join(lines))
        room = prompt_room(policy, self.decoding)
        return [self._rollout(episode, tokenizer, room) for episode in played]

    def episodes(self, policy: Policy, tokenizer: PreTrainedTokenizerFast, step: int) -> list[Episode]:
        """What is played in step `step`."""
        count = self.groups * self.group_size

        def answer(tables: Sequence[Table]) -> list[Reply]:
            return recorded_replies(
                policy,
                tokenizer,
                [table.messages for table in tables],
                self.decoding,
                seeds=[stream(self.seed, table.index, 1 + len(table.replies)) for table in tables],
                batch_size=self.batch_size,
            )

        return play_with(
            answer,
            self.make_env,
            range(step * count, (step + 1) * count),
            seed=self.seed,
            batch_size=self.batch_size,
            group_size=self.group_size,
        )

    def _dialog(self, episode: Episode, step: int) -> str:
        dialog = episode.dialog
        meta = dialog.meta | {"step": step + 1, "partner": episode.index // self.group_size}
        if not isinstance(self.make_env, Contexts):  # `prepare` knows equal contexts by what the user said
            meta["group"] = f"{dialog.source}-{meta['seed']}"  # a partner's episodes stay in one split
        return replace(dialog, meta=meta).to_json() + "\n"

    def _rollout(self, episode: Episode, tokenizer: PreTrainedTokenizerFast, room: int) -> Rollout:
        dialog, total = episode.dialog, episode.total
        rewards = [dialog.messages[i]["reward"] for i in dialog.replies]
        rows, logp = rollout_rows(
            [reply.spoken for reply in episode.replies],
            [float("nan") if reward is None else reward for reward in rewards],
            truncated=dialog.truncated,
            next_prompt=(
                encode_prompt(dialog.messages, tokenizer, max_length=room) if dialog.truncated else ()
            ),
        )
        return Rollout(episode.index, episode.index // self.group_size, rows, logp, total if rows else None)


def _expect_groups_that_begin_alike(played: Sequence[Episode], group_size: int) -> None:
    for start in range(0, len(played), group_size):
        group = [episode for episode in played[start : start + group_size] if episode.replies]
        begun = {episode.replies[0].spoken.prompt for episode in group}
        if len(begun) > 1:
            first, second = (
                next(episode for episode in group if episode.replies[0].spoken.prompt == prompt)
                for prompt in list(begun)[:2]
            )
            raise UserError(
                f"{first.dialog.source}: expected episodes of the same seed to begin alike, because those of "
                f"a group are compared with each other, got {str(first.dialog.messages[0])[:100]} and "
                f"{str(second.dialog.messages[0])[:100]} for seed {first.dialog.meta['seed']}: draw from the "
                "seed of reset alone (`check_env` tells), or set --group_size 1"
            )
