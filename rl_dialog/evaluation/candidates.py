"""N replies to each held-out context: how near they come to the logged one, and whether the policy's critic
would have chosen better than chance.

After Sodhi et al. 2023 (arXiv 2307.12425, section on evaluation): a similarity at top-k is the largest over
the first k candidates, a click is a similarity above a threshold, and a critic ranks the same candidates
anew. README.md has the definitions.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import Row, encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import (
    Decoding,
    Message,
    Reply,
    beams_of,
    prompt_limits,
    sample_replies,
    stop_ids,
    stream,
)
from rl_dialog.evaluation.intervals import Measure
from rl_dialog.evaluation.metrics import CLICK
from rl_dialog.evaluation.scoring import LoggedReplies, critic_scores, score_replies
from rl_dialog.models.policy import Policy
from rl_dialog.rewards.fitted import ReplyReward
from rl_dialog.rewards.similarity import NEEDS_PATH, Similarity, similarity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REWARD_MODEL = "reward model"
WORDS = ("token_f1", "chrf", "bleu")  # similarities that read no files


@dataclass(frozen=True)
class Candidates:
    """N replies of a policy to each of C held-out contexts, in the order of generation, and how they were
    scored."""

    contexts: list[tuple[Dialog, int]]  # C: a held-out dialog, and which of its messages is the logged reply
    replies: list[list[Reply]]  # (C, N)
    similarity: dict[str, np.ndarray]  # name -> (C, N) similarity to the logged reply
    critic: dict[str, np.ndarray]  # way to rank -> (C, N); the critic's own way first, higher is better
    click_threshold: float = 0.6

    @property
    def count(self) -> int:
        """N."""
        return len(self.replies[0])

    @property
    def own_way(self) -> str:
        """How the policy's own critic ranks: by mean Q where there is a Q, else by the mean
        log-probability."""
        return next(iter(self.critic))


def read_similarities(
    names: Sequence[str], path: str = "", *, flag: str = "--similarities"
) -> dict[str, Similarity]:
    """Name -> function. `path` is the model of those that need one, unless a name brings its own:
    `bleurt=models/bleurt`. Raises UserError, which names the `flag`."""
    similarities: dict[str, Similarity] = {}
    for entry in names:
        name, _, own_path = entry.partition("=")
        if name in similarities:
            raise UserError(f"{flag}: expected each name once, got {name} twice")
        similarities[name] = similarity(name, path=own_path or (path if name in NEEDS_PATH else ""))
    if not similarities:
        raise UserError(f"{flag}: expected at least one, such as {' '.join(WORDS)}")
    return similarities


def make_candidates(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    contexts: Sequence[tuple[Dialog, int]],
    decoding: Decoding,
    *,
    count: int,
    similarities: Mapping[str, Similarity],
    ranker: tuple[Policy, PreTrainedTokenizerFast] | None = None,
    reward_model: ReplyReward | None = None,
    click_threshold: float = 0.6,
    seed: int = 0,
    batch_size: int = 128,
) -> Candidates:
    """Generates `count` replies to each context and scores them; `ranker`, another policy's critic, and a
    `reward_model` rank them too.

    Raises UserError without a context, for fewer than one reply, or for a ranker with other tokens.
    """
    if not contexts or count < 1:
        raise UserError(
            f"expected at least one context and one candidate, got {len(contexts)} contexts and {count} "
            "candidates"
        )
    conversations = [dialog.messages[:i] for dialog, i in contexts]
    replies = candidate_replies(
        policy, tokenizer, conversations, decoding, count=count, seed=seed, batch_size=batch_size
    )
    references = [dialog.messages[i]["content"] or "" for dialog, i in contexts]
    near = {name: similarity_table(function, replies, references) for name, function in similarities.items()}
    critic = critic_table(policy, tokenizer, conversations, replies, decoding)
    if ranker is not None:
        other, its_tokenizer = ranker
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"--ranker: expected a checkpoint with the {len(tokenizer)} tokens of the policy whose "
                f"replies it ranks, got {len(its_tokenizer)} that are not the same"
            )
        table = critic_table(other, tokenizer, conversations, replies, decoding)
        critic |= {f"ranker's {way}": values for way, values in table.items()}
    if reward_model is not None:
        critic[REWARD_MODEL] = reward_table(reward_model, conversations, replies)
    return Candidates(list(contexts), replies, near, critic, click_threshold)


def candidate_replies(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[list[Message]],
    decoding: Decoding,
    *,
    count: int,
    seed: int,
    batch_size: int,
) -> list[list[Reply]]:
    """(C, N) replies in the order of generation.

    Sampling: candidate k of context c draws from the stream (seed, c, k), so a reply depends on neither the
    batch nor N. Otherwise as in the paper: the greedy reply, then the best N - 1 of a beam search of N - 1
    beams (or of `num_beams`, if that is more). Duplicates are kept.
    """
    limits = prompt_limits(policy, decoding)
    prompts = [encode_prompt(messages, tokenizer, **limits) for messages in conversations]
    if decoding.do_sample:
        seeds = [[stream(seed, c, k) for k in range(count)] for c in range(len(conversations))]
        return sample_replies(policy, tokenizer, prompts, decoding, seeds=seeds, batch_size=batch_size)
    greedy = beams_of(policy, tokenizer, prompts, replace(decoding, num_beams=1), batch_size=batch_size)
    if count == 1:
        return list(greedy)
    search = replace(decoding, num_beams=max(count - 1, decoding.num_beams))
    beams = beams_of(policy, tokenizer, prompts, search, batch_size=batch_size)
    return [[*likeliest, *beam[: count - 1]] for likeliest, beam in zip(greedy, beams, strict=True)]


def similarity_table(
    function: Similarity, replies: Sequence[Sequence[Reply]], references: Sequence[str]
) -> np.ndarray:
    """(C, N) similarity of each candidate to its context's logged reply."""
    texts = [reply.text for row in replies for reply in row]
    against = [reference for row, reference in zip(replies, references, strict=True) for _ in row]
    return np.asarray(function(texts, against), dtype=float).reshape(len(replies), -1)


def critic_table(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[list[Message]],
    replies: Sequence[Sequence[Reply]],
    decoding: Decoding,
) -> dict[str, np.ndarray]:
    """Way to rank -> (C, N). Scores the very tokens that were generated, behind the prompt that they
    continued."""
    limits = prompt_limits(policy, decoding)
    stops = stop_ids(policy, tokenizer)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in stops else stops[0] if stops else None
    rows = []
    for messages, candidates in zip(conversations, replies, strict=True):
        prompt = encode_prompt(messages, tokenizer, **limits)
        rows += [
            Row.of_reply(prompt, [*reply.tokens, *([end] if reply.finished else [])]) for reply in candidates
        ]
    scores = score_replies(policy, LoggedReplies(rows, np.arange(len(rows)), len(rows)))
    return {way: values.reshape(len(replies), -1) for way, values in critic_scores(scores).items()}


def reward_table(
    reward_model: ReplyReward, conversations: Sequence[list[Message]], replies: Sequence[Sequence[Reply]]
) -> np.ndarray:
    """(C, N) score of each candidate behind its context."""
    dialogs = [
        [*messages, {"role": "assistant", "content": reply.text}]
        for messages, row in zip(conversations, replies, strict=True)
        for reply in row
    ]
    return np.asarray(reward_model.score(dialogs)).reshape(len(replies), -1)


def top_k(scores: np.ndarray) -> np.ndarray:
    """(C, N) scores of candidates -> (C, N) the best of the first k = 1..N."""
    return np.maximum.accumulate(scores, axis=1)


def ranked(scores: np.ndarray, by: np.ndarray) -> np.ndarray:
    """(C, N) `scores` in falling order of `by`; ties keep the order of generation."""
    return np.take_along_axis(scores, np.argsort(-by, axis=1, kind="stable"), axis=1)


def candidate_measures(candidates: Candidates) -> dict[str, Measure]:
    """Every figure of the candidates; one unit per held-out dialog, so that several contexts of one dialog do
    not pass for independent.

    `top/<metric>@<k>` in the order of generation, `ranked/<way>/<metric>@<k>` in the critic's, `gain/...` the
    second minus the first. Ways besides the critic's own have k = 1 only.
    """
    names = {
        dialog.id: n
        for n, dialog in enumerate({dialog.id: dialog for dialog, _ in candidates.contexts}.values())
    }
    owner = np.array([names[dialog.id] for dialog, _ in candidates.contexts])

    def mean(values: np.ndarray) -> Measure:
        return Measure(np.bincount(owner, values), np.bincount(owner).astype(float))

    tables = dict(candidates.similarity)
    if tables:  # a click is judged by the first similarity
        tables[CLICK] = (next(iter(tables.values())) > candidates.click_threshold).astype(float)
    different = [len({reply.text for reply in row}) / len(row) for row in candidates.replies]
    measures = {"candidates_different": mean(np.array(different))}
    for name, table in tables.items():
        generated = top_k(table)
        measures |= {f"top/{name}@{k + 1}": mean(generated[:, k]) for k in range(candidates.count)}
        for way, way_scores in candidates.critic.items():
            reranked = top_k(ranked(table, way_scores))
            ks = range(candidates.count) if way == candidates.own_way else range(1)
            measures |= {f"ranked/{way}/{name}@{k + 1}": mean(reranked[:, k]) for k in ks}
            measures |= {f"gain/{way}/{name}@{k + 1}": mean(reranked[:, k] - generated[:, k]) for k in ks}
    return measures


def write_candidates(path: Path, candidates: Candidates) -> None:
    """The paper's CSV: index, context, true_response, then for r = 1..N response_r and <metric>_r for every
    similarity."""
    columns = [
        column
        for r in range(1, candidates.count + 1)
        for column in (f"response_{r}", *(f"{name}_{r}" for name in candidates.similarity))
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "context", "true_response", *columns])
        for c, ((dialog, i), replies) in enumerate(zip(candidates.contexts, candidates.replies, strict=True)):
            context = "\n".join(
                f"{message['role']}: {message['content'] or ''}" for message in dialog.messages[:i]
            )
            cells = [
                cell
                for n, reply in enumerate(replies)
                for cell in (reply.text, *(float(t[c, n]) for t in candidates.similarity.values()))
            ]
            writer.writerow([c, context, dialog.messages[i]["content"] or "", *cells])
