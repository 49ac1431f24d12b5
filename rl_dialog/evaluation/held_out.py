"""What is measured of one policy on held-out logs: scores of logged replies, candidates beside them, answers,
the return estimated from logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl_dialog.data.pairs import said
from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.data.tokenize import TEMPLATE_KEYS, load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.candidates import WORDS, candidate_measures, make_candidates, read_similarities
from rl_dialog.evaluation.fqe import FQE
from rl_dialog.evaluation.generation import Decoding, generate_replies, load_for_decoding, stream
from rl_dialog.evaluation.latents import latent_figures, latent_measures
from rl_dialog.evaluation.metrics import Pairs, answer_measures, find_pairs, pairwise_accuracy
from rl_dialog.evaluation.ope import (
    ESTIMATORS,
    Behaviour,
    Discount,
    all_estimates,
    known_outcomes,
    read_behaviour,
)
from rl_dialog.evaluation.reward_report import drawn
from rl_dialog.evaluation.runs import existing, nearest
from rl_dialog.evaluation.scoring import (
    LoggedReplies,
    ReplyScores,
    critic_scores,
    held_out_measures,
    logged_replies,
    score_replies,
)
from rl_dialog.evaluation.summary import Answer, RunResult
from rl_dialog.models.checkpoint import load_prior, resolve
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import Policy
from rl_dialog.rewards.fitted import ReplyReward, load_reward_model
from rl_dialog.rewards.similarity import Similarity


@dataclass(frozen=True)
class HeldOutConfig(Decoding):
    """Which logs, and what to measure on them."""

    data: str = ""
    """a directory that `prepare` wrote: held-out replies, contexts, and which rewards were trained on"""
    split: str = ""
    """split of the data to score; by default test, or validation where test is empty"""
    held_out: int = 512
    """dialogs of the split to draw and score, or a few more, since those that begin alike are drawn together;
    0 takes all"""
    contexts: int = 32
    """held-out contexts to answer; 0 answers none"""
    context_replies: Literal["last", "all", "good"] = "last"
    """what a context comes before: the last reply of a dialog, or any of its replies (a random choice of
    `contexts` of them), or any that earned more than 0, which nobody knows of replies without a reward"""
    candidates: int = 0
    """replies per context to compare with the logged one, and to let the policy's critic rank; 0 makes
    none"""
    similarities: tuple[str, ...] = WORDS
    """how replies are compared (rl_dialog/rewards/README.md has them all); clicks are judged by the first.
    NAME=PATH gives one a model of its own"""
    similarity_path: str = ""
    """model folder of the similarities that need one"""
    answer_similarities: tuple[str, ...] = ("average", "extrema", "greedy", "emotion")
    """how the answers to the contexts are compared with what the log has: by vectors of words and by how they
    feel; embedding=PATH compares what they mean; NAME=PATH gives one a model of its own"""
    click_threshold: float = 0.6
    """a candidate more similar than this counts as a click"""
    ranker: str = ""
    """checkpoint whose critic ranks every policy's candidates too (Sodhi et al. 2023 let ilql's V rank those
    of others)"""
    reward_model: str = ""
    """a model of `fit_reward`: it ranks the candidates, too, and is the reward `learned`"""
    ope: tuple[str, ...] = ()
    """estimates of the return from logs alone: fqe, dm, wis, pdwis"""
    behaviour: str = ""
    """checkpoint that stands for the policy that wrote the logs (wis, pdwis): a bc run, or a run's prior
    folder"""
    gamma: float = 1.0
    """discount of the estimates from logs; 1 estimates what an environment's return measures"""
    discount: Literal["token", "turn"] = "token"
    """apply gamma at every token or only at the end of a reply"""
    fqe: FQE = field(default_factory=FQE)
    """how fitted Q evaluation learns"""
    max_length: int = 1024
    """longest row in tokens when scoring held-out dialogs"""
    batch_size: int = 128
    """conversations stepped together"""
    seed: int = 0
    """seed of conversation partners, sampling and bootstrap"""
    device: str = "auto"
    """where policies run (actors use the CPU): cpu, cuda, or auto: a GPU where there is one"""
    quiet: bool = False
    """print only the final line of JSON"""


@dataclass
class HeldOut:
    """Logged dialogs to score, and contexts to answer. Token rows are made once per tokenizer."""

    split: str
    dialogs: list[Dialog]
    pairs: Pairs
    contexts: list[tuple[Dialog, int]]  # dialog, index of the reply to replace
    trained: list[str]  # rewards with a weight in the training data
    settings: dict[str, Any] = field(default_factory=dict)  # of the `prepare` that computed them
    similarities: dict[str, Similarity] = field(default_factory=dict)
    answer_similarities: dict[str, Similarity] = field(default_factory=dict)
    ranker: tuple[Policy, Any] | None = None  # and its tokenizer
    reward_model: ReplyReward | None = None
    train: list[Dialog] = field(default_factory=list)  # what fitted Q evaluation learns from
    behaviour: Behaviour | None = None
    rows: dict[tuple[str, int, str], LoggedReplies] = field(default_factory=dict)


def check_held_out(config: HeldOutConfig) -> None:
    """What can be known to fail before anything is loaded. Raises UserError."""
    if (config.candidates or config.ope) and not config.data:
        raise UserError(
            f"--{'candidates' if config.candidates else 'ope'}: expected --data, the prepared directory whose"
            " held-out dialogs to use"
        )
    if config.ranker and not config.candidates:
        raise UserError("--ranker: expected --candidates, the number of replies to rank")
    if config.candidates < 0 or config.contexts < 0 or (config.candidates and not config.contexts):
        raise UserError(
            "expected candidates and contexts of at least 0, and contexts for candidates, got "
            f"{config.candidates} and {config.contexts}"
        )
    for name in config.ope:
        if name not in ESTIMATORS:
            raise UserError(
                f"unknown estimate {name!r}: expected --ope with any of "
                f"{', '.join(ESTIMATORS)}.{nearest(name, ESTIMATORS)}"
            )
    weighted = [name for name in config.ope if name in ("wis", "pdwis")]
    if weighted and not config.behaviour:
        raise UserError(
            f"--ope {' '.join(weighted)}: expected --behaviour, a checkpoint that stands for the policy that "
            "wrote the logs (a bc run)"
        )
    if weighted:
        resolve(existing(config.behaviour))
    if not 0 <= config.gamma <= 1:
        raise UserError(f"--gamma: expected a discount from 0 to 1, got {config.gamma:g}")
    config.fqe.check()


def read_held_out(config: HeldOutConfig) -> HeldOut:
    """What `config` asks of its data directory. Raises UserError for what is not there."""
    manifest = load_manifest(config.data)
    sizes = {split: figures["dialogs"] for split, figures in manifest["splits"].items()}
    split = config.split or next((name for name in ("test", "validation") if sizes.get(name)), "test")
    dialogs = _drawn_of(config.data, split, sizes.get(split, 0), config.held_out)
    if not dialogs:
        raise UserError(
            f"{config.data}: expected held-out dialogs in the split {split!r}, found none; the splits hold "
            f"{sizes}: name another --split, or let prepare hold some out (--test; --split_by dialog)"
        )
    weights = {name: row["weight"] for name, row in manifest["rewards"]["components"].items()}
    contexts = _contexts(dialogs, config.contexts, which=config.context_replies, seed=config.seed)
    if config.candidates and not contexts:
        raise UserError(
            f"--candidates {config.candidates}: expected held-out contexts to answer, found none in the split"
            f" {split!r} of {config.data}"
        )
    trained = [name for name, weight in weights.items() if weight]
    settings = manifest.get("settings", {})
    held_out = HeldOut(split, dialogs, find_pairs(dialogs), contexts, trained, settings)
    _add_judges(held_out, config)
    return held_out


def _drawn_of(data: str, split: str, count: int, most: int) -> list[Dialog]:
    """So many of the `count` dialogs of a split, all with 0: by chance, because files come one after the
    other, and the first of them would speak for all."""
    return drawn(lambda: read_dialogs(data, split), count, most or count)


def _add_judges(held_out: HeldOut, config: HeldOutConfig) -> None:
    """What judges candidates, and what estimates from logs compare with, where they are asked for."""
    if config.contexts and config.answer_similarities:
        flag = "--answer_similarities"
        held_out.answer_similarities = read_similarities(config.answer_similarities, flag=flag)
    if config.candidates:
        held_out.similarities = read_similarities(config.similarities, config.similarity_path)
        if config.ranker:
            path = resolve(existing(config.ranker))
            policy = load_for_decoding(path).to(named_device(config.device))
            held_out.ranker = policy, load_tokenizer(path)
        if config.reward_model:
            held_out.reward_model = load_reward_model(config.reward_model, device=named_device(config.device))
    if "fqe" in config.ope:
        sizes = load_manifest(config.data)["splits"]
        held_out.train = _drawn_of(config.data, "train", sizes["train"]["dialogs"], config.fqe.dialogs)
    if {"wis", "pdwis"} & set(config.ope):
        how = {"max_length": config.max_length, "device": named_device(config.device)}
        held_out.behaviour = read_behaviour(existing(config.behaviour), held_out.dialogs, **how)


def _contexts(
    dialogs: Sequence[Dialog], count: int, *, which: str = "last", seed: int = 0
) -> list[tuple[Dialog, int]]:
    """So many last replies of dialogs, or of all (or all good) replies, drawn by `seed` and in their order;
    every context once."""
    by_messages: dict[str, tuple[Dialog, int]] = {}
    for dialog in dialogs:
        for i in dialog.replies[-1:] if which == "last" else dialog.replies:
            reward = dialog.messages[i].get("reward")
            if i and (which != "good" or (reward is not None and reward > 0)):
                by_messages.setdefault("\n".join(map(said, dialog.messages[:i])), (dialog, i))
    contexts = list(by_messages.values())
    if len(contexts) <= count:
        return contexts
    return [
        contexts[n]
        for n in sorted(
            np.random.default_rng([seed, len(contexts)]).choice(len(contexts), count, replace=False)
        )
    ]


def score_held_out(
    result: RunResult, policy: Policy, tokenizer: Any, held_out: HeldOut, config: HeldOutConfig
) -> None:
    """Fills `result` with everything that needs logs and no environment."""
    logged = _logged(policy, tokenizer, held_out, config)
    scores = _score_replies(result, policy, logged, held_out)
    if config.ope:
        _estimate_return(result, policy, tokenizer, scores, logged, held_out, config)
    if config.candidates:
        settings = {
            "similarities": held_out.similarities,
            "ranker": held_out.ranker,
            "reward_model": held_out.reward_model,
        }
        settings |= {
            "click_threshold": config.click_threshold,
            "seed": config.seed,
            "batch_size": config.batch_size,
        }
        settings |= {"count": config.candidates}
        result.candidates = make_candidates(
            policy, tokenizer, held_out.contexts, Decoding.of(config), **settings
        )
        result.measures |= candidate_measures(result.candidates)
    result.answers = _answer(result, policy, tokenizer, held_out, config)
    result.measures |= answer_measures(
        [answer.context for answer in result.answers],
        [answer.reply.text for answer in result.answers],
        [answer.logged for answer in result.answers],
        held_out.answer_similarities,
    )


def _score_replies(
    result: RunResult, policy: Policy, logged: LoggedReplies, held_out: HeldOut
) -> ReplyScores:
    """Perplexity, KL and the critic."""
    no_prior = ""
    try:
        prior = load_prior(result.directory)
    except ValueError as error:
        prior, no_prior = None, str(error)
    scores = score_replies(policy, logged, prior=prior)
    result.measures |= held_out_measures(scores, logged)
    if policy.has_latents:
        result.measures |= latent_measures(latent_figures(policy, logged), logged)
        note = "with latents at their prior's mean, in policy and prior"
        result.notes |= {name: note for name in ("kl", "kl_per_reply") if name in result.measures}
    if no_prior or scores.kl_missing:
        result.notes |= dict.fromkeys(("kl", "kl_per_reply"), no_prior or scores.kl_missing)
    if not held_out.pairs.contexts:
        result.notes["critic"] = "the held-out dialogs have no context with replies of different reward"
        return scores
    for name, values in critic_scores(scores).items():
        measure = pairwise_accuracy(values, held_out.pairs)
        result.measures.setdefault("critic", measure)
        result.measures[f"critic/{name}"] = measure
    return scores


def _estimate_return(
    result: RunResult,
    policy: Policy,
    tokenizer: Any,
    scores: ReplyScores,
    logged: LoggedReplies,
    held_out: HeldOut,
    config: HeldOutConfig,
) -> None:
    """What the policy would earn, from the logs alone."""
    sources = {"dialogs": held_out.dialogs, "behaviour": held_out.behaviour}
    if "fqe" in config.ope:
        sources["train"] = known_outcomes(_logged(policy, tokenizer, held_out, config, part="train")).rows
    settings = {
        "discount": Discount(config.gamma, config.discount),
        "fqe": config.fqe,
        "seed": config.seed,
        "quiet": config.quiet,
    }
    estimates = all_estimates(config.ope, policy, scores, logged, **sources, **settings)
    result.measures |= estimates.measures
    result.notes |= estimates.notes


def _logged(
    policy: Policy, tokenizer: Any, held_out: HeldOut, config: HeldOutConfig, *, part: str = "held out"
) -> LoggedReplies:
    """The held-out dialogs, or the train part, as a policy's tokenizer cuts them."""
    max_length = min(config.max_length, policy.longest_row or config.max_length)
    key = tokenizer.backend_tokenizer.to_str() + tokenizer.chat_template, max_length, part
    if key not in held_out.rows:
        dialogs = held_out.train if part == "train" else held_out.dialogs
        held_out.rows[key] = logged_replies(dialogs, tokenizer, max_length=max_length)
    return held_out.rows[key]


def _answer(
    result: RunResult, policy: Policy, tokenizer: Any, held_out: HeldOut, config: HeldOutConfig
) -> list[Answer]:
    """A reply to each held-out context: the first candidate, where that is what `config` would draw
    anyway."""
    conversations = [dialog.messages[:i] for dialog, i in held_out.contexts]
    seeds = [stream(config.seed, n, 0) for n in range(len(conversations))]
    if result.candidates and (config.do_sample or config.num_beams == 1):
        replies = [candidates[0] for candidates in result.candidates.replies]
    else:
        settings = {"seeds": seeds, "batch_size": config.batch_size}
        replies = generate_replies(policy, tokenizer, conversations, Decoding.of(config), **settings)
    answers = []
    for (dialog, i), conversation, reply in zip(held_out.contexts, conversations, replies, strict=True):
        context = [
            {key: m[key] for key in TEMPLATE_KEYS if key in m}
            | ({"weight": 0} if m["role"] == "assistant" else {})
            for m in conversation
        ]
        messages = [*context, {"role": "assistant", "content": reply.text}]
        answers.append(
            Answer(
                dialog.id,
                Dialog(f"{dialog.id}:{i}", messages, dialog.source, truncated=True),
                reply,
                dialog.messages[i]["content"] or "",
            )
        )
    return answers
