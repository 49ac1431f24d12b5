"""Replies of a policy, in batches, such that what is said in one conversation never depends on the others in
its batch.

Sampling draws from one random stream per reply: a Gumbel-max draw inside `generate` (`RowSampler`) instead of
the global generator that all rows share. So the same seed gives the same replies for any batch size and
number of workers, and no global random state is read or changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_dialog.config import finite
from rl_dialog.data.by_length import batches
from rl_dialog.data.rollout import Spoken
from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.scoring import WAYS, all_rankings
from rl_dialog.models.checkpoint import method_name, read_method, resolve
from rl_dialog.models.latents import latent_seed
from rl_dialog.models.policy import Policy
from rl_dialog.models.prefill import read_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]


@dataclass(frozen=True)
class Decoding:
    """How replies are drawn from a policy. `evaluate`, `chat`, `serve` and the returns that `train` measures
    share these defaults: what is measured is what is talked to."""

    max_new_tokens: int = 64
    """longest reply, its end-of-turn token included"""
    max_prompt_length: int = 512
    """longest prompt in tokens, of a model that was made here no longer than those it learned from; older
    messages are left out first (the system prompt stays)"""
    do_sample: bool = True
    """sample from the policy; otherwise the likeliest token, or the best beam"""
    temperature: float = 1.0
    """softmax temperature when sampling"""
    top_k: int = 0
    """sample among the k likeliest tokens; 0 keeps all"""
    top_p: float = 1.0
    """sample among the likeliest tokens of this total probability"""
    num_beams: int = 1
    """beams of a beam search; only without sampling"""
    num_generations: int = 0
    """draw so many replies and say the best of them; 0 is what the method wants, one for most"""
    rank_by: str = ""
    """what best means (rl_dialog/evaluation/README.md has the ways); by default the method's own, else mean
    Q, else the mean log-probability"""

    @staticmethod
    def of(config: Decoding) -> Decoding:
        """The part of a verb's config that says how replies are drawn."""
        return Decoding(*(getattr(config, name) for name in Decoding.__dataclass_fields__))

    @property
    def is_plain(self) -> bool:
        """Is a token drawn from the whole vocabulary, so that its probability is the policy's own?"""
        return self.do_sample and not self.top_k and self.top_p == 1

    def check(self) -> None:
        """Raises UserError for settings that contradict each other or make no sense."""
        finite(self, "decoding")
        if self.do_sample and self.num_beams > 1:
            raise UserError(
                f"expected sampling or a beam search, got do_sample with num_beams={self.num_beams}: set "
                "num_beams 1 or do_sample false"
            )
        if self.num_generations < 0:
            raise UserError(f"expected num_generations of at least 0, got {self.num_generations}")
        if self.num_generations > 1 and not self.do_sample:
            raise UserError(
                f"num_generations {self.num_generations}: expected sampling, to draw several different "
                "replies (do_sample true, in a request a temperature above 0), got the likeliest one alone"
            )
        if self.rank_by not in ("", *WAYS):
            raise UserError(f"unknown rank_by {self.rank_by!r}: expected one of {', '.join(WAYS)}")
        if self.max_new_tokens < 1 or self.max_prompt_length < 1 or self.num_beams < 1:
            raise UserError(
                f"expected max_new_tokens, max_prompt_length and num_beams of at least 1, got {self}"
            )
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError(
                f"expected temperature > 0, 0 < top_p <= 1 and top_k >= 0, got {self}; for the likeliest "
                "reply set do_sample false"
            )


@dataclass(frozen=True)
class Reply:
    """One generated reply."""

    text: str  # before the end-of-turn token, without special tokens
    tokens: tuple[int, ...]  # as generated, without the end-of-turn token
    finished: bool  # False: cut off at max_new_tokens
    score: float | None = None  # of a beam: mean log-probability per token


@dataclass(frozen=True)
class SampledReply(Reply):
    """One reply with all that a policy needs to learn from it."""

    spoken: Spoken = Spoken((), (), ())


@dataclass(frozen=True)
class Choice:
    """Several replies to one prompt, and how good the policy finds each of them."""

    replies: list[Reply]
    scores: dict[str, np.ndarray]  # (replies,) as `reply_scores` gives them

    @property
    def chosen(self) -> int:
        """The index of the one that is said."""
        return int(self.scores["score"].argmax())


class RowSampler(LogitsProcessor):
    """Sampling as greedy decoding: argmax(log p + Gumbel noise) is distributed as p, and each row has its own
    stream of noise."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.rows = list(range(len(seeds)))  # whose scores come next, where some replies have ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(scores) != len(self.rows):
            raise UserError(f"expected {len(self.rows)} rows, one per stream, got {len(scores)}")
        noise = torch.empty(len(scores), scores.shape[1])
        for numbers, row in zip(noise, self.rows, strict=True):
            numbers.exponential_(generator=self.generators[row])
        return scores.float() - noise.log_().to(scores.device)


class RecordingSampler(RowSampler):
    """A RowSampler that remembers how likely what it draws is, under the distribution that it draws from:
    temperature, top-k and top-p have been at work."""

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__(seeds)
        self.logp: list[Tensor] = []  # (B,) for each token; NaN of a row that has ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noisy = super().__call__(input_ids, scores)
        drawn = noisy.argmax(1, keepdim=True)  # what greedy decoding takes from it
        logp = scores.new_full((len(self.generators),), torch.nan, dtype=torch.float32)
        logp[self.rows] = scores.float().log_softmax(1).gather(1, drawn).squeeze(1)
        self.logp.append(logp)
        return noisy


def stream(seed: int, *keys: int) -> int:
    """A 63-bit seed for one purpose among those of `seed`: a hash, so that neighbouring seeds share
    nothing."""
    return int(np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)[0] >> 1)


def check_strength(beta: float) -> None:
    """Raises UserError for a `--beta` with which a policy would choose what its values say is worst."""
    if beta < 0:
        raise UserError(f"--beta: expected a number of at least 0, how strongly values steer, got {beta:g}")


def load_for_decoding(directory: str | Path, *, beta: float | None = None) -> Policy:
    """A checkpoint's policy in eval mode, decoding with another `beta` if given. Raises UserError when its
    method has no beta."""
    place = resolve(directory)
    method = read_method(place)
    if beta is None:
        return Policy.from_pretrained(place)
    check_strength(beta)
    if not method.acts_with_beta:
        raise UserError(
            f"{directory} was trained with {method_name(method)}, which has no beta to set: leave --beta out"
        )
    return Policy.from_pretrained(place, method=finite(replace(method, beta=beta), method_name(method)))


def generate_replies(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[list[Message]],
    decoding: Decoding,
    *,
    seeds: Sequence[int],
    batch_size: int = 128,
) -> list[Reply]:
    """One reply per conversation, in the order given; conversation i draws from the stream `seeds[i]`."""
    limits = prompt_limits(policy, decoding)
    prompts = [encode_prompt(messages, tokenizer, **limits) for messages in conversations]
    if decoding.do_sample:
        return [
            reply
            for (reply,) in sample_replies(
                policy, tokenizer, prompts, decoding, seeds=[[seed] for seed in seeds], batch_size=batch_size
            )
        ]
    return [best for best, *_ in beams_of(policy, tokenizer, prompts, decoding, batch_size=batch_size)]


@torch.no_grad()
def recorded_replies(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[list[Message]],
    decoding: Decoding,
    *,
    seeds: Sequence[int],
    batch_size: int = 128,
) -> list[SampledReply]:
    """What `generate_replies` gives, with the ids that were read and drawn and how likely each was.

    Raises UserError where replies are not plainly sampled: a beam or the best of several draws has no
    probability that could be told.
    """
    decoding.check()
    if not decoding.do_sample or generations(policy, decoding) > 1:
        raise UserError(
            "expected replies that are sampled, one per turn, to learn from, got do_sample "
            f"{str(decoding.do_sample).lower()} with num_generations {generations(policy, decoding)}"
        )
    limits = prompt_limits(policy, decoding)
    prompts = [encode_prompt(messages, tokenizer, **limits) for messages in conversations]
    found: dict[int, SampledReply] = {}
    with evaluating(policy):
        for indices in batches([len(prompt) for prompt in prompts], batch_size):
            recorder = RecordingSampler([seeds[i] for i in indices])
            processors = LogitsProcessorList([*warpers(decoding), recorder])
            streams = [[seeds[i]] for i in indices]
            chosen = [prompts[i] for i in indices]
            produced = _continue(policy, tokenizer, chosen, decoding, streams, processors=processors)
            logp = torch.stack(recorder.logp, 1).tolist()
            for i, tokens, likely in zip(indices, produced, logp, strict=True):
                found[i] = sampled_reply(prompts[i], tokens, likely, seeds[i], policy, tokenizer)
    return [found[i] for i in range(len(prompts))]


def sampled_reply(
    prompt: Sequence[int],
    tokens: Sequence[int],
    logp: Sequence[float],
    seed: int,
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
) -> SampledReply:
    """What was drawn behind a prompt from the stream `seed`, with how likely each token was; behind the end
    of turn is padding."""
    reply = read_reply(tokens, policy, tokenizer)
    drawn = len(reply.tokens) + reply.finished
    latent = latent_seed(seed) if policy.has_latents else None
    spoken = Spoken(tuple(prompt), tuple(tokens[:drawn]), tuple(logp[:drawn]), latent)
    return SampledReply(reply.text, reply.tokens, reply.finished, None, spoken)


def sample_replies(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    *,
    seeds: Sequence[Sequence[int]],
    batch_size: int,
) -> list[list[Reply]]:
    """Reply k to prompt i from the stream seeds[i][k], or where the best of n is said, the best of the
    streams (seeds[i][k], 0 to n - 1)."""
    decoding.check()
    if generations(policy, decoding) == 1 or not prompts:
        return draw(policy, tokenizer, prompts, decoding, seeds=seeds, batch_size=batch_size)
    choices = choices_of(policy, tokenizer, prompts, decoding, seeds=seeds, batch_size=batch_size)
    return [[choice.replies[choice.chosen] for choice in of_prompt] for of_prompt in choices]


def choose_reply(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    decoding: Decoding,
    *,
    seed: int,
) -> Choice:
    """What `generate_replies` chooses among where the best of several is said."""
    prompt = encode_prompt(messages, tokenizer, **prompt_limits(policy, decoding))
    ((choice,),) = choices_of(
        policy, tokenizer, [prompt], decoding, seeds=[[seed]], batch_size=generations(policy, decoding)
    )
    return choice


def choices_of(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    *,
    seeds: Sequence[Sequence[int]],
    batch_size: int,
) -> list[list[Choice]]:
    """Choice k for prompt i is among the replies from the streams (seeds[i][k], 0 to n - 1)."""
    count = generations(policy, decoding)
    streams = [[stream(seed, k) for seed in of_prompt for k in range(count)] for of_prompt in seeds]
    drawn = draw(policy, tokenizer, prompts, decoding, seeds=streams, batch_size=batch_size)
    reply_prompts = [prompt for prompt, replies in zip(prompts, drawn, strict=True) for _ in replies]
    with evaluating(policy):
        scores = reply_scores(
            policy, tokenizer, reply_prompts, [reply for replies in drawn for reply in replies], decoding
        )
    score_groups = iter(
        [
            {name: values[start : start + count] for name, values in scores.items()}
            for start in range(0, len(reply_prompts), count)
        ]
    )
    return [
        [Choice(replies[k * count : (k + 1) * count], next(score_groups)) for k in range(len(choice_seeds))]
        for replies, choice_seeds in zip(drawn, seeds, strict=True)
    ]


@torch.no_grad()
def draw(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    *,
    seeds: Sequence[Sequence[int]],
    batch_size: int,
) -> list[list[Reply]]:
    """Reply k to prompt i from the stream seeds[i][k]. A prompt is read once for all its replies, prompts of
    similar length share a batch."""
    replies: list[list[Reply]] = [[] for _ in prompts]
    order = sorted((i for i in range(len(prompts)) if seeds[i]), key=lambda i: (len(prompts[i]), i))
    with evaluating(policy):
        while order:
            batch, rows = [], 0
            while order and (not batch or rows + len(seeds[order[0]]) <= batch_size):
                batch.append(order.pop(0))
                rows += len(seeds[batch[-1]])
            produced = iter(
                _continue(policy, tokenizer, [prompts[i] for i in batch], decoding, [seeds[i] for i in batch])
            )
            for i in batch:
                replies[i] = [read_reply(next(produced), policy, tokenizer) for _ in seeds[i]]
    return replies


def _continue(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    seeds: Sequence[Sequence[int]],
    streamer: Any = None,
    processors: LogitsProcessorList | None = None,
) -> list[list[int]]:
    """The new tokens of len(seeds[i]) replies to prompt i, one after the other."""
    ids, mask = left_padded(prompts, pad_id(tokenizer), policy.device)
    rows = torch.repeat_interleave(
        torch.arange(len(prompts)), torch.tensor([len(of_prompt) for of_prompt in seeds])
    ).to(policy.device)
    row_seeds = [seed for of_prompt in seeds for seed in of_prompt]
    produced = policy.generate(
        input_ids=ids[rows],
        attention_mask=mask[rows],
        past_key_values=read_prompts(policy, ids, mask, rows, room=decoding.max_new_tokens),
        do_sample=False,
        logits_processor=processors or sampler(decoding, row_seeds),
        noise=latent_noise(policy, decoding, row_seeds),
        streamer=streamer,
        **limits(policy, tokenizer, decoding),
    )
    return produced[:, ids.shape[1] :].tolist()


def generations(policy: Policy, decoding: Decoding) -> int:
    """How many replies to choose among. A method that chooses needs sampling; greedy and beam search ask for
    its likeliest reply instead."""
    return (decoding.num_generations or policy.method.num_generations) if decoding.do_sample else 1


def reply_scores(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    replies: list[Reply],
    decoding: Decoding,
) -> dict[str, np.ndarray]:
    """How good the policy finds each reply: its `score`, and what that is made of, a value and where the
    method wants it the log-probability."""
    method, end = policy.method, [tokenizer.eos_token_id]
    ids = [[*reply.tokens, *(end if reply.finished or not reply.tokens else [])] for reply in replies]
    way = decoding.rank_by or method.rank_by or ("mean Q" if method.heads.q else "mean log-probability")
    rankings = all_rankings(policy, prompts, ids, by=way)
    if not method.rerank_log_prob_weight:
        return {way: rankings[way], "score": rankings[way]}
    weight = method.rerank_log_prob_weight * policy.value_unit  # Q is in units of reward here
    logp = rankings["log-probability"]
    return {way: rankings[way], "log-probability": logp, "score": rankings[way] + weight * logp}


def beam_replies(
    policy: Policy, tokenizer: PreTrainedTokenizerFast, messages: list[Message], decoding: Decoding
) -> list[Reply]:
    """All `num_beams` results of a beam search, best first, with their scores (sum of log-probabilities /
    number of tokens)."""
    prompt = encode_prompt(messages, tokenizer, **prompt_limits(policy, decoding))
    return next(beams_of(policy, tokenizer, [prompt], decoding, batch_size=decoding.num_beams))


@torch.no_grad()
def beams_of(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    *,
    batch_size: int,
) -> Iterator[list[Reply]]:
    """`beam_replies` to each prompt, given as tokens, in the order given; `batch_size` beams share a batch,
    prompts of similar length."""
    beams = replace(decoding, do_sample=False)
    beams.check()
    width, by_prompt = beams.num_beams, {}
    settings = {
        "num_beams": width,
        "num_return_sequences": width,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with evaluating(policy):
        for indices in batches([len(prompt) for prompt in prompts], max(1, batch_size // width)):
            ids, mask = left_padded([prompts[i] for i in indices], pad_id(tokenizer), policy.device)
            result = policy.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                **limits(policy, tokenizer, beams),
                **settings,
            )
            scores = result.sequences_scores.tolist() if width > 1 else [None] * len(indices)
            rows = [
                read_reply(row, policy, tokenizer) for row in result.sequences[:, ids.shape[1] :].tolist()
            ]
            replies = [replace(reply, score=score) for reply, score in zip(rows, scores, strict=True)]
            by_prompt |= {i: replies[n * width : (n + 1) * width] for n, i in enumerate(indices)}
    yield from (by_prompt[i] for i in range(len(prompts)))


@torch.no_grad()
def stream_reply(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    decoding: Decoding,
    *,
    seed: int,
    streamer: Any = None,
) -> Reply:
    """One reply, its tokens handed to a transformers `streamer` as they come."""
    decoding.check()
    prompt = encode_prompt(messages, tokenizer, **prompt_limits(policy, decoding))
    if (
        generations(policy, decoding) > 1 or decoding.num_beams > 1
    ):  # nothing can be shown before the best reply is known
        (reply,) = generate_replies(policy, tokenizer, [messages], decoding, seeds=[seed])
        for tokens in (prompt, reply.tokens) if streamer else ():
            streamer.put(torch.tensor([tokens]))
        if streamer:
            streamer.end()
        return reply
    with evaluating(policy):
        return read_reply(
            _continue(policy, tokenizer, [prompt], decoding, [[seed]], streamer)[0], policy, tokenizer
        )


def sampler(decoding: Decoding, seeds: Sequence[int]) -> LogitsProcessorList:
    """The processors that make greedy decoding sample as `decoding` says."""
    return LogitsProcessorList([*warpers(decoding), RowSampler(seeds)] if decoding.do_sample else [])


def latent_noise(policy: Policy, decoding: Decoding, seeds: Sequence[int]) -> Tensor | None:
    """The seeds (B,) of each row's latents, for policies that have them: without sampling they are the
    prior's mean."""
    if not policy.has_latents or not decoding.do_sample:
        return None
    return torch.tensor([latent_seed(seed) for seed in seeds], device=policy.device)


def warpers(decoding: Decoding) -> list[LogitsProcessor]:
    """What temperature, top-k and top-p make of logits."""
    processors: list[LogitsProcessor] = []
    if decoding.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k:
        processors.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1.0:
        processors.append(TopPLogitsWarper(decoding.top_p))
    return processors


def rank_weights(count: int) -> list[float]:
    """How likely each of `count` beams is chosen, best first: proportional to count - 1 - rank, so the last
    one never is; a single one always."""
    if count == 1:
        return [1.0]
    total = count * (count - 1) / 2
    return [(count - 1 - rank) / total for rank in range(count)]


def choose_beam(replies: Sequence[Reply], rng: np.random.Generator) -> tuple[int, list[float]]:
    """The index of the chosen beam and the probability that each had: empty replies are dropped; if none is
    left, all are equally likely."""
    spoken = [i for i, reply in enumerate(replies) if reply.text.strip()]
    odds = [0.0] * len(replies)
    weighted = (
        zip(spoken, rank_weights(len(spoken)), strict=True)
        if spoken
        else enumerate([1 / len(replies)] * len(replies))
    )
    for i, weight in weighted:
        odds[i] = weight
    return int(rng.choice(len(replies), p=odds)), odds


def read_reply(tokens: Sequence[int], policy: Policy, tokenizer: PreTrainedTokenizerFast) -> Reply:
    """Generated ids to a Reply."""
    stops = set(stop_ids(policy, tokenizer))
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    reply_tokens = list(tokens[:end])
    return Reply(
        tokenizer.decode(reply_tokens, skip_special_tokens=True).strip(), tuple(reply_tokens), end is not None
    )


def prompt_limits(policy: Policy, decoding: Decoding) -> dict[str, int]:
    """How many tokens a prompt may have, for `encode_prompt`: such that the longest reply still fits the
    model's context, and with older messages no more than a model that was made here has learned to read."""
    context = policy.context or decoding.max_prompt_length + decoding.max_new_tokens
    room = min(decoding.max_prompt_length, context - decoding.max_new_tokens)
    if room < 1:
        raise UserError(
            f"expected room for a prompt, got max_new_tokens {decoding.max_new_tokens} with a model of "
            f"{context} positions"
        )
    return {"max_length": room, "usual": policy.lengths.prompt if policy.lengths else room}


def stop_ids(policy: Policy, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that end a reply: the tokenizer's end of turn and those that the model's generation config
    names."""
    config_ids = policy.generation_config.eos_token_id
    ids = [config_ids] if isinstance(config_ids, int) else list(config_ids or [])
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T) ids and attention mask, padded on the left, as `generate` wants them."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def limits(policy: Policy, tokenizer: PreTrainedTokenizerFast, decoding: Decoding) -> dict[str, Any]:
    return {
        "max_new_tokens": decoding.max_new_tokens,
        "eos_token_id": stop_ids(policy, tokenizer),
        "pad_token_id": pad_id(tokenizer),
    }


def pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


@contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Dropout off, and as it was afterwards."""
    training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(training)
