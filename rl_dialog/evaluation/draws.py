"""Several replies to each context, distinct from each other and from what the human said.

A prompt is read once for all its replies, prompts of similar length share a batch, and each draw has its own random stream, named by (seed, context,
number of the draw): what is said to a context depends neither on the batch size nor on the other contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.evaluation.generation import (
    Decoding,
    Message,
    Reply,
    beams_of,
    evaluating,
    left_padded,
    limits,
    pad_id,
    prompt_room,
    read_reply,
    sampler,
    stream,
)
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Context:
    """What was said before a reply, and the human's reply."""

    stream: tuple[int, ...]  # names its random streams: stable numbers, so that the same context draws the same replies in any selection
    messages: list[Message]
    human: str


@dataclass
class Drawn:
    """The replies to one context, in the order drawn (beams: best first)."""

    replies: list[Reply]
    duplicates: int = 0  # draws that repeated the human or an earlier one


def draw_replies(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    contexts: Sequence[Context],
    decoding: Decoding,
    *,
    count: int,
    tries: int = 2,
    seed: int = 0,
    batch_size: int = 128,
) -> list[Drawn]:
    """Up to `count` distinct replies to each context; `batch_size` replies are generated together.

    Sampling draws `count`, and then up to `tries` - 1 times as many as duplicates left missing; a beam search keeps its best distinct ones.
    Texts are compared without the spaces around them. Raises ValueError for settings that contradict each other.
    """
    check_draws(decoding, count=count, tries=tries)
    room = prompt_room(policy, decoding)
    prompts = [encode_prompt(context.messages, tokenizer, max_length=room) for context in contexts]
    drawn = [Drawn([]) for _ in contexts]
    if not decoding.do_sample:
        for i, replies in zip(range(len(contexts)), beams_of(policy, tokenizer, prompts, decoding, batch_size=batch_size), strict=True):
            _keep(drawn[i], contexts[i].human, replies, count)
        return drawn
    asked = [0] * len(contexts)
    for _ in range(tries):
        jobs = {i: range(asked[i], asked[i] + count - len(d.replies)) for i, d in enumerate(drawn) if len(d.replies) < count}
        seeds = {i: [stream(seed, *contexts[i].stream, k) for k in numbers] for i, numbers in jobs.items()}
        for i, replies in _sampled(policy, tokenizer, {i: prompts[i] for i in jobs}, decoding, seeds, batch_size):
            _keep(drawn[i], contexts[i].human, replies, count)
            asked[i] += len(replies)
    return drawn


def check_draws(decoding: Decoding, *, count: int, tries: int) -> None:
    """Raises ValueError for settings that contradict each other."""
    decoding.check()
    if decoding.num_generations > 1 or decoding.rank_by:
        raise ValueError("expected no num_generations and rank_by: candidates are drawn one by one, and none is chosen among several")
    if count < 1 or tries < 1:
        raise ValueError(f"expected at least one candidate and one try, got {count} and {tries}")
    if not decoding.do_sample and decoding.num_beams < count:
        raise ValueError(
            f"expected at least as many beams as candidates, got num_beams {decoding.num_beams} for {count}: set num_beams {count}, or sample"
        )


def _keep(drawn: Drawn, human: str, replies: Sequence[Reply], count: int) -> None:
    known = {human.strip(), *(reply.text for reply in drawn.replies)}
    for reply in replies:
        if reply.text in known:
            drawn.duplicates += 1
        elif len(drawn.replies) < count:
            drawn.replies.append(reply)
            known.add(reply.text)


@torch.no_grad()
def _sampled(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: dict[int, list[int]],
    decoding: Decoding,
    seeds: dict[int, list[int]],
    batch_size: int,
) -> Iterator[tuple[int, list[Reply]]]:
    """(number of a prompt, a reply per seed of it), batch by batch."""
    order = sorted(prompts, key=lambda i: (len(prompts[i]), i))
    with evaluating(policy):
        while order:
            part, rows = [], 0
            while order and (not part or rows + len(seeds[order[0]]) <= batch_size):
                part.append(order.pop(0))
                rows += len(seeds[part[-1]])
            produced = iter(_continue(policy, tokenizer, [prompts[i] for i in part], [seeds[i] for i in part], decoding))
            for i in part:
                yield i, [read_reply(next(produced), policy, tokenizer) for _ in seeds[i]]


def _continue(
    policy: Policy, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], seeds: list[list[int]], decoding: Decoding
) -> list[list[int]]:
    """The new tokens of len(seeds[i]) replies to prompt i, one after the other."""
    ids, mask = left_padded(prompts, pad_id(tokenizer), policy.device)
    rows = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([len(s) for s in seeds])).to(policy.device)
    cache = _read(policy, ids[:, :-1], mask[:, :-1], rows, decoding.max_new_tokens) if ids.shape[1] > 1 else None
    produced = policy.generate(
        input_ids=ids[rows],
        attention_mask=mask[rows],
        past_key_values=cache,
        do_sample=False,
        logits_processor=sampler(decoding, [seed for of_prompt in seeds for seed in of_prompt]),
        **limits(policy, tokenizer, decoding),
    )
    return produced[:, ids.shape[1] :].tolist()


def _read(policy: Policy, ids: Tensor, mask: Tensor, rows: Tensor, room: int) -> Any:
    """The KV cache of the prompts (C, T), one row for each of `rows` (R,), with room for the replies."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = policy(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_select_indices(rows)
    if type(cache) is DynamicCache:
        cache.layers = [RoomyLayer(layer, room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """A layer of a KV cache with room behind its tokens: a new one is written there, where DynamicLayer copies all before it."""

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.keys, self.values, self.room = layer.keys, layer.values, room
        self.stores: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """(R, heads, T, size) states of all tokens, the new ones last."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        if self.stores is None or end > self.stores[0].shape[-2] or self.keys.data_ptr() != self.stores[0].data_ptr():  # beams replace `keys`
            self.stores = tuple(
                torch.cat([old, old.new_empty(*old.shape[:2], end - begin + self.room, old.shape[3])], 2) for old in (self.keys, self.values)
            )
        for store, new in zip(self.stores, (key_states, value_states), strict=True):
            store[:, :, begin:end] = new
        self.keys, self.values = (store[:, :, :end] for store in self.stores)
        return self.keys, self.values
