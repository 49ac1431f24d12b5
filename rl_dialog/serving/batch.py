"""The running batch of a server: replies of any age and prompts of any length, one forward pass for all.

The rows lie in the slots of models/slots.py, replies first, prompts behind them, and behind those the
conversations that ended:

    slot    0 .. replies - 1    .. replies + prompts - 1    .. slots + kept - 1
            one token a step    a piece of prompt a step    idle: what the next turn of a chat begins with is
                                                            already read

What a row says depends on its own seed only, not on the others: the same request gives what
evaluation/generation.py gives.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_dialog.evaluation.conversations import require_plain_attention
from rl_dialog.evaluation.generation import Decoding, stop_ids, warpers
from rl_dialog.evaluation.scoring import in_states, values_of
from rl_dialog.methods.method import Outputs
from rl_dialog.models.latents import AT_MEAN, latent_seed
from rl_dialog.models.policy import Policy
from rl_dialog.serving.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARED = 16  # tokens: a shorter common beginning is read anew instead of copied
IMPOSSIBLE = (
    -9999.0
)  # JSON has no infinity; OpenAI writes the log-probability of what cannot be said like this


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, and how to answer it."""

    prompt: Sequence[int]  # token ids, the generation prompt included
    decoding: Decoding = Decoding()
    seed: int = 0  # of the first choice; the others draw from streams of it
    choices: int = 1
    stop: tuple[str, ...] = ()  # texts that end a reply and are not part of it
    beta: float | None = None  # another beta than the checkpoint's, where its method has one
    decoder: Literal["method", "lm"] = (
        "method"  # lm: the language model alone, without values and without choosing among replies
    )
    top_logprobs: int | None = (
        None  # how many alternatives to report per token; None reports no log-probabilities
    )
    values: bool = False  # report Q and V of every token
    # taken from the logits of tokens that the reply has said, for each time and once; what is added to those
    # of single ones: (id, how much)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Whose turn it is when many wait. What conversations of one key and user left in the slots is never used
    # for another's: how much was there would tell what they said.
    key: str = ""
    user: str = ""

    @property
    def leans(self) -> bool:
        """Does it change the logits of single tokens?"""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    @property
    def owner(self) -> tuple[str, str]:
        return self.key, self.user


@dataclass(frozen=True)
class Token:
    """A token of a reply and what was asked to be told about it."""

    id: int
    text: str  # its own characters; "" while a character needs more tokens
    logprob: float | None = None  # under the policy, before temperature and top-p
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities
    q: float | None = None
    v: float | None = None


@dataclass(eq=False)
class Row:
    """One reply under way."""

    ask: Ask
    text: TextStream
    generator: torch.Generator
    read: int = 0  # tokens of the prompt in the slot
    tokens: list[int] = field(default_factory=list)  # of the reply; the last one is not in the slot yet
    told: list[Token] = field(
        default_factory=list
    )  # without the end of turn; whoever hands them over empties it
    finish: Literal["", "stop", "length"] = ""


class RunningBatch:
    """Rows that join, step together and leave."""

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerFast, *, slots: int, kept: int, piece: int
    ) -> None:
        """slots: rows at most; kept: ended conversations whose beginnings stay; piece: prompt tokens read per
        step.

        Raises UserError for models whose attention needs more than positions and a mask.
        """
        self.policy, self.tokenizer, self.size, self.piece = policy.eval(), tokenizer, slots, piece
        self.context = policy.context or 4096
        self.stops = frozenset(stop_ids(policy, tokenizer))
        self.steps = 0
        self.replies: list[Row] = []
        self.prompts: list[Row] = []
        self.slots = policy.new_slots(slots + kept, self.context)
        self.held: list[list[int]] = [
            [] for _ in range(slots + kept)
        ]  # the tokens whose keys and values each slot has
        self.owners = [("", "")] * (slots + kept)  # whose they are
        self.prompted = [0] * (slots + kept)  # how many of them were the prompt, the reply behind them
        self.used = [0] * (slots + kept)  # the step in which each was last used
        require_plain_attention(policy)

    def __len__(self) -> int:
        return len(self.replies) + len(self.prompts)

    @property
    def rows(self) -> list[Row]:
        return [*self.replies, *self.prompts]

    # Joining and leaving.

    @torch.inference_mode()
    def join(self, row: Row) -> int:
        """Gives the row the slot behind the last, with as much of its prompt as some slot holds; returns how
        many tokens those are."""
        place, prompt = len(self), list(row.ask.prompt)
        self.prompts.append(row)
        source, length = self._longest_beginning(prompt, row.ask.owner)
        filled = self._slot_to_fill(place, source, length)
        self._swap(place, filled)
        source = {place: filled, filled: place}.get(source, source)
        if length:
            self.used[source] = self.steps
        if length and source != place:
            self.slots.copy(source, place, length)
        self.held[place], self.owners[place], self.prompted[place] = (
            prompt[:length],
            row.ask.owner,
            len(prompt),
        )
        row.read = length
        return length

    @torch.inference_mode()
    def leave(self, rows: Sequence[Row]) -> None:
        """Takes rows out; what their slots hold stays for the next turn."""
        for row in rows:
            if row in self.replies:
                place, last = self.replies.index(row), len(self.replies) - 1
                self.used[place] = self.steps
                self._swap(place, last)
                self.replies[place] = self.replies[last]
                self.replies.pop()
                self._swap(last, len(self))  # the last prompt moves into the gap
                self.prompts = self.prompts[-1:] + self.prompts[:-1]
            elif row in self.prompts:
                place, last = self.prompts.index(row), len(self.prompts) - 1
                self.used[len(self.replies) + place] = self.steps
                self._swap(len(self.replies) + place, len(self.replies) + last)
                self.prompts[place] = self.prompts[last]
                self.prompts.pop()

    def clear(self) -> None:
        """Forgets everything: after an error the slots are not to be trusted."""
        self.replies, self.prompts = [], []
        self.held = [[] for _ in self.held]

    def _longest_beginning(self, prompt: list[int], owner: tuple[str, str]) -> tuple[int, int]:
        """The slot of this owner that shares the longest beginning with the prompt, and its length; the
        prompt's last token is always read anew."""
        shared = [
            self.slots.reusable(held, prompt) if whose == owner else 0
            for held, whose in zip(self.held, self.owners, strict=True)
        ]
        best = int(np.argmax(shared))
        length = shared[best]
        return (best, length) if length >= SHARED else (0, 0)

    def _slot_to_fill(self, first: int, source: int, length: int) -> int:
        """The slot to give up among the idle ones, `first` and those behind it: the source itself where the
        prompt continues the one that was answered there, else an empty one, else the one unused for longest.
        """
        if length and source >= first and length >= self.prompted[source] - 1:
            return source
        idle = [slot for slot in range(first, len(self.held)) if slot != source or not length]
        return min(idle or [source], key=lambda slot: (bool(self.held[slot]), self.used[slot]))

    def _swap(self, one: int, other: int) -> None:
        if one == other:
            return
        self.slots.swap(one, other)
        for values in (self.held, self.owners, self.prompted, self.used):
            values[one], values[other] = values[other], values[one]

    # Reading and speaking.

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Reads a piece of every prompt, and says one token of every reply. Returns the replies that got one;
        those that ended have left."""
        self.steps += 1
        rows = list(self.replies)
        if rows:
            self._say(self._forward([row.tokens[-1:] for row in rows], 0, list(range(len(rows)))), rows)
        rows += self._read_prompts() if self.prompts else []
        self.leave([row for row in rows if row.finish])
        return rows

    def _read_prompts(self) -> list[Row]:
        """Reads on in every prompt, `piece` tokens in all; those read to the end become replies with their
        first token."""
        rows = list(self.prompts)
        length = max(1, self.piece // len(rows))
        pieces = [list(row.ask.prompt[row.read : row.read + length]) for row in rows]
        for row, piece in zip(rows, pieces, strict=True):
            row.read += len(piece)
        whole = [i for i, row in enumerate(rows) if row.read == len(row.ask.prompt)]
        out = self._forward(pieces, len(self.replies), whole)
        ready = [rows[i] for i in whole]
        for row in ready:
            place = self.prompts.index(row)
            self._swap(len(self.replies), len(self.replies) + place)
            self.prompts[place] = self.prompts[0]
            self.prompts.pop(0)
            self.replies.append(row)
        if ready:
            self._say(out, ready)
        return ready

    def _forward(self, pieces: list[list[int]], first: int, whole: list[int]) -> Outputs:
        """Reads the pieces behind what the slots from `first` on hold; what the policy says at the ends of
        those in `whole`."""
        tokens = torch.zeros(len(pieces), max(map(len, pieces)), dtype=torch.int64)
        positions, real = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
        for i, piece in enumerate(pieces):
            tokens[i, : len(piece)] = torch.tensor(piece)
            positions[i, : len(piece)] = torch.arange(len(piece)) + len(self.held[first + i])
            real[i, : len(piece)] = True
        ends = [len(pieces[i]) - 1 for i in whole]
        device = self.policy.device
        out = self.policy.read(
            tokens.to(device),
            self.slots,
            first=first,
            positions=positions.to(device),
            real=real.to(device),
            wanted=(
                torch.tensor(whole, device=device, dtype=torch.int64),
                torch.tensor(ends, device=device, dtype=torch.int64),
            ),
            wants_v=any(row.ask.values for row in self.rows),
            noise=self._noise(self.rows[first : first + len(pieces)]),
        )
        for i, piece in enumerate(pieces):
            self.held[first + i] += piece
        return out

    def _noise(self, rows: list[Row]) -> Tensor | None:
        """(B,) the seeds of the rows' latents, for policies that have them."""
        if not self.policy.has_latents:
            return None
        sampling = (row.ask.decoding.do_sample for row in rows)
        seeds = (latent_seed(row.generator.initial_seed()) for row in rows)
        drawn = [seed if samples else AT_MEAN for seed, samples in zip(seeds, sampling, strict=True)]
        return torch.tensor(drawn, device=self.policy.device)

    def _say(self, out: Outputs, rows: list[Row]) -> None:
        """The next token of each row, from what the policy says in its state."""
        logits = self._logits(out, rows)  # (S, V)
        tokens = _draw(logits, rows)
        told = self._tell(out, logits, tokens, rows)
        for row, token, about in zip(rows, tokens.tolist(), told, strict=True):
            row.tokens.append(token)
            if token in self.stops:
                row.finish = "stop"
            else:
                row.told.append(Token(token, row.text.add(token), **about))
                row.finish = (
                    "stop"
                    if row.text.stopped
                    else "length"
                    if len(row.tokens) >= row.ask.decoding.max_new_tokens
                    else ""
                )
            if row.finish:
                said = row.tokens[:-1] if token in self.stops else row.tokens
                row.text.end(self.tokenizer.decode(said, skip_special_tokens=True))

    def _logits(self, out: Outputs, rows: list[Row]) -> Tensor:
        """(S, V) of the method, or of what each request asks for instead."""
        method = self.policy.method

        def decoded(chosen: Tensor | None, kind: tuple[str, float | None]) -> Tensor:
            part, (decoder, beta) = out if chosen is None else in_states(out, chosen), kind
            return (
                part.lm.dense()
                if decoder == "lm"
                else (method if beta is None else replace(method, beta=beta)).decode(part)
            )

        return _by_kind(rows, lambda row: (row.ask.decoder, row.ask.beta), decoded)

    def _tell(self, out: Outputs, logits: Tensor, tokens: Tensor, rows: list[Row]) -> list[dict[str, Any]]:
        """What each request wants to know about its token."""
        told: list[dict[str, Any]] = [{} for _ in rows]
        asked = [i for i, row in enumerate(rows) if row.ask.top_logprobs is not None or row.ask.values]
        if not asked:
            return told
        log_p = logits[asked].float().log_softmax(1)
        q, v = (values.tolist() for values in values_of(self.policy, out, tokens))
        for line, i in zip(log_p, asked, strict=True):
            ask = rows[i].ask
            told[i]["logprob"] = _finite(line[tokens[i]].item(), IMPOSSIBLE)
            if ask.top_logprobs:
                values, ids = line.topk(min(ask.top_logprobs, len(line)))
                told[i]["top"] = tuple(
                    zip(ids.tolist(), (_finite(value, IMPOSSIBLE) for value in values.tolist()), strict=True)
                )
            if ask.values:
                told[i] |= {"q": _finite(q[i]), "v": _finite(v[i])}
        return told


def _draw(logits: Tensor, rows: list[Row]) -> Tensor:
    """(S,) tokens: the likeliest, or a Gumbel-max draw from each row's own stream (as
    evaluation/generation.py draws)."""

    logits = _leaning(logits, rows)

    def warped(chosen: Tensor | None, decoding: Decoding) -> Tensor:
        part = logits if chosen is None else logits[chosen]
        for warp in warpers(decoding) if decoding.do_sample else ():
            part = warp(None, part)
        return part.float()

    def kind(row: Row) -> Decoding:
        asked = row.ask.decoding
        return Decoding(
            do_sample=asked.do_sample, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p
        )

    scores = _by_kind(rows, kind, warped)
    noise = torch.ones(scores.shape)
    for line, row in zip(noise, rows, strict=True):
        if row.ask.decoding.do_sample:
            line.exponential_(generator=row.generator)
    return (scores - noise.log_().to(scores.device)).argmax(1)


def _leaning(logits: Tensor, rows: list[Row]) -> Tensor:
    """The logits with what requests take from and add to those of single tokens, as OpenAI's API defines
    it."""
    leaning = [i for i, row in enumerate(rows) if row.ask.leans]
    logits = logits.float().clone() if leaning else logits
    for i in leaning:
        ask, added = rows[i].ask, Counter()
        for token, times in Counter(rows[i].tokens).items():
            added[token] = -(ask.frequency_penalty * times + ask.presence_penalty)
        for token, bias in ask.logit_bias:
            added[token] += bias
        logits[i, list(added)] += torch.tensor(list(added.values()), device=logits.device)
    return logits


def _by_kind(
    rows: list[Row], kind: Callable[[Row], Any], work: Callable[[Tensor | None, Any], Tensor]
) -> Tensor:
    """`work` done once for all rows of a kind: (their indices, the kind) -> a line per row; the indices are
    None where all rows are of one kind."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(kind(row), []).append(i)
    if len(groups) == 1:
        return work(None, next(iter(groups)))
    parts = [work(torch.tensor(chosen), of) for of, chosen in groups.items()]
    order = torch.tensor(list(itertools.chain(*groups.values())))
    return torch.cat(parts)[order.argsort()]


def _finite(value: float, otherwise: float | None = None) -> float | None:
    return value if math.isfinite(value) else otherwise
