"""Logs of any known format to a data directory: scored, split and tokenised Parquet shards with a manifest.

    python -m pipelines.prepare --logs chats/ --output_dir data/chats --rewards.vote 1 --rewards.sentiment 0.5
    python -m pipelines.prepare --logs sqlite:///chats.db --output_dir data/served --rewards.vote 1

`rl_dialog/data/shards.py` describes what it writes and reads it back; `rl_dialog/rewards/README.md` defines
the rewards.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.data_directory import Tokenising, fill_directory, write_pairs
from rl_dialog.cluster.scoring import WORK, Scoring
from rl_dialog.config import save_config, to_dict
from rl_dialog.data.building import building, recipe_of
from rl_dialog.data.database import database_url, shown_url
from rl_dialog.data.manifest_report import headline, show_manifest
from rl_dialog.data.readers import Bad, LogFile, find_logs
from rl_dialog.data.shards import FORMAT, MANIFEST, VERSION
from rl_dialog.data.tokenize import LEAST_VOCABULARY
from rl_dialog.errors import UserError
from rl_dialog.own import files_of_own
from rl_dialog.rewards import REWARDS, choosing
from rl_dialog.run import OnCluster, Output, at_least, progress, require, run

# no finished part of a run follows from them
FREE = ("overwrite", "num_cpus", "num_workers", "address", "quiet", "report", "pairs")


@dataclass(frozen=True)
class PrepareConfig(Output, OnCluster):
    logs: tuple[str, ...] = ()
    """Files and folders with logs of any known format (plain, gzipped or zipped), and stores of served chats:
    sqlite:///chats.db, or postgresql://user:password@host/database, whose password is written nowhere."""
    reader: str | None = None
    """Read every file with this reader instead of deciding by its content."""
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
    report: bool = False
    """Also write OUT/report: distributions, correlations, examples at both ends, human labels, and the hacks
    that each reward falls for."""
    pairs: bool = False
    """Also write OUT/pairs/<split>.jsonl: replies to the same messages of which one earned more, as TRL's
    prompt, chosen and rejected."""
    rating: str | None = None
    """Which of a conversation's ratings the reward `rating` reads; by default the mean of all."""
    tokenizer: str | None = None
    """Hub name or folder; by default a byte-level BPE tokenizer is trained on the train split."""
    vocab_size: int = 4096
    """Size of a tokenizer that is trained, at least 262: then each character is a token, as text games want
    it."""
    max_length: int = 1024
    """Longest row in tokens; longer dialogs become several overlapping windows."""
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
    num_cpus: int | None = None
    """CPUs of a Ray that this run starts; by default all."""
    num_workers: int | None = None
    """Most actors per stage; by default one per CPU."""


def main(config: PrepareConfig) -> dict[str, Any]:
    """Writes the data directory; returns its headline figures.

    Raises UserError or OSError for what the user can fix.
    """
    began = time.perf_counter()
    _check(config)
    out = Path(config.output_dir).absolute()
    places = [path if "://" in path else str(Path(path).absolute()) for path in config.logs]
    logs, bad, skipped = find_logs(places, reader=config.reader)
    shown = tuple(shown_url(database_url(path)) if "://" in path else path for path in config.logs)
    config = replace(config, logs=shown)  # no password goes further
    _check_logs(config, logs, bad, out)
    weights = _weights(config)
    models = {"rating": config.rating, "compat": config.compat, "scorers": config.scorers}
    models["label_weights"] = choosing.read_label_weights(config.label_weights)
    rewards = choosing.load_rewards(weights, **models)
    passes = _passes(config, weights, models)
    with building(out, overwrite=config.overwrite, recipe=_recipe(config, logs, weights)) as directory:
        with connect(config.address or None, num_cpus=config.num_cpus):
            figures = fill_directory(directory, logs, bad, **passes, began=began)
        manifest = {"format": FORMAT, "version": VERSION, "settings": to_dict(config), **figures}
        manifest["skipped"] = [asdict(skip) for skip in skipped]
        save_config(config, directory / "prepare.yaml")
        (directory / MANIFEST).write_text(
            json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        if config.pairs:
            write_pairs(directory)
        if config.report:
            from rl_dialog.evaluation.reward_report import write_reward_report

            write_reward_report(directory, rewards)
        shutil.rmtree(directory / WORK)
    if not config.quiet:
        show_manifest(manifest, skipped, out)
    return headline(manifest, out)


def _check(config: PrepareConfig) -> None:
    require(config, logs="files, folders or stores with logs", output_dir="a directory to write")
    if config.split not in ("hash", "declared"):
        raise UserError(f"expected --split hash or declared, got {config.split!r}")
    if not (config.validation >= 0 and config.test >= 0 and config.validation + config.test < 1):
        shares = f"validation={config.validation} and test={config.test}"
        raise UserError(f"expected shares >= 0 with validation + test < 1, got {shares}")
    at_least(
        config, record_seconds=0, shard_rows=1, max_length=8, max_line_bytes=1, vocab_size=LEAST_VOCABULARY
    )
    at_least(config, num_cpus=1, num_workers=1)
    if config.normalise and config.normalisers:
        raise UserError(
            "expected --normalise to fit normalisers or --normalisers to use fitted ones, got both"
        )


def _check_logs(config: PrepareConfig, logs: Sequence[LogFile], bad: Sequence[Bad], out: Path) -> None:
    if config.strict and bad:
        raise UserError(f"{bad[0]} (a strict run stops at the first bad file)")
    if not logs:
        reason = f"; the first of {len(bad)} bad files is {bad[0]}" if bad else ""
        raise UserError(f"expected logs in {', '.join(config.logs)}, found none that can be read{reason}")
    inside = next((log.path for log in logs if Path(log.path).is_relative_to(out)), None)
    if inside and config.overwrite:
        raise UserError(
            f"{inside} is a log inside {out}, which --overwrite would replace: choose another --output_dir"
        )


def _weights(config: PrepareConfig) -> dict[str, float]:
    weights = choosing.read_weights(config.rewards, names=config.reward, weights=config.weight)
    if not weights and not config.quiet:
        print("no --rewards given: a reply's reward is the one its log has (logged 1)")
    return weights or {"logged": 1.0}


def _passes(config: PrepareConfig, weights: dict[str, float], models: dict[str, Any]) -> dict[str, Any]:
    """How the logs become rows."""
    names = ("split", "split_by", "validation", "test", "seed", "strict", "max_line_bytes", "record_seconds")
    splitting = {name: getattr(config, name) for name in names}
    kinds = choosing.kinds_of(weights, config.normalise, compat="" if config.normalisers else config.compat)
    ranked = tuple(name for name, kind in kinds.items() if kind == "rank")
    return {
        "scoring": Scoring(weights, ranked, **models, **splitting),
        "tokenising": Tokenising(config.tokenizer, config.vocab_size, config.max_length, config.shard_rows),
        "kinds": kinds,
        "normalisers": choosing.load_normalisers(config.normalisers, weights) if config.normalisers else {},
        "concurrency": config.num_workers,
        "progress": partial(progress, unit="dialogs", quiet=config.quiet),
    }


def _recipe(config: PrepareConfig, logs: Sequence[LogFile], weights: dict[str, float]) -> str:
    settings = {name: value for name, value in to_dict(config).items() if name not in FREE}
    models = [entry.partition("=")[2] for entry in config.scorers] + [config.tokenizer, config.normalisers]
    written = files_of_own([*weights, config.reader or ""])
    return recipe_of(settings, weights, logs, paths=[*written, *filter(None, models)])


if __name__ == "__main__":
    run(PrepareConfig, main)
