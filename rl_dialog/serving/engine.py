"""Replies for many clients at once: a thread steps the running batch (serving/batch.py) and hands tokens out
as they come.

`submit` queues a request; when a slot is free, the key with the fewest rows in the batch is next, of its
users the one with the fewest, of their requests the one that waited longest. A request may need several rows:
one per choice, times the replies of which its method says the best.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from rl_dialog.config import finite
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import (
    Choice,
    Reply,
    generations,
    load_for_decoding,
    reply_scores,
    stream,
)
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import Policy
from rl_dialog.serving.batch import Ask, Row, RunningBatch, Token
from rl_dialog.serving.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FAILING = 3  # failed steps in a row after which the engine counts as broken
MOST_SCORED = 16_384  # tokens that are read again to choose among replies; nobody else gets a token meanwhile
MOST_ROWS = 64  # replies of one request, those included that are drawn to say the best


@dataclass(frozen=True)
class Piece:
    """The next characters of a choice, perhaps none, with the tokens read meanwhile. A choice's last piece
    says why it ended."""

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish: Literal["", "stop", "length"] = ""
    reused: int = 0  # tokens of the request's prompt that were still in a slot


class QueueFull(RuntimeError):
    """More requests wait than the engine accepts; `retry_after` is in seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(waiting, retry_after)  # both, for the way out of another process
        self.waiting, self.retry_after = waiting, retry_after

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting already; try again in {self.retry_after:.0f} s"


class Refused(UserError):
    """A request that this model cannot answer."""


class Closed(RuntimeError):
    """The engine is shutting down and takes no more requests."""


class Ticket:
    """A request on its way. `cancel` may be called from any thread, at any time."""

    def __init__(
        self, ask: Ask, choices: list[_Choice], deliver: Callable[[Piece | Exception], None]
    ) -> None:
        self.ask, self.deliver = ask, deliver
        self.to_join = deque((choice, row) for choice in choices for row in choice.rows)
        self.open = len(choices)  # choices that are not finished
        self.cancelled = False
        self.queued = time.monotonic()
        self.waited = 0.0  # seconds until its first row joined the batch
        self.reused = -1  # tokens of the prompt that were still in a slot; -1 before the first row joined

    def cancel(self) -> None:
        self.cancelled = True


class _Choice:
    """One of the replies a client gets, and the rows of which it is the best."""

    def __init__(self, index: int, rows: list[Row]) -> None:
        self.index, self.rows = index, rows
        self.shown = 0  # characters delivered
        self.left = len(rows)  # rows that are not finished


@dataclass
class EngineStats:
    """Counters since the start, for metrics."""

    requests: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    rows: int = 0  # summed over steps: rows / steps is the mean size of the batch


class Engine:
    """A policy that answers many clients. `submit` from any thread; `close` ends it."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerFast,
        *,
        slots: int = 16,
        kept: int = 16,
        queue: int = 256,
        piece: int = 512,
    ) -> None:
        """slots: replies in one batch; kept: ended conversations whose beginnings stay; queue: most requests
        that wait; piece: prompt tokens read per step. Raises UserError for settings that make no sense and
        for models that cannot be served.
        """
        if slots < 1 or kept < 0 or queue < 0 or piece < 1:
            raise UserError(
                f"expected slots and piece of at least 1, kept and queue of at least 0, got {slots}, {piece},"
                f" {kept}, {queue}"
            )
        self.policy, self.method, self.tokenizer, self.queue = policy, policy.method, tokenizer, queue
        self.batch = RunningBatch(policy, tokenizer, slots=slots, kept=kept, piece=piece)
        self.context = self.batch.context  # tokens at most, prompt and reply together
        self.tickets: dict[Row, tuple[Ticket, _Choice]] = {}  # of the rows in the batch
        self.waiting: dict[tuple[str, str], deque[Ticket]] = {}  # by key and user
        self.stats = EngineStats()
        self._beat = time.monotonic()  # when the last step ended
        self._pace = 0.0  # seconds that a request took lately, for Retry-After
        self._failing = 0  # steps that failed since the last one that did not
        self._wake, self._closing, self._deadline = threading.Condition(), False, 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # What clients call.

    def submit(self, ask: Ask, deliver: Callable[[Piece | Exception], None]) -> Ticket:
        """Queues a request. `deliver` is called in the engine's thread with every Piece, or with the
        exception that ended the request.

        Raises QueueFull, Closed and Refused.
        """
        try:
            self._check(ask)
        except ValueError as error:
            raise Refused(str(error)) from None
        ticket = Ticket(ask, self._choices(ask), deliver)
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise Closed("the engine is shutting down")
            waiting = self.depth()
            if waiting >= max(self.queue, 0 if len(self.batch) == self.batch.size else 1):
                self.stats.refused += 1
                raise QueueFull(waiting, max(1.0, math.ceil((waiting + 1) / self.batch.size * self._pace)))
            if not waiting and not len(self.batch):
                self._beat = time.monotonic()  # work begins only now: the thread is not late
            self.stats.requests += 1
            self.waiting.setdefault((ask.key, ask.user), deque()).append(ticket)
            self._wake.notify()
        return ticket

    def depth(self) -> int:
        """Requests that wait."""
        return sum(map(len, list(self.waiting.values())))

    def running(self) -> int:
        """Replies under way."""
        return len(self.batch)

    def healthy(self, patience: float = 60.0) -> bool:
        """False once the thread is gone, no step succeeds any more, or none has ended for `patience` seconds
        though there is work."""
        idle = not len(self.batch) and not self.depth()
        return (
            self._thread.is_alive()
            and self._failing < FAILING
            and (idle or time.monotonic() - self._beat < patience)
        )

    def close(self, *, drain: float = 0.0) -> None:
        """Takes no more requests, gives those it has `drain` seconds, ends the others with Closed and the
        thread with them."""
        with self._wake:
            self._closing, self._deadline = True, time.monotonic() + drain
            self._wake.notify()
        self._thread.join(timeout=drain + 60)

    def draws(self, ask: Ask) -> int:
        """How many replies are drawn per choice, of which the best is said."""
        return (
            generations(self.policy, ask.decoding)
            if ask.decoder == "method"
            else ask.decoding.num_generations or 1
        )

    def _check(self, ask: Ask) -> None:
        ask.decoding.check()
        length, context = len(ask.prompt) + ask.decoding.max_new_tokens, self.batch.context
        if ask.decoding.num_beams > 1:
            raise UserError(
                "expected sampling or greedy decoding, got a beam search, which the engine does not run"
            )
        if (rows := ask.choices * self.draws(ask)) > MOST_ROWS:
            raise UserError(
                f"expected at most {MOST_ROWS} replies for a request, got {rows}: choices times the replies "
                "of which each is the best"
            )
        if self.draws(ask) > 1 and (tokens := self.draws(ask) * length) > MOST_SCORED:
            raise UserError(
                f"expected at most {MOST_SCORED} tokens, prompts included, in the replies of which the best "
                f"is said, got {tokens}"
            )
        if not ask.prompt or ask.choices < 1:
            raise UserError(
                f"expected a prompt of at least one token and at least one choice, got {len(ask.prompt)} and "
                f"{ask.choices}"
            )
        if length > context:
            raise UserError(
                f"expected at most {context} tokens, prompt and reply together, got {len(ask.prompt)} + "
                f"{ask.decoding.max_new_tokens}"
            )
        known = self.policy.get_input_embeddings().num_embeddings
        if wrong := [token for token, _ in ask.logit_bias if not 0 <= token < known]:
            raise UserError(f"logit_bias: expected ids of tokens below {known}, got {wrong[0]}")
        method = self.policy.method
        if ask.beta is not None and not method.acts_with_beta:
            raise UserError(f"this model was trained with {type(method).__name__}, which has no beta to set")
        if ask.beta is not None:
            finite(
                replace(method, beta=ask.beta), "the request"
            )  # raises UserError for one that the method does not take

    def _choices(self, ask: Ask) -> list[_Choice]:
        draws, choices = self.draws(ask), []
        for index in range(ask.choices):
            seed = stream(ask.seed, 1, index) if index else ask.seed
            seeds = [stream(seed, draw) for draw in range(draws)] if draws > 1 else [seed]
            rows = [
                Row(ask, TextStream(self.tokenizer, ask.stop), torch.Generator().manual_seed(each))
                for each in seeds
            ]
            choices.append(_Choice(index, rows))
        return choices

    # The thread.

    def _run(self) -> None:
        try:
            while self._has_work():
                try:
                    self._step()
                    self._failing = 0
                except Exception as error:  # a request must not end the service for the others
                    logging.getLogger(__name__).exception(
                        "a step failed; the requests in the batch get the error"
                    )
                    self._failing += 1
                    self._fail(error)
                self._beat = time.monotonic()
        finally:  # nobody waits for a thread that is gone, whatever ended it
            with self._wake:
                self._closing = True
            self._fail(Closed("the server is shutting down"))
            for ticket in itertools.chain(*self.waiting.values()):
                self._deliver(ticket, Closed("the server is shutting down"))
            self.waiting.clear()

    def _has_work(self) -> bool:
        """Waits until there is something to do; False when it is time to end."""
        with self._wake:
            while not self._closing and not len(self.batch) and not self.waiting:
                self._wake.wait()
                self._beat = time.monotonic()
            return not self._closing or (
                (len(self.batch) or self.waiting) and time.monotonic() < self._deadline
            )

    def _step(self) -> None:
        """Rows of cancelled requests leave, waiting ones join, and everyone gets a token."""
        self.batch.leave([row for row in self.batch.rows if self._forget_cancelled(row)])
        self._forget_cancelled_waiting()
        while len(self.batch) < self.batch.size and (ticket := self._next()):
            self._join(ticket)
        self.stats.steps += 1
        self.stats.rows += len(self.batch)
        for row in self.batch.step():
            self.stats.tokens += 1
            ticket, choice = self.tickets[row]
            if row.finish:
                self._finish(ticket, choice)
                del self.tickets[row]  # last: a request whose end fails must still be told
            elif len(choice.rows) == 1:
                self._show(ticket, choice, row)

    def _next(self) -> Ticket | None:
        """The request whose next row joins. Further rows of a request join once the first has read the
        prompt, to copy what it read."""
        with self._wake:
            busy = Counter(
                name
                for row in self.batch.rows
                for name in (("key", row.ask.key), ("user", row.ask.key, row.ask.user))
            )
            reading = {self.tickets[row][0] for row in self.batch.prompts}
            heads = [tickets[0] for tickets in self.waiting.values() if tickets[0] not in reading]

        def turn(ticket: Ticket) -> tuple[int, int, float]:
            ask = ticket.ask
            return busy["key", ask.key], busy["user", ask.key, ask.user], ticket.queued

        return min(heads, key=turn, default=None)

    def _join(self, ticket: Ticket) -> None:
        choice, row = ticket.to_join.popleft()
        self.tickets[row] = ticket, choice
        if not ticket.to_join:
            self._unqueue({ticket})
        reused = self.batch.join(row)
        if ticket.reused < 0:
            ticket.reused, ticket.waited = reused, time.monotonic() - ticket.queued
            self.stats.prompt_tokens += len(ticket.ask.prompt)
            self.stats.reused_tokens += reused

    def _forget_cancelled_waiting(self) -> None:
        """They give up their places in the queue at once, though no slot may be free for long."""
        with self._wake:
            cancelled = {ticket for ticket in itertools.chain(*self.waiting.values()) if ticket.cancelled}
            self.stats.cancelled += sum(ticket.reused < 0 for ticket in cancelled)
            self._unqueue(cancelled)

    def _unqueue(self, gone: set[Ticket]) -> None:
        with self._wake:
            for user in {(ticket.ask.key, ticket.ask.user) for ticket in gone}:
                left = deque(ticket for ticket in self.waiting.pop(user) if ticket not in gone)
                if left:
                    self.waiting[user] = left

    def _forget_cancelled(self, row: Row) -> bool:
        """Whether the row's request was cancelled."""
        ticket, _ = self.tickets[row]
        if ticket.cancelled:
            del self.tickets[row]
            self.stats.cancelled += bool(ticket.open)
            ticket.open = 0
        return ticket.cancelled

    def _finish(self, ticket: Ticket, choice: _Choice) -> None:
        """A row is complete. Where the best of several is said, the last one decides."""
        choice.left -= 1
        if choice.left:
            return
        self._show(ticket, choice, choice.rows[0] if len(choice.rows) == 1 else self._best(choice.rows))
        ticket.open -= 1
        if not ticket.open:
            seconds = time.monotonic() - ticket.queued - ticket.waited
            self._pace = seconds if not self._pace else 0.9 * self._pace + 0.1 * seconds

    def _best(self, rows: list[Row]) -> Row:
        """The reply that the method values most."""
        ask = rows[0].ask
        replies = [
            Reply(row.text.text, tuple(token.id for token in row.told), row.tokens[-1] in self.batch.stops)
            for row in rows
        ]
        scores = reply_scores(
            self.policy, self.tokenizer, [list(ask.prompt)] * len(rows), replies, ask.decoding
        )
        return rows[Choice(replies, scores).chosen]

    def _show(self, ticket: Ticket, choice: _Choice, row: Row) -> None:
        new, told, row.told = row.text.text[choice.shown :], tuple(row.told), []
        choice.shown += len(new)
        self._deliver(ticket, Piece(choice.index, new, told, row.finish, ticket.reused))

    def _deliver(self, ticket: Ticket, what: Piece | Exception) -> None:
        """Hands over; a client that cannot take it any more has gone."""
        if ticket.cancelled:
            return
        try:
            ticket.deliver(what)
        except Exception as error:
            logging.getLogger(__name__).warning(
                "a client could not take its tokens, its request is cancelled: %r", error
            )
            ticket.cancel()

    def _fail(self, error: Exception) -> None:
        """Ends every request in the batch."""
        tickets = {ticket for ticket, _ in self.tickets.values()}
        self.tickets.clear()
        self.batch.clear()
        self.stats.failed += len(tickets)
        for ticket in tickets:
            self._deliver(ticket, error)
            ticket.cancel()  # rows of it that have not joined yet never will


def load_engine(place: str, *, device: str = "auto", **sizes: int) -> Engine:
    """The engine of a checkpoint directory; sizes: those of Engine. Raises UserError for one that cannot be
    loaded or served."""
    policy = load_for_decoding(place).to(named_device(device))
    for tensor in (*policy.parameters(), *policy.buffers()):
        tensor.data = tensor.data.clone()  # what was loaded is the file itself, whatever is written over it
    tokenizer = load_tokenizer(place)
    known = policy.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise UserError(
            f"{place}: expected a model of the {len(tokenizer)} tokens that its chats are written in, got "
            f"{known}: train it on chats first"
        )
    return Engine(policy, tokenizer, **sizes)
