"""A reward model over replies: what to learn it from and how, as settings, and the way from there to a model.

labels, logs or a prepared directory -> read_labels -> divisions -> fitted
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rl_dialog.config import at_least
from rl_dialog.data.readers import dialogs_of_logs
from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.data.tokenize import LEAST_VOCABULARY, require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.models.device import named_device
from rl_dialog.models.text_reward import Reads, TextReward
from rl_dialog.preferences import replies as preferences
from rl_dialog.preferences.exchange import open_labels
from rl_dialog.preferences.reliability import UNTRUSTED, judgements
from rl_dialog.preferences.replies import Preferences
from rl_dialog.preferences.reply_batches import ALONE, Worker
from rl_dialog.preferences.reply_fitting import Fitting, Objective, fit_labels, fit_words, new_reward
from rl_dialog.rewards import apply_rewards, choose_rewards
from rl_dialog.rewards.tfidf import TfidfClassifier, TfidfSettings
from rl_dialog.training.fitting import fitting_bar

WORDS = "tfidf"


@dataclass(frozen=True)
class ReplyRewardSettings:
    """What to learn from, and how."""

    run: str = ""
    """a folder of labelled replies that `prefer_replies` filled"""
    labels: str = ""
    """with --run: URL of the label log; by default labels.db in the folder"""
    opinions: Literal["weighted", "first"] = "weighted"
    """with --run, where several people compared a pair or there are gold pairs. weighted: what is most
    probably right, and how surely, from all answers and the reliability of each labeller (Dawid and Skene).
    first: the earliest answer, whoever gave it"""
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
    seed: int = 0
    """seed of the new weights, the order of the labels, and the held-out conversations"""

    @property
    def what_is_read(self) -> Reads:
        """A count of words reads the reply alone."""
        return "reply" if self.model_name_or_path == WORDS else self.reads

    @property
    def source(self) -> str:
        """Where the labels are from, for messages."""
        return self.run or self.data or ", ".join(self.logs)

    def check(self) -> None:
        """Raises UserError for what no model can be learnt from, or cannot be judged."""
        if sum(map(bool, (self.run, self.logs, self.data))) != 1:
            raise UserError(
                "expected one of --run (of prefer_replies), --logs (preferences, rated replies) and --data "
                "(of prepare)"
            )
        if self.opinions == "first" and not self.run:
            raise UserError("--opinions: expected --run, the folder with the labels of several people")
        if self.labels and not self.run:
            raise UserError("--labels: expected --run, the folder with the replies that the labels are about")
        if self.data and self.folds:
            raise UserError(
                "--folds: expected --run or --logs; a prepared directory is judged by its own splits"
            )
        if self.split not in ("", "validation", "test"):
            raise UserError(f"expected --split validation or test, or neither for both, got {self.split!r}")
        if not 0 <= self.validation < 1 or self.folds < 0 or self.folds == 1:
            got = f"got {self.validation} and {self.folds}"
            raise UserError(f"expected --validation in [0, 1) and --folds of 0 or at least 2, {got}")
        self._check_model()

    def _check_model(self) -> None:
        if self.model_name_or_path not in ("", WORDS):
            require_hub_name_or_directory(self.model_name_or_path)
        if self.model_name_or_path == WORDS and self.objective != "ratings":
            raise UserError(f"--model_name_or_path tfidf: expected --objective ratings, got {self.objective}")
        at_least(self, most_per_context=1, hidden_size=1, num_hidden_layers=1, max_length=16)
        at_least(self, vocab_size=LEAST_VOCABULARY, seed=0)
        if not self.model_name_or_path and self.hidden_size % 32:
            expected = "a multiple of 32 (the width of an attention head)"
            raise UserError(f"expected --hidden_size to be {expected}, got {self.hidden_size}")


def read_labels(settings: ReplyRewardSettings) -> Preferences:
    """What people, or a corpus, said of replies. Raises UserError where there is too little to learn from."""
    pairs, ratings = [], []
    if settings.run:
        log, segments = open_labels(settings.run, settings.labels)
        said = judgements(log.answers()) if settings.opinions == "weighted" else log.labels()
        pairs = [pair for pair in preferences.pairs_of_labels(said, segments) if pair.noise < UNTRUSTED]
        log.close()
    if settings.logs or settings.data:
        bound = {"above": settings.above, "below": settings.below}
        openings = settings.what_is_read == "reply"
        dialogs = _dialogs(settings)
        ratings = list(preferences.ratings_of(dialogs, settings.reward, **bound, openings=openings))
        pairs += preferences.pairs_of_ratings(ratings, most_per_context=settings.most_per_context)
    labels = Preferences(pairs, ratings)
    labels.check(settings.objective, where=settings.source)
    return labels


def _dialogs(settings: ReplyRewardSettings) -> Iterator[Dialog]:
    """The dialogs of the data or the logs, with the reward that tells good replies from bad."""
    if settings.data:
        components = load_manifest(settings.data)["rewards"]["components"]
        if settings.reward not in components:
            expected = f"expected one of {', '.join(components)}, with which {settings.data} was prepared"
            raise UserError(f"--reward {settings.reward}: {expected}")
        for split in SPLITS:
            yield from read_dialogs(settings.data, split)
        return
    rewards = choose_rewards([settings.reward])
    for dialog in dialogs_of_logs(settings.logs):
        apply_rewards(dialog, rewards, {settings.reward: 1.0})
        yield dialog


def divisions(
    labels: Preferences, settings: ReplyRewardSettings
) -> Iterator[tuple[Preferences, Preferences]]:
    """(to fit, to judge by). Raises UserError where there is nothing to fit."""
    if settings.folds:
        yield from preferences.folds(labels, settings.folds, seed=settings.seed)
        return
    splits = (settings.split,) if settings.split else ("validation", "test")
    how = {"validation": settings.validation, "seed": settings.seed}
    train, test = preferences.held_out(labels, splits, **how)
    if not (train.ratings if settings.objective == "ratings" else train.pairs):
        in_all = f"there are {len(labels.pairs)} pairs in all"
        raise UserError(f"expected preferences to learn from in the train split, got none; {in_all}")
    yield train, test


def fitted(
    labels: Preferences,
    settings: ReplyRewardSettings,
    *,
    device: str = "cpu",
    quiet: bool = True,
    worker: Worker = ALONE,
) -> TextReward | TfidfClassifier:
    """A model of these labels. `worker`: which part of each update this process computes, where several
    processes learn together."""
    base = settings.model_name_or_path
    if base == WORDS:
        return fit_words(labels, settings.tfidf)
    shape = {name: getattr(settings, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    how = {"objective": settings.objective, "settings": settings.fitting, "seed": settings.seed}
    with fitting_bar(quiet=quiet) as progress:
        sizes = shape, settings.max_length, settings.reads
        reward = new_reward(labels, base, *sizes, seed=settings.seed).to(named_device(device))
        return fit_labels(reward, labels, **how, progress=progress, worker=worker)
