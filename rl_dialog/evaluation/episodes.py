"""Conversations of a policy in an environment: Gymnasium's reset/step with message lists as observations and
reply texts as actions.

An episode whose world failed, or that nobody could score, has no return: it stands in no mean and is counted
apart. The whole contract is in envs/text_world.py."""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat
from weakref import WeakKeyDictionary

import numpy as np

from rl_dialog.data.schema import ENDS, TEXT, Dialog, can_be_encoded, end_of, failure_of, said
from rl_dialog.errors import UserError
from rl_dialog.evaluation.conversations import Conversations, can_keep
from rl_dialog.evaluation.generation import (
    Decoding,
    Message,
    Reply,
    generate_replies,
    recorded_replies,
    stream,
)
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_RETURN = ENDS[2:]  # failed, unscored
Watch = Callable[["Table"], None]
# Whether caches can stay from turn to turn, which takes a moment to find out.
_KEEPS: WeakKeyDictionary[Policy, dict[Decoding, bool]] = WeakKeyDictionary()
MAX_TURNS = 64  # replies after which a conversation is cut off whose environment does not say


@dataclass
class Episode:
    """One conversation in an environment: the dialog with the environment's reward and votes on its replies,
    and the replies as generated."""

    index: int
    dialog: Dialog
    replies: list[Reply]
    end: str  # one of rl_dialog.data.schema.ENDS
    drawings: list[str] = field(default_factory=list)  # in the beginning and after each reply, if asked for
    opens: bool = True  # nobody spoke before its first reply; false of other roles of a world of several

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
    keep_caches: bool = False,
    drawn: Container[int] = (),
    watch: Watch | None = None,
) -> list[Episode]:
    """A policy plays the numbered episodes, as `play_with` says.

    keep_caches: what was read of a conversation stays from turn to turn, where the policy allows it
    (`conversations.can_keep`). What is said is the same, but for ties of probabilities that are equal in all
    digits of their type.
    """
    answer = Answers(policy, tokenizer, decoding, seed=seed, rows=batch_size, keep_caches=keep_caches)
    how = {"seed": seed, "batch_size": batch_size, "max_turns": max_turns, "drawn": drawn, "watch": watch}
    return play_with(answer, make_env, episodes, **how)


def in_parts(
    tables: Sequence[Table], whose: Callable[[Any], Any], say: Callable[[list[Any], Any], Sequence[Reply]]
) -> list[Reply]:
    """A reply at each table, in their order: what `say` answers to all those of one `whose` together."""
    said: dict[int, Reply] = {}
    for who in dict.fromkeys(map(whose, tables)):
        part = [table for table in tables if whose(table) == who]
        said |= {table.index: reply for table, reply in zip(part, say(part, who), strict=True)}
    return [said[table.index] for table in tables]


class Answers:
    """What a policy says next at tables. Its draws follow from `seed`, the episode and the turn. What it has
    read at a table may stay in its cache from turn to turn, so it lives as long as its weights do."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerFast,
        decoding: Decoding,
        *,
        seed: int,
        rows: int,
        keep_caches: bool,
        recorded: bool = False,
    ) -> None:
        """rows: conversations at a time; keep_caches: as `play_episodes` has it; recorded: with what was read
        and drawn (`recorded_replies`)."""
        self.policy, self.tokenizer, self.decoding = policy, tokenizer, decoding
        self.seed, self.rows, self.recorded = seed, rows, recorded
        known = _KEEPS.setdefault(policy, {})
        if keep_caches and decoding not in known:
            known[decoding] = can_keep(policy, decoding)
        self.kept = keep_caches and known[decoding] and (decoding.do_sample or not recorded)
        self.running: dict[str | None, Conversations] = {}  # by role

    def __call__(self, tables: Sequence[Table]) -> list[Reply]:
        """A reply at each table, which its role sees in its own way."""
        return in_parts(tables, lambda table: table.role, self._say)

    def _say(self, tables: Sequence[Table], role: str | None) -> Sequence[Reply]:
        seeds = [stream(self.seed, table.index, 1 + len(table.replies)) for table in tables]
        how = self.policy, self.tokenizer
        if not self.kept:
            views = [table.messages for table in tables]
            say = recorded_replies if self.recorded else generate_replies
            return say(*how, views, self.decoding, seeds=seeds, batch_size=self.rows)
        if role not in self.running:
            self.running[role] = Conversations(*how, self.decoding, rows=self.rows)
        running = self.running[role]
        go_on = running.recorded if self.recorded else running.answer
        return go_on({table.index: table.messages for table in tables}, seeds)


def play_with(
    answer: Callable[[Sequence[Table]], Sequence[Reply]],
    make_env: Callable[[], Any],
    episodes: Sequence[int],
    *,
    seed: int = 0,
    batch_size: int = 128,
    max_turns: int | None = None,
    drawn: Container[int] = (),
    watch: Watch | None = None,
    group_size: int = 1,
) -> list[Episode]:
    """Plays the numbered episodes of `seed`, `batch_size` of them in step, and returns them in the order
    given. Where one is over the next begins. They are cut off after `max_turns` replies, by default the
    world's own `max_turns`, or 64.

    answer: what is said next at each of several tables; drawn: the episodes whose drawings are kept; watch:
    is shown each table when it begins and after each reply.

    Episode i is always the same conversation partner (`reset(seed=stream(seed, i))`), whoever plays it and
    whatever else is played. So many as `group_size` episodes in a row have the same partner.
    """
    more = {"drawn": drawn, "max_turns": max_turns, "watch": watch, "group_size": group_size}
    tables = Tables(make_env, seed, batch_size, **more)
    return tables.play(answer, episodes, Table.episode)


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
    return return_figures(played)


def return_figures(played: Sequence[Episode]) -> dict[str, float]:
    """Of episodes: how they ended, the mean return and its standard error, and what their replies are
    like."""
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


@dataclass(frozen=True)
class Tables:
    """How the episodes of a seed are played side by side: arguments as `play_with` has them."""

    make_env: Callable[[], Any]
    seed: int
    batch_size: int
    drawn: Container[int] = ()
    max_turns: int | None = None
    watch: Watch | None = None
    group_size: int = 1
    kind: Callable[..., Table] | None = None  # makes another kind of table

    def play(
        self,
        answer: Callable[[Sequence[Any]], Sequence[Reply]],
        episodes: Sequence[int],
        outcome: Callable[[Any], Any],
    ) -> list[Any]:
        """What `outcome` makes of the table of each episode when it is over, in the order given."""
        with waiting_together(getattr(self.make_env, "concurrency", 1)) as each_of:
            return self._play(answer, episodes, outcome, each_of)

    def _play(
        self,
        answer: Callable[[Sequence[Any]], Sequence[Reply]],
        episodes: Sequence[int],
        outcome: Callable[[Any], Any],
        each_of: Callable[..., list[Any]],
    ) -> list[Any]:
        played: dict[int, Any] = {}
        waiting, running = deque(dict.fromkeys(episodes)), []
        while waiting or running:
            begun = [waiting.popleft() for _ in range(min(len(waiting), self.batch_size - len(running)))]
            begun = self._begin(begun, each_of)
            self._show(begun)
            running += begun
            speaking = [table for table in running if not table.finished]  # some fail when they begin
            each_of(_step, speaking, answer(speaking) if speaking else ())
            self._show(speaking)
            played |= {table.index: outcome(table) for table in running if table.finished}
            running = [table for table in speaking if not table.finished]
        return [played[index] for index in episodes]

    def _begin(self, indices: Sequence[int], each_of: Callable[..., list[Any]]) -> list[Table]:
        """Their tables. First those of different partners, which do not wait for each other's first words."""
        order = sorted(indices, key=lambda index: index % self.group_size)
        begun = dict(zip(order, each_of(self._table, order), strict=True))
        return [begun[index] for index in indices]

    def _table(self, index: int) -> Table:
        more = {"draws": index in self.drawn, "max_turns": self.max_turns}
        return (self.kind or Table)(self.make_env, self.seed, index, partner=index // self.group_size, **more)

    def _show(self, tables: Sequence[Table]) -> None:
        for table in tables if self.watch else ():
            self.watch(table)


def _step(table: Table, reply: Reply) -> None:
    table.step(reply)


@contextmanager
def waiting_together(count: int) -> Iterator[Callable[..., list[Any]]]:
    """`map` that gives a list, over up to `count` calls at a time in threads, for worlds whose steps wait for
    others."""
    if count < 2:
        yield lambda function, *of: [function(*each) for each in zip(*of, strict=True)]
        return
    threads = ThreadPoolExecutor(count)
    try:
        yield lambda function, *of: list(
            threads.map(lambda each: function(*each), list(zip(*of, strict=True)))
        )
    finally:
        threads.shutdown(cancel_futures=True)


class Table:
    """One running conversation."""

    def __init__(
        self,
        make_env: Callable[[], Any],
        seed: int,
        index: int,
        *,
        draws: bool = False,
        max_turns: int | None = None,
        partner: int | None = None,
    ) -> None:
        self.env, self.index, self.name = make_env(), index, getattr(make_env, "__name__", "env")
        self.partner = index if partner is None else partner
        self.seed = stream(seed, self.partner)
        self.max_turns = max_turns or getattr(self.env, "max_turns", MAX_TURNS)
        if not (isinstance(self.max_turns, Integral) and self.max_turns > 0):
            raise self.broken("a whole number above 0 as max_turns", repr(self.max_turns))
        begun = self.ask("reset", seed=self.seed)
        if not (isinstance(begun, tuple) and len(begun) == 2 and _are_messages(begun[0]) and begun[0]):
            raise self.broken("reset to return (messages, info)", str(begun)[:200])
        self.messages, info = begun
        self._expect_text("reset", self.messages)
        self._expect_info("reset", info)
        self.rewards: dict[int, tuple[float | None, Any]] = {}  # message index -> reward, vote
        self.components: dict[int, dict[str, float]] = {}  # message index -> what the reward is made of
        self.replies: list[Reply] = []
        self.terminated, self.failed = False, failure_of(info)
        self.told: dict[str, Any] = info.get("meta", {})  # by the world, for the log
        self.finished, self.role = self.failed is not None, info.get("role")
        self.draws, self.drawings = draws, [self.drawing()] if draws else []

    def answer_to(self, reply: str) -> tuple[list[Message], Any, bool, bool, dict[str, Any]]:
        """What the world's `step` returns. Raises UserError where that is not what a step returns."""
        stepped = self.ask("step", reply)
        if not (isinstance(stepped, tuple) and len(stepped) == 5 and _are_messages(stepped[0])):
            expected = "step to return (messages, reward, terminated, truncated, info)"
            raise self.broken(expected, str(stepped)[:200])
        self._expect_text("step", stepped[0])
        self._expect_info("step", stepped[4])
        rewards = stepped[1].values() if isinstance(stepped[1], Mapping) else [stepped[1]]
        for reward in rewards:
            if reward is not None and not _finite(reward):
                raise self.broken("a finite number or None as the reward", repr(str(reward)[:100]))
        return stepped

    def ask(self, what: str, *given: Any, **more: Any) -> Any:
        """What the world's method of this name returns. Raises UserError that says where it broke."""
        try:
            return getattr(self.env, what)(*given, **more)
        except (UserError, OSError, MemoryError):
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            got = f"{type(error).__name__}: {error} (at {where})"
            raise self.broken(
                f"{what} to return",
                got,
                ". RL_DIALOG_DEBUG=1 shows the whole way; an episode that breaks for a reason says so in "
                "info['failed']",
            ) from error

    def broken(self, expected: str, got: str, remedy: str = "") -> UserError:
        """The error of a world that does not keep its contract, which says in what episode."""
        return UserError(f"{self.name}: expected {expected}, got {got} in {self.where}{remedy}")

    @property
    def where(self) -> str:
        """Which episode it is, for messages."""
        return f"episode {self.index}, whose seed is {self.seed}"

    def _expect_text(self, what: str, messages: Any) -> None:
        if not can_be_encoded("\n".join(map(said, messages))):
            message = next(message for message in messages if not can_be_encoded(said(message)))
            raise self.broken(f"{TEXT} as messages of {what}", str(message)[:200])

    def _expect_info(self, what: str, info: Any) -> None:
        if not isinstance(info, Mapping):
            raise self.broken(f"a dict as info of {what}", repr(info)[:100])
        if not isinstance(info.get("meta", {}), Mapping):
            raise self.broken(f"a dict as info['meta'] of {what}", repr(info["meta"])[:100])
        if not isinstance(info.get("role"), str | None):
            raise self.broken(f"text as info['role'] of {what}", repr(info["role"])[:100])
        if not isinstance(failure_of(info), str | None):
            expected = f"text as info['failed'] of {what}, and none where nothing failed"
            raise self.broken(expected, repr(info["failed"])[:100])
        views = info.get("views", {})
        if not (isinstance(views, Mapping) and all(map(_are_messages, views.values()))):
            raise self.broken(f"messages by role as info['views'] of {what}", repr(views)[:100])
        for seen in views.values():
            self._expect_text(what, seen)
        named = info.get("rewards") or {}
        if not (isinstance(named, Mapping) and all(one is None or _finite(one) for one in named.values())):
            raise self.broken(f"finite numbers by name as info['rewards'] of {what}", repr(named)[:100])

    def drawing(self) -> str:
        """The present state as the world draws it; empty for one that does not."""
        return str(self.ask("draw")) if hasattr(self.env, "draw") else ""

    def step(self, reply: Reply) -> None:
        """Says the reply."""
        before = self.messages
        self.messages, reward, self.terminated, truncated, info = self.answer_to(reply.text)
        self._expect_one_role(reward, info)
        grown = self.messages[: len(before)] == before and len(self.messages) > len(before)
        if not grown or self.messages[len(before)]["role"] != "assistant":
            expected = "step to return the conversation so far with the reply added"
            raise self.broken(expected, str(self.messages[-2:])[:200])
        self.failed, self.told = failure_of(info), self.told | info.get("meta", {})
        scored = reward is not None and self.failed is None
        vote = info.get("vote")
        vote = vote.item() if isinstance(vote, np.generic) else vote
        self.rewards[len(before)] = float(reward) if scored else None, vote
        if info.get("rewards"):
            self.components[len(before)] = {
                name: None if value is None else float(value) for name, value in info["rewards"].items()
            }
        self.replies.append(reply)
        last = len(self.replies) >= self.max_turns
        self.finished = self.terminated or truncated or last or self.failed is not None
        self.drawings += [self.drawing()] if self.draws else []

    def _expect_one_role(self, reward: Any, info: dict[str, Any]) -> None:
        by_role = reward if isinstance(reward, Mapping) else {}
        if by_role or info.get("role", self.role) != self.role:
            roles = " and ".join(map(repr, by_role or (self.role, info["role"])))
            raise UserError(
                f"{self.name}: expected a world of one player, got {roles}: a policy takes one role, so let "
                "the world play the others (`play --roles` says who plays which, `online --self_play` lets a "
                "policy play all of them)"
            )

    def episode(self) -> Episode:
        """What became of it."""
        messages = [dict(message) for message in self.messages]
        for i, message in enumerate(messages):
            if i in self.rewards:
                reward, vote = self.rewards[i]
                message |= {"reward": reward} | ({} if vote is None else {"feedback": {"vote": vote}})
                message |= {"rewards": self.components[i]} if i in self.components else {}
            elif message["role"] == "assistant":
                message["weight"] = 0  # the environment's own words, not the policy's
        rewards = (reward for reward, _ in self.rewards.values())
        end = end_of(rewards, terminated=bool(self.terminated), failed=self.failed is not None)
        meta = self.told | {"episode": self.index, "seed": self.seed, "end": end}
        dialog = Dialog(
            id=f"{self.name}-{self.index:06d}",
            messages=messages,
            source=self.name,
            truncated=not self.terminated,
            meta=meta | ({} if self.failed is None else {"failed": self.failed}),
        )
        return Episode(self.index, dialog, self.replies, end, self.drawings)


def _are_messages(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(each, Mapping)
        and "role" in each
        and (
            isinstance(each.get("content"), str)
            or (each.get("content") is None and bool(each.get("tool_calls")))
        )
        for each in found
    )


def _finite(reward: Any) -> bool:
    """Whether it is one number, and not an array of them, a text, NaN or infinite."""
    try:
        return isinstance(reward, SupportsFloat) and math.isfinite(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays, tensors, 10**400
        return False
