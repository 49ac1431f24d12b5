"""A reward model over replies, from preferences or ratings: what `prepare --scorers reward_model=DIR` and `candidates --reward_model DIR` ask.

    python -m pipelines.fit_reward --run runs/replies --output_dir models/reward                   answers of the labelling page
    python -m pipelines.fit_reward --logs preferences.jsonl --output_dir models/reward             TRL's prompt, chosen, rejected
    python -m pipelines.fit_reward --logs taskmaster4/reward --output_dir models/reward --folds 5  replies rated 0 or 1
    python -m pipelines.fit_reward --data data/chats --reward vote --output_dir models/reward      a prepared directory and its splits

The model: any encoder or language model of transformers with one output (`--model_name_or_path`), or a small new encoder.
It is judged on conversations that it was not fitted to, beside judges that cost nothing: the longer reply, the words of the
reply, and with `--checkpoint` the likelihood of a policy. With `--folds` every conversation is judged once, and the model that
is kept learns from all of them. rl_dialog/preferences/README.md has the figures.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from pipelines.fit_reward_judges import Scores, headline, judged, judges, table
from rl_dialog.data.files import write_json
from rl_dialog.data.readers import Bad, find_logs, read_log
from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.data.tokenize import LEAST_VOCABULARY
from rl_dialog.errors import UserError
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.device import named_device
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences import replies as preferences
from rl_dialog.preferences.exchange import open_labels
from rl_dialog.preferences.replies import Fitting, Preferences, Rating
from rl_dialog.rewards import apply_rewards, choose_rewards
from rl_dialog.run import OnDevice, Output, at_least, claim_output, run


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
    """a rated reply is good when its reward is above this"""
    objective: Literal["pairs", "ratings", "both"] = "pairs"
    """pairs: Bradley and Terry on replies to one context. ratings: a logistic regression on good and bad replies of all contexts. both: their sum"""
    most_per_context: int = 8
    """pairs made of the rated replies to one context"""
    model_name_or_path: str = ""
    """a pretrained encoder or language model, a folder or hub name, or a policy's run; by default a small encoder is trained from nothing"""
    hidden_size: int = 64
    """without --model_name_or_path: its width"""
    num_hidden_layers: int = 2
    """without --model_name_or_path: its layers"""
    vocab_size: int = 4096
    """without --model_name_or_path: size of the tokenizer"""
    max_length: int = 256
    """tokens of context and reply; of longer ones the oldest messages are left out"""
    fitting: Fitting = field(default_factory=Fitting)
    """how it learns"""
    validation: float = 0.1
    """share of the conversations that are held out to judge by; not of --data and --run, which have their splits"""
    split: str = ""
    """the split to judge by, validation or test; by default both"""
    folds: int = 0
    """judge on so many parts of the conversations, each by a model of the others, and keep a model of all; 0 judges on one split"""
    checkpoint: str = ""
    """a checkpoint whose likelihood (mean log-probability of a token) is judged beside the model"""
    seed: int = 0
    """the new weights, the order of the labels, the held-out conversations"""


def main(config: FitRewardConfig) -> dict[str, Any]:
    """Fits, judges and saves; returns headline figures. Raises UserError or OSError for what the user can fix."""
    _check(config)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    began = time.perf_counter()
    labels = read_labels(config)
    out = claim_output(config, "fit_reward")
    held_out = Preferences([], [])
    scores: dict[str, Scores] = {}
    for train, test in divisions(labels, config):
        model = fitted(train, config)
        found = judges(model, train, test, config)
        scores = {name: scores.get(name, {}) | values for name, values in found.items()}
        held_out = Preferences(held_out.pairs + test.pairs, held_out.ratings + test.ratings)
    if config.folds:
        model, train = fitted(labels, config), labels
    figures = judged(held_out, scores, config)
    sizes = {"pairs": len(train.pairs), "ratings": len(train.ratings), "conversations": len({preferences.group_of(r) for r in train.replies})}
    about = {"fitted_to": sizes, "held_out": figures, "parameters": sum(p.numel() for p in model.model.parameters())}
    _write(out, model, config, about)
    if not config.quiet:
        print(table(figures), flush=True)
    return {"output_dir": config.output_dir, **sizes, **headline(figures), "seconds": round(time.perf_counter() - began, 1)}


def read_labels(config: FitRewardConfig) -> Preferences:
    """What people, or a corpus, said of replies. Raises UserError where there is too little to learn from."""
    pairs, ratings = [], []
    if config.run:
        log, segments = open_labels(config.run, config.labels)
        pairs = preferences.pairs_of_labels(log.labels(), segments)
        log.close()
    if config.logs or config.data:
        ratings = list(_ratings(config))
        pairs += preferences.pairs_of_ratings(ratings, most_per_context=config.most_per_context)
    where = config.run or config.data or ", ".join(config.logs)
    good = sum(rating.value > config.above for rating in ratings)
    if config.objective != "ratings" and not pairs:
        hint = ": try --objective ratings" if 0 < good < len(ratings) else ""
        raise UserError(f"{where}: expected two replies to one context of which one is preferred, found none among {len(ratings)} rated{hint}")
    if config.objective != "pairs" and not 0 < good < len(ratings):
        raise UserError(f"{where}: --objective {config.objective}: expected good and bad replies, got {good} good ones of {len(ratings)} rated")
    return Preferences(pairs, ratings)


def divisions(labels: Preferences, config: FitRewardConfig) -> Iterator[tuple[Preferences, Preferences]]:
    """(to fit, to judge by). Raises UserError where there is nothing to fit."""
    if config.folds:
        fold = _folds(labels, config)
        for number in range(config.folds):
            yield labels.where(lambda reply, n=number: fold[reply.id] != n), labels.where(lambda reply, n=number: fold[reply.id] == n)
        return
    split: dict[str, str] = {}  # of a conversation: its replies may have come from several places
    for reply in labels.replies:
        split.setdefault(preferences.group_of(reply), preferences.split_of(reply, validation=config.validation, seed=config.seed))
    kept = ("validation", "test") if not config.split else (config.split,)
    train, test = (labels.where(lambda reply, of=of: split[preferences.group_of(reply)] in of) for of in (("train",), kept))
    if not (train.ratings if config.objective == "ratings" else train.pairs):
        raise UserError(f"expected preferences to learn from in the train split, got none; there are {len(labels.pairs)} pairs in all")
    yield train, test


def fitted(labels: Preferences, config: FitRewardConfig) -> TextReward:
    """A model of these labels."""
    torch.manual_seed(config.seed)  # of the new weights
    if config.model_name_or_path:
        reward = TextReward.from_base(
            resolve(config.model_name_or_path) if Path(config.model_name_or_path).is_dir() else config.model_name_or_path,
            max_length=config.max_length,
        )
    else:
        shape = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_length")}
        texts = (message["content"] for reply in labels.replies for message in preferences.conversation_of(reply))
        reward = TextReward.new(texts, **shape)
    reward.model.to(named_device(config.device))
    pairs = labels.pairs if config.objective != "ratings" else []
    ratings = [(rating.reply, rating.value > config.above) for rating in labels.ratings] if config.objective != "pairs" else []
    with tqdm(unit="step", disable=True if config.quiet else None) as bar:
        preferences.fit(reward, pairs, ratings, settings=config.fitting, seed=config.seed, progress=lambda *said: _show(bar, *said))
    return reward


def _ratings(config: FitRewardConfig) -> Iterator[Rating]:
    """The replies that the reward applies to."""
    for dialog in _dialogs(config):
        for i, reply in preferences.replies_of(dialog):
            value = dialog.messages[i].get("rewards", {}).get(config.reward)
            if value is not None:
                yield Rating(reply, value)


def _dialogs(config: FitRewardConfig) -> Iterator[Dialog]:
    if config.data:
        known = load_manifest(config.data)["rewards"]["components"]
        if config.reward not in known:
            raise UserError(f"--reward {config.reward}: expected one of {', '.join(known)}, with which {config.data} was prepared")
        for split in SPLITS:
            yield from read_dialogs(config.data, split)
    rewards = choose_rewards([config.reward])
    logs, bad, _ = find_logs(config.logs) if config.logs else ([], [], [])
    for item in (*bad, *(item for log in logs for item in read_log(log))):
        if isinstance(item, Bad):
            raise UserError(f"{item.file} {item.where}: {item.reason} (`prepare` puts such records into quarantine: --data)")
        apply_rewards(item, rewards, {config.reward: 1.0})
        yield item


def _folds(labels: Preferences, config: FitRewardConfig) -> dict[str, int]:
    """The fold of each reply: conversations in the order of a hash, dealt out in turn. Raises UserError for too few of them."""
    group = {reply.id: preferences.group_of(reply) for reply in labels.replies}
    order = sorted(set(group.values()), key=lambda name: hashlib.sha256(f"{config.seed}\0{name}".encode()).digest())
    if len(order) < config.folds:
        raise UserError(f"--folds {config.folds}: expected at least as many conversations, got {len(order)}")
    place = {name: n % config.folds for n, name in enumerate(order)}
    return {id: place[name] for id, name in group.items()}


def _write(folder: Path, model: TextReward, config: FitRewardConfig, about: dict[str, Any]) -> None:
    model.model.cpu()
    model.save_pretrained(folder)
    write_json(folder / "metrics.json", about)
    (folder / "README.md").write_text(_card(config, about), encoding="utf-8")


def _card(config: FitRewardConfig, about: dict[str, Any]) -> str:
    source = config.run or config.data or ", ".join(Path(path).name for path in config.logs)
    sizes = about["fitted_to"]
    lines = [
        f"# {Path(config.output_dir).name}",
        "",
        "A reward model over replies, fitted by rl_dialog: it scores the last message of a conversation.",
        "",
        f"- labels: {Path(source).name}: {sizes['pairs']} pairs, {sizes['ratings']} ratings, {sizes['conversations']} conversations",
        f"- objective: {config.objective}; base: {config.model_name_or_path or 'none, a new encoder'}",
        f"- {about['parameters']:,} parameters; seed {config.seed}",
        "",
        "On conversations that it was not fitted to, with 95 % intervals over conversations:",
        "",
        *("    " + line for line in table(about["held_out"]).splitlines()),
        "",
        "```bash",
        "python -m pipelines.prepare --logs LOGS --output_dir DATA --rewards.learned 1 --scorers reward_model=THIS_FOLDER",
        "python -m pipelines.candidates --data DATA --checkpoint RUN --output_dir OUT --reward_model THIS_FOLDER",
        "```",
        "",
        "`rl_dialog.models.text_reward.TextReward.from_pretrained(folder).score(conversations)` gives the scores; so does",
        "`transformers.AutoModelForSequenceClassification` (num_labels 1) on what the tokenizer's chat template renders.",
    ]
    return "\n".join(lines) + "\n"


def _show(bar: tqdm, step: int, steps: int, loss: float) -> None:
    bar.total = steps
    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    bar.update(step - bar.n)


def _check(config: FitRewardConfig) -> None:
    if sum(map(bool, (config.run, config.logs, config.data))) != 1:
        raise UserError("expected one of --run (of prefer_replies), --logs (preferences, rated replies) and --data (of prepare)")
    if config.labels and not config.run:
        raise UserError("--labels: expected --run, the folder with the replies that the labels are about")
    if config.data and config.folds:
        raise UserError("--folds: expected --run or --logs; a prepared directory is judged by its own splits")
    if config.split not in ("", "validation", "test"):
        raise UserError(f"expected --split validation or test, or neither for both, got {config.split!r}")
    if not 0 <= config.validation < 1 or config.folds < 0 or config.folds == 1:
        raise UserError(f"expected --validation in [0, 1) and --folds of 0 or at least 2, got {config.validation} and {config.folds}")
    at_least(config, most_per_context=1, hidden_size=1, num_hidden_layers=1, max_length=16, vocab_size=LEAST_VOCABULARY, seed=0)
    if not config.model_name_or_path and config.hidden_size % 32:
        raise UserError(f"expected --hidden_size to be a multiple of 32 (the width of an attention head), got {config.hidden_size}")


if __name__ == "__main__":
    run(FitRewardConfig, main)
