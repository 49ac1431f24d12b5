"""Replies in conversations that go on: what a policy has read of one stays in its cache from turn to turn.

`generation.py` reads a whole prompt for every reply. Here every conversation has a row of models/slots.py,
and only what is new in its prompt is read: the end of the last reply, and what was said to it. Each reply
draws from its own stream as there, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from rl_dialog.data.beginnings import shared_beginnings
from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import (
    Decoding,
    Message,
    RecordingSampler,
    Reply,
    RowSampler,
    SampledReply,
    evaluating,
    generations,
    latent_noise,
    prompt_limits,
    read_reply,
    sampled_reply,
    sampler,
    stop_ids,
    warpers,
)
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What a model's generation config may say without another reply: lengths and ends are given with every call,
# and how to draw from the logits too.
KNOWN = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "num_beams"),
    *("use_cache", "_from_model_config", "transformers_version"),
}


def can_keep(policy: Policy, decoding: Decoding) -> bool:
    """Whether `Conversations` says what generation.py says: one reply is drawn, nothing but the method's
    logits decides on it, and the model's attention needs no more than positions and a mask."""
    if decoding.num_beams > 1 or generations(policy, decoding) > 1:
        return False
    if set(policy.generation_config.to_diff_dict()) - KNOWN:
        return False
    try:
        with evaluating(policy):
            require_plain_attention(policy)
    except UserError:
        return False
    return True


class Conversations:
    """The running conversations of a policy, each known by a key."""

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerFast, decoding: Decoding, *, rows: int
    ) -> None:
        """rows: conversations at a time, at most. Raises UserError for settings that contradict each
        other."""
        decoding.check()
        self.policy, self.tokenizer, self.decoding = policy, tokenizer, decoding
        self.limits = prompt_limits(policy, decoding)
        self.slots = policy.new_slots(rows, self.limits["max_length"] + decoding.max_new_tokens)
        self.stops = stop_ids(policy, tokenizer)
        self.keys: list[Any] = []  # of the rows in use
        self.held: list[list[int]] = [[] for _ in range(rows)]  # the tokens that each row has read

    @torch.inference_mode()
    def answer(self, conversations: Mapping[Any, list[Message]], seeds: Sequence[int]) -> list[Reply]:
        """A reply in each conversation, in the order given; number i draws from the stream seeds[i]. Those
        that are not named any more are over, and their rows go to new ones."""
        _, said = self._turn(conversations, seeds, partial(sampler, self.decoding))
        return [read_reply(said[key], self.policy, self.tokenizer) for key in conversations]

    @torch.inference_mode()
    def recorded(
        self, conversations: Mapping[Any, list[Message]], seeds: Sequence[int]
    ) -> list[SampledReply]:
        """`answer`, with the ids that were read and drawn and how likely each was (`recorded_replies`)."""
        recorders: list[RecordingSampler] = []

        def draw(row_seeds: Sequence[int]) -> LogitsProcessorList:
            recorders.append(RecordingSampler(row_seeds))
            return LogitsProcessorList([*warpers(self.decoding), *recorders])

        prompts, said = self._turn(conversations, seeds, draw)
        logp = torch.stack(recorders[0].logp, 1).tolist()
        likely = dict(zip(prompts, logp, strict=True))
        return [
            sampled_reply(prompts[key], said[key], likely[key], seed, self.policy, self.tokenizer)
            for key, seed in zip(conversations, seeds, strict=True)
        ]

    def _turn(
        self,
        conversations: Mapping[Any, list[Message]],
        seeds: Sequence[int],
        draw: Callable[[Sequence[int]], LogitsProcessorList],
    ) -> tuple[dict[Any, list[int]], dict[Any, list[int]]]:
        """The prompt of each conversation, and the new tokens of a reply to it. `draw` makes what draws them
        from the seeds of the rows in use."""
        self._seat(conversations)
        order = {key: i for i, key in enumerate(conversations)}
        prompts = [encode_prompt(conversations[key], self.tokenizer, **self.limits) for key in self.keys]
        keys, row_seeds = self.keys, [seeds[order[key]] for key in self.keys]
        with evaluating(self.policy):
            said = self._say(prompts, draw(row_seeds), latent_noise(self.policy, self.decoding, row_seeds))
        return dict(zip(keys, prompts, strict=True)), dict(zip(keys, said, strict=True))

    def _seat(self, keys: Mapping[Any, Any]) -> None:
        """Gives every key a row; the rows in use are the first ones."""
        seated = set(self.keys)
        new = [key for key in keys if key not in seated]
        for row in reversed(range(len(self.keys))):
            if self.keys[row] in keys:
                continue
            if new:
                self.keys[row] = new.pop()
                continue
            last = len(self.keys) - 1
            if row != last:
                self.slots.swap(row, last)
                self.held[row], self.held[last] = self.held[last], self.held[row]
                self.keys[row] = self.keys[last]
            self.keys.pop()
        self.keys += new

    def _say(
        self, prompts: list[list[int]], draw: LogitsProcessorList, noise: Tensor | None
    ) -> list[list[int]]:
        """The new tokens of a reply to each row's prompt. What has been said is not read beside what goes on:
        its row leaves the first slots."""
        pieces = []
        for row, prompt in enumerate(prompts):
            known = self.slots.reusable(self.held[row], prompt)
            self.held[row] = prompt[:known]
            pieces.append(prompt[known:])
        said: list[list[int]] = [[] for _ in prompts]
        ids = torch.empty(len(prompts), 0, dtype=torch.int64)
        order, running = list(range(len(prompts))), len(prompts)  # whose row is in each slot; how many go on
        self._begin(order, prompts, pieces)
        while running:
            seated = order[:running]
            logits = self._read(
                seated, [pieces[row] for row in seated], None if noise is None else noise[seated]
            )
            for each in draw:
                if isinstance(each, RowSampler):
                    each.rows = seated
            tokens = draw(ids[:running], logits).argmax(1).tolist()
            for row, token in zip(seated, tokens, strict=True):
                said[row].append(token)
                pieces[row] = [token]
            for slot in reversed(range(running)):
                if tokens[slot] in self.stops or len(said[order[slot]]) == self.decoding.max_new_tokens:
                    running -= 1
                    self._exchange(order, slot, running)
        self.keys = [self.keys[row] for row in order]
        self.held[: len(order)] = [self.held[row] for row in order]
        return said

    def _begin(self, order: list[int], prompts: list[list[int]], pieces: list[list[int]]) -> None:
        """Reads what new conversations begin with alike once, in one row for all that have it, where this
        saves more than what their rows still hold of others. (A state goes on from the end of a message
        only.)"""
        new = [row for row in order if 2 * len(self.held[row]) < len(prompts[row])]
        if len(new) < 2 or self.policy.is_hierarchical:
            return
        shared = shared_beginnings(_padded([prompts[row] for row in new]))
        held = sum(len(self.held[row]) for row in new)
        if shared is None or held >= shared.length * (len(new) - len(shared.rows)):
            return
        readers = [new[i] for i in shared.rows]
        for slot, row in enumerate(readers):
            self._exchange(order, slot, order.index(row))
            self.held[row] = []
        self._read(readers, [prompts[row][:-1][: shared.length] for row in readers], None)
        place = {row: slot for slot, row in enumerate(order)}
        followers = {row: readers[i] for row, i in zip(new, shared.of, strict=True) if row != readers[i]}
        self.slots.copy(
            [place[reader] for reader in followers.values()], [place[row] for row in followers], shared.length
        )
        for row, reader in followers.items():
            self.held[row] = list(self.held[reader])
        for row in new:
            pieces[row] = prompts[row][len(self.held[row]) :]

    def _exchange(self, order: list[int], one: int, other: int) -> None:
        if one != other:
            self.slots.swap(one, other)
            order[one], order[other] = order[other], order[one]

    def _read(self, rows: Sequence[int], pieces: Sequence[list[int]], noise: Tensor | None) -> Tensor:
        """(B, V) logits behind a piece of each of these rows, which sit in the first slots."""
        lengths = torch.tensor([len(piece) for piece in pieces])
        real = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
        tokens = torch.zeros(real.shape, dtype=torch.int64)
        tokens[real] = torch.tensor([token for piece in pieces for token in piece])
        before = torch.tensor([len(self.held[row]) for row in rows])
        positions = (before[:, None] + torch.arange(real.shape[1])) * real
        device = self.policy.device
        out = self.policy.read(
            tokens.to(device),
            self.slots,
            first=0,
            positions=positions.to(device),
            real=real.to(device),
            wanted=(torch.arange(len(pieces), device=device), (lengths - 1).to(device)),
            noise=noise,
        )
        for row, piece in zip(rows, pieces, strict=True):
            self.held[row] += piece
        return self.policy.method.decode(out)


def _padded(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """(B, T) with -1, which is no token, behind the shorter ones."""
    ids = np.full((len(prompts), max(map(len, prompts))), -1)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids


def require_plain_attention(policy: Policy) -> None:
    """Raises UserError for a model that the slots cannot carry: it needs more than positions and a mask."""
    tokens = torch.randint(
        0, policy.get_input_embeddings().num_embeddings, (2, 9), generator=torch.Generator().manual_seed(0)
    ).to(policy.device)
    try:
        got, expected = _said_from_slots(policy, tokens), _said_at_once(policy, tokens)
    except Exception as error:  # whatever it is, it is this architecture that does not fit
        raise UserError(
            f"{policy.config.model_type}: cannot be served, its attention needs more than positions and a "
            f"mask ({type(error).__name__}: {error})"
        ) from error
    if not torch.allclose(
        got.nan_to_num(neginf=-1e9), expected.nan_to_num(neginf=-1e9), atol=1e-2, rtol=1e-2
    ):
        raise UserError(
            f"{policy.config.model_type}: cannot be served, its logits with keys and values kept in slots "
            "are not those it has without"
        )


def _said_from_slots(policy: Policy, tokens: Tensor) -> Tensor:
    """(B, V) behind tokens (B, 9), read in two pieces into the slots from 1 on."""
    slots, positions, real = (
        policy.new_slots(3, 16),
        torch.arange(9, device=tokens.device).expand(2, 9),
        torch.ones_like(tokens, dtype=torch.bool),
    )
    for part in (slice(0, 4), slice(4, 9)):
        wanted = torch.arange(2, device=tokens.device), torch.full((2,), -1, device=tokens.device)
        out = policy.read(
            tokens[:, part], slots, first=1, positions=positions[:, part], real=real[:, part], wanted=wanted
        )
    with torch.inference_mode():
        return policy.method.decode(out)


@torch.inference_mode()
def _said_at_once(policy: Policy, tokens: Tensor) -> Tensor:
    """The same without slots."""
    return policy(tokens, use_cache=False, logits_to_keep=1).logits[:, 0]
