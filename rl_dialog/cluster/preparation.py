"""What a data directory follows from: its logs, rewards, splits and tokens, as settings; and what the two
passes over the logs are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_dialog.cluster.data_directory import Tokenising
from rl_dialog.cluster.scoring import Scoring
from rl_dialog.config import to_dict
from rl_dialog.data.building import recipe_of
from rl_dialog.data.readers import Bad, LogFile, Skipped
from rl_dialog.errors import UserError
from rl_dialog.own import files_of_own
from rl_dialog.rewards import REWARDS, choosing

# no finished part of a run follows from them
FREE = ("overwrite", "num_cpus", "num_workers", "address", "quiet", "report", "pairs")


@dataclass(frozen=True)
class Preparation:
    """What to read, and how to score, split and tokenise it."""

    logs: tuple[str, ...] = ()
    """Files and folders with logs of any known format (plain, gzipped or zipped), and stores of served chats:
    sqlite:///chats.db, or postgresql://user:password@host/database, whose password is written nowhere."""
    reader: str | None = None
    """Read every file with this reader (rl_dialog/data/README.md) instead of deciding by its content;
    module:function is one of your own."""
    rewards: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(REWARDS))
    """Weight of each reward in a reply's total, e.g. `--rewards.vote 1`; 0 computes and reports it without
    adding it; nan here: not computed. Without any: logged 1. `--rewards.MODULE:FUNCTION 1` is one of your own
    (rl_dialog/rewards/README.md)."""
    reward: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["-r"])] = ()
    """Another way to name rewards: `-r NAME ... -w WEIGHT ...`, for users of the 2019 code: its names
    (reward_user_ha) are understood."""
    weight: Annotated[tuple[float, ...], tyro.conf.arg(aliases=["-w"])] = ()
    """A weight for each of `reward`; without any, 1 each."""
    scorers: tuple[str, ...] = ()
    """Models behind rewards instead of the built-in ones: sentiment=PATH, toxicity=PATH (classifiers),
    encoder=PATH; a folder or a hub name each."""
    label_weights: tuple[str, ...] = ()
    """What each label of a classifier counts, e.g. joy=1 anger=-1 surprise=0, where its labels are not
    positive, negative, toxic or the like."""
    compat: Literal["", "2019", "2019-self-play"] = ""
    """2019: rewards as the 2019 code computed them, defects and normalisation over the whole file included;
    2019-self-play: as its bots got them."""
    normalise: tuple[str, ...] = ()
    """zscore, min_max or rank for every reward, NAME=KIND for one; fitted on the training split, applied to
    all. By default rewards stay raw."""
    normalisers: str = ""
    """A data directory (or its manifest.json) whose fitted normalisers to use, for logs that come later;
    instead of --normalise."""
    rating: str | None = None
    """Which of a conversation's ratings the reward `rating` reads; by default the mean of all."""
    tokenizer: str | None = None
    """Hub name or folder; by default a byte-level BPE tokenizer is trained on the train split."""
    vocab_size: int = 4096
    """Size of a tokenizer that is trained, at least 262: then each character is a token, as text games want
    it."""
    max_length: int = 1024
    """Longest row in tokens; longer dialogs become several overlapping windows."""
    teachers: tuple[str, ...] = ()
    """Ask teachers about every message, for hierarchical models to learn from (--model.emotion_weight,
    --model.embedding_weight): emotion, embedding, each with or without a model of its own, emotion=PATH (a
    classifier), embedding=PATH (an encoder); a folder or a hub name each."""
    split: str = "hash"
    """hash: drawn, by what --split_by says. declared: the data's own splits, hash where it has none."""
    split_by: Literal["auto", "first_turn", "dialog"] = "auto"
    """What stays on one side. first_turn: all that begins with the same user turn. dialog: equal dialogs, for
    worlds where all begin alike. auto: first_turn, or dialog where that would leave a split empty."""
    validation: float = 0.05
    """Share of contexts held out for validation."""
    test: float = 0.05
    """Share of contexts held out for the final test."""
    seed: int = 0
    """Another seed draws another split."""
    strict: bool = False
    """Stop at the first record that cannot be read instead of putting it into quarantine.jsonl."""
    shard_rows: int = 5000
    """Dialogs per shard; one shard is tokenised by one worker."""
    max_line_bytes: int = 64 << 20
    """A line longer than this is quarantined."""
    record_seconds: float = 60.0
    """A record that takes longer to score or to tokenise is quarantined; 0: no limit."""

    @property
    def models(self) -> dict[str, Any]:
        """What stands behind the rewards."""
        return {
            "rating": self.rating,
            "compat": self.compat,
            "scorers": self.scorers,
            "label_weights": choosing.read_label_weights(self.label_weights),
        }


def check_logs(
    config: Preparation,
    logs: Sequence[LogFile],
    bad: Sequence[Bad],
    skipped: Sequence[Skipped],
    out: Path,
    *,
    overwrite: bool,
) -> None:
    """Raises UserError where there is nothing to read, or where it would be overwritten."""
    if config.strict and bad:
        raise UserError(f"{bad[0]} (a strict run stops at the first bad file)")
    if not logs:
        unread = [*map(str, bad), *(f"{skip.file}: {skip.reason}" for skip in skipped)]
        others = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        reason = f": {unread[0]}{others}" if unread else ""
        raise UserError(f"expected logs in {', '.join(config.logs)}, found none that can be read{reason}")
    inside = next(
        (
            log.path
            for log in logs
            if Path(log.path).is_relative_to(out) or Path(log.path).resolve().is_relative_to(out.resolve())
        ),
        None,
    )
    if inside and overwrite:
        raise UserError(
            f"{inside} is a log inside {out}, which --overwrite would replace: choose another --output_dir"
        )


def weights_of(config: Preparation) -> dict[str, float] | None:
    """The weight of each reward; None where none is named."""
    return choosing.read_weights(config.rewards, names=config.reward, weights=config.weight) or None


def passes(config: Preparation, weights: dict[str, float]) -> dict[str, Any]:
    """How the logs become rows: what `fill_directory` is told."""
    names = ("split", "split_by", "validation", "test", "seed", "strict", "max_line_bytes", "record_seconds")
    splitting = {name: getattr(config, name) for name in names}
    kinds = choosing.kinds_of(weights, config.normalise, compat="" if config.normalisers else config.compat)
    ranked = tuple(name for name, kind in kinds.items() if kind == "rank")
    return {
        "scoring": Scoring(weights, ranked, **config.models, **splitting),
        "tokenising": Tokenising(
            config.tokenizer, config.vocab_size, config.max_length, config.shard_rows, config.teachers
        ),
        "kinds": kinds,
        "normalisers": choosing.load_normalisers(config.normalisers, weights) if config.normalisers else {},
    }


def recipe(config: Preparation, logs: Sequence[LogFile], weights: dict[str, float]) -> str:
    """All that the rows follow from."""
    settings = {name: value for name, value in to_dict(config).items() if name not in FREE}
    models = [entry.partition("=")[2] for entry in (*config.scorers, *config.teachers)]
    models += [config.tokenizer, config.normalisers]
    written = files_of_own([*weights, config.reader or ""])
    return recipe_of(settings, weights, logs, paths=[*written, *filter(None, models)])
