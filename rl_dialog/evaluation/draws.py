"""Several replies to each context, distinct from each other and from what the human said.

Each draw has its own random stream, named by (seed, context, number of the draw): what is said to a context
depends neither on the batch size nor on the other contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, Message, Reply, beams_of, draw, prompt_limits, stream
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Context:
    """What was said before a reply, and the human's reply."""

    # Names its random streams: stable numbers, so that the same context draws the same replies in any
    # selection.
    stream: tuple[int, ...]
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

    Sampling draws `count`, and then up to `tries` - 1 times as many as duplicates left missing; a beam search
    keeps its best distinct ones. Texts are compared without the spaces around them. Raises UserError for
    settings that contradict each other.
    """
    check_draws(decoding, count=count, tries=tries)
    limits = prompt_limits(policy, decoding)
    prompts = [encode_prompt(context.messages, tokenizer, **limits) for context in contexts]
    drawn = [Drawn([]) for _ in contexts]
    if not decoding.do_sample:
        beams = beams_of(policy, tokenizer, prompts, decoding, batch_size=batch_size)
        for context, of_context, replies in zip(contexts, drawn, beams, strict=True):
            _keep(of_context, context.human, replies, count)
        return drawn
    draw_counts = [0] * len(contexts)
    for _ in range(tries):
        draw_ranges = [
            range(begin, begin + count - len(d.replies)) for begin, d in zip(draw_counts, drawn, strict=True)
        ]
        seeds = [
            [stream(seed, *context.stream, k) for k in numbers]
            for context, numbers in zip(contexts, draw_ranges, strict=True)
        ]
        sampled = draw(policy, tokenizer, prompts, decoding, seeds=seeds, batch_size=batch_size)
        for i, replies in enumerate(sampled):
            _keep(drawn[i], contexts[i].human, replies, count)
            draw_counts[i] += len(replies)
    return drawn


def check_draws(decoding: Decoding, *, count: int, tries: int) -> None:
    """Raises UserError for settings that contradict each other."""
    decoding.check()
    if decoding.num_generations > 1 or decoding.rank_by:
        raise UserError(
            "expected no num_generations and rank_by: candidates are drawn one by one, and none is chosen "
            "among several"
        )
    if count < 1 or tries < 1:
        raise UserError(f"expected at least one candidate and one try, got {count} and {tries}")
    if not decoding.do_sample and decoding.num_beams < count:
        raise UserError(
            f"expected at least as many beams as candidates, got num_beams {decoding.num_beams} for {count}: "
            f"set num_beams {count}, or sample"
        )


def _keep(drawn: Drawn, human: str, replies: Sequence[Reply], count: int) -> None:
    texts = {human.strip(), *(reply.text for reply in drawn.replies)}
    for reply in replies:
        if reply.text in texts:
            drawn.duplicates += 1
        elif len(drawn.replies) < count:
            drawn.replies.append(reply)
            texts.add(reply.text)
