"""A reward model over replies, from preferences or ratings: what `prepare --scorers` and `candidates
--reward_model` ask.

    python -m pipelines.fit_reward --run runs/replies --output_dir models/reward
    python -m pipelines.fit_reward --logs preferences.jsonl --output_dir models/reward
    python -m pipelines.fit_reward --logs taskmaster4/reward --output_dir models/reward --folds 5
    python -m pipelines.fit_reward --data data/chats --reward vote --output_dir models/reward
    python -m pipelines.fit_reward --data data/votes --reward vote --output_dir models/upvotes \
        --objective ratings --model_name_or_path tfidf

It learns from answers of the labelling page (`--run`), from TRL's prompt, chosen, rejected or replies rated 0
or 1 (`--logs`), or from a prepared directory and its splits (`--data`). The model: any encoder or language
model of transformers with one output, a small new encoder, or a count of words, `tfidf`, which takes seconds.
One of `--objective ratings` also serves as a scorer of single texts: `prepare --scorers
toxicity=models/toxicity`.

It is judged on conversations that it was not fitted to, beside judges that cost nothing: the longer reply,
the words of the reply, and with `--checkpoint` the likelihood of a policy. With `--folds` every conversation
is judged once, and the model that is kept learns from all of them. rl_dialog/preferences/README.md has the
figures. """

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from rl_dialog.data.files import write_json
from rl_dialog.data.readers import dialogs_of_logs
from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.data.tokenize import LEAST_VOCABULARY, require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.evaluation.reply_judges import MODEL, HeldOut, headline, judged, likelihoods, table, write_card
from rl_dialog.models.device import named_device
from rl_dialog.models.text_reward import Reads, TextReward
from rl_dialog.preferences import replies as preferences
from rl_dialog.preferences.exchange import open_labels
from rl_dialog.preferences.replies import Preferences
from rl_dialog.preferences.reply_fitting import (
    Fitting,
    Objective,
    Scores,
    fit_labels,
    fit_words,
    new_reward,
    plain_judges,
    score,
)
from rl_dialog.rewards import apply_rewards, choose_rewards
from rl_dialog.rewards.tfidf import TfidfClassifier, TfidfSettings
from rl_dialog.run import OnDevice, Output, at_least, claim_output, run
from rl_dialog.training.fitting import fitting_bar

WORDS = "tfidf"


@dataclass(frozen=True)
class FitRewardConfig(Output, OnDevice):
    """What to learn from, and how."""

    run: str = ""
    """a folder of labelled replies that `prefer_replies` filled"""
    labels: str = ""
    """with --run: URL of the label log; by default labels.db in the folder"""
    logs: tuple[str, ...] = ()
    """files and folders: TRL's preferences, rated replies, chats with votes"""
    data: str = ""
    """a directory that `prepare` wrote; its splits hold"""
    reward: str = "logged"
    """with --logs and --data: what tells good replies from bad (logged, vote, or another reward)"""
    above: float = 0.0
    """a rated reply is good when its reward is above this; for toxicity let the toxic ones be the good"""
    below: bool = False
    """turn it around: good is what is not above, and of two replies that with the lower reward is
    preferred"""
    objective: Objective = "pairs"
    """pairs: Bradley and Terry on replies to one context. ratings: a logistic regression on good and bad
    replies of all contexts, whose model scores single texts too. both: their sum"""
    reads: Reads = "conversation"
    """what a score depends on: the reply behind its context, or the reply alone, as a scorer of single texts
    reads it"""
    most_per_context: int = 8
    """most pairs made of the rated replies to one context"""
    model_name_or_path: str = ""
    """tfidf: words and pairs of words are counted, with --objective ratings; else a pretrained encoder or
    language model, a folder or hub name, or a policy's run; by default a small encoder is trained from
    nothing"""
    hidden_size: int = 64
    """width of a new encoder"""
    num_hidden_layers: int = 2
    """layers of a new encoder"""
    vocab_size: int = 4096
    """size of a new encoder's tokenizer"""
    max_length: int = 256
    """tokens of context and reply; of longer ones the oldest messages are left out"""
    fitting: Fitting = field(default_factory=Fitting)
    """how a transformer learns"""
    tfidf: TfidfSettings = field(default_factory=TfidfSettings)
    """how words are counted"""
    validation: float = 0.1
    """share of the conversations that are held out to judge by; not of --data and --run, which have their
    splits"""
    split: str = ""
    """the split to judge by, validation or test; by default both"""
    folds: int = 0
    """judge on so many parts of the conversations, each by a model of the others, and keep a model of all; 0
    judges on one split"""
    checkpoint: str = ""
    """a checkpoint whose likelihood (mean log-probability of a token) is judged beside the model"""
    seed: int = 0
    """seed of the new weights, the order of the labels, and the held-out conversations"""


def main(config: FitRewardConfig) -> dict[str, Any]:
    """Fits, judges and saves; headline figures. Raises UserError or OSError for what the user can fix."""
    _check(config)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    began = time.perf_counter()
    labels = read_labels(config)
    parts = list(divisions(labels, config))
    out = claim_output(config, "fit_reward")
    held_out = Preferences([], [])
    scores: dict[str, Scores] = {}
    for train, test in parts:
        model = fitted(train, config)
        for name, values in _judges(model, train, test, config).items():
            scores[name] = scores.get(name, {}) | values
        held_out = Preferences(held_out.pairs + test.pairs, held_out.ratings + test.ratings)
    if config.folds:
        model, train = fitted(labels, config), labels
    figures = judged(_plain(held_out), scores, noise=config.fitting.noise, zero=config.objective != "pairs")
    sizes = train.sizes()
    _write(out, model, config, {"fitted_to": sizes, "held_out": figures, "parameters": model.size})
    if not config.quiet:
        print(table(figures), flush=True)
    seconds = round(time.perf_counter() - began, 1)
    return {"output_dir": config.output_dir, **sizes, **headline(figures), "seconds": seconds}


def read_labels(config: FitRewardConfig) -> Preferences:
    """What people, or a corpus, said of replies. Raises UserError where there is too little to learn from."""
    pairs, ratings = [], []
    if config.run:
        log, segments = open_labels(config.run, config.labels)
        pairs = preferences.pairs_of_labels(log.labels(), segments)
        log.close()
    if config.logs or config.data:
        bound = {"above": config.above, "below": config.below, "openings": _reads(config) == "reply"}
        ratings = list(preferences.ratings_of(_dialogs(config), config.reward, **bound))
        pairs += preferences.pairs_of_ratings(ratings, most_per_context=config.most_per_context)
    labels = Preferences(pairs, ratings)
    labels.check(config.objective, where=config.run or config.data or ", ".join(config.logs))
    return labels


def divisions(labels: Preferences, config: FitRewardConfig) -> Iterator[tuple[Preferences, Preferences]]:
    """(to fit, to judge by). Raises UserError where there is nothing to fit."""
    if config.folds:
        yield from preferences.folds(labels, config.folds, seed=config.seed)
        return
    kept = (config.split,) if config.split else ("validation", "test")
    train, test = preferences.held_out(labels, kept, validation=config.validation, seed=config.seed)
    if not (train.ratings if config.objective == "ratings" else train.pairs):
        in_all = f"there are {len(labels.pairs)} pairs in all"
        raise UserError(f"expected preferences to learn from in the train split, got none; {in_all}")
    yield train, test


def fitted(labels: Preferences, config: FitRewardConfig) -> TextReward | TfidfClassifier:
    """A model of these labels."""
    if config.model_name_or_path == WORDS:
        return fit_words(labels, config.tfidf)
    shape = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    how = {"objective": config.objective, "settings": config.fitting, "seed": config.seed}
    with fitting_bar(quiet=config.quiet) as progress:
        reward = new_reward(
            labels, config.model_name_or_path, shape, config.max_length, config.reads, seed=config.seed
        )
        return fit_labels(reward.to(named_device(config.device)), labels, **how, progress=progress)


def _reads(config: FitRewardConfig) -> Reads:
    return "reply" if config.model_name_or_path == WORDS else config.reads


def _dialogs(config: FitRewardConfig) -> Iterator[Dialog]:
    if config.data:
        known = load_manifest(config.data)["rewards"]["components"]
        if config.reward not in known:
            expected = f"expected one of {', '.join(known)}, with which {config.data} was prepared"
            raise UserError(f"--reward {config.reward}: {expected}")
        for split in SPLITS:
            yield from read_dialogs(config.data, split)
        return
    rewards = choose_rewards([config.reward])
    for dialog in dialogs_of_logs(config.logs):
        apply_rewards(dialog, rewards, {config.reward: 1.0})
        yield dialog


def _judges(model: Any, train: Preferences, test: Preferences, config: FitRewardConfig) -> dict[str, Scores]:
    """Judge -> what it says of every held-out reply."""
    replies = list({reply.id: reply for reply in test.replies}.values())
    found = {MODEL: score(model, replies), **plain_judges(train, test)}
    if config.checkpoint:
        values = likelihoods(
            config.checkpoint, [reply.context for reply in replies], [reply.text for reply in replies]
        )
        found["likelihood"] = dict(zip((reply.id for reply in replies), values, strict=True))
    return found


def _plain(labels: Preferences) -> HeldOut:
    of = preferences.group_of
    return HeldOut(
        pairs=[(pair.first.id, pair.second.id, pair.preference, of(pair.first)) for pair in labels.pairs],
        ratings=[(rating.reply.id, rating.good, of(rating.reply)) for rating in labels.ratings],
        contexts=[
            ([(rating.reply.id, rating.good) for rating in rated], of(rated[0].reply))
            for rated in preferences.by_context(labels.ratings)
        ],
    )


def _write(
    out: Path, model: TextReward | TfidfClassifier, config: FitRewardConfig, about: dict[str, Any]
) -> None:
    model.to("cpu").save_pretrained(out)
    write_json(out / "metrics.json", about)
    source = config.run or config.data or ", ".join(Path(path).name for path in config.logs)
    sizes = ", ".join(f"{about['fitted_to'][name]} {name}" for name in ("pairs", "ratings", "conversations"))
    facts = [
        f"labels: {Path(source).name}: {sizes}",
        (
            f"objective: {config.objective}; base: {config.model_name_or_path or 'none, a new encoder'}; "
            f"reads the {_reads(config)}"
        ),
        f"{about['parameters']:,} parameters; seed {config.seed}",
    ]
    write_card(out / "README.md", facts, about["held_out"], words=config.model_name_or_path == WORDS)


def _check(config: FitRewardConfig) -> None:
    if sum(map(bool, (config.run, config.logs, config.data))) != 1:
        raise UserError(
            "expected one of --run (of prefer_replies), --logs (preferences, rated replies) and --data (of "
            "prepare)"
        )
    if config.labels and not config.run:
        raise UserError("--labels: expected --run, the folder with the replies that the labels are about")
    if config.data and config.folds:
        raise UserError("--folds: expected --run or --logs; a prepared directory is judged by its own splits")
    if config.model_name_or_path not in ("", WORDS):
        require_hub_name_or_directory(config.model_name_or_path)
    if config.model_name_or_path == WORDS and config.objective != "ratings":
        raise UserError(f"--model_name_or_path tfidf: expected --objective ratings, got {config.objective}")
    if config.split not in ("", "validation", "test"):
        raise UserError(f"expected --split validation or test, or neither for both, got {config.split!r}")
    if not 0 <= config.validation < 1 or config.folds < 0 or config.folds == 1:
        got = f"got {config.validation} and {config.folds}"
        raise UserError(f"expected --validation in [0, 1) and --folds of 0 or at least 2, {got}")
    at_least(config, most_per_context=1, hidden_size=1, num_hidden_layers=1, max_length=16)
    at_least(config, vocab_size=LEAST_VOCABULARY, seed=0)
    if not config.model_name_or_path and config.hidden_size % 32:
        expected = "a multiple of 32 (the width of an attention head)"
        raise UserError(f"expected --hidden_size to be {expected}, got {config.hidden_size}")


if __name__ == "__main__":
    run(FitRewardConfig, main)
