"""Conversations of a policy in an environment: Gymnasium's reset/step with message lists as observations and
reply texts as actions.

An episode whose world failed, or that nobody could score, has no return: it stands in no mean and is counted
apart. The whole contract is in envs/text_world.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_dialog.data.schema import ENDS, Dialog, end_of
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, Reply, generate_replies, stream
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_RETURN = ENDS[2:]  # failed, unscored
MAX_TURNS = 64  # replies after which a conversation is cut off whose environment does not say


@dataclass
class Episode:
    """One conversation in an environment: the dialog with the environment's reward and votes on its replies,
    and the replies as generated."""

    index: int
    dialog: Dialog
    replies: list[Reply]
    end: str  # one of rl_dialog.data.schema.ENDS

    @property
    def total(self) -> float | None:
        """The undiscounted return; None where the episode failed or was not scored."""
        if self.end in NO_RETURN:
            return None
        return float(sum(self.dialog.messages[i]["reward"] for i in self.dialog.replies))


def play_episodes(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    make_env: Callable[[], Any],
    episodes: Sequence[int],
    decoding: Decoding,
    *,
    seed: int = 0,
    batch_size: int = 128,
    max_turns: int | None = None,
    group_size: int = 1,
    speak: Callable[..., Sequence[Reply]] = generate_replies,
) -> list[Episode]:
    """Plays the numbered episodes of `seed`, `batch_size` of them in step, and returns them in the order
    given. They are cut off after `max_turns` replies, by default the world's own `max_turns`, or 64.

    Episode i is always the same conversation partner (`reset(seed=stream(seed, i))`), whatever policy plays
    it and whatever else is played. So many as `group_size` episodes in a row have the same partner, and what
    is said to it is drawn anew in each. `speak` draws the replies.
    """
    played: list[Episode] = []
    for start in range(0, len(episodes), batch_size):
        numbers = episodes[start : start + batch_size]
        tables = [_Table(make_env, seed, index, partner=index // group_size) for index in numbers]
        turn = 0
        while running := [table for table in tables if not table.finished]:
            seeds = [stream(seed, table.index, 1 + turn) for table in running]
            replies = speak(
                policy,
                tokenizer,
                [table.messages for table in running],
                decoding,
                seeds=seeds,
                batch_size=batch_size,
            )
            turn += 1
            for table, reply in zip(running, replies, strict=True):
                table.step(reply, last=turn == (max_turns or table.max_turns))
        played += [table.episode() for table in tables]
    return played


MEASURED = (  # what `env_return` says
    "eval/return", "eval/return_stderr", "eval/replies_per_dialog", "eval/reply_tokens", "eval/empty_replies"
)  # fmt: skip


def env_return(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    step: int = 0,
    *,
    make_env: Callable[[], Any],
    episodes: int = 64,
    seed: int = 0,
    decoding: Decoding | None = None,
    batch_size: int = 128,
) -> dict[str, float]:
    """The mean return and what guards against hollow ones, for the training loop: the same episodes at every
    `step`, which is therefore not used."""
    played = play_episodes(
        policy, tokenizer, make_env, range(episodes), decoding or Decoding(), seed=seed, batch_size=batch_size
    )
    replies = [reply for episode in played for reply in episode.replies]
    totals = np.array([episode.total for episode in played if episode.total is not None])
    ends = [episode.end for episode in played]
    figures = {f"eval/{end}": float(np.mean([reached == end for reached in ends])) for end in NO_RETURN}
    figures["eval/replies_per_dialog"] = len(replies) / len(played)
    if len(totals):  # without a single one there is no return
        figures["eval/return"] = float(totals.mean())
        figures["eval/return_stderr"] = (
            float(totals.std(ddof=1) / np.sqrt(len(totals))) if len(totals) > 1 else 0.0
        )
    if replies:
        figures["eval/reply_tokens"] = float(np.mean([len(reply.tokens) for reply in replies]))
        figures["eval/empty_replies"] = float(np.mean([not reply.text for reply in replies]))
    return figures


class _Table:
    """One running conversation."""

    def __init__(self, make_env: Callable[[], Any], seed: int, index: int, *, partner: int) -> None:
        self.env, self.index, self.name = make_env(), index, getattr(make_env, "__name__", "env")
        self.seed, self.max_turns = stream(seed, partner), getattr(self.env, "max_turns", MAX_TURNS)
        begun = self.env.reset(seed=self.seed)
        if not (isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[0], list) and begun[0]):
            got = str(begun)[:200]
            raise UserError(f"{self.name}: expected reset to return (messages, info), got {got}")
        self.messages, info = begun
        self.rewards: dict[int, tuple[float | None, Any]] = {}  # message index -> reward, vote
        self.replies: list[Reply] = []
        self.terminated, self.failed = False, info.get("failed")
        self.finished, self.role = self.failed is not None, info.get("role")

    def step(self, reply: Reply, *, last: bool) -> None:
        before = self.messages
        self.messages, reward, self.terminated, truncated, info = self.env.step(reply.text)
        grown = self.messages[: len(before)] == before and len(self.messages) > len(before)
        if not grown or self.messages[len(before)]["role"] != "assistant":
            got = str(self.messages[-2:])[:200]
            raise UserError(
                f"{self.name}: expected step to return the conversation so far with the reply added, got "
                f"{got}"
            )
        self._expect_one_role(info)
        self.failed = info.get("failed")
        scored = reward is not None and self.failed is None
        self.rewards[len(before)] = float(reward) if scored else None, info.get("vote")
        self.replies.append(reply)
        self.finished = self.terminated or truncated or last or self.failed is not None

    def _expect_one_role(self, info: dict[str, Any]) -> None:
        if info.get("role", self.role) != self.role:
            raise UserError(
                f"{self.name}: expected a world of one player, got {self.role!r} and {info['role']!r}: "
                "a policy takes one role, so let the world play the others"
            )

    def episode(self) -> Episode:
        messages = [dict(message) for message in self.messages]
        for i, message in enumerate(messages):
            if i in self.rewards:
                reward, vote = self.rewards[i]
                message |= {"reward": reward} | ({} if vote is None else {"feedback": {"vote": vote}})
            elif message["role"] == "assistant":
                message["weight"] = 0  # the environment's own words, not the policy's
        rewards = (reward for reward, _ in self.rewards.values())
        end = end_of(rewards, terminated=bool(self.terminated), failed=self.failed is not None)
        meta = {"episode": self.index, "seed": self.seed, "end": end}
        dialog = Dialog(
            id=f"{self.name}-{self.index:06d}",
            messages=messages,
            source=self.name,
            truncated=not self.terminated,
            meta=meta | ({} if self.failed is None else {"failed": self.failed}),
        )
        return Episode(self.index, dialog, self.replies, end)
